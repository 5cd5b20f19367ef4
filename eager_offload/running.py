"""``python -m eager_offload run [--settings ...] train.py ...``: runs an unchanged training script with offload.

Every call of an outermost module in training mode runs in a ``with offload``. Tensors saved between modules are kept.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from eager_offload.errors import ConfigError

if TYPE_CHECKING:  # torch is imported in functions: --help does not wait for it
    from eager_offload.offload import Offload
    from eager_offload.stats import OffloadStats

#: Files whose frames are removed from a script's traceback.
_OWN_FILES = {__file__, str(Path(__file__).with_name("__main__.py"))}
_USAGE = """\
usage: python -m eager_offload run [OPTION]... (SCRIPT | -m MODULE) [ARGUMENTS]...

Runs a training script, or a module as `python -m` does, in which the forwards of modules offload.

  --settings FIELD=VALUE  a field of OffloadConfig, such as min_bytes=4MiB; may be given again
  --settings FILE         a JSON or TOML file of fields
  --device-budget SIZE    as --settings device_budget=SIZE
  --recompute             plans the first batch to the budget, and recomputes tensors if that is cheaper than moving

EAGER_OFFLOAD_<FIELD> sets all other fields. With a launcher:

  torchrun --nproc-per-node 2 -m eager_offload run train.py
  accelerate launch -m eager_offload run train.py
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the script or module that ``arguments`` name. Returns the exit status: 0 if the script has ended; 1 if the
    module does not exist; 2 for wrong arguments, and for a pattern that matches no module. Exceptions of the script,
    ``SystemExit`` included, are raised."""
    given, settings, recompute = list(arguments), list[str](), False
    while given and (option := given[0].partition("="))[0] in ("--settings", "--device-budget", "--recompute"):
        name, equals, value = option
        del given[0]
        if name == "--recompute":
            recompute = True
            continue
        value = value if equals else given.pop(0) if given else ""
        settings.append(value if name == "--settings" else f"device_budget={value}")
    if given[:1] == ["-h"] or given[:1] == ["--help"]:
        print(_USAGE, end="")
        return 0
    is_module = given[:1] == ["-m"]
    command = given[is_module:]
    if not command or command[0].startswith("-"):
        print(_USAGE, end="", file=sys.stderr)
        return 2
    from eager_offload.integrations.calls import offload_from, offload_modules
    from eager_offload.integrations.first_batch import FirstBatch

    try:
        offload = offload_from(fields_of(settings))
        first = FirstBatch.wanted(recompute, None, offload, "model.gradient_checkpointing_disable()")
    except ConfigError as error:
        print(f"eager_offload run: {error}", file=sys.stderr)
        return 2
    if not is_module and not os.path.exists(command[0]):
        print(f"eager_offload run: there is no file {command[0]!r}", file=sys.stderr)
        return 2
    sys.argv = command
    calls, ended_by = Counter[str](), None
    try:
        with first.noting_optimizers() if first else nullcontext(), offload_modules(offload, calls, first):
            if is_module:
                runpy.run_module(command[0], run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
                runpy.run_path(command[0], run_name="__main__")
    except BaseException as error:
        ended_by = type(error)
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        is_raised_by_runpy = innermost.f_globals.get("__name__") == "runpy"  # the module was not found
        if isinstance(error, ImportError) and is_module and is_raised_by_runpy:
            print(f"{sys.executable}: {error}", file=sys.stderr)  # as `python -m` prints it
            return 1
        if not isinstance(error, SystemExit):
            sys.excepthook = partial(_show, sys.excepthook)
        elif error.code in (None, 0) and offload.unmatched():
            return 2
        raise
    finally:
        if first is not None:
            first.end()
        # At exit, after the traceback of a script that fails.
        atexit.register(_report, offload, calls, ended_by)
    return 2 if offload.unmatched() else 0


def _show(show: Callable[..., object], kind: type[BaseException], error: BaseException, _: object) -> None:
    """Calls the exception hook ``show`` with an error of the script, without the frames of this command."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for one in chain:
        trace, kept = one.__traceback__, list[TracebackType]()
        while trace is not None:  # removes the frames that lead to the script, and those around module calls
            is_runpy = not kept and trace.tb_frame.f_globals.get("__name__") in ("runpy", None)
            if not is_runpy and trace.tb_frame.f_code.co_filename not in _OWN_FILES:
                kept.append(trace)
            trace = trace.tb_next
        one.__traceback__ = None
        for shown in reversed(kept):
            one.__traceback__ = TracebackType(one.__traceback__, shown.tb_frame, shown.tb_lasti, shown.tb_lineno)
    show(kind, error, error.__traceback__)


