"""Transformers' Trainer: the same parameters, bit for bit, whatever it is asked to do, and numbers in its logs."""

from __future__ import annotations

import contextlib
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import Trainer, TrainerCallback

import eager_offload as eo
from eager_offload._torch import module_call, top_pack_hook
from eager_offload.integrations.transformers import OffloadTrainerCallback, OffloadTrainerMixin
from eager_offload.runtime.host import host_runtime
from tests.integrations.leftovers import spill_files
from tests.integrations.moving import fields, moved
from tests.integrations.tiny_transformers import (
    MixedTrainer,
    Tokens,
    arguments,
    checkpointing,
    llama,
    offloading,
    parameters,
    same,
    trained,
)
from tests.threads import collect

pytestmark = pytest.mark.usefixtures("one_thread")


WAYS = ("callback", "mixin")
FIGURES = {"offload/saved_bytes", "offload/bytes_out", "offload/bytes_in", "offload/stall_seconds"}
THREE = {"offload/device_peak_mib", "offload/moved_mib", "offload/stall_seconds"}


def plain(path: Path, model: nn.Module | None = None, **changes: Any) -> Trainer:
    return Trainer(model or llama(), arguments(path, **changes), train_dataset=Tokens())


ROUTES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "gradient accumulation": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
    "checkpointing": checkpointing(use_reentrant=False),
    "reentrant": checkpointing(use_reentrant=True),
    "bf16": {"bf16": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


#: Those that take their own way through this module; the others are torch's business and Accelerate's.
QUICK = {"as it is", "checkpointing", "label smoothing"}


@pytest.mark.parametrize("route", [pytest.param(r, marks=() if r in QUICK else pytest.mark.long) for r in ROUTES])
def test_parameters_are_equal_after_three_steps(route: str, tmp_path: Path) -> None:
    expected = trained(plain(tmp_path, **ROUTES[route]))
    for way in WAYS:
        trainer, offload = offloading(way, tmp_path, **ROUTES[route])
        assert same(trained(trainer), expected)
        assert moved(offload) > 0
        assert offload.stats().foreign_hooks == offload.stats().empty_forwards == 0
        assert module_call(trainer.model) is None


def test_the_mixin_takes_what_the_loss_saves_and_the_callback_does_not(tmp_path: Path) -> None:
    offloads = []
    for way in WAYS:
        trainer, offload = offloading(way, tmp_path, max_steps=1, label_smoothing_factor=0.1)
        trainer.train()
        offloads.append(offload)
    inside, everything = (moved(offload) for offload in offloads)
    assert everything > inside > 0


@pytest.mark.parametrize("way", WAYS)
def test_nothing_moves_in_evaluation(way: str, tmp_path: Path) -> None:
    saved: list[int] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            saved.append(offload.stats().saved_tensors)

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            saved.append(-offload.stats().saved_tensors)

    expected = trained(plain(tmp_path))
    model = llama()
    hooked: list[tuple[bool, bool]] = []
    layer = model.get_submodule("model.layers.1")
    layer.register_forward_pre_hook(lambda *_: hooked.append((model.training, top_pack_hook() is not None)))
    trainer, offload = offloading(way, tmp_path, model, [Watch()], eval_strategy="steps", eval_steps=1)
    assert same(trained(trainer), expected)
    assert moved(offload) > 0
    assert len(saved) == 6
    assert [-after for after in saved[1::2]] == saved[::2]
    assert hooked == [(True, True), (False, False)] * 3, "evaluation does not even enter the context"
    trainer.evaluate()
    trainer.predict(Tokens(2))
    assert hooked[6:] == [(False, False)] * 2
    assert offload.stats().saved_tensors == saved[4]


class Tracker(TrainerCallback):
    """Logs what it is given, as those of ``report_to`` do."""

    logged: list[dict[str, float]]

    def __init__(self) -> None:
        type(self).logged = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.logged.append(dict(logs))


@pytest.mark.parametrize("way", WAYS)
def test_figures_are_in_the_history_and_with_callbacks_behind(way: str, tmp_path: Path) -> None:
    trainer, offload = offloading(way, tmp_path, callbacks=[Tracker()], max_steps=4, logging_steps=2)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in steps] == [2, 4]
    for entry, logs in zip(steps, Tracker.logged, strict=False):
        assert entry.keys() >= FIGURES
        assert {**logs, "step": entry["step"]} == entry
        assert entry["offload/saved_bytes"] > 0
    assert sum(2 * entry["offload/saved_bytes"] for entry in steps) == offload.stats().saved_bytes
    assert not FIGURES & trainer.state.log_history[-1].keys(), "the summary is of no step"
    assert "train_loss" in trainer.state.log_history[-1]


