"""How much of the copies lies under kernels, by torch's profiler, and how fast they are."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import eager_offload as eo
from benchmarks.gpu.results import Job
from benchmarks.gpu.train import LARGE, SMALL, SMALL_WINDOWS, decoder, random_tokens
from benchmarks.peers import checkpointed, plain


class Span(NamedTuple):
    """From one moment until another, in microseconds."""

    start: float
    stop: float


def overlap(job: Job) -> None:
    """Profiles one step with offload, and one with checkpointing besides."""
    shape = SMALL if job.small else replace(LARGE, layers=6)
    tokens = random_tokens(shape, 1, 1024 if job.small else 16_384)
    windows = SMALL_WINDOWS if job.small else {}
    for name, run in {"ours": plain, "ours + checkpointing": checkpointed}.items():
        model, offload = decoder(shape, run), eo.Offload(keep_last_bytes=0, **windows)

        def step(model: Any = model, offload: eo.Offload = offload) -> None:
            with offload:
                loss = model(tokens)
            loss.backward()
            model.zero_grad()

        for _ in range(5):
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            step()
            torch.cuda.synchronize()
        offload.close()
        job.add(what="overlap", name=name, **_read(_events(profiled)))


def _events(profiled: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def _read(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What the events of a step say of its copies."""
    copies = [event for event in events if "memcpy" in event.get("cat", "")]
    kernels = _union(_span(event) for event in events if event.get("cat") == "kernel")
    on_device = [_span(event) for event in copies] + kernels
    if not copies or not kernels:
        raise SystemExit("the profiler has recorded no copies, or no kernels")
    found: dict[str, Any] = {
        "step_ms": (max(span.stop for span in on_device) - min(span.start for span in on_device)) / 1e3,
        "kernels_ms": _length(kernels) / 1e3,
        "pageable": sorted({event["name"] for event in copies if "Pageable" in event["name"]}),
    }
    for way in ("DtoH", "HtoD"):
        mine = [event for event in copies if way in event["name"]]
        spans, nbytes = _union(map(_span, mine)), sum(event["args"]["bytes"] for event in mine)
        busy = max(_length(spans), 1e-9)
        found[way] = {
            "copies": len(mine),
            "bytes": nbytes,
            "ms": busy / 1e3,
            "gb_s": nbytes / busy / 1e3,
            "under_kernels": _length(_common(spans, kernels)) / busy,
        }
    return found


def _span(event: dict[str, Any]) -> Span:
    return Span(event["ts"], event["ts"] + event["dur"])


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same time, in order and without overlaps."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return found


def _common(one: list[Span], other: list[Span]) -> list[Span]:
    """The time that is in both, of which each is a union."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i].start, other[j].start), min(one[i].stop, other[j].stop)
        if start < stop:
            found.append(Span(start, stop))
        if one[i].stop < other[j].stop:
            i += 1
        else:
            j += 1
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(span.stop - span.start for span in spans)
