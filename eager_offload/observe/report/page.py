"""The page of a trace: ``page.html`` is filled with its numbers, ``page.js`` draws it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader

from eager_offload.config import rate_text, size_text
from eager_offload.observe.report.figures import Track, peaks, savers, tracks, work_totals
from eager_offload.trace_file import SliceKind, Trace

#: Why bytes stay on their device, and what would change that.
REASONS = {
    "small": "Smaller than min_bytes. A lower min_bytes lets them move; each costs some microseconds.",
    "parameter": "Weights, and views of them: they are there anyway, so that moving them frees nothing.",
    "device": "On a device that is neither the CPU nor the accelerator; or on the CPU beside an accelerator: "
    'give a disk_path, or tier="disk", to have those move.',
    "layout": "Of a layout whose bytes cannot be moved as they are, or of a subclass of Tensor with a "
    "__torch_dispatch__ and no __tensor_flatten__.",
    "marked": "Marked with keep().",
    "region": "Saved inside of no_offload(), or while a graph was being captured, whose replays look for them there.",
    "newest": "The newest bytes, which backward asks for at once. keep_last_bytes bounds them.",
    "alive": "Something else keeps the original alive, so that moving it frees nothing: drop that reference.",
    "budget": "No tier had room. Raise host_budget or disk_budget, or name a disk in disk_path.",
    "failed": "Their transfer failed or could not begin, and they stayed where they were. The run's warnings say why.",
}


def render(trace: Trace, name: str = "") -> str:
    """One HTML page that needs nothing else: no network, no other file.

    Args:
        name: of the trace, for the title.
    """
    drawn, most = tracks(trace), peaks(trace)
    series = [
        ("device", "on the device", most.device),
        ("without", "without offload", most.without_offload),
        ("host", "in host memory", most.host),
        ("disk", "on disk", most.disk),
    ]
    return fill(
        "page.html",
        trace=trace,
        name=name,
        peaks=most,
        series=[one for one in series if one[2] or one[0] in ("device", "without")],
        kinds=list(dict.fromkeys(track.kind.value for track in drawn)),
        work=work_totals(trace),
        alike=savers(trace.saved, alike=True),
        each=savers(trace.saved, alike=False),
        reasons=REASONS,
        data=_data(trace, drawn),
    )


def fill(page: str, **values: object) -> str:
    """One HTML page that needs nothing else.

    Args:
        page: the name of its template, which lies beside this module.
        **values: that it shows; ``data`` is what ``page.js`` draws.
    """
    environment = Environment(autoescape=True, trim_blocks=True, loader=FunctionLoader(_part))
    filters = {"size": size_text, "time": _time_text, "rate": rate_text, "setting": _setting_text, "shown": _shown}
    environment.filters |= filters
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template(page).render(style=_part("page.css"), script=_part("page.js"), **values)


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _data(trace: Trace, drawn: list[Track]) -> dict[str, Any]:
    """What is drawn. Times are microseconds; texts, which repeat, are places in ``texts``."""
    texts: dict[str, int] = {}

    def of(track: Track) -> list[list[float]]:
        return [
            [_microseconds(one.start), _microseconds(one.seconds), depth, one.nbytes]
            + [
                texts.setdefault(text, len(texts))
                for text in (one.name, one.module, one.operation, one.tier, one.error)
            ]
            for one, depth in track.placed
        ]

    tracks = [
        {"device": one.device, "name": _shown(one.name), "kind": one.kind.value, "depth": one.depth, "slices": of(one)}
        for one in drawn
    ]
    memory = [[_microseconds(one.seconds), *one[1:]] for one in trace.memory]
    sizes = sized(memory, other={one.nbytes for one in trace.slices})
    return {"end": _microseconds(trace.seconds), "tracks": tracks, "memory": memory, "texts": list(texts), **sizes}


def sized(memory: Sequence[Sequence[float]], budget: int = 0, other: Iterable[int] = ()) -> dict[str, Any]:
    """How far the axis of bytes goes, and how each number of bytes that the drawing shows is written.

    Args:
        memory: rows of a time and of bytes.
        budget: a line that is drawn, unless it is so far above all of them that it would leave them flat.
        other: more numbers that are shown.
    """
    shown = {0, 1, *(int(nbytes) for _, *row in memory for nbytes in row)}
    most = max(shown)
    budget = budget if budget <= 1.25 * most else 0
    most = max(most, budget)
    step = 1 << max((most // 3).bit_length() - 1, 0)
    if most > 5 * step:
        step *= 2
    # A text stands for all numbers from its own up to the next one's.
    numbers = sorted({*shown, *other, *range(0, most + 1, step)}, reverse=True)
    sizes = {size_text(nbytes): nbytes for nbytes in numbers}
    texts = [(nbytes, text) for text, nbytes in reversed(sizes.items())]
    return {"most": most, "step": step, "budget": budget, "sizes": texts}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _time_text(seconds: float) -> str:
    """Such as ``"12.3 ms"``."""
    if not seconds:
        return "0 s"
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.0f} µs"


def _shown(track: str) -> str:
    """The name of a track, or the kind of its slices, in the words of users."""
    return track.replace(SliceKind.DEMOTION.value, "fallback")


def _setting_text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return size_text(value)
    return "not given" if value is None else str(value)
