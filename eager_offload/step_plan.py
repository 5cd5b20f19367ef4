"""What a step did, as numbers: recorded in one forward and its backward, followed by those that are like it.

Numbers only, like ``schedule.py``: saves are counted from 0 in each forward, in the order of packing; sizes are bytes.

    StepRecorder   is told what the engine does in one forward
    StepPlan       what that was, which a forward that is like it follows: see eager/following.py
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, cast

from eager_offload.config import OffloadConfig, size_text
from eager_offload.errors import ConfigError
from eager_offload.machine import Machine
from eager_offload.stats import KeepReason, Relief

#: The form of the file that ``StepPlan.save`` writes.
_FORMAT = 1
#: So often a save may be asked for: more are of a backward that runs over one graph again and again.
_MOST_ASKS = 4


class Fate(StrEnum):
    """What becomes of a saved tensor."""

    KEEP = "keep"
    """It stays where it is."""
    SHARE = "share"
    """Its storage is that of an earlier save, and goes with that."""
    OFFLOAD = "offload"
    """Its storage leaves, whole."""
    DECIDE = "decide"
    """It is decided anew in each step."""


# To ask the class for its member takes longer than to compare.
_KEEP, _SHARE, _OFFLOAD, _DECIDE = Fate
_NEWEST = KeepReason.NEWEST
#: Reasons that a user gives, which are looked at each time.
SAID = (KeepReason.REGION, KeepReason.MARKED)


class Coded(NamedTuple):
    """How a storage travels that a codec packs."""

    codec: str
    dtype: str
    maker: str
    """The node of the operator that made the tensor; empty for none."""
    nbytes: int
    """Bytes that travel."""


@dataclass(frozen=True, slots=True)
class Save:
    """One saved tensor."""

    fate: Fate
    reason: KeepReason | None = None
    """Why it stays; ``None`` where it does not. Of one that is decided anew: why it did, where a user has said so."""
    nbytes: int = 0
    """Bytes of the tensor as saved."""
    storage_nbytes: int = 0
    """Bytes of its storage; 0 for one that shares an earlier one's, or is decided anew."""
    autograd_bytes: int = 0
    """Bytes that autograd would hold because of this save; 0 where an earlier one has saved the storage."""
    requires_grad: bool = False
    owner: int = -1
    """The save whose storage it is, its own number for the first; -1 for one whose storage is not followed."""
    slot: int = -1
    """The number of its place among those that the step reserves; -1 where it does not leave."""
    start: int = -1
    """The save after which its copy starts; the number of saves where that is when the context is left."""
    release: int = dataclasses.field(default=-1, compare=False)
    """The save before which its source was seen to have gone; -1 where that was later than the last.

    A run looks there whether its copy is over, as it does before each storage that leaves, and waits for none: what is
    late goes at a later one. A capture, in which nothing is ever over, has compute wait there. Of a storage that a
    codec packs, whose source goes then, it is what was packed that goes here.
    """
    coded: Coded | None = None
    """How it travels; ``None``: as it is. Of one that shares a storage which is rounded: its own maker."""

    @property
    def slot_nbytes(self) -> int:
        """Bytes of its place."""
        return self.storage_nbytes if self.coded is None else self.coded.nbytes


@dataclass(frozen=True, slots=True)
class Ask:
    """One unpack. A save may have several: a function that looks at ``saved_tensors`` twice, or a second backward."""

    save: int
    bring: tuple[int, ...] = ()
    """First saves of the storages that are expected next, in the order of need."""
    drop: tuple[int, ...] = ()
    """First saves of the storages that are not expected any more."""
    keep: bool = False
    """Whether its own storage is asked for again soon."""
    last: bool = True
    """Whether it is the last unpack of its storage."""


class Totals(NamedTuple):
    """Bytes of a step; ``slots`` is what it reserves in a tier."""

    saved: int
    offloaded: int
    shared: int
    kept: int
    slots: int


