"""What is known of a step before it runs: the table of a step like it, in which each of its saves is looked up.

Numbers only, like ``core/schedule.py``: saves are counted from 0 in each step, sizes are bytes, times are seconds.

    Step         one forward of one thread on one device, and its backward: logs what it saves and asks for, and looks
                 each save up while they are those of a table
    StepLog      what it leaves behind when its graph is gone
    StepTable    what follows from that for the next one: what becomes of each save, and in which order backward asks
    StepTables   those of one device: which one a step is looked up in, and when one is forgotten

[Note: a table is a hint]
A step whose saves are as a table has them, one after the other, is told what became of each. At the first one that
differs it is looked up in another table that has had all of it so far, and where there is none the step goes on as an
unknown one: what it saved until then has the same handles, and is in the same queue. At the first unpack out of order
the rest is expected in the reverse of packing. Selection, sharing, sequence numbers and versions are asked in any step.
So a table that does not fit costs time and changes no bit.

[Note: sizes that vary]
Where a router sends other tokens to each expert, some sizes differ in every step. A step that has the saves of a table,
and at least an eighth of their sizes, is one more of its kind if as many such tables as are remembered have come one
time each: few sizes that take turns have tables of their own. Those saves vary from then on. A step whose save varies
is told nothing of that one, and goes on in the table. With a controller each size is a kind of its own.

[Note: what a step teaches]
    MOVE     it was asked for no sooner than it could have been away and back: it leaves as soon as it is final
    STAY     it was asked for sooner: it stays as long as it is among the newest bytes. All of a step stays that saves
             hardly more than what may stay in any case
    REST     by the device's own times it was asked for before it could have been away: it stays in any case
    KEEP     its original was still alive when it was asked for, so that to move it frees nothing
    SHARE    its bytes are an earlier save's, which waits for the last save of its storage
Where there is a budget, or only what the link hides moves, ``core/budget.py`` says what moves: ``KnownTable.share``.
"""

from __future__ import annotations

import copy
import itertools
import math
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

from eager_offload.config import size_text
from eager_offload.core.budget import Controller, Kind, Timeline, hidden, least_windows, share
from eager_offload.core.schedule import StepUses, Windows
from eager_offload.errors import ScheduleMismatchError
from eager_offload.stats import Accounts, KeepReason, Stage
from eager_offload.tiers.forking import FinalizerRecord

#: How many tables are remembered: the forwards of one step may differ, of a generator and a discriminator say.
_MOST_TABLES = 8
#: The same where a controller goes by them: an unknown step moves everything.
_MOST_CONTROLLED = 64
#: So many steps in a row that differ from a table, and it is forgotten.
_MOST_MISSES = 3
#: After how many steps that are alike the next one is looked up, where the config says "auto".
_ALIKE = 3
#: What the program kept alive is taken in one step of so many, to see whether it still does.
_LOOK_AGAIN = 16
#: So many steps after they were timed, two of a kind are timed again.
_TIME_AGAIN = 64
#: Of a step of the kind of a table, one save in so many has the same size at least.
_SAME = 8
#: Saves of one step: a context that is never left, with a graph that is never whole, would fill the memory.
_MOST_SAVES = 1 << 16


class Fate(StrEnum):
    """What becomes of a saved tensor."""

    KEEP = "keep"
    """It stays where it is, for a reason."""
    SHARE = "share"
    """Its storage is that of an earlier save, and goes with that."""
    MOVE = "move"
    """It leaves as soon as it is final."""
    STAY = "stay"
    """It could leave, and stays as long as it is among the newest bytes."""
    REST = "rest"
    """It could leave, and stays whatever else there is: backward asks for it before a copy could be over."""


# To ask the class for its member takes longer than to compare.
_KEEP, _SHARE, _MOVE, _STAY, _REST = Fate
_MAY_MOVE = _MOVE, _STAY, _REST

#: Of a save what a step is compared by: the fields of a ``Row`` up to ``owner``, in that order.
Facts: TypeAlias = tuple[int, int, bool, int]


