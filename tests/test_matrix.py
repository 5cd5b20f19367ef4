"""Every program of the corpus, in every way and place: the same bits with offload, bytes moved, nothing held."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests import golden
from tests.hazards.backends import Backend
from tests.matrix import Cell, Place, Way, full, quick, run
from tests.programs import Program

#: The virtual device is the accelerator of its process, for good.
_ON_DEVICE = "tests.virtual_device.plugin" in sys.modules


def _cases() -> Iterator[object]:
    cells = full()
    chosen = quick(cells)
    for cell in cells:
        if (cell.place is Place.VIRTUAL) == _ON_DEVICE:
            marks = [] if cell in chosen else [pytest.mark.long]
            if cell.way is Way.INDUCTOR and marks:
                marks.append(pytest.mark.sampled(5, of="the matrix by Inductor"))  # a compiler of C++ for each kernel
            elif not marks:
                marks.append(pytest.mark.sampled(2, quick=True, of="the quick matrix"))
            yield pytest.param(cell, str(cell.place), id=str(cell), marks=marks)


@pytest.fixture(autouse=True, scope="module")
def _on_one_thread(one_thread: None) -> None:
    """All of them: their tensors are small."""


@pytest.mark.filterwarnings(
    "ignore:eager_offload. nothing moved:RuntimeWarning",
    "ignore:eager_offload. compiled code waits:RuntimeWarning",
)
@pytest.mark.parametrize(("cell", "backend"), [*_cases()], indirect=["backend"])
def test_bits_are_the_same_and_nothing_is_held(cell: Cell, backend: Backend) -> None:
    run(cell, backend)


def test_each_script_is_of_a_program() -> None:
    assert {golden.path_of(program) for program in golden.programs()} == {*golden.SCRIPTS.glob("*.txt")}


@pytest.mark.sampled(3, quick=True)
@pytest.mark.skipif(_ON_DEVICE, reason="scripts are those of the simulated device")
@pytest.mark.parametrize("program", golden.programs(), ids=str)
def test_copies_follow_their_script(program: Program) -> None:
    assert golden.script_of(program) == golden.path_of(program).read_text()
