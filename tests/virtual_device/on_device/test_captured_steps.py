"""``capture_step`` on the virtual device: steps that offload replay as eager steps run, to the bit, in any order."""

from __future__ import annotations

import gc
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from eager_offload import CapacityError, Offload
from eager_offload.eager.captured import CapturedRun
from eager_offload.graphs import (
    CapturedStep,
    CaptureInputError,
    CapturePool,
    CaptureStateError,
    CaptureStatus,
    DeviceScalar,
    GraphCaptureGuard,
    GraphPoolHandle,
    PoolInUseError,
    PoolSealedError,
    ScheduleMismatchError,
    capture_status,
    capture_step,
)
from eager_offload.graphs import graph as of_graphs
from eager_offload.runtime.accelerator import AcceleratorRuntime, accelerator_runtime
from eager_offload.runtime.accelerator_events import AcceleratorEvent
from eager_offload.runtime.base import Direction, Event
from eager_offload.stats import KeepReason
from tests.threads import collect
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.graphs import nodes_of, violations
from tests.virtual_device.on_device.steps import Block, Resumable, assert_captures, graphs_alive, inputs, same

REPLAYS = 100
#: In so many a missing edge shows.
FEW = 20


@pytest.fixture
def offloads(offloads: Callable[..., Offload]) -> Callable[..., Offload]:
    """With room for one copy in the window: what a captured step has on its way when forward ends stays."""
    return partial(offloads, max_inflight_bytes=1)


@pytest.fixture(autouse=True)
def _nothing_is_left(virtual: VirtualDevice) -> Iterator[None]:
    stream = torch.accelerator.current_stream()
    yield
    assert torch.accelerator.current_stream() == stream
    assert capture_status() is CaptureStatus.NONE
    assert_captures()


class Training(Resumable):
    """A block of a GPT with dropout, a fused AdamW, and a rate that changes.

    Args:
        forwards: of one step, each followed by its backward: gradients are accumulated.
    """

    def __init__(self, forwards: int = 1) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.block: Callable[..., Tensor] = Block().to(NAME)
        self.model, self.rate = self.block, DeviceScalar(1e-2)
        self.optimizer = torch.optim.AdamW(self._parameters(), lr=self.rate.tensor, fused=True)
        self._forwards = forwards

    def _parameters(self) -> list[nn.Parameter]:
        assert isinstance(self.model, nn.Module)
        return [*self.model.parameters()]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        for _ in range(self._forwards):
            loss = (self.block(x) - y).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def capture(self, offload: Offload | None, **arguments: Any) -> CapturedStep:
        x, y, _ = next(inputs(1, seed=9))
        return capture_step(self, (x.to(NAME), y.to(NAME)), offload=offload, scalars=[self.rate], **arguments)

    def run(self, one: Callable[[Tensor, Tensor], Tensor], state: list[Tensor], count: int) -> list[Tensor]:
        """The losses of ``count`` steps from ``state``, and all that they have changed."""
        self.restore(state)
        torch.manual_seed(3)
        found = []
        for x, y, rate in inputs(count):
            self.rate.update(rate)
            found.append(one(x.to(NAME), y.to(NAME)).cpu())
        return found + self.state()


def link_bytes(virtual: VirtualDevice, call: Callable[[], object]) -> tuple[int, int]:
    before = virtual.copied_bytes
    call()
    torch.accelerator.synchronize()
    out, back = (now - then for now, then in zip(virtual.copied_bytes, before, strict=True))
    return out, back


def copies(step: CapturedStep, kind: str) -> int:
    """Bytes that a replay moves one way."""
    return sum(
        region.stop - region.start for one in nodes_of(step.graph._graph) if one.kind == kind for region in one.writes
    )


# -- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forwards", "replays", "codec"), [(1, REPLAYS, "identity"), (2, FEW, "identity"), (1, FEW, "lossless")]
)
def test_replays_of_a_step_that_offloads_are_eager_steps_to_the_bit(
    virtual: VirtualDevice, forwards: int, replays: int, codec: str, offloads: Any
) -> None:
    """Forward, backward, dropout, clipping and a fused AdamW, with new inputs and another rate each time.

    With ``lossless`` as well: a graph cannot wait to be told whether a mask of ``bool`` fits.
    """
    training, offload = Training(forwards), offloads(codec=codec)
    with training.capture(offload, debug=True) as step:
        state = training.state()
        eager = training.run(training, state, replays)
        with virtual.replays(1):
            replayed = training.run(step, state, replays)
        assert same(eager, replayed)
        assert len({value.item() for value in eager[:replays]}) == replays
        assert len(step.plans) == forwards
        assert step.plan is not None
        moved = copies(step, "copy out"), copies(step, "copy in")
        assert moved[0] == sum(plan.totals.slots for plan in step.plans) > 0
        assert moved[0] == moved[1]
        assert link_bytes(virtual, lambda: [step.launch() for _ in range(3)]) == (3 * moved[0], 3 * moved[1])
        assert not violations(nodes_of(step.graph._graph))
        assert step.kept[KeepReason.PARAMETER] > 0
        saved = sum(plan.totals.saved for plan in step.plans)
        leaving = sum(plan.totals.offloaded + shared_with_those(plan) for plan in step.plans)
        assert sum(step.kept.values()) == saved - leaving
        assert step.graph.num_replays == replays + 3


