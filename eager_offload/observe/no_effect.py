"""Warns once about a context that has no effect, and about training in which nothing moved."""

from __future__ import annotations

import atexit
import os
import sys

from eager_offload import contexts
from eager_offload.config import OffloadConfig
from eager_offload.contexts import Forward
from eager_offload.core.modules import MatchedModules
from eager_offload.errors import users_frame, warn, warn_once
from eager_offload.observe.memory import why
from eager_offload.stats import Accounts, KeepReason

#: The number of forwards after which a plain loop is checked.
_LOOKED_AT = 3
_EMPTY = (
    "autograd recorded operators inside the context, but no saved tensor could be seen: other hooks inside it hide "
    "them, or the forward ran elsewhere. Enter this context inside the others, around the forward alone"
)
_NESTED = (
    "another Offload, entered inside this context, took all that was saved here: autograd gives a saved tensor to the "
    "innermost one alone, so this one moves nothing. Leave one of the two out"
)
_BACKWARD_ALONE = (
    "this context is around backward alone, but tensors are saved in forward, so nothing moves. Put "
    "`with offload:` around the forward; backward may run inside or outside"
)
_UNSEEN = (
    f"no saved tensor was seen in {_LOOKED_AT} contexts, so nothing moved: put `with offload:` around the forward of "
    "a model that trains, under grad mode"
)
_FOREIGN = (
    "other saved-tensor hooks were entered inside this context and hide the tensors saved there. Enter "
    "this context inside theirs, or leave one of the two out"
)
#: Keys of the warnings that explain why nothing moved; one of them is enough.
_HIDDEN = {"nothing", "empty", "foreign", "nested", "unseen"}
_WITHOUT_CALLS = (
    "{field}={patterns} has had no effect so far: no module that it names has been called. A pattern matches calls "
    "module(x), but not module.forward(x) or other methods: name a module around it, or write "
    "`with eager_offload.no_offload():` there"
)
_INSTEAD = (
    "although backwards have run since: write `with offload:` around the forward, or call offload.compile(model); "
    "an Offload that is not needed may be left out"
)


class Making:
    """The line that made an ``Offload`` which has not been used yet."""

    def __init__(self) -> None:
        _, frame = users_frame()
        self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self._process, self._backwards = os.getpid(), contexts.process.backwards

    @property
    def is_unused(self) -> bool:
        """Whether this process has run a backward since then."""
        return os.getpid() == self._process and contexts.process.backwards > self._backwards


#: For every unused ``Offload``, alive or not, up to ``_MOST_UNUSED``.
unused: set[Making] = set()
_MOST_UNUSED = 1000


class NoEffectWarnings:
    def __init__(self, config: OffloadConfig, accounts: Accounts) -> None:
        self._config, self._accounts = config, accounts
        #: Forwards that saved a tensor.
        self.forwards = 0
        #: Forwards without saves, since the last forward with saves.
        self._unseen = 0
        self._making: Making | None = None

    def expect_use(self) -> None:
        """Begins to watch for use: ``warn_if_unused`` and the end of the process report an unused ``Offload``."""
        if len(unused) < _MOST_UNUSED:
            self._making = Making()
            unused.add(self._making)

    def note_use(self) -> None:
        """Ends the watch of ``expect_use``: the ``Offload`` is used, or its caller checks that itself."""
        if self._making is not None:
            unused.discard(self._making)
            self._making = None

    def warn_if_unused(self) -> None:
        """Warns if the ``Offload`` was not used although the thread has trained."""
        if self._making is not None and self._making.is_unused:
            self.note_use()
            warn(f"nothing of this Offload was used, {_INSTEAD}")

    def look_at(self, forward: Forward, matched: MatchedModules, *, is_own: bool) -> None:
        """Checks a finished forward of the thread; ``is_own``: a tensor was saved to this ``Offload``."""
        with self._accounts.lock:
            seen = forward.seen()
            if is_own or seen.packed:
                self._unseen = 0
                self.forwards += 1
                if not is_own:
                    warn_once("nested", _NESTED, self._accounts.said)
                if self.forwards == _LOOKED_AT:
                    self.warn_if_nothing_moved()
                    # Traced code may have called the modules unseen.
                    for field, patterns in {} if contexts.compiled.is_set() else matched.without_calls().items():
                        warn_once(field, _WITHOUT_CALLS.format(field=field, patterns=patterns), self._accounts.said)
            elif contexts.compiled.is_set():
                return
            elif seen.nodes:
                self._accounts.counters.empty_forwards += 1
                warn_once("empty", _EMPTY, self._accounts.said)
            elif not self.forwards and forward.may_save:
                self._unseen += 1
                if seen.backwards:
                    warn_once("unseen", _BACKWARD_ALONE, self._accounts.said)
                elif self._unseen == _LOOKED_AT:
                    warn_once("unseen", _UNSEEN, self._accounts.said)

    def saw_foreign_hooks(self, count: int) -> None:
        """Counts ``count`` pairs of other hooks that hid saves from a context, and warns about them."""
        if count:
            with self._accounts.lock:
                self._accounts.counters.foreign_hooks += count
            warn_once("foreign", _FOREIGN, self._accounts.said)

    def expect_hidden(self, message: str | None = None) -> None:
        """Warns with ``message``, if any, about other hooks that hide saves, and suppresses warnings that would follow
        from them."""
        if message is not None:
            warn_once("foreign", message, self._accounts.said)
        self._accounts.said.update(_HIDDEN)

    def warn_if_nothing_moved(self, moved_before: int = 0, because: str | None = None) -> None:
        """Warns once, with the reason, if forwards have run and nothing was offloaded.

        A plain loop is checked after its third forward and in ``close``, an integration at the end of training.

        Args:
            moved_before: the ``offloaded_bytes`` of the stats when training began.
            because: the reason if no saved tensor was seen.
        """
        if self._accounts.said & _HIDDEN:
            return
        stats = self._accounts.counters.snapshot(self._config)
        reported = stats.kept_bytes.keys() & {KeepReason.BUDGET, KeepReason.FAILED}  # these warn by themselves
        if stats.offloaded_bytes == moved_before and not reported:
            message = f"nothing moved, because {because or why(stats, self._config)}"
            warn_once("nothing", message, self._accounts.said)


@atexit.register
def _tell_of_unused() -> None:
    """Reports unused ``Offload`` objects at the end of a process that did not fail."""
    if found := [one.where for one in unused if one.is_unused and not hasattr(sys, "last_value")]:
        print(f"eager_offload: nothing of the Offload made at {min(found)} was used, {_INSTEAD}", file=sys.stderr)
