"""Writes down what becomes of what one forward saves; ``captured_plan.py`` says what a plan is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from eager_offload.eager.captured_plan import SAID, Ask, Coded, Fate, Save, StepPlan
from eager_offload.stats import KeepReason

#: So often a save may be asked for: more are of a backward that runs over one graph again and again.
_MOST_ASKS = 4


@dataclass(slots=True)
class _Recorded:
    """What is known of one save."""

    nbytes: int
    requires_grad: bool
    #: Why it stays; ``None`` for one that is decided anew each time, or that has a handle which the engine knows.
    reason: KeepReason | None = None
    #: What the engine calls it and the first save of its storage; -1 where it has no such handle.
    name: int = -1
    owner: int = -1
    #: See ``Save``. Of a first save: 0 where its storage is decided anew each time.
    storage_nbytes: int = 0
    autograd_bytes: int = 0
    codec: str = "identity"


class _Started(NamedTuple):
    """The copy of a storage has started."""

    saves: int
    """How many there were by then."""
    coded: Coded | None


class StepRecorder:
    """Writes down what the engine does in one forward and its backward. Callers hold the offloader's lock.

    The engine has a name for each save that it follows and calls a storage by the name of its first save.
    """

    def __init__(self, *, looks_again: bool = False) -> None:
        #: Whether what the program has kept alive is taken, to see whether it still does.
        self.looks_again = looks_again
        self._saves: list[_Recorded] = []
        # In the engine's names, too.
        self._asked: list[Ask] = []
        # How often each save was asked for, by name.
        self._times_asked: Counter[int] = Counter()
        # By the name of a storage: how its copy started, how many saves there were when its source had gone, and why
        # it stayed.
        self._started: dict[int, _Started] = {}
        self._released: dict[int, int] = {}
        self._kept: dict[int, KeepReason] = {}
        # Storages whose original was alive when they were asked for, and those of which a part has left by itself.
        self._alive: set[int] = set()
        self._parts: set[int] = set()
        # Storages that were asked for, once all is over.
        self._needed: set[int] = set()
        #: Whether something happened that no plan can say.
        self.is_void = False
        #: Whether that is a save that was asked for over and over.
        self.is_asked_over = False
        #: Whether forwards of its kind are to do otherwise than it, once more is known of them.
        self.is_early = False

    @property
    def saves(self) -> int:
        """How many there were."""
        return len(self._saves)

    def keep(self, nbytes: int, requires_grad: bool, reason: KeepReason | None, storage_nbytes: int = 0) -> None:
        """A save that stays for ``reason``; ``None``, and what a user has said: it is to be decided anew each time."""
        self._saves.append(_Recorded(nbytes, requires_grad, reason, storage_nbytes=storage_nbytes))

    def take(
        self,
        name: int,
        owner: int,
        nbytes: int,
        requires_grad: bool,
        storage_nbytes: int,
        autograd_bytes: int,
        codec: str = "identity",
    ) -> None:
        """A save of a storage that is to leave.

        Args:
            owner: the name of the storage, -1 for one of another forward.
            storage_nbytes, autograd_bytes: of the storage, where this is its first save.
            codec: as in ``Save``.
        """
        self._saves.append(_Recorded(nbytes, requires_grad, None, name, owner, storage_nbytes, autograd_bytes, codec))

    def left_in_parts(self, owner: int) -> None:
        """A part of a storage is to leave by itself: it is decided anew each time, and so is the storage."""
        self._parts.add(owner)

    def was_alive(self, owner: int) -> None:
        """The original of a storage was alive when it was asked for: to move it frees nothing."""
        self._alive.add(owner)

    def started(self, owner: int, coded: Coded | None = None) -> None:
        """The copy of a storage has started, packed as ``coded`` says."""
        self._started[owner] = _Started(len(self._saves), coded)

    def released(self, owner: int) -> None:
        """The source of a storage has gone."""
        if not self._asked:
            self._released[owner] = len(self._saves)

    def asked(
        self, name: int, owner: int, bring: Iterable[int], drop: Iterable[int], keep: bool, kept: KeepReason | None
    ) -> None:
        """An unpack.

        Args:
            bring, drop: names of storages, as in ``Ask``.
            keep: as in ``Ask``.
            kept: why its storage has stayed; ``None`` where it has left.
        """
        if self.is_void:
            return  # it would grow with each backward
        self._times_asked[name] += 1
        if self._times_asked[name] > _MOST_ASKS:
            self.is_void = self.is_asked_over = True
        self._asked.append(Ask(name, tuple(bring), tuple(drop), keep))
        if kept is not None:
            self._kept[owner] = kept

    def plan(self) -> StepPlan | None:
        """What was written down; ``None`` where it cannot be followed, or nothing in it."""
        plan = self.whole_plan()
        return None if plan is None or not plan.asks else plan

    def whole_plan(self) -> StepPlan | None:
        """What was written down, be it that nothing is to move; ``None`` where something happened that no plan says."""
        saves: list[Save] = []
        numbers: dict[int, int] = {}  # by name, of those that are followed
        owners = {one.name: one.owner for one in self._saves}
        # A graph may be dropped while others are made: no slot is reserved for what none asks for.
        self._needed = {owners[name] for name in self._times_asked if name in owners}
        slots: list[int] = []
        for number, one in enumerate(self._saves):
            save = self._save(number, one, saves, numbers, len(slots))
            if save.fate is Fate.OFFLOAD:
                slots.append(save.slot_nbytes)
            if save.owner >= 0:
                numbers[one.name] = number
            saves.append(save)
        asks = self._asks(saves, numbers)
        if self.is_void:
            return None
        end = [numbers[name] for name, start in self._started.items() if start.saves == len(saves) and name in numbers]
        return StepPlan(tuple(saves), tuple(asks), tuple(end), tuple(slots))

    def _save(self, number: int, one: _Recorded, saves: Sequence[Save], numbers: Mapping[int, int], slots: int) -> Save:
        """Save ``number`` as the plan has it; the others are what is known of those before it."""
        nbytes, grad, whole, held = one.nbytes, one.requires_grad, one.storage_nbytes, one.autograd_bytes
        kept, start = self._kept.get(one.name), self._started.get(one.name)
        if one.name < 0:
            if one.reason not in (None, *SAID):
                return Save(Fate.KEEP, one.reason, nbytes, whole, requires_grad=grad)
        elif one.owner in self._alive and whole:
            return Save(Fate.KEEP, KeepReason.ALIVE, nbytes, whole, requires_grad=grad)
        elif one.owner != one.name:
            if (owner := numbers.get(one.owner)) is not None:
                reason = saves[owner].reason
                return Save(Fate.SHARE, reason, nbytes, requires_grad=grad, owner=owner, codec=one.codec)
        elif not whole or one.name in self._parts or one.name not in self._needed:
            pass
        elif start is not None and kept in (None, KeepReason.NEWEST):
            # Where it is kept, backward has come to it before its stream had: it may be otherwise next time.
            release = self._released.get(one.name, -1)
            leaves = Save(Fate.OFFLOAD, None, nbytes, whole, held, grad, number, slots, start.saves, release)
            return replace(leaves, coded=start.coded, codec=one.codec)
        elif kept is KeepReason.NEWEST:
            return Save(Fate.KEEP, kept, nbytes, whole, held, grad, number, codec=one.codec)
        reason = one.reason or self._kept.get(one.owner)
        return Save(Fate.DECIDE, reason if reason in SAID else None, nbytes, requires_grad=grad)

    def _asks(self, saves: Sequence[Save], numbers: Mapping[int, int]) -> list[Ask]:
        """The unpacks of saves that are followed; what another one has set off, the next of these does."""
        found: list[Ask] = []
        bring: list[int] = []
        drop: list[int] = []
        for asked in self._asked:
            bring += [numbers[name] for name in asked.bring if name in numbers]
            drop += [numbers[name] for name in asked.drop if name in numbers]
            if (number := numbers.get(asked.save)) is not None:
                others = tuple([one for one in drop if one != saves[number].owner])
                found.append(Ask(number, tuple(bring), others, asked.keep))
                bring, drop = [], []
        last = {saves[ask.save].owner: rank for rank, ask in enumerate(found)}
        return [replace(ask, last=last[saves[ask.save].owner] == rank) for rank, ask in enumerate(found)]
