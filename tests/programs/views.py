"""Several views of one storage, their sizes and strides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.programs import Flag, Run, leaf, program, step

_SIDE = 64

_VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "H04-a-matrix-and-its-transpose": lambda h, w: h.t() @ h,
    "H04-a-transpose-of-a-square-saved-first": lambda h, w: (h.t() * w) + (h * w),
    "H04-both-halves": lambda h, w: h[: _SIDE // 2] @ w + h[_SIDE // 2 :] @ w.exp(),
    "H04-overlapping-slices": lambda h, w: (h[:40] * w[:40]).sum() + (h[20:60] * w[:40]).sum(),
    "H04-a-shift-by-one-element": lambda h, w: h.view(-1)[1:] * h.view(-1)[:-1],
    "H04-an-expanded-row": lambda h, w: (h[:1].expand(_SIDE, _SIDE) * w).sum() + (h * w).sum(),
    "H04-columns": lambda h, w: torch.stack([h[:, i] * w[:, i] for i in range(0, _SIDE, 16)]),
    "H04-windows": lambda h, w: (h.view(-1).unfold(0, 8, 4) ** 2).sum() + (h * w).sum(),
    "H07-query-key-and-value": lambda h, w: (lambda q, k, v: (q @ k.t()).softmax(-1) @ v)(*h.chunk(3, 1)),
    "H04-a-diagonal-and-all-of-it": lambda h, w: (h.diagonal() * w.diagonal()).sum() + (h * w).sum(),
    "H04-every-other-row": lambda h, w: h[::2] * w[::2] + h[1::2] * w[1::2],
    "H04-three-ways-to-look-at-it": lambda h, w: (
        h.view(16, 256).exp().sum() + (h.view(-1) * w.view(-1)).sum() + (h @ w).sum()
    ),
    "H07-three-consumers": lambda h, w: (h @ w).sum() + (h @ w.t()).sum() + (h @ w[:, 32:]).sum(),
    "H07-attention": lambda h, w: (lambda q, k, v: (q @ k.t()).softmax(-1) @ v)(h @ w, h @ w.t(), h @ w.view(64, 64)),
}


def _add(name: str, of: Callable[[Tensor, Tensor], Tensor], *flags: Flag) -> None:
    def make() -> tuple[Callable[..., Tensor], list[Tensor]]:
        # A product, which no compiler computes again in backward.
        return lambda x, m, w: of(x @ m, w), [leaf(_SIDE, _SIDE, seed=number) for number in range(3)]

    step(name, *flags)(make)


for _name, _of in _VIEWS.items():
    _add(_name, _of)


@program("H04-views-of-a-storage-that-has-left", Flag.EAGER)
def _(run: Run) -> object:
    x, w = leaf(_SIDE, _SIDE), leaf(_SIDE, _SIDE, seed=2)
    with run.around:
        h = x * 2
        first = (h * w).sum()
    with run.around:
        second = (h.t() @ w).sum() + (h[1:] * w[1:]).sum() + (h[3] * w[3]).sum()
    del h
    second.backward(retain_graph=True)
    first.backward()
    return x.grad, w.grad
