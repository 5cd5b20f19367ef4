"""``OffloadCallback`` in every mode of a Trainer, beside other callbacks, in copies, checkpoints and files."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

import eager_offload as eo
from eager_offload.integrations.lightning import OffloadCallback
from eager_offload.integrations.lightning_factory import callbacks
from eager_offload.tiers.limits import ranks_here
from tests.integrations.lightning_training import (
    PACKAGES,
    QUIET,
    Cached,
    Entered,
    InParts,
    Manual,
    SecondOrder,
    Several,
    Steps,
    WithoutLoss,
    fit,
    loader,
    module_of,
    trainer_of,
)
from tests.integrations.training import exact, fails, fields, forget, moved, watched

MAIN = PACKAGES[0]
BLOCK = "net.blocks.0"

MODES: dict[str, dict[str, Any]] = {
    "automatic": {},
    "manual": {"steps": Manual},
    "several optimizers": {"steps": Several},
    "lbfgs": {"steps": SecondOrder},
    "accumulation": {"accumulate_grad_batches": 2, "batches": 6},
    "no loss": {"steps": WithoutLoss, "batches": 4},
    "validation": {"val_check_interval": 1, "num_sanity_val_steps": 1},
    "clipping": {"gradient_clip_val": 0.1},
    "bf16 mixed": {"precision": "bf16-mixed"},
    "bf16 true": {"precision": "bf16-true"},
    "forwards in backward": {"steps": Cached},
    "checkpointing": {"options": {"recompute": "not reentrant"}},
    "reentrant checkpointing": {"options": {"recompute": "reentrant"}},
    "detecting anomalies": {"detect_anomaly": True},
}
#: Modes that go a way of their own through the callback. One class serves both packages, which take turns.
QUICK = {"automatic", "forwards in backward", "manual", "accumulation", "validation", "no loss"}


@pytest.fixture
def offload(tmp_path: Path) -> Any:
    made = eo.Offload(**fields(tmp_path))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("package", "mode"),
    [
        pytest.param(PACKAGES[place % 2], mode, marks=() if mode in QUICK else pytest.mark.long)
        for place, mode in enumerate(MODES)
    ],
)
def test_parameters_are_the_same_bit_for_bit(package: str, mode: str, offload: eo.Offload, tmp_path: Path) -> None:
    settings = {"steps": Steps, "package": package, "limit_val_batches": int(mode == "validation"), **MODES[mode]}
    seen = []
    results = []
    for callback in None, OffloadCallback(offload):
        module = module_of(package, settings["steps"], **settings.get("options", {}))
        seen.append(watched(module.get_submodule(BLOCK)))
        results.append(fit(tmp_path, callback, **settings, module=module))
    exact(*results, offload)
    assert [training for training, _ in seen[0]] == [training for training, _ in seen[1]]
    assert all(hooked == training for training, hooked in seen[1])


def test_a_trainer_of_several_nodes_tells_how_many_ranks_are_on_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning starts them itself, and exports no more than this."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.7")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    callback, module = OffloadCallback(**fields(tmp_path)), module_of()
    trainer = trainer_of(tmp_path, callback, devices=2, num_nodes=2, strategy="ddp")
    callback.setup(trainer, module, "fit")
    assert ranks_here() == (2, False)
    callback.teardown(trainer, module, "fit")
    assert ranks_here() == (4, True)


# -- a Trainer's other callbacks --------------------------------------------------------------------------------------


class Wrapping(importlib.import_module(MAIN).Callback):  # type: ignore[misc]  # a base by name
    """Another callback that stands around the strategy's step, and fails where it should let go."""

    calls = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        inner = trainer.strategy.training_step

        def training_step(*arguments: Any) -> Any:
            self.calls += 1
            return inner(*arguments)

        trainer.strategy.training_step = training_step

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        raise RuntimeError("in on_exception")


def test_what_is_left_over_is_put_back_by_the_next_fit(tmp_path: Path) -> None:
    callback, other = OffloadCallback(**fields(tmp_path)), Wrapping()
    trainer, failing = trainer_of(tmp_path, [other, callback]), module_of()
    fails(failing.get_submodule(BLOCK), error := ValueError("in forward"))
    with pytest.raises(RuntimeError, match="in on_exception") as caught:
        trainer.fit(failing, loader())  # so that ours is not called
    forget(error)
    forget(caught.value)
    callback.offload.reset_stats()
    exact(fit(tmp_path, None), fit(tmp_path, callback), callback.offload)
    callback.offload.reset_stats()
    trainer.strategy.training_step(next(iter(loader())), 1)  # no callback is around that of the first trainer
    assert callback.offload.stats().saved_tensors == 0


