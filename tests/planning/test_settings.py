"""``Offload(plan=eo.plan(...))``: the settings that follow, and what was predicted beside what came of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import eager_offload as eo
from eager_offload.runtime.base import DeviceMemory
from tests.planning.programs import CONFIG, Other, assert_trained, budget_of, planned, slow, wide
from tests.simulation.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def half() -> eo.Plan:
    """One in which about half of all that may move does."""
    return planned(device_budget=budget_of(slow(), wide, 0.5))


def train(model: nn.Module, offload: eo.Offload, seed: int = 0, rows: int = 256) -> None:
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))
    assert_trained(model, x, offload)


def on_disk(path: Path, **fields: Any) -> eo.Offload:
    return eo.Offload(tier="disk", disk_path=path, **fields)


# -- what moves ------------------------------------------------------------------------------------------------------


def test_where_nothing_has_to_move_nothing_does_and_there_is_no_warning(tmp_path: Path) -> None:
    model, _ = wide()
    offload = on_disk(tmp_path, plan=planned())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(5):
            train(model, offload, seed)
        offload.close()
    stats = offload.stats()
    assert stats.bytes_out == 0
    assert stats.advice[0].startswith("Memory did not fall: nothing moved")
    assert "stay as the plan says" in stats.advice[0]


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
    peaks, measured = iter([100, *[700] * 6, *[900] * 6]), list[eo.OffloadStats]()
    monkeypatch.setattr(stage.runtime, "memory", lambda device: DeviceMemory(50, next(peaks)))
    offload = stage.offload(plan=half)
    for _ in range(4):
        stage.step(offload, model, x, lambda: model(x))
        measured.append(offload.stats())
    assert [one.plan and one.plan.peak_bytes for one in measured] == [700, 700, 900, 900]
    assert [one.step_memory_peak for one in measured] == [700, 700, 900, 900]
    offload.close()


# -- of another model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["another batch", "another beginning", "another order", "another end", "a layer less"])
def test_h54_steps_of_another_model_train_exactly(how: str, half: eo.Plan, tmp_path: Path) -> None:
    model, rows = Other(how), 512 if how == "another batch" else 256
    for offload in (Stage(slow()).offload(plan=half), on_disk(tmp_path, plan=half)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for seed in range(4):
                train(model, offload, seed, rows)
        assert offload.stats(synchronize=True).bytes_out > 0
        offload.close()


# -- settings beside it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_bytes": "2KiB"}, "min_bytes='2KiB' does not go with plan"),
        ({"max_inflight_bytes": 1}, "max_inflight_bytes='1B' does not go with plan"),
        ({"prefetch_bytes": "1GiB"}, "prefetch_bytes='1GiB' does not go with plan"),
        ({"keep_last_bytes": 0}, "keep_last_bytes='0B' does not go with plan"),
        ({"skip": ["blocks.0"]}, "skip='blocks.0' does not go with plan"),
        ({"only": ["blocks.0"]}, "only='blocks.0' does not go with plan"),
        ({"config": eo.OffloadConfig()}, "min_bytes='1MiB' does not go with plan"),
        ({"config": {"min_bytes": 1}}, "min_bytes='1B' does not go with plan"),
        ({"device_budget": "1GiB"}, "does not go with device_budget"),
        ({"plan": "plan.json"}, "plan takes a result of eager_offload.plan or Plan.load"),
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
    assert "unset the variable, or plan again" in str(raised.value)
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