def shared_with_those(plan: Any) -> int:
    """Bytes of saves that share a storage which leaves."""
    return sum(one.nbytes for one in plan.saves if one.owner >= 0 and one.slot < 0 and plan.saves[one.owner].slot >= 0)


def test_a_step_without_offload_is_captured_whole(virtual: VirtualDevice) -> None:
    training = Training()
    step = training.capture(None, warmup=2, debug=True)
    state = training.state()
    eager = training.run(training, state, FEW)
    with virtual.replays(2):
        assert same(eager, training.run(step, state, FEW))
    assert (step.plan, step.plans, dict(step.kept)) == (None, (), {})
    assert not step.graph.has_pool
    assert step.scalars == (training.rate,)
    assert not violations(nodes_of(step.graph._graph))


# -- what is not exact ------------------------------------------------------------------------------------------------


class Chain:
    """Layers of which each saves what the next one writes over, twice: small, and every byte of it crosses the link."""

    def __init__(self, forwards: int = 2) -> None:
        generator = torch.Generator().manual_seed(0)
        self._weights = [(torch.randn(8, 8, generator=generator) / 4).to(NAME).requires_grad_() for _ in range(4)]
        self._forwards = forwards
        self.batches = [torch.randn(8, 8, generator=generator).to(NAME) for _ in range(FEW)]
        self._expected: list[list[Tensor]] = []

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for _ in range(self._forwards):
            h = x
            for weight in self._weights:
                h = (h @ weight).tanh().exp()
            found += torch.autograd.grad(h.square().sum(), self._weights)
        return tuple(found)

    def capture(self, offload: Offload | None, **arguments: Any) -> CapturedStep:
        return capture_step(self, (torch.zeros(8, 8, device=NAME),), offload=offload, **arguments)

    def is_exact(self, virtual: VirtualDevice, step: CapturedStep, seed: int = 0, without: Any = ()) -> bool:
        """Whether a few replays, in orders that ``seed`` draws, give what eager steps give."""
        if not self._expected:
            self._expected = [[value.cpu() for value in self(x)] for x in self.batches]
            assert all(value.isfinite().all() for values in self._expected for value in values)
        with virtual.replays(seed, without):
            replays = ([value.cpu() for value in step(x)] for x in self.batches)
            return all(same(one, other) for one, other in zip(self._expected, replays, strict=True))


def test_an_edge_of_offload_left_out_is_reported_and_shows_if_and_only_if_it_is_needed(
    virtual: VirtualDevice, offloads: Any
) -> None:
    """Of all edges between streams: forks, windows, joins, and slots that the second forward uses again."""
    chain, offload = Chain(), offloads()
    with chain.capture(offload, debug=True) as step:
        nodes = nodes_of(step.graph._graph)
        assert not violations(nodes)
        assert chain.is_exact(virtual, step)
        edges = {edge for node in nodes for edge in node.edges if nodes[edge[0]].stream != nodes[edge[1]].stream}
        reported = {edge for edge in edges if violations(nodes, [edge])}
        wrong = {edge for edge in edges if not chain.is_exact(virtual, step, 1, [edge])}
        assert reported == wrong
        kinds = {(nodes[before].kind, nodes[after].kind) for before, after in wrong}
        assert {("kernel", "copy out"), ("copy out", "free"), ("allocate", "copy in")} < kinds
        assert any(before == "copy in" for before, _ in kinds)  # compute waits for what comes back
        # Each has its copy out wait, its source, its target and compute; copies out that start together wait once.
        assert len(wrong) >= 3 * len(step.plans[0].slots)


def test_a_fork_that_is_left_out_is_an_error(monkeypatch: pytest.MonkeyPatch, offloads: Any) -> None:
    chain, offload = Chain(1), offloads()
    held: list[Tensor] = []

    def copy(
        self: AcceleratorRuntime, target: Tensor, source: Tensor, stream: torch.Stream, after: list[Event]
    ) -> Event:
        held.extend((target, source))  # outside of the capture it runs, when the capture has let go of both
        return intact(self, target, source, stream, [])

    with monkeypatch.context() as patch:
        intact = AcceleratorRuntime.copy_in_capture
        patch.setattr(AcceleratorRuntime, "copy_in_capture", copy)
        with pytest.raises(CaptureStateError, match="recorded outside of it"):
            chain.capture(offload)
    torch.accelerator.synchronize()
    held.clear()
    assert chain.capture(offload).plan is not None