def test_another_wrapper_around_the_step_stays_when_ours_goes(tmp_path: Path) -> None:
    callback, other = OffloadCallback(**fields(tmp_path)), Wrapping()
    trainer = trainer_of(tmp_path, [callback, other])
    trainer.fit(module_of(), loader())
    assert other.calls == 3
    assert moved(callback.offload) > 0
    callback.offload.reset_stats()
    trainer.strategy.training_step(next(iter(loader())), 0)
    assert other.calls == 4
    assert callback.offload.stats().saved_tensors == 0


def test_where_no_module_is_called_before_backward_nothing_is_planned_and_bytes_move(tmp_path: Path) -> None:
    settings = {name: value for name, value in fields(tmp_path).items() if name != "keep_last_bytes"}
    callback = OffloadCallback(**settings, recompute=True)
    with pytest.warns(RuntimeWarning, match="recompute=True has no effect: .* no module with parameters to train was"):
        found = fit(tmp_path, callback, Cached, batches=5)
    exact(fit(tmp_path, None, Cached, batches=5), found, callback.offload)


@pytest.mark.filterwarnings("ignore:eager_offload. device_budget=1 ?B is :RuntimeWarning")
@pytest.mark.parametrize(("steps", "name"), [(Entered, "net"), (InParts, BLOCK)])
def test_the_module_that_has_most_of_what_is_trained_is_planned(steps: type, name: str, tmp_path: Path) -> None:
    settings = {name: value for name, value in fields(tmp_path).items() if name != "keep_last_bytes"}
    callback = OffloadCallback(**settings, device_budget=1, recompute=True)
    module = module_of(steps=steps)
    found = fit(tmp_path, callback, module=module)
    stats = exact(fit(tmp_path, None, steps), found, callback.offload)
    assert stats.plan is not None
    own, all_trained = (sum(one.nbytes for one in of.parameters()) for of in (module.get_submodule(name), module))
    assert stats.plan.predicted_peak_bytes > 2 * own + 2 * all_trained, "with gradients, and two states of AdamW"


def test_validation_test_and_predict_run_without_it(tmp_path: Path) -> None:
    callback, module = OffloadCallback(**fields(tmp_path)), module_of()
    trainer, seen = trainer_of(tmp_path, callback), watched(module.get_submodule(BLOCK))
    trainer.validate(module, loader(1), verbose=False)
    trainer.test(module, loader(1), verbose=False)
    trainer.predict(module, loader(1))
    assert seen == [(False, False)] * 3
    assert callback.offload.stats().saved_tensors == 0


def test_two_callbacks_are_one_too_many(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [OffloadCallback(), OffloadCallback()])
    with pytest.raises(eo.ConfigError, match="leave the others out"):
        trainer.fit(module_of(), loader())
    assert "training_step" not in vars(trainer.strategy)


class Wrapped(Steps):
    """What one of its blocks saves goes to host memory in the manner of FSDP."""

    def configure_model(self) -> None:
        self.net.blocks[1] = offload_wrapper(self.net.blocks[1])


def test_h24_what_hides_saved_tensors_is_warned_of_once(tmp_path: Path) -> None:
    module = module_of(MAIN, Wrapped)
    with pytest.warns(RuntimeWarning, match="'net.blocks.1' the first of them") as warned:
        trainer_of(tmp_path, OffloadCallback(**fields(tmp_path))).fit(module, loader())
    assert len([one for one in warned if "offload_wrapper" in str(one.message)]) == 1


# -- copies, checkpoints, ranks ---------------------------------------------------------------------------------------


class Copying(Steps, importlib.import_module(MAIN).LightningModule):  # type: ignore[misc]  # a base by name
    """Has its strategy copied in the middle of a fit."""

    def on_train_batch_end(self, *_: Any) -> None:
        strategy = self.trainer.strategy
        self.copies = [copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))]


def test_h61_a_copy_of_what_is_fitted_steps_by_itself(tmp_path: Path) -> None:
    module, callback = Copying(), OffloadCallback(**fields(tmp_path))
    trainer_of(tmp_path, callback, max_steps=1).fit(module, loader())
    assert moved(callback.offload) > 0
    seen = watched(module.get_submodule(BLOCK))
    for strategy in module.copies:
        own = watched(strategy.lightning_module.get_submodule(BLOCK))
        strategy.training_step(next(iter(loader())), 0).backward()
        assert own == [(True, False)]
        assert seen == [], "the module that was fitted"


