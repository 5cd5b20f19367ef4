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
from tests.integrations.training import exact, fields
from tests.integrations.transformers_training import ForMixin, llama, run, settings

pytestmark = pytest.mark.usefixtures("one_thread")


class OffloadSFTTrainer(OffloadTrainerMixin, SFTTrainer):
    """The mixin in front of the trainer."""


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sft(path: Path, given: Any = None, *, lora: bool = False, **changes: Any) -> SFTTrainer:
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
        llama(),
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


@pytest.mark.parametrize("kind", KINDS)
def test_activation_offloading_is_warned_of(kind: Any, tmp_path: Path) -> None:
    trainer = sft(tmp_path, kind(eo.Offload(**fields(tmp_path))), max_steps=1)
    # Only the flag: theirs asks for an accelerator when the trainer is made, and fails where there is none.
    trainer.args.activation_offloading = True
    with pytest.warns(RuntimeWarning, match=r"activation_offloading=True \(TRL\).*leave that option out"):
        trainer.train()
