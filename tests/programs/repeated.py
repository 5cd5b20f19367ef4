"""Several graphs and several steps: in turn, at once, again, of other sizes, and some that nobody differentiates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.programs import Flag, Run, leaf, program
from tests.programs.in_place import everything_has_left
from tests.programs.parts.functions import saving
from tests.programs.streams import in_a_thread

_SIDE = 64


class _Layers(nn.Module):
    """Each layer saves one tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
        for _ in range(6):
            h = h.sin()
        return h.sum()


def _in_turn(model: _Layers, run: Run) -> None:
    for rows in (_SIDE, _SIDE, _SIDE // 2, _SIDE):
        with run.around:
            loss = run.forward(model)(torch.ones(rows, _SIDE))
        loss.backward()


def _several_at_once(model: _Layers, run: Run) -> None:
    with run.around:
        losses = [run.forward(model)(torch.ones(_SIDE, _SIDE)) for _ in range(3)]
    for loss in losses[1:]:
        loss.backward()


def _again(model: _Layers, run: Run) -> None:
    with run.around:
        loss = run.forward(model)(torch.ones(_SIDE, _SIDE))
    loss.backward(retain_graph=True)
    loss.backward()


def _checkpointed(model: _Layers, run: Run) -> None:
    for _ in range(3):
        with run.around:
            loss = checkpoint(model, leaf(_SIDE, _SIDE) * 2, use_reentrant=False)
        loss.backward()


def _in_threads(model: _Layers, run: Run) -> None:
    for _ in range(2):
        in_a_thread(lambda: _in_turn(model, run))


def _add(name: str, train: Callable[[_Layers, Run], None], *flags: Flag, moved: float = 0.9) -> None:
    @program(name, *flags, moved=moved)
    def _(run: Run) -> object:
        model = _Layers()
        train(model, run)
        return model.scale.grad


_add("H69-steps-in-turn", _in_turn, Flag.EAGER)
_add("H69-several-graphs-at-once", _several_at_once, Flag.EAGER)
_add("H69-a-graph-again", _again, Flag.EAGER)
_add("H69-checkpoints", _checkpointed, Flag.EAGER)
_add("H69-steps-in-threads", _in_threads, Flag.EAGER, Flag.NO_SCRIPT)


@program("H21-shapes-that-change-with-every-step", Flag.EAGER)
def _(run: Run) -> object:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16))
    losses = [ragged_step(run, model, seed) for seed in range(8)]
    return losses, [parameter.grad for parameter in model.parameters()]


