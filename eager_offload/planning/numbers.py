"""Isolates a trace from the process: modes, hooks, compiled code, caches and random numbers, also of other threads.

[Note: random numbers]
torch has one default generator for all threads. Restoring its state after a trace would make another thread repeat the
numbers that it drew during the trace. So a trace has its own generator, which the recorder passes to operators, and
which replaces ``torch.random``'s on the tracing thread, for code that gets or sets a state (e.g. a checkpoint). The
same holds for CUDA's generators. Python's and numpy's are restored, so other threads should not draw from them.

[Note: compiled code]
Dynamo marks code that it sees inside a dispatch mode, and never compiles it afterwards. So a planning thread runs
compiled functions eagerly, without calling Dynamo. torch has one stance for all threads; the patch changes it for the
planning thread only.

[Note: caches]
A ``functools.lru_cache`` filled by a trace would return fake tensors to training; an emptied one would be recomputed
with other random numbers. So the tracing thread gets its own cache for each cached function in the classes and Python
modules of the model's code. One plan is made at a time, because two plans would replace each other's caches.
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
#: The class of a function with ``functools.cache`` or ``lru_cache``.
CACHE: Any = type(functools.cache(lambda: None))
#: Packages whose functions refer to no object of the user's.
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "eager_offload"})
_caches_lock = threading.RLock()


@contextmanager
def by_itself(device: torch.device = _CPU) -> Iterator[None]:
    """Enables autograd, runs compiled functions eagerly, makes ``device`` the default, and disables the caller's modes
    and hooks."""
    with (
        _uncompiled(),
        contexts.suspended(),
        without_dispatch_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        is_other = function_modes() or torch.get_default_device() != device
        with device if is_other else nullcontext():
            yield


@contextmanager
def caches_apart(model: nn.Module, loss: object) -> Iterator[None]:
    """Keeps the calling thread from changing ``functools`` caches and the cache of the caller's autocast: see
    [Note: caches]."""
    parts = [one for part in (model, loss) if isinstance(part, nn.Module) for one in part.modules()]
    kinds = {kind for one in parts for kind in type(one).__mro__}
    names = {getattr(one, "__module__", None) or "" for one in (*kinds, loss)}
    owners = (*kinds, *(sys.modules[name] for name in names & {*sys.modules}))
    found: list[tuple[Any, str, Any]] = []
    cached, made = torch.is_autocast_cache_enabled(), dict[int, Any]()
    torch.autocast_increment_nesting()
    is_cast = torch.autocast_decrement_nesting() > 0  # an autocast entered inside clears its own cache
    # The patches of two plans would replace each other.
    with _caches_lock:
        try:
            torch.set_autocast_cache_enabled(cached and not is_cast)
            for owner in owners:
                for name, value in [*vars(owner).items()]:
                    cache = getattr(value, "__func__", value)  # unwraps a static method
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
    """Returns a function that calls ``cache`` on other threads, and a new cache of ``function`` on this one."""
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
    on_devices: dict[int, torch.Generator]
    is_uncompiled: bool = False


_local = _Local()


class _OfThread:
    def __init__(self, shared: Any) -> None:
        self._shared = shared


class _GeneratorOfThread(_OfThread):
    """Replaces ``torch.random``'s default generator while any thread traces."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_local.generator or self._shared, name)


class _GeneratorsOfThread(_OfThread, Sequence[Any]):
    """Replaces ``torch.cuda``'s default generators while any thread traces."""

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
    """Replaces Dynamo's stance while any thread plans."""

    def __getattr__(self, name: str) -> Any:
        return "force_eager" if name == "stance" and _local.is_uncompiled else getattr(self._shared, name)


_generator = Patches(
    lambda: [
        # Functions such as `torch.get_rng_state` look it up in the module.
        *_patch(torch.random, "default_generator", _GeneratorOfThread),
        *_patch(torch.cuda, "default_generators", _GeneratorsOfThread),
    ]
)
_stance = Patches(lambda: _patch(compiled_frames(), "_stance", _StanceOfThread))


def _patch(owner: object, name: str, around: Callable[[Any], object]) -> list[Patch]:
    return [Patch(owner, name, around)] if hasattr(owner, name) else []


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Runs compiled functions eagerly on the calling thread: see [Note: compiled code]."""
    before = _local.is_uncompiled
    compiled_frames()  # imports Dynamo before the lock of the patches is taken
    with _stance.used():
        _local.is_uncompiled = True
        try:
            yield
        finally:
            _local.is_uncompiled = before


@contextmanager
def numbers_of_its_own() -> Iterator[torch.Generator]:
    """Gives the calling thread a copy of the default generator, and restores Python's and numpy's random states: see
    [Note: random numbers]."""
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
    numpy = sys.modules.get("numpy")
    theirs = () if numpy is None else numpy.random.get_state(legacy=True)
    return random.getstate(), *(part.tobytes() if hasattr(part, "tobytes") else part for part in theirs)
