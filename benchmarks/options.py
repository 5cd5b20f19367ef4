"""The command lines of benchmarks: what several of them take, and the types of what they are given."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__ = ["MODEL", "accelerator_or_message", "command_line", "listed", "named", "parse", "positive", "speeds"]

T = TypeVar("T")

#: The model that several of them train on a CPU, and its windows.
MODEL: dict[str, int | str] = {
    "layers": 8,
    "width": 768,
    "heads": 12,
    "sequence": 1024,
    "batch": 4,
    "window": "64MiB",
    "min_bytes": "1MiB",
}
#: What several benchmarks take by the same name, and what their help says of it; numbers but for those of ``_TEXTS``.
_SHARED = {
    "rounds": None,
    "steps": None,
    "layers": None,
    "width": None,
    "heads": None,
    "sequence": None,
    "batch": None,
    "threads": "of torch",
    "window": "max_inflight_bytes and prefetch_bytes",
    "min_bytes": "a smaller saved tensor stays",
}
_TEXTS = ("window", "min_bytes")


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def command_line(
    doc: str | None, *, workers: Collection[str] | None = None, **shared: int | str
) -> argparse.ArgumentParser:
    """A parser with ``--quick``, ``--check``, ``--output`` and ``--disk-path``, and with the options ``shared``.

    Args:
        doc: of the benchmark; its first line describes it.
        workers: what processes of its own measure, each of which is told by ``--worker`` and ``--round``.
        **shared: defaults of those of ``_SHARED`` that it takes.
    """
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default in shared.items():
        kind: Callable[[str], Any] = str if name in _TEXTS else positive
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=_SHARED[name])
    if workers is not None:
        parser.add_argument("--worker", choices=workers, help=argparse.SUPPRESS)
        parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument(
        "--quick", action="store_true", help="a short run, to see that it works; its numbers mean little"
    )
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a limit is missed")
    parser.add_argument("--output", type=Path, metavar="FILE", help="in place of benchmarks/results/NAME.json")
    parser.add_argument(
        "--disk-path", type=Path, metavar="DIR", help="of the spill file, in place of what the library chooses"
    )
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None = None, **quick: Any) -> argparse.Namespace:
    """What the command line says; of numbers with ``--quick`` at most those of ``quick``, which come in place of texts.

    Args:
        arguments: in place of the process's own.
    """
    options = parser.parse_args(arguments)
    for name, value in quick.items() if options.quick else ():
        given = getattr(options, name)
        setattr(options, name, min(given, value) if isinstance(value, int) and isinstance(given, int) else value)
    return options


def listed(
    read: Callable[[str], T], accepts: Callable[[T], bool] = lambda one: True, refusal: str = ""
) -> Callable[[str], list[T]]:
    """A type for argparse: what ``read`` makes of texts with commas between, each of which ``accepts`` takes.

    Args:
        refusal: what is said of one that it does not take.
    """

    def of(text: str) -> list[T]:
        found = [read(one.strip()) for one in text.split(",")]
        if not all(map(accepts, found)):
            raise argparse.ArgumentTypeError(refusal)
        return found

    return of


def named(known: Iterable[str], separator: str = ",") -> Callable[[str], list[str]]:
    """A type for argparse: names out of ``known`` with ``separator`` between."""

    def of(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(separator)]
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {f'{separator} '.join(known)}")
        return chosen

    return of


def _speed(text: str) -> float:
    speed = float(text)
    if speed <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a link moves more than nothing")
    return speed


speeds = listed(_speed)


def accelerator_or_message(benchmark: str, plumbing: str) -> str | None:
    """The accelerator's name, such as ``cuda:0``; ``None`` where there is none, which standard error is told.

    Args:
        plumbing: the options that try the benchmark without one.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        print(
            f"benchmarks.{benchmark}: torch finds no accelerator on this machine ({plumbing} only tries the plumbing)",
            file=sys.stderr,
        )
        return None
    return f"{accelerator.type}:{torch.accelerator.current_device_index()}"
