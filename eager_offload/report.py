"""``python -m eager_offload.report trace.json -o report.html``: a trace as one page to look at."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eager_offload.errors import OffloadError
from eager_offload.trace_file import read_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page of a trace.

    Returns:
        The exit status: 0, or 2 with one line on standard error where the trace cannot be read or the page not written.
    """
    options = _parser().parse_args(arguments)
    from eager_offload.config import size_text  # and torch with it
    from eager_offload.observe.report.page import render

    source: Path = options.trace
    output: Path = options.output or source.with_suffix(".html")
    try:
        trace = read_trace(source)
        if output.exists() and output.samefile(source):
            raise OffloadError(f"{str(output)!r} is the trace itself: name another file with -o")
        output.write_text(render(trace, source.name), encoding="utf-8")
    except (OSError, OffloadError) as error:
        print(f"eager_offload.report: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{output}: {size_text(output.stat().st_size)}, to open in a browser")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eager_offload.report",
        description="Turns a trace that `with offload.trace(path):` wrote into one page that needs no network.",
    )
    parser.add_argument("trace", type=Path, help="the trace, such as step.json")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PAGE", help="where the page goes (default: beside the trace, as .html)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
