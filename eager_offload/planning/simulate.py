"""Simulates one step: the library's scheduler, driven by clocks of the host, of compute and of both link directions.

``ResidentQueue`` tells which copy is due and ``PrefetchOrder`` which storage to reload, as in training. The simulator
adds time and bytes:

    host       enqueues operators and copies, ``launch_seconds`` per call; waits if the window is full, or if it is
               ``_QUEUED`` operators ahead of compute
    compute    runs operators in order; waits until a tensor that it needs is reloaded
    out, back  carry one copy at a time, in the order of enqueueing; a copy out that has not been given to the transfer
               stream (``engine/transfers.py``) is cancelled when backward unpacks its storage

Memory is counted when the host enqueues, as in a caching allocator. A source is freed once the host notices that its
copy has finished; the host looks at each save and unpack. With ``launch_seconds`` 0 the host waits for every operator.

In a compiled graph (``Problem.ordered``) transfers and waits have fixed places. Compute, instead of the host, waits if
the window is full, and for all copies at the end of forward; sources are freed at these waits. The peak is therefore
independent of timing.

``PolicySearch`` bisects the fraction of bytes to offload for several windows; ``budget.share`` picks the storages.
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
    """The simulated step of a decision."""

    moves: Moves
    step_seconds: float
    live_bytes: tuple[int, ...]
    reloaded_storages: tuple[int, ...]
    """The storages that were offloaded and reloaded, ascending."""
    moved_bytes: int
    """Reloaded bytes; a storage that is reloaded twice counts twice."""

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)


class StepSimulator:
    """Simulates decisions for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        program = problem.program
        saves, unpacks = program.saves, program.unpacks
        if problem.ordered:  # a graph saves each value once
            saves = tuple(
                ProgramSave(one.nbytes, True, None, at, op=one.saved, node=at)
                for at, one in enumerate(program.storages)
            )
            unpacks = tuple(ProgramUnpack(at, program.storages[at].unpacked_at) for at in problem.by_unpack)
        self.saves = saves
        #: By operator, the saves and unpacks of movable storages, in order.
        self.saves_at: dict[int, list[int]] = defaultdict(list)
        self.unpacks_at: dict[int, list[int]] = defaultdict(list)
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for number, save in enumerate(saves):
            if save.storage >= 0:
                self.saves_at[save.op].append(number)
                self.first.setdefault(save.storage, number)
                self.last[save.storage] = number
        #: By storage, the index of its last unpack among all unpacks.
        self.last_unpack: dict[int, int] = {}
        expected, rank = dict[int, None](), 0
        for on_unpack in unpacks:
            if (storage := saves[on_unpack.save].storage) >= 0:
                self.last_unpack[storage] = rank
                self.unpacks_at[on_unpack.op].append(on_unpack.save)
                expected[on_unpack.save] = None
                rank += 1
        self.expected = list(expected)
        self.ops = sorted({*self.saves_at, *self.unpacks_at, program.forward_ops, len(program.ops)})
        #: Live bytes before any storage is freed: the other bytes, plus each storage from its creation to the end.
        count = len(program.ops)
        spans = [(one.nbytes, one.made, count) for one in program.storages]
        self.made = list(map(add, live_bytes(count, spans), program.other_bytes))

    def run(self, moves: Moves, problem: Problem | None = None) -> Outcome:
        """Simulates the step with ``moves``, plus forced storages and without those that the tier has no room for.

        Args:
            problem: the same problem with other windows.
        """
        problem = problem or self.problem
        return _Step(self, problem, problem.within_room(moves)).run()

    def part(self, fraction: float, problem: Problem | None = None) -> Candidate:
        problem = problem or self.problem
        return Candidate(problem, self.run(tuple(share(problem.timeline, fraction)), problem), fraction)


