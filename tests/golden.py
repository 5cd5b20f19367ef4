"""The scripts of copies: what each hazard's program moves on the simulated device, and when.

A script stands in ``tests/scripts/NAME.txt``: one line for each copy, in the order in which the host issued them, with
its stream, its bytes, and when it starts and ends in microseconds of the virtual clock. A change of the core that moves
a copy shows as a difference of files, to be looked at; then ``python -m tests.golden`` writes them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.hazards.backends import SimulatedBackend
from tests.hazards.programs import Settled
from tests.programs import Flag, Program, Run, corpus

SCRIPTS = Path(__file__).with_name("scripts")
#: Bytes: smaller than what most programs save, so that copies wait for each other.
_WINDOW = 32 << 10


def programs() -> list[Program]:
    """Those that have a script: each hazard's that can run on the simulated device."""
    return [one for one in corpus() if one.hazards and not one.flags & {Flag.NO_SCRIPT, Flag.COMPILED, Flag.DEVICE}]


def path_of(program: Program) -> Path:
    """Where its script stands."""
    return SCRIPTS / f"{program.name}.txt"


def script_of(program: Program) -> str:
    """What it moves in three steps.

    One waits for nothing, the backward of one waits until all has left, and one that is like this looks up what it has
    taught.
    """
    lines = ["-- nothing is waited for", *_moved(program, [False], step_tables=False)]
    lines += ["-- all has left before backward", *_moved(program, [True], step_tables=False)]
    lines += ["-- the step after it is looked up", *_moved(program, [True, True], step_tables=True)]
    return "\n".join(lines) + "\n"


def _moved(program: Program, steps: Sequence[bool], *, step_tables: bool) -> list[str]:
    """The copies of the last of ``steps``, each of which says whether all has left before its backward."""
    # The host takes no time, but for enough that a loop which asks for an event comes to its end.
    with SimulatedBackend(launch_seconds=1e-9) as backend:
        backend.sources_change = Flag.SOURCES_CHANGE in program.flags
        windows = {"max_inflight_bytes": _WINDOW, "prefetch_bytes": _WINDOW}
        offload = backend.offload(**{**windows, "step_tables": step_tables, **program.fields})
        timeline, before, began = backend.simulated.timeline, 0, 0.0
        for settled in steps:
            before, began = len(timeline.spans), timeline.end
            torch.manual_seed(0)
            program(Run(Settled(offload) if settled else offload))
            offload.stats(synchronize=True)
        copies = [one for one in timeline.spans[before:] if one.is_transfer and not one.is_stall]
        times = [((one.start - began) * 1e6, (one.stop - began) * 1e6) for one in copies]
        return [
            f"{one.what:<8}{one.nbytes:>9} bytes  {start:>9.1f} to {stop:>9.1f} us  on {one.stream}"
            for one, (start, stop) in zip(copies, times, strict=True)
        ]


def write() -> None:
    """Writes every script anew, and removes those of programs that are gone."""
    SCRIPTS.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    kept = set()
    for program in programs():
        path_of(program).write_text(script_of(program))
        kept.add(path_of(program))
    for path in SCRIPTS.glob("*.txt"):
        if path not in kept:
            path.unlink()


if __name__ == "__main__":
    write()
