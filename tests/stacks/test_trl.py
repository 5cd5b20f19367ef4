"""TRL's other trainers: those with a flag for offloading, and those of rewards, which take the mixin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import LlamaConfig, LlamaForSequenceClassification

import eager_offload as eo
from eager_offload.integrations.transformers import OffloadTrainerMixin
from tests.integrations.test_trl_sft import installed, tokenizer
from tests.integrations.training import exact, fields, spill_files
from tests.integrations.transformers_training import llama, run, settings

__all__ = ["installed"]

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("transformers"), pytest.mark.usefixtures("one_thread")]


def texts(first: int, number: int = 12) -> list[str]:
    return [" ".join(f"w{(line * 7 + word * first) % 61}" for word in range(16)) for line in range(number)]


def classifier() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=64, num_labels=1, pad_token_id=0, **sizes))


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(one) % 7) for one in completions]


PAIRS = {"prompt": texts(3), "chosen": texts(5), "rejected": texts(7)}
#: By trainer: the model, the columns of the data, and options.
FLAGGED: dict[str, tuple[Any, dict[str, Any]]] = {
    "DPO": (llama, PAIRS),
    "KTO": (llama, {"prompt": texts(3), "completion": texts(5), "label": [True, False] * 6}),
    "Reward": (classifier, {name: PAIRS[name] for name in ("chosen", "rejected")}),
}


@pytest.mark.parametrize("name", FLAGGED)
@pytest.mark.usefixtures("installed")
def test_under_the_flag_parameters_are_equal_bytes_move_and_no_file_is_left(name: str, tmp_path: Path) -> None:
    model, columns = FLAGGED[name]

    def trainer(flag: bool) -> Any:
        torch.manual_seed(0)
        return getattr(trl, f"{name}Trainer")(
            model(),
            args=getattr(trl, f"{name}Config")(**settings(tmp_path, bf16=False, activation_offloading=flag)),
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer(),
            **({} if name == "Reward" else {"ref_model": llama()}),
        )

    expected, offloaded = run(trainer(False)), trainer(True)
    offload = offloaded.maybe_activation_offload_context
    assert isinstance(offload, eo.Offload)
    exact(expected, run(offloaded), offload)
    assert offloaded.state.log_history[0]["offload/moved_mib"] > 0
    assert spill_files(tmp_path) == []


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_with_the_mixin_trainers_of_rewards_are_equal(name: str, tmp_path: Path) -> None:
    plain = getattr(trl, f"{name}Trainer")
    mixed = type(f"Offload{name}Trainer", (OffloadTrainerMixin, plain), {"offload_config": fields(tmp_path)})

    def trainer(kind: Any) -> Any:
        torch.manual_seed(0)
        # Without beta: with one, RLOO loads another model for reference, by a name.
        own = {"num_generations": 2, "max_completion_length": 8, "bf16": False, "beta": 0.0}
        return kind(
            llama(),
            reward_funcs=length,
            args=getattr(trl, f"{name}Config")(**settings(tmp_path, **own)),
            train_dataset=Dataset.from_dict({"prompt": texts(3)}),
            processing_class=tokenizer(),
        )

    expected, offloaded = run(trainer(plain)), trainer(mixed)
    exact(expected, run(offloaded), offloaded.offload)
    assert offloaded.state.log_history[0]["offload/moved_mib"] > 0
    assert spill_files(tmp_path) == []
