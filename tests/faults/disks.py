"""Real files on which one chosen system call goes wrong, and training steps to try it on."""

from __future__ import annotations

import functools
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.spill import SpillFile, Usage
from tests.hazards.backends import assert_settled
from tests.proof.bits import same_bits
from tests.tiers.files import failure


class Faults:
    """Counts the operations of one kind, and has chosen ones call ``strike``.

    Args:
        kind: ``"write"``, ``"read"``, ``"allocate"``, ``"usage"`` or ``"any"``; or ``"short"``, a read or write that
            stops halfway, or ``"corrupt"``, a read that succeeds and brings back something else.
        first: the operation that is struck, from 1.
        strike: what happens there; it may raise, or not come back.
        for_good: whether all later ones are struck as well.
    """

    def __init__(self, kind: str, first: int, strike: Callable[[], None], *, for_good: bool = False) -> None:
        self.kind, self.first, self.for_good = kind, first, for_good
        self.seen = self.injected = 0
        self._strike = strike
        self._lock = threading.Lock()

    def meet(self, *kinds: str) -> str:
        """An operation of ``kinds`` begins; by which fault it is struck, where it is and goes on."""
        if self.kind not in (*kinds, "any"):
            return ""
        with self._lock:
            self.seen += 1
            struck = self.seen == self.first or (self.for_good and self.seen > self.first)
            self.injected += struck
        if not struck:
            return ""
        self._strike()
        return self.kind


class Faulty(SpillFile):
    """A real file whose operations meet ``Faulty.faults`` first."""

    faults: ClassVar[Faults | None] = None
    #: Files that live: one that goes is closed without a call of ``close``.
    alive: ClassVar[weakref.WeakSet[Faulty]] = weakref.WeakSet()

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        Faulty.alive.add(self)

    def write_from(self, source: memoryview, offset: int) -> int:
        short = self._meet("write", "short") == "short"
        return super().write_from(source[: _half(len(source))] if short else source, offset)

    def read_into(self, target: memoryview, offset: int) -> int:
        struck = self._meet("read", "short", "corrupt")
        moved = super().read_into(target[: _half(len(target))] if struck == "short" else target, offset)
        target[0] ^= struck == "corrupt"
        return moved

    def allocate(self, offset: int, nbytes: int) -> None:
        self._meet("allocate")
        super().allocate(offset, nbytes)

    def usage(self) -> Usage:
        self._meet("usage")
        return super().usage()

    @staticmethod
    def _meet(*kinds: str) -> str:
        return "" if Faulty.faults is None else Faulty.faults.meet(*kinds)


def _half(nbytes: int) -> int:
    return max(nbytes // 2 // 4096 * 4096, min(nbytes, 4096))


@contextmanager
def on_faulty_disk(file_type: type[SpillFile] = Faulty) -> Iterator[None]:
    """Every disk tier that an ``Offload`` opens within is on files of ``file_type``; none may be left open."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # fallbacks are told
        patch.setattr("eager_offload.engine.offloaders.DiskTier", functools.partial(DiskTier, file_type=file_type))
        try:
            yield
        finally:
            Faulty.faults = None
            gc.collect()
    assert all(file.descriptor < 0 for file in Faulty.alive), "a spill file was left open"


def make_offload(directory: Path, **fields: object) -> eo.Offload:
    """An ``Offload`` to disk that moves everything that can move."""
    given = {"tier": "disk", "disk_path": directory, "min_bytes": 0, "keep_last_bytes": 0, **fields}
    return eo.Offload(**given)


def loss_of(x: Tensor) -> Tensor:
    """Saves a handful of tensors, of one size and of another."""
    wide = ((x * 2).tanh() @ x.exp()).sigmoid()
    return (torch.cat([wide, wide.sin()]).tanh() * 3).square().sum()


def step(around: object, seed: int) -> Tensor:
    """One training step; returns its gradient."""
    x = torch.randn(48, 48, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    with around:
        value = loss_of(x)
    if isinstance(around, eo.Offload):
        around.stats(synchronize=True)  # all of it is away: the order of the calls is the same each time
    value.backward()
    return x.grad


@functools.cache
def expected(seed: int) -> Tensor:
    """The gradient without offload."""
    return step(nullcontext(), seed)


def step_is_exact(offload: eo.Offload, seed: int) -> None:
    """Asserts that a step of which nothing is known to fail is exact, and moves its bytes."""
    before = offload.stats(synchronize=True)
    assert same_bits(step(offload, seed), expected(seed))
    after = offload.stats(synchronize=True)
    assert after.bytes_out > before.bytes_out, "nothing moved"


def nothing_is_held(offload: eo.Offload, *, after_error: bool) -> None:
    """Asserts that no tensor, slot or promise is left."""
    if after_error:
        gc.collect()  # its traceback is in a cycle with the frames of the backward that it ended
        # Autograd's queue of this thread has nodes that the backward did not come to, until the next one empties it.
        torch.zeros((), requires_grad=True).backward()
    assert_settled(offload)


def fail_with(number: int) -> Callable[[], None]:
    """Something that fails as a system call does."""

    def strike() -> None:
        raise failure(number)

    return strike
