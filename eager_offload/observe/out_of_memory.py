"""The note on an out-of-memory error: the saved tensors on the device by reason, and the setting that frees most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from eager_offload import contexts
from eager_offload.config import OffloadConfig, size_text
from eager_offload.observe.memory import reason_text
from eager_offload.stats import KeepReason
from eager_offload.tiers.forking import Living
from eager_offload.torch_private.autograd import on_backwards
from eager_offload.torch_private.memory import is_out_of_memory


class Held(NamedTuple):
    """Bytes of saved tensors on the devices of one ``Offload`` at a moment."""

    stays: Counter[KeepReason]
    """Bytes that stay, by reason; of tensors smaller than ``min_bytes``, those of an average step."""
    leaving: int
    """Bytes on their way out."""
    returning: int
    """Bytes that were brought back, or are on their way."""
    prefetch_bytes: int
    """The prefetch window in force."""

    def note(self, config: OffloadConfig) -> str:
        """Returns the note: a line for each reason, most bytes first, and the setting that would have freed most."""
        settings = {
            KeepReason.NEWEST: "keep_last_bytes=0" if config.keep_last_bytes != 0 else "",
            KeepReason.SMALL: "a smaller min_bytes",
            KeepReason.BUDGET: "a larger host_budget or disk_budget, or a disk_path,",
        }
        if config.device_budget is not None:
            settings[KeepReason.NEWEST] = "a smaller device_budget"
        elif config.policy == "free":
            settings[KeepReason.NEWEST] = 'policy="max"'
        rows = [
            (nbytes, reason_text(reason, config, self.prefetch_bytes), settings.get(reason, ""))
            for reason, nbytes in self.stays.items()
        ]
        rows.append((self.leaving, "are on their way out", "a smaller max_inflight_bytes"))
        rows.append((self.returning, "were brought back, or are on their way", "a smaller prefetch_bytes"))
        rows = sorted((row for row in rows if row[0]), reverse=True)
        advice = "no setting would move more of it: a smaller batch or checkpointing frees memory"
        for nbytes, _, setting in reversed(rows):
            if setting:
                advice = f"{setting} would have freed up to {size_text(nbytes)}"
        head = f"eager_offload: {size_text(sum(nbytes for nbytes, *_ in rows))} of saved tensors are on the device"
        return "\n  ".join([head, *(f"{size_text(nbytes)} {what}" for nbytes, what, _ in rows), advice])


class Watching(Protocol):
    """Looks at the backwards of a process."""

    def before_backward(self) -> Any:
        """Returns what ``after_backward`` is given."""

    def after_backward(self, before: Any) -> None:
        """Looks at a backward that is over."""


class _Watch:
    """Counts backwards, and adds the note to their errors, also outside every ``with``."""

    def __init__(self) -> None:
        #: Returns a note on the held bytes of each live ``Offload`` that holds any.
        self.notes: Callable[[], list[str]] = list
        #: Are asked for their state before a backward, and given it after one.
        self.watching: Living[Watching] = Living()
        #: Is called after each backward.
        self.ended: Callable[[], None] = lambda: None
        #: Whether any ``Offload`` is alive.
        self.is_wanted: Callable[[], bool] = lambda: False
        self._patch = on_backwards(self._around)

    def put_on(self) -> None:
        """Begins to watch backwards, until one runs when every ``Offload`` is gone."""
        if self._patch.active is None:
            self._patch.put_on()

    def note(self, error: BaseException | None) -> None:
        """Adds the notes to ``error``, once, if it is an out-of-memory error."""
        if not isinstance(error, Exception) or not is_out_of_memory(error):
            return
        if not any(note.startswith("eager_offload: ") for note in getattr(error, "__notes__", ())):
            for note in self.notes():
                error.add_note(note)

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
                if not self.is_wanted():
                    self._patch.take_off()
            self.ended()
            for one, before in watching:
                one.after_backward(before)
            return result

        return run_backward


watch = _Watch()
