"""``python -m eager_offload.doctor``: what this machine offers to offloading, as a text for an issue or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the diagnosis of this machine.

    Returns:
        The exit status: 0, or 1 where offloading cannot work here, or 130 after an interrupt. Wrong arguments exit
        with 2.
    """
    os.environ.pop("EAGER_OFFLOAD", None)  # the machine is examined, whatever is switched off for its programs
    options = _parser().parse_args(arguments)
    from eager_offload.observe.doctor.examination import examine, to_text  # and torch with it

    if sys.stderr.isatty():
        print("Measuring for about 10 seconds ...", file=sys.stderr)
    try:
        diagnosis = examine(options.disk_path)
    except KeyboardInterrupt:
        return 130  # what a shell says of it
    try:
        print(json.dumps(asdict(diagnosis), indent=2) if options.json else to_text(diagnosis), flush=True)
    except BrokenPipeError:  # the reader has seen enough; nothing more is to be flushed into the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if diagnosis.verdict.works else 1


def _parser() -> argparse.ArgumentParser:
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
