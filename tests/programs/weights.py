"""Weights in whatever shape and layout they are saved: not one byte of them moves, and each has its gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.programs import Flag, Run, leaf, program, step
from tests.programs.parts.functions import watching


def _sliced_split_reshaped_and_expanded(fused: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    q, k, v = fused.chunk(3)
    h = F.linear(x * 2, q) * scale
    h = h @ k.reshape(32, 32).t() + (h * scale.expand(16, 32)).tanh()
    return (h.view(16, 4, 8) * v.view(4, 8, 32).permute(2, 0, 1)[:16]).sin() + (h @ fused[5:37].T).view(16, 4, 8)


def _flattened_into_views(flat: Tensor, x: Tensor) -> Tensor:
    first, second = flat[: 32 * 64].view(32, 64), flat[32 * 64 :].view(64, 32)
    return ((x @ first).tanh() @ second).sin()


def _saved_again_by_double_backward(model: nn.Module, x: Tensor) -> Tensor:
    """What backward was given for a weight is no view of it any more, and is saved for a backward of its own."""
    y = model(x * 2).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return y + slope.square().sum()


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, index: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(index).tanh()), index)


class _Squared(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.square()


def _cast_by_autocast(dtype: torch.dtype, model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype):
        return model(x * 2).float()


def _two_layers() -> list[Any]:
    return [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32, bias=False)), leaf(16, 32)]


def _frozen() -> list[Any]:
    return [nn.Sequential(nn.Linear(32, 32).requires_grad_(False), nn.Tanh(), nn.Linear(32, 32)), leaf(16, 32)]


def _computed_from() -> list[Any]:
    layer = nn.Linear(64, 64)
    parametrize.register_parametrization(layer, "weight", _Squared())
    return [layer, leaf(16, 64)]


class _Adapted(nn.Module):
    """A frozen layer with an adapter of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Parameter(leaf(64, 4).detach()), nn.Parameter(leaf(4, 64).detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down @ self.up


def _adapted() -> list[Any]:
    return [nn.Sequential(_Adapted(), nn.Tanh(), _Adapted()), leaf(16, 64)]


def _doubled(model: nn.Module, x: Tensor) -> Tensor:
    return model(x * 2)


#: A forward, and its inputs.
_STEPS: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Any]]]] = {
    "H06-a-linear-layer-saves-a-transpose-of-its-weight": (_doubled, _two_layers),
    "H06-a-frozen-weight": (_doubled, _frozen),
    "H06-adapters-of-low-rank-beside-frozen-weights": (_doubled, _adapted),
    "H06-what-is-computed-from-a-weight-moves": (_doubled, _computed_from),
    "H06-tied": (lambda model, index: model(index), lambda: [_Tied(), torch.arange(48) % 64]),
    "H06-sliced-split-reshaped-and-expanded": (
        _sliced_split_reshaped_and_expanded,
        lambda: [nn.Parameter(leaf(96, 32).detach()), nn.Parameter(leaf(32, seed=2).detach()), leaf(16, 32, seed=3)],
    ),
    "H06-a-leaf-that-is-flattened-into-views": (
        _flattened_into_views,
        lambda: [leaf(32 * 64 + 64 * 32), leaf(16, 32, seed=2, grad=False)],
    ),
    "H06-H08-saved-again-by-double-backward": (_saved_again_by_double_backward, _two_layers),
    "H06-the-cast-to-bfloat16-that-autocast-caches": (partial(_cast_by_autocast, torch.bfloat16), _two_layers),
    "H06-the-cast-to-float16-that-autocast-caches": (partial(_cast_by_autocast, torch.float16), _two_layers),
}
for _name, (_forward, _inputs) in _STEPS.items():
    _flags = [Flag.EAGER, Flag.NO_CHECKPOINT, Flag.NO_CAPTURE] if "double-backward" in _name else []
    # What is saved last before a backward in the context stays.
    step(_name, *_flags, moved=0.7 if "double-backward" in _name else 0.9)(
        lambda forward=_forward, inputs=_inputs: (forward, inputs())
    )


# -- without a storage ------------------------------------------------------------------------------------------------

_LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    Tensor.to_sparse,
    Tensor.to_sparse_csr,
    Tensor.to_sparse_csc,
    lambda dense: dense.to_sparse_bsr((2, 2)),
    lambda dense: dense.to_sparse_bsc((2, 2)),
    Tensor.to_mkldnn,
]
for _kept in ("parameter", "layout"):

    @program(f"H67-a-weight-of-any-layout-kept-as-{_kept}", Flag.EAGER, Flag.HOST)
    def _(run: Run, kept: str = _kept) -> object:
        """Without a storage and, in some layouts, a size in bytes: steps that are alike but for it are others."""
        gradients, seen = list[Tensor | None](), list[object]()
        for layout in _LAYOUTS:
            for is_sparse in (False, True, True):
                x, weight = leaf(16, 16), torch.eye(16)
                weight = layout(weight) if is_sparse else weight
                weight = nn.Parameter(weight, requires_grad=False) if kept == "parameter" else weight
                with run.around:
                    y = watching((x * 3).tanh(), lambda one: seen.append([str(one.layout), one.to_dense()]), weight)
                    y = watching(y.sin(), lambda one: seen.append(one.to_dense()), weight).exp().sum()
                del weight
                y.backward()
                gradients.append(x.grad)
        return gradients, seen


@program("H67-a-sparse-weight-is-trained", Flag.EAGER, Flag.HOST)
def _(run: Run) -> object:
    sparse, layer = nn.Parameter(torch.eye(16).to_sparse()), nn.Linear(16, 16)
    for seed in range(5):
        with run.around:
            loss = layer(torch.sparse.mm(sparse, layer(leaf(16, 16, seed=seed, grad=False)))).sin().sum()
        loss.backward()
        with torch.no_grad():
            for parameter in (sparse, *layer.parameters()):
                parameter.sub_(parameter.grad * 0.1)
                parameter.grad = None
    return [sparse.detach().to_dense(), *layer.parameters()]


for _views in (False, True):

    @program(f"H67-gradients-that-are-sparse{'-beside-views-of-one-buffer' * _views}", Flag.EAGER, Flag.HOST)
    def _(run: Run, views: bool = _views) -> object:
        table, layer = nn.Embedding(32, 16, sparse=True), nn.Linear(16, 16)
        optimizer = torch.optim.SGD([*table.parameters(), *layer.parameters()], lr=0.1)
        if views:
            flat = torch.zeros(16 * 16 + 16)
            layer.weight.grad, layer.bias.grad = flat[: 16 * 16].view(16, 16), flat[16 * 16 :]
        for number in range(5):
            with run.around:
                loss = layer(table(torch.arange(number, number + 12))).tanh().square().sum()
            loss.backward()
            if number % 2:  # else gradients are accumulated
                optimizer.step()
                optimizer.zero_grad(set_to_none=not views)
        return [table.weight.detach(), *layer.parameters()]
