"""axolotl's own plugin manager and configuration classes, with the plugin that its YAML names.

Its trainers and kernels need packages that need a GPU: Transformers' trainer stands where axolotl makes its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import eager_offload as eo
from tests.integrations.training import exact, fails, fields, forget, spill_files
from tests.integrations.transformers_training import run, trainer_of

base = pytest.importorskip("axolotl.integrations.base")
config = pytest.importorskip("axolotl.integrations.config")
DictDefault = pytest.importorskip("axolotl.utils.dict").DictDefault

PLUGIN = "eager_offload.integrations.axolotl.EagerOffloadPlugin"
#: What axolotl wants of every configuration.
GIVEN = {
    "base_model": "none",
    "datasets": [{"path": "none", "type": "alpaca"}],
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4,
    "plugins": [PLUGIN],
}


@pytest.fixture
def manager() -> Iterator[Any]:
    made = base.PluginManager.get_instance()
    made.plugins.clear()
    made.register(PLUGIN)
    yield made
    made.plugins.clear()


def test_a_trainer_with_the_plugins_callback_trains_bit_for_bit(manager: Any, tmp_path: Path) -> None:
    expected = run(trainer_of(tmp_path))
    trainer = trainer_of(tmp_path)
    cfg = DictDefault({"eager_offload": fields(tmp_path)})
    for callback in manager.add_callbacks_post_trainer(cfg, trainer):
        trainer.add_callback(callback)
    found = run(trainer)
    manager.post_train(cfg, trainer.model)
    exact(expected, found, callback.offload)
    assert trainer.state.log_history[0]["offload/moved_mib"] > 0
    assert spill_files(tmp_path) == []


def test_post_train_gives_back_what_training_that_failed_has_left(manager: Any, tmp_path: Path) -> None:
    trainer, error = trainer_of(tmp_path), RuntimeError("in forward")
    for callback in manager.add_callbacks_post_trainer(DictDefault({"eager_offload": fields(tmp_path)}), trainer):
        trainer.add_callback(callback)
    fails(trainer.model.model.layers[1], error)
    with pytest.raises(RuntimeError, match="in forward"):
        run(trainer)
    forget(error)
    assert spill_files(tmp_path) != []
    manager.post_train(DictDefault({}), trainer.model)
    assert spill_files(tmp_path) == []


def test_false_adds_no_callback_and_nothing_said_adds_one(manager: Any) -> None:
    assert manager.add_callbacks_post_trainer(DictDefault({"eager_offload": False}), None) == []
    for given in {}, {"eager_offload": {}}, {"eager_offload": True}:
        assert len(manager.add_callbacks_post_trainer(DictDefault(given), None)) == 1


@pytest.mark.usefixtures("manager")
def test_axolotls_configuration_has_the_field_and_says_what_it_does_not_take() -> None:
    _, made = config.merge_input_args()
    for given in {"device_budget": "60GiB"}, {}, True, False, None:
        assert made(**GIVEN, eager_offload=given).eager_offload == given
    with pytest.raises(ValueError, match="devise_budget"):
        made(**GIVEN, eager_offload={"devise_budget": 1})
    for given in {"device_budget": "60GiB"}, {}, None:
        for theirs in {"activation_offloading": True}, {"gradient_checkpointing": "offload"}:
            with pytest.raises(ValueError, match="activation_offloading beside EagerOffloadPlugin"):
                made(**GIVEN, eager_offload=given, **theirs)
    assert eo.ConfigError.__mro__.index(ValueError)
