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
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import eager_offload
from eager_offload import CapacityError, Offload, OffloadConfig
from eager_offload.graphs import (
    CapturedStep,
    CaptureInputError,
    CapturePool,
    CaptureStateError,
    CaptureStatus,
    GraphCaptureGuard,
    GraphPoolHandle,
    PoolSealedError,
    ScheduleMismatchError,
    UnjoinedStreamError,
    capture_status,
    capture_step,
)
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.base import Direction
from eager_offload.runtime.captures import AcceleratorEvent
from eager_offload.stats import KeepReason
from tests.threads import collect
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.graphs import Edge, nodes_of, violations
from tests.virtual_device.on_device.steps import (
    FEW,
    Chain,
    Training,
    assert_captures,
    copies,
    graphs_alive,
    inputs,
    same,
)


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


# -- exact, and what is not -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("training", "moves"),
    [({}, True), ({"forwards": 2}, True), ({"scaled": True}, True), ({"compiled": True}, True), ({}, False)],
    ids=["a_step", "two_forwards", "scaled", "compiled", "without_offload"],
)
def test_replays_are_eager_steps_to_the_bit(
    virtual: VirtualDevice, training: dict[str, Any], moves: bool, offloads: Any
) -> None:
    """Forward, backward, dropout, clipping and a fused AdamW, with new inputs and another rate each time."""
    trained = Training(**training)
    with trained.capture(offloads() if moves else None, warmup=3, debug=True) as step:
        state = trained.state()
        eager = trained.run(trained, state, FEW)
        with virtual.replays(1):
            assert same(eager, trained.run(step, state, FEW))
        assert len({value.item() for value in eager[:FEW]}) == (17 if trained.scaler.is_enabled() else FEW)
        assert not violations(nodes_of(step.graph._graph))
        moved, before = (copies(step, "copy out"), copies(step, "copy in")), virtual.copied_bytes
        step.launch()
        torch.accelerator.synchronize()
        assert tuple(now - then for now, then in zip(virtual.copied_bytes, before, strict=True)) == moved
        assert moved[0] == moved[1]
        assert (moved[0] > 0, step.kept.get(KeepReason.PARAMETER, 0) > 0) == (moves, moves)
        assert step.graph.num_replays == FEW + 1
        assert step.scalars == (trained.rate,)


def test_an_edge_left_out_is_reported_and_shows_if_and_only_if_it_is_needed(
    virtual: VirtualDevice, offloads: Any
) -> None:
    """Of all edges between streams: forks, windows, joins, and slots that the second forward uses again.

    And of some inside of a stream, those that follow from others included: these are neither reported nor wrong.
    """
    chain = Chain(2)
    with chain.capture(offloads(), debug=True) as step:
        nodes, expected = nodes_of(step.graph._graph), chain.results(chain)
        assert not violations(nodes)
        assert same(expected, chain.results(step))

        def is_exact(edge: Edge) -> bool:
            with virtual.replays(1, [edge]):
                return same(expected, chain.results(step))

        edges = {edge for node in nodes for edge in node.edges}
        across = {edge for edge in edges if nodes[edge[0]].stream != nodes[edge[1]].stream}
        # What is painted too early mostly has nobody who reads it: not in each replay does that show.
        inside = {edge for edge in edges - across if not {nodes[one].kind for one in edge} & {"allocate", "free"}}
        tried = across | {*sorted(inside)[::4]}
        reported = {edge for edge in tried if violations(nodes, [edge])}
        assert reported == {edge for edge in tried if not is_exact(edge)}
        assert tried - reported, "none that follows from others"
        wrong = across & reported
        kinds = {(nodes[before].kind, nodes[after].kind) for before, after in wrong}
        assert {("kernel", "copy out"), ("copy out", "free"), ("allocate", "copy in")} < kinds
        assert any(before == "copy in" for before, _ in kinds)  # compute waits for what comes back
        # Each has its copy out wait, its source, its target and compute; copies out that start together wait once.
        assert len(wrong) >= 3 * sum(node.kind == "copy out" for node in nodes) // 2


