"""The device is full: in forward, in backward, in bringing back. The user's own retry with a smaller batch goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload._torch import TorchDispatchMode
from eager_offload.codecs import Gather
from tests.hazards.backends import Backend, assert_settled, hooks_are_gone
from tests.hazards.probes import Allocations
from tests.hazards.programs import REGIMES, Around, Regime, Settled, assert_identical, assert_moved, leaf, one_step
from tests.programs.exceptions import Trainer

ROWS, WIDTH = 8, 32


class Retrying:
    """Takes steps, and after an out-of-memory error the same step again with half of the batch, as users do."""

    def __init__(self) -> None:
        trainer = Trainer()
        self.model, self.optimizer, self.retries = trainer.model, trainer.optimizer, 0

    @property
    def state(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def step(self, around: Around, seed: int, pressure: Around) -> None:
        try:
            with pressure:
                self.attempt(around, leaf(ROWS, WIDTH, seed=seed))
        except torch.OutOfMemoryError:
            assert hooks_are_gone()
            self.retries += 1
            self.attempt(around, leaf(ROWS // 2, WIDTH, seed=seed))
        self.optimizer.step()

    def attempt(self, around: Around, x: Tensor) -> None:
        self.optimizer.zero_grad()
        with around:
            h = self.model(x)
            # A view with holes is gathered before it leaves.
            loss = (h[:, ::2] * h[:, ::2].exp()).square().mean()
        loss.backward()


class FullAt(TorchDispatchMode):
    """The operator of this number finds no memory; the ones before and after it do."""

    sees_offloading = True

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("no room, on purpose")
        return func(*args, **(kwargs or {}))


def retried_at(step: int, retried: bool) -> list[Tensor]:
    """Three steps, one of them with half of the batch from the start."""
    trainer = Retrying()
    for seed in range(3):
        trainer.attempt(nullcontext(), leaf(ROWS // 2 if retried and seed == step else ROWS, WIDTH, seed=seed))
        trainer.optimizer.step()
    return trainer.state


@pytest.mark.parametrize("regime", [REGIMES[0], REGIMES[2]], ids=str)
def test_h10_out_of_memory_in_any_operator_of_a_step(regime: Regime, backend: Backend) -> None:
    expected = {retried: retried_at(1, retried) for retried in (False, True)}
    offload, number, found = backend.offload(**regime.fields), 1, 0
    while True:
        trainer, full = Retrying(), FullAt(number)
        for seed in range(3):
            trainer.step(regime.around(offload), seed, full if seed == 1 else nullcontext())
        assert_identical(expected[trainer.retries == 1], trainer.state)
        del trainer
        assert_settled(offload)
        if full.left > 0:
            break
        found += 1
        number += 7
    assert found > 5
    assert_moved(assert_settled(offload), held=True)


# -- gathering -------------------------------------------------------------------------------------------------------


def refuse_as_accelerators_do() -> None:
    raise torch.OutOfMemoryError("no room, on purpose")


def refuse_as_the_cpu_does() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@one_step
def gathered_program() -> tuple[Tensor, ...]:
    """Saves a narrow view of a wide tensor, and what is computed from it."""
    x = leaf(32, 64)
    narrow = (x * 2)[:, ::8]
    return narrow.square().exp() * 2, x


@pytest.mark.parametrize("refuse", [refuse_as_accelerators_do, refuse_as_the_cpu_does])
def test_h10_what_finds_no_room_to_be_gathered_stays(
    backend: Backend, refuse: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gathered_program(nullcontext())
    offload = backend.offload()
    assert_identical(expected, gathered_program(Settled(offload)))
    gathered = offload.stats()
    offload.reset_stats()
    refused = []

    def pack(codec: Gather, x: Tensor, out: Tensor, seed: Tensor | None = None) -> None:
        refused.append(x.nbytes)
        refuse()

    monkeypatch.setattr(Gather, "pack", pack)
    with pytest.warns(RuntimeWarning, match="no memory left to gather") as warned:
        actual = gathered_program(Settled(offload))
    assert_identical(expected, actual)
    assert refused
    assert len(warned) == 1
    stats = assert_settled(offload)
    assert stats.demotions == {"device_full": len(refused)}
    assert stats.kept_bytes["failed"] == 32 * 8 * 4 * len(refused)
    assert gathered.offloaded_bytes - stats.offloaded_bytes == stats.kept_bytes["failed"]
    assert stats.bytes_out > 0, "the rest has left"


# -- reload targets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consecutive", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("regime", REGIMES[:2], ids=str)
def test_h10_no_room_for_a_reload(regime: Regime, consecutive: int, backend: Backend) -> None:
    """A single refusal is absorbed; the second one in a row reaches the user, whose retry is exact."""
    expected = {retried: retried_at(1, retried) for retried in (False, True)}
    offload = backend.offload(**regime.fields, step_plans=consecutive == 1)
    number, raised = 1, 0
    while True:
        trainer = Retrying()
        with pytest.MonkeyPatch.context() as patch:
            trainer.step(regime.around(offload), 0, nullcontext())
            refused = range(number, number + consecutive)
            allocations = Allocations(backend.runtime, patch, refused.__contains__)
            trainer.step(regime.around(offload), 1, nullcontext())
        trainer.step(regime.around(offload), 2, nullcontext())
        assert_identical(expected[trainer.retries == 1], trainer.state)
        raised += trainer.retries
        assert_settled(offload)
        if allocations.calls < number:
            break
        number += 1
    assert number > 3
    assert raised == 0 if consecutive == 1 else raised > 0
    stats = assert_settled(offload)
    assert_moved(stats, held=True)
    assert stats.bytes_in > 0


def saved(around: Around, offload: Offload, tensors: list[Tensor]) -> list[Any]:
    """Handles of ``tensors``, which they alone hold."""
    with around:
        handles = [offload._hooks.pack(tensor) for tensor in tensors]
        tensors.clear()
    return handles


def test_what_is_on_its_way_out_makes_room_for_what_is_needed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = backend.offload(prefetch_bytes=0)
    values, made, more = ([leaf(32, 32, seed=seed, grad=False) * 1 for seed in range(count)] for count in (2, 2, 3))
    handles = saved(Settled(offload), offload, made)
    with backend.gate() as gate:
        later = saved(offload, offload, more)
        sources = [weakref.ref(handle.storage.origin()) for handle in later if handle.storage.origin() is not None]
        allocations = Allocations(
            backend.runtime, monkeypatch, lambda _: any(source() is not None for source in sources)
        )
        gate.open()
        back = handles[1].unpack()
    assert torch.equal(back, values[1])
    assert allocations.refused or backend.name == "disk", "on a real disk they may have arrived meanwhile"
    del back, handles, later
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.bytes_in > 0
