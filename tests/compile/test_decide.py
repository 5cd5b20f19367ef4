"""What a budget, or the link, decides in compiled code: by the planner's solver, on what the graphs say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.fx import Graph, Node

import eager_offload as eo
from eager_offload.compile import (
    Choice,
    insert_asynchronous,
    insert_synchronous,
    prefetch,
    select,
    sink_waits,
)
from eager_offload.compile.aim import Aim, key_of, text_of
from eager_offload.compile.cost import roofline
from eager_offload.compile.decide import decided
from eager_offload.compile.graphs import nbytes_of, outputs_of, storage_of, tensor_of
from eager_offload.compile.hooks import hook_pair
from eager_offload.compile.inductor import OrderTransfers
from eager_offload.planning.predict import Problem
from eager_offload.stats import KeepReason
from tests.compile.compiled import BOTH, compiler, fresh_compiler, results_of, same_results
from tests.compile.split import Split, moving, reasons, split
from tests.planning.programs import slow

KIB = 1 << 10
#: Windows in which little is on its way at one time, as beside a large model.
SMALL: dict[str, Any] = {"max_inflight_bytes": 8 * KIB, "prefetch_bytes": 8 * KIB, "min_bytes": 0, "tier": "host"}
MACHINE = slow(out=1e9, back=1e9)


class Chain(nn.Module):
    """Layers that save as much each; ends in a loss."""

    def __init__(self, layers: int = 6, *, broken: bool = False) -> None:
        super().__init__()
        torch.manual_seed(layers)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        middle = len(self.layers) // 2
        for layer in self.layers[:middle]:
            x = layer(x).sin()
        if self.broken:
            torch._dynamo.graph_break()
        for layer in self.layers[middle:]:
            x = layer(x).sin()
        return x.square().sum()


def batch() -> Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def program(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = (x @ weight).sin()
    return x.square().sum()


def inputs_of(layers: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(layers)
    return [batch(), *(torch.randn(32, 32, generator=generator).requires_grad_() for _ in range(layers))]


Asked = list[tuple[Problem, Aim, Sequence[object]]]


def noting(patch: pytest.MonkeyPatch) -> Asked:
    """What the solver is asked from now on."""
    found: Asked = []

    def noted(problem: Problem, names: Sequence[object], aim: Aim) -> Any:
        found.append((problem, aim, names))
        return decided(problem, names, aim)

    patch.setattr(select, "decided", noted)
    return found


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return noting(monkeypatch)


def choice_of(one: Split, aim: Aim, **fields: Any) -> Choice:
    aim = aim if aim.machine else replace(aim, machine=MACHINE)
    config = eo.OffloadConfig(**{**SMALL, **fields})
    return select.choose(one.forward.graph, one.backward.graph, one.num_outputs, config, aim=aim)


# -- the numbers of a graph -------------------------------------------------------------------------------------------


def lives(graph: Graph, until: Callable[[Node], bool], there: Sequence[Node]) -> list[int]:
    """Bytes of the device that live at each node of a graph with transfers in it, as it stands.

    Args:
        until: whether a value stays to the end.
        there: inputs that are no host tensors, and stay.
    """
    nodes = list(graph.nodes)
    place = {node: position for position, node in enumerate(nodes)}
    hosts = {node for node in nodes if "_on_host" in node.name or "_like" in node.name}
    spans: dict[object, list[int]] = {}
    for node in nodes:
        key, value = storage_of(node), tensor_of(node)
        if key is None or value is None or node in hosts:
            continue
        users = [place[user] for user in node.users if user.op != "output"]
        end = len(nodes) if until(node) or node in there else max(users, default=place[node])
        span = spans.setdefault(key, [nbytes_of(value), 0 if node in there else place[node], end])
        span[2] = max(span[2], end)
    return [
        sum(nbytes for nbytes, first, last in spans.values() if first <= position <= last)
        for position in range(len(nodes))
    ]


def placed_peak(one: Split, choice: Choice, **fields: Any) -> int:
    """The peak of both graphs with the transfers where the passes put them."""
    config = eo.OffloadConfig(**{**SMALL, **fields})
    given = [node for node in one.forward.graph.nodes if node.op == "placeholder"]
    standing = {storage_of(node): nbytes_of(node.meta["val"]) for node in given}
    forward, backward = select_and_place(one, choice, config)
    users = outputs_of(forward)[: one.num_outputs]
    kept = set(outputs_of(forward)[one.num_outputs :])
    in_forward = lives(forward, lambda node: node in users or node in kept, forward.find_nodes(op="placeholder"))
    returned = set(outputs_of(backward))
    in_backward = lives(backward, lambda node: node in returned, [])
    arrived = {storage_of(node) for node in backward.find_nodes(op="placeholder")} & standing.keys()
    outputs = sum(nbytes_of(node.meta["val"]) for node in users if isinstance(node, Node))
    rest = sum(standing.values()) - sum(standing[key] for key in arrived)
    # Of the inputs those that backward is given count as long as it uses them there; they stay.
    assert not arrived or rest >= 0
    held = _inputs_not_in_use(backward, arrived, standing)
    return max(max(in_forward), max(map(sum, zip(in_backward, held, strict=True))) + rest + outputs)


def _inputs_not_in_use(backward: Graph, arrived: set[object], standing: dict[object, int]) -> list[int]:
    nodes = list(backward.nodes)
    place = {node: position for position, node in enumerate(nodes)}
    held = [0] * len(nodes)
    for key in arrived:
        sharing = [node for node in nodes if storage_of(node) == key]
        first = min(place[node] for node in sharing)
        last = max((place[user] for node in sharing for user in node.users if user.op != "output"), default=first)
        for position in range(len(nodes)):
            if not first <= position <= last:
                held[position] += standing[key]
    return held


def select_and_place(one: Split, choice: Choice, config: eo.OffloadConfig) -> tuple[Graph, Graph]:
    pair = insert_synchronous(one.forward.graph, one.backward.graph, one.num_outputs, choice, config)
    forward = sink_waits(insert_asynchronous(pair.forward), config.size("max_inflight_bytes"))
    backward = prefetch(
        insert_asynchronous(pair.backward), config.size("prefetch_bytes"), MACHINE.back, roofline(MACHINE)
    )
    return forward, backward


@pytest.mark.sampled(4, quick=True)
@pytest.mark.parametrize("window", [1, 20 * KIB, 1 << 20])
@pytest.mark.parametrize("ahead", [0, 20 * KIB, 1 << 20])
def test_transfers_where_the_passes_put_them_take_no_more_than_was_decided_with(window: int, ahead: int) -> None:
    one, _ = split(program, *inputs_of(6))
    windows = {"max_inflight_bytes": window, "prefetch_bytes": ahead}
    nothing = choice_of(one, Aim(1 << 40), **windows).prediction
    least = choice_of(one, Aim(1), **windows).prediction
    for part in range(4):
        budget = least.peak_bytes + (nothing.peak_bytes - least.peak_bytes) * part // 4
        choice = choice_of(one, Aim(budget), **windows)
        assert placed_peak(one, choice, **windows) <= choice.prediction.peak_bytes <= budget


def test_what_is_recomputed_in_backward_is_not_taken_for_what_forward_made() -> None:
    """Both are traced as one value."""

    def recomputes(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = (x @ weight).sin().cos()
        return x.square().sum()

    one, _ = split(recomputes, *inputs_of(4), partition="min_cut")
    graphs = one.forward.graph, one.backward.graph
    ours, theirs = ({node.name for node in graph.nodes if node.op == "call_function"} for graph in graphs)
    assert ours & theirs, "something is computed again"
    choice = choice_of(one, Aim(1 << 40))
    assert choice.prediction.peak_bytes == placed_peak(one, choice)


# -- decisions --------------------------------------------------------------------------------------------------------


def test_the_more_room_there_is_the_less_moves() -> None:
    one, _ = split(program, *inputs_of(8))
    least = choice_of(one, Aim(1)).prediction
    most = choice_of(one, Aim(1 << 40)).prediction
    moved, peaks = [], []
    for part in range(9):
        budget = least.peak_bytes + (most.peak_bytes - least.peak_bytes) * part // 8
        choice = choice_of(one, Aim(budget))
        assert choice.prediction.peak_bytes <= budget
        assert choice.prediction.moved_bytes == choice.moved_bytes()
        moved.append(choice.moved_bytes())
        peaks.append(choice.prediction.peak_bytes)
    assert moved == sorted(moved, reverse=True)
    assert peaks == sorted(peaks)
    assert moved[0] > moved[4] > moved[-1] == 0


def test_below_what_any_decision_takes_the_least_peak_is_what_is_taken() -> None:
    one, _ = split(program, *inputs_of(6))
    everything = one.choose(eo.OffloadConfig(**SMALL, keep_last_bytes=0))
    choice = choice_of(one, Aim(1))
    stays = {name for name, reason in reasons(choice).items() if reason == "newest"}
    assert moving(choice) | stays == moving(everything)
    assert placed_peak(one, choice) <= placed_peak(one, everything)


def test_only_what_the_link_hides_moves() -> None:
    one, _ = split(program, *inputs_of(8))
    everything = one.choose(eo.OffloadConfig(**SMALL, keep_last_bytes=0))
    windows = {"max_inflight_bytes": 1 << 20, "prefetch_bytes": 1 << 20}
    moved = []
    for link in (1e3, 1e8, 3e8, 1e13):
        choice = choice_of(one, Aim(None, 0.0, slow(out=link, back=link)), **windows)
        assert choice.prediction is not None
        moved.append(choice.moved_bytes())
    assert moved == sorted(moved)
    assert moved[0] == 0 < moved[1] < moved[2] <= moved[3] <= everything.moved_bytes()
    slower = choice_of(one, Aim(None, 0.5, slow(out=1e8, back=1e8)), **windows)
    assert slower.moved_bytes() > moved[1]
    free = choice_of(one, Aim(None, 0.0, slow(out=1e8, back=1e8)))
    bounded = choice_of(one, Aim(1, 0.0, slow(out=1e8, back=1e8)))
    assert bounded.moved_bytes() > free.moved_bytes(), "of a budget and what is free the lesser stays"


def test_what_a_user_has_asked_for_is_done_whatever_the_budget_is() -> None:
    def marked(x: Tensor, *weights: Tensor) -> Tensor:
        first = x @ weights[0]
        eo.keep(first)
        second = first.sin() @ weights[1]
        eo.prefer_offload(second)
        third = second.sin() @ weights[2]
        return (third.sin().square() + 0).sum()

    one, _ = split(marked, *inputs_of(3))
    for budget in (1, 1 << 40):
        choice = choice_of(one, Aim(budget))
        assert reasons(choice)["mm"] == "marked"
        assert "mm_1" in moving(choice)
        assert choice.prediction.moved_bytes == choice.moved_bytes(), "it is reckoned with"
    assert moving(choice) == {"mm_1"}, "with that much room nothing else moves"
    free = choice_of(one, Aim(None, 0.0, slow(out=1.0, back=1.0)))
    assert moving(free) == {"mm_1"}, "though the link hides none of it, and nothing else is asked for"


def test_sizes_that_are_not_known_beforehand_count_as_traced() -> None:
    one, _ = split(program, *inputs_of(6), dynamic=True)
    choices = [choice_of(one, Aim(budget)) for budget in (1, 1 << 40)]
    assert choices[0].groups
    assert not choices[1].groups


def test_inductors_own_budget_goes_together_with_it() -> None:
    """What Inductor computes again is not saved any more; of the rest the solver decides."""

    def deep(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = (x @ weight).sin().cos().exp().sigmoid()
        return x.square().sum()

    def saved(part: float, budget: int) -> tuple[int, int]:
        with functorch_config.patch(activation_memory_budget=part):
            one, _ = split(deep, *inputs_of(6), partition="min_cut")
        choice = choice_of(one, Aim(budget))
        return choice.moved_bytes() + choice.kept_bytes().get(KeepReason.NEWEST, 0), choice.moved_bytes()

    (all_saved, all_moved), (some_saved, some_moved) = saved(1.0, 1), saved(0.4, 1)
    assert 0 < some_saved < all_saved
    assert 0 < some_moved < all_moved
    assert saved(0.4, 1 << 40)[1] == 0


# -- in training ------------------------------------------------------------------------------------------------------


def trained(backend: str, model: nn.Module, offload: eo.Offload | None) -> list[Tensor | None]:
    """The gradients of a compiled model."""

    def step(compile: Any, around: Any) -> list[Tensor | None]:
        model.zero_grad()
        compiled = compile(model)
        with around:
            loss = compiled(batch())
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    with fresh_compiler():
        return results_of(step, compiler(backend), nullcontext() if offload is None else offload)


@BOTH
def test_gradients_are_the_same_bits_whatever_the_budget_is(backend: str) -> None:
    model = Chain()
    expected = trained(backend, model, None)
    moved = []
    for fields in ({"device_budget": 1}, {"device_budget": "130KiB"}, {"device_budget": "1GiB"}, {"policy": "free"}):
        offload = eo.Offload(**{**SMALL, **fields})  # type: ignore[arg-type]
        assert same_results(trained(backend, model, offload), expected), fields
        stats = offload.stats(synchronize=True)
        assert stats.bytes_in == stats.bytes_out == stats.offloaded_bytes
        assert stats.offloaded_bytes + sum(stats.kept_bytes.values()) == stats.saved_bytes
        moved.append(stats.bytes_out)
        offload.close()
    assert moved[0] > moved[1] > moved[2] == 0


def test_a_part_of_a_step_moves_all_that_may_under_a_budget_and_what_is_free_by_itself(solved: Asked) -> None:
    model = Chain(broken=True)
    expected = trained("aot_eager", model, None)
    offload = eo.Offload(**SMALL, device_budget="1GiB")
    assert same_results(trained("aot_eager", model, offload), expected)
    stats = offload.stats(synchronize=True)
    assert not solved
    assert stats.compiled_regions == 2
    assert stats.bytes_out > 0
    assert not stats.kept_bytes.get(KeepReason.NEWEST)
    free = eo.Offload(**SMALL, policy="free")
    assert same_results(trained("aot_eager", model, free), expected)
    assert len(solved) == 2
    for one in (offload, free):
        one.close()


@pytest.mark.parametrize("gives", ["an activation", "no loss"])
def test_what_is_given_activations_or_returns_no_loss_is_a_part(gives: str, solved: Asked) -> None:
    model = Chain(3)
    layers = nn.Sequential(*model.layers)
    weight = torch.ones(32, requires_grad=True)

    def step(compile: Any) -> None:
        if gives == "no loss":
            compile(layers)(batch()).sum().backward()
        else:
            compile(model)(batch() * weight).backward()

    offload = eo.Offload(**SMALL, device_budget="1GiB")
    with fresh_compiler(), offload:
        step(lambda one: torch.compile(one, backend="aot_eager"))
    assert offload.stats(synchronize=True).bytes_out > 0
    assert not solved
    offload.close()


def test_another_budget_compiles_anew_and_an_equal_one_does_not(solved: Asked) -> None:
    model = Chain()
    with fresh_compiler():
        compiled = torch.compile(model, backend="aot_eager")
        moved = []
        for budget in (1, "1GiB", 1, "1GiB"):
            offload = eo.Offload(**SMALL, device_budget=budget)
            with offload:
                compiled(batch()).backward()
            moved.append(offload.stats(synchronize=True).bytes_out)
            offload.close()
    assert len(solved) == 2
    assert moved[0] == moved[2] > moved[1] == moved[3] == 0


def plan_of(model: nn.Module, **named: Any) -> eo.Plan:
    windows = {name: SMALL[name] for name in ("max_inflight_bytes", "prefetch_bytes", "min_bytes", "tier")}
    return eo.plan(model, batch(), config=windows, **named)


def test_a_plan_says_the_budget_and_the_device(solved: Asked) -> None:
    model = Chain()
    expected = trained("aot_eager", model, None)
    device = slow(out=1e8, back=1e8)
    budget = plan_of(model, device=device).least_budget + 24 * KIB
    moved = {}
    for policy in ("max", "least", "free"):
        plan = plan_of(model, device=device, device_budget=budget, policy=policy)
        offload = eo.Offload(plan=plan)
        assert same_results(trained("aot_eager", model, offload), expected)
        moved[policy] = offload.stats(synchronize=True).bytes_out
        offload.close()
    assert moved["max"] > moved["least"] > 0
    assert moved["max"] > moved["free"] > 0
    (least, aim, _), (free, other, _) = solved
    assert aim == Aim(budget, None, device)
    assert other == Aim(None, 0.0, device)
    assert least.out == free.out == 1e8


# -- what compilers keep ----------------------------------------------------------------------------------------------


def keys(text: str) -> tuple[Any, ...]:
    (call,) = [node for node in hook_pair(text).pack.graph.nodes if node.op == "call_function"]
    return call.meta["user_cache_hash"], OrderTransfers(text=text).uuid()


def test_what_decides_is_in_every_key() -> None:
    plan = plan_of(Chain(2), device=slow())
    other = replace(plan, machine=slow(out=5.0))
    texts = [eo.OffloadConfig(**fields).to_text() for fields in ({}, {"device_budget": 1}, {"device_budget": 2})]
    texts += [eo.OffloadConfig(**fields).to_text() for fields in ({"policy": "free"}, {"max_slowdown": 0.5})]
    texts += [text_of("", one) for one in (plan, replace(plan, device_budget=7), replace(plan, policy="max"), other)]
    assert len({keys(text)[0] for text in texts}) == len({str(keys(text)[1]) for text in texts}) == len(texts) == 9


def test_what_auto_has_come_to_is_in_every_key_and_stays_in_a_process() -> None:
    text = eo.OffloadConfig(tier="host", device_budget="auto").to_text()
    budget = key_of(text).removeprefix(f"{text}\n")
    assert int(budget) > 1 << 20
    assert len(f"{int(budget):b}".rstrip("0")) <= 5, "a few leading bits: other processes take the same graphs"
    assert key_of(text) == key_of(text)
    hashed, identity = keys(text)
    assert hashed.endswith(budget)
    assert budget in str(identity)
