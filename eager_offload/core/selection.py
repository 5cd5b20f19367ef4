"""Which saved tensors move, how many bytes of them, and the reason for each that stays.

Pure functions of a tensor's metadata: nothing here reads an element, keeps a reference or knows a stream. The same
functions serve eager code, which calls them with real tensors, and a compiler pass, which has fake ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from eager_offload.config import OffloadConfig
from eager_offload.stats import KeepReason
from eager_offload.torch_private.memory import attributes_of, base_of, has_own_memory, hint, is_fake, is_wrapper

#: Views that cover less than one part in this many of their storage travel alone. The three thirds of a fused
#: projection are below it (they travel as one storage), a slice of a batch is above.
_GATHER_BELOW = 4


_VIEW_NAMES = ("T", "Transpose", "View", "Expand", "Permute", "Squeeze", "Unsqueeze", "UnsafeView", "Alias")
#: The nodes of views of a weight that operators save, and how many of them may lie between the two: a subclass has two
#: for each view, of which one is the alias with its type.
_VIEWS = frozenset(f"{name}Backward0" for name in _VIEW_NAMES) | {"_ToTorchTensorBackward"}  # DTensor.to_local
_MOST_VIEWS = 4
#: The dtypes that autocast casts to.
_AUTOCAST = (torch.bfloat16, torch.float16)


class Footprint(NamedTuple):
    """The bytes of a storage that travel for one saved view.

    ``start`` and ``nbytes`` name the range of the storage that has to exist again for the view to be rebuilt. When
    ``gathered``, only the view's own elements travel (``moved`` bytes), and the range is filled from them.
    """

    whole: bool
    start: int
    nbytes: int
    moved: int
    gathered: bool


def keeps_cpu_tensors(config: OffloadConfig) -> bool:
    """Returns whether tensors on the CPU stay: the process has an accelerator, and the user has not asked for a
    disk."""
    if config.tier != "auto" or config.disk_path is not None:
        return False
    return torch.accelerator.current_accelerator(check_available=True) is not None


def reason_to_stay(tensor: Tensor, min_bytes: int, *, preferred: bool = False) -> KeepReason | None:
    """Returns the reason for which a saved tensor stays, from its own properties; ``None`` if it may move.

    Args:
        tensor: the tensor that autograd hands to the pack hook.
        min_bytes: a tensor that occupies fewer bytes stays, unless it is ``preferred``.
    """
    # A tracer's stand-in for a tensor has its kind as a mark: it may be a parameter as well.
    kind = type(tensor)
    if kind is not Tensor:
        if _is_made_one(tensor):
            return KeepReason.PARAMETER
        if not (has_own_memory(kind) or is_fake(kind)):  # a parameter's view may be of any subclass
            return KeepReason.PARAMETER if is_parameter(tensor) else KeepReason.LAYOUT
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return KeepReason.LAYOUT
    nbytes = tensor.nbytes
    if nbytes == 0 or (nbytes < min_bytes and not preferred):
        return KeepReason.SMALL
    if is_parameter(tensor):
        return KeepReason.PARAMETER
    if not preferred and not tensor.is_contiguous() and own_bytes(tensor) < min_bytes:
        return KeepReason.SMALL  # a broadcast: large to look at, small to hold
    return None


def plain_tensors(wrapper: Tensor) -> Iterator[Tensor]:
    """Yields the plain tensors inside a wrapper subclass, in its own order, through inner wrappers too."""
    for inner in inner_values(wrapper):
        if is_wrapper(inner):
            yield from plain_tensors(inner)
        elif isinstance(inner, Tensor):
            yield inner


def inner_values(wrapper: Tensor) -> list[Any]:
    """Returns the inner values of a wrapper subclass: tensors, wrappers, and objects that stand for one."""
    names, _ = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]  # every wrapper has it
    return [getattr(wrapper, name) for name in names]


def logical_bytes(tensor: Tensor) -> int:
    """Returns the bytes that the stats count for a saved tensor that stays."""
    kind = type(tensor)
    if kind is not Tensor and not has_own_memory(kind) and is_wrapper(tensor):
        return sum(map(logical_bytes, plain_tensors(tensor)))  # its own number may be that of all processes together
    try:
        nbytes = tensor.nbytes
        return nbytes if type(nbytes) is int else hint(nbytes, default=1)
    except (NotImplementedError, RuntimeError):  # some layouts have no such number
        return hint(tensor.numel(), default=1) * tensor.element_size()


def is_parameter(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is a parameter, a view of one, or the cast of one that autocast caches.

    Such bytes have another owner for as long as the graph lives, so moving them would free nothing: a leaf that
    requires grad is held by the graph itself. ``nn.Linear`` saves ``weight.t()``, a plain view, and under autocast the
    view of a cast; autocast caches casts of exactly the leaves that require grad.
    """
    base = base_of(tensor)
    root = tensor if base is None else base
    if (type(root) is not Tensor and _is_made_one(root)) or (type(tensor) is not Tensor and _is_made_one(tensor)):
        return True  # the tensor inside a parameter of a subclass may be a view of a plain tensor
    if not root.requires_grad:
        if root is tensor or not tensor.requires_grad:
            return False
        root = tensor  # a function made this view: DTensor.to_local, of the tensor inside
    node = root.grad_fn
    if node is None:
        return True
    # A tensor that a backward was given, and saves for a double backward, is not a view any more, but has its nodes.
    if (name := node.name()) not in _VIEWS and name != "ToCopyBackward0":
        return False  # most tensors, without a loop
    is_cast = root.dtype in _AUTOCAST
    for _ in range(_MOST_VIEWS):
        if (name := node.name()) not in _VIEWS and not (is_cast and name == "ToCopyBackward0"):
            return False
        node = node.next_functions[0][0]
        if node is None:
            return False
        if node.name() == "torch::autograd::AccumulateGrad":
            return True
    return False