@dataclass(frozen=True, slots=True)
class Row:
    """One saved tensor of a step, of those that may move."""

    nbytes: int
    """Bytes of the tensor as saved."""
    storage_nbytes: int
    """Bytes that move with it: of its storage, or of the part of that which it takes."""
    requires_grad: bool
    owner: int
    """The save that has brought its storage in, its own number for that one; -1 where that was of an earlier step."""
    fate: Fate
    reason: KeepReason | None = None
    """Why it is kept."""
    last_save: int = -1
    """The last save of its storage before backward; -1 where it is saved once."""


@dataclass(frozen=True)
class StepTable:
    """What a step saves that may move, and in which order it asks for that; ``print`` shows it as a table.

    ``rows`` are in the order of packing. ``order`` has their numbers in the order of unpacking; what is asked for
    again, as by a backward in two halves, is there twice.
    """

    rows: tuple[Row, ...]
    order: tuple[int, ...]

    @cached_property
    def movable_bytes(self) -> int:
        """Bytes of the storages that leave, or could and stay."""
        return sum([row.storage_nbytes for row in self.rows if row.fate in _MAY_MOVE])

    @property
    def moved_bytes(self) -> int:
        """Bytes of the storages that leave as soon as they are final."""
        return sum(row.storage_nbytes for row in self.rows if row.fate is _MOVE)

    def __str__(self) -> str:
        nbytes = {fate: sum(row.nbytes for row in self.rows if row.fate is fate) for fate in Fate}
        lines = [
            f"{len(self.rows):,} saves: {size_text(sum(nbytes.values()))}, of which {size_text(nbytes[_MOVE])} leave, "
            f"{size_text(nbytes[_SHARE])} share, {size_text(nbytes[_STAY] + nbytes[_REST])} stay among the newest and "
            f"{size_text(nbytes[_KEEP])} are kept; unpacks {len(self.order):,}",
            f"{'saves':>13}  {'what':<18}{'each':>12}  {'last save':>13}",
        ]
        first = 0
        for (what, each, last), group in itertools.groupby(enumerate(self.rows), key=lambda item: _shown(*item)):
            count = len(list(group))
            span = f"{first:,}" if count == 1 else f"{first:,}-{first + count - 1:,}"
            lines.append(f"{span:>13}  {what:<18}{each:>12}  {last:>13}".rstrip())
            first += count
        return "\n".join(lines)


def _shown(number: int, row: Row) -> tuple[str, str, str]:
    """A row as it is printed: alike for saves that are alike."""
    what = row.fate.value if row.reason is None else f"{row.fate.value} ({row.reason.value})"
    if row.fate is _SHARE and row.owner >= 0:
        what += f" {number - row.owner} back"
    last = f"{row.last_save - number:,} later" if row.last_save >= 0 else ""
    return what, size_text(row.nbytes), last


