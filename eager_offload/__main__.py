"""``python -m eager_offload COMMAND``. ``--help`` does not import torch."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from eager_offload.errors import OffloadError
from eager_offload.version import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that ``arguments`` begin with, or lists the commands. Returns the exit status of the command; 0
    for the list, 2 for anything else."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in COMMANDS:
        command, _ = COMMANDS[given[0]]
        try:
            run = importlib.import_module(command).main if isinstance(command, str) else command
            status: int = run(given[1:])
            return status
        except BrokenPipeError:  # the reader has closed the pipe: redirect the flush at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    if given == ["--version"]:
        print(VERSION)
        return 0
    is_asked = not given or given[0] in ("-h", "--help")
    if not is_asked:
        print(f"eager_offload: {given[0]!r} is not a command", file=sys.stderr)
    usage = [
        f"usage: python -m eager_offload [--version] ({' | '.join(COMMANDS)}) [ARGUMENTS]...",
        "",
        *(f"  {name:<8}{text}" for name, (_, text) in COMMANDS.items()),
        "",
        "`python -m eager_offload COMMAND --help` lists the arguments of a command. Launchers can start it:",
        "`torchrun -m eager_offload run train.py`.",
    ]
    print("\n".join(usage), file=sys.stdout if is_asked else sys.stderr)
    return 0 if is_asked else 2


def _doctor(arguments: Sequence[str]) -> int:
    """Prints the diagnosis of this machine; the exit status is 1 if offloading cannot work here."""
    parser = argparse.ArgumentParser(
        prog="python -m eager_offload doctor",
        description="Measures this machine for about 10 seconds and recommends settings. Paste the text into an issue.",
    )
    parser.add_argument("--json", action="store_true", help="for machines; eager_offload.observe.doctor has the keys")
    parser.add_argument(
        "--disk-path",
        action="append",
        type=Path,
        metavar="DIRECTORY",
        help="a directory for the spill file; may be given several times (default: the temporary, cache and working "
        "directories)",
    )
    options = parser.parse_args(arguments)
    os.environ.pop("EAGER_OFFLOAD", None)  # the switch is for training programs, not for the examination
    from eager_offload.observe import doctor

    if sys.stderr.isatty():
        print("Measuring for about 10 seconds ...", file=sys.stderr)
    try:
        diagnosis = doctor.examine(options.disk_path)
    except KeyboardInterrupt:
        return 130  # the status that a shell reports for it
    print(json.dumps(asdict(diagnosis), indent=2) if options.json else doctor.to_text(diagnosis), flush=True)
    return 0 if diagnosis.verdict.works else 1


def _report(arguments: Sequence[str]) -> int:
    """Writes the page of a trace, or prints it; the exit status is 2 if it cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="python -m eager_offload report",
        description="Turns a trace that `with offload.trace(path):` wrote into one page that needs no network.",
    )
    parser.add_argument("trace", type=Path, help="the trace, such as step.json")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PAGE", help="the page to write (default: next to the trace, as .html)"
    )
    parser.add_argument("--text", action="store_true", help="print it, in place of a page: plotly is not needed")
    options = parser.parse_args(arguments)
    from eager_offload.config import size_text
    from eager_offload.observe.figure import needs_plotly, trace_figure, write_page
    from eager_offload.observe.report import to_text
    from eager_offload.observe.trace import read_trace

    source: Path = options.trace
    output: Path = options.output or source.with_suffix(".html")
    try:
        if options.text:
            print(to_text(read_trace(source)))
            return 0
        needs_plotly()
        trace = read_trace(source)
        if output.exists() and output.samefile(source):
            raise OffloadError(f"{str(output)!r} is the trace itself: name another file with -o")
        write_page(trace_figure(trace, source.name), output)
    except (OSError, OffloadError) as error:
        print(f"eager_offload report: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{output}: {size_text(output.stat().st_size)}, to open in a browser")
    return 0


#: By command, its function or the module with its ``main``, and a description.
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int] | str, str]] = {
    "plan": ("eager_offload.planning.command", "predicts memory, time and bytes to move before the first step"),
    "check": ("eager_offload.checking", "whether a model of yours trains to the same bits with offload"),
    "doctor": (_doctor, "measures this machine and recommends settings"),
    "report": (_report, "a trace as one page to look at"),
    "run": ("eager_offload.running", "runs a training script, which offloads without a change"),
}


if __name__ == "__main__":
    sys.exit(main())