def _is_made_one(tensor: Tensor) -> bool:
    """Returns ``isinstance(tensor, Parameter)``, without a call of a subclass's own ``__getattr__``.

    Parameters of other subclasses, and a tracer's stand-in for a parameter, have the mark ``_is_param``. A subclass may
    copy it to its results, so the tensor has to be a leaf too.
    """
    return issubclass(type(tensor), Parameter) or (tensor.is_leaf and bool(attributes_of(tensor).get("_is_param")))


def own_bytes(tensor: Tensor) -> int:
    """Returns the bytes of the distinct elements of ``tensor``: a broadcast dimension counts once."""
    count = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        if stride != 0:
            count *= size
    return min(count, _span(tensor)) * tensor.itemsize


@lru_cache(maxsize=64)
def whole(nbytes: int) -> Footprint:
    """Returns the footprint of a storage of ``nbytes`` bytes that travels whole."""
    return Footprint(True, 0, nbytes, nbytes, False)


def footprint(tensor: Tensor, storage_nbytes: int) -> Footprint:
    """Returns the bytes that travel when the strided, non-empty ``tensor`` leaves a storage of ``storage_nbytes``.

    If a view covers a good part of its storage, the storage travels whole, once for all its views. A view that covers
    little travels alone: as the range that it spans if that is dense, else as its own elements, gathered.
    """
    if tensor.is_contiguous() and tensor.nbytes * _GATHER_BELOW >= storage_nbytes:
        return whole(storage_nbytes)  # the common case, without a call
    itemsize, own = tensor.itemsize, own_bytes(tensor)
    if not covers_little(own, storage_nbytes):
        return whole(storage_nbytes)
    return part_of_storage(int(tensor.storage_offset()) * itemsize, own, _span(tensor) * itemsize)


def covers_little(own_bytes: int, storage_nbytes: int) -> bool:
    """Returns whether views with so many bytes of distinct elements travel without the rest of their storage."""
    return own_bytes * _GATHER_BELOW < storage_nbytes


def part_of_storage(start: int, own_bytes: int, span: int) -> Footprint:
    """Returns the bytes that travel of a view alone, which spans ``span`` bytes from ``start`` on: if its elements,
    ``own_bytes``, leave holes in them, they are gathered."""
    return Footprint(False, start, span, min(own_bytes, span), own_bytes < span)


def _span(tensor: Tensor) -> int:
    """Returns the number of elements from the first to the last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
