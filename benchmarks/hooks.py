"""What pack and unpack cost: of a tensor that stays, and of one that is offloaded; decided anew, or as a plan says.

    python -m benchmarks.hooks
    python -m benchmarks.hooks --tiers host --sizes 64KiB --repeats 15

The hooks are called directly, beside a pair that does nothing but ``detach`` and beside torch's ``save_on_cpu``, and
through real operators (``exp``, which saves one tensor, and ``neg``, which saves none). All take turns in every
repetition. The cost of an offloaded tensor is the caller's ``time.thread_time``: its own work, without the transfer
threads' and without waiting. Each batch holds ``--live`` handles at once and lets go of them one by one, as backward
does; between ``--chunk`` calls the transfers may catch up while the clock stands still.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import eager_offload as eo
from benchmarks.common import Report, Spread, console, disk, drive, table
from benchmarks.options import command_line, listed, parse, positive
from eager_offload.active import unpack
from eager_offload.config import parse_size
from eager_offload.eager import plans
from eager_offload.runtime.base import Direction
from eager_offload.runtime.host import host_runtime

#: Microseconds: the most that pack and unpack of a kept tensor may cost above the pair, and of an offloaded one.
KEPT_ABOVE_PAIR, OFFLOADED = 2.0, 28.0
#: The same in a forward that follows a step plan, and the most that this, and writing one down, may take of the time of
#: one that is decided anew.
FOLLOWED_KEPT_ABOVE_PAIR, FOLLOWED, FOLLOWED_SHARE, RECORDED_SHARE = 1.5, 20.0, 0.7, 1.05
#: Bytes that one repetition moves at most: fewer calls of large tensors, so that no disk is worn out.
MOST_BYTES = 2 << 30
CPU = torch.device("cpu")


@dataclass
class Clock:
    """Sums up the thread's time and the wall's over the sections that it runs in."""

    thread: float = 0.0
    wall: float = 0.0

    def __enter__(self) -> None:
        self._wall = time.perf_counter()
        self._thread = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.thread += time.thread_time() - self._thread
        self.wall += time.perf_counter() - self._wall


@dataclass
class Costs:
    """Microseconds a call, one number for each repetition."""

    pack: list[float] = field(default_factory=list)
    unpack: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def add(self, forward: Clock, backward: Clock, calls: int) -> None:
        self.pack.append(forward.thread / calls * 1e6)
        self.unpack.append(backward.thread / calls * 1e6)
        self.wall.append((forward.wall + backward.wall) / calls * 1e6)

    @property
    def total(self) -> list[float]:
        return [sum(pair) for pair in zip(self.pack, self.unpack, strict=True)]

    def above(self, other: Costs) -> list[float]:
        """What this costs more than ``other``, repetition by repetition."""
        return [own - its for own, its in zip(self.total, other.total, strict=True)]


@dataclass(frozen=True)
class Candidate:
    """One way to handle saved tensors."""

    name: str
    pack: Callable[[Tensor], object]
    unpack: Callable[[object], Tensor]
    #: What surrounds the calls of pack, or the forward.
    context: Callable[[], AbstractContextManager[object]]
    offload: eo.Offload | None = None
    #: Whether anything moves, so that there is something to wait for between the calls.
    moves: bool = False


def pair() -> Candidate:
    """The least that a pair of hooks can do: holding the tensor itself would leak, see the library's handles."""
    pack, unpack_ = lambda tensor: tensor.detach(), lambda tensor: tensor
    return Candidate("pair that detaches", pack, unpack_, lambda: saved_tensors_hooks(pack, unpack_))


def on_cpu() -> Candidate:
    hooks = save_on_cpu()
    return Candidate("save_on_cpu", hooks.pack_hook, hooks.unpack_hook, save_on_cpu)


def ours(name: str, offload: eo.Offload, *, moves: bool) -> Candidate:
    return Candidate(name, offload._hooks.pack, unpack, lambda: offload, offload, moves)


