"""The page: a template, the sections that go into it, and the data that its drawings are made of."""

from __future__ import annotations

import json
from importlib.resources import files
from string import Template
from typing import Any

from eager_offload.observe.report import sections
from eager_offload.observe.report.figures import Lane, lanes
from eager_offload.observe.report.markup import tag
from eager_offload.observe.trace import Trace

__all__ = ["render"]


def render(trace: Trace, name: str = "") -> str:
    """One HTML page that needs nothing else: no network, no other file.

    Args:
        name: of the trace, for the title.
    """
    drawn = lanes(trace)
    body = [
        sections.header(trace, name),
        sections.warnings(trace),
        sections.summary(trace),
        sections.advice(trace),
        sections.drawings(trace, drawn),
        sections.work(trace),
        sections.savers(trace),
        sections.kept(trace),
        sections.configuration(trace),
    ]
    return Template(_part("page.html")).substitute(
        title=tag("title", f"{name or 'Trace'} · eager_offload"),
        style=_part("page.css"),
        script=_part("page.js"),
        body="\n".join(body),
        data=_embedded(_data(trace, drawn)),
    )


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _data(trace: Trace, drawn: list[Lane]) -> dict[str, Any]:
    """What is drawn. Times are microseconds; texts, which repeat, are places in ``texts``."""
    texts: dict[str, int] = {}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    tracks = [
        {
            "device": lane.device,
            "name": lane.name,
            "kind": lane.kind.value,
            "depth": lane.depth,
            "slices": [
                [
                    _microseconds(one.slice.start),
                    _microseconds(one.slice.seconds),
                    one.depth,
                    one.slice.nbytes,
                    *map(text, (one.slice.name, one.slice.module, one.slice.operation, one.slice.tier)),
                    text(one.slice.error),
                ]
                for one in lane.placed
            ],
        }
        for lane in drawn
    ]
    memory = [[_microseconds(one.seconds), one.device, one.host, one.disk, one.without_offload] for one in trace.memory]
    return {"end": _microseconds(trace.seconds), "tracks": tracks, "memory": memory, "texts": list(texts)}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _embedded(data: dict[str, Any]) -> str:
    """JSON that no name in it can end."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
