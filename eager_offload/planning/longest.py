"""``longest``: the longest sequence whose step fits a budget, without offload and with each way to save memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from eager_offload.config import OffloadConfig, parse_size, size_text
from eager_offload.errors import ConfigError
from eager_offload.planning import parts_of
from eager_offload.planning.figures import Point, about_text, seconds_text
from eager_offload.planning.machine import Machine
from eager_offload.planning.planner import Search, request_of, search_of
from eager_offload.planning.states import Optimizing

#: Interpolations before each bisection; the largest factor between lengths while no length exceeds the budget.
_LINES, _JUMP = 3, 4


class LongestRow(NamedTuple):
    """The longest sequence that fits in one way; sizes in bytes, times in seconds."""

    way: str
    """``"none"``: without offload; ``"checkpointing"`` of the repeated blocks; ``"offload"`` of everything movable;
    ``"plan"``: the plan of :func:`eager_offload.plan` with ``recompute=True``."""
    length: int
    """0 if the shortest tried length does not fit."""
    peak_bytes: int
    """The peak at ``length``, or at the shortest tried length if that does not fit."""
    step_seconds: float


@dataclass(frozen=True)
class Longest:
    """The longest sequences that fit a budget; :func:`eager_offload.longest` makes one, and ``print`` shows a table."""

    rows: tuple[LongestRow, ...]
    device_budget: int
    machine: Machine
    at_least: int
    """The shortest length that may be tried."""
    at_most: int
    """The longest length that may be tried."""

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON types."""
        return asdict(self) | {"rows": [row._asdict() for row in self.rows]}

    def __str__(self) -> str:
        lines = [
            f"The longest sequence that fits in {size_text(self.device_budget)} on {self.machine.name}, predicted:",
            f"{'way':<13}  {'length':>18}  {'peak':>9}  {'step':>14}  {'a token':>9}",
        ]
        for way, length, peak, seconds in self.rows:
            step, token = about_text(self.machine) + seconds_text(seconds), f"{1e6 * seconds / (length or 1):,.3g} us"
            said = f"{length:,} or more" if length == self.at_most else f"{length:,}"
            if not length:
                said, step, token = f"less than {self.at_least:,}", "", ""
            lines.append(f"{way:<13}  {said:>18}  {size_text(peak):>9}  {step:>14}  {token:>9}".rstrip())
        return "\n".join(lines)