@pytest.mark.parametrize("way", WAYS)
def test_trackers_get_three_figures_a_step_is_traced_and_a_line_ends_it(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"trace_step": 2, "trace_path": tmp_path / "step.json"}
    given: dict[str, Any] = {"args": arguments(tmp_path, max_steps=3), "train_dataset": Tokens()}
    if way == "mixin":
        given["args"].report_to = ["tensorboard"]  # stands before all that a user gives
        trainer: Trainer = MixedTrainer(llama(), **given, offload=fields(tmp_path), offload_options=options)
    else:
        trainer = Trainer(llama(), **given, callbacks=[OffloadTrainerCallback(fields(tmp_path), **options), Tracker()])
    trainer.train()
    if way == "mixin":
        (written,) = tmp_path.rglob("events.out.tfevents.*")
        found = EventAccumulator(str(written)).Reload()
        shown = {name: found.Scalars(name) for name in found.Tags()["scalars"] if "offload/" in name}
        assert {name[name.index("offload/") :] for name in shown} == THREE
        assert all([one.step for one in points] == [1, 2, 3] for points in shown.values())
    else:
        steps = [logs for logs in Tracker.logged if "loss" in logs]
        assert [{name for name in logs if name.startswith("offload/")} for logs in steps] == [THREE] * 3
        assert steps[-1]["offload/device_peak_mib"] > 0
    assert (tmp_path / "step.json").stat().st_size > 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eager_offload: ")]
    assert len(said) == 1
    assert "peak saved-tensor memory" in said[0]


def forgets(error: BaseException) -> None:
    """What was saved is held by the frames that an error came through."""
    error.__traceback__ = None
    collect()


class Fails(TrainerCallback):
    """Has the model raise ``error`` in the middle of its ``number``-th forward."""

    def __init__(self, model: nn.Module, error: BaseException, number: int = 2) -> None:
        self.calls = 0

        def hook(module: nn.Module, *_: Any) -> None:
            self.calls += 1
            if self.calls == number:
                raise error

        model.get_submodule("model.layers.1").register_forward_pre_hook(hook)


@pytest.mark.parametrize(("way", "error"), [("mixin", ValueError("in forward")), ("callback", KeyboardInterrupt())])
def test_training_that_ends_in_an_exception_leaves_no_hook_and_the_next_is_exact(
    way: str, error: BaseException, tmp_path: Path
) -> None:
    expected = trained(plain(tmp_path))
    model = llama()
    start = parameters(model)
    trainer, offload = offloading(way, tmp_path, model)
    Fails(model, error)
    with pytest.raises(type(error)):
        trainer.train()
    assert top_pack_hook() is None
    assert moved(offload) > 0
    model.load_state_dict(start, strict=False)
    offload.reset_stats()
    other, again = offloading(way, tmp_path, model)  # another trainer, with another Offload, on the same model
    assert same(trained(other), expected)
    assert moved(again) > 0
    assert moved(offload) == 0, "what the first has left would hide tensors from the second"
    assert module_call(model) is None


