"""Traces and plans as figures of plotly, which a notebook shows and ``write_page`` writes as one page.

A figure is a stack of parts, from the top: tables of text, and plots. Times are drawn in milliseconds, so that plotly
can zoom into them; bytes at an axis are powers of two.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from eager_offload.config import size_text
from eager_offload.errors import OffloadError
from eager_offload.observe.advice import sizes_text
from eager_offload.observe.report import Tile, kind_of, notes, peaks, saved_rows, summary, time_text, title
from eager_offload.observe.timeline import Slice, SliceKind
from eager_offload.observe.trace import MemorySample, Trace

#: Slices and samples that are drawn; a browser zooms slowly in more.
_MOST_SLICES, _MOST_SAMPLES = 20_000, 8_192
#: Pixels: of a line in a table, of a lane, of a plot, between parts, and between parts that belong together.
_LINE, _LANE, PLOT, GAP, _NEAR = 24, 22, 300, 60, 20
#: The left edge of plots, as a fraction of the width; the names of lanes stand left of it.
_LEFT = 0.1
#: Characters of a line of text on a screen of usual width, and of a short line.
_WIDTH, _NARROW = 160, 110

_TEXT, MUTED, _RULE, _PAPER = "#1f2933", "#52606d", "#d9e2ec", "#f5f7fa"
DEVICE, WITHOUT, _HOST, _DISK, BUDGET = "#0b69a3", "#829ab1", "#cb6e17", "#87449a", "#ba2525"
_KINDS = {
    SliceKind.OFFLOAD: "#cb6e17",
    SliceKind.RELOAD: "#0c6b58",
    SliceKind.PREFETCH: "#27ab83",
    SliceKind.STALL: "#ba2525",
}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "yanchor": "bottom"}
#: Of modules of one kind, in turn.
_MODULES = ("#b3d4f0", "#c9e4c5", "#f3dcae", "#d9cdee", "#f3c6c6", "#bfe3e0", "#e3d5ca", "#d0d9e4")


def needs_plotly() -> Any:
    """Returns ``plotly.graph_objects``.

    Raises:
        OffloadError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as found  # type: ignore[import-untyped]  # it declares no types
    except ImportError as error:
        raise OffloadError(
            f"a figure needs plotly, which cannot be imported ({error}): pip install '.[report]' in a checkout of "
            "eager_offload"
        ) from error
    return found


