"""How a plan prints: what comes of it, and a row for each kind of module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eager_offload.config import size_text
from eager_offload.plan.figures import PlanFigures, Row

#: Rows of the table; what is left is one more.
_MOST_ROWS = 12


def text_of(plan: PlanFigures) -> str:
    """What ``print`` shows of a plan."""
    lines = [
        f"{plan.model} on {plan.machine}",
        _fits(plan),
        *_what_needs_less(plan),
        _step(plan),
        _what_moves(plan),
    ]
    if plan.steps:
        lines.append(f"operators take what they took in {plan.steps} real steps")
    if plan.host_budget is not None:
        lines.append(f"in the tier: {size_text(plan.host_bytes)}, where {size_text(plan.host_budget)} may rest")
    return "\n".join([*lines, *_table(plan.rows(), is_again=bool(plan.again))])


def _what_moves(plan: PlanFigures) -> str:
    movable_bytes = plan.movable_bytes
    if plan.is_small and not movable_bytes:
        least = plan.config.size("min_bytes")
        return f"nothing moves: beside parameters nothing that is saved is as large as min_bytes, {size_text(least)}"
    packed = "" if plan.moved_bytes == plan.offloaded_bytes else f", packed as {size_text(plan.moved_bytes)},"
    return (
        f"of {size_text(movable_bytes)} that may move, {size_text(plan.offloaded_bytes)} "
        f"{'move' if plan.moved_bytes else 'do'}{packed} and {size_text(plan.kept_bytes)} stay"
        + (f"; {size_text(plan.recomputed_bytes)} are computed again" if plan.again else "")
    )


def _fits(plan: PlanFigures) -> str:
    peak, budget, least = map(size_text, (plan.peak_bytes, plan.device_budget, plan.least_budget))
    said = f"a peak of {peak}, where {budget} may be taken; the least budget that can be kept is {least}"
    return f"fits: {said}" if plan.fits else f"does not fit: {said}"


def _what_needs_less(plan: PlanFigures) -> Iterator[str]:
    """What a user can do about a plan that does not fit, a line."""
    if plan.fits:
        return
    if plan.device_budget >= plan.least_budget:
        yield 'less would be taken with policy="least", which keeps to its budget'
        return
    again = "" if plan.may_compute_again or plan.steps else "recompute=True (--recompute), "
    yield f"less is taken with {again}a smaller batch, or smaller max_inflight_bytes and prefetch_bytes"


def _step(plan: PlanFigures) -> str:
    times, without = plan.step_seconds / (plan.compute_seconds or 1), "transfers"
    if plan.again:
        without += " and with nothing computed again"
    return (
        f"step: {seconds_text(plan.step_seconds)}, {times:.3f} times one without {without}; "
        f"floor {seconds_text(plan.floor_seconds)}, which none with these transfers goes below"
    )


def _table(rows: Sequence[Row], *, is_again: bool) -> list[str]:
    """An empty line, a title and a line for each row; nothing where there is no row."""
    if not rows:
        return []
    shown, others = list(rows[:_MOST_ROWS]), rows[_MOST_ROWS:]
    if others:
        columns = zip(*(row[1:] for row in others), strict=True)
        shown.append(Row(f"{len(others)} other kinds", *map(sum, columns)))
    width = max(len(row.kind) for row in shown)
    title = f"  {'again':>11}" if is_again else ""
    lines = ["", f"{'module':<{width}}  {'storages':>8}  {'stay':>11}  {'move':>11}{title}"]
    for row in shown:
        stay, move = size_text(row.kept_bytes), size_text(row.moved_bytes)
        last = f"  {size_text(row.recomputed_bytes):>11}" if is_again else ""
        lines.append(f"{row.kind:<{width}}  {row.storages:>8,}  {stay:>11}  {move:>11}{last}")
    return lines


def seconds_text(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{1e3 * value:,.3g} ms"