@dataclass(frozen=True)
class StepPlan:
    """What a step does with what autograd saves, as numbers; ``print`` shows it as a table.

    ``saves`` are in the order of packing, ``asks`` in that of unpacking. ``end`` names the saves whose copies start
    when the context around forward is left. ``slots`` are the bytes of each place that the step needs in a tier.
    """

    saves: tuple[Save, ...]
    asks: tuple[Ask, ...] = ()
    end: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()

    @property
    def totals(self) -> Totals:
        """Bytes of all saves together, and of those that leave, that share and that stay, and of the slots."""
        nbytes: Counter[Fate] = Counter()
        for save in self.saves:
            nbytes[save.fate] += save.nbytes
        return Totals(sum(nbytes.values()), nbytes[_OFFLOAD], nbytes[_SHARE], nbytes[_KEEP], sum(self.slots))

    @property
    def decided_bytes(self) -> int:
        """Bytes of the saves that are decided anew, but for those that stayed since a user has said so."""
        return sum(save.nbytes for save in self.saves if save.fate is _DECIDE and save.reason is None)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the saves that leave, or may."""
        return sum(save.nbytes for save in self.saves if save.fate is not _KEEP and save.reason not in SAID)

    @property
    def asks_again(self) -> bool:
        """Whether a save is asked for more than once."""
        return len({ask.save for ask in self.asks}) < len(self.asks)

    @property
    def newest_bytes(self) -> int:
        """Bytes of the storages that could leave and stay, since backward asks for them at once."""
        return sum(save.storage_nbytes for save in self.saves if save.fate is _KEEP and save.owner >= 0)

    def starts(self) -> tuple[tuple[int, ...], ...]:
        """The saves whose copies start after each save."""
        found: list[list[int]] = [[] for _ in self.saves]
        for number, save in sorted(enumerate(self.saves), key=lambda item: (item[1].start, item[0])):
            if save.fate is _OFFLOAD and save.start < len(self.saves):
                found[save.start].append(number)
        return tuple(map(tuple, found))

    def is_like(self, other: StepPlan) -> bool:
        """Whether the same forward could have led to both, whatever was decided in it."""
        return len(self.saves) == len(other.saves) and all(
            one.nbytes == two.nbytes and one.requires_grad == two.requires_grad
            for one, two in zip(self.saves, other.saves, strict=True)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to ``path``, as JSON; a file that is there is replaced."""
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(content, separators=(",", ":")), "utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepPlan:
        """The plan that ``save`` wrote to ``path``.

        Raises:
            ConfigError: the file holds no such plan, or one of another version.
        """
        try:
            content = json.loads(Path(path).read_text("utf-8"))
            plan = cls._from_dict(content)
            plan.check()
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{os.fspath(path)!r} holds no step plan that this version can read: {error}") from error
        return plan

    @classmethod
    def _from_dict(cls, content: Mapping[str, Any]) -> StepPlan:
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r} instead of {_FORMAT}")
        saves = (
            Save(
                **{
                    **one,
                    "fate": Fate(one["fate"]),
                    "reason": None if one["reason"] is None else KeepReason(one["reason"]),
                    "coded": Coded(*one["coded"]) if one.get("coded") else None,
                }
            )
            for one in content["saves"]
        )
        asks = (Ask(**{**one, "bring": tuple(one["bring"]), "drop": tuple(one["drop"])}) for one in content["asks"])
        return cls(tuple(saves), tuple(asks), tuple(content["end"]), tuple(content["slots"]))

    def check(self) -> None:
        """Looks whether the numbers fit together.

        Raises:
            ConfigError: they do not.
        """
        self._check_kinds()
        if not self.saves or not self.asks:
            raise ConfigError(f"it has no {'unpacks' if self.saves else 'saves'}")
        for number, save in enumerate(self.saves):
            self._check_save(number, save)
        leaving = [number for number, save in enumerate(self.saves) if save.fate is Fate.OFFLOAD]
        if sorted(self.saves[number].slot for number in leaving) != list(range(len(self.slots))):
            raise ConfigError(
                f"the {len(leaving)} storages that leave do not have one of the {len(self.slots)} slots each"
            )
        if sorted(number for number in leaving if self.saves[number].start == len(self.saves)) != sorted(self.end):
            raise ConfigError("what leaves at the end is not what `end` says")
        followed = {number for number, save in enumerate(self.saves) if save.owner >= 0}
        storages = {save.owner for save in self.saves} - {-1}
        asked = {ask.save for ask in self.asks}
        if not asked <= followed:
            raise ConfigError("an unpack is of a save that is not followed")
        for ask in self.asks:
            if not storages >= {*ask.bring, *ask.drop} or self.saves[ask.save].owner in ask.drop:
                raise ConfigError(f"the unpack of save {ask.save} brings or drops what it cannot")

    def _check_kinds(self) -> None:
        """Looks whether there are numbers where numbers belong: 1.0 is equal to 1, and no place in a list."""
        fields: tuple[Any, ...] = (self.saves, self.asks, self.end, self.slots)
        if not all(type(one) is tuple for one in fields) or not _are_numbers(self.end) or not _are_numbers(self.slots):
            raise ConfigError("saves, asks, end and slots are not tuples, the last two of whole numbers")
        for number, save in enumerate(cast(tuple[Any, ...], self.saves)):
            if (
                type(save) is not Save
                or (type(save.fate), type(save.requires_grad)) != (Fate, bool)
                or type(save.reason) not in (KeepReason, type(None))
                or not _are_numbers((save.nbytes, save.storage_nbytes, save.autograd_bytes))
                or not _are_numbers((save.owner, save.slot, save.start, save.release), least=-1)
                or (save.coded is not None and [type(one) for one in save.coded] != [str, str, str, int])
            ):
                raise ConfigError(f"save {number} holds something else than its numbers")
        for number, ask in enumerate(cast(tuple[Any, ...], self.asks)):
            if (
                type(ask) is not Ask
                or {type(ask.bring), type(ask.drop)} != {tuple}
                or {type(ask.keep), type(ask.last)} != {bool}
                or not _are_numbers((ask.save, *ask.bring, *ask.drop))
            ):
                raise ConfigError(f"unpack {number} holds something else than its numbers")

    def _check_save(self, number: int, save: Save) -> None:
        match save.fate:
            case Fate.SHARE:
                fits = 0 <= save.owner < number and self.saves[save.owner].owner == save.owner
            case Fate.OFFLOAD:
                fits = save.owner == number <= save.start <= len(self.saves) and 0 <= save.slot < len(self.slots)
                fits = fits and 0 < save.slot_nbytes == self.slots[save.slot] <= save.storage_nbytes
            case Fate.KEEP:
                fits = save.reason is not None and save.owner in (-1, number)
            case _:
                fits = save.owner == -1
        fits = fits and (save.fate is _OFFLOAD or save.slot == save.start == -1)
        if not fits or save.autograd_bytes > save.storage_nbytes:
            raise ConfigError(f"save {number} cannot {save.fate.value} as it says")

    def __str__(self) -> str:
        totals = self.totals
        lines = [
            f"{len(self.saves):,} saves: {size_text(totals.saved)}, of which {size_text(totals.offloaded)} leave, "
            f"{size_text(totals.shared)} share and {size_text(totals.kept)} stay; "
            f"unpacks {len(self.asks):,}; slots {len(self.slots):,}, of {size_text(totals.slots)}",
            f"{'saves':>13}  {'what':<18}{'each':>12}  {'start after':>13}  {'source goes':>13}",
        ]
        first = 0
        for key, group in itertools.groupby(enumerate(self.saves), key=lambda item: _row(*item)):
            count = len(list(group))
            span = f"{first:,}" if count == 1 else f"{first:,}-{first + count - 1:,}"
            what, nbytes, start, release = key
            lines.append(f"{span:>13}  {what:<18}{nbytes:>12}  {start:>13}  {release:>13}".rstrip())
            first += count
        return "\n".join(lines)


