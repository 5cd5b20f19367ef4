"""How close a training step comes to its floor on a CPU, where transfers are as fast as a token bucket lets them be.

    python -m benchmarks.cpu_floor
    python -m benchmarks.cpu_floor --rounds 1 --ratios 1

A step is forward and backward of the demo's model. Without offload it takes T_f and T_b. A step with offload moves D
bytes out and back. Offloading would be free if the link moved D in T_f; the bucket around the disk tier gives it 0.5, 1
and 2 times that. The floor is max(T_f, D/BW) + max(T_b, D/BW), all measured in the same round. The bits of all
gradients must be those without offload.

Where the link is slow, a step with ``codec="bf16"`` follows each in turn. Its floor is that of the fewer bytes which it
moves; what packing them takes is no part of it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import eager_offload as eo
from benchmarks.common import MIB, MODEL, Report, Spread, command_line, drive, parse, ratios, show, speeds, turns
from benchmarks.throttle import ThrottledTier
from benchmarks.training import hash_gradients, language_model, on_a_quiet_cpu, text, windows
from eager_offload.planning.predict import floor_seconds

#: The most that a step may take, as a multiple of its floor, by how fast the link is: 1 is where it is just free.
LIMITS = {0.5: 1.15, 1.0: 1.15, 2.0: 1.10}
#: The codecs that a link so slow is tried with as well, how many times as fast as without a step is to be at least, and
#: which part of the bytes may be written.
CODECS, FASTER, WRITTEN = {0.5: ("bf16",)}, 1.3, 0.5
_IDENTITY = "identity"


class Way(NamedTuple):
    """How the bytes of a step travel."""

    #: The speed of the link, of the free point.
    ratio: float
    codec: str = _IDENTITY

    def __str__(self) -> str:
        return f"{self.ratio:g} x free" + ("" if self.codec == _IDENTITY else f", {self.codec}")


@dataclass
class Timed:
    """One forward and its backward. Seconds and bytes."""

    variant: str
    round: int
    forward_seconds: float
    backward_seconds: float
    stall_seconds: float
    bytes_out: int
    coded_bytes: int
    gradients_hash: str
    load_average: float
    #: Of the link, and of the step without offload of the same round.
    floor_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


class Trainer:
    """The model and its batch; parameters never change, so that every step is the same."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = language_model(options)
        (self.batch,) = text(options)

    def step(self, variant: str = "none", number: int = -1, offload: eo.Offload | None = None) -> Timed:
        self.model.zero_grad(set_to_none=False)
        if offload is not None:
            offload.reset_stats()
        began = time.perf_counter()
        with offload or nullcontext():
            loss = self.model(self.batch.inputs, self.batch.targets)
        between = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        stats = eo.OffloadStats() if offload is None else offload.stats(synchronize=True)
        return Timed(
            variant,
            number,
            between - began,
            ended - between,
            stats.stall_seconds,
            stats.bytes_out,
            sum(stats.coded_bytes.values()),
            hash_gradients(self.model),
            os.getloadavg()[0],
        )


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    on_a_quiet_cpu(options)
    trainer = Trainer(options)
    trainer.step()  # loads code and makes the gradients
    plain = trainer.step()
    natural = eo.Offload(**windows(options))
    moved = [trainer.step(offload=natural) for _ in range(2)][-1].bytes_out
    natural.close()
    ways = [Way(ratio, codec) for ratio in options.ratios for codec in (_IDENTITY, *CODECS.get(ratio, ()))]
    rates = {way: way.ratio * moved / plain.forward_seconds for way in ways}
    offloads = {}
    for way, rate in rates.items():
        around = lambda tier, rate=rate: ThrottledTier(tier, rate, rate)  # noqa: E731  # a name would say no more
        offloads[way] = eo.Offload(around_tier=around, codec=way.codec, **windows(options))
        # A first step knows nothing of the order that is to come, and rounds nothing: who reads is learnt.
        for _ in range(1 if way.codec == _IDENTITY else 2):
            trainer.step(offload=offloads[way])
    timed = [plain]
    for number, way, shown in turns(options.rounds, [None, *ways]):
        if way is None:
            plain = trainer.step("none", number)
            timed.append(plain)
            continue
        one = trainer.step(str(way), number, offloads[way])
        nbytes = moved if way.codec == _IDENTITY else one.bytes_out
        write, read = (report.environment["disk"][f"{how}_bytes_per_second"] for how in ("write", "read"))
        reached = min(rates[way], write), min(rates[way], read)
        one.floor_seconds = floor_seconds(plain.forward_seconds, plain.backward_seconds, nbytes, *reached)
        timed.append(one)
        over = one.seconds / one.floor_seconds
        print(f"{shown}  {way!s:>16}  {one.seconds:>6.2f} s, {over:.3f} of its floor; load {one.load_average:.1f}")
    for offload in offloads.values():
        offload.close()
    return timed, judge(report, timed, ways)


def judge(report: Report, timed: list[Timed], ways: list[Way]) -> dict[str, dict[str, Spread]]:
    summary: dict[str, dict[str, Spread]] = {}
    for way in ways:
        own = [one for one in timed if one.variant == str(way)]
        found = summary[str(way)] = {
            "s a step": Spread.of(one.seconds for one in own),
            "floor s": Spread.of(one.floor_seconds for one in own),
            "over floor": Spread.of(one.seconds / one.floor_seconds for one in own),
            "stall s": Spread.of(one.stall_seconds for one in own),
            "MiB out": Spread.of((one.bytes_out for one in own), MIB),
        }
        limit = LIMITS.get(way.ratio, max(LIMITS.values()))
        report.at_most(f"{way}: step over floor", found["over floor"].median, limit)
        if way.codec != _IDENTITY:
            exact = str(Way(way.ratio))
            faster, written = ratios(timed, "seconds", exact, str(way)), ratios(timed, "bytes_out", str(way), exact)
            report.at_least(f"{way}: times as fast as identity", Spread.of(faster).median, FASTER)
            report.at_most(f"{way}: bytes written, of identity's", Spread.of(written).median, WRITTEN)
    same = {one.gradients_hash for one in timed if one.variant in ("none", *(str(Way(way.ratio)) for way in ways))}
    report.at_most("different gradients", len(same), 1)
    plain = [one for one in timed if one.variant == "none"]
    forward, backward = (
        Spread.of(getattr(one, f"{half}_seconds") for one in plain) for half in ("forward", "backward")
    )
    print(f"Without offload: forward {forward} s, backward {backward} s")
    show("Median (least .. most)", ({"link": way, **found} for way, found in summary.items()))
    return summary


def options_of() -> argparse.Namespace:
    parser = command_line(__doc__, rounds=5, threads=2, **MODEL)
    parser.add_argument("--ratios", type=speeds, default="0.5,1,2", help="links, in multiples of the free point")
    return parse(parser, rounds=1)


if __name__ == "__main__":
    sys.exit(drive("cpu_floor", options_of(), run, on_disk=True))
