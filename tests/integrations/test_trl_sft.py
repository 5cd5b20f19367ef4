"""TRL's SFTTrainer: our line in place of ``activation_offloading=True``, and LoRA with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import eager_offload as eo
from eager_offload.integrations.transformers import OffloadTrainerCallback, OffloadTrainerMixin
from tests.integrations.moving import fields, moved
from tests.integrations.tiny_transformers import checkpointing, llama, same, settings, trained

pytestmark = pytest.mark.usefixtures("one_thread")


class OffloadSFTTrainer(OffloadTrainerMixin, SFTTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sft(path: Path, kind: type[SFTTrainer] = SFTTrainer, *, lora: bool = False, **given: Any) -> SFTTrainer:
    texts = [" ".join(f"w{(line * 7 + word * word) % 61}" for word in range(30)) for line in range(12)]
    changes = given.pop("changes", {})
    if lora:
        given["peft_config"] = LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    return kind(
        llama(),
        SFTConfig(**settings(path, **{"bf16": False, **changes})),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        **given,
    )


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_parameters_are_equal_and_figures_beside_those_of_trl(lora: bool, tmp_path: Path) -> None:
    expected = trained(sft(tmp_path, lora=lora))
    for way in ("callback", "mixin"):
        offload = eo.Offload(**fields(tmp_path))
        if way == "callback":
            trainer = sft(tmp_path, lora=lora, callbacks=[OffloadTrainerCallback(offload)])
        else:
            trainer = sft(tmp_path, OffloadSFTTrainer, lora=lora, offload=offload)
        assert same(trained(trainer), expected)
        assert moved(offload) > 0
        assert offload.stats().foreign_hooks == 0
        first = trainer.state.log_history[0]
        assert first["offload/device_peak_mib"] > 0
        assert "mean_token_accuracy" in first


@pytest.mark.long
@pytest.mark.parametrize("reentrant", [False, True])
def test_lora_and_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    changes = checkpointing(use_reentrant=reentrant)
    expected = trained(sft(tmp_path, lora=True, changes=changes))
    offload = eo.Offload(**fields(tmp_path))
    trainer = sft(tmp_path, OffloadSFTTrainer, lora=True, changes=changes, offload=offload)
    assert same(trained(trainer), expected)
    assert moved(offload) > 0


@pytest.mark.parametrize("kind", [SFTTrainer, OffloadSFTTrainer])
def test_activation_offloading_is_warned_of(kind: type[SFTTrainer], tmp_path: Path) -> None:
    if kind is SFTTrainer:
        trainer = sft(tmp_path, callbacks=[OffloadTrainerCallback(fields(tmp_path))], changes={"max_steps": 1})
    else:
        trainer = sft(tmp_path, kind, offload=fields(tmp_path), changes={"max_steps": 1})
    # Only the flag: theirs asks for an accelerator when the trainer is made, and fails where there is none.
    trainer.args.activation_offloading = True
    with pytest.warns(RuntimeWarning, match=r"activation_offloading=True \(TRL\).*leave that option out"):
        trainer.train()