class StepLog:
    """What one step has saved and asked for; lists are by number of save."""

    __slots__ = (
        "ahead",
        "alive",
        "asked_at",
        "asks",
        "before_backward",
        "facts",
        "first",
        "fraction",
        "is_known",
        "kept",
        "known",
        "packed_at",
        "taught",
        "teaches",
    )

    def __init__(self) -> None:
        self.facts: list[Facts] = []
        #: When each was packed, and the bytes that were on their way out before it.
        self.packed_at: list[float] = []
        self.ahead: list[int] = []
        #: How many there were when the first one was asked for.
        self.before_backward = 0
        #: The saves as they were asked for, and when each was for the first time.
        self.asks: list[int] = []
        self.asked_at: dict[int, float] = {}
        #: Those whose storage was alive when it was asked for, or was not looked at, since it was before.
        self.alive: set[int] = set()
        #: Those that have brought in a storage that leaves before others do where a budget lets some stay.
        self.first: set[int] = set()
        #: The table that it was like, from its first save to its last ask; ``None`` where it was like none.
        self.known: KnownTable | None = None
        #: The table that it has taught, once its graph is gone.
        self.taught: KnownTable | None = None
        #: The fraction that a controller has set for it; ``None`` where it turned out to be like no table.
        self.fraction: float | None = None
        #: Whether a table began with its first save.
        self.is_known = False
        #: Movable bytes that stayed because of that.
        self.kept = 0
        #: Whether further steps may be like it.
        self.teaches = True

    @property
    def kind(self) -> KnownTable | None:
        """The table of its kind; that which it has taught, once its graph is gone."""
        return self.known if self.taught is None else self.taught

    def times(
        self, saved: Mapping[int, float], asked: Mapping[int, float], link: Link | None, windows: Windows
    ) -> Times:
        """Returns when the storages could leave and were asked for, of a step of which something was.

        Args:
            saved, asked: by its number, when a save was made and asked for first, in seconds.
            link: ``None`` where nothing has been moved that could tell, as in a step of which a graph is captured: then
                all saves and asks follow each other in one second.
        """
        if link is None:
            saved = {number: float(number) for number in range(len(self.facts))}
            asked = {number: float(len(saved) + rank) for rank, number in enumerate(asked)}
            rate = max(sum(facts[1] for number, facts in enumerate(self.facts) if facts[3] == number), 1) / len(saved)
            link = Link(rate, rate)
        final, first_asked, turn = dict[int, float](), dict[int, float](), min(asked.values())
        later = turn
        for number in reversed(range(len(self.facts))):
            owner = self.facts[number][3]
            final.setdefault(owner, later)
            later = saved.get(number, later) if owner == number else later
        for number, seconds in asked.items():
            first_asked.setdefault(self.facts[number][3], seconds)
        return Times(
            final,
            first_asked,
            turn,
            max(asked.values()) - min(saved.values()),
            link,
            windows.inflight,
            windows.prefetch,
        )

    def table(self, link: Link | None, before: StepTable | None = None, in_vain: Container[int] = ()) -> StepTable:
        """Returns the table for a step like this one.

        Args:
            link: ``None`` where nothing has been moved that could tell.
            before: the table of an earlier step with the same saves; rows that stay as they are come from it.
            in_vain: saves whose storages rest.
        """
        known = () if before is None else before.rows
        owners = [facts[3] for facts in self.facts]
        last_saves = {owner: number for number, owner in enumerate(owners[: self.before_backward])}
        first_asked = {owners[number]: seconds for number, seconds in reversed(self.asked_at.items())}
        rows = []
        for number, facts in enumerate(self.facts):
            reason, last = None, last_saves.get(number, number)
            if owners[number] != number:
                fate, last = _SHARE, number
            elif number in self.alive:
                fate, reason = _KEEP, KeepReason.ALIVE
            elif number in in_vain:
                fate = _REST
            elif link is None:
                fate = _STAY
            else:
                # Until it could be away and back, behind those that were on their way out.
                travels = (self.ahead[number] + facts[1]) / link.out + facts[1] / link.back
                rested = first_asked.get(number, math.inf) - self.packed_at[number]
                fate = _MOVE if rested >= travels else _STAY
            last_save = last if last > number else -1
            row = known[number] if known else None
            if row is None or (row.nbytes, row.storage_nbytes, row.fate, row.reason, row.last_save) != (
                *(*facts[:2], fate, reason, last_save),
            ):
                row = Row(*facts, fate, reason, last_save)
            rows.append(row)
        order = tuple([number for number in self.asks if owners[number] not in self.alive])
        return StepTable(tuple(rows), order)


@dataclass(frozen=True, slots=True)
class Link:
    """What travels in a second; bytes, each way."""

    out: float
    back: float


class Times(NamedTuple):
    """When the storages of a step were saved and asked for, and how fast they travelled; in seconds."""

    final: Mapping[int, float]
    """By the save that has brought a storage in, when its last save was followed by one that brought another in."""
    asked: Mapping[int, float]
    """By the save that has brought a storage in, in the order in which they were asked for, when that was first."""
    turn: float
    """When backward began."""
    seconds: float
    """From the first save to the last ask."""
    link: Link
    window: int
    """Bytes that may be on their way out."""
    ahead: int
    """Bytes that may be brought back early."""


