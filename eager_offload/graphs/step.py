"""A whole training step as a graph, offload included.

    warm up    real steps on the stream of the capture, the last of which is written down
    reserve    one slab of pinned memory, which the pool of the graph owns
    capture    does what the last warm-up did    -> CapturedStep

See [Note: copies of a graph] in ``engine/captured.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from eager_offload._torch import overriding_stale_streams
from eager_offload.errors import CaptureInputError, CaptureStateError
from eager_offload.graphs.graph import (
    CapturedGraph,
    GraphCaptureGuard,
    capture_stream,
    capturing_runtime,
    check_autocast,
    pool_of,
)
from eager_offload.graphs.inputs import DeviceScalar, StaticInputs
from eager_offload.graphs.pools import CapturePool, GraphPoolHandle
from eager_offload.graphs.saves import CapturedSaves
from eager_offload.graphs.status import CaptureStatus, capture_status
from eager_offload.offload import Offload
from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.runtime.captures import CaptureMode
from eager_offload.stats import KeepReason
from eager_offload.step_table import StepTable


class _Parts(NamedTuple):
    """What a captured step has until it is closed."""

    graph: CapturedGraph
    inputs: StaticInputs


class CapturedStep:
    """A step as a graph; ``capture_step`` makes it. A context manager, which closes it.

    ::

        step = graphs.capture_step(train, (x, y), offload=offload, scalars=[rate])
        for x, y in loader:
            rate.update(next_rate())
            loss = step(x, y)
    """

    def __init__(
        self,
        parts: _Parts,
        plans: tuple[StepTable, ...],
        kept: Mapping[KeepReason, int],
        scalars: Sequence[DeviceScalar],
    ) -> None:
        self._parts: _Parts | None = parts
        #: What the capture has done, for each forward of the step with its backward; empty without ``offload``.
        self.plans = plans
        #: Bytes as saved of what stays on the device, by reason: of one step. Empty without ``offload``.
        self.kept: Mapping[KeepReason, int] = MappingProxyType(dict(kept))
        #: As they were given.
        self.scalars = tuple(scalars)

    @property
    def plan(self) -> StepTable | None:
        """The first of ``plans``, of a step with one forward the only one; ``None`` where nothing was saved."""
        return self.plans[0] if self.plans else None

    @property
    def graph(self) -> CapturedGraph:
        """The graph.

        Raises:
            CaptureStateError: the step is closed.
        """
        return self._open().graph

    @property
    def result(self) -> Any:
        """What the step returned in the capture: tensors that each replay writes anew.

        Raises:
            CaptureStateError: the step is closed.
        """
        return self._open().graph.result

    def __call__(self, *inputs: Any) -> Any:
        """Copies ``inputs`` to where the graph reads them, launches it on the current stream, and returns ``result``.

        Raises:
            CaptureInputError: ``inputs`` are not as they were in the capture.
            CaptureStateError: in a capture, or the step is closed.
        """
        graph, static = self._open()
        if capture_status() is CaptureStatus.NONE:
            graph.wait()  # another stream may still read the inputs before these
        static.update(inputs)
        graph.launch()
        return graph.result

    def launch(self, stream: torch.Stream | None = None) -> None:
        """A replay with the inputs as they are; see ``CapturedGraph.launch``.

        Raises:
            CaptureInputError: ``stream`` is of another device.
            CaptureStateError: in a capture, or the step is closed.
        """
        self._open().graph.launch(stream)

    def close(self) -> None:
        """Lets go of the graph, its memory, its inputs and results; what a replay uses stays until that is over.

        Pinned memory goes too, but for what a ``pool`` that was given has lent: that is its own until
        ``clear_buffers``. Idempotent. A step that is garbage collected has no need of it.
        """
        self._parts = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> _Parts:
        if self._parts is None:
            raise CaptureStateError("a captured step was used that is closed: capture it again")
        return self._parts

    def __repr__(self) -> str:
        if self._parts is None:
            return "<CapturedStep: closed>"
        return f"<CapturedStep: {self._parts.graph.num_replays} replays>"


def capture_step(
    fn: Callable[..., Any],
    inputs: Sequence[Any] = (),
    *,
    offload: Offload | None = None,
    scalars: Sequence[DeviceScalar] = (),
    warmup: int = 3,
    mode: CaptureMode = CaptureMode.THREAD_LOCAL,
    pool: CapturePool | GraphPoolHandle | None = None,
    debug: bool = False,
) -> CapturedStep:
    """Runs a step a few times, then captures it as a graph that replays with new inputs.

    Args:
        fn: the step: forward, backward and, where they belong to it, the optimizer and ``zero_grad``. It is called as
            ``fn(*inputs)``, with copies of ``inputs`` that stay, and does the same each time.
        inputs: the arguments of ``fn``: tensors and plain values in tuples, lists and dicts, of any depth.
        offload: entered around ``fn``. The last warm-up is written down, and the capture is held to it: what it moves
            crosses the link in each replay, and does not depend on how fast the host or the link was.
            ``offload.stats()`` counts the warm-ups alone.
        scalars: the numbers that ``fn`` reads and that change between replays; they live as long as the step.
        warmup: how many real steps come first, with ``inputs``, on the stream of the capture. With ``offload`` one at
            least, and more of them let it learn.
        mode, pool, debug: as ``GraphCaptureGuard`` has them. Without ``pool`` pinned memory goes with the step; a pool
            that was made with ``host_bytes`` lends it.

    Returns:
        The step. Nothing was replayed yet, so the state is that after the warm-ups.

    Raises:
        NoAcceleratorError: there is nothing to capture.
        CaptureInputError: ``inputs``, ``scalars``, ``warmup`` or ``pool`` is not what it has to be.
        CaptureStateError: ``offload`` uses a disk or pageable memory, is traced or entered already, or an
            autocast is entered that keeps casts.
        ScheduleMismatchError: two warm-ups, or the last one and the capture, are not one sequence of saves and unpacks.
        CapacityError: ``pool`` has no room for what leaves.
        GraphError: as ``GraphCaptureGuard`` has it; what ``fn`` raises, this raises. Gradients that a capture has left
            then hold nothing, as nothing of it has run: let go of them before the next step.
    """
    runtime, shared, mode = capturing_runtime(), pool_of(pool), CaptureMode(mode)
    _check_arguments(inputs, offload, scalars, warmup)
    if shared is not None:
        shared.check_open("a step was captured")
    if capture_status() is not CaptureStatus.NONE:
        raise CaptureStateError("a step was captured inside of a capture: what would a replay of it begin?")
    check_autocast(runtime.device_type)
    stream, static = capture_stream(), StaticInputs(tuple(inputs))
    if offload is not None and not offload.config.enabled:
        offload = None
    with overriding_stale_streams():
        saves = None if offload is None else CapturedSaves(offload, stream, runtime, warmup)
        _warm_up(fn, static, saves, warmup, runtime, stream)
        nbytes = 0 if saves is None else saves.slot_bytes
        owner = CapturePool(nbytes) if shared is None and nbytes else shared
        guard = GraphCaptureGuard(stream, mode, owner, debug)
        with nullcontext() if owner is None else owner.adding():
            slab = None if owner is None or not nbytes else _pinned(owner, nbytes)
            graph = _capture(fn, static, saves, slab, guard)
    graph.keep(fn, static, *scalars, graph.result)
    plans, kept = ((), dict[KeepReason, int]()) if saves is None else (saves.tables, saves.kept)
    return CapturedStep(_Parts(graph, static), plans, kept, scalars)


def _check_arguments(inputs: Sequence[Any], offload: Offload | None, scalars: Sequence[object], warmup: int) -> None:
    if not isinstance(cast(object, inputs), tuple | list):
        raise CaptureInputError(
            f"inputs are the arguments of the step, in a tuple or a list, and were given as {type(inputs).__name__}"
        )
    for scalar in scalars:
        if not isinstance(scalar, DeviceScalar):
            raise CaptureInputError(f"scalars holds DeviceScalars, and was given {scalar!r}")
    if offload is not None and not isinstance(cast(object, offload), Offload):
        raise CaptureInputError(f"offload is an eager_offload.Offload, and was given as {offload!r}")
    least = 0 if offload is None or not offload.config.enabled else 1
    if not isinstance(cast(object, warmup), int) or warmup < least:
        why = ", since the capture does what the last warm-up did" if least else ""
        raise CaptureInputError(f"warmup={warmup!r} is not accepted: it is a number from {least} on{why}")
    if offload is None:
        return
    config = offload.config
    if config.enabled and (config.tier == "disk" or config.disk_path is not None):
        raise CaptureStateError(
            f"an Offload with tier={config.tier!r} and disk_path={config.disk_path!r} cannot be captured: the host "
            "carries out what a disk does, and a replay has no host. Give one with tier='host' and no disk_path"
        )
    if config.enabled and config.pin_memory is False:
        raise CaptureStateError(
            "an Offload with pin_memory=False cannot be captured: copies from and to pageable memory make the host wait"
        )


def _warm_up(
    fn: Callable[..., Any],
    static: StaticInputs,
    saves: CapturedSaves | None,
    warmup: int,
    runtime: AcceleratorRuntime,
    stream: torch.Stream,
) -> None:
    """Real steps on ``stream``."""
    here = runtime.current_stream(stream.device)
    runtime.wait(stream, runtime.record(here))
    try:
        with runtime.enter(stream):
            for _ in range(warmup):
                with nullcontext() if saves is None else saves.warm_up():
                    fn(*static.values)
    finally:
        runtime.wait(here, runtime.record(stream))


def _pinned(pool: CapturePool, nbytes: int) -> Tensor:
    slab = pool.slots(nbytes)
    if not slab.is_pinned():
        raise CaptureStateError(
            f"{nbytes:,} bytes of host memory could not be pinned, and copies from and to pageable memory make the "
            "host wait. Raise the limit of locked memory (ulimit -l)"
        )
    return slab


def _capture(
    fn: Callable[..., Any],
    static: StaticInputs,
    saves: CapturedSaves | None,
    slab: Tensor | None,
    guard: GraphCaptureGuard,
) -> CapturedGraph:
    with guard, nullcontext() if saves is None else saves.capture(slab):
        result = fn(*static.values)
    graph = guard.finish()
    graph.result = result
    return graph
