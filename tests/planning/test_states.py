"""The states of an optimizer count: as many bytes as a real step of it makes, and none twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import eager_offload as eo
from tests.planning.programs import planned

pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def layers() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)), torch.ones(2, 8)


def bytes_of(states: Iterable[dict[str, Any]]) -> int:
    tensors = [one for state in states for one in state.values() if isinstance(one, Tensor)]
    return sum(one.nbytes for one in tensors if one.dim())  # not the number of steps


def stepped(make: Make) -> tuple[nn.Module, Optimizer]:
    """A model and its optimizer after a real step."""
    model, x = layers()
    optimizer = make(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    return model, optimizer


def counted(optimizer: Any, made: Callable[[], tuple[nn.Module, Tensor]] = layers) -> int:
    """The bytes that ``optimizer`` adds to all of a step."""
    plan, bare = planned(made, optimizer=optimizer), planned(made)
    (added,) = {more - less for more, less in zip(plan.live_bytes, bare.live_bytes, strict=True)}
    assert plan.states is not None
    assert plan.states.nbytes == added
    return added


@pytest.mark.parametrize(
    "make",
    [
        optim.AdamW,
        optim.SGD,
        optim.Adagrad,
        optim.NAdam,
        optim.Rprop,
        optim.Adafactor,
        partial(optim.AdamW, fused=True),
        partial(optim.Adam, amsgrad=True, foreach=True),
        partial(optim.SGD, momentum=0.9),
        partial(optim.RMSprop, momentum=0.9, centered=True),
    ],
    ids=str,
)
def test_states_are_those_of_a_real_step(make: Make) -> None:
    _, optimizer = stepped(make)
    assert counted(make) == bytes_of(optimizer.state.values())


def test_a_step_without_a_word_has_the_states_of_adamw() -> None:
    model, x = layers()
    plan, bare = eo.plan(model, x, device="h200"), eo.plan(model, x, device="h200", optimizer=None)
    parameters = sum(one.nbytes for one in model.parameters())
    assert plan.peak_bytes == bare.peak_bytes + 2 * parameters
    assert str(plan).splitlines()[1].startswith("Sequential with 3.8 KiB of AdamW states on h200: ")
    assert str(bare).splitlines()[1].startswith("Sequential without optimizer states on h200: ")
    assert plan.to_dict()["states"] == {"name": "AdamW", "nbytes": 2 * parameters}


def test_frozen_weights_have_neither_states_nor_gradients() -> None:
    def frozen() -> tuple[nn.Module, Tensor]:
        model, x = layers()
        return model.requires_grad_(False).append(nn.Linear(4, 4)), x

    assert counted(optim.AdamW, frozen) == 2 * 4 * (4 * 4 + 4)
    model, x = frozen()
    assert counted(optim.AdamW(model.parameters()), lambda: (model, x)) == 2 * 4 * (4 * 4 + 4)
    assert planned(frozen, accumulation=2).live_bytes[0] - planned(frozen).live_bytes[0] == 4 * (4 * 4 + 4), "gradients"


def test_an_optimizer_counts_the_states_that_it_has_and_those_that_it_will_have() -> None:
    model, optimizer = stepped(optim.AdamW)
    adam, momentum = optim.AdamW, partial(optim.SGD, momentum=0.9)
    x = torch.ones(2, 8)
    there = bytes_of(optimizer.state.values())
    assert counted(optimizer, lambda: (model, x)) == there, "and not twice"
    optimizer.add_param_group({"params": [more := nn.Parameter(torch.ones(3, 5))], "amsgrad": True})
    model.register_parameter("more", more)
    assert counted(optimizer, lambda: (model, x)) == there + 3 * 60
    assert counted(adam(model.parameters(), amsgrad=True), lambda: (model, x)) == 3 * (there // 2 + 60)
    assert counted(momentum(model.parameters()), lambda: (model, x)) == there // 2 + 60


def test_an_optimizer_is_as_it_was() -> None:
    model, x = layers()
    optimizer = optim.AdamW(model.parameters())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    called: list[object] = []
    optimizer.register_step_pre_hook(lambda *given: called.append(given))
    before = [dict(group) for group in optimizer.param_groups]
    numbers = [one.detach().clone() for one in model.parameters()]
    counted(optimizer, lambda: (model, x))
    assert not optimizer.state
    assert not called
    assert optimizer.param_groups == before
    assert all(one.grad is None for one in model.parameters())
    assert all(map(torch.equal, numbers, model.parameters()))
    optimizer.step()
    scheduler.step()


def test_bytes_that_are_named_are_in_place_of_those_of_an_optimizer() -> None:
    plan, bare = planned(layers, optimizer=optim.AdamW, optimizer_bytes="1MiB"), planned(layers)
    assert plan.peak_bytes == bare.peak_bytes + (1 << 20)
    assert str(plan).splitlines()[1].startswith("Sequential with 1.0 MiB of optimizer states on slow: ")
    assert planned(layers, optimizer=optim.LBFGS, optimizer_bytes=0).peak_bytes == bare.peak_bytes


def test_gradients_that_accumulate_are_there_from_the_beginning() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), torch.ones(2, 8)
    plan, once = (planned(lambda: (model, x), accumulation=number) for number in (4, 1))
    added = [more - less for more, less in zip(plan.live_bytes, once.live_bytes, strict=True)]
    assert added[0] == 2 * 256
    assert added == sorted(added, reverse=True)
    assert added[-1] == 256, "the last one is added to what is there behind the last operator"


class Wraps(Optimizer):
    """Has another optimizer step."""

    def __init__(self, inside: Optimizer) -> None:
        super().__init__(inside.param_groups, {})
        self.inside = inside

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # it returns no loss
        self.inside.step()


def test_an_optimizer_that_wraps_another_one_is_not_stepped() -> None:
    model, x = layers()
    inside = optim.AdamW(model.parameters())
    with pytest.raises(eo.ConfigError, match="since it wraps another one: give that, or optimizer_bytes"):
        planned(lambda: (model, x), optimizer=Wraps(inside))
    assert not inside.state
