"""Accelerate in one process: every way to prepare a model, and all that a script does with one besides training."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType, TorchDynamoPlugin
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

import eager_offload as eo
from eager_offload._torch import top_pack_hook
from eager_offload.config import FIELDS
from eager_offload.integrations.accelerate import OffloadPlugin
from tests.integrations.accelerate_training import Model, Trained, new_accelerator, new_plugin, prepared, train
from tests.integrations.leftovers import spill_files
from tests.integrations.moving import fields
from tests.threads import collect

OptionsMaker = Callable[[], dict[str, Any]]


MIXED = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def small(model: Model) -> nn.Module:
    """Less of it, since Inductor takes a minute for all."""
    return nn.Sequential(model.first, nn.GELU(), model.last)


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[OffloadPlugin]:
    made = new_plugin(tmp_path)
    yield made
    made.close()


def compiled(**options: Any) -> dict[str, Any]:
    return {"dynamo_plugin": TorchDynamoPlugin(**options)}


def trained_twice(plugin: OffloadPlugin, options: dict[str, Any], **how: Any) -> Trained:
    """Trains without offload and with it, and asserts what must always hold."""
    without = train(new_accelerator(**options), None, make=how.get("make", lambda model: model))
    torch._dynamo.reset()
    trained = train(new_accelerator(**options), plugin, **how)
    assert trained.equals(without)
    assert trained.stats.bytes_out > 0
    return trained


# -- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "form"),
    [({}, "both"), ({"mixed_precision": "bf16"}, "prepare"), ({"gradient_accumulation_steps": 2}, "context")],
    ids=["plain", "bf16", "accumulation"],
)
def test_training_changes_no_bit(plugin: OffloadPlugin, options: dict[str, Any], form: str) -> None:
    trained = trained_twice(plugin, options, form=form)
    assert top_pack_hook() is None
    assert trained.stats.kept_bytes.get("parameter", 0) > 0  # a weight that is saved is told apart from what may move


def test_the_context_covers_a_loss_outside_of_the_model(plugin: OffloadPlugin) -> None:
    saved = []
    for form in ("prepare", "context"):
        plugin.offload.reset_stats()
        saved.append(train(new_accelerator(), plugin, form=form).stats.saved_tensors)
        plugin.remove()
    assert saved[1] > saved[0]


@pytest.mark.parametrize(
    ("options", "make"),
    [
        long(lambda: compiled(backend="aot_eager") | MIXED, None),
        (lambda: compiled(backend="aot_eager", use_regional_compilation=True), None),
        long(dict, lambda model: torch.compile(model, backend="aot_eager")),
        long(lambda: MIXED, lambda model: torch.compile(model, backend="aot_eager")),
        long(dict, lambda model: model.compile(backend="aot_eager") or model),
        long(lambda: compiled(backend="inductor") | MIXED, small),
    ],
    ids=["whole", "regions", "before", "before-mixed", "in-place", "inductor"],
)
@pytest.mark.filterwarnings("ignore:eager_offload. compiled code waits")
def test_compiled_models_offload_inside_of_their_graphs(
    plugin: OffloadPlugin, options: OptionsMaker, make: Callable[[nn.Module], nn.Module] | None
) -> None:
    torch._dynamo.reset()
    trained = trained_twice(plugin, options(), make=make or (lambda model: model))
    assert trained.stats.compiled_regions > 0


# -- what a script does besides -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "keep_fp32_wrapper", "keep_torch_compile"),
    [
        (dict, False, True),
        (lambda: compiled(backend="aot_eager"), True, False),
        (lambda: compiled(backend="aot_eager", use_regional_compilation=True), False, False),
        (lambda: compiled(backend="aot_eager", use_regional_compilation=True), True, True),
    ],
    ids=["plain", "compiled", "regions", "regions-kept"],
)
def test_unwrap_model_gives_what_it_gives_without(
    plugin: OffloadPlugin, options: OptionsMaker, keep_fp32_wrapper: bool, keep_torch_compile: bool
) -> None:
    how = {"keep_fp32_wrapper": keep_fp32_wrapper, "keep_torch_compile": keep_torch_compile}
    accelerator = new_accelerator(mixed_precision="bf16", **options())
    original = Model()
    model, _, loader = prepared(accelerator, original)
    expected = accelerator.unwrap_model(model, **how)
    plugin.prepare(accelerator, model)
    unwrapped = accelerator.unwrap_model(model, **how)
    assert unwrapped is expected
    assert (unwrapped is original) == (not keep_torch_compile or not options())
    assert list(unwrapped.state_dict()) == list(expected.state_dict())
    if unwrapped is original:
        inputs, _ = next(iter(loader))
        assert unwrapped(inputs).dtype is torch.float32


@pytest.mark.parametrize(
    "options",
    [dict, long(lambda: compiled(backend="aot_eager", use_regional_compilation=True))],
    ids=["plain", "regions"],
)
def test_preparing_again_offloads_once(plugin: OffloadPlugin, options: OptionsMaker) -> None:
    accelerator = new_accelerator(**options())
    model, _, loader = prepared(accelerator, Model())
    inputs, _ = next(iter(loader))
    saved = []
    for _ in range(3):
        assert plugin.prepare(accelerator, accelerator.prepare_model(model)) is model
        plugin.offload.reset_stats()
        model(inputs).sum().backward()
        saved.append(plugin.offload.stats().saved_tensors)
    assert saved[0] == saved[1] == saved[2] > 0
    plugin.remove()
    plugin.remove()
    plugin.offload.reset_stats()
    model(inputs).sum().backward()
    assert plugin.offload.stats().saved_tensors == 0


def test_preparing_again_takes_hold_of_what_was_compiled_in_between(plugin: OffloadPlugin) -> None:
    accelerator = new_accelerator()
    model, _, loader = prepared(accelerator, Model())
    plugin.prepare(accelerator, model)
    model.compile(backend="aot_eager")  # in the place of the plugin's calls
    plugin.prepare(accelerator, model)
    inputs, _ = next(iter(loader))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "eager_offload: compiled code waits")
        model(inputs).sum().backward()
    stats = plugin.offload.stats(synchronize=True)
    assert (stats.compiled_regions, stats.bytes_out > 0) == (1, True)


def test_the_second_forward_is_traced_and_copies_are_of_the_same_configuration(tmp_path: Path) -> None:
    plugin = new_plugin(tmp_path, trace_step=2, trace_path=tmp_path / "step.json")
    train(new_accelerator(), plugin)
    for other in copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin)):
        assert (other.config, other.enabled, other._options) == (plugin.config, True, plugin._options)
        assert other.offload is not plugin.offload
        assert other.offload.stats().saved_tensors == 0
    plugin.close()
    assert (tmp_path / "step.json").stat().st_size > 0


def test_free_memory_and_the_end_of_training_leave_nothing(
    plugin: OffloadPlugin, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = train(new_accelerator(), plugin)
    accelerator, alive = trained.accelerator, weakref.ref(trained.model)
    trained.model = accelerator.free_memory(trained.model)[0]
    assert trained.model is None
    collect()
    assert alive() is None
    accelerator.end_training()
    assert plugin.metrics()["offload/moved_mib"] > 0
    capsys.readouterr()
    plugin.close()
    plugin.close()
    assert capsys.readouterr().err.count("eager_offload: peak saved-tensor memory") == 1
    assert train(new_accelerator(), plugin).stats.bytes_out > trained.stats.bytes_out  # what was closed opens again


def test_an_offload_of_the_users_own_stays_open(tmp_path: Path) -> None:
    offload = eo.Offload(**fields(tmp_path))
    plugin = OffloadPlugin(offload)
    assert train(new_accelerator(), plugin).stats.bytes_out > 0
    plugin.close()
    assert spill_files(tmp_path) != []
    offload.close()
    assert spill_files(tmp_path) == []


@pytest.mark.parametrize("around", [Model, lambda: torch.compile(Model(), backend="aot_eager")], ids=["one", "wrapped"])
def test_a_second_plugin_on_one_model_is_refused(
    plugin: OffloadPlugin, around: Callable[[], nn.Module], tmp_path: Path
) -> None:
    accelerator = new_accelerator()
    model, other = accelerator.prepare(around(), Model())
    second = new_plugin(tmp_path)
    plugin.prepare(accelerator, model)
    second.prepare(accelerator, other)
    for one in model, accelerator.unwrap_model(model, keep_torch_compile=False):
        with pytest.raises(eo.ConfigError, match="another OffloadPlugin has prepared"):
            second.prepare(accelerator, one)
    plugin.remove()
    assert second.prepare(accelerator, model) is model
    second.close()


def test_a_plugin_that_is_gone_makes_room_for_the_next(plugin: OffloadPlugin, tmp_path: Path) -> None:
    accelerator = new_accelerator()
    model, _, loader = prepared(accelerator, Model())
    inputs, _ = next(iter(loader))
    gone = new_plugin(tmp_path)
    gone.prepare(accelerator, model)
    offload = gone.offload
    del gone
    model(inputs).sum().backward()  # one that is held nowhere goes on, until there is another
    assert (saved := offload.stats(synchronize=True)).bytes_out > 0
    plugin.prepare(accelerator, model)
    model(inputs).sum().backward()
    assert plugin.offload.stats(synchronize=True).bytes_out > 0
    assert offload.stats().saved_tensors == saved.saved_tensors
    offload.close()


# -- settings -----------------------------------------------------------------------------------------------------


def test_the_fields_are_those_of_the_configuration_and_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD_MIN_BYTES", "4MiB")
    monkeypatch.setenv("EAGER_OFFLOAD_PREFETCH_BYTES", "8MiB")
    plugin = OffloadPlugin(min_bytes="2MiB", tier=None)
    config = plugin.offload.config
    assert config == eo.OffloadConfig(min_bytes=2 << 20, prefetch_bytes=8 << 20) == plugin.config
    assert all(getattr(plugin, name) == getattr(config, name) for name in FIELDS)
    assert plugin.enabled
    assert not hasattr(plugin, "no_such_field")


def test_files_of_the_documentation_are_read_and_accelerate_s_takes_no_field_of_ours(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "accelerate.md").read_text()
    ours, theirs = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert OffloadPlugin(**yaml.safe_load(ours)).max_inflight_bytes == 256 << 20
    file = tmp_path / "accelerate.yaml"
    file.write_text(theirs)
    read = load_config_from_file(str(file))
    assert (read.distributed_type, read.fsdp_config["fsdp_version"]) == (DistributedType.FSDP, 2)
    file.write_text(theirs + ours)
    with pytest.raises(ValueError, match="unknown keys"):
        load_config_from_file(str(file))


@pytest.mark.parametrize("how", ["environment", "enabled"])
def test_switched_off_nothing_is_touched(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if how == "environment":
        monkeypatch.setenv("EAGER_OFFLOAD", "0")
    plugin = new_plugin(tmp_path / "does not exist", **({"enabled": False} if how == "enabled" else {}))
    before = train(new_accelerator(), None)
    trained = train(new_accelerator(), plugin, form="both")
    assert trained.equals(before)
    assert trained.stats == eo.OffloadStats()
    assert plugin.metrics() == {}
    assert vars(trained.model).keys() == vars(before.model).keys()
    assert plugin.prepare(trained.accelerator, model := Model()) is model
    assert copy.deepcopy(plugin).enabled is False
    plugin.close()


# -- what is refused, and what is warned of -----------------------------------------------------------------------


def test_what_was_not_prepared_is_refused(plugin: OffloadPlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = new_accelerator()
    with pytest.raises(eo.ConfigError, match="has not been through accelerator"):
        plugin.prepare(accelerator, model := Model())
    with pytest.raises(eo.ConfigError, match="<tuple> is not accepted: prepare takes the accelerator"):
        plugin.prepare(accelerator, accelerator.prepare(model, Model()))
    skipping = new_plugin(Path("."), skip=["no_such_module"])
    with pytest.raises(eo.ConfigError, match="matches no module of this model"):
        skipping.prepare(accelerator, accelerator.prepare(Model()))
    monkeypatch.delattr(accelerator, "_models")  # another version may have no such name: then all are taken
    assert plugin.prepare(accelerator, other := Model()) is other


def test_accelerate_is_left_as_it_is(plugin: OffloadPlugin) -> None:
    assert Accelerator.prepare.__module__ == "accelerate.accelerator"
    assert new_accelerator().prepare(Model(), plugin)[1] is plugin


@pytest.mark.parametrize("inside", ["checkpoint", "checkpoint-offload"])
def test_what_hides_saved_tensors_is_warned_of_once(plugin: OffloadPlugin, inside: str) -> None:
    def make(model: Model) -> nn.Module:
        for number, block in enumerate(model.blocks):
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False)
            model.blocks[number] = wrapped if inside == "checkpoint" else offload_wrapper(wrapped)
        return model

    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        accelerator: Accelerator = new_accelerator()
        model, _, loader = prepared(accelerator, make(Model()))
        plugin.prepare(accelerator, model)
    mine = [str(one.message) for one in reported if "offload_wrapper stands around" in str(one.message)]
    assert len(mine) == (inside == "checkpoint-offload")
    assert all("(2, 'blocks.0' the first of them)" in one for one in mine)
    if not mine:  # the inputs of what is checkpointed move
        inputs, _ = next(iter(loader))
        model(inputs).sum().backward()
        stats = plugin.offload.stats(synchronize=True)
        assert stats.bytes_out >= 2 * 64 * 32 * 4