class KnownTable:
    """A table, and how the steps were that were looked up in it."""

    __slots__ = (
        "_shared",
        "_timed_after",
        "facts",
        "first",
        "in_vain",
        "is_timed",
        "kind",
        "least",
        "misses",
        "order",
        "seen",
        "table",
        "timed",
        "times",
        "varies",
    )

    def __init__(self, table: StepTable, facts: list[Facts]) -> None:
        self.facts = facts
        #: As of the last step like it; see ``StepLog.first``.
        self.first: set[int] = set()
        #: Saves whose sizes differ from step to step: see [Note: sizes that vary].
        self.varies: set[int] = set()
        #: How many steps were like it, and how many of the last ones in a row differed.
        self.times = self.misses = 0
        #: The state of its kind, for a controller.
        self.kind = Kind()
        #: Of the second step like it: the first one may have met kernels and memory that were not there yet.
        self.seen: Times | None = None
        #: The first step of it that the device was asked for the times of, until there is a second one.
        self.timed: Times | None = None
        #: By those two: whether there were and after how many steps, the least windows, the saves whose storages rest.
        self.is_timed, self._timed_after = False, 0
        self.least: tuple[int, int] | None = None
        self.in_vain: frozenset[int] = frozenset()
        self._shared: tuple[float, StepTable, int] | None = None
        self.table = table
        self.take(table)

    def take(self, table: StepTable, seen: Times | None = None) -> None:
        """``table`` comes in place of its own, for the same saves, and ``seen`` if it has seen no two steps."""
        if self.times < 2:
            self.seen = seen
        if self.times < 2 or self.table.rows != table.rows:
            self._shared = None
        self.table = table
        #: The saves in the order in which they are asked for the first time.
        self.order = tuple(dict.fromkeys(table.order))

    def others(self, facts: list[Facts]) -> set[int] | None:
        """Returns the saves of a step with those ``facts`` that have other sizes; ``None`` where it is of another
        kind."""
        if len(facts) != len(self.facts):
            return None
        differ = {number for number, one in enumerate(facts) if one != self.facts[number]}
        is_like = all(facts[number][2:] == self.facts[number][2:] for number in differ)
        return differ if is_like and _SAME * len(differ) <= (_SAME - 1) * len(facts) else None

    def vary(self, facts: list[Facts], differ: set[int]) -> None:
        """Takes the sizes of one more step in place of its own."""
        self.facts, self._shared = facts, None
        self.varies |= differ

    def has(self, number: int, facts: Facts) -> bool:
        """Returns whether save ``number`` is as the table has it, or is one that varies."""
        if number == len(self.facts):
            return False
        own = self.facts[number]
        return own == facts or (number in self.varies and own[2:] == facts[2:])

    def share(self, fraction: float) -> tuple[StepTable, int]:
        """Returns the table in which that part of its movable bytes moves, and the bytes that stay by it."""
        if self._shared is None or self._shared[0] != fraction:
            rows, kept = list(self.table.rows), 0
            for number, one in zip(self._movable, share(self._timeline(), fraction), strict=True):
                kept += 0 if one else rows[number].storage_nbytes
                if rows[number].fate is not (fate := _MOVE if one else _STAY):
                    rows[number] = replace(rows[number], fate=fate)
            self._shared = (fraction, replace(self.table, rows=tuple(rows)), kept)
        return self._shared[1:]

    def time(self, times: Times) -> bool:
        """Takes in when the device has come to what a step like it does; returns whether two steps have told that.

        The quicker one counts.
        """
        if self.timed is None:
            self.timed = times
            return False
        self.seen, self._shared = min(self.timed, times, key=lambda one: one.seconds), None
        self.timed, self.is_timed, self._timed_after = None, True, self.times
        return True

    @property
    def is_due(self) -> bool:
        """Whether the device is to be asked for times, again now and then: the steps before may have been slow ones."""
        return not self.is_timed or self.times - self._timed_after >= _TIME_AGAIN

    def hidden_part(self) -> float:
        """Returns the part of the movable bytes that the link hides."""
        step = self._timeline()
        moves = hidden(step)
        return sum(nbytes for nbytes, one in zip(step.nbytes, moves, strict=True) if one) / max(sum(step.nbytes), 1)

    def size(self, windows: Windows) -> None:
        """Has the steps like it go by the least windows, if there are any; those of its bytes are the most."""
        step = self._timeline()
        window, ahead = windows.sized(step.nbytes)
        self.least, self.in_vain = None, frozenset()
        if (found := least_windows(replace(step, window=window, ahead=ahead))) is None:
            return
        numbers = self._movable
        self.least, self.in_vain = (found.window, found.ahead), frozenset(numbers[at] for at in found.in_vain)
        rows = list(self.table.rows)
        for number in self.in_vain:
            rows[number] = replace(rows[number], fate=_REST)
        self.table = replace(self.table, rows=tuple(rows))

    @property
    def _movable(self) -> list[int]:
        return [number for number, row in enumerate(self.table.rows) if row.fate in _MAY_MOVE]

    def _timeline(self) -> Timeline:
        """Returns the step as the rule by pace sees it."""
        seen, numbers = self.seen, self._movable
        assert seen is not None
        place = {number: at for at, number in enumerate(numbers)}
        return Timeline(
            [self.facts[number][1] for number in numbers],
            [seen.final[number] for number in numbers],
            [seen.asked.get(number, math.inf) for number in numbers],
            [place[number] for number in seen.asked if number in place],
            seen.turn,
            seen.seconds,
            seen.link.out,
            seen.link.back,
            seen.window,
            seen.ahead,
            [place[number] for number in self.first if number in place],
        )

    def difference(self, number: int, facts: Facts) -> str:
        """Returns by what save ``number`` differs, in the words of ``stats().table_misses``."""
        if number == len(self.facts):
            return "more"
        nbytes, storage_nbytes, _, owner = self.facts[number]
        if (nbytes, storage_nbytes) != facts[:2]:
            return "size"
        return "share" if owner != facts[3] else "requires_grad"


