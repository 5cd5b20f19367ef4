"""H65: where the user makes errors of warnings, none is raised in the midst of a transfer, a compilation or hooks of
others: it comes when a ``with`` is left or entered, or when one is closed, and what was done is exact."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import eager_offload as eo
from eager_offload.errors import warn
from eager_offload.tiers.disk import DiskSlot

NBYTES = 1 << 20


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def leaf() -> Tensor:
    return torch.linspace(-1, 1, NBYTES // 4).requires_grad_()


def forward(x: Tensor, inside: Any = None) -> Tensor:
    h = (x * 2).sin().cos()
    with nullcontext() if inside is None else inside:
        return h.sin().exp().sum()


def expected() -> Tensor:
    x = leaf()
    forward(x).backward()
    assert x.grad is not None
    return x.grad


def train(offload: eo.Offload, inside: Any = nullcontext, count: int = 3) -> list[RuntimeWarning]:
    """Steps of which each gradient is looked at; returns the warnings that were raised, each when a ``with`` was left
    or entered, and by nothing else."""
    wanted, raised, steps = expected(), [], 0
    while steps < count:
        x, loss = leaf(), None
        try:
            with offload:
                loss = forward(x, inside())
        except RuntimeWarning as warning:
            names = [frame.name for frame in traceback.extract_tb(warning.__traceback__)]
            assert names[:2] in (["train", "__exit__"], ["train", "__enter__"])
            raised.append(warning)
        if loss is not None:
            loss.backward()
            assert x.grad is not None
            assert torch.equal(x.grad, wanted)
            steps += 1
    assert not offload.stats(synchronize=True).is_approximate, "nothing was crashed by it"
    assert all(not offloader.is_crashed for offloader in offload._offloaders.all())
    return raised


def texts(raised: list[RuntimeWarning]) -> str:
    return "\n".join(str(one) for one in raised)


@pytest.mark.parametrize("plans", [True, False, "auto"])
def test_h65_a_shortage_raises_where_the_context_is_left(plans: Any) -> None:
    offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0, host_budget="3MiB", step_plans=plans)
    raised = train(offload, count=5)
    assert texts(raised).count("no room for") == 1
    stats = offload.stats()
    assert stats.bytes_out > 0
    assert stats.kept_bytes["budget"] > 0


def test_h65_a_transfer_that_fails_raises_at_the_next_with(monkeypatch: pytest.MonkeyPatch) -> None:
    offload, write = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0), DiskSlot.write
    assert train(offload) == []
    moved = offload.stats().bytes_out

    def fail(slot: DiskSlot, source: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskSlot, "write", fail)
    raised = train(offload)
    monkeypatch.setattr(DiskSlot, "write", write)
    raised += train(offload)
    assert texts(raised).count("offloading failed") == 1
    assert offload.stats().bytes_out > moved > 0
    offload.close()


def test_h65_hooks_that_hide_ours_are_entered_all_the_same() -> None:
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0)
    assert texts(train(offload, save_on_cpu)).count("other saved-tensor hooks") == 1
    assert offload.stats().bytes_out > 0
    offload.close()


def test_h65_a_plan_that_does_not_fit() -> None:
    first = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0, step_plans=True)
    x = leaf()
    for _ in range(2):
        with first:
            loss = x.exp().sin().sum()
        loss.backward()
    second = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0, plan=first.step_plan())
    assert texts(train(second)).count("does not fit this model") == 1
    assert second.stats().bytes_out > 0
    first.close()
    second.close()


def test_h65_compiled_code_that_has_no_room() -> None:
    offload, wanted = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0, host_budget="512KiB"), expected()
    compiled, raised = torch.compile(forward, backend="aot_eager", fullgraph=True), list[RuntimeWarning]()
    for _ in range(4):
        x, loss = leaf(), None
        try:
            with offload, eo.no_offload():
                loss = compiled(x)
        except RuntimeWarning as warning:
            raised.append(warning)
        if loss is not None:
            loss.backward()
            assert x.grad is not None
            assert torch.equal(x.grad, wanted)
    assert not offload.stats(synchronize=True).is_approximate
    assert offload.stats().compiled_regions > 0
    offload.close()
    for text in ("compiled code waits for each", "in a no_offload() region", "no room for"):
        assert texts(raised).count(text) == 1


def test_h65_a_warning_that_is_left_is_raised_by_close_which_has_closed() -> None:
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0)
    train(offload, count=1)
    warn("told late")
    with pytest.raises(RuntimeWarning, match="told late"):
        offload.close()
    assert offload._offloaders.tiers() == []


def test_h65_one_with_an_exception_of_the_users_hides_nothing() -> None:
    offload = eo.Offload(tier="disk", min_bytes=0)

    def step() -> None:
        with offload:
            warn("told late")
            raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        step()
    with pytest.raises(RuntimeWarning, match="told late"), offload:
        raise AssertionError("not entered")
