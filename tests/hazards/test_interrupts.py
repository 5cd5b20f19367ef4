"""H10: whatever interrupts a step, the hooks are gone, nothing is held, and the next step is exact."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

import pytest
from torch import Tensor

from eager_offload.tiers.disk import DiskSlot
from tests.hazards.backends import Backend, Gate, assert_settled, gate_before, hooks_are_gone
from tests.hazards.blocks import Trainer
from tests.hazards.probes import meanwhile
from tests.hazards.programs import REGIMES, Around, Regime, assert_identical, assert_moved, leaf


class Fault(Exception):
    """What a test raises where a user's own code would."""


FAULTS = [Fault, KeyboardInterrupt]


def raising(kind: type[BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise kind("on purpose")

    return fail


class Interrupted(Trainer):
    """Is trained a step at a time, and its steps can be made to fail half-way."""

    def step(
        self,
        around: Around,
        seed: int,
        forward: Callable[[], None] = lambda: None,
        backward: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """One step; ``forward`` and ``backward`` are called in the middle of each."""
        self.optimizer.zero_grad()
        with around:
            h = self.model[:3](leaf(8, 16, seed=seed))
            h.register_hook(lambda _: backward())
            forward()
            loss = self.model[3:](h).square().mean()
        del h
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def undisturbed(steps: int) -> object:
    trainer = Interrupted()
    return [trainer.step(nullcontext(), seed) for seed in range(steps)], trainer.state


@pytest.mark.sampled(3, quick=True)
@pytest.mark.parametrize("regime", REGIMES, ids=str)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", FAULTS)
def test_h10_an_exception_in_the_users_code(
    kind: type[BaseException], where: str, regime: Regime, backend: Backend
) -> None:
    def train(offload: Around) -> object:
        trainer, losses = Interrupted(), []
        for seed in range(4):
            if seed in (1, 2):
                with pytest.raises(kind, match="on purpose"):
                    trainer.step(offload, 100 + seed, **{where: raising(kind)})
                assert hooks_are_gone()
            losses.append(trainer.step(offload, seed))
        return losses, trainer.state

    offload = backend.offload(**regime.fields)
    assert_identical(undisturbed(4), train(regime.around(offload)))
    assert_moved(assert_settled(offload))


@pytest.mark.parametrize("kind", FAULTS)
def test_h10_an_exception_inside_nested_contexts_and_threads(kind: type[BaseException], backend: Backend) -> None:
    outer, inner = backend.offload(), backend.offload()
    trainer = Interrupted()

    def fail() -> None:
        with pytest.raises(kind, match="on purpose"), outer, inner, outer:
            trainer.step(inner, 100, forward=raising(kind))
        assert hooks_are_gone()

    fail()
    backend.in_thread(fail)
    losses = [trainer.step(outer if seed % 2 else inner, seed) for seed in range(4)]
    assert_identical(undisturbed(4), (losses, trainer.state))
    assert_moved(assert_settled(outer))
    assert_moved(assert_settled(inner))


# -- a real signal, while the host waits ------------------------------------------------------------------------------


@contextmanager
def interrupted_at_the_gate(name: str) -> Iterator[Gate]:
    """Holds reads or writes of the disk tier back, and interrupts the main thread once it waits for one of them."""
    waiting, arrived = threading.Event(), threading.Event()

    def interrupt() -> None:
        assert waiting.wait(60)
        while not arrived.wait(0.1):  # again: one that comes right before a system call does not end it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def on_interrupt(number: int, frame: FrameType | None) -> None:
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
    offload = disk.offload(max_inflight_bytes=1)
    trainer = Interrupted()
    losses = [trainer.step(offload, 0)]
    with interrupted_at_the_gate(name) as gate:
        with pytest.raises(KeyboardInterrupt):
            trainer.step(offload, 100)  # a full window in forward, a late reload in backward
        assert hooks_are_gone()
        gate.open()
        losses.append(trainer.step(offload, 1))
    assert_identical(undisturbed(2), (losses, trainer.state))
    assert_moved(assert_settled(offload), 0.7)  # as above