@contextmanager
def recorded(offload: eo.Offload) -> Iterator[None]:
    """A forward that writes down what it does, and follows nothing."""
    before, plans._DECIDE_AGAIN = plans._DECIDE_AGAIN, 1
    try:
        with offload:
            yield
    finally:
        plans._DECIDE_AGAIN = before


def quiesce() -> None:
    """Lets every transfer that was enqueued end, without a call into what is measured."""
    runtime = host_runtime()
    for direction in Direction:
        runtime.synchronize(runtime.record(runtime.transfer_stream(CPU, direction)))


def chunks(count: int, chunk: int) -> Iterator[range]:
    return (range(start, min(start + chunk, count)) for start in range(0, count, chunk))


def call_directly(candidate: Candidate, tensors: list[Tensor], chunk: int, forward: Clock, backward: Clock) -> None:
    """Packs all tensors, then unpacks them in reverse and lets go of each handle and each tensor at once."""
    handles: list[object] = []
    context = candidate.context() if candidate.offload is not None else nullcontext()
    context.__enter__()
    for part in chunks(len(tensors), chunk):
        with forward:
            for index in part:
                handles.append(candidate.pack(tensors[index]))
        wait_if_needed(candidate)
    with forward:
        context.__exit__(None, None, None)
    tensors.clear()
    wait_if_needed(candidate)
    for part in chunks(len(handles), chunk):
        with backward:
            for _ in part:
                candidate.unpack(handles.pop())
        wait_if_needed(candidate)


def run_operator(candidate: Candidate, leaf: Tensor, live: int, chunk: int, forward: Clock, backward: Clock) -> None:
    """Forward and backward of ``live`` operators that save one tensor each."""
    outputs: list[Tensor] = []
    gradient = torch.ones_like(leaf)
    context = candidate.context()
    context.__enter__()
    for part in chunks(live, chunk):
        with forward:
            for _ in part:
                outputs.append(leaf.exp().neg())  # which saves nothing, so that nothing else holds what exp has saved
        wait_if_needed(candidate)
    with forward:
        context.__exit__(None, None, None)
    wait_if_needed(candidate)
    for part in chunks(live, chunk):
        with backward:
            for _ in part:
                torch.autograd.backward(outputs.pop(), gradient)
        wait_if_needed(candidate)
    leaf.grad = None


def wait_if_needed(candidate: Candidate) -> None:
    if candidate.moves:
        quiesce()


