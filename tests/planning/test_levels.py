"""Levels of a block: what costs less than a price a byte is computed again, the rest is kept."""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import eager_offload as eo
from eager_offload.planning.apply import checkpointed
from eager_offload.planning.levels import (
    Kept,
    Mixture,
    Recording,
    has_steady_results,
    kind_of_call,
    levels_of,
    mixtures,
    with_recompute,
)
from eager_offload.planning.machine import TABLE
from eager_offload.planning.program import Problem, Program
from eager_offload.planning.simulate import StepSimulator
from eager_offload.planning.trace import record
from tests.hazards.backends import Backend, DiskBackend
from tests.hazards.programs import assert_identical, same_gradients
from tests.matrix import Place, Way, makes_sense
from tests.planning.programs import CONFIG, Linears, Net, Operators, gradients, slow, wide
from tests.programs import Flag, Run, corpus

pytestmark = pytest.mark.usefixtures("one_thread")

PLACE = Place.VIRTUAL if "tests.virtual_device.plugin" in sys.modules else Place.DISK
#: What changes statistics, or the weight of an embedding, is never computed again by a plan.
CHANGING = ("statistics", "embedding-with-a-norm")
PROGRAMS = [
    one
    for one in corpus()
    if makes_sense(one, Way.CHECKPOINTED, PLACE) and not any(name in one.name for name in CHANGING)
]

MACHINE = slow(out=3e7, back=3e7, launch_seconds=1e-5)


class Shaky(nn.Module):
    """Draws random numbers, writes in place, makes several results, and gives back a part of one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.up(self.norm(x)).chunk(3, -1)
        h = torch.cat((a.sigmoid() * b, torch.relu_(c + 1)), -1)
        return x + self.down(nn.functional.dropout(h, 0.2)).clamp_(min=-1)


class Kinds(Linears):
    """Gives back what it saves itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Given(nn.Module):
    """Is given a mask by name, which all blocks share, and has blocks inside."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())

    def forward(self, x: Tensor, *, given: Tensor) -> Tensor:
        return x + self.parts(x * given) * given


class Experts(nn.Module):
    """Each of them takes the rows that suit it best."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(32, 2), nn.LayerNorm(32)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        weights, taken = self.gate(inner).softmax(-1).topk(len(x) // 2, 0)
        out = x
        for number, expert in enumerate(self.experts):
            rows = taken[:, number]
            out = out.index_add(0, rows, expert(inner[rows]) * weights[:, number, None])
        return out