def longest(
    make: Callable[[int], tuple[Any, ...]],
    device_budget: int | str,
    *,
    at_least: int = 1024,
    at_most: int = 1 << 24,
    multiple_of: int = 128,
    device: str | Machine = "here",
    optimizer: Optimizing | None = torch.optim.AdamW,
    optimizer_bytes: int | str | None = None,
    mesh: tuple[int, ...] | Mapping[str, int] | None = None,
    accumulation: int = 1,
    config: OffloadConfig | Mapping[str, Any] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Longest:
    """Finds the longest sequence that fits a budget of device memory: without offload, and in each other way.

        def make(length):
            with torch.device("meta"):
                return Llama(config), torch.zeros(1, length, dtype=torch.int64)

        print(eo.longest(make, "75GiB", device="h100"))

    Steps are traced as by :func:`eager_offload.plan`, each length once for all ways.

    1. Lengths grow by a factor of 2 to 4 until one does not fit.
    2. The gap is closed by linear interpolation between both peaks, and by bisection every fourth time.

    Args:
        make: returns ``(model, inputs)`` or ``(model, inputs, loss)`` for a length, as for :func:`eager_offload.plan`.
        device_budget: bytes of device memory, or a text (e.g. ``"75GiB"``).
        at_least: the shortest length to try, rounded up to a multiple.
        at_most: the longest length to try (e.g. the positions that the model has), rounded down.
        multiple_of: lengths are multiples of it.
        device, optimizer, optimizer_bytes, mesh, accumulation, config: as for :func:`eager_offload.plan`.
        progress: called with a way and a length before that length is traced.

    Returns:
        A row for each way; none for checkpointing if no module of the model repeats.

    Raises:
        ConfigError: a length is not accepted, ``make`` does not take a length or returns something else, or an
            argument is not accepted by ``plan``.
        PlanError: a step cannot be traced. Errors of ``make`` and of the model are raised unchanged, with a note that
            names the length.
    """
    for name, value in (("at_least", at_least), ("at_most", at_most), ("multiple_of", multiple_of)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}={value!r} is not accepted: {name} takes a whole number, 1 or more")
    first, last = -(-at_least // multiple_of), at_most // multiple_of
    if first > last:
        raise ConfigError(
            f"at_most={at_most!r} is not accepted: no multiple of {multiple_of} is from {at_least} to {at_most}; give "
            "other lengths, or a smaller multiple_of"
        )
    of_user = getattr(make, "__qualname__", type(make).__name__)
    try:
        inspect.signature(make).bind(at_least)
    except TypeError as error:
        raise ConfigError(f"{of_user} is not accepted: it is to be called with a length alone ({error})") from error
    budget, machine = parse_size(device_budget, "device_budget"), device

    def search(way: str, length: int) -> Search:
        nonlocal machine
        if progress is not None:
            progress(way, length)
        try:
            model, inputs, loss = parts_of(make(length), of_user)
            request = request_of(
                model,
                loss,
                "least",
                recompute=True,
                device=machine,
                device_budget=device_budget,
                host_budget=None,
                optimizer=optimizer,
                optimizer_bytes=optimizer_bytes,
                mesh=mesh,
                accumulation=accumulation,
                config=config,
            )
            machine = request.machine  # measured once
            return search_of(request, model, inputs, loss)
        except ConfigError:
            raise
        except Exception as error:
            error.add_note(f"eager_offload.longest met this error with a length of {length}")
            raise

    lengths = _Lengths(search, budget, multiple_of)
    rows = [lengths.longest(way, first, last) for way in lengths.at("none", first)]
    # The full search may find a lower peak than the quick one above, and so fit a longer sequence.
    number = rows[-1].length // multiple_of
    while 0 < number <= last:
        of = search("plan", length := number * multiple_of)
        chosen = of.best(of.mixtures()).chosen
        if chosen.peak_bytes > budget:
            break
        rows[-1] = LongestRow("plan", length, chosen.peak_bytes, chosen.step_seconds)
        number += 1
    assert isinstance(machine, Machine)
    rows = [row for row in rows if lengths.repeats or row.way != "checkpointing"]
    return Longest(tuple(rows), budget, machine, first * multiple_of, last * multiple_of)


class _Lengths:
    """The rows of steps by length, in multiples of ``multiple_of``; ``search`` traces each length once for all ways."""

    def __init__(self, search: Callable[[str, int], Search], budget: int, multiple_of: int) -> None:
        self._search, self._budget, self._multiple_of = search, budget, multiple_of
        self._found: dict[int, dict[str, LongestRow]] = {}
        #: Whether a module repeats at any length: short sequences may save nothing large enough.
        self.repeats = False

    def at(self, way: str, number: int) -> dict[str, LongestRow]:
        """Returns the rows of all ways with their lowest peaks; ``way`` is the one that needs them now."""
        if number not in self._found:
            of = self._search(way, length := number * self._multiple_of)
            none, moved = Point.least_of(of.nothing.nothing), Point.least_of(of.nothing.share(1.0))
            self.repeats = self.repeats or of.checkpointing is not None
            points = {"none": none, "checkpointing": of.checkpointing or none, "offload": moved}
            least = min(points.values())
            points["plan"] = least if least.peak_bytes <= self._budget else of.least()  # slow, so only if needed
            self._found[number] = {name: LongestRow(name, length, *one[1:]) for name, one in points.items()}
        return self._found[number]

    def longest(self, way: str, first: int, last: int) -> LongestRow:
        """Returns the row of the longest sequence from ``first`` to ``last`` that fits; a length of 0 if none does."""

        def peak(number: int) -> int:
            return self.at(way, number)[way].peak_bytes

        found, budget = self._found, self._budget
        if peak(first) > budget:
            return found[first][way]._replace(length=0)
        low, high, lines = first, last + 1, 0
        while high - low > 1:
            if known := [one for one in found if low < one < high]:  # traced for another way
                number = known[0]
            elif high not in found:
                number = low * min(max(budget // peak(low), 2), _JUMP)
            elif lines < _LINES:  # peaks are nearly linear in the length
                lines += 1
                below, above = peak(low), peak(high)
                number = low + (budget - below) * (high - low) // (above - below)
            else:
                number, lines = (low + high) // 2, 0
            number = min(max(number, low + 1), high - 1)
            low, high = (number, high) if peak(number) <= budget else (low, number)
        return found[low][way]
