"""Which ``Offload`` a thread is inside of: what is saved there, in eager and in compiled code, is that one's."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from eager_offload._torch import top_pack_hook
from eager_offload.config import OffloadConfig
from eager_offload.tiers.forking import ForkSafeLock

if TYPE_CHECKING:
    from eager_offload.offload import Offload

__all__ = ["configuration_on_top", "current", "entered", "has_hook", "left", "packing", "serving"]


class _Stack(threading.local):
    def __init__(self) -> None:
        self.offloads: list[Offload] = []


_stack = _Stack()
#: By the text of their configuration, which of them was entered last in any thread.
_latest: dict[str, weakref.ref[Offload]] = {}
#: Those that serve graphs whose code is run outside of every ``with``, by the text of their configuration.
_standing: dict[str, Offload] = {}
_standing_lock = ForkSafeLock()
#: The texts of configurations, by the identity of their pack hooks.
_pack_hooks: dict[int, str] = {}


def entered(offload: Offload) -> None:
    """The calling thread goes into a ``with offload``."""
    _latest[offload.config_text] = weakref.ref(offload)
    _stack.offloads.append(offload)


def left(offload: Offload) -> None:
    """The calling thread has left the innermost ``with offload``, if it was in one."""
    offloads = _stack.offloads
    for position in reversed(range(len(offloads))):
        if offloads[position] is offload:
            del offloads[position]
            return


def current() -> Offload | None:
    """The one whose ``with`` the calling thread entered last."""
    offloads = _stack.offloads
    return offloads[-1] if offloads else None


def packing(text: str) -> Offload:
    """Whose saved tensors the calling thread packs, by hooks for the configuration ``text``.

    The innermost ``with`` is the one whose hooks autograd calls.
    """
    offloads = _stack.offloads
    if offloads and offloads[-1].config_text == text:
        return offloads[-1]
    return _entered_last(text) or serving(text)


def serving(text: str) -> Offload:
    """Who carries out what a graph compiled for the configuration ``text`` asks for, on the calling thread.

    The innermost of that configuration whose ``with`` the thread is in; outside, one for the whole process, made when
    it is first needed.
    """
    for offload in reversed(_stack.offloads):
        if offload.config_text == text:
            return offload
    if configuration_on_top() == text and (last := _entered_last(text)) is not None:
        return last
    standing = _standing.get(text)
    if standing is None:
        from eager_offload.offload import Offload

        with _standing_lock.lock:
            standing = _standing.get(text) or Offload(OffloadConfig.from_text(text))
            _standing[text] = standing
    return standing


def has_hook(text: str, pack_hook: object) -> None:
    """Tells by which pack hook, which lives for ever, the configuration ``text`` is known to autograd."""
    _pack_hooks[id(pack_hook)] = text


def configuration_on_top() -> str | None:
    """The text of the configuration whose hooks the calling thread's saved tensors go to now.

    Not that of the innermost ``with``: where other hooks hide ours, compilers know nothing of us, and would keep a
    graph with transfers in it for calls that are in no ``with`` at all.
    """
    return _pack_hooks.get(id(top_pack_hook()))


def _entered_last(text: str) -> Offload | None:
    """Hooks also travel to the threads that autograd runs a backward on, which are in no ``with`` themselves."""
    latest = _latest.get(text)
    return None if latest is None else latest()
