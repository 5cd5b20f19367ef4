"""FSDP2: each rank has a part of every weight, and gathers the whole for as long as a layer runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from eager_offload import OffloadStats
from tests.ranks.launch import Ranks
from tests.ranks.training import ROWS, WIDTH, Around, Storages, batch, blocks, exact, local, steps


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
    **options: Any,
) -> list[OffloadStats]:
    """Trains a model each of whose blocks is sharded with these ``options``, with offload and without."""

    def program(offload: Around, weights: Storages) -> object:
        model = build()
        for index, block in enumerate(model):
            model[index] = fully_shard(wrapped(block), **options)
        fully_shard(model, **options)

        def step(number: int) -> Tensor:
            x = batch(ranks, number).requires_grad_()
            with offload:
                loss = model(x).float().square().mean()
            loss.backward()
            if not number:
                whole = gathered_storages(model)
                assert len(whole) > 2 * len(list(model.parameters()))
                weights.extend(whole)
            return loss

        return steps(model, step)

    return exact(ranks, program)


def bits_are_those_without_offload(ranks: Ranks) -> None:
    trained(ranks)


def weights_that_stay_gathered_until_backward(ranks: Ranks) -> None:
    trained(ranks, reshard_after_forward=False)


def mixed_precision(ranks: Ranks) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for reshard in (True, False):
        trained(ranks, mp_policy=policy, reshard_after_forward=reshard)


class Checkpointed(nn.Module):
    """A block whose insides are computed again in backward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def gradient_checkpointing(ranks: Ranks) -> None:
    for reentrant in (False, True):
        trained(ranks, wrapped=lambda block, reentrant=reentrant: Checkpointed(block, reentrant))


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
        policy = MixedPrecisionPolicy(param_dtype=precision)
        trained(ranks, wrapped=Adapted, mp_policy=policy)


def what_moves_is_what_moves_in_one_process(ranks: Ranks) -> None:
    """Byte for byte: nothing that was gathered is among it."""

    def alone(offload: Around, weights: Storages) -> object:
        model = blocks()

        def step(number: int) -> Tensor:
            with offload:
                loss = model(batch(ranks, number).requires_grad_()).float().square().mean()
            loss.backward()
            return loss

        weights += [parameter.untyped_storage() for parameter in model.parameters()]
        return steps(model, step)

    for single, sharded in zip(exact(ranks, alone), trained(ranks), strict=True):
        assert sharded.bytes_out == single.bytes_out >= 3 * 3 * ROWS * WIDTH * 4
        assert sharded.offloaded_bytes == single.offloaded_bytes


def _compiled(block: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(block, fullgraph=True)
    return compiled


def _compiled_in_place(block: nn.Module) -> nn.Module:
    block.compile(fullgraph=True, backend="aot_eager")
    return block


def compiled_blocks(ranks: Ranks) -> None:
    trained(replace(ranks, thorough=False), lambda: blocks(2), wrapped=_compiled)


def blocks_compiled_in_place(ranks: Ranks) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = {"mp_policy": policy, "reshard_after_forward": False}
    trained(replace(ranks, thorough=False), lambda: blocks(2), wrapped=_compiled_in_place, **options)
