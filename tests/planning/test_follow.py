"""``Offload(plan=eo.plan(...))``: followed from the first step on; a plan that does not fit changes no bit."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import eager_offload as eo
from eager_offload.runtime.base import DeviceMemory
from tests.planning.programs import CONFIG, Stack, assert_trained, budget_of, planned, slow, wide
from tests.sampling import search
from tests.simulation.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def half() -> eo.Plan:
    """One in which about half of all that may move does."""
    plan = planned(device_budget=budget_of(slow(), wide, 0.5))
    assert {save.fate for save in plan.step_plans[0].saves} == {"keep", "share", "offload"}
    return plan


def train(model: nn.Module, offload: eo.Offload, seed: int = 0, rows: int = 256) -> None:
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))
    assert_trained(model, x, offload)


def on_disk(path: Path, **fields: Any) -> eo.Offload:
    return eo.Offload(tier="disk", disk_path=path, **fields)


# -- one that fits -----------------------------------------------------------------------------------------------------


def test_every_step_follows_it_from_the_first_one_on(
    half: eo.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What this machine takes is nothing that the plan knows: after 16 forwards another one would be followed.
    monkeypatch.setattr(eo.Plan, "is_off", lambda plan, timing: False)
    (step_plan,), (model, _) = half.step_plans, wide()
    offload = on_disk(tmp_path, config=half.config, plan=half)
    for seed in range(20):  # and none is decided anew
        train(model, offload, seed)
    stats = offload.stats(synchronize=True)
    assert (stats.followed_forwards, stats.plan_misses) == (20, {})
    assert offload.step_plan() == step_plan
    assert stats.bytes_out == 20 * sum(step_plan.slots) > 0, "what is to leave, and nothing else"
    assert stats.offloaded_bytes + stats.kept_bytes["newest"] > 0
    offload.close()
    train(model, offload)
    again = offload.stats(synchronize=True)
    assert (again.followed_forwards, again.bytes_out) == (21, 21 * sum(step_plan.slots)), "and when it is used again"
    offload.close()


class Marking(nn.Module):
    """Marks what it saves: one to stay, one to leave; a plan decides of what is between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)), nn.Parameter(torch.ones(32))
        self.marks_what_is_small = False

    def forward(self, x: Tensor) -> Tensor:
        marks = (eo.keep, None, eo.prefer_offload, None)
        for layer, mark in zip(self.layers, marks, strict=True):
            x = layer(x).tanh()
            x = x if mark is None else mark(x)
        scale = self.scale * 2
        x = x * (eo.prefer_offload(scale) if self.marks_what_is_small else scale)
        return x.square().sum()


@pytest.mark.parametrize("policy", ["max", "least"])
def test_a_model_that_marks_tensors_follows_its_plan_and_marks_come_first(tmp_path: Path, policy: str) -> None:
    model, marked_bytes = Marking(), 256 * 32 * 4
    plan = eo.plan(model, torch.randn(256, 32), device=slow(), policy=policy, config=CONFIG)
    assert plan.fits
    assert plan.moved_bytes >= marked_bytes, "what is marked to leave, where nothing has to"
    offload = on_disk(tmp_path, plan=plan)
    for seed in range(3):
        train(model, offload, seed)
    stats = offload.stats(synchronize=True)
    assert (stats.followed_forwards, stats.plan_misses) == (3, {})
    assert stats.kept_bytes["marked"] == 3 * marked_bytes
    leaving = (1 if policy == "least" else 4) * marked_bytes
    assert stats.offloaded_bytes == 3 * leaving

    model.marks_what_is_small = True  # of which the plan does not know
    train(model, offload, 3)
    after = offload.stats(synchronize=True)
    assert (after.followed_forwards, after.plan_misses) == (4, {})
    assert after.offloaded_bytes - stats.offloaded_bytes == leaving + 32 * 4
    offload.close()


def test_where_nothing_has_to_move_nothing_does_and_there_is_no_warning(tmp_path: Path) -> None:
    model, _ = wide()
    offload = on_disk(tmp_path, plan=planned())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(5):
            train(model, offload, seed)
        offload.close()
    stats = offload.stats()
    assert (stats.followed_forwards, stats.plan_misses, stats.bytes_out) == (5, {}, 0)
    assert stats.advice[0].startswith("Memory did not fall: nothing moved")
    assert "stay as the plan says" in stats.advice[0]


