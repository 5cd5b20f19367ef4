"""The simulated device under observation: every operator and every call in the happens-before log, and checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from eager_offload._torch import TorchDispatchMode
from eager_offload.runtime.base import Direction
from eager_offload.simulation.checker import Access, Checker, Violation
from eager_offload.simulation.deferred import Move
from eager_offload.simulation.device import SimulatedDevice, SimulatedStream
from eager_offload.simulation.log import Log, LoggedRuntime, WrittenLog
from eager_offload.simulation.observer import OperatorObserver


class SimulatedRuntime(LoggedRuntime, SimulatedDevice):
    """A simulated device whose calls can be checked; see ``SimulatedDevice`` for its arguments."""

    _checker: Checker | None = None
    _observer: OperatorObserver | None = None

    @contextmanager
    def checked(self, recording: WrittenLog | None = None) -> Iterator[Checker]:
        """Observes every operator of this thread, and checks the order of all accesses.

        At the end whatever is still pending is carried out; ``checker.assert_clean()`` is left to the caller.

        Args:
            recording: gets the log too, to be replayed without one of its entries.
        """
        assert self._checker is None, "this runtime is being checked already"
        checker = Checker()
        log: Log = checker
        if recording is not None:
            recording.then = checker
            log = recording
        observer = OperatorObserver(self, log, torch.device("cpu"), home=self.default_stream, work=self._compute)
        self._checker, self._observer = checker, observer
        self.attach(observer, observer)
        try:
            with observer:
                yield checker
        finally:
            observer.sweep()
            self.synchronize_all()
            self.attach(None, None)
            self._checker = None

    def watching(self) -> TorchDispatchMode:
        """A context for a further thread that computes while this one is inside ``checked()``."""
        assert self._checker is not None, "nothing is being checked"
        assert self._observer is not None
        return self._observer.elsewhere()

    @property
    def resident_bytes(self) -> int:
        """Bytes of the storages that were allocated inside the last ``checked()`` and lived when last looked at."""
        return 0 if self._observer is None else self._observer.resident_bytes

    @property
    def peak_resident_bytes(self) -> int:
        """The most that ``resident_bytes`` ever was."""
        return 0 if self._observer is None else self._observer.peak_resident_bytes

    def _entry(self, stream: SimulatedStream, what: str, tensor: Tensor, direction: Direction) -> Access:
        entry = super()._entry(stream, what, tensor, direction)
        if self._checker is None or self._observer is None:
            return entry
        return replace(entry, region=self._observer.region(tensor), number=self._checker.entries - 1)

    def _report(self, move: Move) -> Violation:
        violation = super()._report(move)
        if self._checker is not None:
            self._checker.report(violation)
        return violation
