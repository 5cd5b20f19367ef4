"""Step tables: the saves of earlier training steps, used to predict the next step.

Numbers only, as in ``core/schedule.py``: saves are counted from 0 in each step, sizes are bytes, times are seconds.

    Step         one forward of one thread on one device, with its backward: logs saves and unpacks, and matches them
                 against a table
    StepLog      the log of one step, which remains when the step's graph has died
    StepTable    the decision for each save, and the order of unpacks, derived from a log
    StepTables   the tables of one device: selects, updates and evicts them

[Note: a table is a hint]
A step follows a table while its saves match the table's rows. At the first mismatch it switches to another table with
the same prefix; if there is none, it continues as an unknown step, with its handles and queue unchanged. After the
first out-of-order unpack, reverse order of saves is assumed. Whether a tensor may move, shares a storage, is final or
was modified is checked in every step. So a wrong table costs time, and changes no bit.

[Note: sizes that vary]
Some sizes may differ in every step (e.g. in a mixture of experts, where each expert's number of tokens varies). Then
each step would get a table of its own, and no table would be used twice. To prevent that:

1. Two steps are similar if they have equally many saves, which differ only in sizes, and at least an eighth of the
   sizes are equal.
2. If the tables are full of similar tables that were seen once each, the next similar step updates the latest table,
   and the saves that differ are marked as varying. (A few sizes that alternate keep a table each.)
3. If a varying save has another size than in the table, the step gets no decision for that save, and continues to
   follow the table.

With a controller each combination of sizes keeps its own table, because the controller sets a fraction for each.

[Note: choosing a fate]
    MOVE     backward needed the tensor after a round trip would have finished: the copy starts as soon as the bytes
             are final
    STAY     backward needed the tensor sooner: the tensor stays while it is among the last saved bytes. A step whose
             movable bytes fit into ``StepTables.room`` stays whole
    REST     steps timed on the device show that backward needed the tensor before a copy could finish: the tensor
             always stays
    KEEP     the program still referenced the storage at unpack, so moving it would free nothing
    SHARE    the storage belongs to an earlier save, whose copy out waits for the last save of that storage
With a budget, or if only hidden copies are allowed, ``core/budget.py`` chooses instead: see ``KnownTable.share``.
"""

from __future__ import annotations

import copy
import itertools
import math
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

from eager_offload.config import size_text
from eager_offload.core.budget import Controller, StepClass, Timeline, hidden, least_windows, share
from eager_offload.core.schedule import StepUses, Windows
from eager_offload.errors import ScheduleMismatchError
from eager_offload.stats import Accounts, KeepReason, Stage
from eager_offload.tiers.forking import FinalizerRecord

#: Most tables that are kept: the forwards of one step may differ (e.g. of a generator and a discriminator).
_MOST_TABLES = 8
#: Likewise with a controller, for which an unknown step is costly: it moves everything.
_MOST_CONTROLLED = 64
#: A table is dropped after this many mismatching steps in a row.
_MOST_MISSES = 3
#: With ``step_tables="auto"``, a table is followed once this many steps have matched it.
_ALIKE = 3
#: Every 16th step moves the kept storages too, to check whether the program still references them.
_LOOK_AGAIN = 16
#: The number of steps after which a table's steps are timed again.
_TIME_AGAIN = 64
#: In similar steps at least one save in this many is equal: see [Note: sizes that vary].
_SAME = 8
#: Most saves of one step. Without this limit, the log of a context that is never left, and whose graph is never used
#: up, would grow forever.
_MOST_SAVES = 1 << 16


class Fate(StrEnum):
    """The decision on a saved tensor: see [Note: choosing a fate]."""

    KEEP = "keep"
    """It stays, for the reason in ``Row.reason``."""
    SHARE = "share"
    """It shares the storage of an earlier save."""
    MOVE = "move"
    """It leaves as soon as it is final."""
    STAY = "stay"
    """It could leave, but stays while it is among the last saved bytes."""
    REST = "rest"
    """It could leave, but always stays: backward needs it before a copy could finish."""


# Aliases, because an attribute of the class costs more than the comparison.
_KEEP, _SHARE, _MOVE, _STAY, _REST = Fate
_MAY_MOVE = _MOVE, _STAY, _REST

#: The fields by which saves are compared: those of ``Row`` up to ``owner``, in that order.
Facts: TypeAlias = tuple[int, int, bool, int]