def repeat(
    candidates: Sequence[Candidate],
    make: Callable[[Candidate], list[Tensor]],
    calls: int,
    options: argparse.Namespace,
) -> list[Costs]:
    """Calls the hooks of all candidates in turn, ``options.repeats`` times."""
    costs = [Costs() for _ in candidates]
    for number in range(-1, options.repeats):  # the first is for warming up
        for candidate, cost in zip(candidates, costs, strict=True):
            forward, backward = Clock(), Clock()
            gc.collect()
            for _ in range(batches := -(-calls // options.live)):
                call_directly(candidate, make(candidate), options.chunk, forward, backward)
            if number >= 0:
                cost.add(forward, backward, batches * options.live)
    return costs


def repeat_operator(
    candidates: Sequence[Candidate], nbytes: int, calls: int, options: argparse.Namespace
) -> list[Costs]:
    costs = [Costs() for _ in candidates]
    leaf = torch.zeros(nbytes // 4).requires_grad_()
    for number in range(-1, options.repeats):
        for candidate, cost in zip(candidates, costs, strict=True):
            forward, backward = Clock(), Clock()
            gc.collect()
            for _ in range(batches := -(-calls // options.live)):
                run_operator(candidate, leaf, options.live, options.chunk, forward, backward)
            if number >= 0:
                cost.add(forward, backward, batches * options.live)
    return costs


def measure_kept(report: Report, options: argparse.Namespace) -> dict[str, dict[str, Costs]]:
    """Tensors that stay: too small, a parameter, and the view of one that ``nn.Linear`` saves."""
    offload = eo.Offload(tier="disk", disk_path=options.disk_path, min_bytes="1MiB")
    linear = torch.nn.Linear(64, 64)
    small = torch.ones(64, 64).requires_grad_() * 1
    what: dict[str, Tensor] = {"small": small, "parameter": linear.weight, "weight.t()": linear.weight.t()}
    found: dict[str, dict[str, Costs]] = {}
    for name, tensor in what.items():
        candidates = [pair(), on_cpu(), ours("kept", offload, moves=False)]
        costs = repeat(candidates, lambda _, saved=tensor: [saved] * options.live, options.calls, options)
        found[name] = {candidate.name: cost for candidate, cost in zip(candidates, costs, strict=True)}
    found["parameter, in a step that is followed"] = measure_kept_and_followed(linear.weight, options)
    none = Candidate("no hooks", Tensor.detach, lambda tensor: tensor, nullcontext)
    candidates = [none, pair(), on_cpu(), ours("kept", offload, moves=False)]
    costs = repeat_operator(candidates, 4096, options.calls, options)
    found["through an operator"] = {c.name: cost for c, cost in zip(candidates, costs, strict=True)}
    moved = offload.stats(synchronize=True).offloaded_bytes
    assert moved == 0, "these were to stay"
    for name, costs_of in found.items():
        above = Spread.of(costs_of["kept"].above(costs_of["pair that detaches"]))
        most = FOLLOWED_KEPT_ABOVE_PAIR if "followed" in name else KEPT_ABOVE_PAIR
        report.at_most(f"kept, {name}: us above the pair", above.median, most)
    return found


def measure_kept_and_followed(stays: Tensor, options: argparse.Namespace) -> dict[str, Costs]:
    """Tensors that stay in a forward that follows a plan, as it does where its first tensor leaves."""
    offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0, step_plans=True)
    candidates = [pair(), ours("kept", offload, moves=False)]

    def make(_: Candidate) -> list[Tensor]:
        return [*fresh_tensors(4096, 1), *[stays] * (options.live - 1)]

    costs = repeat(candidates, make, options.calls, options)
    check_followed(offload)
    offload.close()
    return {candidate.name: cost for candidate, cost in zip(candidates, costs, strict=True)}


def check_followed(offload: eo.Offload) -> None:
    """Nearly all forwards have followed a plan, to the end."""
    stats = offload.stats(synchronize=True)
    if stats.steps - stats.followed_forwards > 1 + stats.steps // 12 or stats.plan_misses:
        raise SystemExit(f"benchmarks.hooks: not all was followed: {stats.followed_forwards}, {stats.plan_misses}")


def fresh_tensors(nbytes: int, live: int) -> list[Tensor]:
    """Tensors with a storage each, such as operators make them."""
    leaf = torch.zeros(nbytes // 4).requires_grad_()
    return [leaf * 1 for _ in range(live)]


def measure_offloaded(report: Report, tier: str, size: str, options: argparse.Namespace) -> dict[str, Costs]:
    nbytes = parse_size(size)
    window = max(nbytes * options.live, 1 << 20)
    fields = {
        "tier": tier,
        "disk_path": options.disk_path if tier == "disk" else None,
        "min_bytes": 0,
        "keep_last_bytes": 0,
        "max_inflight_bytes": window,
        "prefetch_bytes": nbytes * options.live // 4,
    }
    offload, following, recording = (eo.Offload(fields, step_plans=how) for how in (False, True, True))
    calls = max(min(options.calls, MOST_BYTES // nbytes), options.live)
    candidate, followed = (ours("offloaded", one, moves=True) for one in (offload, following))
    noted = replace(ours("recorded", recording, moves=True), context=partial(recorded, recording))
    direct, least, planned, written = repeat(
        [candidate, pair(), followed, noted], lambda _: fresh_tensors(nbytes, options.live), calls, options
    )
    check_followed(following)
    following.close()
    recording.close()
    none = Candidate("no hooks", Tensor.detach, lambda tensor: tensor, nullcontext)
    operator, alone = repeat_operator([candidate, none], nbytes, min(calls, options.calls // 4), options)
    stats = offload.stats(synchronize=True)
    eligible = stats.saved_bytes - stats.kept_bytes.get("small", 0)
    if stats.offloaded_bytes < 0.99 * eligible or stats.demotions:
        raise SystemExit(f"benchmarks.hooks: not everything was offloaded, so there is nothing to measure\n{stats}")
    offload.close()
    report.at_most(f"offloaded, {tier}, {size}: us", Spread.of(direct.total).median, OFFLOADED)
    report.at_most(f"followed, {tier}, {size}: us", Spread.of(planned.total).median, FOLLOWED)
    report.at_most(f"followed of anew, {tier}, {size}", share(planned, direct), FOLLOWED_SHARE)
    report.at_most(f"recorded of anew, {tier}, {size}", share(written, direct), RECORDED_SHARE)
    return {
        "direct": direct,
        "followed": planned,
        "recorded": written,
        "pair that detaches": least,
        "operator": operator,
        "operator without hooks": alone,
    }


def share(costs: Costs, others: Costs) -> float:
    """The part that ``costs`` are of the others, the median over the repetitions."""
    return Spread.of([one / other for one, other in zip(costs.total, others.total, strict=True)]).median


def show_kept(found: dict[str, dict[str, Costs]]) -> None:
    shown = table("kept: microseconds a call", "median (least .. most)", "above the pair")
    for what, costs_of in found.items():
        base = costs_of["pair that detaches"]
        for name, costs in costs_of.items():
            above = "" if costs is base else Spread.of(costs.above(base)).show(2)
            shown.add_row(f"{what}: {name}", Spread.of(costs.total).show(2), above)
    console.print(shown)


def show_offloaded(found: dict[str, dict[str, Costs]]) -> None:
    headers = ("pack", "unpack", "both: median (least .. most)", "followed", "recorded", "wall", "pair", "operator")
    shown = table("offloaded: microseconds a call", *headers)
    for what, costs_of in found.items():
        direct = costs_of["direct"]
        shown.add_row(
            what,
            f"{Spread.of(direct.pack).median:.2f}",
            f"{Spread.of(direct.unpack).median:.2f}",
            Spread.of(direct.total).show(2),
            Spread.of(costs_of["followed"].total).show(2),
            f"{Spread.of(costs_of['recorded'].total).median:.2f}",
            f"{Spread.of(direct.wall).median:.2f}",
            f"{Spread.of(costs_of['pair that detaches'].total).median:.2f}",
            f"{Spread.of(costs_of['operator'].above(costs_of['operator without hooks'])).median:.2f}",
        )
    console.print(shown)


def prepare(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # the caller's own thread is what is measured
    warnings.filterwarnings("ignore", message=".*copies within host memory.*")


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    if "disk" in options.tiers:
        report.environment["disk"] = disk(options.disk_path)
    kept = measure_kept(report, options)
    show_kept(kept)
    offloaded = {
        f"{tier}, {size}": measure_offloaded(report, tier, size, options)
        for tier in options.tiers
        for size in options.sizes
    }
    show_offloaded(offloaded)
    summary = {
        group: {
            what: {name: Spread.of(costs.total) for name, costs in costs_of.items()} for what, costs_of in found.items()
        }
        for group, found in (("kept", kept), ("offloaded", offloaded))
    }
    return {"unit": "microseconds a call", "kept": kept, "offloaded": offloaded}, summary


def options_of() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--calls", type=positive, default=20_480, help="pack and unpack pairs in a repetition")
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--live", type=positive, default=256, help="handles that are alive at once")
    parser.add_argument("--chunk", type=positive, default=16, help="calls between pauses for the transfers")
    parser.add_argument("--tiers", type=listed(str), default="host,disk")
    parser.add_argument("--sizes", type=listed(str), default="4KiB,64KiB,1MiB")
    return parse(parser, calls=1024, repeats=3)


if __name__ == "__main__":
    sys.exit(drive("hooks", options_of(), run, prepare=prepare))