def ragged_step(run: Run, model: nn.Module, seed: int) -> Tensor:
    """The loss of a batch of some rows of some length, half of whose tokens are routed; its backward has run."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = (int(torch.randint(1, 24, (), generator=generator, device="cpu")) for _ in range(2))
    x = leaf(rows, length, 16, seed=seed, grad=False)
    chosen = torch.randperm(rows * length, generator=generator, device="cpu")[: 1 + rows * length // 2]
    with run.around:
        routed = model(x).view(-1, 16)[chosen.to(x.device)]
        loss = (routed.tanh() @ routed.t()).square().mean()
    del routed
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@program("H19-a-second-graph-takes-the-room-of-what-the-first-never-asked-for", Flag.EAGER, prefetch_bytes=1 << 13)
def _(run: Run) -> object:
    first, second = leaf(16, 16, seed=1), leaf(16, 16, seed=2)
    with run.around:
        abandoned = [((first * n).tanh().exp()).sum() for n in range(2, 10)]
    with run.around:
        used = torch.stack([((second * n).tanh().exp()).sum() for n in range(2, 30)]).sum()
    abandoned[-1].backward()  # type: ignore[no-untyped-call]
    used.backward()
    return first.grad, second.grad, len(abandoned)


@program("H09-a-branch-that-nobody-differentiates", Flag.EAGER)
def _(run: Run) -> object:
    x = leaf(_SIDE, _SIDE)
    for _ in range(3):
        with run.around:
            trunk = x.tanh() * 2
            used, unused = trunk.exp().sum(), (trunk.sin() @ trunk).cos().sum()
        del trunk
        used.backward()
        assert unused.requires_grad
    return x.grad


def _seen(tensor: Tensor, storages: list[Callable[[], object]]) -> Tensor:
    storages.append(weakref.ref(tensor.untyped_storage()))
    return tensor


@program("H09-a-graph-that-is-dropped", Flag.EAGER, Flag.NOTHING_BACK, moved=0.5)
def _(run: Run) -> object:
    """Outside of the context, inside of it, and of a module; what it saved goes with it, or once it has left."""
    storages = list[Callable[[], object]]()
    model = nn.Sequential(nn.Linear(_SIDE, _SIDE), nn.Tanh(), nn.LayerNorm(_SIDE), nn.Linear(_SIDE, _SIDE))
    for inside in (False, True):
        with run.around:
            h = _seen((leaf(_SIDE, _SIDE) * 2).tanh(), storages)
            loss = _seen(h.exp() @ h, storages).sum() + _seen(model(_seen(h.sin(), storages)), storages).sum()
            del h
            if inside:
                del loss
        loss = None
    everything_has_left(run.around)
    assert [storage() for storage in storages] == [None] * len(storages)
    return loss


@program("H09-experts-that-got-no-tokens", Flag.EAGER, moved=0.7)
def _(run: Run) -> object:
    experts = [leaf(16, 16, seed=number) for number in range(4)]
    x = leaf(16, 16, seed=9)
    for number in range(4):
        with run.around:
            routed = [((x[4 * i : 4 * i + 4] * 2) @ experts[i]).tanh() for i in range(4)]
            loss = routed[number].square().sum()
        del routed
        loss.backward()
    return [expert.grad for expert in experts]


# -- addresses that are used again ------------------------------------------------------------------------------------


class _Ground:
    """Places tensors one after the other at one address, each in a storage of its own; without offload they live."""

    def __init__(self, run: Run) -> None:
        self._bytes, self._last = bytearray(4 * _SIDE * _SIDE), lambda: None
        self._is_offloaded = not isinstance(run.around, nullcontext)

    def place(self, values: Tensor) -> Tensor:
        if not self._is_offloaded:
            return values.clone()
        assert self._last() is None, "the last owner of these bytes still lives"
        tensor = torch.frombuffer(self._bytes, dtype=values.dtype).view(values.size()).copy_(values)
        self._last = weakref.ref(tensor.untyped_storage())
        return tensor


@program("H11-an-address-that-each-forward-uses-again", Flag.EAGER, Flag.HOST)
def _(run: Run) -> object:
    w, ground, losses = leaf(_SIDE, _SIDE), _Ground(run), []
    for seed in range(6):
        with run.around:
            x = ground.place(leaf(_SIDE, _SIDE, seed=10 + seed, grad=False))
            losses.append((w * x).sum() + (w[1:] * x[1:]).sum() + (w[3] * x[3]).sum())
        everything_has_left(run.around)
        del x
    for index in (0, 5, 2, 4, 1, 3):
        losses[index].backward()
    return w.grad


@program("H11-an-address-that-is-used-again-within-a-forward", Flag.EAGER, Flag.HOST, moved=0.4)
def _(run: Run) -> object:
    w, ground, seen = leaf(_SIDE, _SIDE), _Ground(run), list[list[object]]()
    with run.around:
        total = (w * 0).sum()
        for seed in range(6):
            x = ground.place(leaf(_SIDE, _SIDE, seed=10 + seed, grad=False))
            total = total + saving(w, x, seen=seen).sum()
            del x
            w.sin().exp()  # the operator before it has run: what it saved may leave
            everything_has_left(run.around)
    total.backward()
    return w.grad, [given[:-1] for given in seen]  # without the address


@program("H07-saves-of-what-has-left", Flag.EAGER)
def _(run: Run) -> object:
    x = leaf(_SIDE, _SIDE)
    with run.around:
        y = x + 1.0
        first = y.square()
        everything_has_left(run.around)
        second = y.square()
        del y
    (first + second).sum().backward()
    return x.grad
