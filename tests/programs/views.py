"""Several views of one storage, their sizes and strides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.programs import leaf, step

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
}


def _add(name: str, of: Callable[[Tensor, Tensor], Tensor]) -> None:
    def make() -> tuple[Callable[..., Tensor], list[Tensor]]:
        # A product, which no compiler computes again in backward.
        return lambda x, m, w: of(x @ m, w), [leaf(_SIDE, _SIDE, seed=number) for number in range(3)]

    step(name)(make)


for _name, _of in _VIEWS.items():
    _add(_name, _of)