def write_page(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes ``figure`` as one page that needs no network and no other file."""
    config = {"scrollZoom": True, "displaylogo": False, "responsive": True}
    figure.write_html(os.fspath(path), include_plotlyjs=True, full_html=True, config=config)


# -- a trace ----------------------------------------------------------------------------------------------------------


def trace_figure(trace: Trace, name: str = "") -> Any:
    """Returns the report of a trace as a ``plotly.graph_objects.Figure``.

    From the top: the summary; advice; memory with and without offload, and below it, on the same axis of time, a lane
    for each kind of work and depth of modules; the largest saved tensors.

    Args:
        name: of the trace, for the title.

    Raises:
        OffloadError: plotly is not installed.
    """
    stack = Stack(name or "A trace of eager_offload", title(trace))
    stack.tiles(summary(trace))
    said = [*notes(trace), *(trace.advice or ("Nothing limited this run that a setting would change.",))]
    slices = sorted(trace.slices, key=lambda one: -one.seconds)[:_MOST_SLICES]
    if len(slices) < len(trace.slices):
        said.append(f"The {len(slices):,} longest of {len(trace.slices):,} slices are drawn.")
    stack.table(["Advice"], [[sentence] for sentence in said], [1.0])
    # As many samples as a browser can draw, each the most of its neighbours.
    every, most = -(-len(trace.memory) // _MOST_SAMPLES) or 1, peaks(trace)
    parts = (trace.memory[first : first + every] for first in range(0, len(trace.memory), every))
    samples = [MemorySample(*map(max, zip(*part, strict=True)))._replace(seconds=part[0].seconds) for part in parts]
    times = [1e3 * one.seconds for one in samples]
    curves = [
        Curve("without offload", most.without_offload, WITHOUT, [one.without_offload for one in samples]),
        Curve("on the device", most.device, DEVICE, [one.device for one in samples]),
    ]
    if most.host:
        curves.append(Curve("in host memory", most.host, _HOST, [one.host for one in samples]))
    if most.disk:
        curves.append(Curve("on disk", most.disk, _DISK, [one.disk for one in samples]))
    axis = stack.memory(times, curves, "saved tensors of min_bytes and more")
    stack.lanes(_lanes(slices), axis)
    rows = [
        [
            row.operation.removesuffix("Backward0"),
            f"{row.module or 'outside of modules'}{f' ({row.modules:,} modules)' if row.modules > 1 else ''}",
            f"{row.count:,}",
            size_text(row.nbytes),
            sizes_text(row.outcomes),
        ]
        for row in saved_rows(trace.saved)
    ]
    stack.table(["Largest saved tensors: operation", "module", "saves", "bytes", "became"], rows, [4, 5, 1, 1, 5])
    return stack.figure()


class _Lane(NamedTuple):
    """One line of the drawing: slices of one track that do not overlap."""

    name: str
    slices: list[Slice]


def _lanes(slices: Iterable[Slice]) -> list[_Lane]:
    """Returns the lanes by device, then in the order of ``SliceKind``, forward above backward, inner slices lower."""
    tracks: dict[tuple[str, str], list[Slice]] = {}
    for one in sorted(slices, key=lambda one: (one.start, -one.seconds)):
        tracks.setdefault((one.device, one.track), []).append(one)
    devices, kinds = list(dict.fromkeys(device for device, _ in tracks)), list(SliceKind)
    order = sorted(
        tracks, key=lambda key: (devices.index(key[0]), kinds.index(tracks[key][0].kind), "backward" in key[1], key[1])
    )
    found = []
    for device, track in order:
        named = f"{device} {track}" if len(devices) > 1 else track
        for depth, on_it in enumerate(_by_depth(tracks[device, track])):
            found.append(_Lane("" if depth else named, on_it))
    return found


def _by_depth(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Returns the slices of a track by the number of others that they lie inside of."""
    found: list[list[Slice]] = []
    around: list[Slice] = []
    for one in sorted(slices, key=lambda one: (one.start, -one.stop)):
        # Times are rounded: a slice that ends a moment after its neighbour began lies beside it, not inside it.
        while around and (around[-1].stop <= one.start or around[-1].stop < one.stop):
            around.pop()
        if len(around) == len(found):
            found.append([])
        found[len(around)].append(one)
        around.append(one)
    return found


# -- parts ------------------------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    name: str
    most: int
    colour: str
    nbytes: Sequence[int]


class _Part(NamedTuple):
    """A part of the stack: its height and the gap above it in pixels, its axis of y, or the table whose place it is."""

    height: int
    gap: int
    axis: str
    table: Any = None


class Stack:
    """A figure in the making, from the top."""

    def __init__(self, name: str, subtitle: str) -> None:
        self._plotly, self._parts, self._axes = needs_plotly(), list[_Part](), itertools.count(1)
        self.drawing = self._plotly.Figure()
        #: Legends, by the axis of y above which they stand.
        self.legends = {"legend": "y"}
        self.drawing.update_layout(
            title={"text": f"<b>{_escaped(name)}</b>", "subtitle": {"text": _escaped(subtitle)}, "x": 0.01},
            template="plotly_white",
            font={"family": "system-ui, sans-serif", "size": 13, "color": _TEXT},
            hovermode="closest",
            hoverlabel={"align": "left", "font": {"size": 12}},
            bargap=0.08,
            barmode="overlay",
            uniformtext={"minsize": 9, "mode": "hide"},
            margin={"l": 24, "r": 24, "t": 84, "b": 24},
        )

    def tiles(self, tiles: Sequence[Tile]) -> None:
        """Adds the summary: names, and below them their numbers."""
        lines = max(-(-len(tile.rest) // (_NARROW // len(tiles))) for tile in tiles)
        cells = [[f"<b>{_escaped(tile.value)}</b>", _escaped(tile.rest)] for tile in tiles]
        self._table([f"<b>{tile.name}</b>" for tile in tiles], cells, [1.0] * len(tiles), 2 * _LINE + 18 * lines + 22)

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[float]) -> None:
        """Adds rows of text; a long one takes several lines."""
        room = [_WIDTH * width / sum(widths) for width in widths]
        lines = [max(-(-len(cell) // int(place)) for cell, place in zip(row, room, strict=True)) or 1 for row in rows]
        cells = [[_escaped(row[column]).replace("`", "") for row in rows] for column in range(len(titles))]
        self._table([f"<b>{_escaped(one)}</b>" for one in titles], cells, widths, _LINE + 14 + _LINE * sum(lines))

    def _table(self, titles: Sequence[str], cells: Any, widths: Sequence[float], height: int) -> None:
        look = {"align": "left", "line": {"color": _RULE}, "height": _LINE}
        table = self._plotly.Table(
            header={**look, "values": titles, "fill": {"color": _PAPER}, "font": {"color": MUTED, "size": 12}},
            cells={**look, "values": cells, "fill": {"color": "white"}, "font": {"color": _TEXT, "size": 13}},
            columnwidth=list(widths),
        )
        self.drawing.add_trace(table)
        follows_table = self._parts and self._parts[-1].table is not None
        self._parts.append(_Part(height, _NEAR if follows_table else GAP, "", self.drawing.data[-1]))

    def memory(self, times: Sequence[float], curves: Sequence[Curve], what: str) -> str:
        """Adds curves of bytes over milliseconds. Returns the name of the axis of time."""
        x, y = self.axis(PLOT)
        for curve in curves:
            is_device, is_other = curve.colour == DEVICE, curve.colour not in (DEVICE, WITHOUT)
            line = {"color": curve.colour, "shape": "hv", "width": 1.5 if is_other else 2}
            line["dash"] = "dot" if is_other else "solid"
            self.drawing.add_scatter(
                x=times,
                y=curve.nbytes,
                xaxis=x,
                yaxis=y,
                line=line,
                mode="lines",
                name=f"{curve.name}, at most {size_text(curve.most)}",
                customdata=[size_text(nbytes) for nbytes in curve.nbytes],
                hovertemplate=f"%{{x:.3f}} ms: %{{customdata}} {curve.name}<extra></extra>",
                fill="tozeroy" if is_device else None,
                fillcolor="rgba(11, 105, 163, 0.12)" if is_device else None,
            )
        self.bytes_at(y, max((nbytes for curve in curves for nbytes in curve.nbytes), default=0))
        self.layout(y, title={"text": what, "font": {"size": 11}}, fixedrange=True)
        self.layout(x, title={"text": "milliseconds", "standoff": 4}, anchor=y, showspikes=True, spikethickness=1)
        self.layout(x, range=[0, times[-1] if times else 1], zeroline=False)
        return x

    def lanes(self, lanes: Sequence[_Lane], x: str) -> None:
        """Adds a bar for each slice, on the axis of time ``x``, which goes below them."""
        _, y = self.axis(_LANE * max(len(lanes), 1), _NEAR, x)
        colours: dict[str, str] = {}
        for kind in SliceKind:
            placed = [(row, one) for row, lane in enumerate(lanes) for one in lane.slices if one.kind is kind]
            if placed and kind is SliceKind.COMPUTE:
                for _, one in placed:
                    colours.setdefault(kind_of(one.module or one.name), _MODULES[len(colours) % len(_MODULES)])
                shown = [colours[kind_of(one.module or one.name)] for _, one in placed]
                self._bars(placed, x, y, "compute, by module", shown, "white")
            elif placed:
                self._bars(placed, x, y, kind.value, _KINDS[kind], _KINDS[kind])
        ticks = [row for row, lane in enumerate(lanes) if lane.name]
        self.layout(
            y,
            tickvals=ticks,
            ticktext=[_escaped(lanes[row].name) for row in ticks],
            range=[len(lanes) - 0.4, -0.6],
            fixedrange=True,
            zeroline=False,
            showgrid=False,
        )
        self.layout(x, anchor=y)

    def _bars(self, placed: Sequence[tuple[int, Slice]], x: str, y: str, name: str, colour: Any, line: str) -> None:
        slices = [one for _, one in placed]
        self.drawing.add_bar(
            orientation="h",
            xaxis=x,
            yaxis=y,
            name=name,
            base=[1e3 * one.start for one in slices],
            x=[1e3 * one.seconds for one in slices],
            y=[row for row, _ in placed],
            marker={"color": colour, "line": {"color": line, "width": 0.5 if line == "white" else 1}},
            text=[_label(one) for one in slices],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            customdata=[_reading(one) for one in slices],
            hovertemplate="%{customdata}<extra></extra>",
        )

    def figure(self) -> Any:
        height = sum(part.height + part.gap for part in self._parts) - self._parts[0].gap
        top = height + self._parts[0].gap
        for part in self._parts:
            top -= part.gap
            domain = [max((top - part.height) / height, 0.0), top / height]
            if part.table is not None:
                part.table.domain = {"y": domain}
            else:
                self.layout(part.axis, domain=domain)
                for legend, axis in self.legends.items():
                    if axis == part.axis:
                        self.drawing.update_layout({legend: {**_LEGEND, "y": domain[1]}})
            top -= part.height
        margin = self.drawing.layout.margin
        self.drawing.update_layout(height=height + margin.t + margin.b)
        return self.drawing

    def axis(self, height: int, gap: int = GAP, x: str = "") -> tuple[str, str]:
        """Adds an axis of y, and one of x unless that exists. Returns their names, x first."""
        number = next(self._axes)
        suffix = "" if number == 1 else str(number)
        self._parts.append(_Part(height, gap, f"y{suffix}"))
        if not x:
            x = f"x{suffix}"
            self.layout(x, domain=[_LEFT, 1.0])
        return x, f"y{suffix}"

    def layout(self, axis: str, **values: Any) -> None:
        self.drawing.update_layout({f"{axis[0]}axis{axis[1:]}": values})

    def bytes_at(self, axis: str, most: int, least: int = 0) -> None:
        """Sets the ticks of an axis of bytes, in powers of two."""
        step = 1 << max(((most - least) // 4).bit_length() - 1, 0)
        step *= 2 if most - least > 6 * step else 1
        ticks = list(range(least - least % step, most + step, step))
        units = [size_text(nbytes).split()[1] for nbytes in ticks]
        text = [f"{one / 1024 ** _UNITS.index(unit):.4g} {unit}" for one, unit in zip(ticks, units, strict=True)]
        self.layout(axis, tickvals=ticks, ticktext=text)  # such as "2.125 GiB"
        self.layout(axis, range=[least, 1.05 * max(most, 1)])


def _label(one: Slice) -> str:
    """Returns the last name of a path, with the name before it if the last one is a number."""
    *_, outer, last = ["", *one.name.split(".")]
    return _escaped(f"{outer}.{last}" if last.isdigit() and outer else last)


def _reading(one: Slice) -> str:
    when = f"{time_text(one.seconds)}, {time_text(one.start)} after the beginning"
    size = size_text(one.nbytes) if one.nbytes else ""
    module = one.module if one.module != one.name else ""
    parts = (f"{one.device} {one.track}", module, one.operation, size, one.tier)
    return "<br>".join([f"<b>{_escaped(one.name)}</b>", when, *(_escaped(part) for part in parts if part)])


def _escaped(text: str) -> str:
    """Returns ``text`` escaped for plotly, which does not know ``&quot;``."""
    return escape(text, quote=False)
