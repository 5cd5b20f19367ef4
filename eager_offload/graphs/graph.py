"""A graph: captured once, launched again and again."""

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
    """What a capture has ended in; ``GraphCaptureGuard`` and ``make_graphed_callable`` make it.

    A replay reads and writes the very addresses that the capture did: the caller copies other inputs there
    (``StaticInputs``, ``DeviceScalar``), and keeps the tensors alive.
    ``make_graphed_callable`` and ``CapturePool.record_buffer`` do so. Its memory goes when it goes, and what it uses
    stays until its last replay is over.
    """

    def __init__(
        self, runtime: AcceleratorRuntime, capture: Capture, pool: CapturePool | None, *, can_dump: bool
    ) -> None:
        self._runtime = runtime
        self._graph = capture.graph
        self._stream = capture.stream
        self.pool = pool
        """That with which it was captured."""
        self._can_dump = can_dump
        self._order = ReplayOrder() if pool is None else pool.order
        if self._order.latest is None:
            behind = self._order.latest = runtime.record(self._stream)
            behind.note_over()  # the host has waited for the device, and to capture runs nothing on the stream
        self.num_replays = 0
        """How many times it was launched."""
        self.is_uploaded = False
        """Whether ``upload`` has sent it to the device."""
        #: What the captured function returned: tensors that each replay writes anew.
        self.result: Any = None
        #: What a replay needs to live: that which was captured, with all that it refers to.
        self._uses: list[object] = [pool]

    def launch(self, stream: torch.Stream | None = None) -> None:
        """Enqueues a replay; the host waits for nothing.

        It comes after the last launch of this graph and of those that share its pool, on whichever streams those were,
        and after all that is enqueued on the current stream.

        Args:
            stream: on which it runs, of the device of the capture; the current one, where it is left out. Another
                stream that reads the results has to wait for this one.

        Raises:
            CaptureInputError: ``stream`` is of another device.
            CaptureStateError: in a capture.
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
        """Has the current stream wait for the last replay of this graph and of those that share its pool.

        What a replay reads may be written to from there on: on the stream of the replay that needs no wait.
        """
        with self._order.lock:
            if self._order.latest is not None:
                self._runtime.wait(self._runtime.current_stream(self._stream.device), self._order.latest)

    def upload(self) -> bool:
        """Sends the graph to the device before its first launch, once, so that this one takes no longer than others.

        Returns:
            Whether it is there. It takes a graph of ``torch.cuda.CUDAGraph`` and CUDA's own call, from its library;
            where one is missing, the first launch does it.

        Raises:
            CaptureStateError: in a capture.
        """
        check_outside("a graph was uploaded", self._runtime.current_stream(self._stream.device))
        if not self.is_uploaded:
            self.is_uploaded = _upload(self._graph, self._runtime.current_stream(self._stream.device))
        return self.is_uploaded

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Writes the nodes and edges to a file, in the backend's form: on CUDA as a drawing for Graphviz.

        Raises:
            CaptureStateError: the capture was not in debug mode.
        """
        if not self._can_dump:
            raise CaptureStateError("a graph can be dumped that was captured with debug=True")
        self._graph.debug_dump(os.fspath(path))

    def keep(self, *used: object) -> None:
        """Has ``used`` live as long as a replay may need it."""
        self._uses.extend(used)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Has what a replay uses outlive it. This runs anywhere: takes no lock, waits for nothing, spoils no capture.

        No finalizer beside the object does: what the function refers to may be what holds the graph. When a process
        ends, the names of this module may have gone before.
        """
        if not is_finalizing():
            self._order.outlive(self._runtime, [self._graph, *self._uses])


def _upload(graph: Any, stream: torch.Stream) -> bool:
    """Enqueues the upload of ``graph`` on ``stream``, for which torch has no call, and CUDA has; whether it could."""
    raw = getattr(graph, "raw_cuda_graph_exec", None)
    if raw is None or torch.version.cuda is None:
        return False
    with suppress(RuntimeError, ImportError, OSError, AttributeError):
        name = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
        of_cuda: Any = torch.cuda.Stream
        library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")  # that which torch has loaded
        library.cudaGraphUpload.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        return int(library.cudaGraphUpload(int(raw()), int(of_cuda(**name).cuda_stream))) == 0
    return False


class GraphCaptureGuard:
    """Captures what is enqueued inside of a ``with``, on a stream of its own, which is the current one there.

    The capture ends with ``finish``, or else with the ``with``; an exception abandons it, and is what the caller gets.
    Afterwards the stream that was current is current again. The host waits for the device at the begin.

    Other streams come in by waiting for an event of the capture, and join by being waited for. Memory that is allocated
    inside is the graph's own. Run the same once before a capture: libraries set themselves up when they are first used.

    Args:
        stream: to capture on, not the default one; each device has one for this, where it is left out.
        mode: whose unsafe calls the driver refuses.
        pool: what the graph shares with others; see ``CapturePool``.
        debug: whether the graph can be dumped.

    Raises:
        NoAcceleratorError: there is nothing to capture.
        CaptureInputError: ``pool`` is a handle that names none.
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
            CaptureStateError: inside of a capture, in the way of one, on the default stream, for the second time, or in
                an autocast that keeps casts.
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
        """Ends the capture, where the ``with`` has not, and seals the pool.

        Returns:
            The graph, the same at each call.

        Raises:
            CaptureInvalidatedError: a call inside of it was not permitted.
            UnjoinedStreamError: a stream has not joined.
            CaptureStateError: there is no graph: nothing has begun, or it has failed. Or on another thread.
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
        """Of this capture: ``NONE`` before and after it."""
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
        if not self._capture.is_over:  # on another thread, whose it is not
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
    """Runs ``fn`` once, under capture: what it enqueues is a graph, and has not run yet.

    Args:
        fn: without arguments: it reads tensors that stay, such as ``StaticInputs.values``. The graph holds it, and so
            all that it refers to. It has run before, so that what happens once has happened.
        stream, mode, pool: as ``GraphCaptureGuard`` has them.

    Returns:
        The graph; its ``result`` is what ``fn`` returned, the tensors of which each launch writes anew.

    Raises:
        NoAcceleratorError: there is nothing to capture.
        GraphError: as ``GraphCaptureGuard`` has it; what ``fn`` raises, it raises.
    """
    with GraphCaptureGuard(stream, mode, pool) as guard:
        result = fn()
    graph = guard.finish()
    graph.result = result
    graph.keep(fn, result)
    return graph


def capturing_runtime() -> AcceleratorRuntime:
    """The runtime of the accelerator; raises ``NoAcceleratorError`` where no graphs can be made of its work."""
    runtime = require_runtime("a capture")
    if not runtime.captures:
        raise NoAcceleratorError(
            f"torch {torch.__version__} makes no graphs on {runtime.device_type!r}: it takes CUDA, or a "
            "backend that has registered them with torch.accelerator.Graph (torch 2.13)"
        )
    return runtime


def check_autocast(device_type: str) -> None:
    """Raises ``CaptureStateError`` where casts outlive the capture, or come from before it.

    A graph would read those that were kept before it, which go with their autocast; and eager code those that were made
    in the capture, in which nothing stands.
    """
    if torch.is_autocast_enabled(device_type) and torch.is_autocast_cache_enabled():
        raise CaptureStateError(
            f"a capture was begun inside of torch.autocast({device_type!r}), which keeps casts of parameters that a "
            "graph cannot rely on: enter autocast inside of what is captured, or with cache_enabled=False"
        )


def pool_of(pool: CapturePool | GraphPoolHandle | None) -> CapturePool | None:
    if not isinstance(pool, GraphPoolHandle):
        return pool
    found = capture_pool_for_handle(pool)
    if found is None:
        raise CaptureInputError(f"{pool} names no pool: it was released, or never made by graph_pool_handle()")
    return found


def capture_stream() -> torch.Stream:
    """The one on which captures of the selected device begin: memory that graphs share belongs to one stream."""
    return require_runtime("a capture").separate_stream(torch.accelerator.current_stream().device)
