"""H01: a saved tensor that is changed in place before backward raises exactly where autograd raises without hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

import eager_offload as eo
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.changes import MODIFIED, UNMODIFIED, after_backward
from tests.hazards.functions import saving
from tests.hazards.programs import (
    REGIMES,
    Around,
    Program,
    Regime,
    assert_identical,
    assert_moved,
    leaf,
    same_gradients,
)

#: Where nothing moves: what is too small, and what a region holds back.
KEPT = Regime("kept", settled=True, fields={"min_bytes": 1 << 30})


@dataclass(frozen=True)
class Outcome:
    """What came of a program."""

    result: object
    error: RuntimeError | None

    @classmethod
    def of(cls, program: Program, around: Around) -> Outcome:
        torch.manual_seed(0)
        try:
            return cls(program(around), None)
        except RuntimeError as error:
            return cls(None, error.with_traceback(None))

    @property
    def modified(self) -> bool:
        return self.error is not None and "modified by an inplace operation" in str(self.error)


def named(program: Callable[..., object]) -> str:
    return program.__name__


@pytest.mark.parametrize("program", MODIFIED, ids=named)
def test_h01_a_change_raises_where_autograd_raises(program: Program, backend: Backend) -> None:
    """In autograd's words, where it names no operator; and training goes on behind it."""
    backend.sources_change = True
    plain = Outcome.of(program, nullcontext())
    assert plain.modified, f"autograd itself finds nothing: {plain}"
    said, expected = str(plain.error).split(" Hint:")[0].rstrip("."), unmodified(nullcontext())
    for regime in (*REGIMES, KEPT):
        offload = backend.offload(**regime.fields)
        outcome = Outcome.of(program, regime.around(offload))
        assert isinstance(outcome.error, eo.SavedTensorModifiedError), f"{regime}: {outcome}"
        assert outcome.modified, f"{regime}: {outcome.error}"
        assert str(outcome.error).startswith(said) or not program.__name__.startswith("an_input"), regime
        stats = assert_settled(offload)
        if regime is KEPT:
            assert stats.bytes_out == 0
        else:
            assert_moved(stats)
        assert_identical(expected, unmodified(offload))


def unmodified(around: Around) -> object:
    w = leaf(64, 64)
    with around:
        y = (w * 2).sin().cos()
    y.sum().backward()
    return w.grad


@pytest.mark.parametrize("program", UNMODIFIED, ids=named)
def test_h01_a_change_that_backward_does_not_read_raises_nowhere(program: Program, backend: Backend) -> None:
    backend.sources_change = True
    plain = Outcome.of(program, nullcontext())
    assert plain.error is None
    same_gradients(program, backend, reloads=False, held=program is after_backward)
    kept = backend.offload(**KEPT.fields)
    assert_identical(plain.result, Outcome.of(program, kept).result)
    assert kept.stats().bytes_out == 0


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_h01_what_raised_once_still_raises_and_what_is_whole_still_comes_back(regime: Regime, backend: Backend) -> None:
    backend.sources_change = True
    offload = backend.offload(**regime.fields)

    def program() -> None:
        w, v, x = leaf(32, 32), leaf(32, 32, seed=2), leaf(32, 32, seed=3, grad=False)
        seen = []
        with regime.around(offload):
            changed = (w * x).sum()
            whole = saving(v, (v * 3).detach(), seen=seen).sum()
        x.add_(1)
        for _ in range(2):
            with pytest.raises(eo.SavedTensorModifiedError):
                changed.backward(retain_graph=True)
        whole.backward()
        assert w.grad is None
        assert torch.equal(seen[0][0], v * 3)

    program()
    assert_moved(assert_settled(offload))