@pytest.mark.filterwarnings("ignore:.*device_budget:RuntimeWarning")
@pytest.mark.parametrize("setting", ["keep_last_bytes", "nothing", "policy", "device_budget"])
def test_h71_what_a_captured_step_moves_does_not_depend_on_the_host(setting: str, offloads: Any) -> None:
    """Nor on the link, on what earlier steps have on its way, or, but for a budget, on whether there were any."""
    small = {"max_inflight_bytes": "2KiB", "prefetch_bytes": "2KiB", "keep_last_bytes": "auto"}
    budget = torch.accelerator.memory_allocated() + 8192
    values = {"keep_last_bytes": 0, "policy": "free", "device_budget": budget}
    fields = small | {name: values[name] for name in values if name == setting}
    w, x = torch.full((16, 16), 0.01, device=NAME, requires_grad=True), torch.ones(16, 16, device=NAME)

    def train(h: Tensor) -> None:
        for first in (h, h):
            h = first
            for _ in range(8):
                h = (h @ w).tanh()
            h.sum().backward()

    found, runs = set(), 12 if setting == "keep_last_bytes" else 5
    for seed in range(runs):
        with pytest.MonkeyPatch.context() as patch:
            link(patch, seed / (runs - 1), seed)
            offload = offloads(**fields)
            for _ in range(0 if setting == "device_budget" else seed % 3):
                with offload:
                    train(x)
            step = capture_step(train, (x,), offload=offload, debug=True)
        work = tuple((node.kind, node.what, node.stream, node.after) for node in nodes_of(step.graph._graph))
        found.add((tuple(sorted(step.kept.items())), work))
        assert copies(step, "copy out") == copies(step, "copy in") >= 8 << 10
        step.close()
        offload.close()
    assert len(found) == 1


def link(monkeypatch: pytest.MonkeyPatch, part: float, seed: int) -> None:
    """Has the host find this part of all copies over when it looks, and others not before it has waited for them."""
    answers = random.Random(seed)

    def query(event: AcceleratorEvent) -> bool:
        if not event._done and answers.random() < part:
            event.synchronize()
        return event._done

    monkeypatch.setattr(AcceleratorEvent, "query", query)


def test_compute_waits_for_what_comes_back_in_vain_before_its_memory_has_a_new_owner(
    virtual: VirtualDevice, offloads: Callable[..., Offload]
) -> None:
    weights = [torch.full((64, 64), 0.02, device=NAME, requires_grad=True) for _ in range(8)]
    x = torch.ones(32, 64, device=NAME)

    def step(x: Tensor) -> Tensor:
        for last in (4, 0):  # the first time half of the graph is asked for
            h = x
            for weight in weights:
                h = (h @ weight).tanh().exp()
            gradients = torch.autograd.grad(h.sum(), weights[last:])
        return torch.stack([value.sum() for value in gradients])

    offload = offloads(max_inflight_bytes=1, prefetch_bytes="32KiB", keep_last_bytes=0)
    captured = capture_step(step, (x,), offload=offload, warmup=1, debug=True)
    assert copies(captured, "copy in") > 0
    assert not violations(nodes_of(captured.graph._graph))
    with virtual.replays(1):
        assert torch.equal(captured(x), step(x))


# -- errors -----------------------------------------------------------------------------------------------------------


