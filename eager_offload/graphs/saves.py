"""Where the saved tensors of a function go of which a graph is captured: in its warm-ups, and in the capture.

    learn      all warm-ups but the last    what stays, and how large windows are
    rehearse   the last one                 by what was learnt, which nothing changes any more: writes down what it does
    capture    the same once more           by the same numbers, and held to that

See [Note: copies of a graph] in ``engine/captured.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from eager_offload.config import OffloadConfig
from eager_offload.core.step_table import StepScript, StepTable, StepTables, check_alike
from eager_offload.eager.hooks import Hooks
from eager_offload.eager.saves import SavedTensors
from eager_offload.engine.captured import CapturedTransfers, GraphSlab, lay_out
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer_log import TransferLog
from eager_offload.offload import Offload
from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.stats import Accounts, KeepReason


class _OneDevice:
    """In place of all devices of an ``Offload``: that of a capture."""

    def __init__(self, transfers: CapturedTransfers) -> None:
        self._transfers = transfers

    def of(self, device: torch.device) -> DeviceOffloader | KeepReason:
        return self._transfers if device == self._transfers.device else KeepReason.DEVICE


class _Saves:
    """The saved tensors of some calls of the function."""

    def __init__(self, offload: Offload, config: OffloadConfig, transfers: CapturedTransfers, saves: SavedTensors):
        self.transfers, self.saved_tensors = transfers, saves
        self.hooks = Hooks(config, transfers.accounts, _OneDevice(transfers))
        self.hooks.serve(saves)
        self._offload = offload

    @contextmanager
    def entered(self, script: StepScript) -> Iterator[None]:
        """A ``with`` of the ``Offload`` around one call, which goes into ``script``."""
        self.saved_tensors.script = script
        try:
            with self._offload.in_step(self.hooks):
                yield
        finally:
            self.transfers.close()

    def end(self) -> None:
        """A warm-up is over: waits for what it has on its way, and learns from it."""
        self.hooks.thread.begin()
        self.transfers.synchronize()


class CapturedSaves:
    """The saved tensors of one function, from its first warm-up to the capture.

    Args:
        stream: that of the capture.
        warmups: how many there are.

    Raises:
        CaptureStateError: see ``Offload.in_step``.
    """

    def __init__(self, offload: Offload, stream: torch.Stream, runtime: AcceleratorRuntime, warmups: int) -> None:
        self._offload, self._stream, self._runtime, self._warmups = offload, stream, runtime, warmups
        offload.check_capture()
        self._tiers = offload.tiers_of(stream.device)
        self._learnt: _Saves | None = None
        self._rehearsed: _Saves | None = None
        #: What each warm-up has done.
        self._scripts: list[StepScript] = []
        self._fixed: OffloadConfig | None = None
        self._tables: StepTables | None = None
        #: What the capture has done.
        self.tables: tuple[StepTable, ...] = ()
        self.kept: Mapping[KeepReason, int] = {}

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Around one warm-up.

        Raises:
            ScheduleMismatchError: it is the last one, and has saved otherwise than the one before. What happens once
                happens in earlier ones.
        """
        number, script = len(self._scripts), StepScript()
        if self._learnt is None:
            config, tables = self._offload.config, StepTables(True, self._offload._accounts)
            if config.is_free:  # steps before have decided what stays: a graph has no time of its own
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
        self._offload.stats(synchronize=True)  # what earlier steps have on its way takes memory in some runs only
        with saves.entered(script):
            yield
        saves.end()
        self._scripts.append(script)
        if number == self._warmups - 1 and number > 1:
            check_alike(self._scripts[-2], script)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slab that the capture needs."""
        assert self._rehearsed is not None
        return lay_out(self._rehearsed.transfers.log.copies).nbytes

    @contextmanager
    def capture(self, slab: Tensor | None) -> Iterator[None]:
        """Around the capture.

        Args:
            slab: flat pinned memory of ``slot_bytes``, which lives as long as the graph does.

        Raises:
            ScheduleMismatchError: it does otherwise than the last warm-up.
        """
        assert self._rehearsed is not None
        assert self._fixed is not None
        assert self._tables is not None
        log = self._rehearsed.transfers.log
        saves = self._new(self._fixed, Accounts(), self._tables, GraphSlab(log, lay_out(log.copies), slab))
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
