"""Accelerate in one process: every way to prepare a model, and all that a script does with one besides training."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType, TorchDynamoPlugin
from torch import Tensor, nn

import eager_offload as eo
from eager_offload.integrations.accelerate import OffloadPlugin
from tests.integrations.accelerate_training import new_accelerator, prepared, train
from tests.integrations.training import Model, counted, exact, fields, long, moved, told_by, watched
from tests.threads import collect

MIXED = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}


def small() -> nn.Module:
    """Less of it, since Inductor takes a minute for all."""
    model = Model()
    return nn.Sequential(model.first, nn.GELU(), model.last)


def compiled_before() -> nn.Module:
    return torch.compile(Model(), fullgraph=True, backend="aot_eager")


def compiled_in_place() -> nn.Module:
    (model := Model()).compile(fullgraph=True, backend="aot_eager")
    return model


def compiled(**options: Any) -> dict[str, Any]:
    return {"dynamo_plugin": TorchDynamoPlugin(backend="aot_eager", **options)}


def in_regions() -> dict[str, Any]:
    return compiled(use_regional_compilation=True)


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[OffloadPlugin]:
    made = OffloadPlugin(**fields(tmp_path))
    yield made
    made.close()


def saved_by(plugin: OffloadPlugin, model: nn.Module, loader: Any) -> int:
    """How many tensors a step of ``model`` saves under ``plugin``."""
    plugin.offload.reset_stats()
    model(next(iter(loader))[0]).sum().backward()
    return plugin.offload.stats(synchronize=True).saved_tensors


# -- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "form"),
    [({}, "both"), ({"mixed_precision": "bf16"}, "prepare"), ({"gradient_accumulation_steps": 2}, "context")],
    ids=["plain", "bf16", "accumulation"],
)
def test_training_changes_no_bit(plugin: OffloadPlugin, options: dict[str, Any], form: str) -> None:
    expected = train(new_accelerator(**options), None)
    exact(expected, train(new_accelerator(**options), plugin, form=form), plugin.offload)


@pytest.mark.parametrize(
    ("options", "make"),
    [
        long(lambda: compiled() | MIXED, Model),
        (in_regions, Model),
        long(dict, compiled_before),
        long(lambda: MIXED, compiled_before),
        (dict, compiled_in_place),
        long(lambda: {"dynamo_plugin": TorchDynamoPlugin(backend="inductor")} | MIXED, small),
    ],
    ids=["whole", "regions", "before", "before-mixed", "in-place", "inductor"],
)
@pytest.mark.filterwarnings("ignore:eager_offload. compiled code waits")
def test_compiled_models_offload_inside_of_their_graphs(
    plugin: OffloadPlugin, options: Callable[[], dict[str, Any]], make: Callable[[], nn.Module]
) -> None:
    torch._dynamo.reset()
    expected = train(new_accelerator(**options()), None, make=make)
    torch._dynamo.reset()
    stats = exact(expected, train(new_accelerator(**options()), plugin, make=make), plugin.offload)
    assert stats.compiled_regions > 0


# -- a plan of the first batch --------------------------------------------------------------------------------------


class Odd(Model):
    """Does what depends on numbers."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = super().forward(inputs)
        return hidden * hidden.sum().item()


@pytest.mark.filterwarnings("ignore:eager_offload. device_budget=1 B is too little:RuntimeWarning")
def test_an_example_is_planned_before_the_first_call(capsys: pytest.CaptureFixture[str]) -> None:
    plugin = OffloadPlugin(device_budget=1, min_bytes=1024, recompute=True)
    accelerator = new_accelerator()
    model, _, loader = prepared(accelerator, Model())
    (example, _), calls = next(iter(loader)), counted(model)
    assert plugin.prepare(accelerator, model.train(), example=example) is model
    assert calls == {}
    assert "eager_offload: does not fit" in capsys.readouterr().err
    assert plugin.offload.stats().plan is not None
    model(example).square().mean().backward()
    gradients = [one.grad for one in model.parameters()]
    assert calls[True] > len([*model.modules()])
    model.zero_grad()
    plugin.remove()
    model(example).square().mean().backward()
    assert all(map(torch.equal, gradients, [one.grad for one in model.parameters()]))
    with pytest.raises(eo.ConfigError, match=r"model.train\(\) before"):
        plugin.prepare(accelerator, model.eval(), example=example)
    with plugin.offload, pytest.raises(eo.ConfigError, match=r"inside of a `with` of the Offload"):
        plugin.prepare(accelerator, model.train())(example)
    plugin.prepare(accelerator, model, example=example)
    gone = weakref.ref(model)
    accelerator.free_memory()
    del model, accelerator
    collect()
    assert gone() is None, "neither the plugin nor the plan holds it"
    plugin.close()


def test_what_cannot_be_planned_is_one_error(plugin: OffloadPlugin) -> None:
    accelerator = new_accelerator()
    model, _, loader = prepared(accelerator, Odd())
    planned = OffloadPlugin(recompute=True)
    with pytest.raises(eo.PlanError, match=r"With recompute=True the first batch is planned: leave it out"):
        planned.prepare(accelerator, model)(next(iter(loader))[0])
    planned.close()
    with pytest.raises(eo.ConfigError, match=r"it takes OffloadPlugin\(recompute=True\)"):
        plugin.prepare(accelerator, model, example=next(iter(loader))[0])
    with pytest.raises(eo.ConfigError, match="recompute=True beside an Offload"):
        OffloadPlugin(plugin.offload, recompute=True)