@dataclass(frozen=True, slots=True)
class Row:
    """The decision on one save of a step."""

    nbytes: int
    """Bytes of the tensor as saved."""
    storage_nbytes: int
    """Bytes that move with it: its storage, or the part of the storage that it spans."""
    requires_grad: bool
    owner: int
    """Index of the first save of the same storage (its own if it is the first); -1 if an earlier step saved it."""
    fate: Fate
    reason: KeepReason | None = None
    """The reason to keep it."""
    last_save: int = -1
    """The last save of its storage before backward; -1 if it is saved once."""


@dataclass(frozen=True)
class StepTable:
    """The decision on each logged save of a step, and the order in which backward unpacks them. Can be printed.

    ``rows`` are in the order of packing. ``order`` has the indices of rows in the order of unpacking; an index occurs
    twice if its tensor is unpacked again (e.g. by a backward in two halves).
    """

    rows: tuple[Row, ...]
    order: tuple[int, ...]

    @cached_property
    def movable_bytes(self) -> int:
        """Bytes of the storages that move or could move."""
        return sum([row.storage_nbytes for row in self.rows if row.fate in _MAY_MOVE])

    @property
    def moved_bytes(self) -> int:
        """Bytes of the storages that move."""
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
    """Returns the printed columns of a row; equal for consecutive rows that are alike."""
    what = row.fate.value if row.reason is None else f"{row.fate.value} ({row.reason.value})"
    if row.fate is _SHARE and row.owner >= 0:
        what += f" {number - row.owner} back"
    last = f"{row.last_save - number:,} later" if row.last_save >= 0 else ""
    return what, size_text(row.nbytes), last


@dataclass(slots=True, eq=False)
class StepLog:
    """The saves and unpacks of one step. ``facts``, ``packed_at`` and ``ahead`` have an entry for each save."""

    facts: list[Facts] = field(default_factory=list)
    #: The time of each save, and the bytes in flight before it.
    packed_at: list[float] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    #: The number of saves before the first unpack.
    before_backward: int = 0
    #: The unpacked saves in order, and the time of each save's first unpack.
    unpacks: list[int] = field(default_factory=list)
    unpacked_at: dict[int, float] = field(default_factory=dict)
    #: Saves whose storage the program still referenced at unpack (checked now, or known from an earlier step).
    alive: set[int] = field(default_factory=set)
    #: Saves whose storages move first under a budget (e.g. inputs of checkpoints).
    first: set[int] = field(default_factory=set)
    #: The table that the step follows, or followed until its end; ``None`` if it matches none (any more).
    known: KnownTable | None = None
    #: The table that was made from this log.
    derived: KnownTable | None = None
    #: The fraction that a controller set for the step; ``None`` without a controller, or if the step began like a table
    #: and then differed from all tables.
    fraction: float | None = None
    #: Whether the first save matched a table.
    is_known: bool = False
    #: Movable bytes that stayed because of the table.
    kept: int = 0
    #: Whether a table may be made from this log.
    makes_table: bool = True

    @property
    def kind(self) -> KnownTable | None:
        """The table made from this log, or the one that the step followed if none was made yet."""
        return self.known if self.derived is None else self.derived

    def times(
        self, saved: Mapping[int, float], unpacked_at: Mapping[int, float], link: Link | None, windows: Windows
    ) -> Times:
        """Returns the times of storages for a step with at least one unpack.

        Args:
            saved, unpacked_at: the time of each save and of its first unpack, by number, in seconds.
            link: ``None`` if no transfer was timed (e.g. in a captured step). Then saves and unpacks are assumed to be
                one second apart.
        """
        if link is None:
            saved = {number: float(number) for number in range(len(self.facts))}
            unpacked_at = {number: float(len(saved) + rank) for rank, number in enumerate(unpacked_at)}
            rate = max(sum(facts[1] for number, facts in enumerate(self.facts) if facts[3] == number), 1) / len(saved)
            link = Link(rate, rate)
        final, first_unpacked, turn = dict[int, float](), dict[int, float](), min(unpacked_at.values())
        later = turn
        for number in reversed(range(len(self.facts))):
            owner = self.facts[number][3]
            final.setdefault(owner, later)
            later = saved.get(number, later) if owner == number else later
        for number, seconds in unpacked_at.items():
            first_unpacked.setdefault(self.facts[number][3], seconds)
        return Times(
            final,
            first_unpacked,
            turn,
            max(unpacked_at.values()) - min(saved.values()),
            link,
            windows.inflight,
            windows.prefetch,
        )

    def table(self, link: Link | None, before: StepTable | None = None, exempt: Container[int] = ()) -> StepTable:
        """Returns the table for a step like this one.

        Args:
            link: ``None`` if no transfer was timed.
            before: the table of an earlier step with the same saves, whose unchanged rows are reused.
            exempt: saves that always stay (REST).
        """
        known = () if before is None else before.rows
        owners = [facts[3] for facts in self.facts]
        last_saves = {owner: number for number, owner in enumerate(owners[: self.before_backward])}
        first_unpacked = {owners[number]: seconds for number, seconds in reversed(self.unpacked_at.items())}
        rows = []
        for number, facts in enumerate(self.facts):
            reason, last = None, last_saves.get(number, number)
            if owners[number] != number:
                fate, last = _SHARE, number
            elif number in self.alive:
                fate, reason = _KEEP, KeepReason.ALIVE
            elif number in exempt:
                fate = _REST
            elif link is None:
                fate = _STAY
            else:
                # The copy out, behind the bytes in flight, and the copy back.
                round_trip = (self.ahead[number] + facts[1]) / link.out + facts[1] / link.back
                unused = first_unpacked.get(number, math.inf) - self.packed_at[number]
                fate = _MOVE if unused >= round_trip else _STAY
            last_save = last if last > number else -1
            row = known[number] if known else None
            if row is None or (row.nbytes, row.storage_nbytes, row.fate, row.reason, row.last_save) != (
                *(*facts[:2], fate, reason, last_save),
            ):
                row = Row(*facts, fate, reason, last_save)
            rows.append(row)
        order = tuple([number for number in self.unpacks if owners[number] not in self.alive])
        return StepTable(tuple(rows), order)


