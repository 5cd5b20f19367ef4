"""Measures what pack and unpack cost: for a tensor that stays, and for one that is offloaded.

    python -m benchmarks.hooks
    python -m benchmarks.hooks --tiers host --sizes 64KiB --repeats 15

The hooks are called directly, beside a pair that does nothing but ``detach``, and through operators (``exp``, which
saves one tensor, and ``neg``, which saves none). All take turns in every repetition, and so do few and many saves that
are alive. The cost of an offloaded tensor is the caller's ``time.thread_time``: its own work, without the transfer
threads' and without waiting. Each batch holds ``--live`` handles at once and lets go of them one by one, as backward
does; between ``--chunk`` calls the transfers may catch up while the clock stands still.

An offloaded tensor is measured in three kinds of step::

    looked up   a step that repeats: its saves are looked up in what the step before has taught
    other       a step that nothing is known of
    logged      as ``other``, and its saves are written down for the advice of the stats as well
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import eager_offload as eo
from benchmarks.common import Report, Spread, command_line, drive, listed, parse, ratios, show
from eager_offload.config import parse_size
from eager_offload.contexts import unpack
from eager_offload.runtime.base import Direction
from eager_offload.runtime.host import host_runtime

#: Microseconds: the most that pack and unpack of a kept tensor may cost above the pair.
KEPT_ABOVE_PAIR = 2.0
LOOKED_UP, OTHER, LOGGED = "looked up", "other", "logged"
#: Microseconds: the most that pack and unpack of an offloaded tensor may cost, by kind of step.
OFFLOADED = {LOOKED_UP: 42.0, OTHER: 48.0, LOGGED: 48.0}
#: What a save may cost with ``--alive`` of them alive, as a part of what it does with so few.
FEW, ALIVE_SHARE = 1000, 1.2
#: Bytes that one repetition moves at most: fewer calls of large tensors, so that no disk is worn out.
MOST_BYTES = 2 << 30
CPU = torch.device("cpu")
PAIR, KEPT = "pair that detaches", "kept"
OPERATOR, ALONE = "operator", "operator without hooks"


class Clock:
    """Sums up the thread's time over the sections that it runs in."""

    thread = 0.0

    def __enter__(self) -> None:
        self._thread = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.thread += time.thread_time() - self._thread


@dataclass(frozen=True)
class Cost:
    """Microseconds a call, of one repetition."""

    variant: str
    round: int
    pack: float
    unpack: float

    @property
    def total(self) -> float:
        return self.pack + self.unpack


@dataclass(frozen=True)
class Candidate:
    """One way to handle saved tensors."""

    name: str
    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]
    #: What surrounds the calls of pack, or the forward.
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    #: Whether anything moves, so that there is something to wait for between the calls.
    moves: bool = False

    def settle(self) -> None:
        """Lets every transfer that was enqueued end, without a call into what is measured."""
        runtime = host_runtime()
        for direction in Direction if self.moves else ():
            runtime.synchronize(runtime.record(runtime.transfer_stream(CPU, direction)))


#: Takes a candidate through one batch of calls, timed by a clock for each way.
Batch: TypeAlias = Callable[[Candidate, Clock, Clock], None]