# -- what a script does besides -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "keep_fp32_wrapper", "keep_torch_compile"),
    [(dict, False, True), (compiled, True, False), (in_regions, False, False), (in_regions, True, True)],
    ids=["plain", "compiled", "regions", "regions-kept"],
)
def test_unwrap_model_gives_what_it_gives_without(
    plugin: OffloadPlugin, options: Callable[[], dict[str, Any]], keep_fp32_wrapper: bool, keep_torch_compile: bool
) -> None:
    how = {"keep_fp32_wrapper": keep_fp32_wrapper, "keep_torch_compile": keep_torch_compile}
    accelerator, original = new_accelerator(mixed_precision="bf16", **options()), Model()
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


@pytest.mark.filterwarnings("ignore:eager_offload. compiled code waits:RuntimeWarning")
@pytest.mark.parametrize("options", [dict, long(in_regions)], ids=["plain", "regions"])
def test_preparing_again_offloads_once(plugin: OffloadPlugin, options: Callable[[], dict[str, Any]]) -> None:
    accelerator = new_accelerator(**options())
    model, _, loader = prepared(accelerator, Model())
    saved = set()
    for _ in range(3):
        assert plugin.prepare(accelerator, accelerator.prepare_model(model)) is model
        saved.add(saved_by(plugin, model, loader))
    assert len(saved) == 1
    assert saved != {0}
    seen = watched(model.first)
    with torch.no_grad():
        model(next(iter(loader))[0])
    assert seen == [(True, False)], "no backward may follow"
    plugin.remove()
    plugin.remove()
    assert saved_by(plugin, model, loader) == 0


@pytest.mark.parametrize("around", [Model, compiled_before], ids=["one", "wrapped"])
def test_a_second_plugin_on_one_model_is_refused(
    plugin: OffloadPlugin, around: Callable[[], nn.Module], tmp_path: Path
) -> None:
    accelerator = new_accelerator()
    model, other = accelerator.prepare(around(), Model())
    second = OffloadPlugin(**fields(tmp_path))
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
    gone = OffloadPlugin(offload := eo.Offload(**fields(tmp_path)))
    gone.prepare(accelerator, model)
    assert saved_by(gone, model, loader) > 0
    del gone
    assert saved_by(plugin, model, loader) == 0
    assert moved(offload) > 0, "one that is held nowhere goes on, until there is another"
    saved = offload.stats().saved_tensors
    plugin.prepare(accelerator, model)
    assert saved_by(plugin, model, loader) > 0
    assert offload.stats().saved_tensors == saved
    offload.close()


# -- settings -----------------------------------------------------------------------------------------------------


def test_the_file_of_the_documentation_is_read_and_takes_no_field_of_ours(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "accelerate.md").read_text()
    (theirs,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "accelerate.yaml"
    file.write_text(theirs)
    read = load_config_from_file(str(file))
    assert (read.distributed_type, read.fsdp_config["fsdp_version"]) == (DistributedType.FSDP, 2)
    file.write_text(theirs + "max_inflight_bytes: 256MiB\n")
    with pytest.raises(ValueError, match="unknown keys"):
        load_config_from_file(str(file))


# -- what is refused, and what is warned of -----------------------------------------------------------------------


def test_what_was_not_prepared_is_refused(plugin: OffloadPlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = new_accelerator()
    with pytest.raises(eo.ConfigError, match="prepare has not returned it"):
        plugin.prepare(accelerator, model := Model())
    with pytest.raises(eo.ConfigError, match="<tuple> is not accepted: prepare takes the accelerator"):
        plugin.prepare(accelerator, accelerator.prepare(model, Model()))
    several = nn.DataParallel(accelerator.prepare(Model()))
    several.device_ids = [0, 1]  # a CPU has none
    with pytest.raises(eo.ConfigError, match=r"DataParallel is not accepted.*torchrun"):
        plugin.prepare(accelerator, several)
    monkeypatch.delattr(accelerator, "_models")  # another version may have no such name: then all are taken
    assert plugin.prepare(accelerator, other := Model()) is other


class WithLoss(Model):
    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs) if self.recompute else self.forward(inputs).square().mean()


class Calls(WithLoss):
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.loss(inputs)


#: By the reason that is told: the class, and a step of it.
UNSEEN: dict[str, tuple[type[Model], Callable[[Any, Any], Any]]] = {
    "WithLoss is not trained by model": (WithLoss, lambda model, inputs: model.loss(inputs)),
    "Calls has a __call__ of its own": (Calls, lambda model, inputs: model(inputs)),
    "WithLoss is trained in eval mode": (WithLoss, lambda model, inputs: model.eval()(inputs).sum()),
}


@pytest.mark.parametrize("reason", UNSEEN)
@pytest.mark.parametrize("steps", [1, 4])
def test_three_steps_in_which_nothing_was_seen_are_one_sentence(
    plugin: OffloadPlugin, reason: str, steps: int, tmp_path: Path
) -> None:
    kind, step = UNSEEN[reason]
    accelerator = new_accelerator()
    model, _, loader = prepared(accelerator, kind())
    plugin.prepare(accelerator, model)
    other, inputs = Model(), next(iter(loader))[0]
    with torch.no_grad():
        step(model, inputs)
    told = [
        told_by(lambda: [other(inputs).sum().backward() for _ in range(4)]),  # is not this model's
        told_by(lambda: [accelerator.backward(step(model, inputs)) for _ in range(steps)]),
        told_by(plugin.close),
    ]
    where = 1 if steps >= 3 else 2
    (said,) = told.pop(where)
    assert said.startswith("eager_offload: nothing moved, because")
    assert reason in said
    assert "with plugin.offload" in said
    assert told == [[], []]