def _are_numbers(values: tuple[object, ...], least: int = 0) -> bool:
    """Whether all are whole numbers, ``least`` or more."""
    return all(type(one) is int and one >= least for one in values)


class Stretch(NamedTuple):
    """A part of a step that was measured: from the end of the one before, or the beginning of forward, on."""

    save: int
    """The number of the save at which it ends, or that is asked for then."""
    is_ask: bool
    seconds: float
    """That compute took, without what it has waited for transfers."""


class Timing(NamedTuple):
    """What a step has taken, in parts that follow each other."""

    stretches: tuple[Stretch, ...]
    waited_seconds: float
    """That compute has waited for transfers in all of them."""
    out: float | None
    back: float | None
    """Bytes a second of the link; ``None`` where nothing has travelled."""


class Adapted(NamedTuple):
    """A plan that was made anew."""

    plan: ComputedPlan
    is_other: bool
    """Whether other storages move; else only what is expected of the step is another."""


class ComputedPlan:
    """What a planner has worked out, as far as an ``Offload`` follows it; sizes in bytes, times in seconds."""

    config: OffloadConfig
    """The settings that it was made for."""
    device_budget: int
    """Bytes of the device that a step may take."""
    policy: str
    """``"least"``, ``"free"`` or ``"max"``."""
    machine: Machine
    """The device."""

    @property
    def step_plans(self) -> tuple[StepPlan, ...]:
        """What forwards follow from the first one on."""
        raise NotImplementedError

    @property
    def is_small(self) -> bool:
        """Whether beside parameters the step saves nothing that is as large as ``min_bytes``."""
        raise NotImplementedError

    @property
    def peak_bytes(self) -> int:
        """That the step takes of the device at most."""
        raise NotImplementedError

    @property
    def step_seconds(self) -> float:
        """Of forward and backward."""
        raise NotImplementedError

    @property
    def seen_bytes(self) -> int | None:
        """That are in use at a save or an ask, at most; ``None`` where that is not known."""
        raise NotImplementedError

    @property
    def grown_bytes(self) -> int | None:
        """By which ``seen_bytes`` are more than what is in use when the step begins; ``None`` where it is not known."""
        raise NotImplementedError

    @property
    def relief(self) -> Relief | None:
        """The least larger budget with which compute waits little; ``None`` where there is none. May take seconds."""
        raise NotImplementedError

    def is_off(self, timing: Timing) -> bool:
        """Whether a step has taken another time than is expected of it. Takes no time itself."""
        raise NotImplementedError

    def adapted(self, surplus: int, timing: Timing | None) -> Adapted | None:
        """The plan for a device on which so many bytes more are in use than this one knows of, or fewer.

        Args:
            timing: what operators take, and the link; ``None``: as this one has it.

        Returns:
            Over the budget, one that takes less; else one whose step is shorter, or with ``timing`` what is to be
            expected of this one. ``None`` where there is none.
        """
        raise NotImplementedError


