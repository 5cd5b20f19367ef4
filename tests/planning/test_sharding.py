"""Plans of what FSDP2 leaves on one device: shards all the time, whole layers at their time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from tests.planning.programs import Made, Stack, planned
from tests.ranks.tensor_parallel import Decoder, Losses, in_parallel, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def group(backend: str, store: dist.Store, size: int) -> Iterator[None]:
    """This process is the first of ``size`` ranks; of a "fake" group the others do not exist."""
    dist.init_process_group(backend, store=store, rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    with group("gloo", dist.HashStore(), 1):  # type: ignore[attr-defined]  # torch declares it elsewhere
        yield


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
    return [more - less for more, less in zip(plan.live_bytes, whole.live_bytes, strict=True)]


def test_layers_are_whole_at_their_time_and_shards_else() -> None:
    """The operators are a product in each layer, the sum, the gradient of the sum, and the products of gradients."""
    shards = 3 * EIGHTH - 3 * LAYER
    expected = [
        shards + 2 * LAYER,  # a layer, and its copy as it was gathered
        *[shards + 3 * LAYER] * 2,  # the copy of the one before is there too until the next one has its parameters
        *[shards + LAYER] * 2,  # the last copy; the last layer, which is gathered for backward
        *[shards + 2 * LAYER] * 2,  # and the one before it
        *[shards + 2 * LAYER + EIGHTH] * 2,  # the last one's gradient is reduced to an eighth, from a copy of it
        shards + LAYER + 2 * EIGHTH - LAYER,  # that has gone
    ]
    assert added(layers, mesh=(8,)) == expected
    assert added(layers, mesh=(2, 8)) == expected, "two replicas"


def test_shards_have_whole_rows_of_gradients_and_states() -> None:
    uneven = partial(layers, 10)  # over 8 devices that is 2 rows for some
    rows = 4 * 16 * (2 + 2 + 2)
    plan, whole = planned(uneven, mesh=(8,), optimizer=torch.optim.AdamW), planned(uneven)
    assert plan.live_bytes[3] == whole.live_bytes[3] - 4 * 16 * (16 + 16) + 3 * rows, "of parameters and both states"
    assert (
        str(plan).splitlines()[1].startswith("Sequential, sharded over 8 devices, with 768 B of AdamW states on slow: ")
    )
    accumulating, once = planned(uneven, mesh=(8,), accumulation=2), planned(uneven, mesh=(8,))
    assert accumulating.live_bytes[0] == once.live_bytes[0] + rows
    assert accumulating.peak_bytes < planned(uneven, accumulation=2).peak_bytes


def test_members_of_a_list_are_units_and_the_root_has_the_rest() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Linear(16, 16, bias=False)
            self.towers = nn.ModuleDict({"a": layers()[0], "b": layers()[0]})
            self.head = nn.ModuleList([nn.Linear(16, 16, bias=False), nn.ReLU()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.words(x)
            for tower in self.towers.values():
                x = x + tower(x)
            out: Tensor = self.head[1](self.head[0](x)).sum()
            return out

    found = added(lambda: (Model(), torch.ones(2, 16)), mesh=(8,))
    assert found[0] == 8 * EIGHTH - 8 * LAYER + 2 * 2 * LAYER, "the root's two, and their copies"
    assert found[2] == 8 * EIGHTH - 8 * LAYER + 2 * LAYER + 2 * 3 * LAYER, "they, and the first tower, and its copy"


# -- models that are sharded ------------------------------------------------------------------------------------------


def sharded(made: Made = stack, **options: Any) -> tuple[nn.Module, Tensor]:
    model, x = made()
    blocks: Any = getattr(model, "blocks", model)
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options), x


def figures(plan: eo.Plan) -> dict[str, Any]:
    """All but the name of the model's class."""
    return {**plan.to_dict(), "model": "", "living": plan.live_bytes}


@pytest.mark.usefixtures("one_rank")
def test_a_model_that_is_sharded_is_planned_as_the_whole_one_over_its_mesh() -> None:
    model, x = sharded()
    adamw = torch.optim.AdamW
    expected = figures(planned(stack, mesh=(1,), optimizer=adamw))
    assert figures(planned(lambda: (model, x), optimizer=adamw)) == expected
    model(x).backward()
    assert figures(planned(lambda: (model, x), optimizer=adamw)) == expected, "while it is trained"
    optimizer = adamw(model.parameters())
    optimizer.step()
    assert figures(planned(lambda: (model, x), optimizer=optimizer)) == expected


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_model_whose_layers_are_compiled_in_place_trains_after_a_plan() -> None:
    model, x = sharded()
    expected = figures(planned(lambda: (model, x)))
    for block in model.blocks:  # type: ignore[union-attr]  # it has some
        block.compile(backend="eager")
    found = figures(planned(lambda: (model, x)))
    assert {**found, "is_compiled": False} == expected
    model(x).backward()
    assert all(one.grad is not None for one in model.parameters())


