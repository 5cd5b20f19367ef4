"""Compares the saves of a recomputed module with those of its forward, by fingerprints.

[Note: fingerprints]
A fingerprint is five numbers, computed on the device of the value without a synchronization: both halves of a 64-bit
hash of its bytes, the sum of magnitudes, a sum weighted by position, and the sum of squares. Other kernels give other
last bits, so unequal hashes alone are not an error. Two random draws have nearly equal sums of magnitudes, but their
weighted sums differ, relative to the root of the sum of squares.

[Note: final values]
An operator may fill a tensor after packing it (e.g. the noise of ``rrelu``); autograd's sequence number tells when the
operator has returned. So values that require no grad are read at the first later pack, or at the end.

[Note: values compared by shape]
Two kinds of values may differ: running statistics of batch and instance norm, which each call in training updates and
backward does not use; and scratch memory of recurrent layers and ``ctc_loss``, which kernels leave partly unwritten.
They are recognized by the operator's saves (see ``_Operator``), because torch selects other kernels under a dispatch
mode.

[Note: early stop]
torch stops a recompute in the pack of the last value. Backward uses the values packed by then, so these are compared.
Continuing would run later collectives on the checking ranks only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from eager_offload.core.selection import inner_values
from eager_offload.errors import OffloadError
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.torch_private.autograd import autograd_sequence, node_sequence, top_hooks
from eager_offload.torch_private.calls import is_tracing, without_caller_modes, without_torch_function
from eager_offload.torch_private.captures import accelerator_in_use
from eager_offload.torch_private.fsdp import is_collective
from eager_offload.torch_private.memory import detached, has_own_memory, is_fake, is_wrapper, storage_of

#: The relative differences of two sums of magnitudes, and of two weighted sums, above which values count as different.
_SUMS, _WEIGHTED = 1e-3, 2e-2
#: Elements that are hashed at a time, at 40 bytes each: on a CPU they stay in its cache.
_ON_CPU, _ON_DEVICE = 1 << 17, 1 << 22
#: Odd 64-bit multipliers, for ``_keys_for``.
_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
#: Operators whose saves without grad are scratch memory, or inputs that also determine their other results.
_WITH_SCRATCH = ("CtcLoss", "CudnnCtcLoss", "CudnnRnn", "MiopenRnn", "MkldnnRnnLayer")
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def may_check() -> bool:
    """Returns whether a call can be checked now: it is neither traced nor captured."""
    return not is_tracing() and not (accelerator_in_use() and accelerator_runtime().is_capturing())


class Check:
    """Checks the recomputes of one call of a module.

    Args:
        is_strict: whether values that differ in their last bits are an error.
        passed: called after each recompute that agrees, with the number of values that differ in their last bits.
    """

    def __init__(self, name: str, is_strict: bool, passed: Callable[[int], None]) -> None:
        self._name, self._is_strict, self._passed = name, is_strict, passed
        self._first = _Saves()

    def forward(self, call: Callable[[], Any]) -> Any:
        with self._first.noted():
            return call()

    def again(self, call: Callable[[], Any]) -> None:
        """Runs the recompute ``call`` and compares its saves.

        Raises:
            OffloadError: its saves differ from those of forward, or it raises an error.
        """
        if not may_check():
            call()
            return
        saves = _Saves()
        try:
            with saves.noted():
                call()
        except OffloadError:
            raise
        except BaseException as error:
            if saves.is_cut:
                self._compare(saves)
                raise
            if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
                raise
            raise self._error(f"raises {type(error).__name__}: {error}") from error
        if self._first.is_over and len(saves.all) < len(self._first.all):
            self._compare(saves, passes=False)
            raise self._error(f"saves {len(saves.all)} values, but forward saved {len(self._first.all)}")
        self._compare(saves)

    def _compare(self, saves: _Saves, *, passes: bool = True) -> None:
        pairs = list(zip(self._first.all, saves.all, strict=False))
        numbers = _read([row for pair in pairs for save in pair for row in save.rows])
        inexact = 0
        for place, (first, again) in enumerate(pairs):
            what = again.differs(first, numbers)
            if what is None:
                continue
            inexact += what == ""
            if what or self._is_strict:
                what = what or "other bits, and nearly the same sums; verify=True takes that for an error"
                raise self._error(f"value {place + 1} of {len(self._first.all)} that it saves, {first}, has {what}")
        if passes:
            self._passed(inexact)

    def _error(self, what: str) -> OffloadError:
        return OffloadError(
            f"module {self._name!r} differs when recomputed in backward: {what}. Its gradients would be wrong, and "
            "were not computed; the gradients of later modules are set and correct, so call optimizer.zero_grad() "
            "before you continue. The module depends on something that has changed since forward: a counter, a cache, "
            "an iterator or a generator of random numbers of its own, or an argument that is not a tensor. Leave it "
            f'out by eo.plan(..., config={{"skip": [{self._name!r}]}}), or plan without recompute'
        )


class _Saves:
    def __init__(self) -> None:
        self.all: list[_Save] = []
        self.is_over = False
        #: Whether the outer pack hook has raised: see [Note: early stop].
        self.is_cut = False
        #: Operators that may still write to their saves, by thread and sequence number.
        self._open: dict[tuple[int, int], _Operator] = {}
        self._keys: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Records the saves of the calling thread, and passes them on to the hooks in force."""
        below = top_hooks(True)
        assert below is not None, "a checkpoint has put its own on"
        below_packs, unpack = below

        def pack(tensor: Tensor) -> Any:
            self._pack(tensor)
            try:
                return below_packs(tensor)
            except BaseException:
                self.is_cut = True
                raise

        try:
            with saved_tensors_hooks(pack, unpack):
                yield
            self.is_over = True
        finally:
            self._settle(None)
            self._open.clear()
            self._keys.clear()

    def _pack(self, tensor: Tensor) -> None:
        now = (get_ident(), autograd_sequence())
        with without_caller_modes(), without_torch_function():
            self._settle(now)
            save, parts = _Save(tensor), _parts(tensor)
            operator = self._open.setdefault(now, _Operator())
            operator.saves(tensor, save, now[1])
            if parts and not tensor.requires_grad:
                operator.open.append((save, parts, _stream(parts[0])))
            else:
                save.rows = self._rows(parts)
        self.all.append(save)

    def _settle(self, now: tuple[int, int] | None) -> None:
        """Reads the saves of operators that have returned: see [Note: final values]."""
        for key, operator in list(self._open.items()):
            if now is not None and (key[0] != now[0] or key == now):
                continue
            del self._open[key]
            for save, parts, stream in operator.open:
                # Another stream is not ordered after the operator, so its value is not read.
                if _stream(parts[0]) == stream and not operator.is_by_shape_alone(save):
                    save.rows = self._rows(parts)

    def _rows(self, parts: Sequence[Tensor]) -> list[Tensor]:
        try:
            with torch.no_grad(), without_caller_modes(), torch.inference_mode(False):
                return [self._row(_flat(part)) for part in parts]
        except Exception:  # an unsupported dtype, or out of memory: only the shape is compared
            return []

    def _row(self, flat: Tensor) -> Tensor:
        device, most = flat.device, _ON_CPU if flat.device.type == "cpu" else _ON_DEVICE
        wide = torch.float32 if device.type == "mps" else torch.float64
        keys, weights = self._keys_for(min(flat.numel(), most), device, wide)
        hashed, sums = torch.zeros((), dtype=torch.int64, device=device), torch.zeros(3, dtype=wide, device=device)
        for part in torch.split(flat, most):
            whole = part.nbytes % 8 == 0
            words = part.view(torch.int64) if whole else part.view(_WORDS[part.itemsize]).to(torch.int64)
            hashed = hashed * _ODD[0] + (words * keys[: words.numel()]).sum()
            numbers = torch.nan_to_num(part.to(wide), 3.0, 5.0, -7.0)  # so that positions of nan and inf count
            weighted, squares = torch.dot(numbers, weights[: part.numel()]), torch.dot(numbers, numbers)
            sums = sums + torch.stack((numbers.abs_().sum(), weighted, squares))
        return torch.cat((torch.stack((hashed >> 32, hashed & 0xFFFFFFFF)).to(wide), sums))

    def _keys_for(self, count: int, device: torch.device, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns for each position a pseudorandom odd key, and a weight between -1 and 1."""
        known = self._keys.get(device)
        if known is None or len(known[0]) < count:
            places = torch.arange(1, 1 + (1 << (count - 1).bit_length()), device=device) * _ODD[0]
            mixed = (places ^ (places >> 30)) * _ODD[1]
            keys = ((mixed ^ (mixed >> 27)) * _ODD[2]) | 1
            self._keys[device] = known = keys, keys.to(wide) * 2.0**-63
        return known


@dataclass
class _Operator:
    open: list[tuple[_Save, list[Tensor], object]] = field(default_factory=list)
    """Saves without grad, with their parts and the operator's stream."""
    has_scratch: bool = False
    channels: set[int | None] = field(default_factory=set)

    def saves(self, tensor: Tensor, save: _Save, sequence: int) -> None:
        node = tensor.grad_fn if save.made_by in _WITH_SCRATCH else None
        self.has_scratch |= node is not None and node_sequence(node) == sequence - 1  # made by this operator
        if len(save.shape) > 1:
            self.channels.add(save.shape[1])

    def is_by_shape_alone(self, save: _Save) -> bool:
        """Returns whether ``save`` (of ``open``) is compared by shape only: see [Note: values compared by shape].

        A batch norm in training saves four vectors of one element per channel: running and batch statistics.
        """
        if self.has_scratch or len(save.shape) != 1:
            return self.has_scratch
        vectors = [one.shape[0] for one, _, _ in self.open if len(one.shape) == 1]
        return any(vectors.count(count) >= 4 for count in self.channels)


class _Save:
    def __init__(self, tensor: Tensor) -> None:
        self.shape, self._dtype = shape_of(tensor), tensor.dtype
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        self._strides = [stride for size, stride in zip(self.shape, strides, strict=False) if size != 1]
        made_by = "" if tensor.is_leaf else type(tensor.grad_fn).__name__.rstrip("0123456789")
        self.made_by = made_by.removesuffix("Backward")
        #: The fingerprints of its parts; empty if they cannot be read.
        self.rows: list[Tensor] = []

    def __str__(self) -> str:
        return f"{self._dtype} of shape {self.shape}" + (f" made by {self.made_by}" if self.made_by else "")

    def differs(self, first: _Save, numbers: dict[int, list[float]]) -> str | None:
        """Returns the difference from ``first`` as a text: "" if only bits differ, ``None`` if nothing does.

        Args:
            numbers: the fingerprints by ``id`` of their rows.
        """
        if (self.shape, self._dtype) != (first.shape, first._dtype):
            return f"become {self}"
        if (is_other := self._strides != first._strides) and 0 in (*self._strides, *first._strides):
            return ""  # fingerprints read an expanded element once, so these are not comparable
        found = "" if is_other else None  # other strides change all but the sum of magnitudes
        for one, other in zip(first.rows, self.rows, strict=False):
            *bits, total, weighted, squares = numbers[id(one)]
            *other_bits, sum_, weighted_sum, sum_of_squares = numbers[id(other)]
            if abs(total - sum_) > _SUMS * max(total, sum_):
                return f"magnitudes of the sum {sum_:.6g} in place of {total:.6g}"
            if is_other:
                continue
            if abs(weighted - weighted_sum) > _WEIGHTED * math.sqrt(max(squares, sum_of_squares)):
                return f"other numbers, whose magnitudes have nearly the same sum {total:.6g}"
            if bits != other_bits:
                found = ""
        return found


def _read(rows: Sequence[Tensor]) -> dict[int, list[float]]:
    found, on_devices = dict[int, list[float]](), defaultdict[torch.device, dict[int, Tensor]](dict)
    for row in rows:
        on_devices[row.device][id(row)] = row
    for device, own in on_devices.items():
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # rows may be of several streams
        with without_caller_modes():
            found.update(zip(own, torch.stack(list(own.values())).tolist(), strict=True))
    return found


def _stream(tensor: Tensor) -> object:
    return None if tensor.device.type == "cpu" else torch.accelerator.current_stream(tensor.device)


def shape_of(tensor: Tensor) -> tuple[int | None, ...]:
    """Returns the sizes of ``tensor``; ``None`` for a ragged dimension."""
    if tensor.is_nested and tensor.layout is torch.strided:  # has no `shape`
        return (tensor.size(0), *[None] * (tensor.dim() - 1))
    sizes: list[object] = list(tensor.shape)
    return tuple([size if isinstance(size, int) else None for size in sizes])


def _parts(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors with the data of ``tensor``; none if they cannot be read now."""
    if is_wrapper(tensor):
        if is_collective(tensor):
            return []
        return [part for inner in inner_values(tensor) for part in _parts(inner)]
    if not has_own_memory(type(tensor)) or is_fake(type(tensor)) or tensor.device.type == "meta":
        return []
    storage = None if tensor.is_quantized or not tensor.numel() else storage_of(tensor)
    if storage is None or tensor.layout is not torch.strided:
        return []
    end = tensor.storage_offset() + 1
    end += sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return [detached(tensor)] if end * tensor.itemsize <= storage.nbytes() else []  # FSDP empties parameters


def _flat(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    for dim, stride in enumerate(tensor.stride()):
        if not stride:
            tensor = tensor.narrow(dim, 0, 1)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    flat = tensor.permute(order).contiguous().view(-1)
    return flat.clone() if flat.storage_offset() * flat.itemsize % 8 else flat  # read as aligned 8-byte words
