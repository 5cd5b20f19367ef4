"""How fast the disk tier writes and reads one slot after the other, beside `dd` with O_DIRECT on the same blocks.

    python -m benchmarks.disk

`dd` opens the tier's own spill file through /proc, so both move the same bytes of the same file, the page cache out of
the way for both, in turn and each first as often as the other. `dd` says itself how long it took, so its start does not
count; of several block sizes the one that was fastest in that round stands for it. It writes zeros, the tier noise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import MIB, Report, Spread, console, table
from benchmarks.options import command_line, parse, positive
from eager_offload.config import parse_size
from eager_offload.tiers.directories import filesystem_of
from eager_offload.tiers.disk import DiskSlot, DiskTier
from eager_offload.tiers.memory import anonymous_slab

#: The least throughput of the tier, as a part of that of ``dd``.
LEAST = 0.9
#: The block sizes of ``dd``.
BLOCKS = (1 * MIB, 8 * MIB, 64 * MIB)
#: Passes each way before anything is measured: blocks are written for the first time.
_WARM_UP = 4


@dataclass(frozen=True)
class Sample:
    """One pass of one side over all bytes."""

    way: str
    round: int
    #: ``"tier"``, or ``dd`` with its block size.
    side: str
    bytes_per_second: float


class Tier:
    """A disk tier with room for all bytes."""

    def __init__(self, directory: Path | None, slot_bytes: int, slots: int) -> None:
        self.tier = DiskTier(None if directory is None else [directory], slot_bytes * slots)
        if not self.tier.direct_io:
            raise SystemExit(f"the disk of {self.tier.directories[0]} refuses direct I/O: nothing to compare")
        self.buffer: Tensor = anonymous_slab(slot_bytes)
        self.buffer.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
        self.slots: list[DiskSlot] = []
        for _ in range(slots):
            slot = self.tier.reserve(slot_bytes)
            assert slot is not None, "no room on the disk"
            self.slots.append(slot)

    @property
    def nbytes(self) -> int:
        return self.buffer.numel() * len(self.slots)

    @property
    def path(self) -> str:
        """Where ``dd`` finds the file, which has no name."""
        space = self.tier._space
        assert space is not None
        return f"/proc/{os.getpid()}/fd/{space.files[0].descriptor}"

    def run(self, way: str) -> float:
        """Bytes a second of one pass."""
        began = time.perf_counter()
        for slot in self.slots:
            if way == "write":
                slot.write(self.buffer)
            else:
                slot.read(self.buffer)
        return self.nbytes / (time.perf_counter() - began)


def dd(way: str, path: str, block: int, nbytes: int) -> float:
    """Bytes a second of ``dd``, by its own clock."""
    if way == "write":
        ends = ["if=/dev/zero", f"of={path}", "oflag=direct"]
    else:
        ends = [f"if={path}", "of=/dev/null", "iflag=direct"]
    command = ["dd", *ends, f"bs={block}", f"count={nbytes // block}", "conv=notrunc"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stderr
    found = re.search(r"(\d+) bytes .* copied, ([0-9.e+-]+) s", said)
    assert found is not None, said
    assert int(found[1]) == nbytes // block * block
    return int(found[1]) / float(found[2])


def by_tier(tier: Tier, way: str, number: int) -> list[Sample]:
    """One pass of the tier, in round ``number``."""
    return [Sample(way, number, "tier", tier.run(way))]


def by_dd(tier: Tier, way: str, number: int) -> list[Sample]:
    """A pass of ``dd`` for each block size."""
    blocks = [block for block in BLOCKS if block <= tier.nbytes]
    return [Sample(way, number, f"dd, {block // MIB} MiB", dd(way, tier.path, block, tier.nbytes)) for block in blocks]


def measure(tier: Tier, rounds: int) -> list[Sample]:
    """Each side once in every round, beginning with the other one each time."""
    samples = []
    for way in ("write", "read"):
        for _ in range(_WARM_UP):
            tier.run(way)
        for number in range(rounds):
            sides = [partial(by_tier, tier, way, number), partial(by_dd, tier, way, number)]
            for side in sides if number % 2 else reversed(sides):
                samples += side()
    return samples


def ratios(samples: Sequence[Sample], way: str) -> list[float]:
    """The tier's throughput over that of the fastest ``dd``, round by round."""
    found = []
    for number in {one.round for one in samples}:
        mine = [one for one in samples if (one.way, one.round) == (way, number)]
        best = max(one.bytes_per_second for one in mine if one.side != "tier")
        found += [one.bytes_per_second / best for one in mine if one.side == "tier"]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, rounds=15)
    parser.add_argument("--slot", type=parse_size, default="8MiB", help="bytes of one slot")
    parser.add_argument("--slots", type=positive, default=64, help="how many of them")
    options = parse(parser, arguments, slots=8, rounds=2)
    if shutil.which("dd") is None or not Path("/proc/self/fd").is_dir():
        parser.error("this needs dd and /proc")
    report = Report("disk", options)
    tier = Tier(options.disk_path, options.slot, options.slots)
    report.environment["disk"] = {"filesystem": filesystem_of(tier.tier.directories[0]), "direct_io": True}
    try:
        samples = measure(tier, options.rounds)
    finally:
        tier.tier.close()
    shown, summary = table("GB/s", "write", "read"), {}
    for side in dict.fromkeys(one.side for one in samples):
        spreads = {
            way: Spread.of([one.bytes_per_second / 1e9 for one in samples if (one.side, one.way) == (side, way)])
            for way in ("write", "read")
        }
        summary[side] = spreads
        shown.add_row(side, *(spread.show(2) for spread in spreads.values()))
    for way in ("write", "read"):
        summary[f"{way}: tier / fastest dd"] = Spread.of(ratios(samples, way))
        report.at_least(f"{way}: tier / fastest dd", summary[f"{way}: tier / fastest dd"].median, LEAST)
    console.print(shown)
    return report.finish(samples, summary)


if __name__ == "__main__":
    sys.exit(main())
