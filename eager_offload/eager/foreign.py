"""Notices saved-tensor hooks of others that are entered inside an active context of ours.

Autograd calls the innermost hooks only, so what is saved under them is hidden from the outer ones. Those that are
entered through ``torch.autograd.graph.saved_tensors_hooks`` (``save_on_cpu`` and most libraries) can be seen; hooks
that are pushed through torch's private functions cannot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

from torch.autograd.graph import saved_tensors_hooks

from eager_offload._torch import checkpoint_hooks
from eager_offload.tiers.forking import ForkSafeLock

__all__ = ["watch"]

_Enter: TypeAlias = Callable[[saved_tensors_hooks], None]

_lock = ForkSafeLock()
_watchers = 0
_local = threading.local()
#: What stands in the class while somebody watches, and what it took the place of.
_installed: _Enter | None = None
_replaced: _Enter = saved_tensors_hooks.__enter__
#: Ours around `_replaced`, made once: it refers to itself, and one for each `with` would be garbage in a cycle.
_wrapper: _Enter | None = None


class watch:
    """While it is active, calls ``seen`` for each foreign hook that its thread enters."""

    def __init__(self, seen: Callable[[], None]) -> None:
        self._seen = seen
        self._outer: Callable[[], None] | None = None
        self._entered = self._counted = False

    def __enter__(self) -> None:
        global _watchers, _installed, _replaced, _wrapper
        self._outer = getattr(_local, "seen", None)
        _local.seen, self._entered = self._seen, True
        with _lock.lock:
            _watchers += 1
            self._counted = True
            if _watchers == 1:
                current = saved_tensors_hooks.__enter__  # torch's own, or what somebody has put in its place
                if _wrapper is None or current is not _replaced:
                    _replaced, _wrapper = current, _watching(current)
                _installed = _wrapper
                saved_tensors_hooks.__enter__ = _installed  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        """Ends it, as far as it had begun; may be called again."""
        global _watchers, _installed
        if self._entered:
            _local.seen, self._entered = self._outer, False
        with _lock.lock:
            if not self._counted:
                return
            self._counted = False
            _watchers -= 1
            if _watchers == 0:
                # Whoever has wrapped ours meanwhile goes on calling it; it only calls on, from then on.
                if saved_tensors_hooks.__enter__ is _installed:
                    saved_tensors_hooks.__enter__ = _replaced  # type: ignore[method-assign]
                _installed = None


class ours(saved_tensors_hooks):
    """The hooks of this library; never foreign."""


def _watching(replaced: _Enter) -> _Enter:
    def enter(hooks: saved_tensors_hooks) -> None:
        seen: Callable[[], None] | None = getattr(_local, "seen", None)
        # Checkpointing hides what it will recompute, by design, and shows its inputs to the hooks outside.
        if seen is not None and enter is _installed and not isinstance(hooks, (ours, *checkpoint_hooks)):
            seen()
        replaced(hooks)

    return enter
