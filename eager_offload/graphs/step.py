"""Captures a whole training step as a graph, including its offloading, with inputs at fixed addresses.

    warm-ups   real steps on the stream of the capture; the last one is recorded
    reserve    one slab of pinned memory, owned by the pool of the graph
    capture    repeats the last warm-up    -> CapturedStep

Saved tensors in these phases:

    learn      all warm-ups but the last    measures the windows, and the bytes to keep
    rehearse   the last warm-up             runs with these numbers fixed, and records its saves and unpacks
    capture    the captured step            runs with the same numbers, and must repeat the record

See [Note: copies of a graph] in ``engine/captured.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor

from eager_offload.config import OffloadConfig
from eager_offload.core.step_table import StepScript, StepTable, StepTables, check_alike
from eager_offload.eager.hooks import Hooks
from eager_offload.eager.saves import SavedTensors
from eager_offload.engine.captured import CapturedTransfers, GraphSlab, lay_out
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer_log import TransferLog
from eager_offload.errors import CaptureInputError, CaptureStateError
from eager_offload.graphs.graph import (
    CapturedGraph,
    GraphCaptureGuard,
    capture_stream,
    capturing_runtime,
    check_autocast,
    pool_of,
)
from eager_offload.graphs.pools import CapturePool, CaptureStatus, GraphPoolHandle, capture_status, check_outside
from eager_offload.offload import Offload
from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.runtime.captures import CaptureMode
from eager_offload.stats import Accounts, KeepReason
from eager_offload.torch_private.captures import overriding_stale_streams
from eager_offload.torch_private.memory import flatten_with_names, unflatten


class DeviceScalar:
    """A number that a graph reads from device memory, such as a learning rate, a step count or a seed.

    Args:
        value: the initial value.
        dtype: of ``tensor``; by default, the default dtype for a float, ``int64`` for an int, ``bool`` for a bool.
        device: of ``tensor``; by default, the accelerator, or the CPU if there is none.

    Raises:
        CaptureInputError: ``value`` is not a number, or ``dtype`` cannot hold it.
        CaptureStateError: called in a capture.
    """

    def __init__(
        self, value: float, dtype: torch.dtype | None = None, device: torch.device | str | int | None = None
    ) -> None:
        if dtype is None:
            kinds = {bool: torch.bool, int: torch.int64}
            dtype = kinds.get(type(value), torch.get_default_dtype())
        if device is None:
            device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        _check_number(value, dtype)
        check_outside("a DeviceScalar was made")
        with torch.inference_mode(False):
            self.tensor = torch.full((), value, dtype=dtype, device=device)
            """The number as a tensor without dimensions, always the same object. Pass this to the step."""

    def update(self, value: float) -> None:
        """Fills the tensor with ``value`` on the current stream, before later launches from this stream.

        Raises:
            CaptureInputError: ``value`` is not a number, or the dtype cannot hold it.
            CaptureStateError: called in a capture, whose replays would all write this value.
        """
        _check_number(value, self.tensor.dtype)
        check_outside("DeviceScalar.update was called")
        with torch.no_grad():
            # A fill carries the number in its launch. A copy would read host memory later, maybe after the next update.
            self.tensor.fill_(value)

    def __repr__(self) -> str:
        return f"DeviceScalar({self.tensor.dtype}, {self.tensor.device})"


class StaticInputs:
    """Inputs of a captured function: copies of tensors at fixed addresses, in the structure of the originals.

    Args:
        inputs: tensors and plain values in tuples, lists and dicts, nested to any depth. Each tensor is copied to a
            buffer on its device, which does not require grad. Each update must repeat the plain values.

    Raises:
        CaptureStateError: called in a capture.
    """

    def __init__(self, inputs: Any) -> None:
        check_outside("StaticInputs was made")
        self._names, leaves, self._structure = flatten_with_names(inputs)
        with torch.inference_mode(False), torch.no_grad():
            self._leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    @property
    def values(self) -> Any:
        """The buffers and plain values in the structure of the inputs; call the captured function with these."""
        return unflatten(self._leaves, self._structure)

    def update(self, inputs: Any) -> None:
        """Copies the tensors of ``inputs`` into the buffers on the current stream. On an error nothing is copied.

        Raises:
            CaptureInputError: a structure, shape, dtype, device or plain value differs.
            CaptureStateError: called in a capture.
        """
        check_outside("StaticInputs.update was called")
        names, leaves, structure = flatten_with_names(inputs)
        if structure != self._structure:
            raise CaptureInputError(
                f"the captured inputs have {len(self._names)} values, at {', '.join(self._names)}, and the given ones "
                f"{len(names)}, at {', '.join(names)}: the structures are {self._structure} and {structure}"
            )
        for name, captured, given in zip(self._names, self._leaves, leaves, strict=True):
            if not _alike(captured, given):
                raise CaptureInputError(
                    f"the input {name} was captured as {_describe(captured)}, and is given as {_describe(given)}"
                )
        with torch.no_grad():
            for captured, given in zip(self._leaves, leaves, strict=True):
                if isinstance(captured, Tensor) and captured is not given:
                    captured.copy_(given, non_blocking=True)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.shape)}, {value.dtype}, {value.device}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _alike(one: object, other: object) -> bool:
    """Returns whether a tensor fits the buffer, or a plain value equals the captured one."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return _describe(one) == _describe(other)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return one is other or (type(one) is type(other) and bool(one == other))