class Adapted(Linears):
    """Its weights are frozen, with a trained adapter of low rank beside one."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x) + self.b(self.a(x)) * 2).sin())


class Convolved(nn.Module):
    """Convolutions, of two resolutions; (batch, 4, 16, 16) to a number."""

    def __init__(self) -> None:
        super().__init__()
        half = nn.Conv2d(8, 8, 2, 2)
        self.down = nn.ModuleList([self.part(4, 8, nn.Identity()), self.part(8, 8, half)])
        self.up = nn.ModuleList([self.part(8, 8, nn.Upsample(scale_factor=2)), self.part(16, 4, nn.Identity())])

    @staticmethod
    def part(before: int, after: int, last: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, 1, 1), nn.GroupNorm(2, after), nn.SiLU(), last)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down[0](x)
        return self.up[1](torch.cat((high, self.up[0](self.down[1](high))), 1)).square().mean()


def frozen() -> tuple[nn.Module, Tensor]:
    model, x = wide()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model, x


def rows() -> Tensor:
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)


def mask() -> Tensor:
    return torch.arange(32.0) / 32


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "stack": wide,
    "frozen": frozen,
    "linears": lambda: (Net(Linears, count=3), rows()),
    "shaky": lambda: (Net(Shaky, count=3), rows()),
    "gives back what it saves": lambda: (Net(Kinds, count=3), rows()),
    "is given more": lambda: (Net(Given, mask, count=4), rows()),
    "experts": lambda: (Net(Experts), rows()),
    "adapters": lambda: (Net(Adapted, count=3), rows()),
    "convolutions": lambda: (Convolved(), torch.randn(4, 4, 16, 16)),
}


class Again(nn.Module):
    """Has checkpoints around modules of another one."""

    def __init__(self, model: nn.Module, kept: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.kept = model, kept

    def forward(self, x: Tensor) -> Any:
        with checkpointed(self.model, self.kept):
            return self.model(x)


@cache
def recorded(name: str) -> tuple[nn.Module, Tensor, Recording, list[Mixture]]:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    recording = record(model, x, min_bytes=1024)
    numbered = [module for module in recording.calls if module.rpartition(".")[2].isdigit()]
    blocks = [one for one in numbered if not any(one.startswith(f"{other}.") for other in numbered)]
    assert len(blocks) > 1
    levels = levels_of(recording, blocks, recording.program.seconds(MACHINE))
    return model, x, recording, mixtures(blocks, levels)


def kept_by(recording: Recording, mixture: Mixture) -> dict[str, Any]:
    return {name: recording.kept(recording.calls[name], kept) for name, kept in mixture.items()}


def tried(found: list[Mixture]) -> list[Mixture]:
    """Every second level, and a few of two that alternate."""
    return [*found[1:9:2], *found[9::26]]


@pytest.mark.parametrize("name", MODELS)
def test_the_step_of_a_level_is_what_a_trace_of_the_model_with_its_checkpoints_finds(name: str) -> None:
    model, x, recording, found = recorded(name)

    def outcome(program: Program, part: float) -> tuple[float, int]:
        problem = Problem(program, program.seconds(MACHINE), 3e7, 3e7, 1 << 16, 1 << 16, 1e-5)
        outcome = StepSimulator(problem).part(part).outcome
        return outcome.step_seconds, outcome.peak_bytes

    assert len(found) > 2
    assert with_recompute(recording, found[0]) == recording.program
    assert len(with_recompute(recording, found[-1]).ops) > len(recording.program.ops)
    for mixture in tried(found):
        made = with_recompute(recording, mixture)
        again = record(Again(model, kept_by(recording, mixture)), x, min_bytes=1024).program
        assert Counter(op.name for op in made.ops) == Counter(op.name for op in again.ops)
        for part in (0.0, 0.5, 1.0):
            (seconds, peak), (traced_seconds, traced_peak) = outcome(made, part), outcome(again, part)
            assert seconds == pytest.approx(traced_seconds, rel=0.01)
            assert peak == pytest.approx(traced_peak, rel=0.005)


@pytest.mark.parametrize("name", MODELS)
def test_training_by_each_level_has_the_bits_of_plain_training(name: str, users_backend: Backend) -> None:
    model, x, recording, found = recorded(name)

    def step(offload: Any = None) -> list[Tensor]:
        torch.manual_seed(3)
        return gradients(model, lambda: model(x), offload)

    expected = step()
    for mixture in tried(found):
        offload = users_backend.offload()
        with checkpointed(model, kept_by(recording, mixture), verify=True) as checks:
            for _ in range(2):
                assert_identical(expected, step(offload))
        assert checks.calls == 2 * len(mixture)
        assert offload.stats(synchronize=True).bytes_out > 0
        offload.close()


def test_what_is_dearer_than_a_price_is_kept_and_nothing_that_draws_or_is_written_to() -> None:
    _, _, recording, _ = recorded("shaky")
    names = [f"blocks.{number}" for number in range(3)]
    levels = levels_of(recording, names, recording.program.seconds(MACHINE))
    assert levels[0] == {}
    assert levels[-1] == dict.fromkeys(names, frozenset())
    assert 2 < len(levels) <= 8
    for more, less in pairwise(levels[1:]):
        assert all(more[name] > less[name] for name in names)
    kinds = {kept.kind for kept in recording.kept(recording.calls[names[0]], levels[1][names[0]])}
    assert "aten.addmm.default" in kinds
    assert not any(part in kind for kind in kinds for part in ("dropout", "bernoulli", "relu", "clamp", "view"))
    stop = recording.stop(recording.calls[names[0]])
    assert all(recording.dispatches[number].op < stop for level in levels[1:] for number in level[names[0]])


@cache
def plan_of_levels(**rates: float) -> eo.Plan:
    torch.manual_seed(0)
    machine = slow(**{"out": 2e6, "back": 2e6, "memory": 1e11, "single_flops": 1e9, "flops": 1e9, **rates})
    planned = partial(eo.plan, *wide(), device=machine, optimizer=None, config=CONFIG, recompute=True)
    most = planned()
    plan = planned(device_budget=most.peak_bytes * 3 // 5)
    assert any(plan.kept) or rates, "it keeps what is dear"
    assert plan.fits
    assert most.again == ()
    front = [one.step_seconds for one in most.front(32) if one.peak_bytes <= plan.device_budget]
    assert front[-1] <= 1.01 * plan.step_seconds, "also where a search for its own budget has found little"
    return plan


def test_a_plan_is_as_fast_as_the_best_level_and_a_file_keeps_what_blocks_keep(tmp_path: Any) -> None:
    plan = plan_of_levels()
    whole = min(one.step_seconds for one in plan.front() if one.peak_bytes <= plan.device_budget)
    assert plan.step_seconds <= whole
    plan.save(tmp_path / "plan.json")
    assert eo.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("launch", [0.0, 1e-5])
def test_no_block_keeps_results_where_a_policy_costs_the_host_more_than_they_save(launch: float) -> None:
    free, little, much = (plan_of_levels(launch_seconds=launch, policy_seconds=one) for one in (0.0, 1e-6, 1.0))
    assert any(free.kept)
    assert free.step_seconds < little.step_seconds
    assert much.again
    assert not any(much.kept)
    assert free.checkpointing == little.checkpointing == much.checkpointing, "it has no policy"


def test_a_second_backward_computes_all_again() -> None:
    plan, (model, x) = plan_of_levels(), wide()
    expected = gradients(model, lambda: model(x))
    with plan.apply(model), eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0) as offload:
        loss = model(x)
        model.zero_grad()
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        assert_identical(expected[1:], [one.grad for one in model.parameters()])
        del loss
    assert offload.stats(synchronize=True).bytes_out > 0


def test_h70_a_block_with_other_operators_than_the_plan_is_computed_again_whole_and_says_so_once() -> None:
    plan, (model, x), attend = plan_of_levels(), wide(), nn.functional.scaled_dot_product_attention
    for block in model.blocks:
        own = block.query.forward
        block.query.forward = lambda given, own=own: own(attend(*[given[None, None]] * 3)[0, 0])
    expected = gradients(model, lambda: model(x))
    offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0)
    with plan.apply(model):
        with pytest.warns(RuntimeWarning, match=r"'blocks\.\d' does not run as .* 2 times instead of 1") as said:
            assert_identical(expected, gradients(model, lambda: model(x), offload))
        assert sum(" times instead of 1" in str(one.message) for one in said) == len(plan.again)
        saved = offload.stats(synchronize=True).saved_bytes
        offload.reset_stats()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            assert_identical(expected, gradients(model, lambda: model(x), offload))
    stats = offload.stats(synchronize=True)
    assert 0 < stats.saved_bytes < saved, "nothing but its inputs is kept"
    assert stats.bytes_out > 0
    offload.close()


@pytest.mark.long
def test_a_llama_on_an_h100_is_a_tenth_faster_than_checkpointing_at_its_own_memory() -> None:
    from benchmarks import peers
    from benchmarks.models import Llama, Shape

    shape = Shape(layers=4, shared_heads=8)
    machine = replace(TABLE["h100"], out=53.8e9, back=54.2e9)
    tokens = torch.randint(shape.vocabulary, (1, 32769), generator=torch.Generator().manual_seed(random.randint(0, 9)))

    def planned(run: Any, **fields: Any) -> eo.Plan:
        with torch.device("meta"):
            model = Llama(shape, run).to(torch.bfloat16).train()
        return eo.plan(model, tokens, device=machine, **fields)

    checkpointing = planned(peers.checkpointed, device_budget="500GiB")
    plan = planned(peers.plain, device_budget=int(1.005 * checkpointing.peak_bytes), recompute=True)
    assert plan.fits
    assert plan.step_seconds <= 0.95 * checkpointing.step_seconds


class Once(Linears):
    """Makes a table at its first call; the second time it has fewer operators."""

    table: Tensor | None = None

    def between(self, h: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 128).expand(h.shape).exp()
        return (h * self.table).cos()


class Twins(Linears):
    """Multiplies twice with the same weight at its first call; the second time, what the first one made is there."""

    table: Tensor | None = None

    def between(self, h: Tensor) -> Tensor:
        near, far = h.sin(), h.cos()
        if self.table is None:
            self.table = torch.mm(near.detach(), self.down.weight.detach().t())
        return h * (self.table + torch.mm(far, self.down.weight.t())).sum(1, keepdim=True).sin()


class Weights(Twins):
    """The same of two weights, by which alone the products differ."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = (nn.Linear(32, 128, bias=False) for _ in range(2))

    def between(self, h: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.mm(h.detach(), self.near.weight.detach())
        return h * (self.table + torch.mm(h, self.far.weight)).sum(1, keepdim=True).sin()


#: What a block calls in forward alone.
ONCE = {"a table": Once, "a cast": Once, "a result of the same kind": Twins, "a weight of the same kind": Weights}


@pytest.mark.parametrize("how", ONCE)
def test_h75_a_kept_result_is_taken_as_long_as_the_operators_are_those_of_forward(how: str, disk: DiskBackend) -> None:
    """Of autocast's cache the second forward has its casts, and the recomputation has not."""
    model, x = Net(ONCE[how], count=3), rows()
    recording = record(model, x, min_bytes=1024)
    names = [f"blocks.{number}" for number in range(3)]

    def loss() -> Tensor:
        for block in model.blocks:
            block.table = torch.ones(256, 128) if how == "a cast" else None
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "a cast"):
            return model(x) + model(x + 1)

    expected = gradients(model, loss)
    for level in levels_of(recording, names, recording.program.seconds(MACHINE))[1:-1]:
        offload = disk.offload()
        with checkpointed(model, kept_by(recording, level)), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert_identical(expected, gradients(model, loss, offload))
        assert offload.stats(synchronize=True).bytes_out > 0
        offload.close()