def test_parameters_that_are_gathered_are_an_error_that_says_how_to_go_on() -> None:
    with group("fake", FakeStore(), 8):
        model, x = layers()
        fully_shard(model)
        with torch.no_grad():
            model(x)
        with pytest.raises(eo.PlanError, match=r"has parameters gathered now, .* call reshard\(\)"):
            planned(lambda: (model, x))
        model.reshard()  # type: ignore[operator]  # of fully_shard
        assert planned(lambda: (model, x)).shards == 8


@pytest.mark.usefixtures("one_rank")
def test_units_that_are_not_freed_stay_from_forward_to_backward() -> None:
    frees, stays = (planned(partial(sharded, layers, reshard_after_forward=frees)) for frees in (True, False))
    assert [more - less for more, less in zip(stays.live_bytes, frees.live_bytes, strict=True)] == [
        *(0, LAYER, 2 * LAYER, 3 * LAYER, 2 * LAYER, LAYER, LAYER, 0, 0, 0),
    ]


class Blocks(nn.Module):
    """Five blocks between two layers of the root, which ``again`` has computed again, reentrantly or not."""

    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 256, bias=False), nn.ReLU(), nn.Linear(256, 32, bias=False)) for _ in range(5)
        )
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + (block(x) if self.again is None else checkpoint(block, x, use_reentrant=self.again))
        out: Tensor = self.last(x).sum()
        return out


def half_frozen() -> nn.Module:
    model = Blocks()
    model.blocks[:2].requires_grad_(False)
    return model


LOWER = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
REDUCED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("rows", [4, 256])
@pytest.mark.parametrize(
    ("made", "options"),
    [
        pytest.param(Blocks, {}, id="plain"),
        pytest.param(half_frozen, {}, id="half frozen"),
        pytest.param(partial(Blocks, False), {}, id="checkpointed"),
        pytest.param(partial(Blocks, True), {}, id="reentrantly checkpointed"),
        pytest.param(Blocks, {"mp_policy": LOWER}, id="mixed"),
        pytest.param(Blocks, {"mp_policy": REDUCED}, id="mixed, reduced in float32"),
    ],
)
def test_the_peak_is_that_of_a_real_step_with_eight_ranks(made: Any, options: dict[str, Any], rows: int) -> None:
    """As torch's own tracker of memory has it, within FSDP2 itself."""
    x = torch.ones(rows, 32)
    plans = [] if options else [planned(lambda: (made(), x), mesh=(8,), config=None)]
    with group("fake", FakeStore(), 8):
        model, _ = sharded(lambda: (made(), x), **options)
        plans.append(planned(lambda: (model, x), config=None))
        tracker = FSDPMemTracker(model)
        tracker.track_inputs((x,))
        with tracker:
            model(x).backward()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    for plan in plans:
        assert (plan.moved_bytes, plan.peak_bytes) == (0, found["Total"])


@pytest.mark.usefixtures("one_rank")
def test_what_is_sharded_otherwise_or_twice_is_an_error_that_says_what_to_give() -> None:
    model, x = sharded()
    with pytest.raises(eo.ConfigError, match=r"mesh=\(8,\) is not accepted, since the model is sharded already"):
        planned(lambda: (model, x), mesh=(8,))
    with pytest.raises(eo.ConfigError, match=r"parallelism divides the model among 1: call parallelize_module with it"):
        planned(layers, mesh={"fsdp": 8, "tp": 2})


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("sequence", [True, False])
def test_the_peak_is_that_of_a_real_step_with_tensor_parallelism(shards: int, sequence: bool) -> None:
    """A model that FSDP2 will shard, and one that it has sharded."""
    inputs = tuple(one.clone() for one in tokens_of(0, batch=16))
    mesh_of = {"fsdp": shards, "tp": 2}
    fields: dict[str, Any] = {"config": None, "optimizer": torch.optim.AdamW}
    with group("fake", FakeStore(), 2 * shards):
        mesh = init_device_mesh("cpu", (shards, 2), mesh_dim_names=("fsdp", "tp"))

        def divided() -> tuple[Any, Any]:
            return Losses(in_parallel(Decoder(3), mesh["tp"], sequence=sequence)), inputs

        whole, model = planned(lambda: (Losses(Decoder(3)), inputs), **fields), divided()[0]
        plan = planned(divided, mesh=mesh_of if shards > 1 else None, **fields)
        tracker: Any = MemTracker()
        if shards > 1:
            for module in [*model.model.layers, model]:
                fully_shard(module, mesh=mesh["fsdp"])
            assert figures(planned(lambda: (model, inputs), **fields)) == figures(plan)
            tracker = FSDPMemTracker(model)
            tracker.track_inputs(inputs)
        else:
            tracker.track_external(model, *inputs)
        with tracker:
            model(*inputs).backward()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    assert plan.states is not None
    assert whole.states is not None
    assert plan.states.nbytes * shards < 0.6 * whole.states.nbytes, "norms have no parts"
    assert (plan.shards, plan.parts, plan.node) == (shards, 2, 2 * shards)
    assert plan.peak_bytes - plan.states.nbytes == found["Total"]
    assert f"each node of {2 * shards} devices: a peak of " in str(plan)
