"""What planning leaves alone: the caller's modes, hooks, compiled code, caches and random numbers, for all threads.

[Note: random numbers]
torch has one default generator for all threads of a process. To put its state back after a trace would have another
thread draw once more what it has drawn meanwhile. So a trace draws from a generator of its own: the recorder gives it
to operators (``recorder.py``), and what sets a state by ``torch.random``, as a checkpoint does, sets that one's as long
as the thread is in ``numbers_of_its_own``. For other threads ``torch.random`` is what it was. The same holds for the
generators of CUDA's devices.

What a model draws from Python's and numpy's own numbers is put back: other threads should draw none meanwhile.

[Note: compiled code]
Dynamo compiles nothing in a dispatch mode, and marks the code that it meets there: that code would never be compiled
again in this process. So a thread that plans runs compiled functions as they were written, without asking Dynamo. torch
has one stance for all threads; other threads, which may be training, have theirs.

[Note: caches]
A ``functools.lru_cache`` that a trace filled would give tensors without numbers to training, and one that was emptied
would compute anew, with other random numbers. So where the Python modules of the model's code name a cache, the thread
that traces finds the function with a cache of its own. Two plans would replace each other's: one is made at a time.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from eager_offload import contexts
from eager_offload.contexts import Patches
from eager_offload.torch_private import Patch
from eager_offload.torch_private.calls import function_modes, without_dispatch_modes
from eager_offload.torch_private.inductor import compiled_frames

_CPU = torch.device("cpu")
#: The class of what ``functools.cache`` and ``lru_cache`` make.
CACHE: Any = type(functools.cache(lambda: None))
#: Packages whose functions name nothing of the user's.
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "eager_offload"})
_caches_lock = threading.RLock()


@contextmanager
def by_itself(device: torch.device = _CPU) -> Iterator[None]:
    """Autograd is on, compiled functions run as they were written, tensors are made on ``device`` unless the program
    says otherwise, and the caller's modes and hooks count for nothing."""
    with (
        _uncompiled(),
        contexts.suspended(),
        without_dispatch_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        is_other = function_modes() or torch.get_default_device() != device  # whatever default the caller has
        with device if is_other else nullcontext():
            yield


@contextmanager
def caches_apart(model: nn.Module, loss: object) -> Iterator[None]:
    """The calling thread neither fills nor empties a cache, of ``functools`` or of the autocast that the caller is in:
    see [Note: caches]."""
    parts = [one for part in (model, loss) if isinstance(part, nn.Module) for one in part.modules()]
    kinds = {kind for one in parts for kind in type(one).__mro__}
    names = {getattr(one, "__module__", None) or "" for one in (*kinds, loss)}
    owners = (*kinds, *(sys.modules[name] for name in names & {*sys.modules}))
    found: list[tuple[Any, str, Any]] = []
    cached, made = torch.is_autocast_cache_enabled(), dict[int, Any]()
    torch.autocast_increment_nesting()
    is_cast = torch.autocast_decrement_nesting() > 0  # a cache that is begun inside is emptied there
    with _caches_lock:
        try:
            torch.set_autocast_cache_enabled(cached and not is_cast)
            for owner in owners:
                for name, value in [*vars(owner).items()]:
                    cache = getattr(value, "__func__", value)  # of a static method
                    if isinstance(cache, CACHE) and not is_library(cache.__module__):
                        own = made[id(cache)] = made.get(id(cache)) or apart(cache, cache.__wrapped__)
                        found.append((owner, name, value))
                        setattr(owner, name, own if cache is value else type(value)(own))
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)
            for owner, name, value in found:
                setattr(owner, name, value)


def apart(cache: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what is ``cache`` for other threads, and for the calling one a cache of ``function``."""
    own, thread = functools.lru_cache(**cache.cache_parameters())(function), threading.get_ident()

    @functools.wraps(cache)
    def call(*args: Any, **named: Any) -> Any:
        return (own if threading.get_ident() == thread else cache)(*args, **named)

    vars(call).update(cache_clear=own.cache_clear, cache_info=own.cache_info)
    return call


def is_library(name: object) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES


class _Local(threading.local):
    def __init__(self) -> None:
        self.on_devices = {}

    generator: torch.Generator | None = None
    #: Of CUDA's devices, by number.
    on_devices: dict[int, torch.Generator]
    is_uncompiled: bool = False


_local = _Local()


class _OfThread:
    def __init__(self, shared: Any) -> None:
        self._shared = shared


class _GeneratorOfThread(_OfThread):
    """What ``torch.random`` has in place of the default generator while any thread traces."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_local.generator or self._shared, name)


class _GeneratorsOfThread(_OfThread, Sequence[Any]):
    """What ``torch.cuda`` has in place of the default generators of its devices while any thread traces."""

    def __len__(self) -> int:
        return len(self._shared)

    def __getitem__(self, number: Any) -> Any:
        shared = self._shared[number]
        if _local.generator is None or not isinstance(number, int):
            return shared
        if number not in _local.on_devices:
            _local.on_devices[number] = shared.clone_state()
        return _local.on_devices[number]


class _StanceOfThread(_OfThread):
    """What Dynamo has in place of its stance while any thread plans."""

    def __getattr__(self, name: str) -> Any:
        return "force_eager" if name == "stance" and _local.is_uncompiled else getattr(self._shared, name)


_generator = Patches(
    lambda: [
        # Functions such as `torch.get_rng_state` ask the module for it.
        *_patch(torch.random, "default_generator", _GeneratorOfThread),
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
    """The calling thread draws from a generator that begins as the default one is, and leaves that alone. Python's and
    numpy's numbers are put back where they have changed."""
    before, generator = (_local.generator, _local.on_devices), torch.Generator("cpu")
    generator.set_state(torch.get_rng_state())
    others, own, numpy = state_of_others(), random.getstate(), sys.modules.get("numpy")
    theirs = None if numpy is None else numpy.random.get_state()
    with _generator.used():
        try:
            _local.generator, _local.on_devices = generator, {}
            yield generator
        finally:
            _local.generator, _local.on_devices = before
            if state_of_others() != others:
                random.setstate(own)
                if numpy is not None:
                    numpy.random.set_state(theirs)


def state_of_others() -> tuple[object, ...]:
    """Where Python's own random numbers are, and numpy's."""
    numpy = sys.modules.get("numpy")
    theirs = () if numpy is None else numpy.random.get_state(legacy=True)
    return random.getstate(), *(part.tobytes() if hasattr(part, "tobytes") else part for part in theirs)