def fields_of(settings: Sequence[str]) -> dict[str, Any]:
    """Returns the fields that ``--settings`` give; later ones override earlier ones.

    Raises:
        ConfigError: a file cannot be read, or does not hold a mapping of fields.
    """
    from eager_offload.config import field_from_text

    fields: dict[str, Any] = {}
    for one in settings:
        name, equals, text = one.partition("=")
        if equals:
            fields[name.strip()] = field_from_text(name.strip(), text)
            continue
        try:
            text = Path(one).read_text()
            found = json.loads(text) if one.endswith(".json") else tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--settings={one!r} is not accepted: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"--settings={one!r} is not accepted: it holds no mapping of fields")
        fields |= found
    return fields


def _report(offload: Offload, calls: Counter[str], ended_by: type[BaseException] | None) -> None:
    """Prints the stats, or the reason that nothing moved, and the patterns that match nothing, on the first rank.

    Prints nothing if the script has ended before a step, by an error or by ``sys.exit``.
    """
    from eager_offload.tiers.limits import rank

    if rank():
        return
    for unmatched in offload.unmatched():
        print(f"eager_offload run: {unmatched}", file=sys.stderr)
    stats = offload.stats(synchronize=True)
    said = str(stats)
    if not offload.config.enabled:
        said = "switched off"
    elif not stats.offloaded_bytes:
        has_begun = calls["backwards"] or (ended_by is SystemExit and _seconds_of_children())
        if ended_by is not None and not has_begun:
            return
        said = f"nothing moved, because {_why(offload, stats, calls)}"
    print(f"eager_offload run: {said}", file=sys.stderr)


def _why(offload: Offload, stats: OffloadStats, calls: Counter[str]) -> str:
    """Returns the text after "nothing moved, because"."""
    from eager_offload.observe.memory import why

    if stats.saved_tensors or stats.empty_forwards or stats.foreign_hooks:
        return why(stats, offload.config)
    if calls["under hooks"]:
        return (
            "modules were called under saved-tensor hooks of the script or of a framework (save_on_cpu, an Offload of "
            "its own), and only the innermost hooks see saved tensors: leave them out, or run the script without this"
        )
    if calls["backwards"] and calls["in eval mode"]:
        return (
            "the modules that were called under grad mode are in eval mode, in which nothing offloads: call train() on "
            "the outermost module, and eval() on modules inside that need eval mode, such as BatchNorm"
        )
    if calls["backwards"]:
        return (
            "no outermost module was called as module(x) in training: a method, forward(x) or a function makes the "
            "loss, or torch.compile is around the whole step. Write `with eager_offload.Offload():` around that code"
        )
    if calls["offloaded"]:
        return "modules were called, but no operator in them has saved anything, and no backward was run"
    if _seconds_of_children():
        return (
            "no module was called in this process under grad mode: if the script trains in processes that it starts "
            "(mp.spawn, a launcher), start one for each rank by `torchrun -m eager_offload run`, or write "
            "`with eager_offload.Offload():` in the function that they run"
        )
    is_evaluated = calls["in eval mode"] or calls["without gradients"]
    return (
        f"{'modules were called in evaluation only' if is_evaluated else 'no module was called'}, and no backward ran"
    )


def _seconds_of_children() -> float:
    """Returns the processor time of finished child processes in seconds; 0 if less than an import of torch takes."""
    times = os.times()
    seconds = times.children_user + times.children_system
    return seconds if seconds > 1 else 0.0