@dataclass(frozen=True, slots=True)
class Link:
    """The bandwidth of each direction, in bytes per second."""

    out: float
    back: float


class Times(NamedTuple):
    """The times of a step's storages, in seconds, and the bandwidth; storages are named by their first save."""

    final: Mapping[int, float]
    """When each storage became final: at the next save of a new storage after its own last save, or (if there is none)
    when backward began."""
    unpacked_at: Mapping[int, float]
    """When each storage was first unpacked, in the order of unpacking."""
    turn: float
    """When backward began."""
    seconds: float
    link: Link
    window: int
    """Most bytes in flight."""
    ahead: int
    """Most bytes prefetched."""


@dataclass(slots=True, eq=False)
class KnownTable:
    """A table, with the history of the steps that followed it."""

    table: StepTable
    facts: list[Facts]
    #: ``StepLog.first`` of the last matching step.
    first: set[int] = field(default_factory=set)
    #: Saves whose sizes differ from step to step: see [Note: sizes that vary].
    varies: set[int] = field(default_factory=set)
    #: The number of steps that matched, and of the latest steps in a row that did not.
    times: int = 0
    misses: int = 0
    #: The state of a controller for steps like this.
    kind: StepClass = field(default_factory=StepClass)
    #: The times of the first matching step, then of the second (the first may have compiled kernels and allocated
    #: memory), then of the faster of two steps that were timed on the device.
    seen: Times | None = None
    #: The first of two steps that are timed on the device.
    timed: Times | None = None
    #: Whether two steps were timed on the device; the value of ``times`` when the second one was.
    is_timed: bool = False
    timed_after: int = 0
    #: From these two steps: the smallest windows, and the saves that always stay.
    least: tuple[int, int] | None = None
    exempt: frozenset[int] = frozenset()
    #: The last result of ``share``, with its fraction.
    shared: tuple[float, StepTable, int] | None = None
    #: The saves in the order of their first unpacks.
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.take(self.table)

    def take(self, table: StepTable, seen: Times | None = None) -> None:
        """Replaces the table by ``table``, for the same saves, and (up to the second step) the times by ``seen``."""
        if self.times < 2:
            self.seen = seen
        if self.times < 2 or self.table.rows != table.rows:
            self.shared = None
        self.table = table
        self.order = tuple(dict.fromkeys(table.order))

    def others(self, facts: list[Facts]) -> set[int] | None:
        """Returns the saves whose sizes differ in a step with those ``facts``; ``None`` if the step is not similar."""
        if len(facts) != len(self.facts):
            return None
        differ = {number for number, one in enumerate(facts) if one != self.facts[number]}
        is_like = all(facts[number][2:] == self.facts[number][2:] for number in differ)
        return differ if is_like and _SAME * len(differ) <= (_SAME - 1) * len(facts) else None

    def vary(self, facts: list[Facts], differ: set[int]) -> None:
        self.facts, self.shared = facts, None
        self.varies |= differ

    def has(self, number: int, facts: Facts) -> bool:
        """Returns whether save ``number`` matches the table, exactly or as a varying save."""
        if number == len(self.facts):
            return False
        own = self.facts[number]
        return own == facts or (number in self.varies and own[2:] == facts[2:])

    def share(self, fraction: float) -> tuple[StepTable, int]:
        """Returns the table in which that fraction of the movable bytes moves, and the bytes that stay."""
        if self.shared is None or self.shared[0] != fraction:
            rows, kept = list(self.table.rows), 0
            for number, one in zip(self._movable, share(self._timeline(), fraction), strict=True):
                kept += 0 if one else rows[number].storage_nbytes
                if rows[number].fate is not (fate := _MOVE if one else _STAY):
                    rows[number] = replace(rows[number], fate=fate)
            self.shared = (fraction, replace(self.table, rows=tuple(rows)), kept)
        return self.shared[1:]

    def time(self, times: Times) -> bool:
        """Adds the device's times of a step; returns whether there are two, the faster of which is used."""
        if self.timed is None:
            self.timed = times
            return False
        self.seen, self.shared = min(self.timed, times, key=lambda one: one.seconds), None
        self.timed, self.is_timed, self.timed_after = None, True, self.times
        return True

    @property
    def is_due(self) -> bool:
        """Whether to time the next steps on the device; repeated, because the timed steps may have been slow."""
        return not self.is_timed or self.times - self.timed_after >= _TIME_AGAIN

    def hidden_part(self) -> float:
        """Returns the fraction of the movable bytes whose copies the link hides."""
        step = self._timeline()
        moves = hidden(step)
        return sum(nbytes for nbytes, one in zip(step.nbytes, moves, strict=True) if one) / max(sum(step.nbytes), 1)

    def size(self, windows: Windows) -> None:
        """Computes the smallest windows for which nothing waits (at most ``windows``), and the saves to exempt."""
        step = self._timeline()
        window, ahead = windows.sized(step.nbytes)
        self.least, self.exempt = None, frozenset()
        if (found := least_windows(replace(step, window=window, ahead=ahead))) is None:
            return
        numbers = self._movable
        self.least, self.exempt = (found.window, found.ahead), frozenset(numbers[at] for at in found.exempt)
        rows = list(self.table.rows)
        for number in self.exempt:
            rows[number] = replace(rows[number], fate=_REST)
        self.table = replace(self.table, rows=tuple(rows))

    @property
    def _movable(self) -> list[int]:
        return [number for number, row in enumerate(self.table.rows) if row.fate in _MAY_MOVE]

    def _timeline(self) -> Timeline:
        seen, numbers = self.seen, self._movable
        assert seen is not None
        place = {number: at for at, number in enumerate(numbers)}
        return Timeline(
            [self.facts[number][1] for number in numbers],
            [seen.final[number] for number in numbers],
            [seen.unpacked_at.get(number, math.inf) for number in numbers],
            [place[number] for number in seen.unpacked_at if number in place],
            seen.turn,
            seen.seconds,
            seen.link.out,
            seen.link.back,
            seen.window,
            seen.ahead,
            [place[number] for number in self.first if number in place],
        )

    def difference(self, number: int, facts: Facts) -> str:
        """Returns the field in which save ``number`` differs, as a key of ``stats().table_misses``."""
        if number == len(self.facts):
            return "more"
        nbytes, storage_nbytes, _, owner = self.facts[number]
        if (nbytes, storage_nbytes) != facts[:2]:
            return "size"
        return "share" if owner != facts[3] else "requires_grad"


