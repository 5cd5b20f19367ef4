"""Sends a graph to the device ahead of its first launch: torch has no call for that, CUDA has."""

from __future__ import annotations

import ctypes
import importlib
from contextlib import suppress
from typing import Any

import torch


def upload_graph(graph: Any, stream: torch.Stream) -> bool:
    """Enqueues the upload of ``graph`` on ``stream``; ``False`` where this cannot be done here."""
    raw = getattr(graph, "raw_cuda_graph_exec", None)
    if raw is None or torch.version.cuda is None:
        return False
    with suppress(RuntimeError, ImportError, OSError, AttributeError):
        name = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
        of_cuda: Any = torch.cuda.Stream
        executable, native = int(raw()), int(of_cuda(**name).cuda_stream)
        return _by_bindings(executable, native) or _by_library(executable, native)
    return False


def _by_bindings(executable: int, stream: int) -> bool:
    try:
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return False
    (error,) = runtime.cudaGraphUpload(runtime.cudaGraphExec_t(executable), runtime.cudaStream_t(stream))
    return int(error) == 0


def _by_library(executable: int, stream: int) -> bool:
    assert torch.version.cuda is not None
    library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")  # that which torch has loaded
    library.cudaGraphUpload.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return int(library.cudaGraphUpload(executable, stream)) == 0