class Remembers(nn.Module):
    """Has two numbers, and a product with the first that is made anew in its third step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.near, self.far = nn.Linear(32, 32), torch.tensor(0.3), torch.tensor(1.7)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = x.detach() * self.near
        return (self.inner(x * self.far).exp() + self.table).tanh()


def test_h75_nothing_is_taken_of_a_block_that_calls_what_was_not_planned(disk: DiskBackend) -> None:
    block, kept = Remembers(), {"0": (Kept("aten.mul.Tensor", (0,), 1),)}
    block(rows())  # so that it has its table
    model, offload = nn.Sequential(block), disk.offload()
    for forgets in (False, False, True, False):

        def loss(forgets: bool = forgets) -> Tensor:
            if forgets:
                block.table = None
            return model(rows()).sum()

        expected = gradients(model, loss)
        with checkpointed(model, kept), warnings.catch_warnings(record=True, action="always") as warned:
            assert_identical(expected, gradients(model, loss, offload))
        assert ["none of its results are kept" in str(one.message) for one in warned] == [True] * forgets
    assert offload.stats(synchronize=True).bytes_out > 0


class Many(Linears):
    """Is given one tensor twice and parts of one in a list, has a constant, and multiplies with one weight twice."""

    def forward(self, x: Tensor, given: list[Tensor] | None = None) -> Tensor:
        first, second = [x, x] if given is None else [torch.cat(given[:2]), torch.stack(given[2:]).sum(0)]
        return super().forward(x) + self.up(torch.cat((first, second)))[: len(x), :32] * torch.tensor([0.5])

    def between(self, h: Tensor) -> Tensor:
        return (h @ self.up.weight @ self.up.weight.t()).cos()


@pytest.mark.parametrize("given", [None, lambda: [*rows().chunk(2), rows().sin(), rows()]], ids=["", "a list"])
def test_each_kept_result_is_taken(given: Any) -> None:
    model, x = Net(Many, given, count=3), rows()
    recording = record(model, x, min_bytes=1024)
    names = [f"blocks.{number}" for number in range(3)]
    most = levels_of(recording, names, recording.program.seconds(MACHINE))[1]

    def calls(again: Any) -> Counter[str]:
        with eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0) as offload, checkpointed(model, again):
            loss = model(x)
        with Operators() as operators:
            loss.backward()
        assert offload.stats(synchronize=True).bytes_out > 0
        return operators.seen

    plain, whole, kept = calls({}), calls(dict.fromkeys(names, ())), calls(kept_by(recording, most))
    for kind in {kept.kind for kept in recording.kept(recording.calls[names[0]], most[names[0]])}:
        assert plain[kind] == kept[kind] < whole[kind]


class Steady(TorchDispatchMode):
    """Names every second result that may be kept."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.number, self.calls, self.kept = first, Counter[str](), defaultdict[str, list[int]](list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of_call(func)
        if has_steady_results(func, args, kwargs or {}):
            self.number += 1
            self.kept[kind] += [self.calls[kind]] * (self.number % 2)
        self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        return self.function(*given)


@pytest.mark.filterwarnings("ignore:eager_offload. nothing moved:RuntimeWarning")
@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=map(str, PROGRAMS))
@pytest.mark.sampled(2, quick=True)
def test_programs_that_keep_every_second_result_have_the_same_bits(number: int, users_backend: Backend) -> None:
    program = PROGRAMS[number]
    assert program.step is not None
    function, inputs = program.step()
    with Steady(number) as steady:
        function(*inputs)
    kept = [Kept(kind, tuple(numbers), steady.calls[kind]) for kind, numbers in steady.kept.items()]

    def forward(function: Callable[..., Any]) -> Callable[..., Any]:
        def again(*inputs: Any) -> Any:
            given = tree_map_only(Tensor, lambda one: one * 1 if one.requires_grad else one, inputs)
            with checkpointed(model := nn.Sequential(Block(function)), {"0": kept}, verify=True):
                return model[0](*given)

        return again

    same_gradients(
        lambda around: program(Run(around, forward)),
        users_backend,
        moved=program.moved / 4,
        reloads=False,
        held=Flag.HELD in program.flags,
        **program.fields,
    )
