"""Plans with codecs: what travels is what they say, packed as eager code packs it, and no more of it than has to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eager_offload as eo
from tests.hazards.programs import assert_identical
from tests.planning.programs import CONFIG, gradients, planned, slow, trained
from tests.simulation.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")

#: Names of modules in which is rounded, by one that the code names, too.
NAMED = {"*": "lossless", "blocks.0": "bf16", "*.second": "int8"}
#: Where packing takes no time that would be seen.
QUICK = slow(memory=1e15)


class Block(nn.Module):
    """A norm in ``float32`` over ``bfloat16``, a mask that dropout draws, one of ``bool``, and what may be rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.gelu(self.first(self.norm(x.bfloat16().float()))), 0.1)
        return x + self.second(torch.where(y > 0.1, y, y * 0.5)) * y.mean()


class Blocks(nn.Module):
    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def blocks() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Blocks(), torch.randn(128, 32)


def coded(codec: Any, **fields: Any) -> eo.Plan:
    return planned(blocks, **{"device": QUICK, "config": {**CONFIG, "codec": codec}, **fields})


def codecs(plan: eo.Plan) -> set[str]:
    return {
        one.packing.codec
        for one, moves in zip(plan.problem.program.storages, plan.moves, strict=True)
        if moves and one.packing is not None
    }


def test_lossless_moves_fewer_bytes_from_the_first_step_on_and_changes_no_bit(tmp_path: Path) -> None:
    model, x = blocks()
    plain, plan = planned(blocks, device=QUICK, policy="max"), coded("lossless", policy="max")
    assert codecs(plan) == {"narrow", "bitmask"}
    assert plan.moved_bytes < 0.85 * plain.moved_bytes
    assert plan.step_seconds < plain.step_seconds
    assert ", packed as " in str(plan)
    plan.save(tmp_path / "plan.json")
    assert eo.Plan.load(tmp_path / "plan.json") == plan
    stats = trained(plan, model, x, tmp_path)
    assert stats.refused == {}
    assert stats.bytes_out < 0.9 * trained(plain, model, x, tmp_path).bytes_out
    assert set(stats.packed_bytes) == {"narrow", "bitmask"}


@pytest.mark.parametrize("codec", ["bf16", NAMED], ids=str)
def test_what_is_rounded_is_what_eager_code_rounds(codec: Any) -> None:
    model, x = blocks()
    machine, fields = slow(out=1e10, back=1e10, memory=1e15), {**CONFIG, "codec": codec}
    plan = coded(codec, device=machine, policy="max")
    assert codecs(plan) >= {"bf16", "bitmask", "narrow"} - ({"narrow"} if codec == "bf16" else set())
    assert ("int8" in codecs(plan)) == (codec is NAMED)
    found = []
    newest = plan.config.keep_last_bytes
    for given in ({"plan": plan}, {**fields, "keep_last_bytes": newest, "step_plans": False}):
        stage = Stage(machine)
        offload = stage.offload(**given)
        offload.skip_in(model)
        for _ in range(2):
            torch.manual_seed(0)
            stage.step(offload, model, x, lambda: model(x))
            found.append([one.grad for one in model.parameters()])
        stats = offload.stats(synchronize=True)
        assert stats.bytes_out > 0
        offload.close()
    torch.manual_seed(0)
    exact = gradients(model, lambda: model(x))[1:]
    for others in found[1:]:
        assert_identical(found[0], others)
    assert any(not torch.equal(one, other) for one, other in zip(found[0], exact, strict=True))


def test_a_budget_rounds_no_more_than_has_to_move() -> None:
    nothing, most = coded("bf16"), coded("bf16", policy="max")
    assert nothing.moved_bytes == 0
    assert codecs(nothing) == set()
    plan = coded("bf16", device_budget=(nothing.peak_bytes + most.peak_bytes) // 2)
    assert plan.fits
    assert 0 < plan.offloaded_bytes < 0.8 * most.offloaded_bytes