#: The number of operators by which the host may run ahead of the device: CUDA's queue holds 1,024 launches, and an
#: operator with its copies and events makes about two. Measured steps of an H100 agree with this.
_QUEUED = 512
#: The transfer stream always holds up to ``_GIVEN`` copies out, and more as long as their bytes together take the link
#: at most ``_GIVEN_SECONDS`` and are at most ``_GIVEN_PART`` of the movable bytes.
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
        #: Clocks in seconds: host, compute, the time that compute must wait for, and when each link is free.
        self.host = self.compute = self.clear_from = self.out_free = self.in_free = 0.0
        self.at = 0
        #: Runs of operators without a wait in between: the first operator, and by how many seconds it begins later than
        #: in a step without any waits.
        self.stretches: deque[tuple[int, float]] = deque()
        self.change = [0] * (len(problem.op_seconds) + 1)
        #: Copies out that the host has not seen finish, oldest first: end time and storage.
        self.leaving: deque[tuple[float, int]] = deque()
        self.leaving_bytes = self.moved_bytes = 0
        #: By storage, the end time of its copy out, and the operator before which the host noticed it.
        self.left: dict[int, float] = {}
        self.known: dict[int, int] = {}
        #: By storage, the end time of its reload; and the storages on the device.
        self.back: dict[int, float] = {}
        self.here = set(range(len(self.storages)))
        self.reloaded_storages = set[int]()
        self.is_arranged = False
        #: Saves that the running node has unpacked, their storages, and the number of unpacks so far.
        self.unpacked: list[int] = []
        self.using = set[int]()
        self.rank = 0

    def run(self) -> Outcome:
        of, program = self.of, self.problem.program
        for op in of.ops:
            if op > self.at:
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
            for save in of.unpacks_at.get(op, ()):
                self._unpack(save)
        end = len(self.change) - 1
        for number in self.here:  # a copy holds its source until the host notices its end
            known = self.known.get(number, end) if number in self.left else 0
            self.change[max(self.storages[number].dropped, known)] -= self.storages[number].nbytes
        live_bytes = list(map(add, accumulate(self.change[:-1]), of.made))
        reloaded_storages = tuple(sorted(self.reloaded_storages))
        return Outcome(self.moves, self.compute, tuple(live_bytes), reloaded_storages, self.moved_bytes)

    def _reached(self) -> float:
        return max(self.compute, self.clear_from, self.host)

    def _wait_for_the_queue(self, done: int) -> None:
        while len(self.stretches) > 1 and self.stretches[1][0] < done:
            self.stretches.popleft()
        self.host = max(self.host, self.problem.begins[done] + self.stretches[0][1])

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
            # A graph's value is final at once, an eager value when autograd records the next operator.
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
        """Makes compute (in a graph) or the host (otherwise) wait for the oldest copy out."""
        over, _ = self.leaving[0]
        if self.problem.ordered:
            self.clear_from = max(self.clear_from, over)
            self._note_left()
        else:
            self.host = max(self.host, over)
            self._poll()

    def _poll(self) -> None:
        """Makes the host notice finished copies out; a graph only notices them at its waits."""
        if self.problem.ordered:
            return
        self.host += self.launch if self.leaving else 0.0
        while self.leaving and self.leaving[0][0] <= self.host:
            self._note_left()
            self.host += 2 * self.launch

    def _note_left(self) -> None:
        """Records the end of the oldest copy out, and frees its source unless backward needs it now."""
        number = self.leaving.popleft()[1]
        self.known[number] = self.at
        self.leaving_bytes -= self.storages[number].moved_bytes
        is_needed = number in self.using or self.of.last_unpack.get(number, -1) < self.rank
        if number in self.here and not is_needed and self.stored[number] not in self.order.promised:
            self._drop(number)

    def _drop(self, number: int) -> None:
        """Frees a storage on the device: now, or when forward drops it, if that is later."""
        storage = self.storages[number]
        self.here.remove(number)
        self.back.pop(number, None)
        self.change[max(storage.freed, self.at)] -= storage.nbytes

    def _unpack(self, save: int) -> None:
        saves, order, number = self.saves, self.order, self.saves[save].storage
        if self.unpacked and saves[self.unpacked[-1]].node != saves[save].node:
            self._end_node()
        self._poll()
        self.queue.discard(self.of.first[number])  # a copy out that has not begun is dropped
        self._cancel(number)
        if number not in self.here:
            self._reload(number)
        self.unpacked.append(save)
        self.using.add(number)
        if not self.is_arranged:
            self.order.arrange(self.uses, self.of.expected)
            self.is_arranged = True
        use = self.uses.by_number[save]
        assert use is not None
        found = order.on_unpack(self.uses, use, 0)
        for one in found.drop:
            if one.number in self.back and one.number not in self.using:
                self._drop(one.number)
        for one in found.bring:
            if one.number not in self.here:
                self._reload(one.number)
        if number in self.back:
            self.host += self.launch
            if self.back[number] > self.host or self.problem.ordered:
                self.host += self.launch
                self.clear_from = max(self.clear_from, self.back[number])
                if self.host_waits:
                    self.host = max(self.host, self.back[number])
        self.rank += 1

    def _cancel(self, number: int) -> None:
        """Cancels a copy out that the transfer stream has not been given; later copies start earlier."""
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
        """Frees the handles of the node that has run, and its reloaded storages unless they are needed soon."""
        leaving = {number for _, number in self.leaving}
        for number in self.using:
            is_last = self.of.last_unpack[number] < self.rank
            if is_last:
                self.stored[number].is_gone = True
                self.order.forget(self.stored[number])
            elif number in self.left and number not in leaving and self.stored[number] not in self.order.promised:
                self._drop(number)
        self.unpacked, self.using = [], set()

    def _reload(self, number: int) -> None:
        storage, launch = self.storages[number], self.launch
        self.host += launch
        after = self._reached()  # the reload target's last user has to finish first
        self.host += 3 * launch
        ready = max(self.in_free, after, self.left[number], self.host)
        self.in_free = ready + storage.moved_bytes / self.problem.back
        self.host += launch
        self.back[number] = self.in_free
        self.here.add(number)
        self.reloaded_storages.add(number)
        self.moved_bytes += storage.moved_bytes
        self.change[self.at] += storage.nbytes


