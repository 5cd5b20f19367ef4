"""What planning leaves alone: the modes and hooks of the caller, and random numbers, of other threads too.

[Note: random numbers]
torch has one default generator for all threads of a process. To put its state back after a trace would have another
thread draw once more what it has drawn meanwhile. So a trace draws from a generator of its own: the recorder gives it
to operators (``recorder.py``), and what sets a state by ``torch.random``, as a checkpoint does, sets that one's as long
as the thread is in ``numbers_of_its_own``. For other threads ``torch.random`` is what it was.

Real steps draw from the default generator, as kernels do that are given none, and put it back: other threads should
draw nothing meanwhile. So is put back what a model draws from Python's and numpy's own numbers, in a trace too.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from eager_offload import active
from eager_offload._torch import Patch, function_modes, generators, without_dispatch_modes


@contextmanager
def by_itself() -> Iterator[None]:
    """Autograd is on, and the caller's modes, hooks and default device count for nothing."""
    with ExitStack() as stack:
        stack.enter_context(active.outside())
        stack.enter_context(without_dispatch_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if function_modes() or torch.get_default_device().type != "cpu":  # whatever default the caller has
            stack.enter_context(torch.device("cpu"))
        device = torch.accelerator.current_accelerator()
        if device is not None and torch.is_autocast_enabled(device.type):  # what stands for it is on the CPU
            stack.enter_context(torch.autocast("cpu", torch.get_autocast_dtype(device.type)))
        yield


class _Local(threading.local):
    generator: torch.Generator | None = None


_local = _Local()


class _OfThread:
    """What ``torch.random`` has in place of the default generator while any thread traces."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    def __getattr__(self, name: str) -> Any:
        return getattr(_local.generator or self._shared, name)


_lock = threading.Lock()
_users = 0
_patch = Patch(generators, "default_generator", _OfThread)


@contextmanager
def numbers_of_its_own() -> Iterator[torch.Generator]:
    """The calling thread draws from a generator that begins as the default one is, and leaves that alone."""
    before, generator = _local.generator, torch.Generator("cpu")
    generator.set_state(torch.get_rng_state())
    with _others_put_back():
        _count(1)
        try:
            _local.generator = generator
            yield generator
        finally:
            _local.generator = before
            _count(-1)


def _count(more: int) -> None:
    """So many threads more trace, or fewer."""
    global _users
    with _lock:
        before, _users = _users, _users + more
        if hasattr(generators, "default_generator") and 0 in (before, _users):
            (_patch.put_on if _users else _patch.take_off)()


@contextmanager
def numbers_put_back() -> Iterator[None]:
    """Random numbers go on afterwards as if none were drawn."""
    state = torch.get_rng_state()
    with _others_put_back():
        try:
            yield
        finally:
            torch.set_rng_state(state)


@contextmanager
def _others_put_back() -> Iterator[None]:
    """Python's and numpy's numbers are what they were, where they have changed."""
    before, own, numpy = state_of_others(), random.getstate(), sys.modules.get("numpy")
    theirs = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        if state_of_others() != before:
            random.setstate(own)
            if numpy is not None:
                numpy.random.set_state(theirs)


def state_of_others() -> tuple[object, ...]:
    """Where Python's own random numbers are, and numpy's."""
    numpy = sys.modules.get("numpy")
    theirs = () if numpy is None else numpy.random.get_state(legacy=True)
    return random.getstate(), *(part.tobytes() if hasattr(part, "tobytes") else part for part in theirs)
