"""The accelerator runtime on its recording double, as a backend of the hazards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Self

from eager_offload import Offload
from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.runtime.checker import Checker
from tests.doubles.training_accelerator import TrainingAccelerator
from tests.hazards.backends import Backend, Gate, without_changes_of_sources

__all__ = ["RecordedBackend"]


class RecordedBackend(Backend):
    """Copies run as late as the calls into torch allow, and the checker reads along."""

    name = "recorded"
    tier = "host"

    def __init__(self) -> None:
        super().__init__()
        self.double = TrainingAccelerator()
        self._checking = self.double.checked()
        self.checker: Checker | None = None

    @property
    def runtime(self) -> AcceleratorRuntime:
        return self.double.runtime

    def watching(self) -> AbstractContextManager[object]:
        return self.double.watching()

    @contextmanager
    def gate(self) -> Iterator[Gate]:
        # Nothing to hold back: a copy of the double runs only when somebody waits for it.
        yield Gate()

    def assert_nothing_is_held(self) -> None:
        super().assert_nothing_is_held()
        self.assert_ordered()

    def assert_ordered(self) -> None:
        """Asserts that the checker found nothing so far."""
        assert self.checker is not None
        if self.sources_change:
            self.checker.violations = without_changes_of_sources(self.checker.violations)
        self.checker.assert_clean()

    def __enter__(self) -> Self:
        self.checker = self._checking.__enter__()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._checking.__exit__(kind, error, trace)
        if error is None:
            self.assert_ordered()

    def _make(self, fields: dict[str, Any]) -> Offload:
        return Offload(runtime=self.runtime, **fields)
