"""What is computed again: decided near the best, predicted as it is traced, applied as plain checkpoints are."""

from __future__ import annotations

import copy
import itertools
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from eager_offload.machine import TABLE
from eager_offload.planning.apply import checkpointed
from eager_offload.planning.decide import RehearsedSolver
from eager_offload.planning.predict import Prediction, Problem
from eager_offload.planning.program import Op, Program, ProgramAsk, ProgramSave, RecomputableCall, Storage
from eager_offload.planning.recompute import Recomputing, chain
from eager_offload.planning.solve import Solver
from eager_offload.planning.trace import trace
from tests.planning import programs
from tests.planning.programs import CONFIG, Stack, assert_near_the_best, budget_of, planned, slow, wide
from tests.planning.test_follow import Other

pytestmark = pytest.mark.usefixtures("one_thread")

#: On it moving is dear, and computing is not.
FAR = slow(out=1e6, back=1e6)


# -- the decision -----------------------------------------------------------------------------------------------------


@st.composite
def modules(draw: st.DrawFn, most: int) -> Problem:
    """Steps of modules, each of which makes and saves one storage, and of which each may be computed again."""
    count = draw(st.integers(1, most))
    saves, calls, storages, ops, seconds = [], [], [], list[Op](), list[float]()
    for number in range(count):
        begin = len(ops)
        for _ in range(draw(st.integers(1, 3))):
            ops.append(Op("mul", number + 1, draw(st.integers(0, 1)), 1, True))
            seconds.append(draw(st.integers(1, 50)) / 10)
        saves.append(ProgramSave(1, False, None, number, op=len(ops)))
        calls.append(RecomputableCall(number + 1, begin, len(ops), number, number + 1, (), draw(st.integers(0, 3))))
    forward = len(ops)
    asks: list[ProgramAsk] = []
    for number in reversed(range(count)):
        nbytes = draw(st.integers(1, 20))
        asks.append(ProgramAsk(number, len(ops)))
        for _ in range(draw(st.integers(1, 2))):
            ops.append(Op("mul", number + 1, 0, 1, True))
            seconds.append(draw(st.integers(1, 100)) / 10)
        call = calls[number]
        made = draw(st.integers(call.begin, call.end - 1))
        storages.append(Storage(nbytes, nbytes, number + 1, made, made + 1, call.end, asks[-1].op, len(ops)))
    names = ("", *(f"layers.{number}" if draw(st.booleans()) else f"part{number}" for number in range(count)))
    other = tuple(draw(st.integers(0, 10)) for _ in ops)
    program = Program(
        names, tuple(ops), forward, tuple(saves), tuple(asks), tuple(reversed(storages)), other, tuple(calls)
    )
    rates, windows = st.sampled_from([1.0, 5.0, 20.0]), st.sampled_from([1, 10, 40])
    return Problem(program, seconds, draw(rates), draw(rates), draw(windows), draw(windows))


def every_decision(problem: Problem) -> list[Prediction]:
    """What comes of each way to keep, to move or to compute again each storage."""
    recomputing = Recomputing(problem)
    found = []
    for flags in itertools.product((False, True), repeat=len(recomputing.candidates)):
        shape = recomputing.shape(itertools.compress(recomputing.candidates, flags)).problem
        found += programs.every_decision(shape)
    return found


def check(problem: Problem) -> None:
    every, count = every_decision(problem), len(problem.program.storages)
    assert len(every) == 3**count
    # Where there are few all decisions are looked at.
    assert_near_the_best(Solver(problem, recompute=True), every, 1 + 1e-8 if count <= 5 else 1.02)


@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(modules(5))
def test_a_decision_is_within_two_percent_of_the_best_of_keeping_moving_and_computing_again(problem: Problem) -> None:
    check(problem)


@pytest.mark.long
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(modules(8))
def test_a_decision_on_more_is_within_two_percent_of_the_best_of_all_three_too(problem: Problem) -> None:
    check(problem)


class Mixed(nn.Module):
    """Norms, activations, products and attentions as modules of their own."""

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.view(1, len(x), 2, -1).transpose(1, 2).contiguous()
            return F.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2).reshape_as(x) * y.sum()

    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp().sin().exp()

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(self.Attention() for _ in range(count))
        self.gates = nn.ModuleList(self.Gate() for _ in range(count))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for attention, gate, layer in zip(self.attentions, self.gates, self.layers, strict=True):
            x = x + layer(gate(attention(x).tanh()))
        return x.sum()


