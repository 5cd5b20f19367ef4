"""``OffloadCallback`` among a Trainer's callbacks: always left again, what it logs, copies, checkpoints, warnings."""

from __future__ import annotations

import copy
import csv
import importlib
import importlib.metadata
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

import eager_offload as eo
from eager_offload._torch import top_pack_hook
from eager_offload.integrations.lightning import OffloadCallback
from eager_offload.integrations.lightning_factory import callbacks
from eager_offload.tiers.ranks import local_ranks
from tests.integrations.leftovers import spill_files
from tests.integrations.lightning_training import (
    PACKAGES,
    Steps,
    assert_same_parameters,
    fit,
    loader,
    module_of,
    small,
    trainer_of,
)
from tests.integrations.moving import fields, moved
from tests.threads import collect

MAIN = PACKAGES[0]


class Failing(Steps):
    """Fails in the middle of its second forward, if it has an error to raise."""

    fails: BaseException | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.fails is not None:
            raise self.fails
        return loss


@pytest.fixture(autouse=True)
def _interrupts_are_python_s() -> Iterator[None]:
    """Lightning ignores further interrupts once there was one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Fitted without the callback."""
    return fit(MAIN, Steps, tmp_path_factory.mktemp("plain"), None)


@pytest.mark.parametrize("error", [RuntimeError("in forward"), KeyboardInterrupt()])
def test_a_fit_that_fails_leaves_nothing_and_the_next_one_is_exact(
    error: BaseException, tmp_path: Path, plain: Any
) -> None:
    callback = OffloadCallback(**fields(tmp_path))
    failing = module_of(MAIN, Failing)
    failing.fails = error
    trainer = trainer_of(MAIN, tmp_path, callback)
    with pytest.raises(type(error) if isinstance(error, Exception) else SystemExit):
        trainer.fit(failing, loader())
    assert failing.hooked == ["training", "training"]
    assert top_pack_hook() is None
    assert "training_step" not in vars(trainer.strategy)
    traceback.clear_frames(error.__traceback__)  # which hold a loss
    collect()
    assert spill_files(tmp_path) == []
    callback.offload.reset_stats()
    again = module_of(MAIN, Steps)
    trainer_of(MAIN, tmp_path, callback).fit(again, loader())
    assert_same_parameters(again, plain)
    assert moved(callback.offload) > 0


def test_refits_with_one_trainer_and_with_two_save_the_same_bytes(tmp_path: Path, plain: Any) -> None:
    callback = OffloadCallback(**fields(tmp_path))
    trainer = trainer_of(MAIN, tmp_path, callback)
    saved = set()
    for used in trainer, trainer, trainer_of(MAIN, tmp_path, callback):
        module = module_of(MAIN, Steps)
        used.fit_loop.epoch_progress.reset()
        used.fit(module, loader())
        assert_same_parameters(module, plain)
        assert moved(callback.offload) > 0
        saved.add(callback.offload.stats().saved_bytes)
        callback.offload.reset_stats()
    assert len(saved) == 1
    assert spill_files(tmp_path) == []


def test_modules_are_skipped_by_name_and_a_typo_is_an_error(tmp_path: Path) -> None:
    callback = OffloadCallback(skip=["net.second"], **fields(tmp_path))
    trainer_of(MAIN, tmp_path, callback, max_steps=1).fit(module_of(MAIN, Steps), loader())
    assert callback.offload.stats().kept_bytes["region"] > 0
    callback = OffloadCallback(skip=["net.secnod"], **fields(tmp_path))
    with pytest.raises(eo.ConfigError, match=r"Near names: net\.second"):
        trainer_of(MAIN, tmp_path, callback).fit(module_of(MAIN, Steps), loader())


def test_a_fit_of_which_nothing_moved_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="eager_offload: nothing moved, because .* min_bytes"):
        trainer_of(MAIN, tmp_path, OffloadCallback(), max_steps=2).fit(module_of(MAIN, Steps), loader())


