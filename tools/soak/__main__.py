"""Trains with random shapes, random faults, eval passes, exceptions and forgotten graphs; what has grown then?

    python -m tools.soak --minutes 10

Every step is compared, bit for bit, with the same step without offload, unless it ends in an error of the library that
a fault explains. Each resource is counted after a warm-up and at the end, with every `Offload` closed; and while it
runs, the most bytes that files and pools hold. Ends with status 1 if anything has grown, differed or hung.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import functools
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

import eager_offload as eo
from benchmarks.common import show
from eager_offload.engine import offloaders
from eager_offload.runtime.host import host_runtime
from eager_offload.tiers.disk import DiskTier
from tests.faults.disks import Faults, Faulty, fail_with
from tools.soak.census import MIB, Row, census, compare
from tools.soak.training import HEADS, WIDTH, expected, works

from lm.model import Block

# oneDNN keeps what it compiled for the last 1,024 shapes, and here no two are alike: a hundred MiB that come slowly.
os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"
#: Seconds after which a step counts as hanging: the stacks are printed, and the process ends.
_HANGS = 120.0
#: What a disk may say, by the call that it says it to.
ERRNOS = {
    "write": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.EROFS, errno.EBADF),
    "read": (errno.EIO, errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.EBADF, errno.ESTALE),
    "allocate": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EOPNOTSUPP),
    "usage": (errno.EIO,),
}


def any_fault(chance: random.Random, kinds: Sequence[str]) -> Faults:
    """One that ``chance`` chooses: of an operation, or of all from there."""
    kind = chance.choice(kinds)
    strike = fail_with(chance.choice(ERRNOS[kind])) if kind in ERRNOS else lambda: None
    return Faults(kind, chance.randint(1, 12), strike, for_good=chance.random() < 0.2)


class Soak:
    """One run. ``trouble`` has a line for each thing that must not happen."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.model = Block(WIDTH, HEADS)
        self.counts: Counter[str] = Counter()
        self.trouble: list[str] = []
        fields = {"min_bytes": "4KiB", "keep_last_bytes": 0}
        self.offloads = {
            "disk": eo.Offload(tier="disk", disk_path=directory, **fields),
            "verified": eo.Offload(tier="disk", disk_path=directory, verify=True, **fields),
            "small window": eo.Offload(
                tier="disk", disk_path=directory, max_inflight_bytes="1MiB", prefetch_bytes="1MiB", **fields
            ),
            "small disk": eo.Offload(tier="disk", disk_path=directory, disk_budget="2MiB", **fields),
            "host": eo.Offload(tier="host", **fields),
        }
        self.moved = Counter[str]()

    def step(self, work: str, where: str, *, faulty: bool) -> None:
        """One step of a kind on one of the offloads."""
        seed, offload, model = self.chance.randrange(1 << 30), self.offloads[where], self.model
        wanted = expected(model, works[work], seed)
        fault = None
        if faulty:
            kinds = ("write", "read", "allocate", "usage", "short", *(("corrupt",) if where == "verified" else ()))
            fault = Faulty.faults = any_fault(self.chance, kinds)
        self.counts["steps"] += 1
        try:
            found = works[work](model, offload, random.Random(seed))
        except (eo.TransferError, eo.CorruptionError, eo.ConfigError) as error:
            self.counts["errors that said so"] += 1
            # One that has been closed opens its file anew, and tries it by writing too.
            kinds = ("read", "write") if isinstance(error, eo.ConfigError) else ("read", "corrupt")
            if fault is None or not fault.injected or fault.kind not in kinds:
                self.trouble.append(f"{work} on {where}: {type(error).__name__} without a fault: {error}")
            model.zero_grad(set_to_none=True)
        else:
            if len(found) != len(wanted) or not all(map(torch.equal, found, wanted)):
                self.trouble.append(f"{work} on {where}, fault {fault and vars(fault)}: wrong gradients")
        finally:
            offload.stats(synchronize=True)
            Faulty.faults = None
        if fault is not None:
            self.counts["faults injected"] += fault.injected

    def any_step(self) -> None:
        """A step that chance chooses; now and then an ``Offload`` is closed, or counts anew."""
        where = self.chance.choice(list(self.offloads))
        if self.chance.random() < 0.02:
            self.chance.choice([self.offloads[where].close, self.offloads[where].reset_stats])()
        self.step(self.chance.choice(list(works)), where, faulty=self.chance.random() < 0.4)

    def warm_up(self) -> None:
        """Every kind on each of them: what is made once is there then."""
        for work in works:
            for where in self.offloads:
                self.alive()
                self.step(work, where, faulty=self.chance.random() < 0.5)

    def run(self, seconds: float) -> None:
        """Steps for that long."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.alive()
            self.any_step()

    def alive(self) -> None:
        """A step begins: the one before has not hung."""
        faulthandler.dump_traceback_later(_HANGS, exit=True)

    def held(self) -> dict[str, int]:
        """Bytes of files and pools in use, idle room included."""
        tiers = [tier for offload in self.offloads.values() for tier in offload._offloaders.tiers()]
        return {
            "spill files, running": sum(tier.held_bytes for tier in tiers if tier.name == "disk"),
            "host tier, running": sum(tier.held_bytes for tier in tiers if tier.name == "host"),
            "reload pool, running": host_runtime().pool.held_bytes,
            "slots in use, running": sum(tier.used_bytes for tier in tiers),
        }

    def close(self) -> None:
        for name, offload in self.offloads.items():
            self.moved[name] += offload.stats(synchronize=True).bytes_out
            offload.reset_stats()
            offload.close()
        host_runtime().pool.release_idle()


def soak(minutes: float, seed: int, directory: Path) -> tuple[Soak, list[Row]]:
    """Warms up, counts, runs, and counts again."""
    offloaders.DiskTier = functools.partial(DiskTier, file_type=Faulty)
    eo.release_freed_memory()
    run = Soak(directory, seed)
    run.warm_up()
    held = run.held()
    run.close()
    before = census()
    run.run(30 * minutes)
    run.close()
    halfway = census()
    run.run(30 * minutes)
    held_after = run.held()
    run.close()
    faulthandler.cancel_dump_traceback_later()
    after = census()
    # A file grows in steps of 64 MiB to the largest need so far, and so may one of each Offload.
    slack = {"spill files, running": len(run.offloads) * 64 * MIB, "host tier, running": 64 * MIB}
    running = [
        Row(what, held[what], held_after[what], slack.get(what, 64 * MIB if "pool" in what else 0)) for what in held
    ]
    if minutes >= 1:
        memory = "resident memory"
        running.append(Row(f"{memory}, second half", halfway[memory], after[memory], 16 * MIB))
    return run, [*compare(before, after), *running]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="after the warm-up (5)")
    parser.add_argument("--seed", type=int, default=0, help="of what happens (0)")
    parser.add_argument("--disk-path", type=Path, metavar="DIR", help="default: the temporary directory")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # faults are told, each once
    with tempfile.TemporaryDirectory(prefix="soak-", dir=options.disk_path) as directory:
        run, rows = soak(options.minutes, options.seed, Path(directory))
        left = [path.name for path in Path(directory).rglob("*") if path.is_file()]
    shown = (
        {
            "resource": row.what,
            "before": row.before,
            "after": row.after,
            "may grow by": row.slack,
            "": "flat" if row.flat else "GREW",
        }
        for row in rows
    )
    show("What there is", shown)
    run.trouble += [f"left on disk: {name}" for name in left]
    run.trouble += [f"nothing moved: {name}" for name, nbytes in run.moved.items() if nbytes == 0]
    if not run.counts["faults injected"]:
        run.trouble.append("no fault was injected")
    moved = sum(run.moved.values()) / MIB
    counts = ", ".join(f"{number:,} {what}" for what, number in sorted(run.counts.items(), reverse=True))
    print(f"{counts}, {moved:,.0f} MiB moved, {len(run.trouble)} that must not happen")
    print(*run.trouble[:20], sep="\n", end="\n" if run.trouble else "")
    return int(bool(run.trouble) or not all(row.flat for row in rows))


if __name__ == "__main__":
    sys.exit(main())