class StepScript:
    """What a function does that is called once more: its steps, one after the other.

    Args:
        expected: the steps of the call before, which this one is held to; ``None``: it is written down.
    """

    def __init__(self, expected: StepScript | None = None) -> None:
        self.logs: list[StepLog] = []
        #: Of each step, the saves whose storages have left.
        self.moved: list[set[int]] = []
        self._expected = None if expected is None else expected.logs
        #: The first difference.
        self._failure: ScheduleMismatchError | None = None

    def begin(self, step: Step) -> None:
        """A step begins."""
        if self._expected is not None:
            number = len(self.logs)
            expected = self._expected[number] if number < len(self._expected) else StepLog()
            step.strict = partial(self._check, expected)
        self.logs.append(step.log)
        self.moved.append(set())

    def note_moved(self, step: Step, number: int) -> None:
        """The storage that save ``number`` of ``step`` has brought in has left."""
        for log, moved in zip(self.logs, self.moved, strict=True):
            if log is step.log:
                moved.add(number)

    def tables(self) -> tuple[StepTable, ...]:
        """Returns what each step did, but for those that saved nothing that may move."""
        found = []
        for log, moved in zip(self.logs, self.moved, strict=True):
            if not log.facts:
                continue
            table = log.table(None)
            rows = [replace(row, fate=_MOVE) if number in moved else row for number, row in enumerate(table.rows)]
            found.append(replace(table, rows=tuple(rows)))
        return tuple(found)

    def finish(self) -> None:
        """The function is over.

        Raises:
            ScheduleMismatchError: it has done otherwise than the call before, be it that the caller was told so and has
                gone on.
        """
        assert self._expected is not None
        if self._failure is not None:
            raise self._failure
        for number, expected in enumerate(self._expected):
            log = self.logs[number] if number < len(self.logs) else StepLog()
            if len(log.facts) < len(expected.facts):
                self._differ(f"save {len(log.facts)}", _said(expected.facts[len(log.facts)]), "none")
            if len(log.asks) < len(expected.asks):
                self._differ(f"unpack {len(log.asks)}", f"save {expected.asks[len(log.asks)]}", "none")

    def _check(self, expected: StepLog, log: StepLog, is_ask: bool) -> None:
        """Looks whether what ``log`` has last is as ``expected`` has it."""
        number, rank = len(log.facts) - 1, len(log.asks) - 1
        if not is_ask and expected.facts[number : number + 1] != log.facts[number:]:
            before = _said(expected.facts[number], log.facts[number]) if number < len(expected.facts) else "none"
            self._differ(f"save {number}", before, _said(log.facts[number], *expected.facts[number : number + 1]))
        if is_ask and expected.asks[rank : rank + 1] != log.asks[rank:]:
            before = f"save {expected.asks[rank]}" if rank < len(expected.asks) else "none"
            self._differ(f"unpack {rank}", before, f"save {log.asks[rank]}")

    def _differ(self, where: str, before: str, now: str) -> NoReturn:
        self._failure = mismatch(where, before, now, "the warm-up had", "the capture has")
        raise self._failure


