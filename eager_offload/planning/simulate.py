"""One step replayed on numbers: the library's own schedule against a clock of the host, one of compute, and two links.

``ResidentQueue`` says when a copy is due and ``PrefetchOrder`` what comes back next, as in training. What is here adds
time and bytes:

    host       enqueues operators and copies, ``launch_seconds`` a call; it waits where the window is full, and where
               it is ``_QUEUED`` operators ahead of compute
    compute    runs operators in order; it waits where a tensor that it needs has not arrived
    out, back  carry one copy at a time, in the order in which they were enqueued; a copy out that is held back
               (``engine/transfers.py``) is cancelled when backward asks for its bytes

Memory counts as in a caching allocator: when the host enqueues. A source goes when the host knows that its copy is
over, which it asks at each save and each unpack. Without ``launch_seconds`` the host waits for every operator.

In a compiled graph every transfer and wait has its place before it runs (``Problem.ordered``). The host is no part of
it: compute waits where the window is full, and where forward ends for all that is on its way, and then sources go. So
its peak depends on no time.

What moves is a part of the bytes, by the rule by pace (``budget.share``), which is bisected, with the windows that
serve best. The windows matter more than which storages make the part up: a link is busy for as long as a window holds
work for it, and a window takes memory.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import accumulate, islice
from operator import add
from typing import NamedTuple

from eager_offload.core.budget import share
from eager_offload.core.schedule import AWAITED_WINDOWS, PrefetchOrder, ResidentQueue, StepUses
from eager_offload.planning.program import Moves, Problem, ProgramSave, ProgramUnpack, live_bytes


class Outcome(NamedTuple):
    """What comes of a decision."""

    moves: Moves
    step_seconds: float
    live_bytes: tuple[int, ...]
    reloaded_storages: tuple[int, ...]
    """The storages that have left and come back, in order."""
    moved_bytes: int
    """That have come back, what came back twice counted twice."""

    @property
    def peak_bytes(self) -> int:
        """Bytes that live at one time, at most."""
        return max(self.live_bytes, default=0)


class StepSimulator:
    """Replays decisions for one problem: what does not depend on a decision is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        program = problem.program
        saves, unpacks = program.saves, program.unpacks
        if problem.ordered:  # a graph, whose values are each saved once
            saves = tuple(
                ProgramSave(one.nbytes, True, None, at, op=one.saved, node=at)
                for at, one in enumerate(program.storages)
            )
            unpacks = tuple(ProgramUnpack(at, program.storages[at].unpacked_at) for at in problem.by_unpack)
        self.saves = saves
        #: By operator: saves of storages that may move, and asks for them, each in order.
        self.saves_at: dict[int, list[int]] = defaultdict(list)
        self.asks_at: dict[int, list[int]] = defaultdict(list)
        #: Of each storage, the first save and the last one.
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for number, save in enumerate(saves):
            if save.storage >= 0:
                self.saves_at[save.op].append(number)
                self.first.setdefault(save.storage, number)
                self.last[save.storage] = number
        #: By storage, how many asks come before the last one for it.
        self.last_ask: dict[int, int] = {}
        expected, rank = dict[int, None](), 0
        for on_unpack in unpacks:
            if (storage := saves[on_unpack.save].storage) >= 0:
                self.last_ask[storage] = rank
                self.asks_at[on_unpack.op].append(on_unpack.save)
                expected[on_unpack.save] = None
                rank += 1
        #: The saves in the order in which they are asked for first.
        self.expected = list(expected)
        self.ops = sorted({*self.saves_at, *self.asks_at, program.forward_ops, len(program.ops)})
        #: Bytes of all that is no decision's: the other bytes, and each storage from where it is made.
        count = len(program.ops)
        spans = [(one.nbytes, one.made, count) for one in program.storages]
        self.made = list(map(add, live_bytes(count, spans), program.other_bytes))

    def run(self, moves: Moves, problem: Problem | None = None) -> Outcome:
        """Returns what comes of it where those storages move, and those that do in any case, as the tier has room.

        Args:
            problem: the same one in other windows.
        """
        problem = problem or self.problem
        return _Step(self, problem, problem.within_room(moves)).run()

    def part(self, fraction: float, problem: Problem | None = None) -> Candidate:
        """Returns what comes of moving that part of the bytes."""
        problem = problem or self.problem
        return Candidate(problem, self.run(tuple(share(problem.timeline, fraction)), problem), fraction)