def test_what_takes_the_fewest_seconds_for_each_byte_is_first_and_attention_after_norms_and_activations() -> None:
    program = trace(Mixed(), torch.randn(64, 32, requires_grad=True), min_bytes=0)
    problem = Problem(program, program.seconds(slow(flops=1e15, single_flops=1e15)), 1e9, 1e9, 1 << 20, 1 << 20)
    candidates = Recomputing(problem).candidates
    kinds = list(dict.fromkeys(one.kind for one in chain(candidates)))
    assert [one.attends for one in candidates].count(True) == 3
    assert kinds.index("attentions.*") > kinds.index("gates.*")
    dear = next(one for one in candidates if one.kind == "gates.*")
    changed = [
        one._replace(seconds=0.0) if one.attends else one._replace(seconds=9.0) if one.kind == dear.kind else one
        for one in candidates
    ]
    kinds = list(dict.fromkeys(one.kind for one in chain(changed)))
    assert kinds.index("attentions.*") > kinds.index("gates.*"), "though it takes no time"
    places = [one.call.module for one in chain(candidates) if one.kind == "gates.*"]
    assert sorted(places) == [one.call.module for one in candidates if one.kind == "gates.*"]


@pytest.mark.parametrize(
    "kind", ["blocks.*", "blocks.*.first", "blocks.*.second", "gates.*", "attentions.*", "layers.*"]
)
def test_numbers_of_a_step_with_checkpoints_are_those_of_its_trace(kind: str) -> None:
    model, x = wide() if kind.startswith("blocks") else (Mixed(), torch.randn(64, 32, requires_grad=True))

    def problem(program: Program) -> Problem:
        return Problem(program, program.seconds(slow()), 1e8, 1e8, 1 << 16, 1 << 16)

    whole = problem(trace(model, x, min_bytes=1 << 10))
    recomputing = Recomputing(whole)
    chosen = [one for one in recomputing.candidates if one.kind == kind]
    names = [whole.program.modules[one.call.module] for one in chosen]
    assert len(names) == 3
    shape, real = recomputing.shape(chosen).problem, problem(trace(model, x, min_bytes=1 << 10, again=names))
    assert [op.name for op in shape.program.ops] == [op.name for op in real.program.ops]
    assert shape.compute_seconds == pytest.approx(real.compute_seconds)
    nothing, also = (one.predict((False,) * len(one.program.storages)).peak_bytes for one in (shape, real))
    assert also <= nothing <= 1.06 * also


# -- the plan ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> eo.Plan:
    """One in which something is computed again."""
    budget = budget_of(FAR, wide, 0.5)
    return planned(device=FAR, device_budget=budget, recompute=True)


@pytest.mark.long
def test_what_is_computed_again_takes_less_time_than_moving_it(plan: eo.Plan) -> None:
    moving = planned(device=FAR, device_budget=plan.device_budget)
    assert plan.fits
    assert plan.again
    assert plan.recomputed_bytes > 0 == moving.recomputed_bytes
    assert plan.step_seconds < moving.step_seconds / 2
    assert plan.compute_seconds == moving.compute_seconds < plan.step_seconds


@pytest.mark.long
@pytest.mark.parametrize("device", [FAR, slow(out=1e8, back=1e8)], ids=["far", "near"])
@pytest.mark.parametrize("recompute", [False, True])
def test_every_budget_from_the_least_one_on_is_met_and_none_below_it(device: eo.Machine, recompute: bool) -> None:

    def within(budget: int) -> eo.Plan:
        return planned(device=device, device_budget=budget, recompute=recompute)

    whole = planned(device=device)
    least = within(0).least_budget
    assert least <= whole.least_budget
    assert not within(least - 1).fits
    slowest = float("inf")
    for part in (0, 0.01, 0.1, 0.5, 1):
        plan = within(least + int((whole.peak_bytes - least) * part))
        assert plan.fits, part
        assert plan.least_budget == least
        slowest = min(slowest, plan.step_seconds * 1.05)
        assert plan.step_seconds <= slowest
    assert plan.step_seconds == plan.compute_seconds
    points = within(whole.peak_bytes).front(6)
    assert points[0].budget == least
    assert points[-1].step_seconds == plan.compute_seconds
    assert [point.step_seconds for point in points] == sorted((point.step_seconds for point in points), reverse=True)
    assert all(point.peak_bytes <= point.budget for point in points)