class StepScript:
    """The steps of one call of a function, which the next call has to repeat.

    Args:
        expected: the script of the previous call, which this call is checked against; ``None``: record only.
    """

    def __init__(self, expected: StepScript | None = None) -> None:
        #: The log of each step, and the numbers of its saves that have moved.
        self.logs: dict[StepLog, set[int]] = {}
        self._expected = None if expected is None else list(expected.logs)
        self._failure: ScheduleMismatchError | None = None

    def begin(self, step: Step) -> None:
        if self._expected is not None:
            number = len(self.logs)
            expected = self._expected[number] if number < len(self._expected) else StepLog()
            step.strict = partial(self._check, expected)
        self.logs[step.log] = set()

    def note_moved(self, step: Step, number: int) -> None:
        if step.log in self.logs:
            self.logs[step.log].add(number)

    def tables(self) -> tuple[StepTable, ...]:
        """Returns the table of each step that saved something movable."""
        found = []
        for log, moved in self.logs.items():
            if not log.facts:
                continue
            table = log.table(None)
            rows = [replace(row, fate=_MOVE) if number in moved else row for number, row in enumerate(table.rows)]
            found.append(replace(table, rows=tuple(rows)))
        return tuple(found)

    def finish(self) -> None:
        """Ends the call.

        Raises:
            ScheduleMismatchError: the call differs from the previous one, even if the caller caught an earlier error
                and continued.
        """
        assert self._expected is not None
        if self._failure is not None:
            raise self._failure
        for log, expected in itertools.zip_longest(self.logs, self._expected, fillvalue=StepLog()):
            if len(log.facts) < len(expected.facts):
                self._differ(f"save {len(log.facts)}", _said(expected.facts[len(log.facts)]), "none")
            if len(log.unpacks) < len(expected.unpacks):
                self._differ(f"unpack {len(log.unpacks)}", f"save {expected.unpacks[len(log.unpacks)]}", "none")

    def _check(self, expected: StepLog, log: StepLog, is_unpack: bool) -> None:
        """Compares the latest save (or unpack, if ``is_unpack``) of ``log`` with ``expected``."""
        number, rank = len(log.facts) - 1, len(log.unpacks) - 1
        if not is_unpack and expected.facts[number : number + 1] != log.facts[number:]:
            before = _said(expected.facts[number], log.facts[number]) if number < len(expected.facts) else "none"
            self._differ(f"save {number}", before, _said(log.facts[number], *expected.facts[number : number + 1]))
        if is_unpack and expected.unpacks[rank : rank + 1] != log.unpacks[rank:]:
            before = f"save {expected.unpacks[rank]}" if rank < len(expected.unpacks) else "none"
            self._differ(f"unpack {rank}", before, f"save {log.unpacks[rank]}")

    def _differ(self, where: str, before: str, now: str) -> NoReturn:
        self._failure = mismatch(where, before, now, "the warm-up had", "the capture has")
        raise self._failure


