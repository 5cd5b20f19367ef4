"""Modules that do the same when they are computed again train exactly, and the check shows nowhere."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import eager_offload as eo
from tests.hazards.programs import assert_identical
from tests.planning.programs import Linears, Net, Operators, batch, gradients, plan_of_blocks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plan() -> eo.Plan:
    return plan_of_blocks()


class Dropped(Linears):
    def between(self, h: Tensor) -> Tensor:
        return nn.functional.dropout(h, 0.3) * nn.functional.rrelu(h, training=True)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        found: Tensor = self.attention(h, h, h, need_weights=False)[0]
        return x + found


class Normalized(Linears):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(128)

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.norm(h).relu()
        return out


class InstanceNormalized(Linears):
    """Updates statistics by way of copies."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(8, track_running_stats=True)

    def between(self, h: Tensor) -> Tensor:
        return torch.as_tensor(self.norm(h.view(8, 8, 128))).view(h.shape)


class Recurrent(Linears):
    """Saves scratch memory, of which parts are never written."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(128, 128, 2)

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.memory(h.view(8, 8, 128))[0]
        return out.view(h.shape)


class Aligned(Linears):
    """So does its loss."""

    def between(self, h: Tensor) -> Tensor:
        targets, scores = torch.arange(1, 9).repeat(8, 1), h.view(8, 8, 128).log_softmax(-1)
        return h + nn.functional.ctc_loss(scores, targets, [8] * 8, [8, 1, 3, 2, 5, 7, 1, 4])


class Nested(Linears):
    def between(self, h: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda h: h.sin().exp().cos(), h, use_reentrant=False)
        return out * out.detach().tanh()


def keeps(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    is_kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.sum.default, torch.ops.aten.mul.Tensor)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


POLICY = partial(create_selective_checkpoint_contexts, keeps)


class Selective(Linears):
    def between(self, h: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda h: h.sin() * h.exp(), h, use_reentrant=False, context_fn=POLICY)
        return out.cos()


class InSelective(Net):
    """All of it is under a policy."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False, context_fn=POLICY)
        return out


class Odd(Linears):
    """Saves views, masks, indices, complex numbers, halves, infinities and nothing."""

    def between(self, h: Tensor) -> Tensor:
        mask = torch.where(h > 2, -torch.inf, 0.0)
        top = h.topk(3, 1).values.sum(1, keepdim=True)
        wave = torch.fft.rfft(h).abs()[:, :1].expand(-1, 128)
        with torch.no_grad():
            fixed = h.half().float()
        return (h + mask).softmax(1) * top + wave * fixed + h[:, :0].exp().sum() + h.t()[::2].exp().sum()


class Forces(Linears):
    """Has a gradient in forward, with a graph of its own."""

    def between(self, h: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(h.sin().square().sum(), h, create_graph=True)
        return h + force


ORDINARY = [Linears, Dropped, Attending, Normalized, InstanceNormalized, Recurrent, Aligned]
ORDINARY += [Nested, Selective, Odd, Forces]


@pytest.mark.parametrize("cast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("kind", ORDINARY)
def test_modules_that_do_the_same_once_more_train_exactly_and_are_checked(
    kind: type[nn.Module], cast: bool, plan: eo.Plan
) -> None:
    nets = [(Net if kind is not Selective else InSelective)(kind) for _ in range(2)]
    offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0)

    def step(model: nn.Module, around: Any) -> list[Tensor]:
        torch.manual_seed(2)

        def loss() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                found: Tensor = model(batch()).float()
            return found

        return gradients(model, loss, around)

    with warnings.catch_warnings(), plan.apply(nets[1], verify=True) as checks:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*copies within host memory")
        for _ in range(3):
            assert_identical(step(nets[0], None), step(nets[1], offload))
    assert checks.calls >= 6, "each block in each step"
    assert checks.inexact == 0
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.close()


def test_graphs_are_run_backward_in_any_order_and_more_than_once(plan: eo.Plan) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(2)
        losses = [model(batch()), model(batch() * 2), model(batch() * 3)]
        for loss in (losses[1], losses[0], losses[1], losses[2]):
            loss.backward(retain_graph=True)
        return [one.grad for one in model.parameters() if one.grad is not None]

    expected = run(Net(Dropped))
    with plan.apply(model := Net(Dropped), True) as checks:
        assert_identical(run(model), expected)
    assert checks.calls == 8


class Given(Linears):
    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        return super().forward(x) * given.unbind()[1].sum()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_among_the_arguments_are_of_one_kind(layout: torch.layout, plan: eo.Plan) -> None:
    def given() -> Tensor:
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)

    if layout is torch.strided:
        try:
            checkpoint(torch.clone, given(), use_reentrant=False)
        except RuntimeError as error:
            pytest.skip(f"checkpoints of this torch are given none: {error}")
    nets = [Net(Given, given) for _ in range(2)]
    with plan.apply(nets[1]) as checks:
        for _ in range(3):
            assert_identical(*(gradients(net, lambda net=net: net(batch())) for net in nets))
    assert checks.calls == 4


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Operators, Functions])
def test_modes_of_the_caller_see_nothing_of_the_checks(kind: type[Operators | Functions], plan: eo.Plan) -> None:
    seen = []
    for verify in (False, True):
        with plan.apply(model := Net(Dropped), verify), kind() as mode:
            model(batch()).backward()
        seen.append(mode.seen)
    assert seen[0] == seen[1] != Counter()
