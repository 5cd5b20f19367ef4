"""Transformers' Trainer with compiled models: offload inside of the graphs, the same bits as compiled without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import eager_offload as eo
from eager_offload.integrations.transformers import OffloadTrainerCallback
from tests.integrations.moving import fields, moved
from tests.integrations.tiny_transformers import (
    MixedTrainer,
    Tokens,
    arguments,
    checkpointing,
    llama,
    offloading,
    same,
    trained,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compare(path: Path, way: str, **changes: Any) -> eo.Offload:
    """Trains with and without; what it was done with."""
    expected = trained(Trainer(llama(), arguments(path, **changes), train_dataset=Tokens()))
    torch._dynamo.reset()
    trainer, offload = offloading(way, path, **changes)
    assert same(trained(trainer), expected)
    assert moved(offload) > 0
    assert offload.stats().compiled_regions > 0
    assert offload.stats().foreign_hooks == 0
    return offload


@pytest.mark.long
@pytest.mark.parametrize("way", ["callback", "mixin"])
def test_torch_compile_of_the_arguments(way: str, tmp_path: Path) -> None:
    offload = compare(tmp_path, way, torch_compile=True, torch_compile_backend="aot_eager")
    assert offload.stats().compiled_regions == 3, "one graph a step: the context breaks none"


@pytest.mark.long
@pytest.mark.parametrize("way", ["callback", "mixin"])
def test_torch_compile_and_gradient_checkpointing(way: str, tmp_path: Path) -> None:
    compare(tmp_path, way, torch_compile_backend="aot_eager", **checkpointing(use_reentrant=False))


@pytest.mark.long
def test_the_mixin_goes_with_fullgraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "1")
    compare(tmp_path, "mixin", torch_compile_backend="aot_eager")


@pytest.mark.parametrize(
    ("variable", "option"),
    [
        ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "fullgraph"),
        ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "use_regional_compilation"),
    ],
)
def test_the_callback_refuses_what_is_compiled_around_it(
    variable: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    callbacks = [OffloadTrainerCallback(fields(tmp_path))]
    compiled = arguments(tmp_path, torch_compile_backend="aot_eager")
    trainer = Trainer(llama(), compiled, train_dataset=Tokens(), callbacks=callbacks)
    with pytest.raises(eo.ConfigError, match=rf"{option}=True.*OffloadTrainerMixin.*{variable}"):
        trainer.train()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_inductor_by_the_arguments_and_our_backend_in_place(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 1}
    compiled = arguments(tmp_path, torch_compile=True)
    assert compiled.torch_compile_backend == "inductor"
    expected = trained(Trainer(llama(**small), compiled, train_dataset=Tokens()))

    offload = eo.Offload(**fields(tmp_path))
    torch._dynamo.reset()
    assert same(trained(MixedTrainer(llama(**small), compiled, train_dataset=Tokens(), offload=offload)), expected)
    assert moved(offload) > 0
    assert offload.stats().compiled_regions == 3
    assert "unpinned" not in offload.stats().demotions

    torch._dynamo.reset()
    model = llama(**small)
    model.compile(backend="eager_offload", options=fields(tmp_path))
    serving = eo.Offload.serving(**fields(tmp_path))
    callbacks = [OffloadTrainerCallback(serving, log_metrics="all")]
    trainer = Trainer(model, arguments(tmp_path), train_dataset=Tokens(), callbacks=callbacks)
    assert same(trained(trainer), expected)
    assert moved(serving) > 0
    assert serving.stats().compiled_regions == 3
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert sum(entry["offload/saved_bytes"] for entry in steps) == serving.stats().saved_bytes > 0
    serving.close()