def check_alike(before: StepScript, after: StepScript) -> None:
    """Checks that two warm-ups have the same saves.

    Raises:
        ScheduleMismatchError: they differ.
    """
    one, other = ([facts for log in script.logs for facts in log.facts] for script in (before, after))
    for number in range(max(len(one), len(other))):
        mine, its = one[number : number + 1], other[number : number + 1]
        if mine != its:
            sides = [_said(*mine, *its) if mine else "none", _said(*its, *mine) if its else "none"]
            raise mismatch(f"save {number}", sides[0], sides[1], "the warm-up before the last had", "the last one has")


def mismatch(where: str, one: str, other: str, before: str, after: str) -> ScheduleMismatchError:
    return ScheduleMismatchError(
        f"a captured step must do the same in every warm-up and in the capture, but this one differs first at {where}: "
        f"{before} {one}, {after} {other}. It must not depend on tensor values, step counters or random numbers"
    )


def _said(facts: Facts, other: Facts | None = None) -> str:
    """Describes a save, with the fields in which it differs from ``other``."""
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
    """The tables of one device, the latest last. The offloader's lock guards them.

    Args:
        policy: the config's ``step_tables``.
        accounts: counts the steps that follow tables, and their mismatches.
    """

    def __init__(self, policy: bool | str, accounts: Accounts) -> None:
        #: The number of matching steps after which a table is followed.
        self._after = math.inf if policy is False else 1 if policy is True else _ALIKE
        self._accounts = accounts
        #: Bytes: a step that could move no more than this stays on the device.
        self.room = 0
        #: The table of the last step that followed one.
        self.last: StepTable | None = None
        self._known: list[KnownTable] = []
        #: Sets the fraction that moves, with a budget or if only hidden copies are allowed.
        self.controller: Controller | None = None
        #: Whether tables are neither updated nor evicted.
        self.is_frozen = False

    def frozen(self) -> StepTables:
        """Returns a copy with the same tables, which are neither updated nor evicted."""
        tables = StepTables(True, Accounts())
        tables._known, tables.controller = [copy.copy(one) for one in self._known], self.controller
        tables.is_frozen = True
        return tables

    def control(self, controller: Controller) -> None:
        """Has ``controller`` set the fraction that moves; tables are then followed from the second step on."""
        self.controller = controller
        if self._after != math.inf:
            self._after = 1

    def look_up(self, facts: Facts) -> list[KnownTable]:
        """Returns the tables that begin with this save, the latest first; counts the step if there are any."""
        fitting = [one for one in reversed(self._known) if one.times >= self._after and one.facts[0] == facts]
        if fitting:
            self.last = self.table_of(fitting[0])
            self._accounts.counters.table_forwards += 1
            self._accounts.counters.reach(Stage.KNOWN)
        return fitting

    def table_of(self, known: KnownTable) -> StepTable:
        return known.table if self.controller is None else known.share(self.controller.fraction(known.kind))[0]

    def fraction_of(self, known: KnownTable | None) -> float | None:
        """Returns the fraction of movable bytes that moves in a step like ``known``; ``None`` without a controller."""
        if (controller := self.controller) is None:
            return None
        if known is None:
            return controller.fraction(controller.unknown)
        fraction = controller.fraction(known.kind)
        self._accounts.counters.keep_last_bytes = known.share(fraction)[1]
        return fraction

    def missed(self, known: KnownTable, what: str) -> None:
        """Counts a step that differed from the table that it followed, and that matches no other table.

        Args:
            known: the table that the step followed.
            what: the kind of difference, a key of ``stats().table_misses``.
        """
        misses = self._accounts.counters.table_misses
        misses[what] = misses.get(what, 0) + 1
        known.misses += 1
        if known.misses >= _MOST_MISSES and known in self._known and not self.is_frozen:
            self._known.remove(known)

    def update(self, log: StepLog, link: Link | None, windows: Windows) -> None:
        """Updates the tables with a finished step.

        Args:
            link: as for ``StepLog.table``.
            windows: the windows in force.
        """
        if self.is_frozen or not log.makes_table:
            return
        if not log.unpacks:  # a graph that was dropped, which shows nothing, or a step whose saves are all kept
            if (known := log.known) is not None and not known.order and known.facts == log.facts:
                known.times, known.misses = known.times + 1, 0
            return
        alike = next((one for one in self._known if one.facts == log.facts), None)
        if alike is None and self.controller is None:  # a controller has a fraction for each combination of sizes
            like = [(one, differ) for one in self._known if (differ := one.others(log.facts)) is not None]
            varying = [pair for pair in like if pair[0].varies]
            if varying or (len(like) == _MOST_TABLES and max(one.times for one, _ in like) == 1):
                alike, differ = (varying or like)[-1]
                alike.vary(log.facts, differ)
        if log.known is not None and log.known is not alike:
            self.missed(log.known, "fewer")
            log.fraction = None
        # With a controller, `share` decides which storages stay.
        before, exempt = (None, ()) if alike is None else (alike.table, alike.exempt)
        table = log.table(link if self.controller is None else None, before, exempt)
        if alike is None:
            alike = KnownTable(table, log.facts)
        else:
            self._known.remove(alike)
        alike.take(table, log.times(dict(enumerate(log.packed_at)), log.unpacked_at, link, windows))
        alike.times, alike.misses, alike.first = alike.times + 1, 0, log.first
        log.derived = alike
        if log.known is alike:
            self.last = self.table_of(alike)
        most = _MOST_TABLES if self.controller is None else _MOST_CONTROLLED
        self._known = [*self._known, alike][-most:]


