"""H02, H03, H08, H20: many graphs at once, backward more than once, and in orders that were not foreseen."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hazards.backends import Backend, assert_settled, offloader_of, tracked_storages
from tests.hazards.blocks import gradients
from tests.hazards.functions import as_given, custom
from tests.hazards.probes import Transfers
from tests.hazards.programs import (
    REGIMES,
    Around,
    assert_moved,
    leaf,
    one_step,
    same_gradients,
)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))


def steps(script: str) -> Callable[[Around], object]:
    """A program of graphs of one network: ``(`` and ``)`` enter and leave, ``2`` is the second's forward, ``-2`` its
    backward, and ``-2r`` one that retains the graph. All gradients that there are behind each are compared."""

    def program(offload: Around) -> object:
        model, losses, seen = network(), dict[str, Tensor](), []
        for word in re.findall(r"[()]|-?\d+r?", script):
            if word == "(":
                offload.__enter__()
            elif word == ")":
                offload.__exit__(None, None, None)
            elif word.startswith("-"):
                losses[word[1:].rstrip("r")].backward(retain_graph=word.endswith("r"))
                seen += [gradient.clone() for gradient in gradients(model)]
            else:
                losses[word] = model(leaf(16, 32, seed=int(word))).square().mean()
        return [loss.detach() for loss in losses.values()], seen

    return program


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("(1)(2) -1", id="the backward of the first alone"),
        pytest.param("(1 2) -1 -2", id="one context around two forwards"),
        pytest.param("((1) 2) -1 -2", id="a context within itself"),
    ],
)
def test_h02_two_graphs_at_once(script: str, backend: Backend) -> None:
    same_gradients(steps(script), backend)


@pytest.mark.sampled(5, quick=True)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_h02_three_graphs_in_any_order(order: tuple[int, ...], backend: Backend) -> None:
    same_gradients(steps("(0)(1)(2)" + "".join(f" -{index}" for index in order)), backend)


def test_h02_the_backward_of_one_in_the_middle_of_the_forward_of_the_next(backend: Backend) -> None:
    def program(offload: Around) -> object:
        model = network()
        with offload:
            first = model(leaf(16, 32, seed=1)).square().mean()
        with offload:
            half = model[:3](leaf(16, 32, seed=2))
            first.backward()
            second = model[3:](half).square().mean()
        del half
        second.backward()
        return gradients(model)

    same_gradients(program, backend)


def test_h03_buffer_reuse_keeps_the_earlier_graph_exact(backend: Backend) -> None:
    same_gradients(steps("(1)(2) -2 (3) -1 -3"), backend)


def test_h03_slots_that_others_gave_back_are_used_again_while_an_earlier_graph_waits(backend: Backend) -> None:
    with Transfers(backend.runtime) as transfers:
        script = " ".join(f"({seed}) -{seed}" for seed in range(2, 12))
        same_gradients(steps(f"(1) {script} -1"), backend, regimes=REGIMES[:1])
    regions = [moved.region for moved in transfers.out]
    assert len(set(regions)) < len(regions) / 2, "no slot was ever used again"


@pytest.mark.parametrize("hold", [True, False], ids=["held", "dropped in between"])
def test_h08_saved_tensors_read_again_and_again_in_one_backward(hold: bool, backend: Backend) -> None:
    @one_step
    def program() -> Sequence[object]:
        x, seen = leaf(32, 32), []

        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            held = []
            for _ in range(3):
                read = ctx.saved_tensors
                seen.extend(map(as_given, read))
                held += [read] if hold else []
            return gradient

        return custom(x, backward, (x * 3).detach(), (x * 5).detach().t()), x, seen

    for stats in same_gradients(program, backend):
        if hold:
            assert stats.bytes_in <= stats.bytes_out, "what is held is served again, not brought back again"


@pytest.mark.parametrize("times", [2, 5])
def test_h08_a_graph_that_is_retained_goes_backward_again(times: int, backend: Backend) -> None:
    same_gradients(steps("(1)" + " -1r" * (times - 1) + " -1"), backend)


def test_h08_a_retained_graph_accumulates_nothing(backend: Backend) -> None:
    offload, model, held = backend.offload(prefetch_bytes=1 << 14), network(), []
    with offload:
        loss = model(leaf(16, 32, seed=1)).square().mean()
    for _ in range(20):
        loss.backward(retain_graph=True)
        offload.stats(synchronize=True)
        lane = offloader_of(offload)
        held.append((lane.resident_bytes, lane.tiers[0].used_bytes, tracked_storages(offload), lane.census().in_flight))
    assert len(set(held[1:])) == 1, held
    del loss
    assert_moved(assert_settled(offload))


@pytest.mark.parametrize("inside", [False, True], ids=["behind the context", "inside of it"])
def test_h08_double_backward(inside: bool, backend: Backend) -> None:
    def program(offload: Around) -> object:
        x, w = leaf(32, 32), leaf(32, 32, seed=2)
        with offload:
            y = ((x * 2).tanh() @ w).sin().sum()
            if inside:
                (first,) = torch.autograd.grad(y, x, create_graph=True)
                penalty = first.square().sum()
        if not inside:
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            penalty = first.square().sum()
        second = torch.autograd.grad(penalty, [x, w], retain_graph=True)
        again = torch.autograd.grad(penalty + y, [x, w])
        return y.detach(), first.detach(), second, again

    # What is saved last before a backward in the context stays.
    same_gradients(program, backend, moved=0.7 if inside else 0.9)


class Branches:
    """Eight branches of one forward, each with a graph of its own."""

    def __init__(self, offload: Around) -> None:
        self.leaves = [leaf(32, 32, seed=seed) for seed in range(8)]
        with offload:
            self.losses = [(x * 2).tanh().exp().sin().sum() for x in self.leaves]

    def backward(self, *order: int) -> list[Tensor | None]:
        for index in order:
            self.losses[index].backward()
        return [x.grad for x in self.leaves]


ORDERS = {
    "as packed": (0, 1, 2, 3, 4, 5, 6, 7),
    "reversed": (7, 6, 5, 4, 3, 2, 1, 0),
    "shuffled": (3, 6, 0, 7, 1, 5, 2, 4),
    "from the middle": (4, 3, 5, 2, 6, 1, 7, 0),
    "half of it": (7, 5, 3, 1),
    "the first alone": (0,),
}


@pytest.mark.parametrize("prefetch", [0, 1 << 12, 1 << 14, 1 << 20])
@pytest.mark.parametrize("order", ORDERS)
def test_h20_an_order_that_is_not_the_reverse_of_packing(order: str, prefetch: int, backend: Backend) -> None:
    def program(offload: Around) -> object:
        return Branches(offload).backward(*ORDERS[order])

    for stats in same_gradients(program, backend, regimes=REGIMES[:1], prefetch_bytes=prefetch):
        assert stats.bytes_in <= 2 * stats.bytes_out, "a wrong hint costs a reload, not many"


@pytest.mark.parametrize("prefetch", [0, 1 << 12, 1 << 20])
def test_h20_backward_visits_half_of_the_graph_and_later_the_rest(prefetch: int, backend: Backend) -> None:
    def program(offload: Around) -> object:
        x, w = leaf(32, 32), leaf(32, 32, seed=2)
        with offload:
            trunk = (x * 2).tanh()
            left, right = (trunk @ w).exp().sum(), (trunk.sin() * w.cos()).sum()
        first = torch.autograd.grad(left, x, retain_graph=True)
        del left
        second = torch.autograd.grad(right, w)
        del trunk
        return first, second

    same_gradients(program, backend, reloads=True, prefetch_bytes=prefetch)


@pytest.mark.sampled(5, quick=True)
@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_h50_an_unknown_order_reads_hardly_more_than_is_asked_for(
    share: float, retained: bool, backend: Backend
) -> None:
    saves, size = 96, 16 * 16 * 4

    def program(around: Around) -> object:
        leaves = [leaf(16, 16, seed=seed) for seed in range(saves)]
        with around:
            losses = [x.exp().sum() for x in leaves]
        order = torch.randperm(saves, generator=torch.Generator().manual_seed(1)).tolist()
        for index in order:
            losses[index].backward(retain_graph=retained)
        return [x.grad for x in leaves]

    window = int(share * saves * size)
    for stats in same_gradients(program, backend, regimes=REGIMES[:1], prefetch_bytes=window):
        assert stats.reloaded_bytes == saves * size
        assert stats.bytes_in <= 1.15 * stats.reloaded_bytes