# -- the same in each run ---------------------------------------------------------------------------------------------


def link(monkeypatch: pytest.MonkeyPatch, part: float, seed: int) -> None:
    """Has the host find this part of all copies over when it looks, and others not before it has waited for them."""
    answers = random.Random(seed)

    def query(event: AcceleratorEvent) -> bool:
        if not event._done and answers.random() < part:
            event.synchronize()
        return event._done

    monkeypatch.setattr(AcceleratorEvent, "query", query)


class Deep:
    """Two forwards, of eight layers each, which save 1 KiB."""

    def __init__(self) -> None:
        self._w = torch.full((16, 16), 0.01, device=NAME, requires_grad=True)

    def __call__(self, x: Tensor) -> None:
        for _ in range(2):
            h = x
            for _ in range(8):
                h = (h @ self._w).tanh()
            h.sum().backward()


@pytest.mark.filterwarnings("ignore:.*device_budget:RuntimeWarning")
@pytest.mark.parametrize(
    ("setting", "runs"), [("keep_last_bytes", FEW), ("nothing", 5), ("max_slowdown", 5), ("device_budget", 5)]
)
def test_h71_what_a_captured_step_moves_does_not_depend_on_the_host(setting: str, runs: int, offloads: Any) -> None:
    """Nor on the link, on what earlier steps have on its way, or, but for a budget, on whether there were any."""
    settings = {"max_inflight_bytes": "2KiB", "prefetch_bytes": "2KiB", "keep_last_bytes": "auto"}
    values = {"keep_last_bytes": 0, "max_slowdown": 0.1, "device_budget": torch.accelerator.memory_allocated() + 8192}
    found = set()
    for seed in range(runs):
        with pytest.MonkeyPatch.context() as patch:
            link(patch, seed / (runs - 1), seed)
            offload = offloads(**settings | {name: values[name] for name in values if name == setting})
            train, x = Deep(), torch.ones(16, 16, device=NAME)
            for _ in range(0 if setting == "device_budget" else seed % 3):
                with offload:
                    train(x)
            step = capture_step(train, (x,), offload=offload, debug=True)
        work = tuple((node.kind, node.what, node.stream, node.after) for node in nodes_of(step.graph._graph))
        found.add((step.plans, tuple(sorted(step.kept.items())), work))
        assert copies(step, "copy out") == copies(step, "copy in") >= 8 << 10
        step.close()
        offload.close()
    assert len(found) == 1


# -- what differs, and other errors -----------------------------------------------------------------------------------


class Changing:
    """A step that does another thing in the call of a number; the last of three warm-ups is the third."""

    def __init__(self, at: int, what: str) -> None:
        self._at, self._what, self.calls = at, what, 0
        self._w = torch.full((16, 16), 0.1, device=NAME, requires_grad=True)

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        what = self._what if self.calls == self._at else ""
        h = (x[:4] if what == "size" else x) @ self._w
        if what == "more":
            h = h.exp()
        h = h.sin() if what == "fewer" else h.tanh().exp()
        if what == "swallowed":
            with suppress(ScheduleMismatchError):
                h.exp()
        if what == "another":
            Offload().__enter__()
        if what == "raises":
            raise KeyError("of the step")
        if what == "number":
            h.sum().item()
        if what == "twice":
            torch.autograd.grad(h.sum(), self._w, retain_graph=True)
        if what == "no backward":
            return h.detach().sum()
        loss = h.sin().sum()
        if what == "later":
            return loss
        loss.backward()
        return loss.detach()