class Wrapping(importlib.import_module(MAIN).Callback):  # type: ignore[misc]  # a base by name
    """Another callback that stands around the strategy's step, and fails where it should let go."""

    def __init__(self) -> None:
        self.calls = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        inner = trainer.strategy.training_step

        def training_step(*arguments: Any) -> Any:
            self.calls += 1
            return inner(*arguments)

        trainer.strategy.training_step = training_step

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        raise RuntimeError("in on_exception")


def test_what_is_left_over_is_put_back_by_the_next_fit(tmp_path: Path, plain: Any) -> None:
    callback, other = OffloadCallback(**fields(tmp_path)), Wrapping()
    trainer = trainer_of(MAIN, tmp_path, [other, callback])
    failing = module_of(MAIN, Failing)
    failing.fails = ValueError("in forward")
    with pytest.raises(RuntimeError, match="in on_exception"):
        trainer.fit(failing, loader())  # so that ours is not called
    assert trainer.strategy.training_step.__name__ == "training_step"
    module = module_of(MAIN, Steps)
    callback.offload.reset_stats()
    trainer_of(MAIN, tmp_path, callback).fit(module, loader())
    assert_same_parameters(module, plain)
    assert moved(callback.offload) > 0
    callback.offload.reset_stats()
    with pytest.raises(ValueError, match="in forward"):
        trainer.strategy.training_step(next(iter(loader())), 1)  # no callback is around that of the first trainer
    assert callback.offload.stats().saved_tensors == 0


def test_another_wrapper_around_the_step_stays_when_ours_goes(tmp_path: Path) -> None:
    callback, other = OffloadCallback(**fields(tmp_path)), Wrapping()
    trainer = trainer_of(MAIN, tmp_path, [callback, other])
    trainer.fit(module_of(MAIN, Steps), loader())
    assert other.calls == 3
    assert moved(callback.offload) > 0
    callback.offload.reset_stats()
    trainer.strategy.training_step(next(iter(loader())), 0)
    assert other.calls == 4
    assert callback.offload.stats().saved_tensors == 0


class Copying(Steps, importlib.import_module(MAIN).LightningModule):  # type: ignore[misc]  # a base by name
    """Has its strategy copied in the middle of a fit."""

    def on_train_batch_end(self, *_: Any) -> None:
        strategy = self.trainer.strategy
        self.copies = [copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))]


def test_h61_a_copy_of_what_is_fitted_steps_by_itself(tmp_path: Path) -> None:
    module = Copying()
    callback = OffloadCallback(**fields(tmp_path))
    trainer_of(MAIN, tmp_path, callback, max_steps=1).fit(module, loader())
    assert moved(callback.offload) > 0
    for strategy in module.copies:
        module.seen.clear()
        loss = strategy.training_step(next(iter(loader())), 0)
        assert module.seen == [], "the module that was fitted"
        assert strategy.lightning_module.seen[-1] == "training"
        loss.backward()


def test_validation_test_and_predict_run_without_it(tmp_path: Path) -> None:
    callback = OffloadCallback(**fields(tmp_path))
    trainer, module = trainer_of(MAIN, tmp_path, callback), module_of(MAIN, Steps)
    trainer.validate(module, loader(1), verbose=False)
    trainer.test(module, loader(1), verbose=False)
    trainer.predict(module, loader(1))
    assert module.seen == ["validation", "test", "predict"]
    assert module.hooked == []
    assert callback.offload.stats().saved_tensors == 0


# -- what it logs -----------------------------------------------------------------------------------------------------


