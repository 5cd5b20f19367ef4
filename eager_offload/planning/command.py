"""``python -m eager_offload plan``: prints a plan, or the longest sequence that fits."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from eager_offload.errors import ConfigError, OffloadError
from eager_offload.planning import POLICIES, parts_of
from eager_offload.planning.machine import TABLE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from eager_offload.planning.plan import Plan

T = TypeVar("T")

#: Points of the printed front.
_POINTS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plan for a model that a function makes.

    Returns:
        The exit status: 0 if the plan fits, 1 if it does not, 2 if no plan can be made (also if the function or the
        model raises); a line on stderr tells why.
    """
    options = _parser().parse_args(arguments)
    if options.longest is not None:
        return _longest(options)
    from eager_offload.config import size_text  # imported late, as below: these import torch, and --help does not
    from eager_offload.observe.figure import needs_plotly, write_page

    try:
        if options.html:
            needs_plotly()  # before minutes of planning
        with _ranks(options.mesh):
            found = _plan(options)
        points = found.front(_POINTS) if options.front else []
        ways = found.fixed_ways() if options.front else []
        if options.save:
            found.save(options.save)
        if options.html:
            write_page(found.figure(), options.html)
    except (OffloadError, OSError) as error:
        print(f"eager_offload plan: {error}", file=sys.stderr)
        return 2
    if options.json:
        front = {"front": [one._asdict() for one in points], "ways": [one._asdict() for one in ways]}
        print(json.dumps(found.to_dict() | (front if options.front else {}), indent=2))
    else:
        print(found)
        if points:
            print(f"\n{'budget':>11}  {'peak':>11}  {'step':>10}")
        for one in points:
            print(f"{size_text(one.budget):>11}  {size_text(one.peak_bytes):>11}  {one.step_seconds:>8.3f} s")
        for way in ways:
            print(f"{'':>11}  {size_text(way.peak_bytes):>11}  {way.step_seconds:>8.3f} s  {way.name}")
        if options.html:
            print(f"\n{options.html}: {size_text(os.stat(options.html).st_size)}, to open in a browser")
    return 0 if found.fits else 1


def _longest(options: argparse.Namespace) -> int:
    """Prints the table of the longest sequences; the exit status is 1 if not even the shortest one fits."""
    from eager_offload.planning.longest import longest

    def told(way: str, length: int) -> None:
        if not options.json:
            print(f"{way}: a sequence of {length:,} ...", file=sys.stderr, flush=True)

    try:
        for name in ("device_budget", "host_budget", "policy", "recompute", "front", "save", "html"):
            if getattr(options, name) not in (None, False, POLICIES[0]):
                raise ConfigError(f"--{name.replace('_', '-')} does not go with --longest: leave one of them out")
        with _ranks(options.mesh):
            find = partial(
                longest, _function(options.function), options.longest, at_most=options.at_most, progress=told
            )
            found = _said(options.function, partial(find, **_common(options)))
    except OffloadError as error:
        print(f"eager_offload plan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    return 0 if any(row.length for row in found.rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eager_offload plan",
        description="Predicts memory, time and bytes to move before the first step. Nothing is run, and models "
        "on meta are never allocated.",
    )
    parser.add_argument(
        "function",
        metavar="module:function",
        help="returns (model, inputs) or (model, inputs, loss); found from here as `python -m` finds modules",
    )
    parser.add_argument(
        "--device",
        default="here",
        help=f"here (known by its name, or measured), {', '.join(TABLE)}; default: %(default)s",
    )
    parser.add_argument(
        "--longest",
        metavar="BUDGET",
        help="find the longest sequence that fits into this many bytes, such as 75GiB; the function gets the length",
    )
    parser.add_argument(
        "--at-most", type=int, default=1 << 24, help="the longest length that --longest tries; default: %(default)s"
    )
    parser.add_argument("--device-budget", help="bytes of the device, such as 40GiB; default: all that it has")
    parser.add_argument("--host-budget", help="most bytes in the tier at one time; default: unlimited")
    parser.add_argument(
        "--optimizer", default="AdamW", help="a class of torch.optim, in any case, or none; default: %(default)s"
    )
    parser.add_argument("--optimizer-bytes", help="bytes of the states of an optimizer, in place of counting them")
    parser.add_argument(
        "--mesh",
        help="sizes of the mesh over which FSDP2 will shard the model, such as 8 or 2,8, or fsdp=8,tp=2 if the "
        "function calls parallelize_module",
    )
    parser.add_argument("--accumulation", type=int, default=1, help="backwards to a step; default: %(default)s")
    parser.add_argument("--policy", default=POLICIES[0], choices=POLICIES, help="default: %(default)s")
    parser.add_argument("--recompute", action="store_true", help="modules may be recomputed in backward")
    parser.add_argument("--front", action="store_true", help="compare with other budgets")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--save", metavar="FILE", help="write the plan there, for Plan.load")
    parser.add_argument("--html", metavar="FILE", help="write a page of the plan there, to open in a browser")
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    from eager_offload.planning.planner import plan

    model, inputs, loss = model_of(options.function)
    fields = {name: getattr(options, name) for name in ("device_budget", "host_budget", "policy", "recompute")}
    return _said(options.function, partial(plan, model, inputs, loss=loss, **fields, **_common(options)))


def _said(function: str, call: Callable[[], T]) -> T:
    """Returns ``call()``; other errors become an ``OffloadError`` that names ``function``."""
    try:
        return call()
    except OffloadError as error:
        if notes := getattr(error, "__notes__", ()):
            raise type(error)("; ".join([str(error), *notes])) from error
        raise
    except Exception as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())]).split()
        raise OffloadError(f"{function}: {' '.join([f'{type(error).__name__}:', *said])}") from error


def _common(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": options.device,
        "optimizer": _optimizer(options.optimizer),
        "optimizer_bytes": options.optimizer_bytes,
        "mesh": _mesh(options.mesh),
        "accumulation": options.accumulation,
    }


def _mesh(text: str | None) -> tuple[int, ...] | dict[str, int] | None:
    try:
        if text is not None and "=" in text:
            return {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
        return None if text is None else tuple(map(int, text.split(",")))
    except ValueError:
        raise ConfigError(
            f"--mesh {text!r} is not accepted: it takes sizes, such as 8 or 2,8, or fsdp=8,tp=2"
        ) from None


@contextmanager
def _ranks(text: str | None) -> Iterator[None]:
    """Opens a fake process group of the size of a named mesh, as rank 0, so that the function can call
    ``parallelize_module``."""
    mesh = _mesh(text)
    if not isinstance(mesh, dict) or "tp" not in mesh:
        yield
        return
    import torch.distributed as dist

    from eager_offload.planning.sharding import mesh_of

    mesh_of(mesh)
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch declares it elsewhere
    dist.init_process_group("fake", rank=0, world_size=prod(mesh.values()), store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _optimizer(text: str) -> Any:
    import torch

    if text.lower() == "none":
        return None
    kinds = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if (kind := kinds.get(text.lower())) is None:
        raise ConfigError(f"--optimizer {text!r} is not accepted: it takes none, {', '.join(sorted(kinds))}")
    return kind


def model_of(text: str) -> tuple[nn.Module, Any, Callable[[Any], Tensor] | None]:
    return parts_of(_said(text, _function(text)), repr(text))


def _function(text: str) -> Callable[..., Any]:
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"{text!r} is not accepted: name a function as module:function")
    sys.path.insert(0, os.getcwd())
    try:
        function: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{text!r} is not accepted: {error}") from error
    if not callable(function):
        raise ConfigError(f"{text!r} is not accepted: it is not a function")
    return function
