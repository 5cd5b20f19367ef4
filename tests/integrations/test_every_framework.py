"""What every integration promises, whichever its framework: bits, evaluation, failure, figures, settings, copies."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import eager_offload as eo
from tests.hazards.backends import hooks_are_gone
from tests.hazards.programs import assert_identical
from tests.integrations.training import (
    FIGURES,
    THREE,
    counted,
    exact,
    fails,
    fields,
    forget,
    moved,
    spill_files,
    watched,
)

pytestmark = pytest.mark.usefixtures("one_thread")

#: Ways whose object travels to other processes, and ways that know when training ends.
OBJECTS = ["accelerate", "lightning", "transformers callback"]
ENDING = ["lightning", "transformers callback"]


def test_no_bit_changes_and_evaluation_does_not_even_enter_the_context(way: Any, tmp_path: Path) -> None:
    expected = way.train(tmp_path, None, evaluates=True)
    given, saved = way.given(**fields(tmp_path)), set()
    for _ in range(2):  # memory and files are given back in between, and what was closed opens again
        model = way.model()
        seen = watched(model.get_submodule(way.block))
        found = way.train(tmp_path, given, model, evaluates=True)
        stats = exact(expected, found, given.offload)
        assert stats.kept_bytes["parameter"] > 0, "a weight that is saved is told apart from what may move"
        saved.add(stats.saved_bytes)
        assert all(hooked == training for training, hooked in seen)
        assert [training for training, _ in seen] == [True, False] * 3
        way.end(given)
        assert spill_files(tmp_path) == []
        given.offload.reset_stats()
    assert len(saved) == 1, "nothing of the first training is around the model of the second"


@pytest.mark.parametrize("error", [RuntimeError("in forward"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_training_that_fails_leaves_no_hook_and_the_next_is_exact(
    way: Any, error: BaseException, tmp_path: Path
) -> None:
    given, model = way.given(**fields(tmp_path)), way.model()
    fails(model.get_submodule(way.block), error)
    with pytest.raises(type(error) if isinstance(error, Exception) else (KeyboardInterrupt, SystemExit)):
        way.train(tmp_path, given, model)
    assert hooks_are_gone()
    assert moved(given.offload) > 0
    forget(error)
    way.end(given)
    assert spill_files(tmp_path) == []
    given.offload.reset_stats()
    exact(way.train(tmp_path, None), way.train(tmp_path, given), given.offload)
    way.end(given)
    assert spill_files(tmp_path) == []


def test_an_offload_of_the_users_own_stays_open(way: Any, tmp_path: Path) -> None:
    offload = eo.Offload(**fields(tmp_path))
    given = way.given(offload)
    way.train(tmp_path, given)
    way.end(given)
    assert given.offload is offload
    assert moved(offload) > 0
    assert spill_files(tmp_path) != []
    offload.close()
    assert spill_files(tmp_path) == []


@pytest.mark.parametrize("log_metrics", [True, "all", False])
def test_figures_are_logged_a_step_is_traced_and_a_line_ends_it(
    way: Any, log_metrics: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "step.json"
    given = way.given(**fields(tmp_path), log_metrics=log_metrics, trace_step=2, trace_path=str(trace))
    logged = way.train(tmp_path, given).logged
    way.end(given)
    if log_metrics is True:
        assert all(figures.keys() == THREE for figures in logged)
        assert logged[-1]["offload/device_peak_mib"] > 0
    elif log_metrics == "all":
        assert all(figures.keys() > THREE | FIGURES for figures in logged)
        assert logged[-1]["offload/saved_bytes"] == given.offload.stats().saved_bytes / 3, "of one step"
    assert bool(logged) is bool(log_metrics)
    assert json.loads(trace.read_text())["traceEvents"]
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eager_offload: ")]
    assert len(said) == 1
    assert "peak saved-tensor memory" in said[0]


def test_modules_are_skipped_by_name_and_a_typo_is_an_error(way: Any, tmp_path: Path) -> None:
    given = way.given(**fields(tmp_path), skip=[way.block])
    way.train(tmp_path, given)
    assert given.offload.stats().kept_bytes["region"] > 0
    with pytest.raises(eo.ConfigError, match=r"matches no module of this model"):
        way.train(tmp_path, way.given(**fields(tmp_path), skip=[f"{way.block}x"]))


@pytest.mark.parametrize("how", ["environment", "field"])
def test_switched_off_nothing_is_touched(way: Any, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = way.train(tmp_path, None)
    if how == "environment":
        monkeypatch.setenv("EAGER_OFFLOAD", "0")
    switch = {"enabled": False} if how == "field" else {}
    given = way.given(**fields(tmp_path / "does not exist"), **switch)
    for one in given, copy.deepcopy(given):
        model = way.model()
        seen = watched(model.get_submodule(way.block))
        found = way.train(tmp_path, one, model)
        way.end(one)
        assert found.losses == expected.losses
        assert seen == [(True, False)] * 3
        assert one.offload is None or one.offload.stats() == eo.OffloadStats()
        assert found.logged == []
        assert vars(found.model).keys() == vars(expected.model).keys() | {"_forward_pre_hooks"}


@pytest.mark.filterwarnings("ignore:eager_offload. nothing of this Offload:RuntimeWarning")
@pytest.mark.parametrize("way", OBJECTS, indirect=True)
@pytest.mark.parametrize("owned", [False, True])
def test_a_copy_or_pickle_has_an_offload_of_its_own(way: Any, owned: bool, tmp_path: Path) -> None:
    own = eo.Offload(**fields(tmp_path))
    given = way.given(own, log_metrics="all") if owned else way.given(**fields(tmp_path), log_metrics="all")
    expected = way.train(tmp_path, given)  # what that leaves is copied neither
    if hasattr(given, "log_dict"):
        given.log = given.log_dict = None  # Lightning's, of the module
    copies = [pickle.loads(pickle.dumps(given)), copy.deepcopy(given)]
    for one in copies:
        assert one.offload is not given.offload
        assert one.offload.config == given.offload.config
        assert one.offload.stats().saved_tensors == 0
    found = way.train(tmp_path, copies[owned])
    exact(expected, found, copies[owned].offload)
    assert found.logged[-1].keys() > THREE | FIGURES
    for one in given, copies[owned]:
        way.end(one)
    copies[not owned].offload.close()  # has not trained
    own.close()
    assert spill_files(tmp_path) == [], "what copies have is closed by them"


@pytest.mark.parametrize("way", OBJECTS, indirect=True)
def test_what_is_given_comes_first_then_the_environment_then_the_defaults(
    way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD_MIN_BYTES", "4MiB")
    monkeypatch.setenv("EAGER_OFFLOAD_PREFETCH_BYTES", "8MiB")
    whole = eo.OffloadConfig(min_bytes=7)
    for given, expected in {
        way.given(): eo.OffloadConfig.from_env(),
        way.given({"min_bytes": "2MiB", "tier": None}, tier="disk"): eo.OffloadConfig(
            min_bytes=2 << 20, prefetch_bytes=8 << 20, tier="disk"
        ),
        way.given(whole): whole,
        way.given(whole, tier="disk"): eo.OffloadConfig(min_bytes=7, tier="disk"),
    }.items():
        assert given.offload.config == expected


@pytest.mark.parametrize("way", OBJECTS, indirect=True)
def test_what_is_not_accepted_is_refused(way: Any, tmp_path: Path) -> None:
    offload = eo.Offload()
    for given in 17, "disk", ["disk"]:
        with pytest.raises(eo.ConfigError, match="config takes an OffloadConfig, a mapping"):
            way.given(given)
    with pytest.raises(eo.ConfigError, match="tier beside an Offload"):
        way.given(offload, tier="disk", enabled=True)
    assert way.given(offload, enabled=True).offload is offload
    with pytest.raises(eo.ConfigError, match='takes True, False or "all"'):
        way.given(log_metrics="some")
    for step in 0, -1, "5", True, 1.0:
        with pytest.raises(eo.ConfigError, match="trace_step takes a step"):
            way.given(trace_step=step)
    with pytest.raises(eo.ConfigError, match="a directory that exists"):
        way.given(trace_step=1, trace_path=str(tmp_path / "nowhere" / "step.json"))


@pytest.mark.parametrize("way", ENDING, indirect=True)
def test_training_of_which_nothing_moved_is_warned_of(way: Any, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"eager_offload: nothing moved, because .* min_bytes"):
        way.train(tmp_path, way.given())


# -- what is computed again --------------------------------------------------------------------------------------------


def budgeted(path: Path, budget: int | str) -> dict[str, Any]:
    """Settings under which the first batch is planned."""
    given = {name: value for name, value in fields(path).items() if name != "keep_last_bytes"}
    # With room for all saves, the least peak would be that of moving everything.
    return given | {"device_budget": budget, "recompute": True, "host_budget": "128KiB"}


def test_the_first_batch_is_planned_and_blocks_are_computed_again_to_the_same_bits(
    way: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plainly = counted(model := way.model())
    expected = way.train(tmp_path, None, model, evaluates=True)
    given = way.given(**budgeted(tmp_path, 1))
    for _ in range(2):  # each training plans its own first batch
        calls = counted(model := way.model())
        with pytest.warns(RuntimeWarning, match=r"device_budget=1 B is too little .* whose least is \d"):
            found = way.train(tmp_path, given, model, evaluates=True)
        way.end(given)
        assert_identical(list(expected.parameters.values()), list(found.parameters.values()))
        assert expected.losses == found.losses
        assert calls[True] > plainly[True], "in backward"
        assert calls[False] == plainly[False]
        stats = given.offload.stats(synchronize=True)
        assert stats.plan is not None
        said = capsys.readouterr().err.splitlines()
        assert sum(line == f"eager_offload: the plan said {stats.plan}" for line in said) == 1
        assert not any("_compiled_call_impl" in vars(module) for module in model.modules())
    assert hooks_are_gone()
    assert spill_files(tmp_path) == []


def test_what_recompute_does_not_go_with_is_one_error_that_says_what_to_leave_out(way: Any, tmp_path: Path) -> None:
    model = way.model()
    outside, _, name = way.block.rpartition(".")
    model.get_submodule(outside)[int(name)] = checkpoint_wrapper(model.get_submodule(way.block))
    given = way.given(**budgeted(tmp_path, "1GiB"))
    with pytest.raises(
        eo.ConfigError,
        match=r"together with the framework's checkpointing .* Switch it off \(.*leave recompute=True out",
    ):
        way.train(tmp_path, given, model)
    way.end(given)
    assert hooks_are_gone()
