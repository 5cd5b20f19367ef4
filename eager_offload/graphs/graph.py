"""Captures a graph once and launches it repeatedly."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import torch

from eager_offload.errors import CaptureInputError, CaptureStateError, NoAcceleratorError
from eager_offload.graphs.pools import (
    CapturePool,
    CaptureStatus,
    GraphPoolHandle,
    ReplayOrder,
    capture_pool_for_handle,
    capture_status,
    check_outside,
    require_runtime,
)
from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.runtime.captures import Capture, CaptureMode


class CapturedGraph:
    """The result of a capture, made by ``GraphCaptureGuard`` and ``make_graphed_callable``.

    A replay reads and writes the addresses of the capture: copy new inputs there (``StaticInputs``, ``DeviceScalar``),
    and keep the tensors alive. ``make_graphed_callable`` and ``CapturePool.record_buffer`` keep them. The memory of a
    graph is freed with the graph, but not before its last replay is over.
    """

    def __init__(
        self, runtime: AcceleratorRuntime, capture: Capture, pool: CapturePool | None, *, can_dump: bool
    ) -> None:
        self._runtime = runtime
        self._graph = capture.graph
        self._stream = capture.stream
        self.pool = pool
        """The pool of the capture."""
        self._can_dump = can_dump
        self._order = ReplayOrder() if pool is None else pool.order
        if self._order.latest is None:
            behind = self._order.latest = runtime.record(self._stream)
            behind.note_over()  # done already: the capture began after a synchronize, and ran nothing
        self.num_replays = 0
        """The number of launches."""
        self.is_uploaded = False
        """Whether ``upload`` has sent the graph to the device."""
        #: The result of the captured function; each replay overwrites its tensors.
        self.result: Any = None
        #: Objects that replays need alive.
        self._uses: list[object] = [pool]

    def launch(self, stream: torch.Stream | None = None) -> None:
        """Enqueues a replay; the host does not wait.

        The replay runs after the last launch of each graph of the same pool, on any stream, and after the work enqueued
        on the current stream.

        Args:
            stream: the stream of the replay, on the device of the capture; by default, the current one. Other streams
                that read the results must wait for this stream.

        Raises:
            CaptureInputError: ``stream`` is on another device.
            CaptureStateError: called in a capture.
        """
        runtime, device = self._runtime, self._stream.device
        here = runtime.current_stream(device)
        there = here if stream is None else stream
        if there.device != device:
            raise CaptureInputError(f"a graph that was captured on {device} was launched on a stream of {there.device}")
        check_outside("a graph was launched", there)
        runtime.poll()
        with self._order.lock:
            if there != here:
                runtime.wait(there, runtime.record(here))
            if self._order.latest is not None:
                runtime.wait(there, self._order.latest)
            with runtime.enter(there):
                self._graph.replay()
            self._order.latest = runtime.record(there)
            self.num_replays += 1

    def wait(self) -> None:
        """Makes the current stream wait for the last replay of each graph of the same pool.

        After the wait, inputs of a replay may be overwritten. The stream of the replay does not need the wait.
        """
        with self._order.lock:
            if self._order.latest is not None:
                self._runtime.wait(self._runtime.current_stream(self._stream.device), self._order.latest)

    def upload(self) -> bool:
        """Sends the graph to the device before its first launch, which then takes no longer than later ones.
        Idempotent.

        Returns:
            Whether the graph is on the device. ``False`` if the graph is not a ``torch.cuda.CUDAGraph`` or CUDA's
            library was not found; then the first launch sends it.

        Raises:
            CaptureStateError: called in a capture.
        """
        check_outside("a graph was uploaded", self._runtime.current_stream(self._stream.device))
        if not self.is_uploaded:
            self.is_uploaded = _upload(self._graph, self._runtime.current_stream(self._stream.device))
        return self.is_uploaded

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Writes the nodes and edges to a file in the backend's format (on CUDA, Graphviz).

        Raises:
            CaptureStateError: the graph was not captured with ``debug=True``.
        """
        if not self._can_dump:
            raise CaptureStateError("only a graph that was captured with debug=True can be dumped")
        self._graph.debug_dump(os.fspath(path))

    def keep(self, *used: object) -> None:
        """Keeps ``used`` alive as long as replays may need them."""
        self._uses.extend(used)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Keeps the used objects alive until the last replay is over. May run at any point: takes no lock, does not
        wait, and does not invalidate a capture.

        A ``weakref.finalize`` would not do, because its arguments may refer to the graph. The default argument is
        needed at the end of the process, when the names of this module may be gone.
        """
        if not is_finalizing():
            self._order.outlive(self._runtime, [self._graph, *self._uses])


def _upload(graph: Any, stream: torch.Stream) -> bool:
    """Enqueues the upload of ``graph``, by a CUDA call that torch does not wrap; returns whether it succeeded."""
    raw = getattr(graph, "raw_cuda_graph_exec", None)
    if raw is None or torch.version.cuda is None:
        return False
    with suppress(RuntimeError, ImportError, OSError, AttributeError):
        name = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
        of_cuda: Any = torch.cuda.Stream
        library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")  # already loaded by torch
        library.cudaGraphUpload.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        return int(library.cudaGraphUpload(int(raw()), int(of_cuda(**name).cuda_stream))) == 0
    return False


class GraphCaptureGuard:
    """Captures the work that is enqueued in a ``with``, on a separate stream, which is the current one inside.

    The capture ends with ``finish`` or with the ``with``; an exception abandons the capture and propagates. Then the
    previous stream is current again. The host waits for the device at the beginning.

    Other streams join the capture by waiting for one of its events, and must be waited for before its end. Memory that
    is allocated inside belongs to the graph. Run the same work once before, because libraries initialize themselves on
    first use.

    Args:
        stream: the stream to capture, not the default one; by default, a stream that the device has for captures.
        mode: the threads whose unsafe calls the driver refuses.
        pool: resources that the graph shares with others; see ``CapturePool``.
        debug: whether the graph can be dumped.

    Raises:
        NoAcceleratorError: this process has no accelerator to capture.
        CaptureInputError: ``pool`` is a handle without a pool.
    """

    def __init__(
        self,
        stream: torch.Stream | None = None,
        mode: CaptureMode = CaptureMode.THREAD_LOCAL,
        pool: CapturePool | GraphPoolHandle | None = None,
        debug: bool = False,
    ) -> None:
        self._runtime = capturing_runtime()
        self._stream, self._mode, self._debug = stream, CaptureMode(mode), debug
        self._pool = pool_of(pool)
        self._capture: Capture | None = None
        self._graph: CapturedGraph | None = None
        self._has_begun = False

    def __enter__(self) -> Self:
        """Begins the capture.

        Raises:
            CaptureStateError: another capture is active, the stream is the default one, the guard was entered before,
                or autocast caches casts.
            PoolSealedError: the pool is sealed.
            PoolInUseError: another capture uses the pool.
        """
        if self._has_begun:
            raise CaptureStateError("a guard was entered a second time: it makes one graph")
        check_autocast(self._runtime.device_type)
        stream, pool = capture_stream() if self._stream is None else self._stream, self._pool
        if pool is not None:
            pool.begin(self)
        memory = None if pool is None else pool.memory
        try:
            self._capture = self._runtime.begin_capture(stream, self._mode, memory, keep=self._debug)
        except BaseException:
            if pool is not None:
                pool.end(None, memory)
            raise
        self._has_begun = True
        return self

    def finish(self) -> CapturedGraph:
        """Ends the capture if the ``with`` has not yet, and seals the pool.

        Returns:
            The graph, the same for each call.

        Raises:
            CaptureInvalidatedError: a call inside was not permitted.
            UnjoinedStreamError: a stream has not joined.
            CaptureStateError: the capture has not begun, has failed, or is on another thread.
        """
        if self._graph is not None:
            return self._graph
        if self._capture is None:
            why = "the capture has failed" if self._has_begun else "no capture has begun"
            raise CaptureStateError(f"there is no graph: {why}")
        graph = None
        try:
            self._runtime.end_capture(self._capture)
            graph = self._graph = CapturedGraph(self._runtime, self._capture, self._pool, can_dump=self._debug)
        finally:
            self._release(graph)
        return graph

    def status(self) -> CaptureStatus:
        """Returns the status of this capture: ``NONE`` before and after it."""
        return CaptureStatus.NONE if self._capture is None else capture_status(self._capture.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._capture is None:
            return
        if kind is None:
            self.finish()
            return
        try:
            self._runtime.abandon_capture(self._capture)
        finally:
            self._release(None)

    def _release(self, graph: CapturedGraph | None) -> None:
        assert self._capture is not None
        if not self._capture.is_over:  # still open: this thread does not own the capture
            return
        if self._pool is not None:
            self._pool.end(graph, self._capture.memory)
        self._capture = None


def make_graphed_callable(
    fn: Callable[[], Any],
    stream: torch.Stream | None = None,
    mode: CaptureMode = CaptureMode.THREAD_LOCAL,
    pool: CapturePool | GraphPoolHandle | None = None,
) -> CapturedGraph:
    """Captures one call of ``fn`` as a graph. The work of ``fn`` is recorded and does not run.

    Args:
        fn: a function without arguments, which reads tensors at fixed addresses (such as ``StaticInputs.values``). The
            graph keeps ``fn`` alive. Call it once before, so that initializations are done.
        stream, mode, pool: as in ``GraphCaptureGuard``.

    Returns:
        The graph. Its ``result`` is the return value of ``fn``, whose tensors each launch overwrites.

    Raises:
        NoAcceleratorError: this process has no accelerator to capture.
        GraphError: as in ``GraphCaptureGuard``. Errors of ``fn`` propagate.
    """
    with GraphCaptureGuard(stream, mode, pool) as guard:
        result = fn()
    graph = guard.finish()
    graph.result = result
    graph.keep(fn, result)
    return graph


def capturing_runtime() -> AcceleratorRuntime:
    """Returns the runtime of the accelerator; raises ``NoAcceleratorError`` if this torch cannot capture its work."""
    runtime = require_runtime("a capture")
    if not runtime.captures:
        raise NoAcceleratorError(
            f"torch {torch.__version__} makes no graphs on {runtime.device_type!r}: it takes CUDA, or a "
            "backend that has registered them with torch.accelerator.Graph (torch 2.13)"
        )
    return runtime


def check_autocast(device_type: str) -> None:
    """Raises ``CaptureStateError`` if autocast would cache casts across the beginning or end of a capture.

    The graph would read a cast from before, which is freed with its autocast; eager code would read a cast of the
    capture, which was never computed.
    """
    if torch.is_autocast_enabled(device_type) and torch.is_autocast_cache_enabled():
        raise CaptureStateError(
            f"a capture was begun inside of torch.autocast({device_type!r}), which caches casts of parameters that a "
            "graph cannot rely on: enter autocast inside of the captured code, or with cache_enabled=False"
        )


def pool_of(pool: CapturePool | GraphPoolHandle | None) -> CapturePool | None:
    if not isinstance(pool, GraphPoolHandle):
        return pool
    found = capture_pool_for_handle(pool)
    if found is None:
        raise CaptureInputError(f"{pool} names no pool: it was released, or never made by graph_pool_handle()")
    return found


def capture_stream() -> torch.Stream:
    """Returns the stream for captures on the selected device: always the same, because memory that graphs share belongs
    to one stream."""
    return require_runtime("a capture").separate_stream(torch.accelerator.current_stream().device)
