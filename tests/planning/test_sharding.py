"""Plans of what FSDP2 leaves on one device: shards all the time, whole layers at their time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from tests.planning.programs import Made, Stack, planned

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


#: Bytes of a layer of `layers`, and of an eighth of it.
LAYER, EIGHTH = 4 * 16 * 16, 4 * 2 * 16


def layers(rows: int = 16) -> tuple[nn.Module, Tensor]:
    kept = [nn.Linear(16, 16, bias=False) for _ in range(2)]
    return nn.Sequential(*kept, nn.Linear(16, rows, bias=False)), torch.ones(2, 16)


def stack() -> tuple[Any, Tensor]:
    return Stack(3, 32, 4, 2, 64), torch.ones(16, 32)


def added(made: Made, **fields: Any) -> list[int]:
    """What lives more at each operator than in the step of the whole model; nothing moves."""
    plan, whole = planned(made, **fields), planned(made)
    assert plan.moved_bytes == whole.moved_bytes == 0
    return [more - less for more, less in zip(plan.living, whole.living, strict=True)]


def test_layers_are_whole_at_their_time_and_shards_else() -> None:
    """The operators are a product in each layer, the sum, the gradient of the sum, and the products of gradients."""
    shards = 3 * EIGHTH - 3 * LAYER
    expected = [
        *(shards + 2 * LAYER, shards + 2 * LAYER, shards + LAYER),  # a layer, and the next one; the last one alone
        *(shards, shards + LAYER),  # no layer; the last one is gathered for backward
        *(shards + 2 * LAYER, shards + 2 * LAYER),
        *[shards + 2 * LAYER + EIGHTH] * 2,  # the last one's gradient is reduced to an eighth, from a copy of it
        shards + LAYER + 2 * EIGHTH - LAYER,  # that has gone
    ]
    assert added(layers, mesh=(8,)) == expected
    assert added(layers, mesh=(2, 8)) == expected, "two replicas"


def test_shards_have_whole_rows_of_gradients_and_states() -> None:
    uneven = partial(layers, 10)  # over 8 devices that is 2 rows for some
    rows = 4 * 16 * (2 + 2 + 2)
    plan, whole = planned(uneven, mesh=(8,), optimizer=torch.optim.AdamW), planned(uneven)
    assert plan.living[3] == whole.living[3] - 4 * 16 * (16 + 16 + 10) + 3 * rows, "of parameters and both states"
    assert str(plan).startswith("Sequential, sharded over 8 devices, with 768 B of AdamW states on slow: ")
    accumulating, once = planned(uneven, mesh=(8,), accumulation=2), planned(uneven, mesh=(8,))
    assert accumulating.living[0] == once.living[0] + rows
    assert accumulating.peak_bytes < planned(uneven, accumulation=2).peak_bytes


class Checkpoints(nn.Module):
    """Has its blocks computed again, behind an operator of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.reentrant = nn.Linear(32, 32), Stack(3, 32, 4, 2, 64), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.inner.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.sum()


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_a_checkpoint_computes_again_are_whole_for_that(reentrant: bool) -> None:
    model = Checkpoints(reentrant)
    block = sum(one.nbytes for one in model.inner.blocks[0].parameters())
    root = sum(one.nbytes for one in model.first.parameters())
    plan = planned(lambda: (model, torch.ones(16, 32)), mesh=(1 << 20,))  # shards are a row
    rows = sum(one.nbytes // one.shape[0] for one in model.parameters())
    program = plan.problem.program
    whole = planned(lambda: (model, torch.ones(16, 32))).problem.program
    gathered = [
        less + 3 * block - more - rows for less, more in zip(program.other_bytes, whole.other_bytes, strict=True)
    ]
    assert root > 0
    assert set(gathered[: program.forward_ops]) == {0, block, 2 * block}
    backward = gathered[program.forward_ops :]
    assert max(backward) <= 2 * block + 3 * rows
    assert backward.count(0) <= 3, "all else belongs to a block"


def test_members_of_a_list_are_units_and_the_root_has_the_rest() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Linear(16, 16, bias=False)
            self.towers = nn.ModuleDict({"a": layers()[0], "b": layers()[0]})
            self.head = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            x = self.words(x)
            for tower in self.towers.values():
                x = x + tower(x)
            out: Tensor = self.head(x).sum()
            return out

    found = added(lambda: (Model(), torch.ones(2, 16)), mesh=(8,))
    assert found[0] == 8 * EIGHTH - 8 * LAYER + 2 * LAYER + 3 * LAYER, "the root's two, and the first tower"
    assert found[-1] < 0


# -- models that are sharded ------------------------------------------------------------------------------------------


def sharded(made: Made = stack, **options: Any) -> tuple[nn.Module, Tensor]:
    model, x = made()
    blocks: Any = model.blocks if isinstance(model, Stack) else model
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options), x