def _detach(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _nothing(tensor: Tensor) -> Tensor:
    return tensor


#: The least that a pair of hooks can do: holding the tensor itself would leak, see the library's handles.
DETACHING = Candidate(PAIR, _detach, _nothing, partial(saved_tensors_hooks, _detach, _nothing))
WITHOUT = Candidate(ALONE, _detach, _nothing)


def ours(name: str, offload: eo.Offload, *, moves: bool) -> Candidate:
    return Candidate(name, offload._hooks.pack, unpack, lambda: offload, moves)


def chunks(options: argparse.Namespace) -> Iterator[range]:
    starts = range(0, options.live, options.chunk)
    return (range(start, min(start + options.chunk, options.live)) for start in starts)


def call_directly(make: Callable[[], list[Tensor]], options: argparse.Namespace) -> Batch:
    """Packs all tensors, then unpacks them in reverse and lets go of each handle and each tensor at once."""

    def run(candidate: Candidate, forward: Clock, backward: Clock) -> None:
        tensors, handles = make(), list[Any]()
        # Hooks that are called by hand are not entered; an offload is, for what it does at the end of a forward.
        context = candidate.context() if candidate.unpack is unpack else nullcontext()
        context.__enter__()
        for part in chunks(options):
            with forward:
                for index in part:
                    handles.append(candidate.pack(tensors[index]))
            candidate.settle()
        with forward:
            context.__exit__(None, None, None)
        tensors.clear()
        candidate.settle()
        for part in chunks(options):
            with backward:
                for _ in part:
                    candidate.unpack(handles.pop())
            candidate.settle()

    return run


def run_operator(nbytes: int, options: argparse.Namespace) -> Batch:
    """Forward and backward of operators that save one tensor each."""
    leaf = torch.zeros(nbytes // 4).requires_grad_()
    gradient = torch.ones_like(leaf)

    def run(candidate: Candidate, forward: Clock, backward: Clock) -> None:
        outputs: list[Tensor] = []
        context = candidate.context()
        context.__enter__()
        for part in chunks(options):
            with forward:
                for _ in part:
                    outputs.append(
                        leaf.exp().neg()
                    )  # which saves nothing, so that nothing else holds what exp has saved
            candidate.settle()
        with forward:
            context.__exit__(None, None, None)
        candidate.settle()
        for part in chunks(options):
            with backward:
                for _ in part:
                    torch.autograd.backward(outputs.pop(), gradient)
            candidate.settle()
        leaf.grad = None

    return run


def once(batch: Batch, candidate: Candidate, calls: int, live: int, name: str, number: int) -> Cost:
    """Batches of ``live`` calls, until there were ``calls`` of them."""
    forward, backward = Clock(), Clock()
    gc.collect()
    for _ in range(batches := -(-calls // live)):
        batch(candidate, forward, backward)
    unit = batches * live / 1e6
    return Cost(name, number, forward.thread / unit, backward.thread / unit)


def repeat(batch: Batch, calls: int, options: argparse.Namespace, *candidates: Candidate) -> list[Cost]:
    """Has all candidates take turns, ``options.repeats`` times."""
    costs = []
    for number in range(-1, options.repeats):  # the first is for warming up
        found = [once(batch, one, calls, options.live, one.name, number) for one in candidates]
        costs += found if number >= 0 else []
    return costs


def spread(costs: list[Cost], name: str, above: str | None = None, what: str = "total") -> Spread:
    """Of one candidate, or what it costs more than another, repetition by repetition."""
    own, base = ({one.round: getattr(one, what) for one in costs if one.variant == who} for who in (name, above))
    return Spread.of(cost - base.get(number, 0.0) for number, cost in own.items())


def measure_kept(report: Report, options: argparse.Namespace) -> dict[str, list[Cost]]:
    """Tensors that stay: too small, a parameter, and the view of one that ``nn.Linear`` saves."""
    offload = eo.Offload(tier="disk", disk_path=options.disk_path, min_bytes="1MiB")
    repeating = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0, step_tables=True)
    kept, looked_up = (ours(KEPT, one, moves=False) for one in (offload, repeating))
    linear = torch.nn.Linear(64, 64)
    what = {
        "small": torch.ones(64, 64).requires_grad_() * 1,
        "parameter": linear.weight,
        "weight.t()": linear.weight.t(),
    }
    found = {
        name: repeat(
            call_directly(lambda saved=tensor: [saved] * options.live, options),
            options.calls,
            options,
            DETACHING,
            kept,
        )
        for name, tensor in what.items()
    }

    def one_leaves() -> list[Tensor]:  # a step without a save that may move is not looked up
        return [*fresh_tensors(4096, 1), *[linear.weight] * (options.live - 1)]

    found["parameter, in a step that is looked up"] = repeat(
        call_directly(one_leaves, options), options.calls, options, DETACHING, looked_up
    )
    check_looked_up(repeating)
    repeating.close()
    found["through an operator"] = repeat(run_operator(4096, options), options.calls, options, WITHOUT, DETACHING, kept)
    assert offload.stats(synchronize=True).offloaded_bytes == 0, "these were to stay"
    for name, costs in found.items():
        report.at_most(f"kept, {name}: us above the pair", spread(costs, KEPT, PAIR).median, KEPT_ABOVE_PAIR)
    return found


def check_looked_up(offload: eo.Offload) -> None:
    """Exits unless all steps but the first were looked up, to the end."""
    stats = offload.stats(synchronize=True)
    if stats.steps - stats.table_forwards > 1 or stats.table_misses:
        raise SystemExit(f"benchmarks.hooks: {stats.table_forwards} of {stats.steps}, {stats.table_misses}")


def check_offloaded(offload: eo.Offload) -> None:
    """Exits unless all that was to leave has left."""
    stats = offload.stats(synchronize=True)
    eligible = stats.saved_bytes - stats.kept_bytes.get("small", 0)
    if stats.offloaded_bytes < 0.99 * eligible or stats.fallbacks:
        raise SystemExit(f"benchmarks.hooks: not everything was offloaded, so there is nothing to measure\n{stats}")


def fresh_tensors(nbytes: int, live: int) -> list[Tensor]:
    """Tensors with a storage each, such as operators make them."""
    leaf = torch.zeros(nbytes // 4).requires_grad_()
    return [leaf * 1 for _ in range(live)]


def measure_offloaded(report: Report, tier: str, size: str, options: argparse.Namespace) -> list[Cost]:
    nbytes = parse_size(size)
    fields = {
        "tier": tier,
        "disk_path": options.disk_path if tier == "disk" else None,
        "min_bytes": 0,
        "keep_last_bytes": 0,
        "max_inflight_bytes": max(nbytes * options.live, 1 << 20),
        "prefetch_bytes": nbytes * options.live // 4,
    }
    offloads = {kind: eo.Offload(fields, step_tables=kind == LOOKED_UP) for kind in OFFLOADED}
    calls = max(min(options.calls, MOST_BYTES // nbytes), options.live)
    kinds = {kind: ours(kind, offload, moves=True) for kind, offload in offloads.items()}
    kinds[LOGGED] = replace(kinds[LOGGED], context=partial(logging, offloads[LOGGED]))
    direct = call_directly(lambda: fresh_tensors(nbytes, options.live), options)
    costs = repeat(direct, calls, options, *kinds.values(), DETACHING)
    check_looked_up(offloads[LOOKED_UP])
    operator = replace(kinds[OTHER], name=OPERATOR)
    costs += repeat(run_operator(nbytes, options), min(calls, options.calls // 4), options, operator, WITHOUT)
    for offload in offloads.values():
        check_offloaded(offload)
        offload.close()
    for kind, most in OFFLOADED.items():
        report.at_most(f"{kind}, {tier}, {size}: us", spread(costs, kind).median, most)
    return costs


def logging(offload: eo.Offload) -> eo.Offload:
    """Returns ``offload``, which writes down what the next step saves, as for the first steps that it counts."""
    offload.reset_stats()
    return offload


def measure_alive(report: Report, options: argparse.Namespace) -> list[Cost]:
    """What a save costs with few and with many alive, without the garbage collector: it goes through all there is."""
    costs, nbytes, most = [], 4096, options.alive
    assert most > FEW, f"--alive {most} is not more than the {FEW} that it is compared with"
    fields = {"tier": "host", "min_bytes": 0, "keep_last_bytes": 0, "max_inflight_bytes": nbytes * most}
    for name in (OTHER, LOOKED_UP):
        offloads = {live: eo.Offload(fields, step_tables=name == LOOKED_UP) for live in (FEW, most)}
        gc.disable()
        for number, live in itertools.product(range(-1, options.repeats), offloads):
            batch = call_directly(
                partial(fresh_tensors, nbytes, live), argparse.Namespace(live=live, chunk=options.chunk)
            )
            candidate = ours(name, offloads[live], moves=True)
            cost = once(batch, candidate, most if number >= 0 else live, live, f"{name}, {live} alive", number)
            costs += [cost] if number >= 0 else []
        gc.enable()
        for offload in offloads.values():
            check_offloaded(offload)
            if name == LOOKED_UP:
                check_looked_up(offload)
            offload.close()
        shares = Spread.of(ratios(costs, "total", f"{name}, {most} alive", f"{name}, {FEW} alive"))
        report.at_most(f"{name}, {most} alive, of what it is with {FEW}", shares.median, ALIVE_SHARE)
    return costs


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    torch.set_num_threads(1)  # the caller's own thread is what is measured
    warnings.filterwarnings("ignore", message=".*copies within host memory.*")
    kept = measure_kept(report, options)
    rows = (
        {"": f"{what}: {name}", "a call": spread(costs, name), "above the pair": spread(costs, name, PAIR)}
        for what, costs in kept.items()
        for name in dict.fromkeys(one.variant for one in costs)
    )
    show("Kept: microseconds a call", rows)
    places = [(tier, size) for tier in options.tiers for size in options.sizes]
    offloaded = {f"{tier}, {size}": measure_offloaded(report, tier, size, options) for tier, size in places}
    rows = (
        {
            "": what,
            "pack": spread(costs, OTHER, what="pack").median,
            "unpack": spread(costs, OTHER, what="unpack").median,
            **{kind: spread(costs, kind) for kind in OFFLOADED},
            "pair": spread(costs, PAIR).median,
            "operator": spread(costs, OPERATOR, ALONE).median,
        }
        for what, costs in offloaded.items()
    )
    show("Offloaded: microseconds a call", rows)
    alive = measure_alive(report, options)
    rows = (
        {"": name, "both": spread(alive, name), "pack": spread(alive, name, what="pack").median}
        for name in dict.fromkeys(one.variant for one in alive)
    )
    show("By how many saves are alive: microseconds a call, 4 KiB to the host tier", rows)
    groups = {"kept": kept, "offloaded": offloaded, "alive": {"4KiB": alive}}
    summary = {
        group: {
            what: {name: spread(costs, name) for name in dict.fromkeys(one.variant for one in costs)}
            for what, costs in found.items()
        }
        for group, found in groups.items()
    }
    return {"unit": "microseconds a call", **groups}, summary


def options_of() -> argparse.Namespace:
    # Pairs of pack and unpack in a repetition; handles that are alive at once, and how many beside few where that is
    # compared; calls between pauses for the transfers.
    parser = command_line(__doc__, calls=20_480, repeats=7, live=256, chunk=16, alive=50_000)
    parser.add_argument("--tiers", type=listed(str), default="host,disk")
    parser.add_argument("--sizes", type=listed(str), default="4KiB,64KiB,1MiB")
    return parse(parser, calls=1024, repeats=3, alive=2000)


if __name__ == "__main__":
    sys.exit(drive("hooks", options_of(), run, on_disk=True))