#: Operators that a device takes before those that it was given are done: CUDA's queue has 1,024 launches, of which an
#: operator and the copies and events beside it take about two. Rows of an H100 are met with that.
_QUEUED = 512
#: Copies out that the transfer stream is given at a time, or bytes of so many seconds or of such a part of what moves.
_GIVEN, _GIVEN_SECONDS, _GIVEN_PART = 2, 1e-3, 1 / 32


class _Stored:
    __slots__ = ("is_gone", "number")

    def __init__(self, number: int) -> None:
        self.number, self.is_gone = number, False


class _Step:
    def __init__(self, of: StepSimulator, problem: Problem, moves: Moves) -> None:
        self.of, self.moves = of, moves
        self.problem, self.saves, self.storages = problem, of.saves, problem.program.storages
        self.given_bytes = min(problem.out * _GIVEN_SECONDS, problem.program.movable_bytes * _GIVEN_PART)
        self.launch, self.host_waits = problem.launch_seconds, not (problem.launch_seconds or problem.ordered)
        self.queue, self.order, self.uses = ResidentQueue(0), PrefetchOrder(problem.ahead), StepUses()
        self.stored = [_Stored(number) for number in range(len(self.storages))]
        #: Seconds: where the host, compute and the links are, and before when compute must not go on.
        self.host = self.compute = self.clear_from = self.out_free = self.in_free = 0.0
        #: The operator that is enqueued next.
        self.at = 0
        #: Stretches of operators between which compute may wait: the first one, and how late it is.
        self.stretches: deque[tuple[int, float]] = deque()
        self.change = [0] * (len(problem.op_seconds) + 1)
        #: Copies out that the host does not know to be over, the oldest first: when each is, and of which storage.
        self.leaving: deque[tuple[float, int]] = deque()
        self.leaving_bytes = self.moved_bytes = 0
        #: By storage, when its copy out is over, and the operator before which the host came to know that.
        self.left: dict[int, float] = {}
        self.known: dict[int, int] = {}
        #: By storage, when it is back, and those that the device has.
        self.back: dict[int, float] = {}
        self.here = set(range(len(self.storages)))
        self.reloaded_storages = set[int]()
        #: Whether what is known of the order of asks is in force, as it is from the first one on.
        self.is_arranged = False
        #: What the node that runs has asked for: saves, and their storages; and how many were asked for before.
        self.asked: list[int] = []
        self.using = set[int]()
        self.rank = 0

    def run(self) -> Outcome:
        of, program = self.of, self.problem.program
        for op in of.ops:
            if op > self.at:  # the operators before it are enqueued
                seconds, calls = self.problem.begins[op] - self.problem.begins[self.at], op - self.at
                begin = max(self.compute, self.host + self.launch, self.clear_from)
                self.compute = begin + seconds
                self.stretches.append((self.at, begin - self.problem.begins[self.at]))
                self.host = self.compute if self.host_waits else self.host + self.launch * calls
                self.at = op
                if self.launch and op > _QUEUED:
                    self._wait_for_the_queue(op - _QUEUED)
            for save in of.saves_at.get(op, ()):
                self._save(save)
            if op == program.forward_ops:
                self._poll()
                self._start_due(None)
                while self.problem.ordered and self.leaving:
                    self._wait_for_the_oldest()
            for save in of.asks_at.get(op, ()):
                self._ask(save)
        end = len(self.change) - 1
        for number in self.here:  # a copy holds its source until the host knows that it is over
            known = self.known.get(number, end) if number in self.left else 0
            self.change[max(self.storages[number].dropped, known)] -= self.storages[number].nbytes
        live_bytes = list(map(add, accumulate(self.change[:-1]), of.made))
        reloaded_storages = tuple(sorted(self.reloaded_storages))
        return Outcome(self.moves, self.compute, tuple(live_bytes), reloaded_storages, self.moved_bytes)

    def _reached(self) -> float:
        return max(self.compute, self.clear_from, self.host)

    def _wait_for_the_queue(self, done: int) -> None:
        """Waits until the operators before ``done`` have run."""
        while len(self.stretches) > 1 and self.stretches[1][0] < done:
            self.stretches.popleft()
        self.host = max(self.host, self.problem.begins[done] + self.stretches[0][1])

    # -- forward ------------------------------------------------------------------------------------------------------

    def _save(self, save: int) -> None:
        one, storage = self.saves[save], self.storages[self.saves[save].storage]
        number, first = one.storage, self.of.first[one.storage]
        self.uses.add(save, self.stored[number], storage.moved_bytes)
        if save != first:
            if first in self.queue:
                self.queue.postpone(first, one.node)
                self.queue.on_resave(first, save)
            return
        self._poll()
        if self.moves[number]:
            last = self.of.last[number]
            # A graph has what it computes at once; autograd, when the next operator is recorded.
            final_after = one.node - 1 if self.problem.ordered else one.node
            is_awaited = self.queue.awaiting_bytes + storage.moved_bytes <= AWAITED_WINDOWS * self.problem.window
            awaited = last if last > first and is_awaited else None
            self.queue.push(first, storage.moved_bytes, final_after, urgent=True, last_save=awaited)
        self._start_due(one.node)

    def _start_due(self, node: int | None) -> None:
        while (first := self.queue.due(node)) is not None:
            self.queue.discard(first)
            self._copy_out(self.saves[first].storage)

    def _copy_out(self, number: int) -> None:
        storage, launch, leaving = self.storages[number], self.launch, self.leaving
        nbytes = storage.moved_bytes
        if leaving and self.leaving_bytes + nbytes > self.problem.window:
            self._poll()
        while leaving and self.leaving_bytes + nbytes > self.problem.window:
            self._wait_for_the_oldest()
        self.host += launch
        begin = max(self.out_free, self._reached())
        self.host += 3 * launch
        self.out_free = max(begin, self.host - launch) + nbytes / self.problem.out
        leaving.append((self.out_free, number))
        self.left[number] = self.out_free
        self.leaving_bytes += nbytes

    def _wait_for_the_oldest(self) -> None:
        """Waits for the copy out that has begun first; in a graph compute does, and else the host."""
        over, _ = self.leaving[0]
        if self.problem.ordered:
            self.clear_from = max(self.clear_from, over)
            self._note_left()
        else:
            self.host = max(self.host, over)
            self._poll()

    def _poll(self) -> None:
        """Has the host notice copies out that are over; a graph asks for none."""
        if self.problem.ordered:
            return
        self.host += self.launch if self.leaving else 0.0
        while self.leaving and self.leaving[0][0] <= self.host:
            self._note_left()
            self.host += 2 * self.launch

    def _note_left(self) -> None:
        """Takes note that the oldest copy out is over: its source goes, unless backward has come to it."""
        number = self.leaving.popleft()[1]
        self.known[number] = self.at
        self.leaving_bytes -= self.storages[number].moved_bytes
        is_needed = number in self.using or self.of.last_ask.get(number, -1) < self.rank
        if number in self.here and not is_needed and self.stored[number] not in self.order.promised:
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        """Takes a storage from the device, once forward lets go of it."""
        storage = self.storages[number]
        self.here.remove(number)
        self.back.pop(number, None)
        self.change[max(storage.freed, self.at)] -= storage.nbytes

    # -- backward -----------------------------------------------------------------------------------------------------

    def _ask(self, save: int) -> None:
        saves, order, number = self.saves, self.order, self.saves[save].storage
        if self.asked and saves[self.asked[-1]].node != saves[save].node:
            self._end_node()
        self._poll()
        self.queue.discard(self.of.first[number])  # what has not begun to leave stays
        self._cancel(number)
        if number not in self.here:
            self._bring(number)
        self.asked.append(save)
        self.using.add(number)
        if not self.is_arranged:
            self.order.arrange(self.uses, self.of.expected)
            self.is_arranged = True
        use = self.uses.by_number[save]
        assert use is not None
        looked = order.on_unpack(self.uses, use, 0)
        for one in looked.drop:
            if one.number in self.back and one.number not in self.using:
                self._let_go(one.number)
        for one in looked.bring:
            if one.number not in self.here:
                self._bring(one.number)
        if number in self.back:  # compute waits for it
            self.host += self.launch
            if self.back[number] > self.host or self.problem.ordered:
                self.host += self.launch
                self.clear_from = max(self.clear_from, self.back[number])
                if self.host_waits:
                    self.host = max(self.host, self.back[number])
        self.rank += 1

    def _cancel(self, number: int) -> None:
        """Keeps a copy out from starting that is held back, and has those behind it leave earlier."""
        held = next((at for at, (_, one) in enumerate(self.leaving) if one == number), 0)
        if held < _GIVEN or not self.launch or self.problem.ordered:
            return
        before = sum(self.storages[one].moved_bytes for _, one in islice(self.leaving, held))
        nbytes = self.storages[number].moved_bytes
        if before + nbytes <= self.given_bytes:
            return
        seconds = nbytes / self.problem.out
        for at in range(held + 1, len(self.leaving)):
            over, one = self.leaving[at]
            self.leaving[at] = over - seconds, one
            self.left[one] -= seconds
        del self.leaving[held], self.left[number]
        self.leaving_bytes -= nbytes
        self.out_free -= seconds

    def _end_node(self) -> None:
        """Has the handles of a node go with it, and what the node was given unless that is asked for soon."""
        leaving = {number for _, number in self.leaving}
        for number in self.using:
            is_last = self.of.last_ask[number] < self.rank
            if is_last:
                self.stored[number].is_gone = True
                self.order.forget(self.stored[number])
            elif number in self.left and number not in leaving and self.stored[number] not in self.order.promised:
                self._let_go(number)
        self.asked, self.using = [], set()

    def _bring(self, number: int) -> None:
        storage, launch = self.storages[number], self.launch
        self.host += launch
        after = self._reached()  # the block's last owner
        self.host += 3 * launch
        ready = max(self.in_free, after, self.left[number], self.host)
        self.in_free = ready + storage.moved_bytes / self.problem.back
        self.host += launch
        self.back[number] = self.in_free
        self.here.add(number)
        self.reloaded_storages.add(number)
        self.moved_bytes += storage.moved_bytes
        self.change[self.at] += storage.nbytes