def test_a_batch_size_that_is_too_large_is_tried_and_left(tmp_path: Path) -> None:
    changes = {"auto_find_batch_size": True, "per_device_train_batch_size": 8}
    error = RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
    outcomes = []
    for chosen in (None, "callback"):
        model = llama()
        Fails(model, error, number=1)
        if chosen is None:
            trainer = plain(tmp_path, model, **changes)
        else:
            trainer, offload = offloading(chosen, tmp_path, model, **changes)
        outcomes.append(trained(trainer))
        assert trainer.state.train_batch_size < 8
    assert same(*outcomes)
    assert moved(offload) > 0
    assert module_call(model) is None
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    first, _, third = (entry["offload/saved_bytes"] for entry in steps)
    assert first == third > 0, "what was saved before there was too little memory is in no step"


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    expected = trained(plain(tmp_path, max_steps=4))
    trainer, _ = offloading("mixin", tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer, offload = offloading("mixin", tmp_path, max_steps=4)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert same(parameters(trainer.model), expected)
    assert moved(offload) > 0
    figures = [
        entry["offload/saved_bytes"] for entry in trainer.state.log_history if entry["step"] > 2 and "loss" in entry
    ]
    assert sum(figures) == offload.stats().saved_bytes


def test_data_parallel_is_refused(tmp_path: Path) -> None:
    trainer, _ = offloading("callback", tmp_path)
    trainer.args._n_gpu = 2
    with pytest.raises(eo.ConfigError, match="torchrun"):
        trainer.train()
    assert module_call(trainer.model) is None


@pytest.mark.parametrize("way", WAYS)
def test_fields_of_a_dict_are_enough_and_the_files_go_with_the_training(way: str, tmp_path: Path) -> None:
    class Configured(MixedTrainer):
        offload_config = fields(tmp_path)

    given: dict[str, Any] = {"args": arguments(tmp_path, max_steps=1), "train_dataset": Tokens()}
    if way == "mixin":
        trainer = Configured(llama(), **given)
        offload = trainer.offload
    else:
        callback = OffloadTrainerCallback(**fields(tmp_path))
        trainer, offload = Trainer(llama(), **given, callbacks=[callback]), callback.offload
    opened: list[int] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            opened.append(len(spill_files(tmp_path)))

    trainer.add_callback(Watch())
    trainer.train()
    assert moved(offload) > 0
    assert spill_files(tmp_path) == []
    before = moved(offload)
    trainer.train()
    assert moved(offload) > before, "closed and opened again"
    assert spill_files(tmp_path) == []
    assert opened == [1, 1]


def test_an_offload_of_the_users_own_stays_open(tmp_path: Path) -> None:
    trainer, offload = offloading("callback", tmp_path, max_steps=1)
    trainer.train()
    assert moved(offload) > 0
    assert spill_files(tmp_path) != []
    offload.close()
    assert spill_files(tmp_path) == []


def test_the_environment_switches_both_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD", "0")
    callback = OffloadTrainerCallback(fields(tmp_path))
    given: dict[str, Any] = {"args": arguments(tmp_path, max_steps=1), "train_dataset": Tokens()}
    trainer = MixedTrainer(llama(), **given, callbacks=[callback], offload=fields(tmp_path))
    trainer.train()
    assert callback.offload is trainer.offload is None
    assert not FIGURES & trainer.state.log_history[0].keys()
    monkeypatch.setenv("EAGER_OFFLOAD", "1")
    assert MixedTrainer(llama(), **given, offload=False).offload is not None
    monkeypatch.delenv("EAGER_OFFLOAD")
    assert MixedTrainer(llama(), **given, offload=False).offload is None
    assert copy.deepcopy(callback).offload is None


def test_a_mixin_behind_the_trainer_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(eo.ConfigError, match=r"Write class Wrong\(OffloadTrainerMixin, Trainer\)"):
        type("Wrong", (Trainer, OffloadTrainerMixin), {})


@pytest.mark.parametrize("way", WAYS)
def test_modules_are_skipped_by_name_and_a_typo_is_an_error(way: str, tmp_path: Path) -> None:
    def begin(skip: str) -> eo.Offload:
        trainer, offload = offloading(way, tmp_path, offload=eo.Offload(**fields(tmp_path), skip=skip), max_steps=1)
        trainer.train()
        return offload

    assert begin("*.mlp").stats().kept_bytes["region"] > 0
    with pytest.raises(eo.ConfigError, match="matches no module of this model"):
        begin("*.mpl")


def test_training_for_nothing_is_warned_of(tmp_path: Path) -> None:
    trainer = plain(tmp_path, max_steps=2)
    trainer.add_callback(OffloadTrainerCallback())
    with pytest.warns(RuntimeWarning, match=r"eager_offload: nothing moved, because .* min_bytes"):
        trainer.train()


def test_checkpointing_that_offloads_is_warned_of(tmp_path: Path) -> None:
    trainer, _ = offloading("callback", tmp_path, max_steps=1)
    # Only the flag: what it does pins memory, which takes an accelerator.
    for name, value in checkpointing(offload=True).items():
        setattr(trainer.args, name, value)
    with pytest.warns(RuntimeWarning, match=r"checkpointing_kwargs=\{'offload': True\}.*leave that option out"):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


@pytest.mark.parametrize("end", ["remove", "gone", "another", "mixin", "again"])
def test_after_a_failed_training_files_go_with_whatever_ends_it(end: str, tmp_path: Path) -> None:
    model = llama()
    callback = OffloadTrainerCallback(fields(tmp_path))
    trainer = plain(tmp_path, model, max_steps=1)
    trainer.add_callback(callback)
    Fails(model, error := ValueError("in forward"), number=1)
    with pytest.raises(ValueError, match="in forward"):
        trainer.train()
    forgets(error)
    assert spill_files(tmp_path) != []
    assert module_call(model) is not None
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
        other, offload = offloading("callback" if end == "another" else end, tmp_path, model, max_steps=1)
        other.train()
        assert moved(offload) > 0, "what the first left would hide tensors from the second"
        offload.close()
    assert spill_files(tmp_path) == []
    assert module_call(model) is None


class Bare(Trainer):
    """Has a context of its own, which is not the one that Trainer makes."""

    entered = left = 0

    @contextlib.contextmanager
    def own(self) -> Any:
        self.entered += 1
        try:
            yield
        finally:
            self.left += 1

    def compute_loss_context_manager(self) -> Any:
        return self.own()


class Piecewise(Bare):
    """Has entered its context when it returns it, as Trainer has."""

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        stack = Trainer.compute_loss_context_manager(self)
        stack.enter_context(self.own())
        return stack


@pytest.mark.parametrize("kind", [Bare, Piecewise])
def test_the_mixin_goes_with_a_context_of_the_trainer_s_own(kind: type[Bare], tmp_path: Path) -> None:
    class Mixed(OffloadTrainerMixin, kind):  # type: ignore[misc,valid-type]  # a base that is a parameter
        pass

    expected = trained(plain(tmp_path))
    offload = eo.Offload(**fields(tmp_path))
    given: dict[str, Any] = {"train_dataset": Tokens(), "eval_dataset": Tokens(4), "offload": offload}
    trainer = Mixed(llama(), arguments(tmp_path), **given)
    assert same(trained(trainer), expected)
    assert moved(offload) > 0
    trainer.evaluate()
    assert trainer.entered == trainer.left == 4
    assert top_pack_hook() is None


TOO_MANY = ("callback and callback", "callback and mixin", "mixin and callback")


@pytest.mark.parametrize("both", TOO_MANY)
def test_two_on_one_trainer_are_one_too_many(both: str, tmp_path: Path) -> None:
    callback = OffloadTrainerCallback(fields(tmp_path))
    kept: OffloadTrainerCallback | MixedTrainer
    if both == "callback and callback":
        kept = OffloadTrainerCallback(fields(tmp_path))
        trainer = plain(tmp_path)
        trainer.add_callback(kept)
    else:
        first = [callback] if both == "callback and mixin" else []
        given: dict[str, Any] = {"train_dataset": Tokens(), "callbacks": first, "offload": fields(tmp_path)}
        kept = trainer = MixedTrainer(llama(), arguments(tmp_path), **given)
    if both != "callback and mixin":
        trainer.add_callback(callback)
    for _ in range(2):
        with pytest.raises(eo.ConfigError, match="leave the others out"):
            trainer.train()
        assert module_call(trainer.model) is None
        assert spill_files(tmp_path) == []
    trainer.remove_callback(callback)
    assert same(trained(trainer), trained(plain(tmp_path)))
    assert moved(kept.offload) > 0


def test_a_copy_or_pickle_has_an_offload_of_its_own(tmp_path: Path) -> None:
    expected = trained(plain(tmp_path))
    own = eo.Offload(**fields(tmp_path))
    for given in OffloadTrainerCallback(**fields(tmp_path)), OffloadTrainerCallback(own):
        model = llama()
        trainer = plain(tmp_path, model)
        trainer.add_callback(given)
        Fails(model, error := ValueError("in forward"))
        with pytest.raises(ValueError, match="in forward"):
            trainer.train()  # what that leaves is copied neither
        forgets(error)
        for other in pickle.loads(pickle.dumps(given)), copy.deepcopy(given):
            assert other.offload is not given.offload
            assert other.offload.config == given.offload.config
            assert other.offload.stats().saved_tensors == 0
            trainer = plain(tmp_path)
            trainer.add_callback(other)
            assert same(trained(trainer), expected)
            assert moved(other.offload) > 0
        given.remove()
    own.close()
    assert spill_files(tmp_path) == [], "what copies have is closed by them"
