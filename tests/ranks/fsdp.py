"""FSDP2: each rank has a part of every weight, and gathers the whole for as long as a layer runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from eager_offload import OffloadStats
from tests.ranks.launch import Ranks
from tests.ranks.training import ROWS, WIDTH, Around, Checkpointed, Storages, batch, blocks, exact, local, steps


def gathered_storages(model: nn.Module) -> Storages:
    """The storages of all weights as they are gathered, and of what this rank has of them.

    They stay the same from the first forward on: they are emptied and filled again.
    """
    found = [local(parameter).untyped_storage() for parameter in model.parameters()]
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
            for parameter in group.fsdp_params:
                found += [output.untyped_storage() for output in parameter.all_gather_outputs]
                found.append(local(parameter._unsharded_param).untyped_storage())
    return found


def trained(
    ranks: Ranks,
    build: Callable[[], nn.Sequential] = blocks,
    wrapped: Callable[[nn.Module], nn.Module] = lambda block: block,
    shard: Callable[..., nn.Module] = fully_shard,
    **options: Any,
) -> list[OffloadStats]:
    """Trains a model each of whose blocks is sharded with these ``options``, with offload and without."""

    def program(offload: Around, weights: Storages) -> object:
        model = build()
        for index, block in enumerate(model):
            model[index] = shard(wrapped(block), **options)
        shard(model, **options)

        def step(number: int) -> Tensor:
            x = batch(ranks, number).requires_grad_()
            with offload:
                loss = model(x).float().square().mean()
            loss.backward()
            if not number:
                whole = gathered_storages(model)
                assert shard is not fully_shard or len(whole) > 2 * len(list(model.parameters()))
                weights.extend(whole)
            return loss

        return steps(model, step)

    return exact(ranks, program)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def mixed_precision(ranks: Ranks) -> None:
    for reshard in (True, False):
        trained(ranks, mp_policy=MIXED, reshard_after_forward=reshard)


def gradient_checkpointing(ranks: Ranks) -> None:
    for reentrant in (False, True):
        trained(ranks, wrapped=partial(Checkpointed, reentrant=reentrant))


class Adapted(nn.Module):
    """A frozen block beside a small one that is trained."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.base = block.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def frozen_weights_beside_trained_ones(ranks: Ranks) -> None:
    for precision in (torch.float32, torch.bfloat16):
        trained(ranks, wrapped=Adapted, mp_policy=MixedPrecisionPolicy(param_dtype=precision))


def what_moves_is_what_moves_in_one_process(ranks: Ranks) -> None:
    """Byte for byte: nothing that was gathered is among it."""
    for single, sharded in zip(trained(ranks, shard=lambda module, **_: module), trained(ranks), strict=True):
        assert sharded.bytes_out == single.bytes_out >= 3 * 3 * ROWS * WIDTH * 4
        assert sharded.offloaded_bytes == single.offloaded_bytes


def compiled(ranks: Ranks, how: Callable[[nn.Module], nn.Module], **options: Any) -> None:
    trained(replace(ranks, thorough=False), partial(blocks, 2), wrapped=how, **options)


def in_place(block: nn.Module) -> nn.Module:
    block.compile(fullgraph=True, backend="aot_eager")
    return block


SCENARIOS: dict[str, Callable[[Ranks], object]] = {
    "bits_are_those_without_offload": trained,
    "what_moves_is_what_moves_in_one_process": what_moves_is_what_moves_in_one_process,
    "weights_that_stay_gathered_until_backward": partial(trained, reshard_after_forward=False),
    "mixed_precision": mixed_precision,
    "gradient_checkpointing": gradient_checkpointing,
    "frozen_weights_beside_trained_ones": frozen_weights_beside_trained_ones,
    "compiled_blocks": partial(compiled, how=partial(torch.compile, fullgraph=True)),
    "blocks_compiled_in_place": partial(
        compiled,
        how=in_place,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        reshard_after_forward=False,
    ),
}
