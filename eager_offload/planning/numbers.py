"""What planning leaves alone: the caller's modes, hooks and compiled code, and random numbers, of other threads too.

[Note: random numbers]
torch has one default generator for all threads of a process. To put its state back after a trace would have another
thread draw once more what it has drawn meanwhile. So a trace draws from a generator of its own: the recorder gives it
to operators (``recorder.py``), and what sets a state by ``torch.random``, as a checkpoint does, sets that one's as long
as the thread is in ``numbers_of_its_own``. For other threads ``torch.random`` is what it was. The same holds for the
generators of CUDA's devices.

Real steps draw from the default generator, as kernels do that are given none, and put it back: other threads should
draw nothing meanwhile. So is put back what a model draws from Python's and numpy's own numbers, in a trace too.

[Note: compiled code]
Dynamo compiles nothing in a dispatch mode, and marks the code that it meets there: that code would never be compiled
again in this process. So a thread that plans runs compiled functions as they were written, without asking Dynamo. torch
has one stance for all threads; other threads, which may be training, have theirs.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from eager_offload import contexts
from eager_offload._torch import Patch, compiled_frames, function_modes, generators, without_dispatch_modes
from eager_offload.contexts import Patches

_CPU = torch.device("cpu")


@contextmanager
def by_itself(device: torch.device = _CPU) -> Iterator[None]:
    """Autograd is on, compiled functions run as they were written, tensors are made on ``device`` unless the program
    says otherwise, and the caller's modes and hooks count for nothing."""
    with ExitStack() as stack:
        stack.enter_context(_uncompiled())
        stack.enter_context(contexts.outside())
        stack.enter_context(without_dispatch_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if function_modes() or torch.get_default_device() != device:  # whatever default the caller has
            stack.enter_context(device)
        yield


class _Local(threading.local):
    def __init__(self) -> None:
        self.on_devices = {}

    generator: torch.Generator | None = None
    #: Of CUDA's devices, by number.
    on_devices: dict[int, torch.Generator]
    is_uncompiled: bool = False


_local = _Local()


class _GeneratorOfThread:
    """What ``torch.random`` has in place of the default generator while any thread traces."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    def __getattr__(self, name: str) -> Any:
        return getattr(_local.generator or self._shared, name)


class _GeneratorsOfThread(Sequence[Any]):
    """What ``torch.cuda`` has in place of the default generators of its devices while any thread traces."""

    def __init__(self, shared: Sequence[Any]) -> None:
        self._shared = shared

    def __len__(self) -> int:
        return len(self._shared)

    def __getitem__(self, number: Any) -> Any:
        shared = self._shared[number]
        if _local.generator is None or not isinstance(number, int):
            return shared
        if number not in _local.on_devices:
            _local.on_devices[number] = shared.clone_state()
        return _local.on_devices[number]


class _StanceOfThread:
    """What Dynamo has in place of its stance while any thread plans."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    def __getattr__(self, name: str) -> Any:
        return "force_eager" if name == "stance" and _local.is_uncompiled else getattr(self._shared, name)


_generator = Patches(
    lambda: [
        *_patch(generators, "default_generator", _GeneratorOfThread),
        *_patch(torch.cuda, "default_generators", _GeneratorsOfThread),
    ]
)
_stance = Patches(lambda: _patch(compiled_frames(), "_stance", _StanceOfThread))


def _patch(owner: object, name: str, around: Callable[[Any], object]) -> list[Patch]:
    return [Patch(owner, name, around)] if hasattr(owner, name) else []


@contextmanager
def _uncompiled() -> Iterator[None]:
    """The calling thread runs compiled functions as they were written: see [Note: compiled code]."""
    before = _local.is_uncompiled
    compiled_frames()  # imported here, and not while others wait for the lock
    with _stance.used():
        _local.is_uncompiled = True
        try:
            yield
        finally:
            _local.is_uncompiled = before


@contextmanager
def numbers_of_its_own() -> Iterator[torch.Generator]:
    """The calling thread draws from a generator that begins as the default one is, and leaves that alone."""
    before, generator = (_local.generator, _local.on_devices), torch.Generator("cpu")
    generator.set_state(torch.get_rng_state())
    with _others_put_back(), _generator.used():
        try:
            _local.generator, _local.on_devices = generator, {}
            yield generator
        finally:
            _local.generator, _local.on_devices = before


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
