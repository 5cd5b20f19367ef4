"""Tensor parallelism: each rank has a part of every matrix; activations are ``DTensor``s, or parts of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.programs import leaf
from tests.ranks.fsdp import gathered_storages
from tests.ranks.launch import Ranks
from tests.ranks.training import STEPS, WIDTH, Around, Block, Storages, exact, steps

TOKENS, CLASSES = 16, 64


class Attention(nn.Module):
    """Whose heads are divided among the ranks."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.width = WIDTH // heads
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(self.norm(x)))


class Decoder(nn.Module):
    """A small language model."""

    def __init__(self, layers: int = 2, checkpointing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Losses(nn.Module):
    """A language model and its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


def tokens_of(step: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """The same in every rank that works on the same part of the batch."""
    drawn = leaf(batch, TOKENS + 1, seed=step, grad=False).mul(1e4).long().remainder(CLASSES)
    return drawn[:, :-1], drawn[:, 1:]


def in_parallel(model: Decoder, mesh: DeviceMesh, *, sequence: bool = False, whole_logits: bool = True) -> Decoder:
    """Divides the weights of ``model``.

    Args:
        sequence: activations between the matrices are divided along the sequence too.
        whole_logits: every rank has the logits of all classes in the end.
    """
    between = Shard(1) if sequence else Replicate()
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Replicate() if whole_logits else Shard(-1),
            use_local_output=whole_logits,
        ),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        plan = {
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
            "attention.out": RowwiseParallel(output_layouts=between),
            "mlp.up": ColwiseParallel(input_layouts=between),
            "mlp.down": RowwiseParallel(output_layouts=between),
        }
        if sequence:
            plan |= {"norm": SequenceParallel(), "mlp.norm": SequenceParallel()}
        parallelize_module(layer, mesh, plan)
    return model


def trained(
    ranks: Ranks,
    *,
    sequence: bool = True,
    parallel_loss: bool = False,
    checkpointing: bool = False,
    precision: torch.dtype | None = None,
) -> None:
    """Trains a model that is divided among the ranks, with offload and without.

    Args:
        precision: weights are divided in a second dimension too: among two ranks by columns, each part among two by
            rows, which FSDP gathers in this precision.
    """
    shape = (1 if precision is None else 2, ranks.size if precision is None else ranks.size // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)

    def program(offload: Around, weights: Storages) -> object:
        model = Decoder(2 if ranks.thorough or precision else 1, checkpointing)
        in_parallel(model, mesh["tensor"], sequence=sequence, whole_logits=not parallel_loss)
        for module in [] if precision is None else [*model.layers, model]:
            fully_shard(module, mesh=mesh["data"], mp_policy=policy)

        def step(number: int) -> Tensor:
            tokens, targets = tokens_of(number + STEPS * mesh["data"].get_local_rank())
            with loss_parallel() if parallel_loss else nullcontext():
                with offload:
                    loss: Tensor = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
                loss.backward()
            if not number:
                weights.extend(gathered_storages(model))
            assert isinstance(loss, DTensor) == parallel_loss
            return loss.full_tensor() if isinstance(loss, DTensor) else loss

        return steps(model, step)

    exact(ranks, program)


def together_with_fsdp(ranks: Ranks) -> None:
    for precision in (torch.float32, torch.bfloat16):
        trained(ranks, precision=precision)


SCENARIOS: dict[str, Callable[[Ranks], None]] = {
    "bits_are_those_without_offload": partial(trained, sequence=False),
    "a_divided_sequence": trained,
    "a_divided_loss": partial(trained, parallel_loss=True),
    "gradient_checkpointing": partial(trained, checkpointing=True),
    "together_with_fsdp": together_with_fsdp,
}
