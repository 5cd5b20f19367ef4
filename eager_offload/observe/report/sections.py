"""The parts of the page that are text and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from eager_offload.observe.report import figures
from eager_offload.observe.report.figures import Lane, Saver
from eager_offload.observe.report.markup import Markup, figure, rate_text, seconds_text, size_text, tag
from eager_offload.observe.trace import Kind, Trace

__all__ = ["advice", "configuration", "drawings", "header", "kept", "savers", "summary", "warnings", "work"]

#: Rows of a table that are shown at once, and in all.
_SHOWN, _MOST = 15, 300

_NOTHING = Markup("")

_HINT = (
    "Point at the drawings to read them. Drag to move, Ctrl and the wheel or the buttons to zoom; with a drawing in "
    "focus: arrow keys, plus, minus and 0."
)

#: Why bytes stay on their device, and what would change that.
_REASONS = {
    "small": "Smaller than min_bytes. A lower min_bytes lets them move; each costs some microseconds.",
    "parameter": "Weights, and views of them: they are there anyway, so that moving them frees nothing.",
    "device": "On a device that is neither the CPU nor the accelerator.",
    "layout": "Of a layout whose bytes cannot be moved as they are.",
    "marked": "Marked with keep().",
    "region": "Saved inside of no_offload().",
    "newest": "The newest bytes, which backward asks for at once. keep_last_bytes bounds them.",
    "alive": "Something else keeps the original alive, so that moving it frees nothing: drop that reference.",
    "budget": "No tier had room. Raise host_budget or disk_budget, or name a disk in disk_path.",
    "failed": "The transfer failed, and they stayed where they were. The warnings of the run say why.",
}

_WORK = {
    Kind.COMPUTE: "Compute",
    Kind.OFFLOAD: "Offload",
    Kind.RELOAD: "Reload",
    Kind.PREFETCH: "Prefetch",
    Kind.STALL: "Stall",
    Kind.DEMOTION: "Demotion",
}


def header(trace: Trace, name: str) -> Markup:
    """What this is of."""
    versions = ", ".join(f"{what} {version}" for what, version in trace.versions.items())
    told = [", ".join(trace.devices) or "no device", versions]
    return tag(
        "header",
        tag("h1", name or "Trace"),
        tag(
            "p",
            figure("seconds", trace.seconds, seconds_text(trace.seconds)),
            *(f" · {one}" for one in told if one),
            class_="muted",
        ),
    )


def warnings(trace: Trace) -> Markup:
    """What is wrong with the trace itself."""
    told = []
    if trace.error:
        told.append(tag("p", f"The run ended early: {trace.error}"))
    if trace.dropped:
        dropped = figure("dropped", trace.dropped, f"{trace.dropped:,}")
        told.append(
            tag(
                "p",
                dropped,
                " slices, samples and saves were too many and are left out; totals are of the others.",
            )
        )
    return tag("div", *told, class_="warning", role="note") if told else _NOTHING


def summary(trace: Trace) -> Markup:
    """The numbers that everybody looks for first."""
    stats, most = trace.stats, figures.peaks(trace)
    saved, offloaded = stats.get("saved_bytes", 0), stats.get("offloaded_bytes", 0)
    stall = stats.get("stall_seconds", 0.0)
    out, back = stats.get("bytes_out", 0), stats.get("bytes_in", 0)
    tiles = [
        _tile(
            "Peak on the device",
            figure("peak.device", most.device, size_text(most.device)),
            "of what autograd saved; without offload ",
            figure("peak.without_offload", most.without_offload, size_text(most.without_offload)),
            _share(most.device, most.without_offload),
        ),
        _tile(
            "Saved for backward",
            figure("saved_bytes", saved, size_text(saved)),
            "by ",
            figure("saved_tensors", stats.get("saved_tensors", 0), f"{stats.get('saved_tensors', 0):,}"),
            " saves",
        ),
        _tile(
            "Offloaded",
            figure("offloaded_bytes", offloaded, size_text(offloaded)),
            "and ",
            figure("shared_bytes", stats.get("shared_bytes", 0), size_text(stats.get("shared_bytes", 0))),
            f" shared with them{_share(offloaded + stats.get('shared_bytes', 0), saved)}",
        ),
        _tile(
            "Compute stalled",
            figure("stall_seconds", stall, seconds_text(stall)),
            f"waiting for transfers{_share(stall, trace.seconds)}",
        ),
        _tile(
            "Moved",
            figure("bytes_out", out, size_text(out)),
            "out, and ",
            figure("bytes_in", back, size_text(back)),
            " back",
        ),
        *_written(stats.get("disk_bytes_written", 0), trace.seconds),
        _demotions(stats.get("demotions") or {}),
    ]
    return tag("section", tag("h2", "Summary"), tag("div", *tiles, class_="tiles"))


def _tile(name: str, value: Markup, *told: str) -> Markup:
    return tag("div", tag("h3", name), tag("p", value, class_="large"), tag("p", *told, class_="muted"), class_="tile")


def _share(part: float, whole: float) -> str:
    if not whole:
        return ""
    return f" ({part / whole:.0%})" if not 0 < part / whole < 0.01 else f" ({part / whole:.1%})"


def _written(nbytes: int, seconds: float) -> list[Markup]:
    if not nbytes:
        return []
    daily = f"at this pace {nbytes / seconds * 86_400 / 1e12:,.1f} TB a day" if seconds else ""
    return [_tile("Written to disk", figure("disk_bytes_written", nbytes, size_text(nbytes)), daily)]


def _demotions(demotions: Mapping[str, int]) -> Markup:
    total = sum(demotions.values())
    told = ", ".join(f"{kind} {count:,}" for kind, count in sorted(demotions.items()))
    return _tile("Demotions", figure("demotions", total, f"{total:,}"), told or "everything went as planned")


def advice(trace: Trace) -> Markup:
    """What limited the run."""
    told = trace.advice or ("Nothing limited this run that a setting would change.",)
    return tag("section", tag("h2", "Advice"), tag("ul", *(tag("li", one) for one in told), class_="advice"))


def drawings(trace: Trace, drawn: Sequence[Lane]) -> Markup:
    """Two canvases over one time axis, which the script fills."""
    most = figures.peaks(trace)
    series = [
        ("device", "on the device", most.device),
        ("without", "without offload", most.without_offload),
        ("host", "in host memory", most.host),
        ("disk", "on disk", most.disk),
    ]
    shown = [one for one in series if one[2] or one[0] in ("device", "without")]
    peaks = "; ".join(f"{name} at most {size_text(nbytes)}" for _, name, nbytes in shown)
    legend = [tag("li", _swatch(key), f"{name}, at most {size_text(nbytes)}") for key, name, nbytes in shown]
    kinds = dict.fromkeys(lane.kind for lane in drawn)
    return tag(
        "section",
        tag("h2", "Memory and time"),
        tag("noscript", tag("p", "The two drawings need JavaScript; the tables below do not.")),
        _zoom_buttons(),
        tag(
            "figure",
            tag("figcaption", "Bytes of what autograd saved, by where they are"),
            tag("ul", *legend, class_="legend"),
            tag("canvas", id="memory", tabindex=0, role="img", aria_label=f"Memory over time: {peaks}."),
        ),
        tag(
            "figure",
            tag("figcaption", "What ran when"),
            tag("ul", *(tag("li", _swatch(kind.value), _WORK[kind].lower()) for kind in kinds), class_="legend"),
            tag(
                "canvas",
                id="timeline",
                tabindex=0,
                role="img",
                aria_label=f"Timeline of {len(drawn)} tracks; the table of time below has its totals.",
            ),
        ),
        tag("p", _HINT, id="told", class_="muted", role="status"),
        id="drawings",
    )


def _zoom_buttons() -> Markup:
    buttons = [("in", "Zoom in"), ("out", "Zoom out"), ("left", "Earlier"), ("right", "Later"), ("all", "Whole trace")]
    return tag("div", *(tag("button", name, type="button", data_zoom=key) for key, name in buttons), class_="buttons")


def _swatch(key: str) -> Markup:
    return tag("span", class_=f"swatch {key}", aria_hidden="true")


def work(trace: Trace) -> Markup:
    """What took how long."""
    rows = []
    for one in figures.work_totals(trace):
        key = f"work.{one.device}.{one.kind.value}"
        rows.append(
            tag(
                "tr",
                tag("th", _swatch(one.kind.value), f"{_WORK[one.kind]}, {one.device}", scope="row"),
                tag("td", figure(f"{key}.count", one.count, f"{one.count:,}")),
                tag("td", figure(f"{key}.seconds", one.seconds, seconds_text(one.seconds))),
                tag("td", figure(f"{key}.bytes", one.nbytes, size_text(one.nbytes)) if one.nbytes else "—"),
                tag("td", rate_text(one.rate) if one.rate else "—"),
            )
        )
    table = _table("What took how long", ("What", "Slices", "Time", "Bytes", "Rate"), rows)
    told = "Time during which at least one of them ran; the rate is over that time."
    return tag("section", tag("h2", "Time"), tag("p", told, class_="muted"), table)


def savers(trace: Trace) -> Markup:
    """Who saved most: alike modules together, and each by itself."""
    alike = figures.savers(trace.saved, alike=True)
    each = figures.savers(trace.saved, alike=False)
    parts = [_saver_table("Saved bytes by operation and module", alike, "savers", _SHOWN)]
    if len(each) > len(alike):
        parts.append(
            tag(
                "details",
                tag("summary", f"Each of {len(each):,} by itself"),
                _saver_table("Saved bytes by operation and single module", each, "each", _MOST),
            )
        )
    return tag("section", tag("h2", "Largest saved tensors"), *parts)


def _saver_table(caption: str, found: Sequence[Saver], prefix: str, most: int) -> Markup:
    largest = max((one.nbytes for one in found), default=0)
    rows = [_saver_row(one, f"{prefix}.{place}", largest) for place, one in enumerate(found[:most])]
    table = _table(caption, ("Saved by", "Saves", "Bytes"), rows)
    rest = found[most:]
    if not rest:
        return table
    nbytes = sum(one.nbytes for one in rest)
    told = tag("p", f"and {len(rest):,} more with {size_text(nbytes)} in all", class_="muted")
    return Markup(table + told)


def _saver_row(one: Saver, key: str, largest: int) -> Markup:
    modules = f" ({one.modules:,} modules)" if one.modules > 1 else ""
    became = " · ".join(
        f"{'kept, ' if outcome.kept else ''}{outcome.name} {size_text(outcome.nbytes)}" for outcome in one.outcomes
    )
    return tag(
        "tr",
        tag(
            "th",
            tag("span", one.operation or "unknown operation", class_="operation"),
            tag("span", f"{one.module or 'outside of modules'}{modules}", class_="module"),
            tag("span", became, class_="muted became"),
            scope="row",
        ),
        tag("td", figure(f"{key}.count", one.count, f"{one.count:,}")),
        tag("td", figure(f"{key}.bytes", one.nbytes, size_text(one.nbytes)), _bar(one.nbytes, largest)),
    )


def kept(trace: Trace) -> Markup:
    """What stayed on its device, and why."""
    reasons: Mapping[str, int] = trace.stats.get("kept_bytes") or {}
    total, largest = sum(reasons.values()), max(reasons.values(), default=0)
    rows = [
        tag(
            "tr",
            tag(
                "th",
                tag("span", reason, class_="operation"),
                tag("span", _REASONS.get(reason, ""), class_="muted became"),
                scope="row",
            ),
            tag("td", figure(f"kept.{reason}", nbytes, size_text(nbytes)), _bar(nbytes, largest)),
        )
        for reason, nbytes in sorted(reasons.items(), key=lambda item: -item[1])
    ]
    told = tag("p", figure("kept_bytes", total, size_text(total)), " in all", class_="muted")
    return tag("section", tag("h2", "Kept on the device"), told, _table("Kept bytes", ("Reason", "Bytes"), rows))


def configuration(trace: Trace) -> Markup:
    """The settings of the run."""
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", _setting(value))) for name, value in trace.config.items()]
    table = _table("Settings", ("Field", "Value"), rows)
    return tag("section", tag("details", tag("summary", "Settings of this run"), table))


def _setting(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return size_text(value)
    return "not given" if value is None else str(value)


def _table(caption: str, columns: Sequence[str], rows: Iterable[Markup]) -> Markup:
    body = list(rows)
    if not body:
        return tag("p", "Nothing.", class_="muted")
    head = tag("tr", *(tag("th", name, scope="col") for name in columns))
    return tag(
        "table",
        tag("caption", caption, class_="unseen"),
        tag("thead", head),
        tag("tbody", *body),
        class_=f"of{len(columns)}",
    )


def _bar(part: int, largest: int) -> Markup:
    """How it compares with the largest of its table; the number beside it says the same."""
    width = 100 * part / largest if largest else 0
    return tag("span", tag("span", style=f"width:{width:.1f}%"), class_="bar", aria_hidden="true")
