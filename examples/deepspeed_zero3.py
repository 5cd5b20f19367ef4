"""DeepSpeed's ZeRO-3 with offload: weights, gradients and optimizer are divided among the ranks, activations move away.

    torchrun --standalone --nproc-per-node 2 examples/deepspeed_zero3.py
    torchrun --standalone --nproc-per-node 2 examples/deepspeed_zero3.py --compare

Needs ``pip install deepspeed``; runs on CPU ranks with ``DS_ACCELERATOR=cpu`` in front. The context goes around the
call of the engine. What ZeRO-3 gathers of the weights for a layer is known as weights, and no byte of it moves.
"""

from __future__ import annotations

import deepspeed
from deepspeed.utils import safe_get_full_grad

from lm.model import LanguageModel
from lm.ranks import Rank, parse, run


def train(rank: Rank) -> None:
    options = rank.options
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": rank.device.type != "cpu"},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LanguageModel(options.layers, options.width, options.heads, options.sequence, checkpointing=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for batch in rank.data(seed=rank.number):
        with rank.forward():
            loss = engine(batch.inputs, batch.targets)
        engine.backward(loss)
        rank.note(loss, map(safe_get_full_grad, engine.parameters()))
        engine.step()
    engine.destroy()


if __name__ == "__main__":
    run(train, parse(__doc__))
