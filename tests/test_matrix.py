"""Every program of the corpus, in every way and place: the same bits with offload, bytes moved, nothing held."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import pytest

from tests import golden
from tests.hazards.backends import Backend
from tests.hazards.programs import REGIMES, Regime
from tests.matrix import Cell, Place, Way, full, quick, run
from tests.programs import Program
from tests.sampling import one_in

#: Of the cells that the quick suite leaves out a full one takes one in so many: a compiler is slow, that of C++ most.
_ONE_IN = {Way.INDUCTOR: 6, Way.AOT_EAGER: 2}
#: The virtual device is the accelerator of its process, for good.
_ON_DEVICE = "tests.virtual_device.plugin" in sys.modules


def _cases() -> Iterator[object]:
    """The cells with their marks and regimes: a cell of the quick suite takes all regimes, another one each second."""
    cells = full()
    chosen = quick(cells)
    for number, cell in enumerate(cells):
        if (cell.place is Place.VIRTUAL) == _ON_DEVICE:
            regimes: Sequence[Regime] = REGIMES
            if cell in chosen:
                marks = [pytest.mark.sampled(2, quick=True, of="the quick matrix")]
            else:
                regimes = one_in(2, REGIMES, number)
                marks = [pytest.mark.long]
                if (stride := _ONE_IN.get(cell.way)) is not None:
                    marks.append(pytest.mark.sampled(stride, of=f"the matrix by {cell.way}"))
            yield pytest.param(cell, regimes, str(cell.place), id=str(cell), marks=marks)


@pytest.fixture(autouse=True, scope="module")
def _on_one_thread(one_thread: None) -> None:
    """All of them: their tensors are small."""


@pytest.mark.filterwarnings(
    "ignore:eager_offload. nothing moved:RuntimeWarning",
    "ignore:eager_offload. compiled code waits:RuntimeWarning",
)
@pytest.mark.parametrize(("cell", "regimes", "backend"), [*_cases()], indirect=["backend"])
def test_bits_are_the_same_and_nothing_is_held(cell: Cell, regimes: Sequence[Regime], backend: Backend) -> None:
    run(cell, backend, regimes)


def test_each_script_is_of_a_program() -> None:
    assert {golden.path_of(program) for program in golden.programs()} == {*golden.SCRIPTS.glob("*.txt")}


@pytest.mark.sampled(3)
@pytest.mark.skipif(_ON_DEVICE, reason="scripts are those of the simulated device")
@pytest.mark.parametrize("program", golden.programs(), ids=str)
def test_copies_follow_their_script(program: Program) -> None:
    assert golden.script_of(program) == golden.path_of(program).read_text()
