"""The step plans of one device: which one a forward follows, and when one is recorded, decided anew or forgotten."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import replace
from operator import sub
from typing import NamedTuple, Protocol

from torch import Tensor

from eager_offload.codecs.names import IDENTITY, CodecRules
from eager_offload.computed_plan import ComputedPlan
from eager_offload.eager.adapting import Adapting
from eager_offload.eager.coding import codings_of
from eager_offload.eager.measuring import StepMeasures
from eager_offload.errors import warn
from eager_offload.runtime.base import Layout
from eager_offload.schedule import ResidentQueue
from eager_offload.selection import logical_bytes, whole
from eager_offload.stats import Accounts, KeepReason
from eager_offload.step_plan import Fate, Save, StepPlan
from eager_offload.step_recorder import StepRecorder
from eager_offload.tiers.base import Slot, keep_ready
from eager_offload.tiers.finalizers import Living
from eager_offload.tiers.forking import tell_after_fork

#: How many plans are remembered: the forwards of one step may differ, of a generator and a discriminator say.
_MOST_PLANS = 8
#: One forward in so many is decided anew, so that a better plan can be found.
_DECIDE_AGAIN = 16
#: After a miss so many forwards are recorded of which it is not known which plan is theirs, instead of guessing.
_UNCLEAR = 8
#: So many plans, those that were followed last, have slots ready between steps, and so many sets each.
_MOST_READY = 2
#: After so many forwards that are alike the next one follows, where the config says "auto".
_ALIKE = 3
#: So many forwards at most follow none since others that began alike have differed.
_LONGEST_PAUSE = 64
#: At most one byte in so many of what may leave is decided anew: a plan knows when to bring the rest back, and what is
#: decided anew has the room that this leaves. What stays since a user has said so takes none.
_MOST_DECIDED = 8
#: After so many recordings in a row that no plan can say, one forward in sixteen is recorded.
_MOST_IN_VAIN = 4
#: So many forwards in a row that differ from a plan, and it is forgotten.
_MOST_MISSES = 3
_PLAIN = CodecRules({"*": IDENTITY})


class Following(Protocol):
    """A forward that follows a plan."""

    #: The newest bytes of its thread, where a step is unknown.
    queue: ResidentQueue
    #: Whether the rest of the step is unknown.
    is_over: bool

    @property
    def is_mostly_gone(self) -> bool:
        """Whether its forward is over, and less than half of the bytes that it has slots for are asked for yet."""

    def release_slots(self) -> bool:
        """Gives back the slots of what is gone; whether there were any. Any thread may call it."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are yet to leave, or stay as the newest until backward asks for them."""

    def count_kept(self) -> None:
        """Counts what has stayed as the plan says, since this was called last. The lock is held."""

    def miss(self, what: str) -> None:
        """The step differs from the plan by ``what``."""

    def drop_reloads(self) -> None:
        """Lets go of what was brought back early."""

    def give_up(self, before: int) -> int:
        """Ends the promises that were due before that unpack of the device; by which one the next is, if any."""


class Turn:
    """One forward among those of a thread, in the order in which they begin."""

    __slots__ = ("_after", "_is_decided", "_known")

    def __init__(self, known: KnownPlan | None) -> None:
        # Weak: a plan holds the turn that comes after its own, and that is mostly one of the same plan.
        self._known = None if known is None else weakref.ref(known)
        self._is_decided = known is not None
        self._after: Turn | None = None

    @property
    def known(self) -> KnownPlan | None:
        """The plan that it is like, as far as is known by now and as long as any forward may follow it."""
        return None if self._known is None else self._known()

    def precedes(self, turn: Turn) -> None:
        """``turn`` is the next one."""
        if (known := self.known) is not None:
            known.is_followed_by(turn)
        elif not self._is_decided:
            self._after = turn

    def decide(self, known: KnownPlan | None) -> None:
        """It was like ``known``, or like none."""
        self._known, self._is_decided = None if known is None else weakref.ref(known), True
        if known is not None and self._after is not None:
            known.is_followed_by(self._after)
        self._after = None