def test_h54_a_step_that_differs_in_between_leaves_the_plan_in_force(half: eo.Plan, tmp_path: Path) -> None:
    """The last batch of an epoch is a smaller one; what was recorded meanwhile does not take the plan's place."""
    model, _ = wide()
    offload, followed = on_disk(tmp_path, plan=half, step_plans=True), 0
    for epoch in range(3):
        for seed, rows in enumerate([256] * 4 + [128]):
            train(model, offload, 10 * epoch + seed, rows)
        followed = offload.stats().followed_forwards
    train(model, offload, 99)
    assert offload.stats().followed_forwards > followed
    assert offload.step_plan() == half.step_plans[0]
    assert offload.stats().bytes_out > 0
    offload.close()


# -- what came of it ---------------------------------------------------------------------------------------------------


def test_stats_have_what_was_predicted_beside_what_was_measured(half: eo.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, x), stage = wide(), Stage(slow())
    offload = stage.offload(plan=half)
    predicted = offload.stats().plan
    assert predicted is not None
    assert (predicted.predicted_peak_bytes, predicted.predicted_step_seconds) == (half.peak_bytes, half.step_seconds)
    assert (predicted.peak_bytes, predicted.step_seconds) == (None, None), "nothing was measured"
    assert "planned    a peak of" in str(offload.stats())
    for _ in range(3):
        step = stage.step(offload, model, x, lambda: model(x))
    found = offload.stats()
    assert found.plan is not None
    assert found.plan.peak_bytes is None, "the simulated device remembers no peak"
    assert found.plan.step_seconds == pytest.approx(step.seconds, rel=0.05)
    assert f"measured {found.plan.step_seconds:,.4g} s" in str(found)
    assert eo.OffloadStats(**found.to_dict()) == found
    offload.reset_stats()
    assert offload.stats().plan == predicted
    assert eo.Offload().stats().plan is None
    offload.close()

    # A device whose allocator remembers it.
    peaks, measured = iter([100, 700, 700, 700, 700, 900, 900, 900]), []
    monkeypatch.setattr(stage.runtime, "memory", lambda device: DeviceMemory(50, next(peaks)))
    offload = stage.offload(plan=half)
    for _ in range(4):
        stage.step(offload, model, x, lambda: model(x))
        measured.append(offload.stats().plan)
    assert [one and one.peak_bytes for one in measured] == [700, 700, 900, 900]
    offload.close()


# -- one that does not -------------------------------------------------------------------------------------------------