def rows(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def logger(tmp_path: Path) -> Any:
    return importlib.import_module("lightning.pytorch.loggers").CSVLogger(tmp_path, name="", version="")


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"log_every_n_steps": 2}, [1, 3]), ({"log_every_n_steps": 1, "accumulate_grad_batches": 2}, [0, 1, 2])],
    ids=["every other", "accumulated"],
)
def test_figures_are_logged_every_so_many_steps_for_one_batch(
    settings: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    callback = OffloadCallback(log_metrics="all", **fields(tmp_path))
    fit(MAIN, Steps, tmp_path, callback, batches=5, logger=logger(tmp_path), **settings)
    logged, stats = rows(tmp_path), callback.offload.stats(synchronize=True)
    assert [int(row["step"]) for row in logged] == steps
    for row in logged:
        assert float(row["offload/saved_bytes"]) == stats.saved_bytes / 5
        assert 0 < float(row["offload/offloaded_bytes"]) <= stats.saved_bytes / 5
    assert 0 < float(logged[-1]["offload/bytes_out"]) <= stats.bytes_out


def test_three_figures_reach_the_file_a_step_is_traced_and_a_line_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = OffloadCallback(trace_step=2, trace_path=str(tmp_path / "step.json"), **fields(tmp_path))
    fit(MAIN, Steps, tmp_path, callback, batches=3, logger=logger(tmp_path), log_every_n_steps=1)
    logged = rows(tmp_path)
    assert {name for name in logged[0] if name.startswith("offload")} == {
        "offload/device_peak_mib",
        "offload/moved_mib",
        "offload/stall_seconds",
    }
    assert float(logged[-1]["offload/device_peak_mib"]) > 0
    assert (tmp_path / "step.json").stat().st_size > 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eager_offload: ")]
    assert len(said) == 1
    assert "peak saved-tensor memory" in said[0]


@pytest.mark.parametrize(
    ("given", "settings"),
    [({"log_metrics": False}, {}), ({}, {"log_every_n_steps": 0}), ({}, {"barebones": True})],
    ids=["switched off", "no step is logged", "barebones"],
)
def test_nothing_is_logged_that_is_not_wanted(given: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    callback = OffloadCallback(**given, **fields(tmp_path))
    if settings.get("barebones"):  # it refuses the others
        quiet = {"num_sanity_val_steps": None, "enable_progress_bar": None, "enable_model_summary": None}
        settings |= quiet | {"logger": None, "enable_checkpointing": None}
    trainer = trainer_of(MAIN, tmp_path, callback, **settings)
    trainer.fit(module_of(MAIN, Steps), loader())
    assert not [name for name in trainer.callback_metrics if name.startswith("offload")]
    assert moved(callback.offload) > 0


# -- what it is given, copies, checkpoints ----------------------------------------------------------------------------


def test_a_copy_or_pickle_has_an_offload_of_its_own(tmp_path: Path, plain: Any) -> None:
    for given in OffloadCallback(**fields(tmp_path)), OffloadCallback(small(tmp_path)):
        trainer_of(MAIN, tmp_path, given).fit(module_of(MAIN, Steps), loader())  # what that leaves pickles too
        given.log = given.log_dict = None  # Lightning's, of the module
        for other in pickle.loads(pickle.dumps(given)), copy.deepcopy(given):
            assert other.offload is not given.offload
            assert other.offload.config == given.offload.config
            assert other.offload.stats().saved_tensors == 0
            assert_same_parameters(fit(MAIN, Steps, tmp_path, other), plain)
            assert moved(other.offload) > 0
        given.offload.close()
    assert spill_files(tmp_path) == []


def test_an_offload_of_the_users_own_stays_open(tmp_path: Path) -> None:
    offload = small(tmp_path)
    fit(MAIN, Steps, tmp_path, OffloadCallback(offload))
    assert spill_files(tmp_path) != []
    offload.close()
    assert spill_files(tmp_path) == []


def test_checkpoints_have_nothing_of_it_and_resume(tmp_path: Path) -> None:
    expected = fit(MAIN, Steps, tmp_path, None, max_epochs=2)
    trainer = trainer_of(MAIN, tmp_path, OffloadCallback(**fields(tmp_path)))
    trainer.fit(module_of(MAIN, Steps), loader())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert torch.load(tmp_path / "one.ckpt", weights_only=True)["callbacks"] == {}
    callback = OffloadCallback(**fields(tmp_path))
    resumed = module_of(MAIN, Steps)
    trainer = trainer_of(MAIN, tmp_path, callback, max_epochs=2)
    torch.manual_seed(0)
    trainer.fit(resumed, loader(), ckpt_path=tmp_path / "one.ckpt")
    assert trainer.global_step == 6
    assert moved(callback.offload) > 0
    assert len(resumed.seen) == 3
    assert len(expected.seen) > 3


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_h26_ranks_that_lightning_starts_itself_share_the_budgets(strategy: str, tmp_path: Path) -> None:
    callback = OffloadCallback(small(tmp_path))
    trainer = trainer_of(PACKAGES[0], tmp_path, callback, devices=2, strategy=strategy)
    callback.setup(trainer, None, "fit")  # as in each of the two, where no launcher's variable is
    assert local_ranks({}) == 2
    callback.teardown(trainer, None, "fit")
    assert local_ranks({}) == 1


def test_two_callbacks_are_one_too_many(tmp_path: Path) -> None:
    trainer = trainer_of(MAIN, tmp_path, [OffloadCallback(), OffloadCallback()])
    with pytest.raises(eo.ConfigError, match="leave the others out"):
        trainer.fit(module_of(MAIN, Steps), loader())
    assert "training_step" not in vars(trainer.strategy)


def test_the_environment_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Any) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD", "0")
    callback = OffloadCallback(**fields(tmp_path))
    assert_same_parameters(fit(MAIN, Steps, tmp_path, callback), plain)
    assert callback.offload.stats().saved_tensors == 0


def switch_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD", "1")
    for field, value in fields(tmp_path).items():
        monkeypatch.setenv(f"EAGER_OFFLOAD_{field.upper()}", str(value))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_environment_gives_every_trainer_a_callback(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [entry_point] = importlib.metadata.entry_points(group=f"{package}.callbacks_factory", name="eager_offload")
    assert entry_point.load() is callbacks
    assert callbacks() == []
    assert not [one for one in trainer_of(package, tmp_path).callbacks if isinstance(one, OffloadCallback)]
    switch_on(monkeypatch, tmp_path)
    trainer = trainer_of(package, tmp_path)
    [given] = [one for one in trainer.callbacks if isinstance(one, OffloadCallback)]
    trainer.fit(module_of(package, Steps), loader())
    assert moved(given.offload) > 0
    given.offload.reset_stats()
    own = OffloadCallback()
    trainer = trainer_of(package, tmp_path, own)  # beside one that was given, what the environment adds does nothing
    [added] = [one for one in trainer.callbacks if isinstance(one, OffloadCallback) and one is not own]
    trainer.fit(module_of(package, Steps), loader())
    assert moved(own.offload) > 0
    assert added.offload.stats().saved_tensors == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_a_trainer_made_with_the_callbacks_of_another_offloads_once(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_on(monkeypatch, tmp_path)
    trainer = trainer_of(package, tmp_path, *trainer_of(package, tmp_path).callbacks)
    both = [one for one in trainer.callbacks if isinstance(one, OffloadCallback)]
    assert len(both) == 2
    trainer.fit(module_of(package, Steps), loader())
    assert [one.offload.stats().saved_tensors > 0 for one in both] == [True, False]
    assert moved(both[0].offload) > 0


def test_the_entry_point_imports_no_lightning_unless_it_is_asked_to() -> None:
    look = (
        "import sys; from eager_offload.integrations.lightning_factory import callbacks; assert callbacks() == [];"
        "assert not {'lightning', 'pytorch_lightning', 'lightning_fabric'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", look], check=True, timeout=100)


# -- what hides what is saved -----------------------------------------------------------------------------------------


class Wrapped(Steps):
    """What its second layer saves goes to host memory in the manner of FSDP."""

    def configure_model(self) -> None:
        self.net.second = offload_wrapper(self.net.second)


def test_h24_what_hides_saved_tensors_is_warned_of_once(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="'net.second' the first of them") as warned:
        fit(MAIN, Wrapped, tmp_path, OffloadCallback(**fields(tmp_path)))
    assert len([one for one in warned if "offload_wrapper" in str(one.message)]) == 1
