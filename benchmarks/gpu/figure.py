"""A table of results, and one picture: memory against step time, each way a point."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import Spread, table
from benchmarks.gpu.results import PICTURE, TABLE, latest, read

Row = dict[str, Any]


def make(path: Path) -> None:
    """Writes ``table.md`` and, where matplotlib is installed, ``memory.png`` beside the results; prints the table."""
    rows = read(path)
    text = _text(rows)
    (path.parent / TABLE).write_text(text)
    print(text)
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    points = {name: row for name, row in latest(rows, "train").items() if _is_main(row)}
    if points:
        _draw(points, _title(rows, points), path.parent / PICTURE)


# -- the table --------------------------------------------------------------------------------------------------------


def _text(rows: list[Row]) -> str:
    """Every result that is compared, as Markdown whose tables are also readable as they are."""
    machine = next((row for row in rows if row.get("what") == "machine"), {})
    parts = [
        f"{machine.get('card')}, driver {machine.get('driver')}, torch {machine.get('torch')}, "
        f"commit {(machine.get('commit') or {}).get('revision')}, {machine.get('date')}"
    ]
    ways = latest(rows, "train")
    for setting in dict.fromkeys(map(_setting, ways.values())):
        several = [(name, row) for name, row in ways.items() if _setting(row) == setting]
        several.sort(key=lambda one: bool(one[1]["failure"]))
        base = None if several[0][1]["failure"] else several[0][1]
        parts.append(_block(setting, [_cells(name, row, base) for name, row in several]))
    for title, what, columns in (
        ("Bits", "bits", ("same", "moved_bytes", "failure")),
        ("Sanitizer", "sanitizer", ("verdict", "copies_seen", "bytes_seen", "bytes_moved")),
        (
            "Capture",
            "capture",
            ("step_ms", "host_ms", "waited_ms", "device_mib", "moved_mib", "saved", "moved", "same"),
        ),
        ("Frameworks", "framework", ("peak_gib", "step", "out_gib", "same")),
        ("Pinning", "pin", ("seconds", "unpin_seconds", "pinned")),
        ("Fork", "fork", ("seconds",)),
        ("Stages", "ran", ("ended", "seconds", "limit")),
    ):
        found = latest(rows, what)
        cells = [{"": name, **{column: _flat(row.get(column)) for column in columns}} for name, row in found.items()]
        parts += [_block(title, cells)] if cells else []
    return "\n\n".join(parts) + "\n"


def _block(title: str, rows: Iterable[Row]) -> str:
    return f"{title}\n\n```text\n{table(rows)}\n```"


def _setting(row: Row) -> str:
    return f"{row['layers']} layers, {row['tokens']:,} tokens in sequences of {row['length']:,}"


def _cells(name: str, row: Row, base: Row | None) -> Row:
    """One line: a way beside the first one of its setting that ran."""
    if row["failure"]:
        return {"way": name, "failure": row["failure"][:80]}
    steps = row["steps"]
    cells = {
        "way": name,
        "peak GiB": row["peak_gib"],
        "reserved": row["reserved_gib"],
        "step s": Spread.of(steps["step"]),
        **{part: median(steps[part]) for part in ("forward", "backward", "optimizer")},
        "host GiB": row.get("host_gib"),
        "out GiB": row.get("out_gib"),
        "planned GiB": row.get("predicted_peak_gib"),
        "planned s": row.get("predicted_step"),
        "stalled s": row.get("stall_seconds"),
    }
    if base is not None and base is not row:
        pairs = list(zip(row["losses"], base["losses"], strict=False))
        cells["of first"] = median(steps["step"]) / median(base["steps"]["step"])
        cells["losses off"] = f"{max(abs(one - other) / max(abs(other), 1e-9) for one, other in pairs):.1e}"
    return cells


def _flat(value: object) -> object:
    """A cell of what has parts."""
    if isinstance(value, dict):
        parts = {name: f"{part:.3g}" if isinstance(part, float) else str(part) for name, part in value.items()}
        return ", ".join(f"{name} {part}" for name, part in parts.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else value


# -- the picture ------------------------------------------------------------------------------------------------------


def _is_main(row: Row) -> bool:
    """Whether it trained the model, and as many tokens, that most ways train, without the compiler."""
    return not row["failure"] and row["layers"] == 16 and row["tokens"] == 32_768


def _title(rows: list[Row], points: dict[str, Row]) -> str:
    machine = next((row for row in rows if row.get("what") == "machine"), {})
    one = next(iter(points.values()))
    return f"{one['parameters'] / 1e9:.2f}B parameters, {one['tokens']:,} tokens, bf16, {machine.get('card')}"


def _draw(points: dict[str, Row], title: str, path: Path) -> None:
    """A point for each way, with its name in a column at the right that a line leads to: names never overlap."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 6), layout="constrained")
    places = {name: (median(row["steps"]["step"]), row["peak_gib"]) for name, row in points.items()}
    for name, (seconds, gib) in places.items():
        ours = name.startswith(("ours", "plan"))
        axes.plot(seconds, gib, "o" if ours else "s", color="tab:blue" if ours else "tab:gray", markersize=8)
    axes.set(xlabel="step time, s", ylabel="peak device memory, GiB", title=title)
    axes.set_xlim(0, max(seconds for seconds, _ in places.values()) * 1.08)
    axes.set_ylim(0, max(gib for _, gib in places.values()) * 1.08)
    axes.grid(alpha=0.3)
    heights = _spread([gib / axes.get_ylim()[1] for _, gib in sorted(places.values(), key=lambda place: place[1])])
    for height, name in zip(heights, sorted(places, key=lambda name: places[name][1]), strict=True):
        seconds, gib = places[name]
        axes.annotate(
            f"{name}: {gib:.1f} GiB, {seconds:.2f} s",
            (seconds, gib),
            (1.06, height),
            textcoords="axes fraction",
            verticalalignment="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.8, "relpos": (0, 0.5)},
        )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _spread(heights: list[float], gap: float = 0.045) -> list[float]:
    """Moves rising heights apart until each is ``gap`` above the one before, as little as that takes from below."""
    found: list[float] = []
    for height in heights:
        found.append(max(height, found[-1] + gap) if found else max(height, gap / 2))
    return found
