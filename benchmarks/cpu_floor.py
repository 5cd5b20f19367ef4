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
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import eager_offload as eo
from benchmarks.common import MIB, Report, Spread, console, drive, table
from benchmarks.options import MODEL, command_line, parse, speeds
from benchmarks.throttle import ThrottledTier
from benchmarks.training import hash_gradients, language_model, on_a_quiet_cpu, one_batch, windows
from eager_offload.tiers.base import Tier
from eager_offload.tiers.disk import Bandwidth, DiskTier

from lm.data import Batch

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


@dataclass(frozen=True)
class Timed:
    """One forward and its backward. Seconds and bytes."""

    #: Of the free point; ``None``: without offload.
    ratio: float | None
    codec: str
    round: int
    forward_seconds: float
    backward_seconds: float
    stall_seconds: float
    bytes_out: int
    bytes_in: int
    coded_bytes: int
    gradients_hash: str
    load_average: float

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Comparison:
    """A step behind a bucket beside the one without offload of the same round."""

    ratio: float
    codec: str
    round: int
    #: Bytes a second: of the bucket, or of the disk where that is slower.
    bandwidth: Bandwidth
    floor_seconds: float
    step_seconds: float

    @property
    def over_floor(self) -> float:
        return self.step_seconds / self.floor_seconds