class Staying(NamedTuple):
    """A save that stays: the bytes of the tensor and of its storage, and why."""

    nbytes: int
    storage_nbytes: int
    reason: KeepReason
    #: Whether nothing but its bytes is counted, which is done later, for many at once.
    is_counted_later: bool


def _staying(save: Save) -> Staying:
    """The same save, as far as a forward that follows looks at it."""
    assert save.reason is not None, "StepPlan.check has looked"
    later = save.reason in (KeepReason.PARAMETER, KeepReason.SMALL)
    return Staying(save.nbytes, save.storage_nbytes, save.reason, later)


class KeptSums(NamedTuple):
    """Of the first saves of a plan, those that stay and are counted later: how many, and their bytes."""

    tensors: int = 0
    parameter_bytes: int = 0
    small_bytes: int = 0

    def plus(self, save: Staying | None) -> KeptSums:
        """With one save more."""
        if save is None or not save.is_counted_later:
            return self
        tensors, parameter_bytes, small_bytes = self
        if save.reason is KeepReason.PARAMETER:
            return KeptSums(tensors + 1, parameter_bytes + save.nbytes, small_bytes)
        return KeptSums(tensors + 1, parameter_bytes, small_bytes + save.nbytes)


class Recording(StepRecorder):
    """Writes down what one forward and its backward do, and knows the forward's turn."""

    __slots__ = ("turn",)

    def __init__(self, known: KnownPlan | None = None) -> None:
        super().__init__(looks_again=known is not None)
        self.turn = Turn(known)


class KnownPlan:
    """A plan, and what the runs that follow it need of it."""

    def __init__(self, plan: StepPlan, rules: CodecRules = _PLAIN, *, is_computed: bool = False) -> None:
        self.plan = plan
        #: How storages travel that a codec packs, by number.
        self.codings = codings_of(plan, rules)
        #: Whether a planner has made it: it says what is to stay, and no recorded one comes in its place.
        self.is_computed = is_computed
        self.starts, self.largest = plan.starts(), plan.largest
        #: What stays for its own sake, by number.
        self.staying = [_staying(save) if save.fate is Fate.KEEP and save.owner < 0 else None for save in plan.saves]
        #: The same of those after which no copy starts, and ``None`` for what comes after the last save.
        staying = [None if starts else stays for stays, starts in zip(self.staying, self.starts, strict=False)]
        self.only_staying = [*staying, None]
        self._sums = list(itertools.accumulate(self.staying, KeptSums.plus, initial=KeptSums()))
        #: Of the storages that leave, which do whole, and of what they come back to.
        self.footprints = [whole(save.storage_nbytes) for save in plan.saves]
        self.layouts = [Layout(save.storage_nbytes) for save in plan.saves]
        #: The saves at which sources have gone: a run looks there whether they may go.
        self.releases = frozenset(save.release for save in plan.saves if save.fate is Fate.OFFLOAD)
        #: By number of a first save: which unpack is the last of its storage; the first one where there is none.
        self.last_asks = [0] * len(plan.saves)
        for rank, ask in enumerate(plan.asks):
            self.last_asks[plan.saves[ask.save].owner] = rank
        self.shared = frozenset(save.owner for save in plan.saves if save.fate is Fate.SHARE)
        #: Slots of runs that are gone, a list for each.
        self.idle: deque[list[Slot]] = deque(maxlen=_MOST_READY)
        #: How many forwards have followed it, and how many of the last ones differed.
        self.followed = 0
        self.misses = 0
        self.is_forgotten = False
        #: The forward that came after the last one of these.
        self.next: Turn | None = None

    def kept_between(self, first: int, after: int) -> KeptSums:
        """What stays and is counted later, from save ``first`` to the one before ``after``."""
        return KeptSums(*map(sub, self._sums[after], self._sums[first]))

    @property
    def idle_bytes(self) -> int:
        """Bytes of a tier that no run uses."""
        return len(self.idle) * sum(self.plan.slots)

    def release_idle(self) -> None:
        """Gives back to the tier what no run uses."""
        self.idle.clear()

    def fits(self, nbytes: int) -> bool:
        """Whether a forward whose first save has so many bytes may follow it."""
        return not self.is_forgotten and self.plan.saves[0].nbytes == nbytes

    def is_followed_by(self, turn: Turn) -> None:
        """The last forward that was like it came before ``turn``."""
        if not self.is_forgotten:  # else a graph that is kept alive would hold all that came after it
            self.next = turn

    def forget(self) -> None:
        """No forward follows it any more."""
        self.is_forgotten, self.next = True, None
        self.idle.clear()

    def refuse(self) -> None:
        """A codec cannot hold what it held when it was recorded: the next forward is decided anew, at a look."""
        if not self.is_computed:
            self.forget()


