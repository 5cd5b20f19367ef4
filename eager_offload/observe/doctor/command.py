"""The command line of the doctor."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from eager_offload.observe.doctor.examination import examine
from eager_offload.observe.doctor.text import to_text

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the diagnosis of this machine.

    Returns:
        The exit status: 0, or 1 where offloading cannot work here, or 130 after an interrupt. Wrong arguments exit
        with 2.
    """
    parser = argparse.ArgumentParser(
        prog="python -m eager_offload.doctor",
        description="Examines this machine for about 10 seconds: what offloading has to work with, and which settings "
        "fit. The text is meant to be pasted into an issue.",
    )
    parser.add_argument("--json", action="store_true", help="for machines; docs/doctor_and_report.md lists the keys")
    parser.add_argument(
        "--disk-path",
        action="append",
        type=Path,
        metavar="DIRECTORY",
        help="where a spill file could be; may be given several times (default: the temporary, cache and working "
        "directories)",
    )
    options = parser.parse_args(arguments)
    if sys.stderr.isatty():
        print("Measuring for about 10 seconds ...", file=sys.stderr)
    try:
        diagnosis = examine(options.disk_path)
    except KeyboardInterrupt:
        return 130  # what a shell says of it
    try:
        print(json.dumps(diagnosis.as_dict(), indent=2) if options.json else to_text(diagnosis), flush=True)
    except BrokenPipeError:  # whoever read it has seen enough; nothing more is to be flushed into the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if diagnosis.verdict.works else 1
