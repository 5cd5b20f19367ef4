"""Captures the work that a training step enqueues on an accelerator as a graph, and replays it with new inputs."""

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
from eager_offload.graphs.pools import (
    CapturePool,
    CaptureStatus,
    GraphPoolHandle,
    capture_pool_for_handle,
    capture_status,
    graph_pool_handle,
    is_capturing,
    release_graph_pool_handle,
)
from eager_offload.graphs.step import CapturedStep, DeviceScalar, StaticInputs, capture_step
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