#: Window sizes in bytes that a plan tries besides the automatic one.
WINDOWS = tuple(mebibytes << 20 for mebibytes in (272, 528, 1040, 2064))
#: The number of halvings in a bisection, and the number if ``roughly``; if ``roughly``, only every
#: ``_FEW_WINDOWS``-th window is tried.
_HALVINGS, _FEW_HALVINGS, _FEW_WINDOWS = 8, 5, 2
#: The fractions that are tried for the lowest peak.
_EIGHTHS = tuple(eighth / 8 for eighth in range(9))
#: A stall up to this fraction of the step without transfers counts as hidden.
_HIDDEN = 0.005


class Candidate(NamedTuple):
    """A decision and its simulated step."""

    problem: Problem
    outcome: Outcome
    fraction: float

    @property
    def peak_bytes(self) -> int:
        return self.outcome.peak_bytes

    @property
    def step_seconds(self) -> float:
        return self.outcome.step_seconds


class PolicySearch:
    """Searches the decisions for one step, with several windows. Simulated decisions are remembered.

    Args:
        problem: its windows are used if ``windows`` is empty.
        windows: sizes to try, in bytes, for both directions.
    """

    def __init__(self, problem: Problem, windows: Sequence[int] = ()) -> None:
        self.problem, self.windows = problem, tuple(windows)
        # A budget may be too small for the smallest window; half of that still keeps the link busy.
        half = [windows[0] // 2] if len(windows) > 1 and windows[0] > 1 else []
        problems = [replace(problem, window=size, ahead=size) for size in (*half, *windows)] or [problem]
        self._simulator = StepSimulator(problems[len(half)])
        #: For each window, the function from a fraction to its candidate; for a budget also with half a window.
        self._for_budgets = [cache(partial(self._simulator.part, problem=one)) for one in problems]
        self._parts = self._for_budgets[len(half) :]
        #: All candidates that ``within`` has tried.
        self.tried: list[Candidate] = []

    def within(self, budget: int, *, roughly: bool = False, below: float = math.inf) -> Candidate:
        """Returns the fastest decision with a peak of at most ``budget`` bytes (of equals, the least movement), or the
        one with the lowest peak if none fits.

        Args:
            roughly: whether to try fewer windows and fractions, for an approximate result.
            below: step time in seconds; decisions that are not faster are not refined.
        """
        fitting = list[Candidate]()

        def take(one: Candidate) -> bool:
            nonlocal below
            self.tried.append(one)
            if one.peak_bytes <= budget:
                fitting.append(one)
                below = min(below, one.step_seconds)
                return False
            return one.step_seconds > below  # larger fractions are slower still

        least = self._least_part(budget)
        # The largest windows first: they usually give the fastest steps, and later searches stop at slower ones.
        parts = self._for_budgets[:: -_FEW_WINDOWS if roughly else -1]
        halvings = _FEW_HALVINGS if roughly else _HALVINGS
        for part in parts:
            for one in _bisected(part, lambda one: one.peak_bytes > budget, halvings, least):
                if take(one):
                    break
        # The peak is not monotonic in the fraction, because more bytes may be in flight: try fractions in even steps.
        for part in parts if not (roughly and fitting) else ():
            for eighth in _EIGHTHS:
                if eighth > least:
                    take(one := part(eighth))
                    if one.step_seconds > below:
                        break
        if roughly and not fitting:
            return min(self.tried, key=lambda one: (one.peak_bytes, one.step_seconds))
        return min(fitting or [self.least], key=lambda one: (one.step_seconds, one.outcome.moved_bytes))

    def _least_part(self, budget: int) -> float:
        storages = self.problem.program.storages
        over = self.problem.unmoved_peak - sum(one.nbytes for one in storages if one.is_forced) - budget
        most = max((one.nbytes / one.moved_bytes for one in storages if one.moved_bytes), default=1.0)
        return min(max(over, 0) / (most * sum(one.moved_bytes for one in storages) or 1), 1.0)

    def hidden(self) -> Candidate:
        """Returns the decision that moves the most bytes while the link hides its copies."""
        most = (1 + _HIDDEN) * self.nothing.step_seconds
        found = [one for part in self._parts for one in _bisected(part, lambda one: one.step_seconds <= most)]
        hidden = (one for one in (self.nothing, *found) if one.step_seconds <= most)
        return max(hidden, key=lambda one: (one.outcome.moved_bytes, -one.step_seconds))

    @property
    def nothing(self) -> Candidate:
        return self.share(0.0)

    @cached_property
    def least(self) -> Candidate:
        tried = [part(eighth) for part in self._for_budgets for eighth in _EIGHTHS]
        return min(tried, key=lambda one: (one.peak_bytes, one.step_seconds))

    def share(self, fraction: float) -> Candidate:
        """Returns the candidate for ``fraction``, with the first window."""
        return self._parts[0](fraction)

    def of(self, moves: Moves) -> Outcome:
        return self._simulator.run(moves)


def _bisected(
    part: Callable[[float], Candidate],
    is_more: Callable[[Candidate], bool],
    halvings: int = _HALVINGS,
    begin: float = 0.0,
) -> Iterator[Candidate]:
    """Yields the candidates of a bisection between ``begin`` and 1; ``is_more``: whether a fraction is too small."""
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
