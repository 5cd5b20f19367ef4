"""The accelerator runtime on its recording double, as a backend of the hazards."""

from __future__ import annotations

from contextlib import AbstractContextManager

from eager_offload.runtime.accelerator import AcceleratorRuntime
from tests.doubles.training_accelerator import TrainingAccelerator
from tests.hazards.backends import CheckedBackend


class RecordedBackend(CheckedBackend):
    """Copies run as late as the calls into torch allow, and the checker reads along."""

    name = "recorded"

    def __init__(self) -> None:
        self.double = TrainingAccelerator()
        super().__init__(self.double.checked())

    @property
    def runtime(self) -> AcceleratorRuntime:
        return self.double.runtime

    def watching(self) -> AbstractContextManager[object]:
        return self.double.watching()
