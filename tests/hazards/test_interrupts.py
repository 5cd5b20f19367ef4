"""H10: whatever interrupts a step, the hooks are gone, nothing is held, and the next step is exact."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from eager_offload.tiers.disk import DiskSlot
from tests.hazards.backends import Backend, Gate, assert_settled, gate_before, hooks_are_gone
from tests.hazards.probes import meanwhile
from tests.hazards.programs import assert_identical, assert_moved
from tests.programs import Run
from tests.programs.exceptions import Fault, Trainer, raising, undisturbed


@pytest.mark.parametrize("kind", [Fault, KeyboardInterrupt])
def test_h10_an_exception_inside_nested_contexts_and_threads(kind: type[BaseException], backend: Backend) -> None:
    outer, inner = backend.offload(), backend.offload()
    trainer = Trainer()

    def fail() -> None:
        with pytest.raises(kind, match="on purpose"), outer, inner, outer:
            trainer.step(Run(inner), 100, forward=raising(kind))
        assert hooks_are_gone()

    fail()
    backend.in_thread(fail)
    losses = [trainer.step(Run(outer if seed % 2 else inner), seed) for seed in range(4)]
    assert_identical(undisturbed(4), [losses, trainer.state])
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
    trainer = Trainer()
    losses = [trainer.step(Run(offload), 0)]
    with interrupted_at_the_gate(name) as gate:
        with pytest.raises(KeyboardInterrupt):
            trainer.step(Run(offload), 100)  # a full window in forward, a late reload in backward
        assert hooks_are_gone()
        gate.open()
        losses.append(trainer.step(Run(offload), 1))
    assert_identical(undisturbed(2), [losses, trainer.state])
    assert_moved(assert_settled(offload), 0.7)  # as above