class Trainer:
    """The model and its batch; parameters never change, so that every step is the same."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = language_model(options)
        self.batch = one_batch(options)

    def step(self, ratio: float | None, number: int, offload: eo.Offload | None, codec: str = _IDENTITY) -> Timed:
        """One step, timed."""
        self.model.zero_grad(set_to_none=False)
        if offload is not None:
            offload.reset_stats()
        began = time.perf_counter()
        between = self._train(self.batch, offload)
        ended = time.perf_counter()
        stats = None if offload is None else offload.stats(synchronize=True)
        return Timed(
            ratio=ratio,
            codec=codec,
            round=number,
            forward_seconds=between - began,
            backward_seconds=ended - between,
            stall_seconds=0.0 if stats is None else stats.stall_seconds,
            bytes_out=0 if stats is None else stats.bytes_out,
            bytes_in=0 if stats is None else stats.bytes_in,
            coded_bytes=0 if stats is None else sum(stats.coded_bytes.values()),
            gradients_hash=hash_gradients(self.model),
            load_average=os.getloadavg()[0],
        )

    def offload(self, around: Callable[[Tier], Tier] | None = None, **fields: Any) -> eo.Offload:
        return eo.Offload(around_tier=around, **windows(self.options), **fields)

    def _train(self, batch: Batch, offload: eo.Offload | None) -> float:
        """Forward and backward; returns the time between them."""
        with offload or nullcontext():
            loss = self.model(batch.inputs, batch.targets)
        between = time.perf_counter()
        loss.backward()
        return between


class Buckets:
    """An ``Offload`` behind a token bucket for each way, at rates that one step without it has shown.

    Args:
        free_rate: bytes a second at which a step's bytes leave in the time of its forward.
    """

    def __init__(self, trainer: Trainer, free_rate: float, ratios: list[float]) -> None:
        ways = [Way(ratio, codec) for ratio in ratios for codec in (_IDENTITY, *CODECS.get(ratio, ()))]
        self.rates = {way: way.ratio * free_rate for way in ways}
        self.offloads = {way: trainer.offload(throttled(rate), codec=way.codec) for way, rate in self.rates.items()}

    def close(self) -> None:
        for offload in self.offloads.values():
            offload.close()


def throttled(rate: float) -> Callable[[Tier], Tier]:
    """Puts a token bucket around a tier; ``rate`` is bytes a second, each way."""
    return lambda tier: ThrottledTier(tier, rate, rate)


def measure(options: argparse.Namespace, bandwidth: Bandwidth) -> tuple[list[Timed], list[Comparison]]:
    """All steps, and every one behind a bucket beside the one without offload of its round."""
    trainer = Trainer(options)
    trainer.step(None, -1, None)  # loads code and makes the gradients
    plain = trainer.step(None, -1, None)
    natural = trainer.offload()
    moved = [trainer.step(None, -1, natural) for _ in range(2)][-1].bytes_out
    natural.close()
    buckets = Buckets(trainer, moved / plain.forward_seconds, options.ratios)
    for way, offload in buckets.offloads.items():
        # A first step knows nothing of the order that is to come, and rounds nothing: who reads is learnt.
        for _ in range(1 if way.codec == _IDENTITY else 2):
            trainer.step(None, -1, offload)
    timed, compared = [plain], []
    for number in range(options.rounds):
        plain = trainer.step(None, number, None)
        timed.append(plain)
        for way, offload in buckets.offloads.items():
            one = trainer.step(way.ratio, number, offload, way.codec)
            timed.append(one)
            nbytes = moved if way.codec == _IDENTITY else one.bytes_out
            compared.append(compare(one, plain, nbytes, buckets.rates[way], bandwidth))
            console.print(
                f"round {number + 1}/{options.rounds}  {way!s:>16}  {one.seconds:>6.2f} s a step, "
                f"{compared[-1].over_floor:.3f} of its floor; stalled {one.stall_seconds:.2f} s; "
                f"load {one.load_average:.1f}"
            )
    buckets.close()
    return timed, compared


def compare(one: Timed, plain: Timed, nbytes: int, rate: float, disk: Bandwidth) -> Comparison:
    """A step beside its floor.

    Args:
        nbytes: what a step moves out, and back.
        rate: of the bucket, bytes a second.
    """
    assert one.ratio is not None
    reached = Bandwidth(min(rate, disk.write), min(rate, disk.read))
    floor = max(plain.forward_seconds, nbytes / reached.write) + max(plain.backward_seconds, nbytes / reached.read)
    return Comparison(one.ratio, one.codec, one.round, reached, floor, one.seconds)


def judge(report: Report, timed: list[Timed], compared: list[Comparison]) -> dict[str, dict[str, Spread]]:
    summary: dict[str, dict[str, Spread]] = {}
    for way in dict.fromkeys(Way(one.ratio, one.codec) for one in compared):
        own = [one for one in compared if (one.ratio, one.codec) == way]
        steps = [one for one in timed if (one.ratio, one.codec) == way]
        over_floor = Spread.of([one.over_floor for one in own])
        limit = LIMITS.get(way.ratio, max(LIMITS.values()))
        report.at_most(f"{way}: step over floor", over_floor.median, limit)
        found = summary[str(way)] = {
            "step over floor": over_floor,
            "step_seconds": Spread.of([one.step_seconds for one in own]),
            "floor_seconds": Spread.of([one.floor_seconds for one in own]),
            "stall_seconds": Spread.of([one.stall_seconds for one in steps]),
            "bytes_out": Spread.of([one.bytes_out for one in steps]),
            "coded_bytes": Spread.of([one.coded_bytes for one in steps]),
        }
        if way.codec != _IDENTITY:
            exact = summary[str(Way(way.ratio))]
            faster, written = (
                one[what].median / max(two[what].median, 1e-9)
                for one, two, what in ((exact, found, "step_seconds"), (found, exact, "bytes_out"))
            )
            report.at_least(f"{way}: times as fast as identity", faster, FASTER)
            report.at_most(f"{way}: bytes written, of identity's", written, WRITTEN)
    same = {one.gradients_hash for one in timed if one.codec == _IDENTITY}
    report.at_most("different gradients", len(same), 1)
    return summary


def show(timed: list[Timed], summary: dict[str, dict[str, Spread]]) -> None:
    plain = [one for one in timed if one.ratio is None]
    forward, backward = (
        Spread.of([getattr(one, f"{half}_seconds") for one in plain]).show(2) for half in ("forward", "backward")
    )
    console.print(f"Without offload: forward {forward} s, backward {backward} s; median (least .. most)")
    shown = table("link", "s a step", "floor s", "over floor", "stall s", "MiB out")
    for way, found in summary.items():
        shown.add_row(
            way,
            found["step_seconds"].show(2),
            f"{found['floor_seconds'].median:,.2f}",
            found["step over floor"].show(),
            f"{found['stall_seconds'].median:,.2f}",
            f"{found['bytes_out'].median / MIB:,.0f}",
        )
    console.print(shown)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    tier = DiskTier(None if options.disk_path is None else [options.disk_path], None)
    bandwidth = tier.measure()
    tier.close()
    report.environment["disk"] = {"write_bytes_per_second": bandwidth.write, "read_bytes_per_second": bandwidth.read}
    timed, compared = measure(options, bandwidth)
    summary = judge(report, timed, compared)
    show(timed, summary)
    samples = {"steps": [asdict(one) for one in timed], "floors": [asdict(one) for one in compared]}
    return samples, summary


def options_of() -> argparse.Namespace:
    parser = command_line(__doc__, rounds=5, threads=2, **MODEL)
    parser.add_argument("--ratios", type=speeds, default="0.5,1,2", help="links, in multiples of the free point")
    return parse(parser, rounds=1)


if __name__ == "__main__":
    sys.exit(drive("cpu_floor", options_of(), run, prepare=on_a_quiet_cpu))