def check_alike(before: StepScript, after: StepScript) -> None:
    """Looks whether two warm-ups are one sequence of saves.

    Raises:
        ScheduleMismatchError: they are not.
    """
    one, other = ([facts for log in script.logs for facts in log.facts] for script in (before, after))
    for number in range(max(len(one), len(other))):
        mine, its = one[number : number + 1], other[number : number + 1]
        if mine != its:
            sides = [_said(*mine, *its) if mine else "none", _said(*its, *mine) if its else "none"]
            raise mismatch(f"save {number}", sides[0], sides[1], "the warm-up before the last had", "the last one has")


def mismatch(where: str, one: str, other: str, before: str, after: str) -> ScheduleMismatchError:
    return ScheduleMismatchError(
        f"a step has to do the same in its warm-ups and in the capture, and differs first at {where}: {before} {one}, "
        f"{after} {other}. What depends on numbers, on the count of steps or on chance cannot be captured"
    )


def _said(facts: Facts, other: Facts | None = None) -> str:
    """Returns a save in words, with what it differs by from ``other``."""
    nbytes, storage_nbytes, requires_grad, owner = facts
    said = f"a tensor of {nbytes:,} bytes{', requires grad' if requires_grad else ''}"
    if other is None or other[0] != nbytes:
        return said
    if other[1] != storage_nbytes:
        said += f", of a storage of {storage_nbytes:,} bytes"
    if other[3] != owner:
        said += f", of the storage of save {owner}" if owner >= 0 else ", of the storage of an earlier step"
    return said


