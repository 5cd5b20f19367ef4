"""What an integration adds to a step, above a `with offload:` that is written into the same loop by hand.

    python -m benchmarks.frameworks
    python -m benchmarks.frameworks --rounds 3

Each framework trains the same decoder on the CPU with the disk tier, in turn with the integration and with
`with offload:` in the user's own code; the order changes with each round, and all losses must be the same bits. The
integration logs its numbers after every step, to a logger that does nothing with them.

One per cent of a step is less than what a step varies by, so the cost itself is measured on a decoder so small that a
step is little more than the framework's own code: what the integration adds there, in seconds, it adds to any step.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import eager_offload as eo
from benchmarks.common import Report, Spread, console, table
from benchmarks.habits import LOOPS, Habit, Settings, Stamped, batches
from benchmarks.llama import Config
from benchmarks.options import command_line, parse

#: The most that an integration may add, as a part of a step.
LIMIT = 0.01
#: Decoder and tokens of a batch: of a step that is long enough to mean something, and of one that is next to nothing.
LARGE, LARGE_BATCH = Config(layers=4, width=512, inner=1536, heads=8, shared_heads=4, vocabulary=4096), (2, 513)
SMALL, SMALL_BATCH = Config(layers=1, width=8, inner=8, heads=2, shared_heads=1, vocabulary=16), (1, 9)
#: What leaves: with the defaults, nothing of the small one, and of the large one what comes first would stay.
EVERYTHING, MOST = {"min_bytes": 0, "keep_last_bytes": 0}, {"keep_last_bytes": "16MiB"}


@dataclass(frozen=True)
class Turn:
    """Steps by hand and with the integration, one run after the other; seconds of each step after the first two."""

    by_hand: list[float]
    integration: list[float]

    @property
    def added(self) -> float:
        """Seconds a step."""
        return median(self.integration) - median(self.by_hand)

    @property
    def ratio(self) -> float:
        return median(self.integration) / median(self.by_hand)


def measure(
    framework: str,
    config: Config,
    shape: tuple[int, int],
    steps: int,
    rounds: int,
    options: argparse.Namespace,
    **fields: Any,
) -> tuple[list[Turn], int]:
    """The turns, and the bytes that left in all of them, the fewer of both; ``fields`` are the ``Offload``'s."""
    data = batches(steps, shape, config.vocabulary)
    offloads = {
        habit: eo.Offload(
            tier="disk",
            disk_path=options.disk_path,
            max_inflight_bytes="64MiB",
            prefetch_bytes="64MiB",
            **fields,
        )
        for habit in (Habit.BY_HAND, Habit.INTEGRATION)
    }
    turns = []
    for number in range(rounds):
        seconds: dict[Habit, list[float]] = {}
        losses: dict[Habit, list[float]] = {}
        for habit in list(offloads)[:: 1 if number % 2 else -1]:
            torch.manual_seed(0)
            model = Stamped(config)
            with tempfile.TemporaryDirectory() as folder:
                settings = Settings(steps, torch.device("cpu"), Path(folder))
                LOOPS[framework](model, data, habit, offloads[habit], settings)
            times, losses[habit] = model.take()
            seconds[habit] = times[1:]
            del model
            gc.collect()
        if losses[Habit.BY_HAND] != losses[Habit.INTEGRATION]:
            raise AssertionError(f"{framework}: the integration changed a loss")
        turns.append(Turn(seconds[Habit.BY_HAND], seconds[Habit.INTEGRATION]))
    moved = min(offload.stats(synchronize=True).bytes_out for offload in offloads.values())
    for offload in offloads.values():
        offload.close()
    return turns, moved


def main() -> int:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--frameworks", nargs="+", choices=list(LOOPS), default=list(LOOPS))
    options = parse(parser, rounds=1)
    steps, small_steps = (3, 12) if options.quick else (6, 102)
    report = Report("frameworks", options)
    shown = table("framework", "added, ms", "step by hand, s", "added / step", "steps in turn")
    summary, samples = {}, {}
    for framework in options.frameworks:
        # The first run of a framework pays for its imports.
        measure(framework, SMALL, SMALL_BATCH, 3, 1, options, **EVERYTHING)
        small, moved_small = measure(framework, SMALL, SMALL_BATCH, small_steps, options.rounds, options, **EVERYTHING)
        large, moved = measure(framework, LARGE, LARGE_BATCH, steps, options.rounds, options, **MOST)
        if not (moved_small and moved):
            raise AssertionError(f"{framework}: nothing was offloaded")
        added = Spread.of([turn.added for turn in small])
        step = Spread.of([median(turn.by_hand) for turn in large])
        ratio = Spread.of([turn.ratio for turn in large])
        share = added.median / step.median
        report.at_most(f"{framework}: added seconds / seconds of a step", share, LIMIT)
        shown.add_row(
            framework,
            Spread(*(1e3 * x for x in asdict(added).values())).show(),
            step.show(),
            f"{share:.2%}",
            ratio.show(),
        )
        samples[framework] = {"small": small, "large": large}
        summary[framework] = {
            "added_seconds": added,
            "step_seconds": step,
            "added_of_step": share,
            "ratio_in_turn": ratio,
            "moved_bytes": moved,
            "moved_bytes_small": moved_small,
        }
    console.print(shown)
    return report.finish(samples, summary)


if __name__ == "__main__":
    sys.exit(main())