def figures(plan: eo.Plan) -> dict[str, Any]:
    """All but the name of the model's class."""
    return {**plan.to_dict(), "model": "", "living": plan.living}


@pytest.mark.usefixtures("one_rank")
def test_a_model_that_is_sharded_is_planned_as_the_whole_one_over_its_mesh() -> None:
    model, x = sharded()
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    adamw = torch.optim.AdamW
    expected = figures(planned(stack, mesh=(1,), optimizer=adamw))
    assert figures(planned(lambda: (model, x), optimizer=adamw)) == expected
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    model(x).backward()
    assert figures(planned(lambda: (model, x), optimizer=adamw)) == expected, "while it is trained"
    optimizer = adamw(model.parameters())
    optimizer.step()
    assert figures(planned(lambda: (model, x), optimizer=optimizer)) == expected


@pytest.mark.usefixtures("one_rank")
def test_units_that_are_not_freed_stay_from_forward_to_backward() -> None:
    frees, stays = (planned(partial(sharded, layers, reshard_after_forward=frees)) for frees in (True, False))
    assert [more - less for more, less in zip(stays.living, frees.living, strict=True)] == [
        *(0, LAYER, 2 * LAYER, 3 * LAYER, 2 * LAYER, LAYER, LAYER, 0, 0, 0),
    ]


@pytest.mark.usefixtures("one_rank")
def test_mixed_precision_is_planned_as_it_will_run() -> None:
    def lower() -> tuple[nn.Module, Tensor]:
        model, x = layers()
        return model.bfloat16(), x.bfloat16()

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    mixed, plain = planned(partial(sharded, layers, mp_policy=policy)), planned(partial(sharded, lower))
    more = [more - less for more, less in zip(mixed.living[1:], plain.living, strict=True)]  # the inputs are cast first
    of_forward, of_gradient = 3 * LAYER // 2 + 2 * 16 * 4, LAYER // 2  # shards in float32, and what was cast
    assert more == [of_forward] * 7 + [of_forward + of_gradient] * 2 + [of_forward + 2 * of_gradient]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reduced = planned(partial(sharded, layers, mp_policy=policy))
    assert [more - less for more, less in zip(reduced.living, mixed.living, strict=True)] == [
        *[0] * 8,
        *[of_gradient] * 3,  # what is reduced has twice the bytes
    ]


@pytest.mark.usefixtures("one_rank")
def test_what_is_sharded_otherwise_or_twice_is_an_error_that_says_what_to_give() -> None:
    model, x = sharded()
    with pytest.raises(eo.ConfigError, match=r"mesh=\(8,\) is not accepted, since the model is sharded already"):
        planned(lambda: (model, x), mesh=(8,))
    with pytest.raises(eo.ConfigError, match="steps=2 is not accepted for a model that is sharded"):
        planned(lambda: (model, x), steps=2, device="here")
    split = parallelize_module(layers()[0], init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    with pytest.raises(eo.PlanError, match=r"parameter '0\.weight' is a DTensor .* a model with the local shapes"):
        planned(lambda: (split, x))


@pytest.mark.parametrize("mesh", [8, "8", (), (0,), (-8,), (8.0,), (True,), (2, 2, 2), None])
def test_a_mesh_is_one_or_two_sizes(mesh: Any) -> None:
    if mesh is None:
        assert planned(layers, mesh=mesh).shards == 1
        return
    with pytest.raises(eo.ConfigError) as caught:
        planned(layers, mesh=mesh)
    assert f"mesh={mesh!r} is not accepted: mesh takes the sizes of a device mesh, such as (8,)" in str(caught.value)
