"""What is computed again: taken where that is the faster way, and applied as plain checkpoints are."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from eager_offload.planning.apply import checkpointed
from tests.hazards.programs import assert_identical
from tests.planning import programs
from tests.planning.programs import CONFIG, Other, budget_of, planned, slow, wide

pytestmark = pytest.mark.usefixtures("one_thread")

#: On it moving is dear, and computing is not.
FAR = slow(out=1e6, back=1e6)


@pytest.fixture(scope="module")
def plan() -> eo.Plan:
    """One in which something is computed again."""
    return planned(device=FAR, device_budget=budget_of(FAR, wide, 0.5), recompute=True)


# -- the decision -----------------------------------------------------------------------------------------------------


def test_what_is_computed_again_takes_less_time_than_moving_it(plan: eo.Plan) -> None:
    moving = planned(device=FAR, device_budget=plan.device_budget)
    assert plan.fits
    assert plan.again
    assert plan.recomputed_bytes > 0 == moving.recomputed_bytes
    assert plan.step_seconds < moving.step_seconds / 2
    assert plan.compute_seconds == moving.compute_seconds < plan.step_seconds


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
    assert "are recomputed" in text
    assert sum(row.recomputed_bytes for row in plan.rows()) == plan.recomputed_bytes
    assert next(line for line in text.splitlines() if line.startswith("module")).split()[-1] == "again"
    plan.save(tmp_path / "plan.json")
    assert eo.Plan.load(tmp_path / "plan.json") == plan


class Part(nn.Module):
    """Does what it is told, with what it has."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.how, self.generator = nn.BatchNorm1d(32), how, torch.Generator()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x).exp().sin().exp().cos()


#: What comes of these the second time is another thing, as a trace sees; the user has decided of the last one.
OTHERWISE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "counts": lambda part, x: (x * part.count.add_(1)).sin(),
    "draws": lambda part, x: (x * random.random()).sin(),
    "draws of its own": lambda part, x: (x * torch.rand(x.shape, generator=part.generator)).sin(),
    "normalizes": lambda part, x: part.norm(x),
    "marks": lambda part, x: eo.keep(x.sin().exp()).sin(),
}


def same(part: Any, x: Tensor) -> Tensor:
    return (x * part.count).sin()


class Around(nn.Module):
    """Two blocks, after which something happens to what the second one was given."""

    def __init__(self, blocks: Sequence[nn.Module], after: Callable[[Tensor], Tensor] = torch.sin) -> None:
        super().__init__()
        self.first, self.blocks, self.after = nn.Linear(32, 32), nn.ModuleList(blocks), after

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x).sin() + 1) + 1
        y, z = self.blocks[1](x), self.after(x)
        for _ in range(4):  # what this saves is the first that backward is over with
            z = z.exp().sin()
        return (y.sum() + z.sum()).sum()


@pytest.mark.parametrize(
    ("how", "after", "again"),
    [
        (same, torch.sin, {"blocks.0", "blocks.1"}),
        (same, Tensor.neg_, {"blocks.0"}),
        *((how, torch.sin, set()) for how in OTHERWISE.values()),
    ],
    ids=["the same", "is written to", *OTHERWISE],
)
def test_modules_that_would_do_another_thing_or_of_which_the_user_has_decided_are_not_computed_again(
    how: Any, after: Any, again: set[str]
) -> None:
    """Such as those whose argument or state is written to ``after`` them."""
    model, x = Around([Part(how), Part(how)], after), torch.randn(64, 32)
    budget = eo.plan(model, x, device=FAR, config=CONFIG).least_budget - 1
    found = eo.plan(model, x, device=FAR, device_budget=budget, recompute=True, config=CONFIG).again
    assert again.issuperset(found)
    assert bool(again) == bool(found)


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


def packs(step: Callable[[], object]) -> list[int]:
    """The bytes of all that a step saves."""
    found = list[int]()

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return found


def test_gradients_are_those_of_plain_checkpoints_and_bytes_move() -> None:
    model, x = Dropping(), torch.randn(128, 32)
    plain = copy.deepcopy(model)
    for part in plain.parts:
        own = part.forward
        part.forward = lambda *a, own=own, **n: checkpoint(own, *a, use_reentrant=False, **n)
    expected, whole = gradients(plain, x), gradients(model, x)
    with checkpointed(model, {f"parts.{number}": () for number in range(3)}):
        offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0)
        found = gradients(model, x, offload)
        few = sum(packs(lambda: model(x)))
    assert_identical(found, expected)
    assert_identical(found, whole, "checkpoints keep the state of random numbers")
    assert offload.stats().bytes_out > 0
    assert 0 < few < sum(packs(lambda: model(x))) / 3


def test_what_only_names_moves_the_same_whichever_of_checkpoints_and_skip_in_begins_first() -> None:
    x, calls, moved = torch.randn(128, 32), list[nn.Module](), list[int]()
    expected = gradients(model := Dropping(), x)
    parts: dict[str, Sequence[Any]] = {f"parts.{number}": () for number in range(3)}
    model.parts[1].register_forward_pre_hook(lambda module, _: calls.append(module))
    for applied in range(3):  # before, after, and on both sides
        offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0, only="parts.?")
        with ExitStack() as stack:
            for is_in_place in (applied != 1, applied > 0):
                if is_in_place:
                    stack.enter_context(checkpointed(model, parts))
                offload.skip_in(model)
            assert_identical(gradients(model, x, offload), expected)
        moved.append(offload.stats(synchronize=True).bytes_out)
        offload.close()
    assert moved == [moved[0]] * 3
    assert moved[0] > 0
    assert len(calls) == 2 * 3, "once more in backward"


def test_a_plan_is_applied_and_a_step_saves_what_it_says(plan: eo.Plan) -> None:
    model, x = wide()
    expected = gradients(model, x)
    with plan.apply(model), eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0) as offload:
        assert_identical(expected, gradients(model, x))
        stats = offload.stats(synchronize=True)
    with plan.apply(model):
        empty = packs(lambda: model(x)).count(0)  # which the checkpoints of torch 2.11 save
    saves = plan.problem.program.saves
    assert (stats.saved_tensors - empty, stats.saved_bytes) == (len(saves), sum(save.nbytes for save in saves))
    assert stats.bytes_out > 0
    assert len(saves) < len(packs(lambda: model(x)))
    with pytest.raises(eo.ConfigError, match="model=int is not accepted"), plan.apply(5):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    ("how", "rows"), [("", 256), ("another batch", 128), ("another order", 256), ("another end", 256)]
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
                assert_identical(expected, gradients(model, x, offload))
    stats = offload.stats(synchronize=True)
    assert plan.moved_bytes == stats.bytes_out == 0, "checkpoints make room enough"
    offload.close()


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
    with pytest.raises(KeyError), checkpointed(model, {"parts.0": (), "parts.1": ()}):  # noqa: PT012  # it is left by an error
        assert state_of(model)[:2] == before[:2]
        with checkpointed(model, {"parts.1": ()}):
            pass
        few, all_of_it = (packs(lambda part=part: part(x, scale=x)) for part in model.parts[1:])
        assert len(few) < len(all_of_it), "goes on"
        raise KeyError
    assert state_of(model) == before
    with pytest.raises(eo.ConfigError, match=r"a module 'parts\.7', which this one does not have"):
        checkpointed(model, {"parts.0": (), "parts.7": ()}).__enter__()
    assert state_of(model) == before