class Other(nn.Module):
    """The same operators in another order, or other ones."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, Stack(2 if how == "a layer less" else 3, 32, 4, 2, 64)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "another beginning":
            x = x.double().float().sin() * self.inner.blocks[0].attention_norm.weight
        for block in self.inner.blocks:
            if self.how == "another order":
                x = x + block.feed(block.mlp_norm(x))
            x = block(x)
        if self.how == "another end":
            x = x * x.exp().cos()
        return x.sum()


@pytest.mark.parametrize(
    ("how", "rows", "misses"),
    [
        ("another batch", 128, {"size": 1}),
        ("another beginning", 256, {"size": 1}),
        ("another order", 256, None),
        ("another end", 256, None),
        ("a layer less", 256, {"fewer": 1}),
    ],
)
@pytest.mark.parametrize("where", ["simulated", "disk"])
def test_h54_a_plan_of_another_model_is_noticed_once_and_trains_exactly(
    how: str, rows: int, misses: dict[str, int] | None, where: str, half: eo.Plan, tmp_path: Path
) -> None:
    model = Other(how)
    offload = Stage(slow()).offload(plan=half) if where == "simulated" else on_disk(tmp_path, plan=half)
    with pytest.warns(RuntimeWarning, match="does not fit this model: a forward differs from it") as caught:
        train(model, offload, 0, rows)
    assert len(caught) == 1
    found = offload.stats().plan_misses
    assert sum(found.values()) == 1, "at the first save that differs"
    assert misses is None or found == misses
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(1, 8):
            train(model, offload, seed, rows)
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.close()


def test_a_plan_without_the_loss_that_the_context_computes_says_what_is_missing(half: eo.Plan) -> None:
    (model, x), offload = wide(), Stage(slow()).offload(plan=half)
    with pytest.warns(RuntimeWarning, match="give plan.* the function that computes it, as loss="), offload:
        loss = model(x).square()
    loss.backward()
    assert offload.stats(synchronize=True).plan_misses == {"more": 1}
    offload.close()


def test_h54_any_decision_and_any_steps_train_exactly() -> None:
    every = planned(policy="max")
    count = len(every.moves)

    def check(steps: list[tuple[str, int]], numbers: set[int]) -> None:
        plan = replace(every, moves=tuple(number in numbers for number in range(count)))
        offload = Stage(slow()).offload(plan=plan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed, (how, rows) in enumerate([("", 256), *steps, ("", 256)]):
                train(Other(how), offload, seed, rows)
        stats = offload.stats(synchronize=True)
        assert stats.followed_forwards > 0
        assert stats.offloaded_bytes > 0 or not numbers
        assert stats.saved_bytes == stats.offloaded_bytes + stats.shared_bytes + sum(stats.kept_bytes.values())
        offload.close()

    how = st.sampled_from(["", "a layer less", "another order", "another end"])
    steps = st.lists(st.tuples(how, st.sampled_from([64, 256])), max_size=4)
    search(check, steps, st.sets(st.integers(0, count - 1)), fixed=8)


# -- settings beside it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_bytes": "2KiB"}, "min_bytes='2KiB' does not go with plan"),
        ({"max_inflight_bytes": 1}, "max_inflight_bytes='1B' does not go with plan"),
        ({"prefetch_bytes": "1GiB"}, "prefetch_bytes='1GiB' does not go with plan"),
        ({"keep_last_bytes": 0}, "keep_last_bytes='0B' does not go with plan"),
        ({"skip": ["blocks.0"]}, "skip='blocks.0' does not go with plan"),
        ({"config": eo.OffloadConfig()}, "min_bytes='1MiB' does not go with plan"),
        ({"config": {"min_bytes": 1}}, "min_bytes='1B' does not go with plan"),
        ({"device_budget": "1GiB"}, "does not go with device_budget"),
        ({"step_plans": False}, "does not go with step_plans=False"),
        ({"codec": "bf16"}, "codec='bf16' does not go with plan=..., "),
        ({"plan": "plan.json"}, "plan takes what eager_offload.plan or Plan.load returns"),
    ],
)
def test_fields_that_contradict_a_plan_are_errors(given: dict[str, Any], said: str, half: eo.Plan) -> None:
    with pytest.raises(eo.ConfigError) as caught:
        eo.Offload(**{"plan": half, **given})
    assert said in str(caught.value)


def test_fields_that_do_not_contradict_it_are_taken(half: eo.Plan) -> None:
    for given in ({"min_bytes": 1024}, {"config": {"verify": True}}, {"config": half.config}, {"host_budget": "1GiB"}):
        found = eo.Offload(plan=half, **given).config  # type: ignore[arg-type]
        assert (found.min_bytes, found.max_inflight_bytes) == (1 << 10, 64 << 10)
    assert eo.Offload(plan=half, config={"verify": True}).config.verify


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DEVICE_BUDGET", "1MiB"),
        ("MIN_BYTES", "2KiB"),
        ("PREFETCH_BYTES", "1MiB"),
        ("POLICY", "free"),
        ("MAX_SLOWDOWN", "0.05"),
        ("STEP_PLANS", "false"),
    ],
)
def test_a_variable_that_a_plan_was_not_made_for_is_an_error(
    half: eo.Plan, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(f"EAGER_OFFLOAD_{name}", text)
    with pytest.raises(
        eo.ConfigError, match=f"EAGER_OFFLOAD_{name}=.* in the environment does not go with plan="
    ) as raised:
        eo.Offload(plan=half)
    assert "unset the variable, or plan anew" in str(raised.value)
    eo.Offload(half.config, plan=half).close()  # beside which no variable is asked


def test_variables_and_settings_that_a_plan_was_made_for_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(config={**CONFIG, "device_budget": "1MiB"})
    assert (plan.device_budget, plan.config.device_budget) == (1 << 20, None)
    eo.Offload(plan=plan).close()
    monkeypatch.setenv("EAGER_OFFLOAD_DEVICE_BUDGET", "1MiB")
    monkeypatch.setenv("EAGER_OFFLOAD_MIN_BYTES", "2KiB")
    monkeypatch.setenv("EAGER_OFFLOAD_HOST_BUDGET", "1GiB")
    plan = planned(config=None)
    assert (plan.device_budget, plan.config.min_bytes) == (1 << 20, 2 << 10)
    eo.Offload(plan=plan).close()
    monkeypatch.setenv("EAGER_OFFLOAD_DEVICE_BUDGET", "auto")
    eo.Offload(plan=plan).close()
