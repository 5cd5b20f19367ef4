"""Runs a program without and with offload, and compares every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from eager_offload import Offload, OffloadStats
from tests.hazards.backends import Backend, assert_balanced, assert_settled
from tests.proof.bits import same_bits

#: What stands around forwards: an ``Offload``, or nothing.
Around: TypeAlias = AbstractContextManager[Any]
#: Of a program: takes that, and returns whatever has to be the same with offload and without.
Body: TypeAlias = Callable[[Around], object]

#: Why a saved tensor may stay although everything is asked to move.
_INELIGIBLE = ("parameter", "layout", "device", "small")


class Settled:
    """An ``Offload`` that waits at exit until everything has left: whatever backward needs has to be brought back."""

    def __init__(self, offload: Offload) -> None:
        self.offload = offload

    def __enter__(self) -> Settled:
        self.offload.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.offload.__exit__(*error)
        self.offload.stats(synchronize=True)


@dataclass(frozen=True)
class Regime:
    """One way in which transfers and compute may meet."""

    name: str
    #: Everything has left before backward begins.
    settled: bool
    fields: dict[str, Any] = field(default_factory=dict)

    def around(self, offload: Offload) -> Around:
        return Settled(offload) if self.settled else offload

    def __str__(self) -> str:
        return self.name


REGIMES = (
    Regime("brought back early", settled=True),
    Regime("brought back when asked for", settled=True, fields={"prefetch_bytes": 0}),
    Regime("one at a time", settled=False, fields={"max_inflight_bytes": 1, "prefetch_bytes": 1 << 12}),
    Regime("all on the way at once", settled=False),
)


def exact(program: Body, around: Offload | Settled) -> OffloadStats:
    """Asserts that ``program`` gives the same bits inside of ``around`` and leaves nothing held; returns the stats."""
    assert_identical(program(nullcontext()), program(around))
    return assert_settled(around if isinstance(around, Offload) else around.offload)


def same_gradients(
    program: Body,
    backend: Backend,
    *,
    moved: float = 0.9,
    reloads: bool = True,
    held: bool = False,
    regimes: Sequence[Regime] = REGIMES,
    again: list[OffloadStats] | None = None,
    **fields: Any,
) -> list[OffloadStats]:
    """Asserts that ``program`` gives the same bits with offload in every regime, and that its bytes did move.

    Where a step is to follow a plan of one like it, the program is run twice: recorded, and followed as far as can be.

    Args:
        moved: the part of the eligible bytes that has to move.
        reloads: whether bytes have to come back when everything has left before backward begins.
        held: whether the program itself holds on to what it saved.
        again: is given the stats of every second time.
        fields: of the config.

    Returns:
        The stats of each regime, the first time; every graph is gone by then and nothing is held any more.
    """
    torch.manual_seed(0)
    expected = program(nullcontext())
    state = torch.get_rng_state()
    gathered = []
    for regime, at_once in ways(regimes, backend):
        offload = backend.offload(**{**regime.fields, **fields})
        found = []
        for where in [str(regime), f"{regime}, once more"][: 2 if offload.config.step_tables is True else 1]:
            offload.reset_stats()
            torch.manual_seed(0)
            with copies_given_at_once(backend) if at_once else nullcontext():
                actual = program(regime.around(offload))
            assert torch.equal(state, torch.get_rng_state()), f"{where}: the random state differs"
            assert_identical(expected, actual, where)
            del actual
            found.append(assert_settled(offload))
        stats, *later = found
        offload.close()
        backend.offloads.remove(offload)
        if again is not None:
            again += later
        if backend.runtime.holds_copies_back and not (regime.settled or at_once):
            assert stats.offloaded_bytes > 0, "backward can have come first to most of it, but not to all"
            continue
        assert_moved(stats, moved, held=held)
        assert stats.bytes_in > 0 or not (reloads and regime.settled), f"{regime}: nothing was brought back\n{stats}"
        gathered.append(stats)
    return gathered


def ways(regimes: Sequence[Regime], backend: Backend) -> Iterator[tuple[Regime, bool]]:
    """Each regime, and whether transfer streams get every copy at once: else backward may come first to some."""
    for regime in regimes:
        yield regime, False
        if backend.runtime.holds_copies_back and not regime.settled:
            yield regime, True


@contextmanager
def copies_given_at_once(backend: Any) -> Iterator[None]:
    """Whatever leaves goes to the transfer stream at once, so that nothing can be cancelled.

    Args:
        backend: has a ``runtime``.
    """
    with patch.object(backend.runtime, "holds_copies_back", False):  # the runtime's class has it again afterwards
        yield


def assert_identical(expected: object, actual: object, where: str = "", *, values: bool = True) -> None:
    """Asserts that two structures of tensors, numbers and texts are equal, tensors bit for bit.

    Args:
        values: whether tensors have any; without, those of the same shape are equal.
    """
    left, right = tree_leaves(expected), tree_leaves(actual)
    assert len(left) == len(right), where
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert type(a) is type(b), f"{where}: item {index} is {type(a)} without offload and {type(b)} with it"
        if isinstance(a, Tensor):
            assert (a.dtype, a.layout, a.size()) == (b.dtype, b.layout, b.size()), f"{where}: item {index}"
            assert not values or same_bits(a, b, strides=False), f"{where}: item {index} differs\n{a}\n{b}"
        else:
            assert a == b, f"{where}: item {index} is {a!r} without offload and {b!r} with it"


def assert_moved(stats: OffloadStats, least: float = 0.9, *, held: bool = False) -> None:
    """Asserts that at least this part of the bytes that could move did.

    Args:
        held: whether the program itself holds on to what it saved, so that it is not taken again once that is known.
    """
    assert_balanced(stats)
    ineligible = (*_INELIGIBLE, "alive") if held else _INELIGIBLE
    if torch.accelerator.is_available():
        ineligible = (*ineligible, "newest")  # its copy had not begun when backward asked for it
    eligible = stats.saved_bytes - sum(stats.kept_bytes.get(reason, 0) for reason in ineligible)
    assert eligible > 0, f"nothing could move\n{stats}"
    assert stats.offloaded_bytes + stats.shared_bytes >= least * eligible, f"too little moved\n{stats}"
    assert stats.bytes_out > 0
