"""H10: whatever ends a step half-way, the hooks are gone, nothing is held, and the next step is exact: an exception, a
signal while the host waits, and a device that is full, after which users take the same step with a smaller batch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload.eager import gather
from eager_offload.tiers.disk import DiskSlot
from eager_offload.torch_private.calls import TorchDispatchMode
from tests.hazards.backends import Backend, Gate, assert_settled, gate_before, hooks_are_gone
from tests.hazards.probes import Allocations, meanwhile
from tests.hazards.programs import REGIMES, Around, Regime, Settled, assert_identical, assert_moved
from tests.programs import Run, leaf
from tests.programs.exceptions import Trainer, undisturbed

ROWS, WIDTH = 8, 32


# -- a real signal, while the host waits ------------------------------------------------------------------------------


@contextmanager
def interrupted_at_the_gate(name: str) -> Iterator[Gate]:
    """Holds reads or writes of the disk tier back, and interrupts the main thread once it waits for one of them."""
    waiting, arrived = threading.Event(), threading.Event()

    def interrupt() -> None:
        assert waiting.wait(60)
        while not arrived.wait(0.1):  # again: one that comes right before a system call does not end it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def on_interrupt(*_: object) -> None:
        arrived.set()
        raise KeyboardInterrupt

    sender, handler = threading.Thread(target=interrupt), signal.signal(signal.SIGINT, on_interrupt)
    sender.start()
    with gate_before(DiskSlot, name) as gate, meanwhile(waiting.set):
        try:
            yield gate
        finally:
            waiting.set()
            arrived.set()
            sender.join()
            signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("name", ["write", "read"])
def test_h10_control_c_while_a_step_waits_for_the_disk(name: str, disk: Backend) -> None:
    offload, trainer = disk.offload(max_inflight_bytes=1), Trainer()
    losses = [trainer.step(Run(offload), 0)]
    with interrupted_at_the_gate(name) as gate:
        with pytest.raises(KeyboardInterrupt):
            trainer.step(Run(offload), 100)  # a full window in forward, a late reload in backward
        assert hooks_are_gone()
        gate.open()
        losses.append(trainer.step(Run(offload), 1))
    assert_identical(undisturbed(2), [losses, trainer.state])
    assert_moved(assert_settled(offload), 0.7)


# -- the device is full -----------------------------------------------------------------------------------------------


def refuse() -> None:
    raise torch.OutOfMemoryError("no room, on purpose")


class FullAt(TorchDispatchMode):
    """The operator of this number finds no memory; the ones before and after it do."""

    sees_offloading = True

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            refuse()
        return func(*args, **(kwargs or {}))


class Retrying(Trainer):
    """Takes a step with half of the batch where the whole finds no memory, or from the start."""

    retries = 0

    def attempt(self, around: Around, seed: int, rows: int) -> None:
        self.optimizer.zero_grad()
        with around:
            h = self.model(leaf(rows, WIDTH, seed=seed))
            loss = (h[:, ::2] * h[:, ::2].exp()).square().mean()  # a view with holes is gathered before it leaves
        loss.backward()

    def train(self, around: Around, seed: int, pressure: Around | None = None, *, halves: bool = False) -> None:
        try:
            with pressure or nullcontext():
                self.attempt(around, seed, ROWS // 2 if halves else ROWS)
        except torch.OutOfMemoryError:
            assert hooks_are_gone()
            self.retries += 1
            self.attempt(around, seed, ROWS // 2)
        self.optimizer.step()


def after(retries: int) -> list[Tensor]:
    """The model behind three steps without offload, of which the second has half of the batch where it is retried."""
    trainer = Retrying()
    for seed in range(3):
        trainer.train(nullcontext(), seed, halves=seed == 1 and retries > 0)
    return trainer.state


@pytest.mark.sampled(3, quick=True)
@pytest.mark.parametrize("regime", [REGIMES[0], REGIMES[2]], ids=str)
def test_h10_out_of_memory_in_any_operator_of_a_step(regime: Regime, backend: Backend) -> None:
    expected, offload, number, reached = [after(0), after(1)], backend.offload(**regime.fields), 1, True
    while reached:
        trainer, full = Retrying(), FullAt(number)
        for seed in range(3):
            trainer.train(regime.around(offload), seed, full if seed == 1 else None)
        assert_identical(expected[trainer.retries], trainer.state)
        del trainer
        assert_settled(offload)
        reached, number = full.left <= 0, number + 7
    assert number > 5 * 7
    assert_moved(assert_settled(offload), held=True)


@pytest.mark.sampled(3, quick=True)
@pytest.mark.parametrize("consecutive", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("regime", REGIMES[:2], ids=str)
def test_h10_no_room_for_a_reload(regime: Regime, consecutive: int, backend: Backend) -> None:
    """A single refusal is absorbed; the second one in a row reaches the user, whose retry is exact."""
    expected, raised, number, reached = [after(0), after(1)], 0, 1, True
    offload = backend.offload(**regime.fields, step_tables=consecutive == 1)
    while reached:
        trainer = Retrying()
        trainer.train(regime.around(offload), 0)
        with pytest.MonkeyPatch.context() as patch:
            allocations = Allocations(backend.runtime, patch, range(number, number + consecutive).__contains__)
            trainer.train(regime.around(offload), 1)
        trainer.train(regime.around(offload), 2)
        assert_identical(expected[trainer.retries], trainer.state)
        assert_settled(offload)
        raised += trainer.retries
        reached, number = allocations.calls >= number, number + 1
    assert number > 4
    assert raised == 0 if consecutive == 1 else raised > 0
    stats = assert_settled(offload)
    assert_moved(stats, held=True)
    assert stats.bytes_in > 0


@pytest.mark.parametrize("refuses", [refuse, lambda: torch.empty(1 << 60)], ids=["as accelerators do", "as a CPU does"])
def test_h10_what_finds_no_room_to_be_gathered_stays(
    refuses: Callable[[], object], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(around: Around) -> object:
        x = leaf(32, 64)
        with around:
            loss = ((x * 2)[:, ::8].square().exp() * 2).sum()
        loss.backward()
        return x.grad

    def as_elements(_: Tensor, elements: Tensor) -> None:
        refused.append(elements.nbytes)
        refuses()

    expected, offload, refused = program(nullcontext()), backend.offload(), list[int]()
    assert_identical(expected, program(Settled(offload)))
    gathered = offload.stats()
    offload.reset_stats()
    monkeypatch.setattr(gather, "_as_elements", as_elements)
    with pytest.warns(RuntimeWarning, match="no memory left to gather") as warned:
        assert_identical(expected, program(Settled(offload)))
    stats = assert_settled(offload)
    assert len(warned) == 1
    assert stats.fallbacks == {"device_full": len(refused)}
    assert stats.kept_bytes["failed"] == 32 * 8 * 4 * len(refused) > 0
    assert gathered.offloaded_bytes - stats.offloaded_bytes == stats.kept_bytes["failed"]
    assert stats.bytes_out > 0, "the rest has left"
