"""The real steps before a capture, written down: what the capture is to do. Numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eager_offload.codecs.names import ROUNDING
from eager_offload.eager.captured_plan import Coded, Fate, Save, StepPlan
from eager_offload.eager.captured_recorder import StepRecorder
from eager_offload.errors import CaptureStateError, ScheduleMismatchError
from eager_offload.runtime.base import ALIGNMENT
from eager_offload.stats import KeepReason


class WarmUp:
    """One real step before a capture: writes down each forward of it, with its backward."""

    def __init__(self) -> None:
        self._recordings: list[StepRecorder] = []

    def begin(self) -> StepRecorder:
        """A forward begins on the thread of the capture."""
        self._recordings.append(StepRecorder())
        return self._recordings[-1]

    def plans(self) -> tuple[StepPlan, ...]:
        """What the step did, a plan for each forward.

        Raises:
            CaptureStateError: it did what no plan can say.
        """
        found = []
        for recording in self._recordings:
            plan = recording.whole_plan()
            if plan is None or plan.asks_again:
                raise CaptureStateError(
                    "a warm-up did what no step plan can say, so a capture cannot follow it: it saved tensors where "
                    "torch allows them to change (allow_mutation_on_saved_tensors), or of two devices, or ran backward "
                    "of a graph twice. Capture the step without `offload`, or leave that out"
                )
            if plan.saves:
                found.append(_without_vain_copies(plan))
        return tuple(found)


def late_releases(plan: StepPlan) -> dict[int, int]:
    """Which source goes before each unpack, of those that are still there when backward begins: by number of unpack."""
    saves, late, found, expected = plan.saves, _late(plan), dict[int, int](), set[int]()
    for rank, ask in enumerate(plan.asks):
        expected.add(saves[ask.save].owner)
        going = next((number for number in late if number not in expected), None)
        if going is not None:
            found[rank] = going
            late.remove(going)
        expected.update(ask.bring)
    return found


def _late(plan: StepPlan) -> list[int]:
    """The saves whose sources are still there when backward begins, in the order in which their copies start."""
    order = [*(number for numbers in plan.starts() for number in numbers), *plan.end]
    return [number for number in order if plan.saves[number].release < 0]


def _without_vain_copies(plan: StepPlan) -> StepPlan:
    """The same plan, in which a storage stays that backward comes to before its source would have gone."""
    stays = set(_late(plan)).difference(late_releases(plan).values())
    saves: list[Save] = []
    slots: list[int] = []
    for number, save in enumerate(plan.saves):
        if save.owner in stays:
            fate = Fate.KEEP if number in stays else save.fate
            save = replace(save, fate=fate, reason=KeepReason.NEWEST, slot=-1, start=-1, release=-1, coded=None)
        elif save.fate is Fate.OFFLOAD:
            save = replace(save, slot=len(slots), coded=_unless_refused(save.coded))
            slots.append(save.slot_nbytes)
        saves.append(save)
    end = tuple(number for number in plan.end if number not in stays)
    return StepPlan(tuple(saves), plan.asks, end, tuple(slots))


def _unless_refused(coded: Coded | None) -> Coded | None:
    """How a storage travels in a capture: as it is, where values are looked at, which a graph cannot go by."""
    return coded if coded is not None and coded.codec in ROUNDING else None


def slot_bytes(plans: Sequence[StepPlan]) -> int:
    """Bytes of the slab that a capture needs which follows ``plans``, one after the other."""
    return max((slots_of(plan)[-1] for plan in plans), default=0)


def slots_of(plan: StepPlan) -> list[int]:
    """Where the slots of ``plan`` begin, and where the last one ends."""
    starts = [0]
    for nbytes in plan.slots:
        starts.append(-(-(starts[-1] + nbytes) // ALIGNMENT) * ALIGNMENT)
    return starts


def check_alike(before: Sequence[StepPlan], after: Sequence[StepPlan]) -> None:
    """Looks whether two warm-ups are one sequence of saves.

    Raises:
        ScheduleMismatchError: they are not.
    """
    one, other = ([save for plan in plans for save in plan.saves] for plans in (before, after))
    for number in range(max(len(one), len(other))):
        sides = [said(saves[number]) if number < len(saves) else "none" for saves in (one, other)]
        if sides[0] != sides[1]:
            raise mismatch(f"save {number}", sides[0], sides[1], "the warm-up before the last had", "the last one has")


def mismatch(where: str, one: str, other: str, before: str, after: str) -> ScheduleMismatchError:
    return ScheduleMismatchError(
        f"a step has to do the same in its warm-ups and in the capture, and differs first at {where}: {before} {one}, "
        f"{after} {other}. What depends on numbers, on the count of steps or on chance cannot be captured"
    )


def said(save: Save) -> str:
    return f"a tensor of {save.nbytes:,} bytes{', requires grad' if save.requires_grad else ''}"