def test_checkpoints_have_nothing_of_it_and_resume(tmp_path: Path) -> None:
    expected = fit(tmp_path, None, max_epochs=2)
    trainer = trainer_of(tmp_path, OffloadCallback(**fields(tmp_path)))
    trainer.fit(module_of(), loader())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert torch.load(tmp_path / "one.ckpt", weights_only=True)["callbacks"] == {}
    callback = OffloadCallback(**fields(tmp_path))
    trainer, resumed = trainer_of(tmp_path, callback, max_epochs=2), module_of()
    trainer.fit(resumed, loader(), ckpt_path=tmp_path / "one.ckpt")
    assert trainer.global_step == 6
    assert all(map(torch.equal, resumed.parameters(), expected.model.parameters()))
    assert moved(callback.offload) > 0


# -- from the environment and the command line ------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_the_environment_gives_every_trainer_a_callback(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [entry_point] = importlib.metadata.entry_points(group=f"{package}.callbacks_factory", name="eager_offload")
    assert entry_point.load() is callbacks
    assert callbacks() == []

    def ours(trainer: Any) -> list[OffloadCallback]:
        return [one for one in trainer.callbacks if isinstance(one, OffloadCallback)]

    def offloads(trainer: Any) -> list[bool]:
        """Which of the callbacks offload when it fits."""
        trainer.fit(module_of(package), loader())
        found = [moved(one.offload) > 0 for one in ours(trainer)]
        for one in ours(trainer):
            one.offload.reset_stats()
        return found

    assert ours(trainer_of(tmp_path, package=package)) == []
    monkeypatch.setenv("EAGER_OFFLOAD", "1")
    for field, value in fields(tmp_path).items():
        monkeypatch.setenv(f"EAGER_OFFLOAD_{field.upper()}", str(value))
    first = trainer_of(tmp_path, package=package)
    assert offloads(first) == [True]
    own = OffloadCallback()
    beside = trainer_of(tmp_path, own, package)  # beside one that was given, what the environment adds does nothing
    assert offloads(beside) == [one is own for one in ours(beside)]
    assert offloads(trainer_of(tmp_path, first.callbacks, package)) == [True, False], "with the callbacks of another"


def test_the_entry_point_imports_no_lightning_unless_it_is_asked_to() -> None:
    look = (
        "import sys; from eager_offload.integrations.lightning_factory import callbacks; assert callbacks() == [];"
        "assert not {'lightning', 'pytorch_lightning', 'lightning_fabric'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", look], check=True, timeout=100)


CALLBACK = "eager_offload.integrations.lightning.OffloadCallback"


def callback_of(arguments: list[str], package: str = MAIN) -> OffloadCallback:
    """What the command line makes of ``arguments``, nothing trained."""
    command_line = pytest.importorskip(f"{package}.cli", reason="jsonargparse is not installed").LightningCLI
    module = type(module_of(package))
    ran = command_line(module, args=arguments, run=False, save_config_callback=None)
    [callback] = [one for one in ran.trainer.callbacks if isinstance(one, OffloadCallback)]
    return callback


def configuration(path: Path, init_args: dict[str, Any]) -> list[str]:
    """Arguments that name a file of the command line's."""
    trainer = {**QUIET, "accelerator": "cpu", "default_root_dir": str(path)}
    trainer["callbacks"] = [{"class_path": CALLBACK, "init_args": init_args}]
    (path / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    return ["--config", str(path / "config.yaml")]


@pytest.mark.parametrize(("package", "below"), [(PACKAGES[0], ""), (PACKAGES[1], "config")])
def test_a_yaml_file_configures_it(package: str, below: str, tmp_path: Path) -> None:
    fields = {"tier": "disk", "min_bytes": "4MiB", "keep_last_bytes": "auto", "disk_path": str(tmp_path)}
    given = {below: fields} if below else fields | {"log_metrics": False}
    callback = callback_of(configuration(tmp_path, given), package)
    assert callback.offload.config == eo.OffloadConfig(**fields)
    assert callback.offload.config.disk_path == tmp_path
    callback.offload.close()


def test_a_field_that_does_not_exist_is_an_error_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        callback_of(configuration(tmp_path, {"min_byts": "4MiB"}))
    assert "min_byts" in capsys.readouterr().err
