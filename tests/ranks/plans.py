"""Plans: all ranks get one, and compute the same modules again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import eager_offload as eo
from tests.hazards.programs import assert_identical
from tests.planning.programs import CONFIG, Stack, slow
from tests.programs import leaf
from tests.ranks.launch import Ranks
from tests.ranks.tensor_parallel import Decoder, Losses, in_parallel, tokens_of
from tests.ranks.training import STEPS, steps

ROWS, WIDTH = 256, 32
#: On it moving is dear, and computing is not.
FAR = slow(out=1e6, back=1e6)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Stack(3, WIDTH, 4, 2, 64)


def sharded() -> nn.Module:
    made = model()
    for block in made.blocks:
        fully_shard(block)
    return fully_shard(made)


def trained(ranks: Ranks, made: nn.Module, offload: eo.Offload) -> list[object]:
    def step(number: int) -> Tensor:
        x = leaf(ROWS, WIDTH, seed=100 * number + ranks.rank, grad=False)
        with offload:
            loss: Tensor = made(x)
        loss.backward()
        return loss

    return steps(made, step)


def different_budgets_agree(ranks: Ranks) -> None:
    """The least of all budgets counts; what is computed again gathers its weights in every rank."""
    config = {"min_bytes": "1KiB", "max_inflight_bytes": "64KiB", "prefetch_bytes": "64KiB"}
    x = torch.zeros(ROWS, WIDTH)
    whole = eo.plan(model(), x, device=FAR, config=config)
    most, gap = whole.peak_bytes, (whole.peak_bytes - whole.least_budget) // 8
    own = most - (2 + ranks.rank) * gap  # the last rank has the least
    plan = eo.plan(model(), x, device=FAR, device_budget=own, recompute=True, config=config)
    assert plan.fits
    assert plan.device_budget == most - (1 + ranks.size) * gap
    reported = (plan.device_budget, plan.again, plan.moved_bytes, str(plan))
    assert ranks.gathered(reported) == [reported] * ranks.size
    assert plan.again

    expected = trained(ranks, sharded(), eo.Offload(enabled=False))
    made = sharded()
    offload = eo.Offload(tier="disk", disk_path=ranks.directory, min_bytes="1KiB", keep_last_bytes=0)
    with plan.apply(made):
        assert_identical(expected, trained(ranks, made, offload), "with modules that are computed again")
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.close()
    follows = eo.Offload(tier="disk", disk_path=ranks.directory, plan=plan)
    with plan.apply(made := sharded()):
        assert_identical(expected, trained(ranks, made, follows), "with the plan")
    follows.close()


def an_error_of_one_is_an_error_of_all(ranks: Ranks) -> None:
    x = torch.zeros(ROWS, WIDTH)
    last = ranks.rank == ranks.size - 1
    with pytest.raises(eo.ConfigError, match=r"device_budget=-1 is not accepted") as caught:
        eo.plan(model(), x, device=FAR, device_budget=-1 if last else "1GiB")
    assert str(caught.value).startswith(f"on rank {ranks.size - 1}: ") != last
    with pytest.raises(eo.ConfigError, match="device='h300' is not accepted"):
        eo.plan(model(), x, device="h300" if ranks.rank == 0 else FAR)


def different_models_are_an_error_of_all(ranks: Ranks) -> None:
    x = torch.zeros(ROWS, WIDTH)
    own = Stack(3 if ranks.rank else 2, WIDTH, 4, 2, 64)
    with pytest.raises(eo.PlanError, match=r"ranks plan different models: on rank 0 Stack of .*, on rank 1 Stack of "):
        eo.plan(own, x, device=FAR)
    frozen = model()
    next(frozen.parameters()).requires_grad_(ranks.rank == 0)
    with pytest.raises(eo.PlanError, match="ranks plan different models"):
        eo.plan(frozen, x, device=FAR)
    assert eo.plan(model(), x[: ROWS // (1 + ranks.rank)], device=FAR).fits, "inputs are rank 0's"


def sharded_models_are_planned_as_whole_ones(ranks: Ranks) -> None:
    x, adamw = torch.zeros(ROWS, WIDTH), torch.optim.AdamW
    whole, made = eo.plan(model(), x, device=FAR, mesh=(ranks.size,)), sharded()
    for optimizer in (adamw, adamw(made.parameters())):
        found = eo.plan(made, x, device=FAR, optimizer=optimizer)
        assert (found.live_bytes, found.states, found.shards) == (whole.live_bytes, whole.states, ranks.size)
    assert ranks.gathered(str(found)) == [str(found)] * ranks.size
    assert whole.peak_bytes < eo.plan(model(), x, device=FAR).peak_bytes


def tensor_parallelism_is_planned_as_it_runs(ranks: Ranks) -> None:
    """The bytes that move are those that are counted, and ranks that wait for each other have no lower peak, as torch's
    own tracker of memory has it; without ranks that wait, ``planning/test_sharding.py`` has the same peak."""
    mesh = init_device_mesh("cpu", (ranks.size // 2, 2), mesh_dim_names=("fsdp", "tp"))
    inputs = tuple(one.clone() for one in tokens_of(mesh["fsdp"].get_local_rank(), batch=16))

    def divided(*, shards: bool) -> nn.Module:
        model = in_parallel(Decoder(3), mesh["tp"], sequence=True)
        made = Losses(model)
        for module in [*model.layers, made] if shards else []:
            fully_shard(module, mesh=mesh["fsdp"])
        return made

    config = {**CONFIG, "min_bytes": "3KiB"}  # without the tokens, which the program holds
    fields: dict[str, Any] = {"device": slow(), "config": config}
    for shards in [False, True][: ranks.size // 2]:  # of one rank FSDP2 gathers nothing
        sizes = {"fsdp": ranks.size // 2, "tp": 2} if shards else {"tp": 2}
        plan = eo.plan(divided(shards=shards), inputs, policy="max", **fields)
        of_mesh = eo.plan(divided(shards=False), inputs, policy="max", mesh=sizes, **fields)
        assert (plan.live_bytes, plan.states, plan.shards, plan.parts) == (
            *(of_mesh.live_bytes, of_mesh.states, sizes.get("fsdp", 1), 2),
        )
        assert (plan.node, of_mesh.node) == (ranks.size if shards else 2,) * 2
        assert ranks.gathered(str(plan)) == [str(plan)] * ranks.size

        made = divided(shards=shards)
        tracker: Any = FSDPMemTracker(made) if shards else MemTracker()
        (tracker.track_inputs if shards else tracker.track_external)(*([inputs] if shards else [made, *inputs]))
        with tracker:
            made(*inputs).backward()
        (found,) = tracker.get_tracker_snapshot("peak").values()
        unmoved = eo.plan(divided(shards=shards), inputs, device_budget="1GiB", optimizer=None, **fields)
        assert unmoved.peak_bytes <= found["Total"]

        def run(offload: eo.Offload, made: nn.Module) -> list[object]:
            def step(_: int) -> Tensor:
                with offload:
                    loss: Tensor = made(*inputs)
                loss.backward()
                return loss

            return steps(made, step)

        expected = run(eo.Offload(enabled=False), divided(shards=shards))
        offload = eo.Offload(tier="disk", disk_path=ranks.directory, plan=plan)
        assert_identical(expected, run(offload, divided(shards=shards)), "with the plan")
        assert offload.stats(synchronize=True).bytes_out == STEPS * plan.moved_bytes > 0
        offload.close()


SCENARIOS: dict[str, Callable[[Ranks], None]] = {
    "different_budgets_agree": different_budgets_agree,
    "an_error_of_one_is_an_error_of_all": an_error_of_one_is_an_error_of_all,
    "different_models_are_an_error_of_all": different_models_are_an_error_of_all,
    "tensor_parallelism_is_planned_as_it_runs": tensor_parallelism_is_planned_as_it_runs,
    "sharded_models_are_planned_as_whole_ones": sharded_models_are_planned_as_whole_ones,
}
