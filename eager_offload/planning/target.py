"""Kernels and autocast of the device that a step is planned for, also if the process does not have it.

[Note: target kernels]
If the process has an accelerator, the step is traced on fake tensors of it, and torch chooses kernels and autocast.
Without one, fake CUDA tensors would need a driver. So the tensors are the CPU's, and ``TargetKernels`` replaces the
operators that save other tensors on CUDA with CUDA's, whose meta kernels and derivatives are in every build of torch.
The conditions are torch's (``sdp_utils.cpp``, ``Normalization.cpp``, ``Dropout.cpp``), for a device with tensor cores.

[Note: target autocast]
Without the device, torch disables ``torch.autocast("cuda")`` with a warning. On a thread that traces for CUDA it is
replaced with the CPU's autocast, with CUDA's dtype. It casts the same products and convolutions; ``TargetKernels``
casts the other functions that CUDA computes in ``float32``. A model that takes the autocast of its tensors' device
enters the CPU's, and means CUDA's.

A plan names the called functions that may save other tensors on the device than in the trace, whether
``TargetKernels`` replaces them or not.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from eager_offload.contexts import Patches
from eager_offload.torch_private import Patch
from eager_offload.torch_private.calls import attention_in_parts, efficient_attention, flash_attention, schema_of
from eager_offload.torch_private.memory import tree_map

_FUSED = "attention (written down as the kernel of CUDA that torch's rules choose)"
_BATCH_NORM = "batch norm (cuDNN may save a reserve besides)"
_RECURRENT = "recurrent layers (cuDNN saves one reserve, for oneDNN's workspace or each step's tensors)"
_GUESSED = {
    "_scaled_dot_product_flash_attention": _FUSED,
    "_scaled_dot_product_efficient_attention": _FUSED,
    "_scaled_dot_product_attention_math": "attention (written down in parts: no fused kernel of CUDA takes it)",
    "native_dropout": "dropout (written down as CUDA's kernel, which saves a mask of one byte an element)",
    "cudnn_batch_norm": "batch norm (written down as cuDNN's, which may save a reserve besides)",
    **dict.fromkeys(("batch_norm", "native_batch_norm", "instance_norm"), _BATCH_NORM),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _RECURRENT),
    **dict.fromkeys(
        ("lstm_cell", "gru_cell"), "recurrent cells (one kernel saves a workspace, for each gate's tensors)"
    ),
    "ctc_loss": "CTC loss (cuDNN saves its gradient, for the probabilities of paths)",
    "_weight_norm": "weight norm (one kernel, which saves the norms, for the tensors of several operators)",
}


def name_of(function: Callable[..., Any]) -> str:
    schema = schema_of(function)
    return getattr(function, "__name__", "") if schema is None else schema.name.partition("::")[2]


def guessed_name(function: Callable[..., Any]) -> str | None:
    """Returns the text of a plan for ``function``; ``None`` if it saves the same on each device."""
    return _GUESSED.get(name_of(function))


CPU = "cpu"

_aten = torch.ops.aten
_HALF = torch.float16, torch.bfloat16
#: Functions that autocast computes in ``float32`` on CUDA, and not on a CPU.
_SINGLE = frozenset(
    (
        *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "logsumexp", "pow"),
        *("reciprocal", "rsqrt", "sinh", "softplus", "square", "tan"),
        *("group_norm", "layer_norm", "native_layer_norm"),
        *("cosine_similarity", "dist", "frobenius_norm", "norm", "nuclear_norm", "pdist", "renorm"),
        *("upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d"),
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    )
)
#: The same, but with ``dtype=float32`` instead of cast inputs.
_TO_SINGLE = frozenset(
    ("cumprod", "cumsum", "log_softmax", "softmax", "sum", "linalg_matrix_norm", "linalg_vector_norm")
)
#: Functions that autocast computes in ``float32`` on a CPU, and in the dtype of their inputs on CUDA.
_AS_GIVEN = frozenset(
    (
        *("cat", "stack", "pad", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
        *("replication_pad3d", "avg_pool3d", "max_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d"),
    )
)

Kernel: TypeAlias = Callable[..., Any]


def device_of(target: str) -> torch.device:
    accelerator = None if target == CPU else torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device(CPU)
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


# -- kernels ----------------------------------------------------------------------------------------------------------


class TargetKernels(TorchFunctionMode):
    """Calls CUDA's kernels on fake tensors of the CPU: see [Note: target kernels]."""

    def __init__(self) -> None:
        super().__init__()
        self._bodies: dict[Kernel, Kernel | None] = {}
        #: Functions whose bodies run: some tensor methods call the function of the same name.
        self._running: list[Kernel] = []

    def __torch_function__(
        self,
        func: Kernel,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        is_plain = {Tensor}.issuperset(types) and func not in self._running
        if is_plain and (body := self._body_of(func)) is not None:
            self._running.append(func)
            try:
                with self:
                    return body(*args, **named)
            finally:
                self._running.pop()
        name = name_of(func)
        if _is_cast() and name in _TO_SINGLE:
            if any(isinstance(one, Tensor) and one.dtype in _HALF for one in args[:1]):
                named["dtype"] = named.get("dtype") or torch.float32
        elif _is_cast() and (name in _SINGLE or name in _AS_GIVEN):
            if name in _SINGLE:
                args, named = tree_map(_as_single, (args, named))
            with torch.autocast(CPU, enabled=False):
                return func(*args, **named)
        kernel = _KERNELS.get(name)
        result = None if kernel is None else kernel(*args, **named)
        return func(*args, **named) if result is None else result

    def _body_of(self, func: Kernel) -> Kernel | None:
        """Returns a copy of torch's Python function ``func`` whose calls this mode sees; ``None`` for other functions.

        The original dispatches to modes and subclasses first, which would lead back here. In the copy
        ``has_torch_function`` returns false.
        """
        if func not in self._bodies:
            self._bodies[func] = None
            if isinstance(func, FunctionType) and "handle_torch_function" in func.__code__.co_names:
                never = {name: lambda *_: False for name in func.__globals__ if name.startswith("has_torch_function")}
                space, inside = {**func.__globals__, **never}, (func.__defaults__, func.__closure__)
                self._bodies[func] = copied = FunctionType(func.__code__, space, func.__name__, *inside)
                copied.__kwdefaults__ = func.__kwdefaults__
        return self._bodies[func]


def _is_cast() -> bool:
    return torch.is_autocast_enabled(CPU)


def _as_single(one: Any) -> Any:
    return one.float() if isinstance(one, Tensor) and one.dtype in _HALF else one


def _dropout(input: Tensor, p: float, train: bool) -> Tensor | None:
    if not train or not 0 < p < 1 or not input.numel():
        return None
    made: Tensor = _aten.native_dropout(input, p, train)[0]
    return made


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor | None:
    """Returns ``None`` if CUDA uses torch's own kernel, which saves the same as on a CPU."""
    if weight is None or bias is None or (running_mean is None and not training):
        return None
    has_type = weight.dtype is (torch.float32 if input.dtype is torch.float16 else input.dtype) is not torch.bfloat16
    most = 880_801 if training else 65_535
    fits = input.dim() >= 3 and input.shape[0] <= most and input.numel() < 2**31 - 1 and eps >= 1e-5
    if not (has_type and fits and cudnn_enabled):
        return None
    statistics = running_mean, running_var, training, momentum, eps
    made: Tensor = _aten.cudnn_batch_norm(_dense(input), weight, bias, *statistics)[0]
    return made


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    """Calls layer norm's kernel: CUDA's RMS norm saves the same, except for the mean of each row."""
    if weight is not None and weight.dtype is not input.dtype:
        return None
    made: Tensor = _aten.native_layer_norm(input, normalized_shape, weight, None, eps or 0.0)[0]
    return made


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Computes the logarithms in the dtype of ``input`` and the loss in ``float32``, as CUDA's autocast does.

    Only shapes and dtypes match the real loss: fake tensors have no values.
    """
    if not _is_cast():
        return None
    classes = min(input.dim() - 1, 1)
    with torch.autocast(CPU, enabled=False):
        logs = torch.log_softmax(input, classes)
        if target.is_floating_point():
            rows = (logs * target).sum(classes, dtype=torch.float32)
            return rows if reduction == 0 else rows.sum()
        made: Tensor = _aten.nll_loss_nd(_as_single(logs), target, weight, reduction, ignore_index)
        return made + logs.sum(dtype=torch.float32) if label_smoothing else made


def _dense(given: Tensor) -> Tensor:
    for order in (torch.channels_last, torch.channels_last_3d):
        if given.dim() == (4 if order is torch.channels_last else 5) and given.is_contiguous(memory_format=order):
            return given
    return given.contiguous()


# -- attention --------------------------------------------------------------------------------------------------------


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if _is_cast():
        query, key, value = map(_as_cast, (query, key, value))
        attn_mask = None if attn_mask is None else _as_cast(attn_mask)
    mask, is_dense = attn_mask, attn_mask is None or attn_mask.stride(-1) == 1
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, torch.full((), -math.inf, dtype=query.dtype))
    made: Tensor
    if mask is None and _is_flash(query, key, value, is_causal=is_causal, enable_gqa=enable_gqa):
        size = query.shape[-1]
        padded = [torch.nn.functional.pad(one, (0, -size % 8)) if size % 8 else one for one in (query, key, value)]
        made = flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
        return made[..., :size] if size % 8 else made
    if is_dense and _is_efficient(query, key, value):
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        is_kept = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        made = efficient_attention(query, key, value, mask, is_kept, dropout_p, is_causal, scale=scale)[0]
        return made
    made = attention_in_parts(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    return made


def _as_cast(one: Tensor) -> Tensor:
    is_cast = one.is_floating_point() and one.dtype is not torch.float64
    return one.to(torch.get_autocast_dtype(CPU)) if is_cast else one


def _is_fused(query: Tensor, key: Tensor, value: Tensor, dtypes: tuple[torch.dtype, ...], *, shares: bool) -> bool:
    given = query, key, value
    if any(one.dim() != 4 or one.dtype is not query.dtype or not one.numel() for one in given):
        return False
    heads = query.shape[1]
    is_shared = key.shape[1] == value.shape[1] and heads % key.shape[1] == 0
    return (
        query.dtype in dtypes
        and all(one.shape[0] == query.shape[0] and (one.stride(-1) == 1 or one.shape[-1] == 1) for one in given)
        and (is_shared if shares else heads == key.shape[1] == value.shape[1])
    )


def _is_flash(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]  # torch declares no types for it
        and _is_fused(query, key, value, _HALF, shares=enable_gqa)
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and not (is_causal and query.shape[2] != key.shape[2])
    )


def _is_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if not _is_fused(query, key, value, (*_HALF, torch.float32), shares=False):
        return False
    unit = 16 // query.itemsize
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]  # as above
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % unit == value.shape[-1] % unit == 0
    )


def _aligned(mask: Tensor) -> Tensor:
    length = mask.shape[-1]
    if mask.stride(-1) == 1 and not any(stride % 8 for stride in mask.stride()[:-1]) and not mask.storage_offset() % 8:
        return mask
    return torch.nn.functional.pad(mask, (0, -length % 8 or 8))[..., :length]


#: CUDA's kernels by torch's name of the function; they return ``None`` if CUDA calls the same as a CPU.
_KERNELS: dict[str, Kernel] = {
    "dropout": _dropout,
    "batch_norm": _batch_norm,
    "rms_norm": _rms_norm,
    "cross_entropy_loss": _cross_entropy,
    "scaled_dot_product_attention": _attention,
}


# -- autocast ---------------------------------------------------------------------------------------------------------


class _Local(threading.local):
    def __init__(self) -> None:
        self.target: str | None = None
        #: Autocast contexts that were made for the CPU in place of the target.
        self.made: list[weakref.ref[Any]] = []


_local = _Local()


def _autocast_of(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _restore(kind: str, is_on: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(kind, is_on)
    torch.set_autocast_dtype(kind, dtype)


def _of_cpu(replaced: Callable[..., None]) -> Callable[..., None]:
    def init(
        autocast: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == _local.target:
            dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
            replaced(autocast, CPU, torch.bfloat16, enabled, cache_enabled)  # of other types torch would warn
            autocast.fast_dtype = dtype
            _local.made.append(weakref.ref(autocast))
        else:
            replaced(autocast, device_type, dtype, enabled, cache_enabled)

    return init


def _told(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """Sets the target's autocast state to the CPU's, for models that query it."""

    def enter(autocast: Any) -> Any:
        target = _local.target
        if target is not None:
            autocast.of_target = _autocast_of(target)
        entered = replaced(autocast)
        if target is not None:
            _restore(target, *_autocast_of(CPU))
        return entered

    return enter


def _untold(replaced: Callable[..., Any]) -> Callable[..., Any]:
    def leave(autocast: Any, *error: object) -> Any:
        left = replaced(autocast, *error)
        if _local.target is not None and (before := vars(autocast).pop("of_target", None)) is not None:
            _restore(_local.target, *before)
        return left

    return leave


_autocast = Patches(
    lambda: [
        Patch(torch.autocast, name, around)
        for name, around in (("__init__", _of_cpu), ("__enter__", _told), ("__exit__", _untold))
    ]
)


@contextmanager
def autocast_of(target: str) -> Iterator[None]:
    """Replaces ``torch.autocast(target)`` with the CPU's on the calling thread, and enters it if the caller is in the
    target's: see [Note: target autocast]."""
    before, made, (is_on, dtype) = _local.target, _local.made, _autocast_of(target)
    with _autocast.used():
        _local.target, _local.made = target, []
        try:
            with torch.autocast(target, dtype) if is_on else nullcontext():
                yield
        finally:
            kept = [autocast for one in _local.made if (autocast := one()) is not None]
            _local.target, _local.made = before, made
            for autocast in kept:  # a model may keep a context: reset it to torch's own, which is disabled
                torch.autocast.__init__(autocast, target, autocast.fast_dtype, enabled=False)