# -- what moves -------------------------------------------------------------------------------------------------------

#: Bytes of the windows that a plan chooses among, beside the automatic one.
WINDOWS = tuple(mebibytes << 20 for mebibytes in (272, 528, 1040, 2064))
#: How often the part that moves is halved; of those windows one in so many is tried where roughly is enough.
_HALVINGS, _FEW_HALVINGS, _FEW_WINDOWS = 8, 5, 2
#: The parts that are tried for the least peak.
_EIGHTHS = tuple(eighth / 8 for eighth in range(9))
#: Of a step without waits: a wait that counts as none.
_HIDDEN = 0.005


class Candidate(NamedTuple):
    """A decision, the step with the windows that it was made for, and what comes of it."""

    problem: Problem
    outcome: Outcome
    fraction: float

    @property
    def peak_bytes(self) -> int:
        """Bytes that live at one time, at most."""
        return self.outcome.peak_bytes

    @property
    def step_seconds(self) -> float:
        return self.outcome.step_seconds


class PolicySearch:
    """Decides for one step in several windows; what was replayed once is known.

    Args:
        problem: with the windows to take, where there are no others.
        windows: to choose among, for both directions.
    """

    def __init__(self, problem: Problem, windows: Sequence[int] = ()) -> None:
        self.problem, self.windows = problem, tuple(windows)
        problems = [replace(problem, window=window, ahead=window) for window in windows] or [problem]
        self._simulator = StepSimulator(problems[0])
        #: Say what comes of moving a part of the bytes, with each of the windows.
        self._parts = [cache(partial(self._simulator.part, problem=one)) for one in problems]
        # A budget may be too small for the least window, and half of it still keep the link busy.
        half = windows[0] // 2 if len(windows) > 1 else 0
        halved = [replace(problem, window=half, ahead=half)] if half else []
        self._halved = [cache(partial(self._simulator.part, problem=one)) for one in halved]
        #: What was tried to keep to budgets.
        self.tried: list[Candidate] = []

    def within(self, budget: int, *, roughly: bool = False, below: float = math.inf) -> Candidate:
        """Returns the fastest decision whose peak is at most ``budget``, of those alike the one that moves least.

        Where there is none, that of the least peak; what is not faster than ``below`` is looked for no further.

        Args:
            roughly: whether it is enough to come near to it, in a part of the time.
        """
        fitting = list[Candidate]()

        def take(one: Candidate) -> bool:
            nonlocal below
            self.tried.append(one)
            if one.peak_bytes <= budget:
                fitting.append(one)
                below = min(below, one.step_seconds)
                return False
            return one.step_seconds > below  # and so is what moves more

        least = self._least_part(budget)
        parts = [*self._halved, *self._parts][:: -_FEW_WINDOWS if roughly else -1]  # the larger, the faster
        halvings = _FEW_HALVINGS if roughly else _HALVINGS
        for part in parts:
            for one in _tried(part, lambda one: one.peak_bytes > budget, halvings, least):
                if take(one):
                    break
        for part in parts if not (roughly and fitting) else ():  # of more, more may be on its way at one time
            for eighth in _EIGHTHS:
                if eighth > least:
                    take(one := part(eighth))
                    if one.step_seconds > below:
                        break
        if roughly and not fitting:
            return min(self.tried, key=lambda one: (one.peak_bytes, one.step_seconds))
        return min(fitting or [self.least], key=lambda one: (one.step_seconds, one.outcome.moved_bytes))

    def _least_part(self, budget: int) -> float:
        """Returns a part of the bytes of which less cannot be enough."""
        storages = self.problem.program.storages
        over = self.problem.unmoved_peak - sum(one.nbytes for one in storages if one.is_forced) - budget
        most = max((one.nbytes / one.moved_bytes for one in storages if one.moved_bytes), default=1.0)
        return min(max(over, 0) / (most * sum(one.moved_bytes for one in storages) or 1), 1.0)

    def hidden(self) -> Candidate:
        """Returns the decision that moves most of those that the link hides."""
        most = (1 + _HIDDEN) * self.nothing.step_seconds
        found = [one for part in self._parts for one in _tried(part, lambda one: one.step_seconds <= most)]
        hidden = (one for one in (self.nothing, *found) if one.step_seconds <= most)
        return max(hidden, key=lambda one: (one.outcome.moved_bytes, -one.step_seconds))

    @property
    def nothing(self) -> Candidate:
        return self.share(0.0)

    @cached_property
    def least(self) -> Candidate:
        """That of the least peak."""
        return min(self._eighths, key=lambda one: (one.peak_bytes, one.step_seconds))

    @cached_property
    def _eighths(self) -> list[Candidate]:
        return [part(eighth) for part in (*self._halved, *self._parts) for eighth in _EIGHTHS]

    def share(self, fraction: float) -> Candidate:
        """Returns what comes of moving that part of the bytes, in the first windows."""
        return self._parts[0](fraction)

    def of(self, moves: Moves) -> Outcome:
        return self._simulator.run(moves)


def _tried(
    part: Callable[[float], Candidate],
    is_more: Callable[[Candidate], bool],
    halvings: int = _HALVINGS,
    begin: float = 0.0,
) -> Iterator[Candidate]:
    """Yields what comes of the parts from ``begin`` on that a bisection tries; ``is_more``: whether a larger one is
    looked for."""
    yield (low := part(begin))
    if not is_more(low):
        return
    yield (high := part(1.0))
    if is_more(high):
        return
    end = 1.0
    for _ in range(halvings):
        middle = (begin + end) / 2
        yield (found := part(middle))
        begin, end = (middle, end) if is_more(found) else (begin, middle)