def test_where_transfers_are_hidden_nothing_is_computed_again() -> None:
    near = slow(out=1e12, back=1e12)
    least = planned(device=near).least_budget
    plan = planned(device=near, device_budget=(least * 3) // 2, recompute=True)
    assert plan.fits
    assert plan.again == ()
    assert plan.recomputed_bytes == 0
    assert "again" not in str(plan)


def test_the_table_says_what_is_computed_again_and_a_file_keeps_it(plan: eo.Plan, tmp_path: Path) -> None:
    text = str(plan)
    assert "are computed again" in text
    assert sum(row.recomputed_bytes for row in plan.rows()) == plan.recomputed_bytes
    assert next(line for line in text.splitlines() if line.startswith("module")).split()[-1] == "again"
    plan.save(tmp_path / "plan.json")
    assert eo.Plan.load(tmp_path / "plan.json") == plan


class Writes(nn.Module):
    """What it does the second time is another thing."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.how, self.cache = nn.BatchNorm1d(32), how, []
        self.register_buffer("count", torch.zeros(()))
        self.left, self.generator = [1.0], torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x).exp().sin().exp().cos()


def counts(module: Any, x: Tensor) -> Tensor:
    module.count.add_(1)
    return x.sin()


def grows(module: Any, x: Tensor) -> Tensor:
    module.cache.append(x)
    return torch.cat(module.cache).sin()


def rebinds(module: Any, x: Tensor) -> Tensor:
    module.count = module.count / 2 + 1
    return x.sin()


def tells(module: Any, x: Tensor) -> Tensor:
    module.times = getattr(module, "times", 0) + 1
    return (x * module.times).sin()


def draws(module: Any, x: Tensor) -> Tensor:
    return (x * random.random()).sin()


def draws_of_its_own(module: Any, x: Tensor) -> Tensor:
    return (x * torch.rand(x.shape, generator=module.generator)).sin()


def runs_out(module: Any, x: Tensor) -> Tensor:
    return (x * module.left.pop()).sin()


def marked(module: Any, x: Tensor) -> Tensor:
    return eo.keep(x.sin().exp()).sin()


class Around(nn.Module):
    def __init__(self, inner: nn.Module, after: Callable[[Tensor], Tensor] = torch.sin) -> None:
        super().__init__()
        self.first, self.inner, self.after = nn.Linear(32, 32), inner, after

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sin() + 1
        y, z = self.inner(x), self.after(x)
        for _ in range(4):  # what this saves is the first that backward is over with
            z = z.exp().sin()
        return (y.sum() + z.sum()).sum()


@pytest.mark.parametrize(
    "how",
    [counts, grows, rebinds, tells, draws, draws_of_its_own, runs_out, marked, lambda module, x: module.norm(x)],
)
def test_modules_that_would_do_another_thing_or_of_which_the_user_has_decided_are_not_computed_again(how: Any) -> None:
    x = torch.randn(64, 32)

    def planned(model: nn.Module) -> eo.Plan:
        budget = eo.plan(model, x, device=FAR, config=CONFIG).least_budget - 1
        return eo.plan(model, x, device=FAR, device_budget=budget, recompute=True, config=CONFIG)

    assert planned(Around(Writes(lambda module, x: x.sin()))).again == ("inner",)
    assert planned(Around(Writes(how))).again == ()


class Counter:
    def __init__(self) -> None:
        self.count = 1

    def __call__(self, x: Tensor) -> Tensor:
        self.count += 1
        return x.neg()


class Reads:
    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def __call__(self, module: Any, x: Tensor) -> Tensor:
        return (x * self.counter.count).sin()


def test_a_module_whose_argument_or_state_is_written_to_afterwards_is_not_computed_again() -> None:
    x = torch.randn(64, 32)
    reads = Reads(Counter())
    for how, after, count in (
        (lambda module, x: x.sin(), torch.neg, 1),
        (lambda module, x: x.sin(), Tensor.neg_, 0),
        (reads, Counter(), 1),
        (reads, reads.counter, 0),
    ):
        program = trace(Around(Writes(how), after), x, min_bytes=0)
        assert [program.modules[one.module] for one in program.calls].count("inner") == count


# -- checkpoints around modules ---------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Blocks with dropout, called by keyword too."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(
                nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32)
            )

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            out: Tensor = self.inner(x) * scale
            return out

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x, scale=x.tanh())
        return x.square().mean()


def gradients(model: nn.Module, x: Tensor, with_: Any = None) -> list[Tensor]:
    torch.manual_seed(3)
    return programs.gradients(model, lambda: model(x), with_)


def packs(step: Callable[[], object]) -> int:
    """Bytes that a step saves."""
    found = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal found
        found += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return found


def test_gradients_are_those_of_plain_checkpoints_and_bytes_move() -> None:
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(128, 32)
    names = [f"parts.{number}" for number in range(3)]
    plain = copy.deepcopy(model)
    for part in plain.parts:
        own = part.forward
        part.forward = lambda *a, own=own, **n: checkpoint(own, *a, use_reentrant=False, **n)
    expected, whole = gradients(plain, x), gradients(model, x)
    with checkpointed(model, names):
        offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0)
        found = gradients(model, x, offload)
        few = packs(lambda: model(x))
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, found, whole)), "checkpoints keep the state of random numbers"
    assert offload.stats().bytes_out > 0
    assert 0 < few < packs(lambda: model(x)) / 3


def test_a_plan_is_applied_and_a_step_saves_what_it_says(plan: eo.Plan) -> None:
    model, x = wide()
    expected = gradients(model, x)
    saves: list[int] = []
    with (
        plan.apply(model),
        torch.autograd.graph.saved_tensors_hooks(lambda one: (saves.append(one.nbytes), one)[1], lambda one: one),
    ):
        loss = model(x)
    assert saves == [save.nbytes for save in plan.problem.program.saves]
    model.zero_grad()
    loss.backward()
    found = [loss.detach(), *(one.grad for one in model.parameters())]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("how", "rows"), [("", 256), ("another batch", 128), ("another order", 256), ("a layer less", 256)]
)
def test_a_plan_with_checkpoints_trains_exactly_whatever_it_was_made_for(
    how: str, rows: int, plan: eo.Plan, tmp_path: Path
) -> None:
    model, x = Other(how), torch.randn(rows, 32)
    expected = gradients(model, x)
    with plan.apply(model.inner):
        offload = eo.Offload(plan=plan, tier="disk", disk_path=tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(5):
                found = gradients(model, x, offload)
                assert all(map(torch.equal, found, expected))
    stats = offload.stats(synchronize=True)
    assert (stats.followed_forwards == 5, bool(stats.plan_misses)) == (how == "", how != "")
    assert (stats.bytes_out > 0) == how.startswith("another"), "what is followed, or is small, has nothing move"
    offload.close()


def test_threads_plan_under_no_grad_while_the_model_trains_and_leave_nothing_behind(plan: eo.Plan) -> None:
    model, x = wide()
    before, generator = state_of(model), torch.get_rng_state()
    expected = gradients(model, x)
    torch.set_rng_state(generator)
    begun, found = threading.Barrier(3), dict[int, eo.Plan]()

    def other(number: int) -> None:
        begun.wait()
        with torch.no_grad():
            found[number] = eo.plan(
                model, x, device=FAR, device_budget=plan.device_budget, recompute=True, config=CONFIG
            )
            assert not torch.is_grad_enabled()

    threads = [threading.Thread(target=other, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    begun.wait()
    for _ in range(20):
        offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0)
        model.zero_grad(set_to_none=True)
        with offload:
            loss = model(x)
        loss.backward()
        seen = [loss.detach(), *(one.grad for one in model.parameters())]
        assert all(map(torch.equal, seen, expected))
        assert offload.stats(synchronize=True).bytes_out > 0
    for thread in threads:
        thread.join()
    model.zero_grad(set_to_none=True)
    assert torch.equal(generator, torch.get_rng_state())
    assert state_of(model) == before
    assert [one.to_dict() for one in found.values()] == [plan.to_dict()] * 2


def state_of(model: nn.Module) -> list[object]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    return [
        list(model.state_dict()),
        [[dict(getattr(one, name)) for name in hooks] for one in model.modules()],
        [set(vars(one)) for one in model.modules()],
    ]


def test_checkpoints_leave_nothing_behind_whatever_happens() -> None:
    model, x = Dropping(), torch.randn(8, 32)
    before = state_of(model)
    with pytest.raises(KeyError), checkpointed(model, ["parts.0", "parts.1"]):  # noqa: PT012  # it is left by an error
        assert list(model.state_dict()) == before[0]
        assert state_of(model)[1] == before[1]
        with checkpointed(model, ["parts.1"]):
            pass
        assert packs(lambda: model.parts[1](x, scale=x)) < packs(lambda: model.parts[2](x, scale=x)), "goes on"
        raise KeyError
    assert state_of(model) == before
    with pytest.raises(eo.ConfigError, match=r"a module 'parts\.7', which this one does not have"):
        checkpointed(model, ["parts.0", "parts.7"]).__enter__()
    assert state_of(model) == before


def test_copies_that_are_made_meanwhile_have_no_checkpoints_and_wrapped_models_have_their_names() -> None:
    model, x = Dropping(), torch.randn(8, 32)
    most = packs(lambda: model(x))

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    with checkpointed(Wrapper(), ["parts.0"]):
        assert packs(lambda: model(x)) < most
        copied = copy.deepcopy(model)
        assert packs(lambda: copied(x)) == most
    assert state_of(copied)[:2] == state_of(model)[:2]


def test_threads_apply_and_leave_in_any_order() -> None:
    model, x = Dropping(), torch.randn(8, 32)
    before, most = state_of(model), packs(lambda: model(x))
    entered, leave = threading.Barrier(3), threading.Event()

    def other(names: list[str]) -> None:
        with checkpointed(model, names):
            entered.wait()
            leave.wait()

    threads = [threading.Thread(target=other, args=(names,)) for names in (["parts.0"], ["parts.0", "parts.2"])]
    for thread in threads:
        thread.start()
    with checkpointed(model, ["parts.0"]):
        entered.wait()
    assert packs(lambda: model(x)) < most
    leave.set()
    for thread in threads:
        thread.join()
    assert state_of(model) == before
    assert packs(lambda: model(x)) == most


def test_what_is_put_around_a_checkpointed_module_meanwhile_stays() -> None:
    model, x = Dropping(), torch.randn(8, 32)
    most = packs(lambda: model(x))

    @contextmanager
    def skipping() -> Iterator[eo.Offload]:
        offload = eo.Offload(skip=["parts.0"])
        offload.skip_in(model)
        yield offload
        offload.close()

    with checkpointed(model, ["parts.0"]):
        region = skipping()
        region.__enter__()
    assert packs(lambda: model(x)) == most, "the checkpoint is not in force any more"
    region.__exit__(None, None, None)
    assert packs(lambda: model(x)) == most


@pytest.mark.parametrize("part", [3, pytest.param(2, marks=pytest.mark.long)])
def test_a_stack_on_several_layers_is_planned_below_what_moving_alone_needs_time_for(part: int) -> None:
    with torch.device("meta"):
        model, x = Stack(6, 64, 4, 2, 128), torch.empty(512, 64)
    whole = eo.plan(model, x, device=FAR, config=CONFIG)
    budget = whole.least_budget + (whole.peak_bytes - whole.least_budget) // part
    plan = eo.plan(model, x, device=FAR, device_budget=budget, recompute=True, config=CONFIG)
    assert plan.fits
    assert plan.step_seconds < 1.6 * whole.compute_seconds


@pytest.mark.parametrize("part", [1.0, 1.15])
def test_a_plan_needs_no_more_and_takes_no_longer_than_checkpoints_around_all(part: float) -> None:
    # The host is ahead of the device, so what is brought back early takes more than arithmetic says.
    with torch.device("meta"):
        model, x = Stack(4, 4096, 32, 32, 11_008).to(torch.bfloat16), torch.empty(8192, 4096, dtype=torch.bfloat16)
    fields = {"max_inflight_bytes": "840MiB", "prefetch_bytes": "840MiB"}
    config = eo.OffloadConfig(**fields)
    program = trace(model, x, min_bytes=config.size("min_bytes"), again=[f"blocks.{number}" for number in range(4)])
    device = TABLE["h200"]
    windows = config.size("max_inflight_bytes"), config.size("prefetch_bytes")
    around_all = Problem(program, program.seconds(device), device.out, device.back, *windows)
    fixed = RehearsedSolver(around_all, device.launch_seconds).nothing
    budget = int(fixed.peak_bytes * part)
    plan = eo.plan(model, x, device=device, device_budget=budget, recompute=True, config=fields)
    assert plan.fits
    assert plan.step_seconds <= fixed.step_seconds
    assert plan.least_budget <= plan.peak_bytes