def _row(number: int, save: Save) -> tuple[str, str, str, str]:
    """A row of the table: alike for saves that are alike."""
    what = save.fate.value if save.reason is None else f"{save.fate.value} ({save.reason.value})"
    if save.fate is Fate.SHARE:
        what += f" {number - save.owner} back"
    if save.fate is not Fate.OFFLOAD:
        return what, size_text(save.nbytes), "", ""
    release = f"{save.release - number:,} later" if save.release >= 0 else "at the end"
    if save.coded is not None:
        what, release = f"{what} as {save.coded.codec}", "when packed"
    return what, size_text(save.nbytes), f"{save.start - number:,} later", release


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
    maker: str | None = None


class _Started(NamedTuple):
    """The copy of a storage has started."""

    saves: int
    """How many there were by then."""
    coded: Coded | None


class _Unpacked(NamedTuple):
    """One unpack, in the engine's names of saves."""

    name: int
    bring: tuple[int, ...]
    drop: tuple[int, ...]
    keep: bool


class StepRecorder:
    """Writes down what the engine does in one forward and its backward. Callers hold the offloader's lock.

    The engine has a name for each save that it follows and calls a storage by the name of its first save.
    """

    __slots__ = (
        "_alive",
        "_asked",
        "_kept",
        "_needed",
        "_parts",
        "_released",
        "_saves",
        "_started",
        "_times_asked",
        "is_asked_over",
        "is_early",
        "is_void",
        "looks_again",
    )

    def __init__(self, *, looks_again: bool = False) -> None:
        #: Whether what the program has kept alive is taken, to see whether it still does.
        self.looks_again = looks_again
        self._saves: list[_Recorded] = []
        self._asked: list[_Unpacked] = []
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

    @property
    def names(self) -> list[int]:
        """What the engine calls each save; -1 for one that it does not follow."""
        return [one.name for one in self._saves]

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
        maker: str | None = None,
    ) -> None:
        """A save of a storage that is to leave.

        Args:
            owner: the name of the storage, -1 for one of another forward.
            storage_nbytes, autograd_bytes: of the storage, where this is its first save.
            maker: of what shares a storage that is rounded, as in ``Coded``.
        """
        self._saves.append(_Recorded(nbytes, requires_grad, None, name, owner, storage_nbytes, autograd_bytes, maker))

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
        self._asked.append(_Unpacked(name, tuple(bring), tuple(drop), keep))
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
            if save.fate is _OFFLOAD:
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
        nbytes, grad, whole = one.nbytes, one.requires_grad, one.storage_nbytes
        kept, start = self._kept.get(one.name), self._started.get(one.name)
        if one.name < 0:
            if one.reason not in (None, *SAID):
                return Save(_KEEP, one.reason, nbytes, whole, requires_grad=grad)
        elif one.owner in self._alive and whole:
            return Save(_KEEP, KeepReason.ALIVE, nbytes, whole, requires_grad=grad)
        elif one.owner != one.name:
            if (owner := numbers.get(one.owner)) is not None:
                coded = saves[owner].coded
                coded = None if coded is None or one.maker is None else coded._replace(maker=one.maker)
                return Save(_SHARE, saves[owner].reason, nbytes, requires_grad=grad, owner=owner, coded=coded)
        elif not whole or one.name in self._parts or one.name not in self._needed:
            pass
        elif start is not None and kept in (None, _NEWEST):
            # Where it is kept, backward has come to it before its stream had: it may be otherwise next time.
            release = self._released.get(one.name, -1)
            saved, coded = start
            return Save(_OFFLOAD, None, nbytes, whole, one.autograd_bytes, grad, number, slots, saved, release, coded)
        elif kept is _NEWEST:
            return Save(_KEEP, kept, nbytes, whole, one.autograd_bytes, grad, number)
        reason = one.reason or self._kept.get(one.owner)
        return Save(_DECIDE, reason if reason in SAID else None, nbytes, requires_grad=grad)

    def _asks(self, saves: Sequence[Save], numbers: Mapping[int, int]) -> list[Ask]:
        """The unpacks of saves that are followed; what another one has set off, the next of these does."""
        found: list[tuple[int, tuple[int, ...], tuple[int, ...], bool]] = []
        bring: list[int] = []
        drop: list[int] = []
        for asked in self._asked:
            if asked.bring:
                bring += [numbers[name] for name in asked.bring if name in numbers]
            if asked.drop:
                drop += [numbers[name] for name in asked.drop if name in numbers]
            number = numbers.get(asked.name)
            if number is not None:
                owner = saves[number].owner
                others = tuple([one for one in drop if one != owner]) if drop else ()
                found.append((number, tuple(bring), others, asked.keep))
                bring, drop = [], []
        last = {saves[number].owner: rank for rank, (number, *_) in enumerate(found)}
        return [Ask(*ask, last[saves[ask[0]].owner] == rank) for rank, ask in enumerate(found)]
