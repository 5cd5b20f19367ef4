"""Transformers' trainers: the same parameters, bit for bit, whatever one is asked to do, and numbers in its logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import eager_offload as eo
from eager_offload.integrations.transformers import OffloadTrainerCallback, OffloadTrainerMixin
from eager_offload.runtime.host import host_runtime
from tests.integrations.training import (
    Trained,
    cached_loss,
    exact,
    fails,
    fields,
    forget,
    long,
    moved,
    parameters,
    spill_files,
    told_by,
)
from tests.integrations.transformers_training import (
    ForMixin,
    MixedTrainer,
    WithCallback,
    checkpointing,
    llama,
    run,
    trainer_of,
)
from tests.threads import collect

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {"callback": OffloadTrainerCallback, "mixin": ForMixin}
LAYER = WithCallback.block


def called_as_before(model: torch.nn.Module) -> bool:
    """Whether nothing stands around the calls of a model that no compiler has seen."""
    return "_compiled_call_impl" not in vars(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"label_smoothing_factor": 0.1},
        checkpointing(use_reentrant=False),
        long(checkpointing(use_reentrant=True)),
        long({"bf16": True}),
        long({"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}),
    ],
    ids=["label smoothing", "checkpointing", "reentrant", "bf16", "accumulation"],
)
def test_parameters_are_equal_after_three_steps(changes: dict[str, Any], tmp_path: Path) -> None:
    expected = run(trainer_of(tmp_path, **changes))
    saved = []
    for kind in KINDS.values():
        given = kind(eo.Offload(**fields(tmp_path)))
        stats = exact(expected, run(trainer_of(tmp_path, given, **changes)), given.offload)
        assert stats.empty_forwards == 0
        saved.append(stats.bytes_out)
    if "label_smoothing_factor" in changes:
        assert saved[1] > saved[0], "the mixin takes what the loss saves, and the callback does not"


class OfLogits(Trainer):
    """Its loss is of a cached kind, or is made without calling the model."""

    is_cached = True

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        tokens = inputs["input_ids"]
        if self.is_cached:
            return cached_loss(lambda part: model(input_ids=part).logits, tokens)
        return model.forward(input_ids=tokens).logits.square().mean()


class MixedOfLogits(OffloadTrainerMixin, OfLogits):
    pass


def test_forwards_that_run_again_in_backward_are_offloaded(tmp_path: Path) -> None:
    expected, bytes_out = run(trainer_of(tmp_path, kind=OfLogits)), []
    callback = OffloadTrainerCallback(eo.Offload(**fields(tmp_path)))
    MixedOfLogits.offload_config = fields(tmp_path)
    for options in {"given": callback, "kind": OfLogits}, {"kind": MixedOfLogits}:
        found = run(trainer_of(tmp_path, **options))
        bytes_out.append(exact(expected, found, getattr(found.owner, "offload", callback.offload)).bytes_out)
    assert bytes_out[1] > bytes_out[0] / 2, "nearly all of it"


def test_a_model_that_is_not_called_is_told_once_with_the_reason(tmp_path: Path) -> None:
    class Forward(OfLogits):
        is_cached = False

    for steps in 1, 4:
        given = OffloadTrainerCallback(eo.Offload(**fields(tmp_path)))
        (said,) = told_by(trainer_of(tmp_path, given, kind=Forward, max_steps=steps).train)
        assert "LlamaForCausalLM is not trained by model(x)" in said
        assert "OffloadTrainerMixin" in said


# -- failure, and going on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["remove", "gone", "another", "mixin", "again"])
def test_after_a_failed_training_files_go_with_whatever_ends_it(end: str, tmp_path: Path) -> None:
    model = llama()
    start, callback = parameters(model), OffloadTrainerCallback(**fields(tmp_path))
    trainer = trainer_of(tmp_path, callback, model)
    fails(model.get_submodule(LAYER), error := ValueError("in forward"))
    with pytest.raises(ValueError, match="in forward"):
        trainer.train()
    forget(error)
    assert spill_files(tmp_path) != []
    assert not called_as_before(model)
    model.load_state_dict(start, strict=False)
    if end == "remove":
        callback.remove()
        callback.remove()
    elif end == "gone":
        trainer.remove_callback(callback)
        del callback
        collect()
        host_runtime().close()  # a write that is under way holds the file until it is over
    elif end == "again":
        trainer.train()
    else:
        callback.offload.reset_stats()
        other = KINDS["callback" if end == "another" else end](eo.Offload(**fields(tmp_path)))
        found = run(trainer_of(tmp_path, other, model))
        exact(run(trainer_of(tmp_path)), found, other.offload)  # what the first left would hide tensors from it
        assert callback.offload.stats().saved_tensors == 0
        other.offload.close()
    assert spill_files(tmp_path) == []
    assert called_as_before(model)


def run_with_too_large_a_batch(path: Path, given: OffloadTrainerCallback | None, number: int) -> Trained:
    """What became of a training whose ``number``-th forward finds too little memory for the first batch size."""
    model, error = llama(), RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
    fails(model.get_submodule(LAYER), error, number)
    found = run(trainer_of(path, given, model, auto_find_batch_size=True, per_device_train_batch_size=8))
    forget(error)
    assert found.owner.state.train_batch_size < 8
    assert called_as_before(model)
    return found


def test_a_batch_size_that_is_too_large_is_tried_and_left(tmp_path: Path) -> None:
    given = OffloadTrainerCallback(log_metrics="all", **fields(tmp_path))
    found = [run_with_too_large_a_batch(tmp_path, one, number=1) for one in (None, given)]
    exact(*found, given.offload)
    first, _, third = (entry["offload/saved_bytes"] for entry in found[1].logged)
    assert first == third > 0, "what was saved before there was too little memory is in no step"


@pytest.mark.filterwarnings("ignore:eager_offload. device_budget=1 B is too little:RuntimeWarning")
def test_with_recompute_a_smaller_batch_is_planned_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = OffloadTrainerCallback(device_budget=1, min_bytes=1024, recompute=True)
    found = [run_with_too_large_a_batch(tmp_path, one, number=2) for one in (None, given)]
    assert all(map(torch.equal, *(one.parameters.values() for one in found)))
    assert moved(given.offload) > 0
    said = [line for line in capsys.readouterr().err.splitlines() if "eager_offload: the plan said" in line]
    assert len(set(said)) == 2


@pytest.mark.parametrize("kind", KINDS.values(), ids=[*KINDS])
def test_gradient_checkpointing_beside_recompute_is_refused_before_a_step(kind: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, kind(**fields(tmp_path), recompute=True), **checkpointing())
    with pytest.raises(eo.ConfigError, match="gradient_checkpointing=False of TrainingArguments"):
        trainer.train()
    assert called_as_before(trainer.model)


@pytest.mark.parametrize("kind", KINDS.values(), ids=[*KINDS])
def test_transformers_own_offload_beside_ours_is_one_sentence(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = torch.autograd.graph.save_on_cpu
    pageable = hooks.__init__
    # Theirs pins, which needs an accelerator.
    monkeypatch.setattr(hooks, "__init__", lambda self, *_, **__: pageable(self, pin_memory=False))
    expected = run(trainer_of(tmp_path, **checkpointing(offload=True)))
    given, found = kind(eo.Offload(**fields(tmp_path))), []
    (said,) = told_by(lambda: found.append(run(trainer_of(tmp_path, given, **checkpointing(offload=True)))))
    exact(expected, *found, given.offload, foreign=True)
    assert "_kwargs={'offload': True} hides from us" in said
    assert "on side streams and within the budget" in said


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    expected = run(trainer_of(tmp_path, max_steps=4))
    given = ForMixin(**fields(tmp_path), log_metrics="all")
    trainer_of(tmp_path, given, max_steps=4, save_strategy="steps", save_steps=2).train()
    trainer = trainer_of(tmp_path, given, max_steps=4)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert all(map(torch.equal, parameters(trainer.model).values(), expected.parameters.values()))
    assert moved(given.offload) > 0
    steps = [entry for entry in trainer.state.log_history if entry["step"] > 2 and "loss" in entry]
    assert sum(entry["offload/saved_bytes"] for entry in steps) == given.offload.stats().saved_bytes


# -- what goes with it, and what is refused ---------------------------------------------------------------------------


def test_a_class_has_its_own_configuration_unless_a_switch_overrules_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Configured(MixedTrainer):
        offload_config = fields(tmp_path)

    trainer = trainer_of(tmp_path, kind=Configured)
    trainer.train()
    assert moved(trainer.offload) > 0
    assert spill_files(tmp_path) == []

    class Without(MixedTrainer):
        offload_config = False

    assert trainer_of(tmp_path, kind=Without).offload is None
    monkeypatch.setenv("EAGER_OFFLOAD", "1")
    assert trainer_of(tmp_path, kind=Without).offload is not None
    monkeypatch.setenv("EAGER_OFFLOAD", " ")
    assert trainer_of(tmp_path, kind=Without).offload is None
    for text, on in {"0": False, "off": False, "Yes": True}.items():
        monkeypatch.setenv("EAGER_OFFLOAD", text)
        assert (trainer_of(tmp_path, kind=Configured).offload is not None) == on
    monkeypatch.setenv("EAGER_OFFLOAD", "maybe")
    with pytest.raises(eo.ConfigError, match="EAGER_OFFLOAD='maybe'"):
        trainer_of(tmp_path, kind=Without)


@pytest.mark.parametrize("both", ["callback and callback", "callback and mixin", "mixin and callback"])
def test_two_on_one_trainer_are_one_too_many(both: str, tmp_path: Path) -> None:
    second = both.split()[-1]
    extra = OffloadTrainerCallback(**fields(tmp_path))
    kept = KINDS["mixin" if "mixin" in both else "callback"](**fields(tmp_path))
    trainer = trainer_of(tmp_path, kept, callbacks=[extra] if second == "mixin" else [])
    if second == "callback":
        trainer.add_callback(extra)
    for _ in range(2):
        with pytest.raises(eo.ConfigError, match="leave the others out"):
            trainer.train()
        assert called_as_before(trainer.model)
        assert spill_files(tmp_path) == []
    trainer.remove_callback(extra)
    exact(run(trainer_of(tmp_path)), run(trainer), kept.offload)


def test_a_mixin_behind_the_trainer_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(eo.ConfigError, match=r"Write class Wrong\(OffloadTrainerMixin, Trainer\)"):
        type("Wrong", (Trainer, OffloadTrainerMixin), {})


def test_data_parallel_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, OffloadTrainerCallback(**fields(tmp_path)))
    trainer.args._n_gpu = 2
    with pytest.raises(eo.ConfigError, match="torchrun"):
        trainer.train()
    assert called_as_before(trainer.model)


# -- compiled models --------------------------------------------------------------------------------------------------


@pytest.fixture
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:eager_offload. compiled code waits:RuntimeWarning")
@pytest.mark.long
@pytest.mark.usefixtures("_nothing_compiled_before")
@pytest.mark.parametrize(
    ("kind", "changes", "fullgraph", "regions"),
    [
        ("callback", {"torch_compile": True}, "0", 3),
        ("mixin", {"torch_compile": True}, "0", 3),
        ("callback", checkpointing(use_reentrant=False), "0", None),
        ("mixin", checkpointing(use_reentrant=False), "0", None),
        ("mixin", {}, "1", 3),
    ],
    ids=["callback", "mixin", "callback, checkpointing", "mixin, checkpointing", "mixin, fullgraph"],
)
def test_compiled_models_offload_inside_of_their_graphs(
    kind: str,
    changes: dict[str, Any],
    fullgraph: str,
    regions: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One graph a step, where the number of regions is given: the context breaks none."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", fullgraph)
    changes = {"torch_compile_backend": "aot_eager", **changes}
    expected = run(trainer_of(tmp_path, **changes))
    torch._dynamo.reset()
    given = KINDS[kind](eo.Offload(**fields(tmp_path)))
    stats = exact(expected, run(trainer_of(tmp_path, given, **changes)), given.offload)
    assert stats.compiled_regions == (regions or stats.compiled_regions) > 0


@pytest.mark.usefixtures("_nothing_compiled_before")
@pytest.mark.parametrize("option", ["fullgraph", "use_regional_compilation"])
def test_the_callback_refuses_what_is_compiled_around_it(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"ACCELERATE_DYNAMO_USE_{option.removeprefix('use_').upper()}"
    monkeypatch.setenv(variable, "1")
    trainer = trainer_of(tmp_path, OffloadTrainerCallback(**fields(tmp_path)), torch_compile_backend="aot_eager")
    with pytest.raises(eo.ConfigError, match=rf"{option}=True.*OffloadTrainerMixin.*{variable}"):
        trainer.train()
