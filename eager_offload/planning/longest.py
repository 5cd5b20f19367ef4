"""``longest``: the longest sequence whose step fits, each way that there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from eager_offload.config import OffloadConfig, parse_size, size_text
from eager_offload.errors import ConfigError
from eager_offload.planning.figures import about_text, seconds_text
from eager_offload.planning.machine import Machine
from eager_offload.planning.planner import Search, asked_for, search_of
from eager_offload.planning.replay import Chosen
from eager_offload.planning.states import Optimizing

#: No sequence is tried that is longer.
_MOST = 1 << 24
#: Each way that there is, and the step of it that has the least peak, by which a length fits or does not.
_WAYS: dict[str, Callable[[Search], Chosen]] = {
    "none": lambda search: search.nothing.nothing,
    "checkpointing": lambda search: search.all_again.nothing,
    "offload": lambda search: search.nothing.share(1.0),
    "plan": lambda search: min(
        (search.nothing.all_that_may, search.all_again.all_that_may, search.all_again.nothing),
        key=lambda one: one.peak_bytes,
    ),
}


class LongestRow(NamedTuple):
    """The longest sequence that fits in one way; sizes in bytes, times in seconds."""

    way: str
    """``"none"``: without offload; ``"checkpointing"`` of the blocks that repeat; ``"offload"``: all that may moves;
    ``"plan"``: that of :func:`eager_offload.plan` with ``recompute=True``."""
    length: int
    """0 where the shortest that was tried does not fit."""
    peak_bytes: int
    """Of that length, or of the shortest one where it does not fit."""
    step_seconds: float


@dataclass(frozen=True)
class Longest:
    """The longest sequences that fit a budget; :func:`eager_offload.longest` makes one, and ``print`` shows a table."""

    rows: tuple[LongestRow, ...]
    device_budget: int
    machine: str
    at_least: int
    """The shortest length that was tried."""

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain numbers and texts."""
        return asdict(self) | {"rows": [row._asdict() for row in self.rows]}

    def __str__(self) -> str:
        lines = [
            f"The longest sequence that fits in {size_text(self.device_budget)} on {self.machine}, predicted:",
            f"{'way':<14} {'length':>10}  {'peak':>9}  {'step':>9}  {'a token':>9}",
        ]
        for way, length, peak, seconds in self.rows:
            of = length or self.at_least
            said = f"{length:,}" if 0 < length < _MOST else f"{_MOST:,} +" if length else f"< {self.at_least:,}"
            token = f"{1e6 * seconds / of:.1f} us"
            lines.append(f"{way:<14} {said:>10}  {size_text(peak):>9}  {seconds_text(seconds):>9}  {token:>9}")
        return "\n".join(lines)


def longest(
    make: Callable[[int], tuple[Any, ...]],
    device_budget: int | str,
    *,
    at_least: int = 1024,
    multiple_of: int = 128,
    device: str | Machine = "here",
    optimizer: Optimizing | None = torch.optim.AdamW,
    optimizer_bytes: int | str | None = None,
    mesh: tuple[int, ...] | None = None,
    accumulation: int = 1,
    config: OffloadConfig | Mapping[str, Any] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Longest:
    """Finds the longest sequence that fits a budget of the device: without offload, and in each other way.

        def make(length):
            with torch.device("meta"):
                return Llama(config), torch.zeros(1, length, dtype=torch.int64)

        print(eo.longest(make, "75GiB", device="h100"))

    Steps are traced as by :func:`eager_offload.plan`: nothing is run, and a model on ``meta`` is never allocated. 1.
    Lengths are doubled until one does not fit. 2. Between it and the last one that fits, lengths are taken from the
    straight line through both peaks, or from the middle. 3. It ends at a length that fits while the next multiple does
    not.

    Args:
        make: returns ``(model, inputs)`` or ``(model, inputs, loss)`` for a length, as for :func:`eager_offload.plan`.
        device_budget: bytes of the device, or a text such as ``"75GiB"``.
        at_least: the shortest length that is tried.
        multiple_of: lengths are multiples of it.
        device, optimizer, optimizer_bytes, mesh, accumulation, config: as for :func:`eager_offload.plan`.
        progress: called with a way and a length before that is tried.

    Returns:
        A row for each way. Checkpointing has none where no module of the model repeats.

    Raises:
        ConfigError: ``at_least`` or ``multiple_of`` is not a positive number, ``make`` returns something else, or as
            of :func:`eager_offload.plan`.
        PlanError: a step cannot be traced. Errors of ``make`` and of the model come as they are, with a note that
            names the length.
    """
    for name, value in (("at_least", at_least), ("multiple_of", multiple_of)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}={value!r} is not accepted: {name} takes a whole number, 1 or more")
    budget, first, machine = parse_size(device_budget, "device_budget"), -(-at_least // multiple_of), device
    found: dict[int, dict[str, LongestRow]] = {}

    def search(length: int) -> Search:
        nonlocal machine
        try:
            made: object = make(length)
            if not isinstance(made, tuple) or len(made) not in (2, 3):
                raise ConfigError(
                    "make is not accepted: it must return (model, inputs) or (model, inputs, loss), and returned "
                    f"{type(made).__name__}"
                )
            model, inputs, loss = made if len(made) == 3 else (*made, None)
            asked = asked_for(
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
            machine = asked.machine
            return search_of(asked, model, inputs, loss)
        except Exception as error:
            error.add_note(f"eager_offload: for a sequence of length {length}")
            raise

    def at(way: str, number: int) -> LongestRow:
        """Returns what a way takes at that multiple, all ways of which follow from one trace."""
        if number not in found:
            length = number * multiple_of
            if progress is not None:
                progress(way, length)
            of = search(length)
            steps = {name: step(of) for name, step in _WAYS.items() if name != "checkpointing" or of.has_blocks}
            found[number] = {
                name: LongestRow(name, length, one.peak_bytes, one.step_seconds) for name, one in steps.items()
            }
        return found[number][way]

    def best(way: str) -> LongestRow:
        low, high = first, None
        if at(way, low).peak_bytes > budget:
            return at(way, low)._replace(length=0)
        while high is None and low * multiple_of < _MOST:
            following = min(2 * low, _MOST // multiple_of)
            low, high = (following, None) if at(way, following).peak_bytes <= budget else (low, following)
        while high is not None and high - low > 1:
            below, above = at(way, low).peak_bytes, at(way, high).peak_bytes
            # Peaks grow nearly evenly; where they do not, halves are as quick as they are sure.
            part = (budget - below) / max(above - below, 1)
            guess = low + int(part * (high - low)) if len(tried) % 2 == 0 else (low + high) // 2
            tried.append(guess := min(max(guess, low + 1), high - 1))
            low, high = (guess, high) if at(way, guess).peak_bytes <= budget else (low, guess)
        return at(way, low)

    rows = []
    for way in [*_WAYS]:
        tried: list[int] = []
        if way in found.get(first, _WAYS):
            rows.append(best(way))
    if rows[-1].length:  # of the plan, all that it may choose
        if progress is not None:
            progress("plan", rows[-1].length)
        of = search(rows[-1].length)
        chosen = of.best(of.mixtures()).chosen
        rows[-1] = LongestRow("plan", rows[-1].length, chosen.peak_bytes, chosen.step_seconds)
    assert isinstance(machine, Machine)
    return Longest(tuple(rows), budget, f"{about_text(machine)}{machine.name}".strip(), first * multiple_of)
