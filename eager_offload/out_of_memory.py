"""The note on an out-of-memory error: the saved tensors on the device, and the setting that would have freed most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from eager_offload import contexts
from eager_offload._torch import Patch, module_called_in, on_backwards
from eager_offload.config import OffloadConfig, size_literal, size_text
from eager_offload.kernels.codecs import is_out_of_memory
from eager_offload.stats import KeepReason
from eager_offload.step_memory import reason_text
from eager_offload.tiers.finalizers import Living

#: How many modules a note names for each reason.
_MOST_NAMES = 3
#: The beginning of each note.
_PREFIX = "eager_offload: "


class Held(NamedTuple):
    """Bytes of saved tensors on the devices of one ``Offload`` at a moment."""

    saved: int
    """Bytes that autograd would hold there without offload."""
    away: int
    """The part of them that is not there."""
    stays: Counter[tuple[KeepReason, torch.nn.Module | None]]
    """Bytes that stay, by reason and by the module that saved them, if that is known."""
    leaving: int
    """Bytes on their way out."""
    returning: int
    """Bytes that were brought back, or are on their way."""
    is_saving: bool
    """Whether the calling thread is in its ``with``, and has saved a tensor."""
    prefetch_bytes: int
    """The prefetch window in force."""
    small: int
    """Bytes that a step saves of tensors smaller than ``min_bytes``, on average."""


def add_note(error: Exception, found: list[tuple[Held, OffloadConfig]]) -> None:
    """Adds a note on the held bytes of each ``Offload`` to ``error``, once."""
    if any(note.startswith(_PREFIX) for note in getattr(error, "__notes__", ())):
        return
    names = dict(_names(error.__traceback__))
    for held, config in found:
        if held.saved or held.is_saving:
            error.add_note("\n  ".join(_lines(held, config, names)))


def _lines(held: Held, config: OffloadConfig, names: dict[int, str]) -> Iterator[str]:
    saved, away = size_text(held.saved), size_text(held.away)
    yield f"{_PREFIX}{saved} are saved for backward, of which {away} have left the device"
    reasons = Counter[KeepReason]()
    for (reason, _), nbytes in held.stays.items():
        reasons[reason] += nbytes
    for reason, nbytes in reasons.most_common():
        if nbytes:
            whose = Counter({module: own for (why, module), own in held.stays.items() if why is reason and own})
            text = reason_text(reason, config, held.prefetch_bytes)
            yield f"{size_text(nbytes)}{_whose(whose, names)} {text}"
    if held.leaving:
        yield f"{size_text(held.leaving)} are on their way out"
    if held.returning:
        yield f"{size_text(held.returning)} were brought back for backward, or are on their way"
    if held.small:
        yield f"{size_text(held.small)} more, a step, are of tensors smaller than min_bytes"
    yield _advice(held, reasons, config)


def _whose(whose: Counter[torch.nn.Module | None], names: dict[int, str]) -> str:
    """Returns the names of the modules with most of the bytes."""
    known = [(module, nbytes) for module, nbytes in whose.most_common() if module is not None]
    if not known:
        return ""
    said = [f"{_name(module, names)} {size_text(nbytes)}" for module, nbytes in known[:_MOST_NAMES]]
    others = len(whose) - len(said)
    return f" ({', '.join(said)}{f' and {others} more' if others else ''})"


def _name(module: torch.nn.Module, names: dict[int, str]) -> str:
    name, kind = names.get(id(module)), type(module).__name__
    return f"{name} ({kind})" if name else kind


def _names(trace: TracebackType | None) -> Iterator[tuple[int, str]]:
    """Yields the names of the modules inside the outermost one that the error has passed through."""
    while trace is not None:
        if (found := module_called_in(trace.tb_frame)) is not None:
            for name, module in found.named_modules():
                yield id(module), name
            return
        trace = trace.tb_next


def _advice(held: Held, reasons: Counter[KeepReason], config: OffloadConfig) -> str:
    """Returns a sentence about the setting that would have freed most, by these numbers."""
    newest = reasons[KeepReason.NEWEST]
    if config.device_budget is not None:
        knob = "a smaller device_budget"
    elif config.is_free:
        knob = 'policy="max" in place of policy="free"'
    else:
        knob = "keep_last_bytes=0"
    is_zero = config.keep_last_bytes == 0
    window, ahead = max(held.leaving // 4, 1), max(held.returning // 4, 1)
    ways = {
        knob: 0 if is_zero else newest,
        f'max_inflight_bytes="{size_literal(window)}"': held.leaving - window,
        f'prefetch_bytes="{size_literal(ahead)}"': held.returning - ahead,
        "a smaller min_bytes": held.small,
        "a larger host_budget or disk_budget, or a disk_path": reasons[KeepReason.BUDGET],
    }
    best = max(ways, key=lambda way: ways[way])
    if ways[best] <= 0:
        return "no setting would move more of it: a smaller batch or checkpointing frees memory"
    return f"{best} would have freed up to {size_text(ways[best])}"


class Watching(Protocol):
    """Looks at the backwards of a process."""

    def before_backward(self) -> Any:
        """Returns what ``after_backward`` is given."""

    def after_backward(self, before: Any) -> None:
        """Looks at a backward that is over."""


class _Watch:
    """Counts backwards, and adds the note to their errors, also outside every ``with``."""

    def __init__(self) -> None:
        #: Returns the held bytes of each live ``Offload``.
        self.held: Callable[[], list[tuple[Held, OffloadConfig]]] = list
        #: Are asked for their state before a backward, and given it after one.
        self.watching: Living[Watching] = Living()
        #: Is called after each backward.
        self.ended: Callable[[], None] = lambda: None
        #: Whether any ``Offload`` is alive.
        self.is_wanted: Callable[[], bool] = lambda: False
        self._patch: Patch | None = on_backwards(self._around)

    def put_on(self) -> None:
        """Begins to watch backwards, until one runs when every ``Offload`` is gone."""
        if self._patch is not None and self._patch.active is None:
            self._patch.put_on()

    def note(self, error: BaseException | None) -> None:
        """Adds a note on the held bytes to ``error`` if it is an out-of-memory error."""
        if isinstance(error, Exception) and is_out_of_memory(error):
            add_note(error, self.held())

    def _around(self, replaced: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(*arguments: Any, **named: Any) -> Any:
            contexts.thread.backwards += 1
            contexts.process.backwards += not contexts.thread.is_outside
            watching = [(one, one.before_backward()) for one in self.watching] if self.watching else ()
            try:
                result = replaced(*arguments, **named)
            except Exception as error:
                self.note(error)
                raise
            finally:
                if self._patch is not None and not self.is_wanted():
                    self._patch.take_off()
            self.ended()
            for one, before in watching:
                one.after_backward(before)
            return result

        return run_backward


watch = _Watch()