def _check_number(value: object, dtype: torch.dtype) -> None:
    if not isinstance(value, bool | int | float):
        raise CaptureInputError(f"a DeviceScalar holds a number, and was given {value!r}")
    if dtype.is_floating_point or dtype.is_complex:
        return
    whole = isinstance(value, int) or value.is_integer()
    lowest, highest = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not whole or not lowest <= value <= highest:
        raise CaptureInputError(f"a DeviceScalar of {dtype} cannot hold {value!r}")


class CapturedStep:
    """A training step as a graph, made by ``capture_step``. As a context manager it closes itself.

    ::

        step = graphs.capture_step(train, (x, y), offload=offload, scalars=[rate])
        for x, y in loader:
            rate.update(next_rate())
            loss = step(x, y)
    """

    def __init__(
        self,
        parts: tuple[CapturedGraph, StaticInputs],
        plans: tuple[StepTable, ...],
        kept: Mapping[KeepReason, int],
        scalars: Sequence[DeviceScalar],
    ) -> None:
        #: The graph and its inputs; ``None`` once closed.
        self._parts: tuple[CapturedGraph, StaticInputs] | None = parts
        #: A step table for each forward and backward in the capture; empty without ``offload``.
        self.plans = plans
        #: Bytes of kept saves of one step, by reason; empty without ``offload``.
        self.kept: Mapping[KeepReason, int] = MappingProxyType(dict(kept))
        self.scalars = tuple(scalars)

    @property
    def plan(self) -> StepTable | None:
        """The first of ``plans``, the only one of a step with one forward; ``None`` if nothing was saved."""
        return self.plans[0] if self.plans else None

    @property
    def graph(self) -> CapturedGraph:
        """The graph.

        Raises:
            CaptureStateError: the step is closed.
        """
        return self._open()[0]

    @property
    def result(self) -> Any:
        """The return value of the captured step; each replay overwrites its tensors.

        Raises:
            CaptureStateError: the step is closed.
        """
        return self._open()[0].result

    def __call__(self, *inputs: Any) -> Any:
        """Copies ``inputs`` to the buffers, launches the graph on the current stream, and returns ``result``.

        Raises:
            CaptureInputError: ``inputs`` differ in structure, shape, dtype, device or plain values from the captured
                ones.
            CaptureStateError: called in a capture, or the step is closed.
        """
        graph, static = self._open()
        if capture_status() is CaptureStatus.NONE:
            graph.wait()  # a replay on another stream may still read the buffers
        static.update(inputs)
        graph.launch()
        return graph.result

    def launch(self, stream: torch.Stream | None = None) -> None:
        """Replays with the present inputs; see ``CapturedGraph.launch``.

        Raises:
            CaptureInputError: ``stream`` is on another device.
            CaptureStateError: called in a capture, or the step is closed.
        """
        self._open()[0].launch(stream)

    def close(self) -> None:
        """Frees the graph, its memory, inputs and results, after the last replay. Idempotent.

        Pinned memory is freed too, except for memory of a user's ``pool``, which keeps it until ``clear_buffers``.
        Garbage collection of a step does the same.
        """
        self._parts = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> tuple[CapturedGraph, StaticInputs]:
        if self._parts is None:
            raise CaptureStateError("this captured step is closed: capture the step again")
        return self._parts

    def __repr__(self) -> str:
        if self._parts is None:
            return "<CapturedStep: closed>"
        return f"<CapturedStep: {self._parts[0].num_replays} replays>"


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
        fn: the step: forward, backward and, as needed, the optimizer and ``zero_grad``. Called as ``fn(*inputs)`` with
            fixed copies of ``inputs``; must do the same in each call.
        inputs: the arguments of ``fn``: tensors and plain values in tuples, lists and dicts, nested to any depth.
        offload: entered around ``fn``. The last warm-up is recorded, and the capture must repeat it. Each replay copies
            the same bytes, whatever the speed of host and link. ``offload.stats()`` counts only the warm-ups.
        scalars: the numbers that ``fn`` reads and that change between replays; the step keeps them alive.
        warmup: the number of real steps before the capture, with ``inputs``, on the stream of the capture. With
            ``offload`` at least 1; with more, the windows and kept bytes adapt.
        mode, pool, debug: as in ``GraphCaptureGuard``. Pinned memory comes from ``pool`` if the pool has
            ``host_bytes``; without ``pool`` it is freed with the step.

    Returns:
        The step. It was not replayed yet, so the training state is that after the warm-ups.

    Raises:
        NoAcceleratorError: this process has no accelerator to capture.
        CaptureInputError: ``inputs``, ``scalars``, ``warmup`` or ``pool`` is not accepted.
        CaptureStateError: ``offload`` uses a disk or pageable memory, is traced or entered already, or an active
            autocast caches casts.
        ScheduleMismatchError: the capture differs from the last warm-up in saves or unpacks; or, with three warm-ups or
            more, the last two differ in saves.
        CapacityError: ``pool`` has no room for the offloaded bytes.
        GraphError: as in ``GraphCaptureGuard``. Errors of ``fn`` propagate. Gradients of a failed capture were never
            computed: drop them before the next step.
    """
    runtime, shared, mode = capturing_runtime(), pool_of(pool), CaptureMode(mode)
    _check_arguments(inputs, offload, scalars, warmup)
    if shared is not None:
        shared.check_open("a step was captured")
    if capture_status() is not CaptureStatus.NONE:
        raise CaptureStateError("a step was captured inside of a capture, but captures do not nest: end that one first")
    check_autocast(runtime.device_type)
    stream, static = capture_stream(), StaticInputs(tuple(inputs))
    if offload is not None and not offload.config.enabled:
        offload = None
    with overriding_stale_streams():
        saves = None if offload is None else CapturedSaves(offload, stream, runtime, warmup)
        here = runtime.current_stream(stream.device)
        runtime.wait(stream, runtime.record(here))  # the step reads tensors made on the current stream
        try:
            with runtime.enter(stream):
                for _ in range(warmup):
                    with nullcontext() if saves is None else saves.warm_up():
                        fn(*static.values)
        finally:
            runtime.wait(here, runtime.record(stream))  # later work reads results of the warm-ups
        nbytes = 0 if saves is None else saves.slot_bytes
        owner = CapturePool(nbytes) if shared is None and nbytes else shared
        guard = GraphCaptureGuard(stream, mode, owner, debug)
        with nullcontext() if owner is None else owner.adding():
            slab = None if owner is None or not nbytes else owner.slots(nbytes)
            if slab is not None and not slab.is_pinned():
                raise CaptureStateError(
                    f"{nbytes:,} bytes of host memory could not be pinned, and copies from and to pageable memory make "
                    "the host wait. Raise the limit of locked memory (ulimit -l)"
                )
            with guard, nullcontext() if saves is None else saves.capture(slab):
                result = fn(*static.values)
            graph = guard.finish()
    graph.result = result
    graph.keep(fn, static, *scalars, result)
    plans, kept = ((), dict[KeepReason, int]()) if saves is None else (saves.tables, saves.kept)
    return CapturedStep((graph, static), plans, kept, scalars)


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
        why = ", because the capture repeats the last warm-up" if least else ""
        raise CaptureInputError(f"warmup={warmup!r} is not accepted: it is a whole number of at least {least}{why}")
    if offload is None:
        return
    config = offload.config
    if config.enabled and (config.tier == "disk" or config.disk_path is not None):
        raise CaptureStateError(
            f"an Offload with tier={config.tier!r} and disk_path={config.disk_path!r} cannot be captured: the host "
            "reads and writes the disk, and does not run in a replay. Give one with tier='host' and no disk_path"
        )
    if config.enabled and config.pin_memory is False:
        raise CaptureStateError(
            "an Offload with pin_memory=False cannot be captured: copies from and to pageable memory make the host wait"
        )


# -- saved tensors -----------------------------------------------------------------------------------------------------


class _OneDevice:
    """Stands for the devices of an ``Offload``: has only the device of a capture."""

    def __init__(self, transfers: CapturedTransfers) -> None:
        self._transfers = transfers

    def of(self, device: torch.device) -> DeviceOffloader | KeepReason:
        return self._transfers if device == self._transfers.device else KeepReason.DEVICE


class _Saves:
    """The saved tensors of one phase (learn, rehearse or capture), which may be several calls of the step."""

    def __init__(self, offload: Offload, config: OffloadConfig, transfers: CapturedTransfers, saves: SavedTensors):
        self.transfers, self.saved_tensors = transfers, saves
        self.hooks = Hooks(config, transfers.accounts, _OneDevice(transfers))
        self.hooks.serve(saves)
        self._offload = offload

    @contextmanager
    def entered(self, script: StepScript) -> Iterator[None]:
        """Enters the ``Offload`` around one call, which is recorded in ``script``."""
        self.saved_tensors.script = script
        try:
            with self._offload.in_step(self.hooks):
                yield
        finally:
            self.transfers.close()

    def end(self) -> None:
        self.hooks.thread.begin()
        self.transfers.synchronize()


class CapturedSaves:
    """The saved tensors of a step, from its first warm-up to the capture."""

    def __init__(self, offload: Offload, stream: torch.Stream, runtime: AcceleratorRuntime, warmups: int) -> None:
        self._offload, self._stream, self._runtime, self._warmups = offload, stream, runtime, warmups
        offload.check_capture()
        self._tiers = offload.tiers_of(stream.device)
        self._learnt: _Saves | None = None
        self._rehearsed: _Saves | None = None
        self._scripts: list[StepScript] = []
        self._fixed: OffloadConfig | None = None
        self._tables: StepTables | None = None
        self.tables: tuple[StepTable, ...] = ()
        self.kept: Mapping[KeepReason, int] = {}

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Enters the ``Offload`` around one warm-up. If there are three or more, the last must have the saves of the
        one before: one-time work is done by then."""
        number, script = len(self._scripts), StepScript()
        if self._learnt is None:
            config, tables = self._offload.config, StepTables(True, self._offload._accounts)
            if config.is_free:  # steps of a capture are not timed, so the fraction that earlier steps decided is used
                config = OffloadConfig.from_dict({"policy": "max"}, config)
                if (controller := self._offload.controller_of(self._stream.device)) is not None:
                    tables.control(controller.fixed())
            self._learnt = self._new(config, self._offload._accounts, tables)
        if number == self._warmups - 1:
            windows = self._learnt.transfers.windows
            fields = {
                "policy": "max",
                "device_budget": None,
                "keep_last_bytes": self._learnt.saved_tensors.keeping.keep,
                "max_inflight_bytes": windows.inflight,
                "prefetch_bytes": windows.prefetch,
            }
            self._fixed = OffloadConfig.from_dict(fields, self._offload.config)
            self._tables = self._learnt.saved_tensors.tables
            saves = self._rehearsed = self._new(self._fixed, self._offload._accounts, self._tables.frozen())
        else:
            saves = self._learnt
        self._offload.stats(synchronize=True)  # ends earlier steps' copies: their memory would differ from run to run
        with saves.entered(script):
            yield
        saves.end()
        self._scripts.append(script)
        if number == self._warmups - 1 and number > 1:
            check_alike(self._scripts[-2], script)

    @property
    def slot_bytes(self) -> int:
        """Bytes of pinned memory that the capture needs."""
        assert self._rehearsed is not None
        return lay_out(self._rehearsed.transfers.log.copies)[1]

    @contextmanager
    def capture(self, slab: Tensor | None) -> Iterator[None]:
        """Enters the ``Offload`` around the capture. ``slab``: ``slot_bytes`` of pinned memory, which the graph keeps
        alive."""
        assert self._rehearsed is not None
        assert self._fixed is not None
        assert self._tables is not None
        log = self._rehearsed.transfers.log
        saves = self._new(self._fixed, Accounts(), self._tables, GraphSlab(log, lay_out(log.copies)[0], slab))
        script = StepScript(self._scripts[-1])
        try:
            with saves.entered(script):
                yield
            script.finish()
            saves.transfers.join()
        finally:
            saves.transfers.forget()
        self.tables = script.tables()
        counters = saves.transfers.accounts.counters
        self.kept = {reason: nbytes for reason, nbytes in counters.kept_bytes.items() if nbytes}

    def _new(
        self, config: OffloadConfig, accounts: Accounts, tables: StepTables, slab: GraphSlab | None = None
    ) -> _Saves:
        windows = config.windows(partial(self._runtime.total_memory, self._stream.device))
        transfers = CapturedTransfers(
            self._stream, slab, self._runtime, self._tiers, accounts, TransferLog(), windows=windows
        )
        tables = tables if slab is None else tables.frozen()
        return _Saves(self._offload, config, transfers, SavedTensors(transfers, config, tables))
