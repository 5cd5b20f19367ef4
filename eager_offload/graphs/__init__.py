"""Captures what a training step enqueues on an accelerator as a graph, and replays it with new inputs."""

from __future__ import annotations

from eager_offload.errors import (
    CaptureInputError,
    CaptureInvalidatedError,
    CaptureStateError,
    GraphError,
    HostAllocationUnderCaptureError,
    NoAcceleratorError,
    PoolInUseError,
    PoolSealedError,
    ScheduleMismatchError,
    StaleEventError,
    UnjoinedStreamError,
)
from eager_offload.graphs.graph import CapturedGraph, GraphCaptureGuard, make_graphed_callable
from eager_offload.graphs.inputs import DeviceScalar, StaticInputs
from eager_offload.graphs.pools import (
    CapturePool,
    GraphPoolHandle,
    capture_pool_for_handle,
    graph_pool_handle,
    release_graph_pool_handle,
)
from eager_offload.graphs.status import CaptureStatus, capture_status, is_capturing
from eager_offload.graphs.step import CapturedStep, capture_step
from eager_offload.runtime.captures import CaptureMode

__all__ = [
    "CaptureInputError",
    "CaptureInvalidatedError",
    "CaptureMode",
    "CapturePool",
    "CaptureStateError",
    "CaptureStatus",
    "CapturedGraph",
    "CapturedStep",
    "DeviceScalar",
    "GraphCaptureGuard",
    "GraphError",
    "GraphPoolHandle",
    "HostAllocationUnderCaptureError",
    "NoAcceleratorError",
    "PoolInUseError",
    "PoolSealedError",
    "ScheduleMismatchError",
    "StaleEventError",
    "StaticInputs",
    "UnjoinedStreamError",
    "capture_pool_for_handle",
    "capture_status",
    "capture_step",
    "graph_pool_handle",
    "is_capturing",
    "make_graphed_callable",
    "release_graph_pool_handle",
]
