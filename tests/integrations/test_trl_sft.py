"""TRL's SFTTrainer: our line in place of ``activation_offloading=True``, and LoRA with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.models
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import eager_offload as eo
from eager_offload.integrations import trl as ours
from eager_offload.integrations.transformers import OffloadTrainerCallback, OffloadTrainerMixin
from tests.integrations.training import exact, fields, told_by
from tests.integrations.transformers_training import ForMixin, llama, run, settings

pytestmark = pytest.mark.usefixtures("one_thread")


class OffloadSFTTrainer(OffloadTrainerMixin, SFTTrainer):
    """The mixin in front of the trainer."""


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sft(path: Path, given: Any = None, *, lora: bool = False, model: Any = None, **changes: Any) -> SFTTrainer:
    """A trainer that offloads in the way of ``given``."""
    texts = [" ".join(f"w{(line * 7 + word * word) % 61}" for word in range(30)) for line in range(12)]
    options: dict[str, Any] = {"peft_config": LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM")} if lora else {}
    kind = SFTTrainer
    if isinstance(given, ForMixin):
        kind, options["offload"] = OffloadSFTTrainer, given.config
    elif given is not None:
        options["callbacks"] = [given]
    torch.manual_seed(0)
    return kind(
        llama() if model is None else model,
        SFTConfig(**settings(path, **{"bf16": False, **changes})),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        **options,
    )


KINDS = [OffloadTrainerCallback, ForMixin]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_parameters_are_equal_and_figures_beside_those_of_trl(lora: bool, tmp_path: Path) -> None:
    expected = run(sft(tmp_path, lora=lora))
    for kind in KINDS:
        found = run(sft(tmp_path, kind(offload := eo.Offload(**fields(tmp_path))), lora=lora))
        exact(expected, found, offload)
        assert found.logged[0]["offload/device_peak_mib"] > 0
        assert "mean_token_accuracy" in found.owner.state.log_history[0]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """TRL's flag has this library underneath, which moves what it can to the disk."""
    for name, value in fields(tmp_path).items():
        monkeypatch.setenv(f"EAGER_OFFLOAD_{name.upper()}", str(value))
    ours.install()
    ours.install()
    yield
    ours.uninstall()
    ours.uninstall()
    assert trl.models.get_act_offloading_ctx_manager is not ours.get_act_offloading_ctx_manager


@pytest.mark.parametrize("installs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_flag_beside_ours_is_one_warning(
    kind: Any, installs: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if installs:
        request.getfixturevalue("installed")
    given = kind(eo.Offload(**fields(tmp_path)))
    trainer = sft(tmp_path, given, max_steps=4, activation_offloading=installs)
    # Only the flag: TRL's own asks for an accelerator when the trainer is made, and fails where there is none.
    trainer.args.activation_offloading = True
    (said,) = told_by(trainer.train)
    assert "activation_offloading=True (TRL) hides from us" in said
    assert "leave that option out" in said


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.usefixtures("installed")
def test_trls_own_flag_has_the_library_underneath(
    lora: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run(sft(tmp_path, lora=lora))
    trainer = sft(tmp_path, lora=lora, activation_offloading=True)
    offload = trainer.maybe_activation_offload_context
    assert isinstance(offload, eo.Offload)
    exact(expected, run(trainer), offload)
    stats = offload.stats()
    assert trainer.state.log_history[0]["offload/moved_mib"] > 0
    assert "eager_offload: " in capsys.readouterr().err
    assert stats.disk_bytes_peak > 0
    assert not list(tmp_path.glob("**/*.spill"))


@pytest.mark.usefixtures("installed")
def test_what_the_output_head_saves_stays_under_trls_flag() -> None:
    model, tokens = llama(), torch.arange(32).unsqueeze(0) % 61
    model(tokens, labels=tokens).loss.backward()
    expected = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    offload = trl.models.get_act_offloading_ctx_manager(model=model, use_pin_memory=False, max_fwd_stash_size=2)
    with offload:
        model(tokens, labels=tokens).loss.backward()
    assert all(map(torch.equal, expected, (one.grad for one in model.parameters())))
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0
    assert stats.kept_bytes["region"] > 0
    assert not offload.config.pin_memory
    offload.close()
    with pytest.warns(RuntimeWarning, match="Linear has no get_output_embeddings"):
        trl.models.get_act_offloading_ctx_manager(torch.nn.Linear(4, 4)).close()


@pytest.mark.usefixtures("installed")
def test_trainers_of_one_model_share_an_offload_and_the_next_closes_what_a_failed_one_left(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise ZeroDivisionError

    failing = sft(tmp_path, Fails(), activation_offloading=True)
    offload, model = failing.maybe_activation_offload_context, failing.model
    with pytest.raises(ZeroDivisionError):
        failing.train()
    assert offload.stats(synchronize=True).bytes_out > 0
    assert trl.models.get_act_offloading_ctx_manager(model) is offload
    assert trl.models.get_act_offloading_ctx_manager(llama()) is not offload
    following = sft(tmp_path, activation_offloading=True, model=model)
    assert following.maybe_activation_offload_context is offload
    before = offload.stats().bytes_out
    following.train()
    assert offload.stats().bytes_out > before
    assert following.state.log_history[0]["offload/moved_mib"] > 0
    assert not list(tmp_path.glob("**/*.spill"))
