"""Plans: all ranks get one, and compute the same modules again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import eager_offload as eo
from tests.hazards.programs import assert_identical
from tests.planning.programs import Stack, slow
from tests.programs import leaf
from tests.ranks.launch import Ranks
from tests.ranks.training import steps

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
        assert (found.living, found.states, found.shards) == (whole.living, whole.states, ranks.size)
    assert ranks.gathered(str(found)) == [str(found)] * ranks.size
    assert whole.peak_bytes < eo.plan(model(), x, device=FAR).peak_bytes


def levels_that_alternate(ranks: Ranks) -> None:
    """Blocks that are computed again whole, but for some results, and not at all, in shards."""
    config = {"min_bytes": "1KiB", "max_inflight_bytes": "64KiB", "prefetch_bytes": "64KiB"}
    x, levels = torch.zeros(ROWS, WIDTH), set[int]()
    expected = trained(ranks, sharded(), eo.Offload(enabled=False))
    whole = eo.plan(made := sharded(), x, device=FAR, device_budget=1, recompute=True, config=config)
    low, high = whole.least_budget, whole.fixed_ways()[0].peak_bytes
    alternating = 0
    for eighths in (4, 6, 7):
        plan = eo.plan(
            made, x, device=FAR, device_budget=low + (high - low) * eighths // 8, recompute=True, config=config
        )
        own = [sum(len(one.numbers) for one in kept) for kept in plan.kept]
        alternating += len({*own, *range(len(plan.again) - len(made.blocks), 0)}) > 1
        levels.update(own)
        offload = eo.Offload(tier="disk", disk_path=ranks.directory, min_bytes="1KiB", keep_last_bytes=0)
        with plan.apply(made := sharded()):
            assert_identical(expected, trained(ranks, made, offload))
        assert offload.stats(synchronize=True).bytes_out > 0
        offload.close()
    assert len(levels) > 2
    assert alternating > 1


SCENARIOS: dict[str, Callable[[Ranks], None]] = {
    "different_budgets_agree": different_budgets_agree,
    "an_error_of_one_is_an_error_of_all": an_error_of_one_is_an_error_of_all,
    "different_models_are_an_error_of_all": different_models_are_an_error_of_all,
    "sharded_models_are_planned_as_whole_ones": sharded_models_are_planned_as_whole_ones,
    "levels_that_alternate": levels_that_alternate,
}
