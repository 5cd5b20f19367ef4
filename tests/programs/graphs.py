"""Many graphs at once, backward more than once, and in orders that were not foreseen."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from tests.programs import Flag, Run, leaf, program


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))


#: Graphs of one network: ``(`` and ``)`` enter and leave, ``2`` is the second's forward, ``-2`` its backward, and
#: ``-2r`` one that retains the graph. All gradients that there are behind each are compared.
_SCRIPTS = {
    "H02-the-backward-of-the-first-alone": "(1)(2) -1",
    "H02-one-context-around-two-forwards": "(1 2) -1 -2",
    "H02-a-context-within-itself": "((1) 2) -1 -2",
    "H02-three-graphs-first-to-last": "(0)(1)(2) -0 -1 -2",
    "H02-three-graphs-from-the-middle": "(0)(1)(2) -1 -2 -0",
    "H03-buffers-are-used-again": "(1)(2) -2 (3) -1 -3",
    "H03-an-earlier-graph-waits": f"(1) {' '.join(f'({seed}) -{seed}' for seed in range(2, 10))} -1",
    "H08-a-graph-that-is-retained": "(1) -1r -1r -1r -1",
}

#: Of the ``Offload``. A copy on its way holds its slot: so many bytes of graphs that are over may be held.
_FIELDS = {"H03-an-earlier-graph-waits": {"max_inflight_bytes": "32KiB"}}


def _add(name: str) -> None:
    @program(name, Flag.EAGER, **_FIELDS.get(name, {}))
    def _(run: Run) -> object:
        model, losses, seen = _network(), dict[str, Tensor](), []
        for word in re.findall(r"[()]|-?\d+r?", _SCRIPTS[name]):
            if word == "(":
                run.around.__enter__()
            elif word == ")":
                run.around.__exit__(None, None, None)
            elif word.startswith("-"):
                losses[word[1:].rstrip("r")].backward(retain_graph=word.endswith("r"))
                seen += [parameter.grad.clone() for parameter in model.parameters()]
            else:
                losses[word] = model(leaf(16, 32, seed=int(word))).square().mean()
        return [loss.detach() for loss in losses.values()], seen


for _name in _SCRIPTS:
    _add(_name)


@program("H02-a-backward-in-the-middle-of-the-next-forward", Flag.EAGER)
def _(run: Run) -> object:
    model = _network()
    with run.around:
        first = model(leaf(16, 32, seed=1)).square().mean()
    with run.around:
        half = model[:3](leaf(16, 32, seed=2))
        first.backward()
        second = model[3:](half).square().mean()
    del half
    second.backward()
    return [parameter.grad for parameter in model.parameters()]


for _inside in (False, True):
    # What is saved last before a backward in the context stays.
    @program(f"H08-double-backward{'-inside' * _inside}", Flag.EAGER, moved=0.7 if _inside else 0.9)
    def _(run: Run, inside: bool = _inside) -> object:
        x, w = leaf(32, 32), leaf(32, 32, seed=2)

        def penalize() -> Tensor:
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            return first.square().sum()

        with run.around:
            y = ((x * 2).tanh() @ w).sin().sum()
            penalty = penalize() if inside else None
        penalty = penalize() if penalty is None else penalty
        second = torch.autograd.grad(penalty, [x, w], retain_graph=True)
        return y.detach(), penalty.detach(), second, torch.autograd.grad(penalty + y, [x, w])


#: In which eight branches of one forward go backward, each with a graph of its own.
_ORDERS = {
    "as-packed": (0, 1, 2, 3, 4, 5, 6, 7),
    "shuffled": (3, 6, 0, 7, 1, 5, 2, 4),
    "from-the-middle": (4, 3, 5, 2, 6, 1, 7, 0),
    "half-of-it": (7, 5, 3, 1),
}
for _order in _ORDERS:
    for _kib in (0, 4, 1024):

        @program(f"H20-{_order}-with-{_kib}-KiB-early", Flag.EAGER, prefetch_bytes=_kib << 10)
        def _(run: Run, order: str = _order) -> object:
            leaves = [leaf(32, 32, seed=seed) for seed in range(8)]
            with run.around:
                losses = [(x * 2).tanh().exp().sin().sum() for x in leaves]
            for index in _ORDERS[order]:
                losses[index].backward()
            return [x.grad for x in leaves]


@program("H20-half-of-the-graph-and-later-the-rest", Flag.EAGER, prefetch_bytes=1 << 12)
def _(run: Run) -> object:
    x, w = leaf(32, 32), leaf(32, 32, seed=2)
    with run.around:
        trunk = (x * 2).tanh()
        left, right = (trunk @ w).exp().sum(), (trunk.sin() * w.cos()).sum()
    first = torch.autograd.grad(left, x, retain_graph=True)
    del left
    second = torch.autograd.grad(right, w)
    del trunk
    return first, second
