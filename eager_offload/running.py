"""``python -m eager_offload run [--settings ...] train.py ...``: a training script offloads without a change.

Every call of an outermost module in training mode runs in a ``with offload``. Tensors that a script saves between its
modules stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eager_offload.errors import ConfigError, OffloadError

if TYPE_CHECKING:  # torch is imported where something runs: --help does not wait for it
    from torch import nn

    from eager_offload.offload import Offload

_USAGE = """\
usage: python -m eager_offload run [--settings SETTINGS]... (SCRIPT | -m MODULE) [ARGUMENTS]...

Runs a training script, or a module as `python -m` does, in which the forwards of modules offload.

  --settings FIELD=VALUE  a field of OffloadConfig, such as min_bytes=4MiB; may be given again
  --settings FILE         a JSON or TOML file of fields

What is not given comes from EAGER_OFFLOAD_<FIELD>. With a launcher:

  torchrun --nproc-per-node 2 -m eager_offload run train.py
  accelerate launch -m eager_offload run train.py
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the script or module that ``arguments`` name.

    Returns:
        The exit status: 0 when it has ended, 2 for wrong arguments. Exceptions of the script, ``SystemExit`` included,
        pass through.
    """
    given, settings = list(arguments), list[str]()
    while given and given[0].partition("=")[0] == "--settings":
        _, equals, value = given.pop(0).partition("=")
        settings.append(value if equals else given.pop(0) if given else "")
    if given[:1] == ["-h"] or given[:1] == ["--help"]:
        print(_USAGE, end="")
        return 0
    is_module = given[:1] == ["-m"]
    command = given[is_module:]
    if not command or command[0].startswith("-"):
        print(_USAGE, end="", file=sys.stderr)
        return 2
    from eager_offload.offload import Offload

    try:
        offload = Offload(_fields(settings))
    except ConfigError as error:
        print(f"eager_offload run: {error}", file=sys.stderr)
        return 2
    if not is_module and not os.path.exists(command[0]):
        print(f"eager_offload run: there is no file {command[0]!r}", file=sys.stderr)
        return 2
    sys.argv = command
    try:
        with offload_modules(offload):
            if is_module:
                runpy.run_module(command[0], run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
                runpy.run_path(command[0], run_name="__main__")
    finally:
        _report(offload)
    return 0


@contextlib.contextmanager
def offload_modules(offload: Offload) -> Iterator[None]:
    """Runs calls of outermost modules in training mode in a ``with offload``, while it is entered.

    A call is outermost if no saved-tensor hooks are in force. Inside such a call ours are; hooks of the script or of a
    framework, an ``Offload`` among them, take precedence. Recomputation in backward belongs to the hooks of torch's
    checkpointing.
    """
    import torch

    from eager_offload._torch import current_autograd_node, on_module_calls, top_pack_hook

    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or not (self.training and torch.is_grad_enabled()):
                return inner(self, *arguments, **named)
            if top_pack_hook() is not None or current_autograd_node() is not None:
                return inner(self, *arguments, **named)
            if offload.patterns and next(self.parameters(), None) is not None:
                offload.skip_in(self)
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OffloadError):  # in a transform of torch.func, or while a graph is captured
                    stack.enter_context(offload)
                return inner(self, *arguments, **named)

        return call

    patch = on_module_calls(around)
    patch.put_on()
    try:
        yield
    finally:
        patch.take_off()


def _fields(settings: Sequence[str]) -> dict[str, Any]:
    """Returns the fields that ``--settings`` give; later ones override earlier ones.

    Raises:
        ConfigError: a file cannot be read, or does not hold a mapping of fields.
    """
    from eager_offload.config import field_from_text

    fields: dict[str, Any] = {}
    for one in settings:
        name, equals, text = one.partition("=")
        fields |= {name.strip(): field_from_text(name.strip(), text)} if equals else _file(Path(one))
    return fields


def _file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--settings={str(path)!r} is not accepted: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--settings={str(path)!r} is not accepted: it holds no mapping of fields")
    return found


def _report(offload: Offload) -> None:
    """Prints the stats, on the first rank alone."""
    from eager_offload.step_memory import why
    from eager_offload.tiers.ranks import rank

    if rank():
        return
    stats = offload.stats(synchronize=True)
    said = str(stats)
    if not offload.config.enabled:
        said = "switched off"
    elif not stats.offloaded_bytes:
        said = f"nothing moved, because {why(stats, offload.config)}"
    print(f"eager_offload run: {said}", file=sys.stderr)
