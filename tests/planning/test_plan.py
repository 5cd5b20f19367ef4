"""``eo.plan``: what a user gives, what comes back, and every error."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import eager_offload as eo
from eager_offload.__main__ import main
from eager_offload.compile.decide import OperatorCall, flops_of
from eager_offload.planning.machine import TABLE
from tests.planning.programs import CONFIG, budget_of, planned, simulated, slow, wide
from tests.simulation.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")

KIB = 1 << 10


@pytest.fixture(scope="module")
def everything_fits() -> eo.Plan:
    return planned()


def test_a_plan_says_what_fits_and_what_moves(everything_fits: eo.Plan) -> None:
    plan = everything_fits
    assert plan.fits
    assert plan.device_budget == 1 << 30, "all that the device has"
    assert (plan.moved_bytes, plan.kept_bytes) == (0, plan.movable_bytes)
    assert plan.step_seconds == plan.compute_seconds == plan.floor_seconds
    assert 0 < plan.least_budget < plan.peak_bytes
    assert planned(optimizer_bytes="1MiB").peak_bytes == plan.peak_bytes + (1 << 20)
    assert planned(device="h200", device_budget="auto").device_budget == TABLE["h200"].memory_bytes


def test_a_plan_in_which_nothing_is_as_large_as_min_bytes_says_so() -> None:
    plan = planned(config={"min_bytes": "64MiB"})
    assert "nothing moves: no saved tensor except parameters reaches min_bytes, 64.0 MiB" in str(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eo.Offload(plan=plan)


def test_a_budget_is_held_by_the_least_movement(everything_fits: eo.Plan) -> None:
    budget = (everything_fits.peak_bytes + everything_fits.least_budget) // 2
    plan, everything = planned(device_budget=budget), planned(policy="max")
    assert plan.fits
    assert plan.peak_bytes <= budget
    assert 0 < plan.moved_bytes < everything.moved_bytes
    assert plan.moved_bytes + plan.kept_bytes == everything.moved_bytes + everything.kept_bytes
    assert everything.kept_bytes < everything.moved_bytes / 16, "what backward asks for before its copy is over"
    assert plan.floor_seconds <= plan.step_seconds
    assert planned(device_budget=plan.least_budget).fits
    below = planned(device_budget=plan.least_budget - 1)
    assert not below.fits, "which is no error"
    assert "less is taken with recompute=True (--recompute), a smaller batch" in str(below)
    assert below.least_budget == plan.least_budget
    over = planned(device_budget=plan.least_budget, policy="free")
    assert not over.fits
    assert 'policy="least", which keeps to its budget' in str(over)


@pytest.mark.long
def test_half_of_the_automatic_window_keeps_a_budget_that_all_of_it_does_not() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(24))).to("meta")
    plan = partial(eo.plan, model, torch.empty(8192, 512, device="meta"), device=slow(memory_bytes=1 << 36))
    everything_fits = plan(config={})
    window = everything_fits.windows[0]
    whole = plan(config={"max_inflight_bytes": window, "prefetch_bytes": window})
    assert everything_fits.least_budget < whole.least_budget - window // 4
    within = plan(config={}, device_budget=everything_fits.least_budget)
    assert within.fits
    assert within.moved_bytes > 0
    assert within.config.max_inflight_bytes == within.config.prefetch_bytes == window // 2
    assert plan(config={}, policy="max").config.max_inflight_bytes == window, "no budget asks for less"


def test_relief_is_the_least_larger_budget_with_which_compute_waits_little() -> None:
    device = slow(out=1e7, back=1e7)

    def within(budget: int) -> eo.Plan:
        return planned(device=device, device_budget=budget)

    def waits(plan: eo.Plan) -> float:
        return 1 - plan.compute_seconds / plan.step_seconds

    least = within(within(1).least_budget)
    relief = least.relief
    assert relief is not None
    assert waits(least) > 0.5
    found = within(relief.device_budget)
    assert waits(found) == pytest.approx(relief.waits, abs=0.01)
    assert relief.waits <= 0.05 < waits(within(relief.device_budget * 15 // 16))
    assert found.relief is None, "it waits little"


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
def test_every_peak_that_is_given_out_is_a_budget_that_is_met(recompute: bool) -> None:
    """Here the run finds lower peaks than arithmetic, and a step with one checkpoint takes more than it."""
    with torch.device("meta"):
        model = nn.Sequential(
            *(Residual(nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8)),
            nn.Linear(1024, 8),
        )
        x = torch.empty(4096, 1024)

    def within(budget: int) -> eo.Plan:
        return eo.plan(model, x, device="h200", device_budget=budget, recompute=recompute)

    least = within(1)
    assert not least.fits
    assert least.peak_bytes == least.least_budget
    points = least.front(5)
    assert points[0].budget == least.least_budget
    assert points[-1].step_seconds == pytest.approx(least.compute_seconds, rel=1e-3)
    assert all(point.peak_bytes <= point.budget for point in points)
    for met in (points, plans := [within(point.budget) for point in points]):
        seconds = [one.step_seconds for one in met]
        assert seconds == sorted(seconds, reverse=True), "a larger budget makes no step longer"
    assert all(plan.fits and plan.least_budget == least.least_budget for plan in plans)
    below = within(least.least_budget - 1)
    assert not below.fits
    assert below.step_seconds == least.step_seconds
    with pytest.raises(eo.ConfigError, match="points=1 is not accepted"):
        least.front(1)


def test_free_moves_what_the_link_hides() -> None:
    windows = {**CONFIG, "max_inflight_bytes": "256KiB", "prefetch_bytes": "256KiB"}  # four of its tensors
    fast, none = (planned(device=slow(out=rate, back=rate), policy="free", config=windows) for rate in (1e8, 1))
    assert fast.step_seconds == pytest.approx(fast.compute_seconds, rel=0.01)
    assert fast.moved_bytes > 0
    assert none.moved_bytes == 0


def test_a_plan_prints_as_a_table(everything_fits: eo.Plan) -> None:
    text = str(planned(policy="max"))
    answer, model = text.splitlines()[:2]
    assert re.fullmatch(
        r"fits in \d+\.\d KiB of 1\.0 GiB; \d\.\d\dx the step without transfers; \d+\.\d .iB move and "
        r"[\d.]+ .?i?B stay",
        answer,
    )
    assert model.startswith("Stack without optimizer states on slow: 0.001 TFLOP/s")
    assert "; 1.00x the step without transfers; nothing moves\n" in str(everything_fits)
    assert "1.000x the step without transfers" in str(everything_fits)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("blocks")}
    assert rows["blocks.*.gate"][1] == "3"
    assert rows["blocks.*.gate"][-2:] == ["192.0", "KiB"]
    assert "less is taken" not in text, "it fits"
    assert repr(everything_fits).startswith("<Plan of Stack on slow: fits, ")


# -- a budget of the tier ----------------------------------------------------------------------------------------------


def test_what_finds_no_room_stays_and_training_keeps_to_it() -> None:
    free = planned(policy="max")
    assert free.host_budget is None
    assert planned(policy="max", host_budget="auto").host_budget is None
    budget = free.host_bytes // 2
    plan = planned(policy="max", host_budget=budget)
    assert 0.7 * budget < plan.host_bytes <= budget == plan.host_budget == plan.config.host_budget
    assert plan.moved_bytes < free.moved_bytes
    assert plan.moved_bytes + plan.kept_bytes == free.moved_bytes + free.kept_bytes
    assert plan.least_budget > free.least_budget, "what has no room in the tier has to have it on the device"
    assert plan.peak_bytes > free.peak_bytes
    with pytest.warns(RuntimeWarning, match="no room for"):
        steps, stats = simulated(Stage(slow()), plan, *wide(), 3)
    for step in steps[1:]:
        assert plan.peak_bytes == pytest.approx(step.peak_bytes, rel=0.05)
    assert 0 < stats.host_bytes_peak <= budget


def test_modules_that_are_computed_again_make_room() -> None:
    plan = planned(device_budget=budget_of(slow(), wide, 1 / 8), recompute=True, host_budget="64KiB")
    assert plan.host_bytes <= 64 * KIB
    assert plan.again


def test_it_is_among_the_settings_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    config = {**CONFIG, "host_budget": "512KiB"}
    plan = planned(policy="max", config=config)
    assert plan.host_budget == 512 * KIB
    assert f"in the tier: {plan.host_bytes / KIB:.1f} KiB of at most 512.0 KiB" in str(plan)
    assert planned(host_budget="1MiB", config=config).host_budget == 1 << 20, "what is given here comes first"
    for offload in (eo.Offload(plan=plan), eo.Offload(plan=plan, config={"verify": True})):
        assert offload.config.host_budget == 512 * KIB
    model_of = "tests.planning.models_of_a_user:two_blocks"
    assert main(["plan", model_of, "--device", "a100", "--policy", "max", "--host-budget", "1GiB"]) == 0
    assert "of at most 1.0 GiB" in capsys.readouterr().out
    assert "in the tier" not in str(planned())


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"device": "h100", "device_budget": 1},
        {"policy": "max", "config": {**CONFIG, "tier": "disk", "disk_path": "/tmp", "host_budget": "512KiB"}},
        {"policy": "max", "config": {**CONFIG, "skip": ["blocks.0"]}},
    ],
    ids=str,
)
def test_a_saved_plan_is_the_same_plan(fields: dict[str, Any], tmp_path: Path) -> None:
    plan = planned(**fields)
    plan.save(tmp_path / "plan.json")
    loaded = eo.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert (str(loaded), loaded.to_dict()) == (str(plan), plan.to_dict())
    assert loaded.front(3) == plan.front(3)


def _set(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for one in path[:-1]:
            content = content[one]
        content[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set("format", to=6), "format 6 instead of 7"),
        (_set("digest", to=None), "not as it was written"),
        (_set("plan", "policy", to="most"), "not as it was written"),
        (_set("plan", "device_budget", to=10**400), "not as it was written"),
        (_set("plan", "speed", to=1), "not as it was written"),
        (_set("plan", to=[]), "not as it was written"),
        *((text, "") for text in ("", "[1]", "{}", "\x00")),
    ],
)
def test_a_file_that_is_no_plan_or_that_something_has_changed_is_an_error(
    change: Callable[[Any], None] | str, said: str, everything_fits: eo.Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    everything_fits.save(path)
    content = json.loads(path.read_text())
    if not isinstance(change, str):
        change(content)
    path.write_text(change if isinstance(change, str) else json.dumps(content))
    with pytest.raises(eo.ConfigError, match=rf"plan\.json' holds no plan that this version can read: .*{said}"):
        eo.Plan.load(path)
    with pytest.raises(FileNotFoundError):
        eo.Plan.load(tmp_path / "other.json")


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"device": "h300"}, 'device=\'h300\' is not accepted: device takes "here" or "h200"'),
        ({"device": 3}, "device=3 is not accepted"),
        ({"device_budget": -1}, "device_budget=-1 is not accepted"),
        ({"device_budget": "much"}, "device_budget='much' is not accepted"),
        (
            {"device_budget": "20"},
            "device_budget='20' is not accepted, since that is 20 bytes, and the model alone takes",
        ),
        ({"config": {"device_budget": "20"}}, "device_budget='20' is not accepted, since that is 20 bytes"),
        ({"optimizer_bytes": -1}, "optimizer_bytes=-1 is not accepted"),
        *(({"host_budget": one}, f"host_budget={one!r} is not accepted") for one in (-1, 0, "much", 1.5, True)),
        *(({"accumulation": one}, f"accumulation={one!r} is not accepted") for one in (0, -1, 1.5, True, "2", None)),
        *(
            ({"mesh": one}, f"mesh={one!r} is not accepted: mesh takes the sizes of a device mesh, such as (8,)")
            for one in (8, "8", (), (0,), (-8,), (8.0,), (True,), (2, 2, 2), {}, {"ep": 2}, {"tp": 0})
        ),
        (
            {"optimizer": 5},
            "optimizer=5 is not accepted: optimizer takes a class such as torch.optim.AdamW, an instance",
        ),
        ({"optimizer": "AdamW"}, "optimizer='AdamW' is not accepted"),
        ({"optimizer": len}, "optimizer=len is not accepted: it returns a int"),
        ({"optimizer": optim.LBFGS}, "its states were not found by a step on tensors without bytes"),
        ({"optimizer": optim.Muon}, "Muon only supports 2D parameters"),
        (
            {"optimizer": optim.AdamW([nn.Parameter(torch.ones(1))])},
            "optimizer=AdamW is not accepted: it has no parameter",
        ),
        ({"loss": 5}, "loss=5 is not accepted"),
        ({"recompute": "no"}, "recompute='no' is not accepted"),
        ({"recompute": True, "policy": "free"}, "recompute=True is not accepted with policy='free'"),
        ({"config": {"keep_last_bytes": 0}}, "keep_last_bytes=0 does not go with a plan"),
        ({"policy": "most"}, 'policy=\'most\' is not accepted: policy takes "least" or "free" or "max"'),
        ({"config": {"min_byte": 1}}, "unknown field 'min_byte'"),
        ({"config": {"skip": ["head"]}}, "head"),
        ({"device": slow(memory_bytes=0)}, "the memory of slow is not known"),
    ],
)
def test_what_cannot_be_planned_is_an_error_that_repeats_it(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(eo.ConfigError) as caught:
        planned(**{"device": "h200", "config": None, **fields})
    assert said in str(caught.value)


def test_a_function_is_no_model_and_a_wrapper_of_processes_says_so() -> None:
    with pytest.raises(eo.ConfigError, match="model takes a torch"):
        eo.plan(torch.sin, torch.ones(1), device="h200")  # type: ignore[arg-type]

    class Wrapper(nn.Linear):
        def __deepcopy__(self, memo: object) -> Wrapper:
            raise TypeError("cannot pickle a process group")

    with pytest.raises(eo.PlanError, match=r"the model cannot be copied, .* cannot pickle a process group"):
        eo.plan(Wrapper(2, 2), torch.ones(1, 2), device="h200")
    with pytest.raises(eo.PlanError, match=r"a tensor of the layout torch\.sparse_coo"):
        eo.plan(nn.Linear(2, 2), torch.eye(2).to_sparse(), device="h200")


# -- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    ["flops", "single_flops", "memory", "out", "back", "memory_bytes", "launch_seconds", "policy_seconds", "spread"],
)
def test_a_machine_with_a_rate_below_nothing_is_an_error(field: str) -> None:
    for value in (-1, float("nan"), float("inf"), 10**400, "fast", None, True, 1j):
        with pytest.raises(eo.ConfigError, match=f"{field}=.* is not accepted"):
            slow(**{field: value})
    for value, accepted in ((80e9, "memory_bytes of a Machine takes a whole number, 0 or more"), (0.5, "1 or more")):
        with pytest.raises(eo.ConfigError, match=accepted):
            slow(**{"memory_bytes" if value > 1 else "spread": value})
    for name in (5, None, b"h200"):
        with pytest.raises(eo.ConfigError, match=r"name=.* is not accepted: name of a Machine takes a text"):
            eo.Machine(name, 1.0, 1.0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(eo.ConfigError, match=r'kernels=.* is not accepted: kernels of a Machine takes "cuda" or "cpu"'):
        eo.Machine("m", 1.0, 1.0, 1.0, kernels="tpu")


def test_an_operator_takes_as_long_as_its_operations_or_its_bytes_or_its_launch() -> None:
    machine = eo.Machine("m", flops=100.0, single_flops=10.0, memory=5.0, launch_seconds=0.25)
    assert machine.seconds(1000, 5) == 10.0
    assert machine.seconds(1000, 5, single=True) == 100.0
    assert machine.seconds(0, 50) == 10.0
    assert machine.seconds(0, 1) == 0.25
    assert machine.seconds(0, 0) == 0.0
    asking = replace(machine, policy_seconds=0.5)
    assert asking.seconds(1000, 5, policies=2) == 10.0
    assert asking.seconds(0, 1, policies=2) == 1.25
    assert replace(asking, launch_seconds=0.0).seconds(1000, 5, policies=2) == 11.0


def test_a_product_of_groups_counts_its_operations() -> None:
    rows, weights, result = (torch.empty(shape, device="meta") for shape in ((12, 8), (3, 8, 4), (12, 4)))
    ends = torch.tensor([2, 5, 12], dtype=torch.int32, device="meta")
    target = torch.ops.aten._grouped_mm.default
    for call in (
        OperatorCall(target, (rows, weights, ends), {}, result),
        OperatorCall(target, (rows.t(), result, ends), {}, weights),
    ):
        assert flops_of(call) == 2 * 12 * 8 * 4