class Changing:
    """A step that does another thing in the call of a number; the last of three warm-ups is the third."""

    def __init__(self, at: int, what: str) -> None:
        self._at, self._what, self.calls = at, what, 0
        self._w = torch.full((16, 16), 0.1, device=NAME, requires_grad=True)

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        what = self._what if self.calls == self._at else ""
        h = ((x[:4] if what == "size" else x) @ self._w).tanh().exp()
        if what == "another":
            Offload().__enter__()
        if what == "raises":
            raise KeyError("of the step")
        if what == "number":
            h.sum().item()
        if what == "suppressed":
            with suppress(RuntimeError):
                h.sum().item()
        if what == "unjoined":
            other = torch.Stream(device=NAME)
            other.wait_stream(torch.accelerator.current_stream())
            with other:
                h.detach() * 2
        if what == "twice":
            torch.autograd.grad(h.sum(), self._w, retain_graph=True)
        loss = h.sin().sum()
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize(
    ("at", "what", "error", "message"),
    [
        (4, "size", ScheduleMismatchError, r"had a tensor of 1,024 bytes, the capture has a tensor of 256 bytes"),
        (2, "size", ScheduleMismatchError, r"the warm-up before the last had.* 256 bytes.*the last one"),
        (
            3,
            "twice",
            ScheduleMismatchError,
            "the warm-up before the last had .* the last one has .* of an earlier step",
        ),
        (4, "another", CaptureStateError, "an Offload was entered"),
        (4, "raises", KeyError, "of the step"),
        (4, "number", RuntimeError, "not permitted while a stream is being captured"),
        (
            4,
            "suppressed",
            RuntimeError,
            "not permitted while a stream is being captured|invalidated by an earlier call",
        ),
        (4, "unjoined", UnjoinedStreamError, "stream \\d+ has work|have it wait for that stream"),
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
    trained, before = Training(), offload.stats().bytes_out
    batch = [value.to(NAME) for value in next(inputs(1))[:2]]
    trained(*batch)
    state_of, found = trained.state(), []
    for one in (trained, lambda *values: within(offload, trained, *values)):
        found.append(trained.run(one, state_of, 2))
    assert same(*found)
    assert offload.stats(synchronize=True).bytes_out > before
    chain = Chain()
    with chain.capture(offload, pool=pool) as step:
        assert step.graph.pool is pool
        assert same(chain.results(chain), chain.results(step))


def within(offload: Offload, step: Callable[..., Tensor], *values: Tensor) -> Tensor:
    with offload:
        return step(*values)


def sealed() -> CapturePool:
    pool = CapturePool()
    pool.seal()
    return pool


#: Arguments that cannot be, each known before the step is called for the first time.
REFUSED: dict[str, tuple[type[Exception], str, Callable[[Any, Path], dict[str, Any]]]] = {
    "disk tier": (CaptureStateError, "tier='disk'", lambda make, path: {"offload": make(tier="disk", disk_path=path)}),
    "disk behind": (CaptureStateError, "no disk_path", lambda make, path: {"offload": Offload(disk_path=path)}),
    "pageable": (CaptureStateError, "pin_memory=False", lambda make, path: {"offload": make(pin_memory=False)}),
    "no offload": (CaptureInputError, "is an eager_offload.Offload", lambda make, path: {"offload": "host"}),
    "inputs": (CaptureInputError, "were given as Tensor", lambda make, path: {"inputs": torch.ones(2)}),
    "scalars": (CaptureInputError, "was given 0.5", lambda make, path: {"scalars": [0.5]}),
    "no warm-up": (CaptureInputError, "warmup=0 is not", lambda make, path: {"offload": make(), "warmup": 0}),
    "warm-ups": (CaptureInputError, "a whole number of at least 0", lambda make, path: {"warmup": -1}),
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


def test_a_plan_may_be_captured() -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(3)))
    batch, config = torch.randn(1024, 256), OffloadConfig(tier="host", min_bytes="64KiB", step_tables=True)
    plan = eager_offload.plan(model, (batch,), device="h100", policy="max", config=config)
    model, batch = model.to(NAME), batch.to(NAME)

    def step() -> None:
        model(batch).square().mean().backward()

    offload = Offload(plan=plan)
    with capture_step(step, offload=offload) as captured:
        assert captured.plan is not None
        assert captured.plan.moved_bytes


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
    with torch.autocast(NAME, torch.bfloat16):  # whose casts, kept before the capture, would go with it
        for begin in (capture, GraphCaptureGuard().__enter__):
            with pytest.raises(CaptureStateError, match="inside of the captured code, or with cache_enabled=False"):
                begin()
    assert not calls
    with GraphCaptureGuard(), pytest.raises(CaptureStateError, match="a trace was begun while"):
        offload.trace(tmp_path / "trace.json").__enter__()
    assert not (tmp_path / "trace.json").exists()


def test_a_pool_that_is_too_small_is_an_error_that_says_how_much_is_missing(offloads: Any) -> None:
    offload, chain, pools = offloads(), Chain(), list[CapturePool]()

    def capture_until_it_moves() -> None:  # what a busy machine's warm-ups copied in vain is left out of a capture
        for _ in range(20):
            pools.append(CapturePool(256))
            with chain.capture(offload, pool=pools[-1]):
                pass

    with pytest.raises(CapacityError, match="256 left of its 256"):
        capture_until_it_moves()
    assert not pools[-1].sealed


def test_a_step_that_is_closed_or_called_otherwise_is_an_error(offloads: Any) -> None:
    offload, chain = offloads(), Chain()
    step = chain.capture(offload)
    with pytest.raises(CaptureInputError, match=r"captured as a tensor of \(8, 8\).*given as a tensor of \(4, 8\)"):
        step(torch.ones(4, 8, device=NAME))
    with pytest.raises(CaptureInputError, match="captured inputs have 1 values"):
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


def test_a_copy_that_differs_is_an_error_though_the_step_has_gone_on(offloads: Any) -> None:
    offload, alive, raised = offloads(keep_last_bytes=0), list[Tensor](), list[bool]()
    x, w = torch.ones(16, 16, device=NAME), torch.full((16, 16), 0.1, device=NAME, requires_grad=True)

    def step() -> None:
        first, second = (x @ w).tanh().exp(), x @ w
        if capture_status().is_capturing:
            alive.append(first)  # so that what is on its way is not cancelled
        del first
        try:
            second.exp()
        except ScheduleMismatchError:
            raised.append(True)

    state = torch.accelerator.memory_allocated()
    gc.disable()
    try:
        with pytest.raises(ScheduleMismatchError, match="differs first at copy"):
            capture_step(step, offload=offload)
        alive.clear()
        assert torch.accelerator.memory_allocated() == state, "it went without the collector"
    finally:
        gc.enable()
    assert raised, "the step was told"


# -- pools, streams and memory ----------------------------------------------------------------------------------------


def test_a_graph_takes_less_of_the_device_with_offload_and_hands_memory_on(offloads: Any) -> None:
    weights = [torch.full((1 << 18,), 0.5, device=NAME, requires_grad=True) for _ in range(8)]

    def step() -> Tensor:
        h = weights[0] * 1
        for weight in weights:
            h = (h * weight).sin()
            if not capture_status().is_capturing:  # so that the table says that sources go, however busy the machine is
                torch.accelerator.current_stream().synchronize()
                accelerator_runtime().transfer_stream(h.device, Direction.OUT).synchronize()
        return torch.stack([gradient.sum() for gradient in torch.autograd.grad(h.sum(), weights)])

    def taken(offload: Offload | None) -> tuple[int, CapturedStep]:
        collect()
        torch.accelerator.empty_cache()
        before = torch.accelerator.memory_reserved()
        captured = capture_step(step, offload=offload, debug=True)
        torch.accelerator.empty_cache()
        return torch.accelerator.memory_reserved() - before, captured

    plain, _ = taken(None)
    nbytes, captured = taken(offloads(prefetch_bytes="1MiB"))
    assert plain - nbytes >= 4 << 20
    nodes = nodes_of(captured.graph._graph)
    sources = {node.reads[0] for node in nodes if node.kind == "copy out"}
    handed_on = [
        node
        for node in nodes
        if node.kind == "allocate"
        and any(new.start <= old.start and old.stop <= new.stop for new in node.writes for old in sources)
    ]
    assert len(handed_on) > len(sources)
    captured.launch()
    assert torch.equal(captured.result, step())


@pytest.mark.filterwarnings("ignore:eager_offload. nothing of this Offload:RuntimeWarning")
def test_a_step_that_goes_while_it_runs_keeps_what_it_uses_and_then_leaves_nothing(
    virtual: VirtualDevice, offloads: Any
) -> None:
    offload, chain = offloads(), Chain()
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


# -- what is inside of a step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [None, [], [torch.ops.aten.mm.default]], ids=["autocast", "nothing", "products"])
def test_a_context_of_ones_own_with_autocast_or_checkpointing_inside_of_a_step(
    saved: list[Any] | None, virtual: VirtualDevice, offloads: Any
) -> None:
    offload, how = offloads(), {"use_reentrant": False, "preserve_rng_state": False}
    generator = torch.Generator().manual_seed(0)
    w = (torch.randn(16, 16, generator=generator) / 4).to(NAME).requires_grad_()

    def block(h: Tensor) -> Tensor:
        return (h @ w).tanh().exp()

    def step(x: Tensor) -> Tensor:
        with offload, torch.autocast(NAME, torch.bfloat16, enabled=saved is None):
            if saved is None:
                h = block(block(x))
            else:
                h = checkpoint(block, block(x), **how, context_fn=partial(create_selective_checkpoint_contexts, saved))
            loss = (h @ w).sin().sum()
        return torch.autograd.grad(loss, w)[0]

    captured = capture_step(step, (torch.zeros(16, 16, device=NAME),), offload=offload, debug=True)
    assert copies(captured, "copy in") > 0
    assert not violations(nodes_of(captured.graph._graph))
    with virtual.replays(5):
        for _ in range(5):
            x = torch.randn(16, 16, generator=generator).to(NAME)
            assert torch.equal(captured(x), step(x))


@pytest.mark.filterwarnings("ignore:.*nothing moved:RuntimeWarning")
def test_the_code_of_the_page_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "graphs.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"(?:<!-- setup|```python)\n(.*?)(?:-->|```)", page, re.DOTALL):
        exec(code, names)
    assert names["step"].kept
    assert names["graph"].num_replays == 1