class Kept(NamedTuple):
    """A storage that stays because the program references it, and its save."""

    storage: Callable[[], object]
    number: int


class StepRecord(FinalizerRecord["Step"]):
    """A weak reference to a step. Holds the step's log, which outlives the step."""

    __slots__ = ("log", "saves")
    log: StepLog
    #: The object to update; weak, because it holds this record.
    saves: weakref.ref[Any]

    def on_finalized(self) -> None:
        """Updates the tables: the thread has begun another step, and this step's graph has died."""
        if (saves := self.saves()) is not None:
            saves.update(self)


class Step:
    """One forward of one thread on one device, and its backward.

    Its thread holds it until the next step begins, and the handles of its graph hold it too.
    """

    def __init__(self, tables: StepTables) -> None:
        self.log = StepLog()
        #: The saves that have a handle, in the order in which backward is expected to unpack them.
        self.uses = StepUses()
        #: True once every saved tensor has been unpacked: the next save starts a new step (a single context may span
        #: many). Also set after ``_MOST_SAVES`` saves.
        self.is_over = False
        #: ``contexts.thread.phase`` at the first save: another phase begins another step.
        self.phase: object = None
        #: Kept storages by key, for further saves of the same storage.
        self.kept: dict[Hashable, Kept] = {}
        #: Raises if the latest save or unpack of the log differs from the step that this one has to repeat.
        self.strict: Callable[[StepLog, bool], None] | None = None
        #: The table that the step follows; ``None`` if it is unknown, or has become so.
        self.table: StepTable | None = None
        #: Whether the whole step stays, as long as there is room.
        self.stays = False
        self._tables = tables
        self._fitting: list[KnownTable] = []  # the tables that match so far; the first one is followed
        self._looks_again = False
        self._order: tuple[int, ...] = ()  # of unpacks, by the table
        self._rank = 0
        self._unpacked_again: set[int] = set()

    def save(self, facts: Facts, seconds: float, ahead: int) -> Row | None:
        """Logs the next save; returns its row if it is the first save of its storage and the step follows a table.

        Args:
            seconds: the time.
            ahead: bytes in flight.
        """
        log = self.log
        number = len(log.facts)
        if number == 0:
            self._use(self._tables.look_up(facts) if log.makes_table else [])
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

    def on_unpack(self, number: int, seconds: float) -> Iterable[int] | None:
        """Logs that backward unpacks save ``number``. Returns the expected order of unpacks, if it differs from the
        order assumed so far."""
        log = self.log
        if number in log.unpacked_at:
            if number not in self._unpacked_again:
                self._unpacked_again.add(number)
                log.unpacks.append(number)
                if self.strict is not None:
                    self.strict(log, True)
            return None
        if not log.unpacks:  # the step's first unpack; further saves may follow
            log.before_backward = len(log.facts)
            # As backward begins, the number of saves tells tables with the same prefix apart.
            facts = log.facts
            if whole := [one for one in self._fitting if len(one.facts) == len(facts) and one.facts == facts]:
                if whole[0] is not log.known:
                    log.fraction = self._tables.fraction_of(whole[0])
                self._use(whole)
            self._order = () if log.known is None else log.known.order
        log.unpacks.append(number)
        log.unpacked_at[number] = seconds
        if self.strict is not None:
            self.strict(log, True)
        self.is_over = self.is_over or len(log.unpacked_at) >= self.uses.count
        if self.table is None:
            return None
        owner, order = log.facts[number][3], self._order
        if owner >= 0 and self.table.rows[owner].fate is _KEEP:
            return None  # a kept storage that this step has moved, to check it again
        rank = self._rank
        self._rank += 1
        if rank < len(order) and order[rank] == number:
            return order if rank == 0 else None
        is_short = rank == 0 and len(log.facts) < len(self.table.rows)
        self._differ(None, "fewer" if is_short else "order")
        return range(len(log.facts) - 1, -1, -1) if rank else None

    def _differ(self, facts: list[Facts] | None, what: str) -> None:
        known = self.log.known
        assert known is not None
        self._use([] if facts is None else [one for one in self._fitting if one.facts[: len(facts)] == facts])
        if what != "order":  # else the saves matched the table, and its fraction applies
            self.log.fraction = None if self.log.known is None else self._tables.fraction_of(self.log.known)
        if self.log.known is None:
            self._tables.missed(known, what)

    def _use(self, fitting: list[KnownTable]) -> None:
        self._fitting = fitting
        self.log.known = known = fitting[0] if fitting else None
        self.table = None if known is None else self._tables.table_of(known)
        tables = self._tables
        self.stays = known is not None and tables.controller is None and known.table.movable_bytes <= tables.room
        # A captured step does not look again, because all of its replays would move the kept storages.
        again = known is not None and (known.times + 1) % _LOOK_AGAIN == 0
        self._looks_again = again and not self._tables.is_frozen