SAYS = "in its warm-ups and in the capture, and differs first at"
DIFFERENCES = {
    "size": rf"{SAYS} save 0: the warm-up had a tensor of 1,024 bytes, the capture has a tensor of 256 bytes \(4, 16",
    "more": rf"{SAYS} save 3: the warm-up had the storage of save 2, the capture has another one",
    "fewer": rf"{SAYS} unpack 0: the warm-up had save 3, the capture has save 2",
    "swallowed": rf"{SAYS} save 3: the warm-up had the storage of save 2, the capture has another one",
    "no backward": rf"{SAYS} save 3: the warm-up had a tensor of 1,024 bytes, requires grad, the capture has none",
    "later": rf"{SAYS} unpack 0: the warm-up had save 3, the capture has none",
    "twice": rf"{SAYS} unpack 0: the warm-up had save 3, the capture has save 2",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_capture_that_differs_from_its_warm_ups_names_the_first_difference(what: str, offloads: Any) -> None:
    offload, x = offloads(), torch.ones(16, 16, device=NAME)
    with pytest.raises(ScheduleMismatchError, match=DIFFERENCES[what]):
        capture_step(Changing(4, what), (x,), offload=offload)
    with capture_step(Changing(1, what), (x,), offload=offload) as step:  # what happens once may be in the first one
        step.launch()


def test_warm_ups_that_differ_are_an_error_before_the_capture(offloads: Any) -> None:
    step, x = Changing(2, "size"), torch.ones(16, 16, device=NAME)
    with pytest.raises(ScheduleMismatchError, match=r"the warm-up before the last had.* 256 bytes.*the last one"):
        capture_step(step, (x,), offload=offloads())
    assert step.calls == 3


@pytest.mark.parametrize(
    ("at", "what", "error", "message"),
    [
        (3, "twice", CaptureStateError, "ran backward of a graph twice"),
        (4, "another", CaptureStateError, "an Offload was entered"),
        (4, "raises", KeyError, "of the step"),
        (2, "raises", KeyError, "of the step"),
        (4, "number", RuntimeError, "not permitted while a stream is being captured"),
    ],
)
def test_after_a_step_that_cannot_be_captured_everything_works(
    virtual: VirtualDevice, at: int, what: str, error: type[Exception], message: str, offloads: Any
) -> None:
    offload, pool, x = offloads(), CapturePool("1MiB"), torch.ones(16, 16, device=NAME)
    state = graphs_alive(virtual), torch.accelerator.memory_allocated()
    with pytest.raises(error, match=message) as raised:
        capture_step(Changing(at, what), (x,), offload=offload, pool=pool)
    del raised  # which holds the tensors of the step
    offload.stats(synchronize=True)
    deadline = time.monotonic() + 60  # what an error in backward has ended, autograd's thread of the device lets go of
    while (graphs_alive(virtual), torch.accelerator.memory_allocated()) != state and time.monotonic() < deadline:
        time.sleep(0.001)
    assert (graphs_alive(virtual), torch.accelerator.memory_allocated()) == state
    assert (pool.sealed, pool.buffer_count, pool.host_buffer(1 << 20).numel()) == (False, 0, 1 << 20)
    pool.clear_buffers()
    assert_trains(offload)
    assert Chain(1).capture(offload, pool=pool).graph.pool is pool


class Failing(Training):
    """Raises behind the backward of the capture, which has left gradients in which nothing stands."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().__call__(x, y)
        if capture_status().is_capturing:
            raise KeyError("of the step")
        return loss


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_steps_that_begin_without_gradients_go_on_after_a_capture_that_failed(
    is_offloaded: bool, offloads: Any
) -> None:
    training, around = Failing(), offloads() if is_offloaded else None
    x, y, _ = next(inputs(1))
    training(x.to(NAME), y.to(NAME))
    state = training.state()
    expected = training.run(training, state, 5)
    with pytest.raises(KeyError):
        training.capture(around)
    assert same(training.run(training, state, 5), expected)
    if around is not None:
        with around:
            assert same(training.run(training, state, 5), expected)
        assert around.stats(synchronize=True).bytes_out > 0


def assert_trains(offload: Offload) -> None:
    def gradient() -> Tensor:
        x = torch.linspace(0, 1, 1 << 10, device=NAME).requires_grad_()
        loss = (x * 2).exp().sin().exp().sin().sum()
        accelerator_runtime().transfer_stream(x.device, Direction.OUT).synchronize()
        return torch.autograd.grad(loss, x)[0].cpu()

    before = offload.stats().bytes_out
    with offload:
        found = gradient()
    assert torch.equal(found, gradient())
    assert offload.stats(synchronize=True).bytes_out > before


def given_plan(offloads: Any) -> Offload:
    return offloads(plan=Chain(1).capture(offloads()).plan)


def sealed() -> CapturePool:
    pool = CapturePool()
    pool.seal()
    return pool


#: Arguments that cannot be, each known before the step is called for the first time.
REFUSED: dict[str, tuple[type[Exception], str, Callable[[Any, Path], dict[str, Any]]]] = {
    "disk tier": (CaptureStateError, "tier='disk'", lambda make, path: {"offload": make(tier="disk", disk_path=path)}),
    "disk behind": (CaptureStateError, "no disk_path", lambda make, path: {"offload": Offload(disk_path=path)}),
    "pageable": (CaptureStateError, "pin_memory=False", lambda make, path: {"offload": make(pin_memory=False)}),
    "a plan": (CaptureStateError, "Leave plan= out", lambda make, path: {"offload": given_plan(make)}),
    "no offload": (CaptureInputError, "is an eager_offload.Offload", lambda make, path: {"offload": "host"}),
    "inputs": (CaptureInputError, "were given as Tensor", lambda make, path: {"inputs": torch.ones(2)}),
    "scalars": (CaptureInputError, "was given 0.5", lambda make, path: {"scalars": [0.5]}),
    "no warm-up": (CaptureInputError, "warmup=0 is not", lambda make, path: {"offload": make(), "warmup": 0}),
    "warm-ups": (CaptureInputError, "a number from 0 on", lambda make, path: {"warmup": -1}),
    "mode": (ValueError, "no mode", lambda make, path: {"mode": "no mode"}),
    "pool": (PoolSealedError, "a step was captured", lambda make, path: {"pool": sealed()}),
    "handle": (CaptureInputError, "names no pool", lambda make, path: {"pool": GraphPoolHandle(-1)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_an_error_before_the_first_warm_up(name: str, tmp_path: Path, offloads: Any) -> None:
    error, message, arguments = REFUSED[name]
    calls: list[int] = []
    with pytest.raises(error, match=message):
        capture_step(lambda: calls.append(1), **arguments(offloads, tmp_path))
    assert not calls


def test_where_a_step_cannot_be_captured(tmp_path: Path, offloads: Any) -> None:
    offload, calls = offloads(), list[int]()

    def capture() -> CapturedStep:
        return capture_step(lambda: calls.append(1), offload=offload)

    with offload, pytest.raises(CaptureStateError, match="inside of a `with` of its Offload"):
        capture()
    with (
        pytest.warns(RuntimeWarning, match="nothing ran"),
        offload.trace(tmp_path / "trace.json"),
        pytest.raises(CaptureStateError, match="is traced"),
    ):
        capture()
    with GraphCaptureGuard(), pytest.raises(CaptureStateError, match="inside of a capture"):
        capture()
    assert not calls


def test_a_trace_that_is_begun_in_a_capture_is_an_error(tmp_path: Path, offloads: Any) -> None:
    offload, chain = offloads(), Chain(1)

    def traced(x: Tensor) -> tuple[Tensor, ...]:
        if capture_status().is_capturing:
            with pytest.raises(CaptureStateError, match="a trace was begun while"):
                offload.trace(tmp_path / "trace.json").__enter__()
        return chain(x)

    with capture_step(traced, (torch.ones(8, 8, device=NAME),), offload=offload) as step:
        step.launch()
    assert not [*tmp_path.iterdir()]


def test_a_pool_that_is_too_small_is_an_error_that_says_how_much_is_missing(offloads: Any) -> None:
    offload, chain, pools = offloads(), Chain(1), list[CapturePool]()

    def capture_until_it_moves() -> None:  # what a busy machine's warm-ups copied in vain is left out of a capture
        for _ in range(20):
            pools.append(CapturePool(256))
            with chain.capture(offload, pool=pools[-1]):
                pass

    with pytest.raises(CapacityError, match="256 left of its 256"):
        capture_until_it_moves()
    assert not pools[-1].sealed


def test_a_step_that_is_closed_or_called_otherwise_is_an_error(offloads: Any) -> None:
    offload, chain = offloads(), Chain(1)
    step = chain.capture(offload)
    with pytest.raises(CaptureInputError, match=r"captured as a tensor of \(8, 8\).*given as a tensor of \(4, 8\)"):
        step(torch.ones(4, 8, device=NAME))
    with pytest.raises(CaptureInputError, match="captured with 1 values"):
        step()
    with GraphCaptureGuard():
        for call in (lambda: step(torch.ones(8, 8, device=NAME)), step.launch):
            with pytest.raises(CaptureStateError):
                call()
    assert "0 replays" in repr(step)
    step.close()
    step.close()
    assert "closed" in repr(step)
    for call in (step.launch, lambda: step(1), lambda: step.graph, lambda: step.result):
        with pytest.raises(CaptureStateError, match="is closed"):
            call()


def test_backward_after_the_capture_of_its_forward_is_an_error(offloads: Any) -> None:
    offload, w = offloads(), torch.ones(16, 16, device=NAME, requires_grad=True)

    def keeps_its_graph() -> Tensor:
        loss = (w * 2).exp().sin().exp().sum()
        torch.autograd.grad(loss, w, retain_graph=True)
        return loss

    step = capture_step(keeps_its_graph, offload=offload)
    with pytest.raises(CaptureStateError, match="after the capture"):
        step.result.backward()
    del step


# -- pools, streams, threads, memory ----------------------------------------------------------------------------------


def test_two_steps_on_one_pool_take_turns_on_any_stream(virtual: VirtualDevice, offloads: Any) -> None:
    offload, chains, other = offloads(), [Chain(1), Chain(2)], torch.Stream(device=NAME)
    pool = CapturePool("64KiB")
    first = chains[0].capture(offload, pool=pool, debug=True)
    with pytest.raises(PoolSealedError, match="unseal"):
        chains[1].capture(offload, pool=pool)
    pool.unseal()
    second = chains[1].capture(offload, pool=pool, debug=True)
    expected = [[value.cpu() for value in chain(x)] for x in chains[0].batches[:5] for chain in chains]
    found = []
    with virtual.replays(4), virtual.slow_compute(1e-4):
        for number, x in enumerate(chains[0].batches[:5]):
            for step in (first, second):
                with other if number % 2 else torch.Stream(device=NAME):
                    torch.accelerator.current_stream().wait_stream(torch.accelerator.current_stream())
                    found.append([value.cpu() for value in step(x)])
    assert all(same(one, two) for one, two in zip(expected, found, strict=True))
    with pytest.raises(PoolInUseError, match="by 2 graphs"):
        pool.clear_buffers()
    first.close()
    second.close()
    collect()
    pool.clear_buffers()


def test_inputs_of_a_call_do_not_overtake_the_replay_before_on_another_stream(virtual: VirtualDevice) -> None:
    total, other = torch.zeros(8, device=NAME), torch.Stream(device=NAME)
    step = capture_step(lambda x: total.add_(x), (torch.ones(8, device=NAME),), warmup=1)
    batches = [torch.full((8,), float(number), device=NAME) for number in range(4)]
    torch.accelerator.synchronize()
    for number, x in enumerate(batches):
        with other if number % 2 else torch.Stream(device=NAME), virtual.slow_compute(0.005, add=0.02):
            step(x)
    torch.accelerator.synchronize()
    assert total.unique().tolist() == [7.0]


def test_a_graph_takes_less_of_the_device_with_offload_and_hands_memory_on(offloads: Any) -> None:
    weights = [torch.full((1 << 18,), 0.5, device=NAME, requires_grad=True) for _ in range(8)]

    def step() -> Tensor:
        h = weights[0] * 1
        for weight in weights:
            h = (h * weight).sin()
            if not capture_status().is_capturing:  # so that the plan says that sources go, however busy the machine is
                torch.accelerator.current_stream().synchronize()
                accelerator_runtime().transfer_stream(h.device, Direction.OUT).synchronize()
        gradients = torch.autograd.grad(h.sum(), weights)
        return torch.stack([gradient.sum() for gradient in gradients])

    def taken(offload: Offload | None) -> tuple[int, CapturedStep]:
        collect()
        torch.accelerator.empty_cache()
        before = torch.accelerator.memory_reserved()
        captured = capture_step(step, offload=offload, debug=True)
        torch.accelerator.empty_cache()
        return torch.accelerator.memory_reserved() - before, captured

    plain, _ = taken(None)
    offload = offloads(prefetch_bytes="1MiB")
    nbytes, captured = taken(offload)
    assert captured.plan is not None
    assert plain - nbytes >= 4 << 20
    nodes = nodes_of(captured.graph._graph)
    sources = {node.reads[0] for node in nodes if node.kind == "copy out"}
    freed = [node.writes[0] for node in nodes if node.kind == "free"]
    handed_on = [node for node in nodes if node.kind == "allocate" and any(within(one, node) for one in sources)]
    assert freed
    assert len(handed_on) > len(sources)
    captured.launch()
    assert torch.equal(captured.result, step())


def within(region: Any, node: Any) -> bool:
    return any(one.start <= region.start and region.stop <= one.stop for one in node.writes)


def test_a_step_that_goes_while_it_runs_keeps_what_it_uses_and_then_leaves_nothing(
    virtual: VirtualDevice, offloads: Any
) -> None:
    offload, chain = offloads(), Chain(1)
    x = chain.batches[0]
    expected, alive, other = [value.cpu() for value in chain(x)], graphs_alive(virtual), torch.Stream(device=NAME)
    out = [torch.zeros_like(value, device=NAME) for value in expected]
    torch.accelerator.synchronize()

    def copied(x: Tensor) -> None:
        for target, value in zip(out, chain(x), strict=True):
            target.copy_(value)

    step = capture_step(copied, (x,), offload=offload)
    assert graphs_alive(virtual) > alive
    with other, virtual.held():
        step.launch()
        del step
        collect()
        with torch.Stream(device=NAME):
            for _ in range(8):
                torch.full((8, 8), 9.0, device=NAME)
    torch.accelerator.synchronize()
    assert same([value.cpu() for value in out], expected)
    assert graphs_alive(virtual) == alive


def test_a_hundred_captured_steps_leak_nothing(virtual: VirtualDevice, offloads: Any) -> None:
    """Some are closed, some are dropped, some raise in the warm-up, in the capture, or differ."""
    offload, x, pool = offloads(), torch.ones(16, 16, device=NAME), CapturePool("16KiB")

    def capture(number: int) -> None:
        at, what = [(9, ""), (4, "raises"), (2, "raises"), (4, "size"), (9, "")][number % 5]
        with suppress(KeyError, ScheduleMismatchError):
            step = capture_step(Changing(at, what), (x,), offload=offload, pool=pool if number % 2 else None)
            step.launch()
            if number % 5:
                step.close()
        del at, what

    def held() -> tuple[int, ...]:
        pool.unseal()
        alive = graphs_alive(virtual)
        pool.clear_buffers()
        offload.stats(synchronize=True)
        accelerator_runtime().poll()
        torch.accelerator.empty_cache()
        runs = sum(isinstance(one, CapturedRun | CapturedStep) for one in gc.get_objects())
        memory = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
        return alive, runs, *memory, len(accelerator_runtime()._pinned._records)

    for number in range(10):
        capture(number)
        pool.unseal()
    before = held()
    for number in range(100):
        capture(number)
        pool.unseal()
        if number % 10 == 9:
            collect()
            pool.clear_buffers()
    assert held() == before


# -- what is inside of a step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [[], [torch.ops.aten.mm.default]], ids=["nothing", "products"])
def test_a_context_of_ones_own_and_checkpointing_inside_of_a_step(
    saved: list[Any], virtual: VirtualDevice, offloads: Any
) -> None:
    offload, contexts = offloads(), partial(create_selective_checkpoint_contexts, saved)
    generator = torch.Generator().manual_seed(0)
    w = (torch.randn(16, 16, generator=generator) / 4).to(NAME).requires_grad_()

    def step(x: Tensor) -> Tensor:
        with offload:
            h = (x @ w).tanh().exp()
            h = checkpoint(
                lambda h: (h @ w).tanh().exp(), h, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
            )
            loss = (h @ w).sin().sum()
        return torch.autograd.grad(loss, w)[0]

    captured = capture_step(step, (torch.zeros(16, 16, device=NAME),), offload=offload, debug=True)
    assert copies(captured, "copy in") > 0
    assert not violations(nodes_of(captured.graph._graph))
    with virtual.replays(5):
        for _ in range(5):
            x = torch.randn(16, 16, generator=generator).to(NAME)
            assert torch.equal(captured(x), step(x))


class Weighted(Tensor):
    """A subclass with an attribute."""

    scale: float


def test_a_subclass_and_its_attributes_are_given_to_a_checkpoint_in_a_step(
    virtual: VirtualDevice, offloads: Any
) -> None:
    offload, seen = offloads(), list[object]()
    w = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).to(NAME).requires_grad_()

    def block(h: Tensor, scaled: Any) -> Tensor:
        seen.append((type(scaled), scaled.scale))
        return (h * scaled * scaled.scale).as_subclass(Tensor).exp()

    def step(x: Tensor) -> Tensor:
        with offload:
            scaled: Any = x.square().as_subclass(Weighted)
            scaled.scale = 2.0
            h = (w / 4).sin()
            h = checkpoint(block, h, scaled, use_reentrant=False, preserve_rng_state=False)
            del scaled
            loss = h.sin().sum()
        return torch.autograd.grad(loss, w)[0]

    captured = capture_step(step, (torch.zeros(16, 16, device=NAME),), offload=offload, debug=True)
    assert copies(captured, "copy in") > 0
    assert set(seen) == {(Weighted, 2.0)}
    with virtual.replays(2):
        for seed in range(2):
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).to(NAME)
            assert torch.equal(captured(x), step(x))


def test_a_parameter_that_another_stream_has_used_does_not_spoil_the_capture(offloads: Any) -> None:
    """Its node keeps the stream that it was made on, for as long as a graph has it (pytorch#180090)."""
    training, offload = Training(), offloads()
    x, y, _ = next(inputs(1))
    graph = (training.model(x.to(NAME)) - y.to(NAME)).square().mean()
    step = training.capture(offload, debug=True)
    state = training.state()
    eager = training.run(training, state, 5)
    assert same(eager, training.run(step, state, 5))
    assert graph.grad_fn is not None


class Scaled(Training):
    """Under a ``GradScaler``, which leaves the optimizer's step out where gradients are not finite.

    Args:
        steps: whether the optimizer's step, and what the scaler makes of it, belongs to the step.
    """

    def __init__(self, *, steps: bool = True, fused: bool = True) -> None:
        super().__init__()
        self.scaler, self._steps = torch.amp.GradScaler(NAME, init_scale=16.0, growth_interval=3), steps
        if not fused:
            self.optimizer = torch.optim.SGD(self._parameters(), lr=1e-2, momentum=0.9)  # type: ignore[assignment]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.block(x) - y).square().mean()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self._steps:
            self.step()
        return loss.detach().nan_to_num(-1.0)

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self._parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, one: Callable[[Tensor, Tensor], Tensor], state: list[Tensor], count: int) -> list[Tensor]:
        """As that of any training, with every fifth batch not finite."""
        numbers = iter(range(count))
        return super().run(lambda x, y: one(x * torch.inf if next(numbers) % 5 == 4 else x, y), state, count)

    def _changing(self) -> list[Tensor]:
        assert self.scaler._scale is not None
        assert self.scaler._growth_tracker is not None
        return [*super()._changing(), self.scaler._growth_tracker, self.scaler._scale]


def test_a_grad_scaler_with_a_fused_optimizer_is_a_part_of_the_step(virtual: VirtualDevice, offloads: Any) -> None:
    training, offload = Scaled(), offloads()
    with training.capture(offload, debug=True) as step:
        assert copies(step, "copy out") > 0
        state = training.state()
        eager = training.run(training, state, FEW)
        with virtual.replays(1):
            assert same(eager, training.run(step, state, FEW))
        assert [loss.item() == -1 for loss in eager[:FEW]] == [number % 5 == 4 for number in range(FEW)]
        # Of five steps, three that are good double the scale, and the last halves it.
        assert eager[-1].item() == state[-1].item() == 32.0


def test_a_grad_scaler_with_an_optimizer_that_is_not_fused_asks_for_a_number_and_stays_outside(offloads: Any) -> None:
    offload = offloads()
    with pytest.raises(RuntimeError, match="not permitted while a stream is being captured"):
        Scaled(fused=False).capture(offload)
    training = Scaled(steps=False, fused=False)
    batch = [value.to(NAME) for value in next(inputs(1))[:2]]
    training(*batch)
    training.step()
    with training.capture(offload) as step:
        state = training.state()

        def replay(x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = step(x, y)
            training.step()
            return loss

        def eager(x: Tensor, y: Tensor) -> Tensor:
            loss = training(x, y)
            training.step()
            return loss

        gradients = [one.grad for one in training._parameters()]
        replayed = training.run(replay, state, FEW)
        assert all(one.grad is gradient for one, gradient in zip(training._parameters(), gradients, strict=True))
        assert same(training.run(eager, state, FEW), replayed)
    assert offload.stats(synchronize=True).bytes_out > 0


def test_autocast_is_entered_inside_of_a_step_or_keeps_no_casts(virtual: VirtualDevice, offloads: Any) -> None:
    """Casts that were kept before a capture go with their autocast, and a replay would read what comes after them."""
    offload, chain = offloads(), Chain(1)

    def half(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(NAME, torch.bfloat16):
            return chain(x)

    with torch.autocast(NAME, torch.bfloat16):
        for capture in (lambda: capture_step(half, (chain.batches[0],)), GraphCaptureGuard().__enter__):
            with pytest.raises(CaptureStateError, match="inside of what is captured, or with cache_enabled=False"):
                capture()
    expected = [[value.cpu() for value in half(x)] for x in chain.batches[:5]]
    assert not same(expected[0], [value.cpu() for value in chain(chain.batches[0])])
    inside = capture_step(half, (chain.batches[0],), offload=offload, debug=True)
    with torch.autocast(NAME, torch.bfloat16, cache_enabled=False):
        outside = capture_step(chain, (chain.batches[0],), offload=offload, debug=True)
    for step in (inside, outside):
        assert copies(step, "copy out") > 0
        with virtual.replays(2):
            assert all(
                same([value.cpu() for value in step(x)], values)
                for x, values in zip(chain.batches[:5], expected, strict=True)
            )


# -- last, since a compiler makes it long to collect garbage ----------------------------------------------------------


def test_a_compiled_block_in_a_step_offloads_what_it_saves(virtual: VirtualDevice, offloads: Any) -> None:
    training, offload = Training(), offloads()
    training.block = torch.compile(training.model, backend="aot_eager")  # type: ignore[assignment]
    step = training.capture(offload, debug=True)
    assert copies(step, "copy out") == copies(step, "copy in") > 0
    assert not violations(nodes_of(step.graph._graph))
    state = training.state()
    eager = training.run(training, state, FEW)
    with virtual.replays(1):
        assert same(eager, training.run(step, state, FEW))


def test_a_model_that_was_compiled_to_offload_is_compiled_anew_for_a_captured_step(offloads: Any) -> None:
    offload, chain = offloads(), Chain(1)
    generator = torch.Generator().manual_seed(0)
    w = (torch.randn(8, 8, generator=generator) / 4).to(NAME).requires_grad_()
    forward = offload.compile(lambda x: (x @ w).tanh().exp().square().sum(), backend="aot_eager")

    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(forward(x), w)[0]

    expected = [step(x).cpu() for x in chain.batches[:3]]
    with capture_step(step, (chain.batches[0],), offload=offload, debug=True) as captured:
        assert not violations(nodes_of(captured.graph._graph))
        assert same([captured(x).cpu() for x in chain.batches[:3]], expected)
    assert same([step(x).cpu() for x in chain.batches[:3]], expected)


@pytest.mark.filterwarnings("ignore:.*nothing moved:RuntimeWarning")
def test_the_code_of_the_page_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "graphs.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"(?:<!-- setup|```python)\n(.*?)(?:-->|```)", page, re.DOTALL):
        exec(code, names)
    assert names["step"].kept
    assert names["graph"].num_replays == 1


def test_captures_begin_on_a_stream_that_no_transfers_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in its ring of streams torch is: else what another thread moves meanwhile would be captured."""
    runtime, device = accelerator_runtime(), torch.device(NAME, 0)
    for _ in range(64):
        monkeypatch.setattr(runtime, "_separate_streams", {})
        taken = [*map(partial(runtime.transfer_stream, device), Direction), *runtime.capture_streams(device)]
        assert len({*taken, of_graphs.capture_stream()}) == 5
