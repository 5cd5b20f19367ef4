"""Codecs as kernels, and their scratch memory: what eager code packs and unpacks with.

[Note: codecs that are compiled]
Operator by operator, a codec that rounds reads and writes memory ten to thirty times over. Compiled it is one pass,
with the same bits; but a compiler takes a second for each size of a tensor. So a size is compiled once so many bytes of
it were packed that packing them has taken about as long. That is done where the next step begins, by the thread that
begins it: what runs for seconds must hold no lock. What has holes, sizes beyond the first ``_MOST``, and all of it
where there is no compiler, goes on operator by operator.

Most of what a compiler takes for the first kernel of a process is for itself: its modules, and on an accelerator its
back end. So on an accelerator a codec is compiled for one block when the first context is entered that may round by it.
No tensor has been saved then, and where nothing compiles that is known before any step is.

[Note: one workspace]
Work of one stream runs in order, so of all packing and unpacking there one is at work at a time. What they compute in
is one place: as large as the largest that has come so far, of memory that was touched before. For a large tensor on a
CPU fresh memory takes as long as the rest. An accelerator's allocator gives a stream the block that it has just given
back, so there nothing is held in between, which would be a part of the device's peak.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from eager_offload._torch import without_caller_modes
from eager_offload.codecs import BitMask, Codec, TensorMeta
from eager_offload.codecs.names import is_compiled
from eager_offload.codecs.rounded import BLOCK, compiled_multiple
from eager_offload.errors import CapabilityError
from eager_offload.kernels.kernel import Kernel, TorchKernel, as_torch_kernel
from eager_offload.kernels.signature import Signature, TensorSpec
from eager_offload.kernels.staging import LaunchSpec

_logger = logging.getLogger("eager_offload.kernels")

#: Bytes of one size; a core takes a tenth of a second or two for them, operator by operator.
_WORTH = 256 << 20
#: Sizes that are compiled in a process, and those whose bytes are counted: of sequences of any length there are many.
_MOST, _COUNTED = 32, 1024
#: Sizes of which it is remembered where parts of a workspace lie, until that goes.
_MOST_PLACED = 256
#: Bytes; where tensors begin that compiled code is given.
_ALIGNMENT = 16
#: A kernel of torch operators alone says nothing of how it is spread.
_SPREAD = LaunchSpec((1, 1, 1), (1, 1, 1))


class _Size(NamedTuple):
    """Tensors of which one kernel packs any: so many elements, side by side."""

    codec: Codec
    numel: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{self.codec.name} of {self.numel:,} {str(self.dtype).removeprefix('torch.')}"


class _Kernels(NamedTuple):
    pack: TorchKernel
    unpack: TorchKernel


class CodecKernels:
    """Packs and unpacks for any thread, each codec as its reference does, bit for bit."""

    def __init__(self) -> None:
        self._kernels: dict[_Size, _Kernels] = {}
        #: Bytes that were packed operator by operator, by size; the one that came first is first.
        self._packed: dict[_Size, int] = {}
        self._due: deque[_Size] = deque()
        #: What is compiled for one block, or was to be.
        self._expected: set[_Size] = set()
        #: Devices that nothing compiles for, and why.
        self._without: dict[torch.device, str] = {}

    def pack(
        self,
        codec: Codec,
        x: Tensor,
        out: Tensor,
        scratch: Mapping[str, Tensor] | None = None,
    ) -> Tensor | None:
        """As ``codec.pack``; ``scratch``: what a ``BitMask`` computes in."""
        if isinstance(codec, BitMask):
            return codec.pack(x, out, scratch)
        if (size := _size_of(codec, x)) is None:
            return codec.pack(x, out)
        found = self._kernels.get(size)
        if found is None or not _is_aligned(x, out):
            self._count(size, x.nbytes)
            return codec.pack(x, out)
        found.pack(x, out=out)
        return None

    def unpack(self, codec: Codec, packed: Tensor, out: Tensor, scratch: Mapping[str, Tensor] | None = None) -> None:
        """As ``codec.unpack``; ``scratch``: what a ``BitMask`` computes in."""
        if isinstance(codec, BitMask):
            return codec.unpack(packed, out, scratch)
        size = _size_of(codec, out)
        found = None if size is None else self._kernels.get(size)
        if found is None or not _is_aligned(packed, out):
            codec.unpack(packed, out)
        else:
            found.unpack(packed, out=out)

    def expect(self, codecs: Iterable[Codec], device: torch.device) -> None:
        """Has the next ``compile_due`` compile each of ``codecs`` for one block, the first time that it is expected."""
        for codec in codecs:
            size = _Size(codec, BLOCK, torch.float32, device)
            if is_compiled(codec) and size not in self._expected:
                self._expected.add(size)
                self._due.append(size)

    def compile_due(self) -> list[str]:
        """Compiles the sizes that have turned out to be worth it; no lock of the library is held.

        Returns:
            For each of them that cannot be compiled here, why: it goes on operator by operator.
        """
        failures = []
        while self._due:
            size = self._due.popleft()
            if len(self._kernels) == _MOST:
                continue
            if size.device not in self._without:
                if size in self._expected:
                    _logger.warning("compiling %s: the first kernel of a process takes several seconds", size)
                else:
                    _logger.info("compiling %s", size)
                try:
                    with without_caller_modes():
                        self._kernels[size] = _compile(size)
                    continue
                except Exception as error:  # a compiler fails in many ways, and what it is for is done without it
                    if is_out_of_memory(error):  # there is none for the numbers that it is tried with
                        continue
                    self._without[size.device] = str(error).partition("\n")[0]
            failures.append(
                f"{self._without[size.device]}. Saved tensors are packed by torch's own operators in its place, which "
                "is slower"
            )
        return failures

    def _count(self, size: _Size, nbytes: int) -> None:
        packed = self._packed.get(size, 0)
        if packed < _WORTH <= packed + nbytes:
            self._due.append(size)
        self._packed[size] = packed + nbytes
        if len(self._packed) > _COUNTED:
            self._packed.pop(next(iter(self._packed)), None)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or the CPU, had no memory for a tensor; torch has an error of its own for the former only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _size_of(codec: Codec, x: Tensor) -> _Size | None:
    """That of ``x``; ``None`` where it is not compiled."""
    if not is_compiled(codec) or x.dim() != 1 or not x.is_contiguous():
        return None
    if x.numel() % compiled_multiple(codec, x.device):
        return None
    return _Size(codec, x.numel(), x.dtype, x.device)


def _is_aligned(*tensors: Tensor) -> bool:
    return not any(tensor.data_ptr() % _ALIGNMENT for tensor in tensors)


def _compile(size: _Size) -> _Kernels:
    """Its kernels, which have packed and unpacked some numbers as the codec does.

    Raises ``CapabilityError`` where nothing compiles here, and where what was compiled has other bits.
    """
    codec, numel, dtype, device = size
    layout = codec.layout(TensorMeta((numel,), (1,), dtype))
    assert layout is not None, "it was packed"
    saved = TensorSpec((numel,), dtype, _ALIGNMENT)
    packed = TensorSpec((layout.nbytes,), torch.uint8, _ALIGNMENT)

    def pack(x: Tensor, out: Tensor) -> None:
        codec.pack(x, out)

    packing = Kernel(f"pack {size}", Signature((saved,), (packed,)), _SPREAD, {"torch": pack})
    unpacking = Kernel(f"unpack {size}", Signature((packed,), (saved,)), _SPREAD, {"torch": codec.unpack})
    kernels = _Kernels(as_torch_kernel(packing, "inductor"), as_torch_kernel(unpacking, "inductor"))
    x = torch.linspace(-3, 5, numel, dtype=torch.float32, device=device).to(dtype)
    found, expected = kernels.pack(x), torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
    pack(x, expected)
    back, again = torch.full_like(x, 7), torch.empty_like(x)
    kernels.unpack(found, out=back)
    codec.unpack(expected, again)
    if not (torch.equal(found, expected) and torch.equal(back, again)):
        raise CapabilityError(f"{size}: what Inductor has compiled computes other numbers than torch's own operators")
    return kernels


#: Of the process, as compiled code is.
CODECS = CodecKernels()


class Workspaces:
    """Scratch memory by stream; the caller has enqueued what it does there before it asks for the next.

    Args:
        allocate: new memory on a stream: flat ``uint8`` of so many bytes, at a multiple of 16.
        holds: whether it is held for the next one.
    """

    def __init__(self, allocate: Callable[[int, Hashable], Tensor], *, holds: bool = True) -> None:
        self._allocate, self._holds = allocate, holds
        self._buffers: dict[Hashable, Tensor] = {}
        #: Where parts lie in what is held: to make so many views takes longer than to pack a small mask.
        self._placed: dict[tuple[Hashable, TensorMeta], dict[str, Tensor]] = {}

    def of(self, codec: Codec, meta: TensorMeta, stream: Hashable) -> dict[str, Tensor] | None:
        """What ``codec`` computes in to pack or unpack such a tensor; ``None``: in nothing."""
        if not isinstance(codec, BitMask):
            return None
        if (known := self._placed.get((stream, meta))) is not None:
            return known
        parts = codec.scratch(meta)
        nbytes, buffer = sum(parts.values()), self._buffers.get(stream)
        if buffer is None or buffer.nbytes < nbytes:
            self._buffers.pop(stream, None)  # first: the old one's memory may be a part of the new one's
            self._placed.clear()
            buffer = self._allocate(nbytes, stream)
            if self._holds:
                self._buffers[stream] = buffer
        placed = dict(zip(parts, torch.split(buffer[:nbytes], list(parts.values())), strict=True))
        if self._holds and len(self._placed) < _MOST_PLACED:
            self._placed[stream, meta] = placed
        return placed

    def clear(self) -> None:
        """Lets go of all of it."""
        self._buffers.clear()
        self._placed.clear()