class StepTables:
    """The tables of one device, the latest last. Callers hold the offloader's lock.

    Args:
        policy: the config's ``step_tables``.
        accounts: where steps that are looked up, and those that differ, are counted.
    """

    def __init__(self, policy: bool | str, accounts: Accounts) -> None:
        #: After how many steps that are alike the next one is looked up.
        self._after = math.inf if policy is False else 1 if policy is True else _ALIKE
        self._accounts = accounts
        #: Bytes: a step that could move no more is left where it is.
        self.room = 0
        #: The table of the last step that was looked up.
        self.last: StepTable | None = None
        self._known: list[KnownTable] = []
        #: Says how much of a step moves, where there is a budget, or only what the link hides moves.
        self.controller: Controller | None = None
        #: Whether nothing is learnt or forgotten.
        self.is_frozen = False

    def frozen(self) -> StepTables:
        """Returns the same tables, of which nothing is learnt or forgotten."""
        tables = StepTables(True, Accounts())
        tables._known, tables.controller = [copy.copy(one) for one in self._known], self.controller
        tables.is_frozen = True
        return tables

    def control(self, controller: Controller) -> None:
        """Has ``controller`` say how much of a step moves, from the second step of a kind on if steps are looked up."""
        self.controller = controller
        if self._after != math.inf:
            self._after = 1

    def look_up(self, facts: Facts) -> list[KnownTable]:
        """Returns the tables that begin with that save, the latest first, and counts a step where there are any."""
        fitting = [one for one in reversed(self._known) if one.times >= self._after and one.facts[0] == facts]
        if fitting:
            self.last = self.table_of(fitting[0])
            self._accounts.counters.table_forwards += 1
            self._accounts.counters.reach(Stage.KNOWN)
        return fitting

    def table_of(self, known: KnownTable) -> StepTable:
        """Returns the table that a step like ``known`` goes by."""
        return known.table if self.controller is None else known.share(self.controller.fraction(known.kind))[0]

    def fraction_of(self, known: KnownTable | None) -> float | None:
        """Returns the part of its movable bytes that moves in a step like ``known``; ``None`` where all may."""
        if (controller := self.controller) is None:
            return None
        if known is None:
            return controller.fraction(controller.unknown)
        fraction = controller.fraction(known.kind)
        self._accounts.counters.keep_last_bytes = known.share(fraction)[1]
        return fraction

    def missed(self, known: KnownTable, what: str) -> None:
        """A step has differed by ``what`` from the table that it was looked up in, and from all others."""
        misses = self._accounts.counters.table_misses
        misses[what] = misses.get(what, 0) + 1
        known.misses += 1
        if known.misses >= _MOST_MISSES and known in self._known and not self.is_frozen:
            self._known.remove(known)

    def learn(self, log: StepLog, link: Link | None, windows: Windows) -> None:
        """Takes in what a step has left behind, in place of what was known of its like.

        Args:
            link: as for ``StepLog.table``.
            windows: those in force.
        """
        if self.is_frozen or not log.teaches:
            return
        if not log.asks:  # a graph that was dropped, from which nothing follows; or a step of which all is kept
            if (known := log.known) is not None and not known.order and known.facts == log.facts:
                known.times, known.misses = known.times + 1, 0
            return
        alike = next((one for one in self._known if one.facts == log.facts), None)
        if alike is None and self.controller is None:  # else each size has a budget's state of its own
            like = [(one, differ) for one in self._known if (differ := one.others(log.facts)) is not None]
            varying = [pair for pair in like if pair[0].varies]
            if varying or (len(like) == _MOST_TABLES and max(one.times for one, _ in like) == 1):
                alike, differ = (varying or like)[-1]
                alike.vary(log.facts, differ)
        if log.known is not None and log.known is not alike:
            self.missed(log.known, "fewer")
            log.fraction = None
        # Where a controller says how much moves, the share says what stays.
        before, in_vain = (None, ()) if alike is None else (alike.table, alike.in_vain)
        table = log.table(link if self.controller is None else None, before, in_vain)
        if alike is None:
            alike = KnownTable(table, log.facts)
        else:
            self._known.remove(alike)
        alike.take(table, log.times(dict(enumerate(log.packed_at)), log.asked_at, link, windows))
        alike.times, alike.misses, alike.first = alike.times + 1, 0, log.first
        log.taught = alike
        if log.known is alike:
            self.last = self.table_of(alike)
        most = _MOST_TABLES if self.controller is None else _MOST_CONTROLLED
        self._known = [*self._known, alike][-most:]


class Kept(NamedTuple):
    """A storage that stays because the program keeps it alive, and the save that it is."""

    storage: Callable[[], object]
    number: int


class StepRecord(FinalizerRecord["Step"]):
    """A weak reference to a step, and what that leaves behind."""

    __slots__ = ("log", "saves")
    log: StepLog
    #: The saved tensors of its device, which learn from it; weak, since they hold the record.
    saves: weakref.ref[Any]

    def on_finalized(self) -> None:
        """Its thread has begun another one, and its graph is gone."""
        if (saves := self.saves()) is not None:
            saves.learn(self)


