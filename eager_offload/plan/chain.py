"""In which order modules are to be computed again: those first that take the fewest seconds for each byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eager_offload.plan.recompute import Candidate


class _Kind:
    """The calls of modules in one place, one in each block."""

    def __init__(self, calls: list[Candidate]) -> None:
        self.calls = calls
        self.seconds = sum(one.seconds for one in calls)
        self.freed_bytes = sum(one.freed_bytes for one in calls)
        self.attends = any(one.attends for one in calls)
        self.multiplies = any(one.multiplies for one in calls)

    def is_within(self, other: _Kind) -> bool:
        """Whether its calls run inside of the other's, of which the first is asked."""
        outer, inner = other.calls[0].call, self.calls
        return any(outer.begin <= one.call.begin and one.call.end <= outer.end for one in inner)


def chain(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates in the order in which they are taken. One that is around others takes their place.

    No attention comes before the last norm or activation, or what else multiplies nothing.
    """
    calls: dict[str, list[Candidate]] = {}
    for one in candidates:
        calls.setdefault(one.kind, []).append(one)
    left, taken = [*map(_Kind, calls.values())], list[_Kind]()
    order: list[Candidate] = []
    while left := [kind for kind in left if kind not in taken and not any(kind.is_within(one) for one in taken)]:
        waits = any(not kind.multiplies for kind in left)
        allowed = [kind for kind in left if not (waits and kind.attends)]
        best = min(allowed, key=lambda kind: _price(kind, taken))
        taken = [*(one for one in taken if not one.is_within(best)), best]
        order += _evenly(best.calls)
    return order


def _price(kind: _Kind, taken: Iterable[_Kind]) -> float:
    """Seconds for each byte that it frees beyond those that are taken already."""
    inside = [one for one in taken if one.is_within(kind)]
    freed = kind.freed_bytes - sum(one.freed_bytes for one in inside)
    seconds = kind.seconds - sum(one.seconds for one in inside)
    return max(seconds, 0.0) / freed if freed > 0 else float("inf")


def _evenly(calls: Sequence[Candidate]) -> Iterable[Candidate]:
    """All of them, so that the first ones, however many they are, lie evenly: by the digits of places, reversed."""
    digits = max(len(calls) - 1, 1).bit_length()
    places = (int(f"{place:0{digits}b}"[::-1], 2) for place in range(1 << digits))
    return [calls[place] for place in places if place < len(calls)]
