"""What a step did, as numbers: recorded in one forward and its backward, followed by those that are like it.

Numbers only, like ``schedule.py``: saves are counted from 0 in each forward, in the order of packing; sizes are bytes.
``step_recorder.py`` writes a plan down, ``eager/following.py`` follows one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from eager_offload.config import size_text
from eager_offload.schedule import largest_of
from eager_offload.stats import KeepReason

#: The form of the file that ``StepPlan.save`` writes.
_FORMAT = 2
#: Numbers in files of plans are below it, and of these fields -1 stands for none.
_MOST = 1 << 62
_OR_NONE = ("owner", "slot", "start", "release")


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
#: Reasons that a user gives, which are looked at each time.
SAID = (KeepReason.REGION, KeepReason.MARKED)


class Coded(NamedTuple):
    """How a storage travels that a codec packs."""

    codec: str
    dtype: str
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
    """How it travels; ``None``: as it is."""
    codec: str = "identity"
    """The name of the codec that is in force where it is saved."""

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
    def movable_bytes(self) -> int:
        """Returns the bytes of the storages that leave, or could and stay."""
        return sum(save.storage_nbytes for save in self.saves if save.owner >= 0)

    @property
    def largest(self) -> int:
        """Returns ``largest_of`` these storages."""
        return largest_of(save.storage_nbytes for number, save in enumerate(self.saves) if save.owner == number)

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
