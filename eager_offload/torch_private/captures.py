"""Devices, streams, and the graphs into which they are captured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, cast

import torch

from eager_offload.torch_private import release_of


class HostRegistration(NamedTuple):
    """The driver's calls that pin existing memory; each returns 0, or the number of an error."""

    #: Address, bytes and flags.
    register: Callable[[int, int, int], object]
    #: The address.
    unregister: Callable[[int], object]


def host_registration() -> HostRegistration | None:
    """Returns the calls that pin memory not allocated by torch; ``None`` if this torch or this machine has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # Devices of other makers have CUDA's call, or none.
    cudart = None if accelerator is None else getattr(torch.get_device_module(accelerator), "cudart", None)
    if cudart is None:
        return None
    runtime = cudart()
    register, unregister = (getattr(runtime, name, None) for name in ("cudaHostRegister", "cudaHostUnregister"))
    return None if register is None or unregister is None else HostRegistration(register, unregister)


def accelerator_in_use() -> bool:
    """Returns whether this process uses an accelerator already, without initializing one."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    module = torch.get_device_module(accelerator)
    return bool(getattr(module, "is_initialized", module.is_available)())


def is_capturing(index: int | None) -> bool:
    """Returns whether the calling thread's current stream is being captured into a graph.

    Args:
        index: the index of an accelerator in use; ``None`` for the selected one.
    """
    if hasattr(torch.Stream, "is_capturing"):
        return torch.accelerator.current_stream(index).is_capturing()
    asks: Callable[[], bool] = getattr(torch.get_device_module(), "is_current_stream_capturing", bool)
    return asks()


def stream_is_capturing(stream: torch.Stream) -> bool:
    """Returns whether ``stream``, of an accelerator in use, is being captured into a graph."""
    if hasattr(torch.Stream, "is_capturing"):
        return stream.is_capturing()
    before = torch.accelerator.current_stream(stream.device_index)
    selected = torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)  # and its device
    try:
        return is_capturing(stream.device_index)
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(selected)


@functools.cache
def graph_kind() -> type[Any] | None:
    """Returns the class of graphs for the accelerator of this process; ``None`` if this torch has none.

    It is ``torch.accelerator.Graph`` from 2.13 on if the backend has registered one (CUDA has not, to 2.13), else
    ``torch.cuda.CUDAGraph``.
    """
    kind: Any = getattr(torch.accelerator, "Graph", None)
    with suppress(RuntimeError, NotImplementedError):
        if kind is not None and kind() is not None:
            return cast(type[Any], kind)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.cuda.CUDAGraph if accelerator is not None and accelerator.type == "cuda" else None


def new_graph(keep: bool) -> Any:
    """Returns an empty graph. With ``keep`` it can be dumped, and its first replay instantiates it."""
    kind = graph_kind()
    assert kind is not None
    graph = kind(keep_graph=keep)
    if keep and graph_memory_pool() is None:  # on CUDA that is a mode of the process, in which graphs leak
        graph.enable_debug_mode()
    return graph


def graph_memory_pool() -> tuple[int, int] | None:
    """Returns a handle of memory that graphs share, for CUDA; other backends name it when a capture begins."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.cuda.graph_pool_handle() if accelerator is not None and accelerator.type == "cuda" else None


def begin_graph(graph: Any, memory: tuple[int, int] | None, mode: str) -> None:
    """Begins to capture the current stream of the selected device into ``graph``."""
    if isinstance(graph, torch.cuda.CUDAGraph):
        graph.capture_begin(cast(Any, memory), mode)
    else:
        graph.graph_pool, graph.capture_error_mode = memory, mode
        graph.capture_begin()


def forget_workspaces() -> None:
    """Frees cuBLAS's workspaces: torch has one for each stream and thread of CUDA, and a graph keeps its address.

    If the first product of a capture finds no workspace, the graph has one of its own; if none is left behind the
    capture, no product of eager code or of another graph uses it. In 2.13 a graph that goes takes the workspace of its
    stream along, whichever graphs use it (pytorch#193402).
    """
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:  # in builds for CUDA
        clear()


def release_failed_graph(graph: Any, index: int, memory: tuple[int, int] | None, *, ended: bool) -> None:
    """Gives back the memory of a graph whose capture has failed, at its end if ``ended``, else at its beginning.

    Up to 2.13 torch keeps the device memory of such a graph on CUDA for good (pytorch#180395, #190308). In 2.11 the
    allocator and the generator go on as if the capture were under way (pytorch#171263), and the generator refuses to
    draw in eager code. Builds for ROCm were fixed without a new version.
    """
    graph.reset()
    release = release_of(torch.__version__)
    if memory is None or torch.version.hip is not None or release > (2, 13):
        return
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, memory)  # raises where the allocator knows that the capture is over
        ended = True
    if ended:
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(index, memory)
    if release < (2, 13):
        _never_ended.append(graph)
        _end_capture_of_generator(index)


#: Graphs that must not be freed: torch's allocator of pinned memory asks them, by address, whether a stream is
#: captured.
_never_ended: list[Any] = []


def _end_capture_of_generator(index: int) -> None:
    """Captures a graph of one kernel, after which the generator of a device does not take a capture to be under way."""
    graph, of_cuda = torch.cuda.CUDAGraph(), cast(Any, torch.cuda)
    with suppress(RuntimeError), torch.cuda.stream(of_cuda.Stream(index)):
        cell = torch.empty(1, device=torch.device("cuda", index))
        graph.capture_begin(capture_error_mode="thread_local")
        cell.zero_()
        graph.capture_end()
    graph.reset()


@contextmanager
def overriding_stale_streams() -> Iterator[None]:
    """Makes a captured backward run on the stream of the capture, although a node, such as that of a parameter, was
    made on another stream earlier: to wait for that stream would invalidate the capture (pytorch#180090).
    """
    if not hasattr(torch._C, "_set_override_stale_capture_stream"):
        yield
        return
    before = torch._C._override_stale_capture_stream()
    torch._C._set_override_stale_capture_stream(True)
    try:
        yield
    finally:
        torch._C._set_override_stale_capture_stream(before)