class StepPlans:
    """The plans of one device, the latest last. Callers hold the offloader's lock.

    Args:
        policy: the config's ``step_plans``.
        rules: of the config's ``codec``.
        accounts: where misses and what came of a computed plan are counted.
        measures: what is known of a step of the device.
    """

    def __init__(self, policy: bool | str, rules: CodecRules, accounts: Accounts, measures: StepMeasures) -> None:
        self._rules, self._accounts = rules, accounts
        #: Who is to be told by ``saw`` of what is saved and asked for, while ``is_close``.
        self.measures = measures
        #: After how many forwards that are alike one is recorded, to be followed by the next; ``None``: never.
        self._alike = None if policy is False else 0 if policy is True else _ALIKE - 1
        self._known: list[KnownPlan] = []
        #: What the user has given, until a forward has followed it whole or differed from it.
        self._given: KnownPlan | None = None
        #: Compares steps with what a planner has made, where that was given.
        self._adapting: Adapting | None = None
        #: How many forwards are to be recorded of which it is not known which plan is theirs.
        self._unclear = 0
        #: Where several plans begin alike: how many forwards follow none after the next miss and by now, and whether
        #: the last one was such a forward.
        self._next_pause = 1
        self._pause = 0
        self._waits = False
        #: How many recordings in a row have led to no plan, and forwards since that might have been recorded.
        self._in_vain = 0
        #: The warning that it did differ.
        self._unfit = ""
        #: What was followed last.
        self.last: StepPlan | None = None
        #: Those that are alive.
        self.runs: Living[Following] = Living()
        keep_ready(self)
        tell_after_fork(self)

    def after_fork(self) -> None:
        """The slots are the parent's: no run goes on in the child, and what a run gives back serves none there."""
        for known in self._known:
            known.is_forgotten, known.next = True, None
        given = self._given
        self._given = None
        parents, self._known = self._known, []
        for known in parents:
            self._known.append(KnownPlan(known.plan, self._rules, is_computed=known.is_computed))
            if known is given:
                self._given = self._known[-1]
        for run in self.runs:
            run.is_over = True

    def close(self) -> None:
        """What runs give back from here on goes to its tier."""
        self.forget_all()

    def forget_all(self) -> None:
        """No forward follows what is known so far."""
        for known in self._known:
            known.forget()
        self._known = []

    def records(self, alike: int) -> bool:
        """Whether a forward is to be recorded that no plan fits, where ``alike`` ones have gone before."""
        if self._alike is None or ((alike < self._alike or self._waits) and not self._unclear):
            return False
        if self._in_vain < _MOST_IN_VAIN:
            return True
        self._in_vain += 1
        return self._in_vain % _DECIDE_AGAIN == 0

    @property
    def idle_bytes(self) -> int:
        """Bytes of a tier that no run uses."""
        return sum(known.idle_bytes for known in self._known)

    def release_sets(self) -> None:
        """Gives back to the tier what no run uses."""
        for known in self._known:
            known.release_idle()

    def release_idle(self) -> bool:
        """Gives back to the tier what no run uses, and of each run what it has no use for any more."""
        found = self.idle_bytes > 0
        self.release_sets()
        for run in self.runs:
            found = run.release_slots() or found
        return found

    def add(self, plan: StepPlan, *, is_computed: bool = False) -> KnownPlan:
        """Takes in a plan, in place of what was known of forwards like that; one that was computed stays."""
        self._known = [known for known in self._known if not known.is_forgotten]
        for known in self._known:
            if known.plan == plan or (known.is_computed and known.plan.is_like(plan)):
                return known
        new, others = KnownPlan(plan, self._rules, is_computed=is_computed), []
        for known in self._known:
            if known.plan.is_like(plan):
                new.next = known.next
                known.forget()
            else:
                others.append(known)
        for known in others[: 1 - _MOST_PLANS]:
            known.forget()
        self._known = [*others[1 - _MOST_PLANS :], new]
        return new

    def learn(self, recording: Recording) -> None:
        """A forward that was recorded is over, and so is its backward."""
        if recording.is_early:
            recording.turn.decide(None)
            return
        plan = recording.plan()
        if recording.is_asked_over:
            self._accounts.counters.plan_misses["twice"] = 1
        if plan is not None and plan.decided_bytes * _MOST_DECIDED > plan.leaving_bytes:
            self._accounts.counters.plan_misses["decided"] = 1
            plan = None
        self._in_vain = 0 if plan is not None else self._in_vain + 1
        recording.turn.decide(None if plan is None else self.add(plan))

    def give(self, plan: StepPlan, computed: ComputedPlan | None) -> None:
        """Takes in a plan that the user has; ``computed``: of which it is, where a planner has made it."""
        if computed is not None:
            self._adapting = Adapting(computed)
        self._given = self.add(plan, is_computed=computed is not None)

    def enter(self) -> None:
        """A forward is about to begin."""
        if self._adapting is not None:
            self.measures.begin(closely=self._adapting.looks_closely)

    def saw(self, run: Following, known: KnownPlan, place: int, *, is_ask: bool) -> None:
        """A forward has saved something, or its backward has asked for it; ``place``: among all saves, or asks."""
        if not known.is_computed:
            self.measures.drop()
            return
        plan = known.plan
        number, count = (plan.asks[place].save, len(plan.asks)) if is_ask else (place, len(plan.saves))
        self.measures.saw(run, number, place, count, is_ask=is_ask)

    def adapt(self) -> None:
        """Makes a computed plan anew where that is due: see [Note: adapting]. The lock is not held."""
        adapting = self._adapting
        if adapting is None or not adapting.is_due:
            return
        with self._accounts.lock:
            request = adapting.take()
        if request is None:
            return  # another thread's
        found = None
        with suppress(Exception):  # training goes on as it did
            found = request.plan.adapted(request.surplus, request.timing)
        step_plans = () if found is None else found.plan.step_plans
        with self._accounts.lock:
            old = next((known for known in self._known if known.is_computed), None)
            if found is None or not step_plans or old is None:  # it may have been forgotten meanwhile
                adapting.made(None)
                return
            adapting.made(found)
            new = KnownPlan(step_plans[0], self._rules, is_computed=True)
            new.next = old.next
            old.forget()
            self._known = [new if known is old else known for known in self._known]
            self._given = new if self._given is old else self._given
            self._accounts.counters.expect(found.plan)
            self.measures.restart()

    def fitting(self, tensor: Tensor, before: Turn | None) -> KnownPlan | None:
        """The plan of a forward whose first save is ``tensor``, if it is known.

        Args:
            before: the thread's last forward.
        """
        nbytes = logical_bytes(tensor)
        expected = before.known.next if before is not None and before.known is not None else None
        fitting = [known for known in self._known if known.fits(nbytes)]
        self._waits = len(fitting) > 1 and self._pause > 0
        if self._waits:
            self._pause -= 1
        elif expected is not None and expected.known in fitting:
            return expected.known
        elif fitting and not self._unclear:
            return fitting[-1]
        if fitting:
            self._unclear = max(self._unclear - 1, 0)
            return None
        if self._given is not None:
            self.missed(self._given, "size")
        return None

    def has_room(self, known: KnownPlan, queue: ResidentQueue) -> bool:
        """Whether the newest bytes that ``known`` keeps may stay beside those of the thread's earlier forwards.

        Where they may not, these are over, so that their newest bytes leave when there are newer ones.
        """
        earlier = [run for run in self.runs if run.queue is queue and run.waiting_bytes]
        held = queue.nbytes + sum(run.waiting_bytes for run in earlier)
        if not held or held + known.plan.newest_bytes <= queue.limit:
            return True
        for run in earlier:
            if not run.is_over:
                run.miss("newest")
        return False

    def tell(self) -> None:
        """Warns that the plan that was given does not fit. The lock is not held: how it is shown is the user's."""
        if self._unfit:
            message, self._unfit = self._unfit, ""
            warn(message)

    def begin(self, known: KnownPlan) -> bool:
        """A forward is about to follow ``known``; ``False`` if it is to be decided anew, and recorded."""
        known.followed += 1
        if known.followed % _DECIDE_AGAIN == 0 and not known.is_computed:
            known.release_idle()  # it takes as much again
            return False
        self._known = [*(one for one in self._known if one is not known), known]
        for other in self._known[:-_MOST_READY]:
            other.release_idle()
        return True

    def follow(self, run: Following, known: KnownPlan) -> None:
        """A forward follows ``known``."""
        self.runs.add(run)
        self.last = known.plan
        self._accounts.counters.follow()

    def done(self, known: KnownPlan) -> None:
        """A forward was like ``known`` to the end."""
        known.misses = 0
        self._next_pause = max(self._next_pause // 2, 1)
        if known is self._given:
            self._given = None
        counters = self._accounts.counters
        if known.is_computed and not known.is_forgotten and counters.plan is not None:
            counters.plan = self.measures.end(counters.plan)
            adapting, measures = self._adapting, self.measures
            if adapting is None:
                return
            measured = measures.take() if adapting.is_last else None
            if adapting.note(measures.peak, measured):
                counters.demote("over_budget")
            if measured is not None and adapting.process_peak is not None:
                counters.plan = replace(counters.plan, peak_bytes=adapting.process_peak)

    def missed(self, known: KnownPlan, what: str) -> None:
        """A forward has differed from ``known`` by ``what``; when several have in a row it is forgotten."""
        self._count(what)
        known.misses += 1
        self._unclear = _UNCLEAR  # there may be several kinds that begin alike
        nbytes = known.plan.saves[0].nbytes
        if sum(other.fits(nbytes) for other in self._known) > 1:  # in no order that could be learnt, it may be
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
        if known is self._given:
            self._does_not_fit(known, what)
        if known.misses == _MOST_MISSES and known in self._known:
            self._known.remove(known)
            known.forget()

    def has_no_slots(self) -> None:
        """A forward follows no plan, since no tier has room for what that moves."""
        self._count("room")

    def _count(self, what: str) -> None:
        misses = self._accounts.counters.plan_misses
        misses[what] = misses.get(what, 0) + 1

    def _does_not_fit(self, given: KnownPlan, what: str) -> None:
        """The plan that the user has given is not this model's: a warning will say so."""
        self._given = None
        self._unfit = (
            f"the step plan that was given does not fit this model: a forward differs from it ({what}). Its rest "
            "is decided as any first one is; gradients are the same. Give the plan of a step like this one, or none"
        )
        if what == "more" and given.is_computed:
            self._unfit += (
                ". It saves more tensors than were planned: where the loss is computed inside of the `with` too, "
                "give plan(...) the function that computes it, as loss=..."
            )