class Step:
    """One forward of one thread on one device, and its backward.

    Its thread holds it until the next one begins, and so do the handles of its graph.
    """

    def __init__(self, tables: StepTables) -> None:
        self.log = StepLog()
        #: The saves that have a handle, along which backward looks ahead.
        self.uses = StepUses()
        #: Whether whatever is saved now belongs to another step: all that has a handle was asked for. So it is where
        #: one context surrounds many steps. One that is never over ends when it is very long.
        self.is_over = False
        #: The part of a pipeline schedule that it is of.
        self.phase: object = None
        #: Storages that stay although they could move, by name, for further saves of them.
        self.kept: dict[Hashable, Kept] = {}
        #: Raises where what the log has last, which is an ask or a save, is not as it was in a step that this one is
        #: held to; ``None`` where there is none.
        self.strict: Callable[[StepLog, bool], None] | None = None
        #: The table in force; ``None`` where the step is unknown, or is from here on.
        self.table: StepTable | None = None
        #: Whether all of the step stays, as long as there is room.
        self.stays = False
        self._tables = tables
        self._fitting: list[KnownTable] = []  # those that it may still turn out to be like, with that in front
        self._looks_again = False
        self._order: tuple[int, ...] = ()  # in which backward goes, as the table has it
        self._rank = 0
        self._asked_again: set[int] = set()

    def save(self, facts: Facts, seconds: float, ahead: int) -> Row | None:
        """Logs the next save; returns its row if it brings its storage in and the step is like a table.

        Args:
            seconds: the time.
            ahead: bytes that are on their way out.
        """
        log = self.log
        number = len(log.facts)
        if number == 0:
            self._use(self._tables.look_up(facts) if log.teaches else [])
            log.fraction, log.is_known = self._tables.fraction_of(log.known), log.known is not None
        elif (known := log.known) is not None and not known.has(number, facts):
            self._differ([*log.facts, facts], known.difference(number, facts))
        log.facts.append(facts)
        log.packed_at.append(seconds)
        log.ahead.append(ahead)
        if self.strict is not None:
            self.strict(log, False)
        self.is_over = number + 1 >= _MOST_SAVES
        if self.table is None or facts[3] != number:
            return None
        row = self.table.rows[number]
        if (known := log.known) is not None and known.varies and known.facts[number] != facts:
            return None
        if row.fate is _KEEP:
            if self._looks_again:
                return None
            log.alive.add(number)
        return row

    def asked(self, number: int, seconds: float) -> Iterable[int] | None:
        """Logs that save ``number`` is asked for.

        Returns:
            The numbers of the saves in the order of need, where another order was expected.
        """
        log = self.log
        if number in log.asked_at:
            if number not in self._asked_again:
                self._asked_again.add(number)
                log.asks.append(number)
                if self.strict is not None:
                    self.strict(log, True)
            return None
        if not log.asks:  # more may be saved later
            log.before_backward = len(log.facts)
            # Backward begins, which tells steps apart that begin alike: by how much they save.
            facts = log.facts
            if whole := [one for one in self._fitting if len(one.facts) == len(facts) and one.facts == facts]:
                if whole[0] is not log.known:
                    log.fraction = self._tables.fraction_of(whole[0])
                self._use(whole)
            self._order = () if log.known is None else log.known.order
        log.asks.append(number)
        log.asked_at[number] = seconds
        if self.strict is not None:
            self.strict(log, True)
        self.is_over = self.is_over or len(log.asked_at) >= self.uses.count
        if self.table is None:
            return None
        owner, order = log.facts[number][3], self._order
        if owner >= 0 and self.table.rows[owner].fate is _KEEP:
            return None  # it was looked at again
        rank = self._rank
        self._rank += 1
        if rank < len(order) and order[rank] == number:
            return order if rank == 0 else None
        is_short = rank == 0 and len(log.facts) < len(self.table.rows)
        self._differ(None, "fewer" if is_short else "order")
        return range(len(log.facts) - 1, -1, -1) if rank else None

    def _differ(self, facts: list[Facts] | None, what: str) -> None:
        """The step differs by ``what`` from the table that it was like.

        Args:
            facts: all of its saves, where another table may have them; ``None`` where it does not matter.
        """
        known = self.log.known
        assert known is not None
        self._use([] if facts is None else [one for one in self._fitting if one.facts[: len(facts)] == facts])
        if what != "order":  # else its saves were those of the table
            self.log.fraction = None if self.log.known is None else self._tables.fraction_of(self.log.known)
        if self.log.known is None:
            self._tables.missed(known, what)

    def _use(self, fitting: list[KnownTable]) -> None:
        """Looks the rest of the step up in the first of ``fitting``."""
        self._fitting = fitting
        self.log.known = known = fitting[0] if fitting else None
        self.table = None if known is None else self._tables.table_of(known)
        tables = self._tables
        self.stays = known is not None and tables.controller is None and known.table.movable_bytes <= tables.room
        # Not in a graph, whose every replay would do so.
        again = known is not None and (known.times + 1) % _LOOK_AGAIN == 0
        self._looks_again = again and not self._tables.is_frozen
