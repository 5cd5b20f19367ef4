"""The matrix: the ways of running a program, the places where it runs, and which cells a suite takes.

A cell runs a program of the corpus in one way and one place, without offload and with it, and asserts that every bit is
the same, that bytes moved, that the stats balance, and that nothing is held afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from eager_offload import OffloadStats
from eager_offload.graphs import capture_step
from tests.compile.compiled import compare
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.programs import REGIMES, Regime, assert_identical, assert_moved, same_gradients
from tests.programs import Flag, Program, Run, corpus, leaf, sum_of
from tests.threads import collect
from tests.virtual_device import install

#: The programs of which some step is looked up in no table on the simulated device, whose clock makes that exact: they
#: keep what they save, differ in each step, or save what no table has. The file names all of them, whichever cells run.
NOT_LOOKED_UP = Path(__file__).with_name("not_looked_up.txt")

#: Programs of which ``aot_eager`` alone, without an ``Offload``, has other bits than eager code: several parts of one
#: gradient are added up in another order where one graph's backward returns some of them together.
ADDED_UP_OTHERWISE = (
    *("H02-compiled-graphs-in-any-order", "graph-breaks", "outputs-that-are-each-other"),
    "H31-upsampling",  # which the compiler takes apart into other operators
)
#: Programs whose backward asks for no input of the checkpoint that has left: what it computes again is computed from
#: what the program holds, or is not asked for.
NOTHING_BACK_TO_A_CHECKPOINT = ("H06-tied", "outputs-that-are-inputs-and-views-of-them")


class Way(StrEnum):
    """How the forwards of a program run."""

    EAGER = "eager"
    TABLE = "with_a_table"
    """A second time, when each step is looked up in what the first has taught."""
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    CHECKPOINTED = "checkpointed"
    """Inside of ``torch.utils.checkpoint``."""
    CAPTURED = "captured"
    """The step as a graph, replayed."""


class Place(StrEnum):
    """Where tensors and their copies are."""

    DISK = "disk"
    HOST = "host"
    SIMULATED = "simulated"
    VIRTUAL = "virtual"


class Cell(NamedTuple):
    """One program in one column of the matrix."""

    program: Program
    way: Way
    place: Place

    def __str__(self) -> str:
        return f"{self.program.name}-{self.way}-{self.place}"

    @property
    def column(self) -> tuple[Way, Place]:
        return self.way, self.place


def makes_sense(program: Program, way: Way, place: Place) -> bool:
    """Whether a program can run this way and there."""
    flags = program.flags
    if (Flag.HOST if place is Place.VIRTUAL else Flag.DEVICE) in flags:
        return False
    if Flag.COMPILED in flags and not (way in (Way.AOT_EAGER, Way.INDUCTOR) and place in (Place.DISK, Place.HOST)):
        return False
    match way:
        case Way.AOT_EAGER:
            return Flag.EAGER not in flags and place is not Place.SIMULATED
        case Way.INDUCTOR:
            return not flags & {Flag.EAGER, Flag.NO_INDUCTOR} and place in (Place.DISK, Place.HOST)
        case Way.CHECKPOINTED:
            return program.step is not None and Flag.NO_CHECKPOINT not in flags
        case Way.CAPTURED:
            return program.step is not None and Flag.NO_CAPTURE not in flags and place is Place.VIRTUAL
    return True


def full() -> list[Cell]:
    """The cells of the full suite: each program once in each way, and the programs of a hazard share out the places:
    no mutation is noticed in one of them alone.

    A way takes the place in which the fewest cells of the program's hazard are in that way; of those, the one that the
    program has been in least; of those, the column with the fewest cells.
    """
    chosen: list[Cell] = []
    columns: Counter[tuple[Way, Place]] = Counter()
    hazards: Counter[tuple[str, Way, Place]] = Counter()
    for program in corpus():
        places: Counter[Place] = Counter()
        kind = (program.hazards or [program.file])[0]
        for way in Way:
            options = [Cell(program, way, place) for place in Place if makes_sense(program, way, place)]
            if options:
                keys = {one: (hazards[kind, *one.column], places[one.place], columns[one.column]) for one in options}
                cell = min(options, key=keys.__getitem__)
                chosen.append(cell)
                places[cell.place] += 1
                hazards[kind, *cell.column] += 1
                columns[cell.column] += 1
    return chosen


def quick(cells: Sequence[Cell], sample: int = 3) -> set[Cell]:
    """The cells of the quick suite: one of each program, and ``sample`` of each column, of one of Inductor's one.

    A program takes its cell with the fewest of its column taken so far, of what is not compiled by Inductor.
    """
    taken: set[Cell] = set()
    columns: Counter[tuple[Way, Place]] = Counter()
    programs: dict[str, list[Cell]] = {}
    for cell in cells:
        programs.setdefault(cell.program.name, []).append(cell)
    for options in programs.values():
        first = min((one for one in options if one.way is not Way.INDUCTOR), key=lambda one: columns[one.column])
        taken.add(first)
        columns[first.column] += 1
    for cell in cells:
        if columns[cell.column] < (1 if cell.way is Way.INDUCTOR else sample) and cell not in taken:
            taken.add(cell)
            columns[cell.column] += 1
    return taken


def run(cell: Cell, backend: Backend, regimes: Sequence[Regime] = REGIMES) -> None:
    """Runs a cell, and raises ``AssertionError`` if a bit differs, too little moves or something is held.

    Args:
        regimes: how transfers and compute meet in a cell of eager code.
    """
    backend.sources_change = Flag.SOURCES_CHANGE in cell.program.flags
    with _no_event_left(backend):
        _run(cell, backend, regimes)


@contextmanager
def _no_event_left(backend: Backend) -> Iterator[None]:
    """Asserts that of the events which are recorded inside nothing holds any in the end.

    What a compiler has made, and what a program returns, may be full of cycles: so Python's collector runs first where
    some seem to be left.
    """
    with backend.counting_events() as count:
        before = count()
        yield
        if count() > before:
            for offload in backend.offloads:
                offload.close()
            collect()
        assert count() <= before, f"{count() - before} events are held"


def _run(cell: Cell, backend: Backend, regimes: Sequence[Regime]) -> None:
    program, way = cell.program, cell.way
    match way:
        case Way.EAGER:
            _run_eager(program, backend, regimes, step_tables=False)
        case Way.TABLE if cell.place is Place.SIMULATED:
            again = _run_eager(program, backend, REGIMES, step_tables=True)  # the file is of all of them
            looked_up = all(stats.offloaded_bytes > 0 and stats.table_forwards > 0 for stats in again)
            excused = program.name in NOT_LOOKED_UP.read_text().split()
            assert looked_up != excused, f"{NOT_LOOKED_UP.name} {'has' if excused else 'does not have'} it"
        case Way.TABLE:
            # There, copies are late in all other ways.
            with install().slow_compute(2e-4) if cell.place is Place.VIRTUAL else nullcontext():
                _run_eager(program, backend, regimes, step_tables=True)
        case Way.AOT_EAGER | Way.INDUCTOR:
            _run_compiled(cell, backend)
        case Way.CHECKPOINTED:
            _run_checkpointed(program, backend, regimes)
        case Way.CAPTURED:
            _run_captured(program, backend)


def _run_eager(
    program: Program, backend: Backend, regimes: Sequence[Regime], *, step_tables: bool
) -> list[OffloadStats]:
    """Returns the stats of the second time in each regime, if there is one."""
    again: list[OffloadStats] = []
    same_gradients(
        lambda around: program(Run(around)),
        backend,
        moved=program.moved,
        reloads=Flag.NOTHING_BACK not in program.flags,
        held=Flag.HELD in program.flags,
        regimes=regimes,
        again=again,
        step_tables=step_tables,
        **program.fields,
    )
    return again


def _run_compiled(cell: Cell, backend: Backend) -> None:
    program = cell.program

    def step(compile: Callable[..., Any], around: Any) -> list[Tensor | None]:
        return [one for one in tree_leaves(program(Run(around, compile))) if one is None or isinstance(one, Tensor)]

    # For a device that torch does not know a compiler takes other operators apart than eager code does.
    exact = cell.place is not Place.VIRTUAL and program.name not in ADDED_UP_OTHERWISE
    stats = compare(step, cell.way.value, as_eager=exact, tier=backend.tier, **program.fields)
    # What the graph returns, its caller holds: "alive".
    assert_moved(stats, program.moved, held=True)


def _run_checkpointed(program: Program, backend: Backend, regimes: Sequence[Regime]) -> None:
    """Runs forwards inside of a checkpoint, which saves its inputs: tensors that are computed here, and so may move."""

    def forward(function: Callable[..., Any]) -> Callable[..., Any]:
        def checkpointed(*inputs: Any) -> Any:
            given = tree_map_only(Tensor, lambda one: one * 1 if one.requires_grad else one, inputs)
            return checkpoint(function, *given, use_reentrant=False)

        return checkpointed

    same_gradients(
        lambda around: program(Run(around, forward)),
        backend,
        moved=program.moved,
        reloads=program.name not in NOTHING_BACK_TO_A_CHECKPOINT,
        held=Flag.HELD in program.flags,
        regimes=regimes,
        **program.fields,
    )


def _run_captured(program: Program, backend: Backend) -> None:
    """Three replays of a step that returns its gradients: the bits of eager code without offload.

    Layers behind the program have its saved tensors leave before backward asks for them: a captured step brings back
    what has left when its forward ends, and has one copy on its way at a time.
    """
    assert program.step is not None
    function, inputs = program.step()
    behind = leaf(64, 64, seed=9)
    models = [one for one in inputs if isinstance(one, nn.Module)]
    tensors = [one for one in inputs if isinstance(one, Tensor)]
    wanted = [one for one in (behind, *tensors, *(p for m in models for p in m.parameters())) if one.requires_grad]

    def once() -> list[Tensor | None]:
        outputs = function(*inputs)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        last = behind
        for _ in range(8):
            last = (last @ behind).sin()
        total = sum_of([*outputs, last])
        return [*(one.detach() for one in outputs), *torch.autograd.grad(total, wanted, allow_unused=True)]

    def copied(results: list[Tensor | None]) -> list[Tensor | None]:
        return [one if one is None else one.clone() for one in results]

    torch.manual_seed(0)
    expected = copied(once())
    offload = backend.offload(max_inflight_bytes=1, **program.fields)
    with capture_step(once, offload=offload) as captured:
        before = install().copied_bytes
        for number in range(3):
            assert_identical(expected, copied(captured()), f"replay {number}")
        out, back = (now - then for now, then in zip(install().copied_bytes, before, strict=True))
        assert out > 0, "a replay moves nothing"
        assert back > 0, "nothing comes back in a replay"
    del captured
    collect()
    assert_settled(offload)
