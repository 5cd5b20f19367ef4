"""Strides, and every kind of tensor that autograd may save."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_dtype import all_types_complex_float8_and

from tests.programs import Flag, Run, leaf, program, step
from tests.programs.parts.functions import custom, saving, watching

#: Views of a base of 32 by 32 by 16 elements.
SHAPES: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "dense": [
        lambda b: b,
        lambda b: b.permute(2, 0, 1),
        lambda b: b.view(4, 8, 32, 16).contiguous(memory_format=torch.channels_last),
        lambda b: b.view(2, 8, 8, 8, 16).contiguous(memory_format=torch.channels_last_3d),
        lambda b: b.reshape(-1)[1:],
        lambda b: b.reshape(-1).unfold(0, 16, 4),
    ],
    "broadcast": [
        lambda b: b[:1, :1, :1].expand(32, 32, 16),
        lambda b: b[0, 0].expand(32, 32, 16),
        lambda b: b[:, :1].expand(32, 32, 16),
        lambda b: b[::2, :1, ::4].expand(16, 32, 4),
    ],
    "parts": [
        lambda b: b[-1],
        lambda b: b[5, 7],
        lambda b: b[5, 7, 3],
        lambda b: b[:, 0, 0],
        lambda b: b[:8, :8, :8],
        lambda b: b[::8, :, ::2],
        lambda b: b.diagonal(),
        lambda b: b.reshape(-1)[101:333],
        lambda b: b.reshape(-1)[:256].unfold(0, 16, 4),
        lambda b: b.as_strided((1, 32, 4), (7, 16, 1)),
    ],
}


def _of_shapes(views: list[Callable[[Tensor], Tensor]], x: Tensor, seen: list[object]) -> Tensor:
    """Kernels that sum in the order of strides, and functions that show what they are given."""
    y = x[0].sum()
    for factor, of in enumerate(views, 1):
        view = of(x * factor)
        y = y + (view.sin() * view).sum() + view.double().norm() + view.softmax(-1).norm()
        y = saving(y, of(leaf(32, 32, 16, seed=factor, grad=False)), seen=seen)
    return y


for _name, _views in SHAPES.items():
    step(f"H05-{_name}", Flag.EAGER, Flag.NO_CAPTURE)(
        lambda views=_views: (partial(_of_shapes, views), [leaf(32, 32, 16, seed=3), []])
    )


def noise(*size: int) -> Tensor:
    """The same values each time, which no gradient is asked for."""
    return leaf(*size, seed=5, grad=False)


def _complex(*size: int) -> Tensor:
    return noise(*size).to(torch.complex64).mul(1 + 2j)


_OTHERS = (torch.bool, torch.half, torch.bfloat16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu)
_DTYPES = all_types_complex_float8_and(torch.complex32, *_OTHERS)
#: What is saved, out of memory of its own, by why it stays: ``None`` for what moves.
KINDS: dict[str, tuple[str | None, list[Callable[[], Tensor]]]] = {
    "dtypes": (None, [lambda dtype=dtype: noise(16, 16).mul(40).to(dtype) for dtype in _DTYPES]),
    "views": (
        None,
        [
            lambda: noise(16, 16).view(torch.float8_e5m2),
            lambda: noise(64, 64).to(torch.float8_e4m3fn)[3],
            lambda: (noise(64, 64) > 0)[:, 5],
            lambda: noise(64, 64)[3, 5],
            lambda: torch.arange(255, dtype=torch.uint8)[1:],
            lambda: noise(16, 16).to(torch.bfloat16).view(-1)[1:],
            lambda: torch.empty(0).set_(noise(64).untyped_storage(), 3, (20,), (1,)),
        ],
    ),
    "values": (
        None,
        [
            lambda: noise(4).sum(),
            lambda: noise(1, 1, 1),
            lambda: torch.tensor([float("nan"), float("inf"), -0.0, 0.0, 1e-45] * 8),
            lambda: nn.Buffer(noise(16, 16)),
        ],
    ),
    "conjugates": (
        None,
        [
            lambda: _complex(64, 64)[7].conj(),
            lambda: _complex(16, 32).mH,
            lambda: _complex(16, 16).conj().imag,
            lambda: _complex(64, 64)[5].conj().imag,
            lambda: _complex(16, 16).real,
        ],
    ),
    "jagged": (None, [lambda: torch.nested.nested_tensor([noise(3), noise(5)], layout=torch.jagged)]),
    # All of them have the address 0.
    "empty": ("small", [lambda: noise(0), lambda: noise(4, 0, 3), lambda: noise(3, 0).t(), lambda: noise(16, 16)[3:3]]),
    "sparse": (
        "layout",
        [
            lambda: noise(8, 8).relu().to_sparse(),
            lambda: noise(8, 8).relu().to_sparse_csr(),
            lambda: noise(8, 8).relu().to_sparse_csc(),
            lambda: noise(8, 8).relu().to_sparse_bsr((2, 2)),
        ],
    ),
    "quantized": (
        "layout",
        [
            lambda: torch.quantize_per_tensor(noise(16, 16), 0.1, 3, torch.quint8),
            lambda: torch.quantize_per_channel(noise(4, 16), torch.full([4], 0.3), torch.zeros(4), 0, torch.qint8),
        ],
    ),
    "meta": ("layout", [lambda: torch.empty(16, 16, device="meta")]),
    "parameters": ("parameter", [lambda: nn.Parameter(noise(16, 16))]),
}


def _see(seen: list[object], tensor: Tensor) -> None:
    """Notes what there is to say of any tensor, in strided ones."""
    seen.append([str(tensor.dtype), str(tensor.layout), str(tensor.device), tensor.is_conj(), tensor.is_neg()])
    tensor = tensor.detach()
    if tensor.is_quantized:
        seen.append([tensor.int_repr(), tensor.dequantize()])
    elif tensor.is_nested:
        seen.append([part.clone() for part in tensor.unbind()])
    elif tensor.layout is not torch.strided:
        seen.append(tensor.to_dense())
    else:
        seen.append([*tensor.size(), *tensor.stride(), None if tensor.is_meta else tensor.clone()])


def _of_kinds(makes: list[Callable[[], Tensor]], x: Tensor, seen: list[object]) -> Tensor:
    y = (x * 3).tanh()  # moves, whatever else does
    return watching(y, partial(_see, seen), *(make() for make in makes))


for _name, (_, _makes) in KINDS.items():
    # A jagged size has another name each time.
    _flags = [Flag.HOST] if _name in ("sparse", "quantized") else [Flag.NO_CHECKPOINT] if _name == "jagged" else []
    step(f"H12-{_name}", Flag.EAGER, Flag.NO_CAPTURE, *_flags)(
        lambda makes=_makes: (partial(_of_kinds, makes), [leaf(32, 32), []])
    )


def _of_nested_tensors(x: Tensor) -> Tensor:
    h = (x * 2).tanh()
    nested = torch.nested.as_nested_tensor([h[:3] * 2, h[3:] * 3])
    return torch.nested.to_padded_tensor(F.gelu(nested.sin() * nested).relu().softmax(-1), 0.0).square()


step("H12-nested-tensors", Flag.EAGER, Flag.HOST, Flag.NO_CHECKPOINT)(lambda: (_of_nested_tensors, [leaf(8, 16)]))


@program("H12-H22-inference-tensors", Flag.EAGER)
def _(run: Run) -> object:
    """Autograd refuses to save them; what it does not save stays out of the way, and so does a clone."""
    x, heard = leaf(16, 16), list[str]()
    with torch.inference_mode():
        constant = noise(16, 16) * 2
    features = constant.clone()
    with run.around:
        y = (x * 3).tanh().exp()
        try:
            y * constant
        except RuntimeError as error:
            heard.append(str(error))
        z = (y + constant) * features.sin()
    del y, features
    z.sum().backward()
    return x.grad, heard


def _partly_used(x: Tensor) -> Tensor:
    """Saves a workspace of which it uses the first part, as oneDNN's recurrent layers do."""
    pages = mmap.mmap(-1, 40 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # an allocator may have touched it before
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    workspace = torch.frombuffer(pages, dtype=x.dtype)
    workspace[: x.numel()] = x.detach().flatten().exp()

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (workspace,) = ctx.saved_tensors
        return gradient * workspace[: gradient.numel()].view_as(gradient) + workspace[-(1 << 16) :].sum()

    return custom(x, backward, workspace, forward=lambda x: workspace[: x.numel()].view_as(x).clone())


@step("H49-workspaces-that-are-touched-in-part", Flag.EAGER, Flag.HOST, Flag.NO_CHECKPOINT, Flag.NO_SCRIPT)
def _() -> tuple[Callable[..., Tensor], list[Any]]:
    return lambda x: _partly_used(x) + _partly_used(2 * x), [torch.linspace(-1, 1, 1 << 20).requires_grad_()]
