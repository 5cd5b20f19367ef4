"""``eager_offload::draw_seed``: another seed for stochastic rounding, each time that it runs.

    draw_seed(Device device) -> Tensor

The seed is an ``int64`` of one element on ``device``, from a generator of the library's own: the user's draws stay as
they are. It is declared to draw, so that no compiler takes two calls for one or keeps a result.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import register_fake

from eager_offload._torch import library
from eager_offload.codecs.seeds import SEEDS

__all__ = ["draw_seed"]

_library = library("eager_offload", "FRAGMENT")
_library.define(
    "draw_seed(Device device) -> Tensor",
    # A CUDA graph would replay one seed for ever.
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe),
)
draw_seed = torch.ops.eager_offload.draw_seed.default


def _draw_seed(device: torch.device) -> Tensor:
    return torch.full((1,), SEEDS.draw(), dtype=torch.int64, device=device)


def _fake_draw_seed(device: torch.device) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device=device)


_library.impl("draw_seed", _draw_seed, "CompositeExplicitAutograd")
register_fake("eager_offload::draw_seed", _fake_draw_seed, lib=_library)
