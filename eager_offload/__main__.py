"""``python -m eager_offload``: the commands of the library, each of which is a module too, as launchers take it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from eager_offload.version import VERSION

#: By their names: the module whose ``main`` it is, and what it does.
COMMANDS = {
    "plan": ("eager_offload.planning.command", "what fits and what is to move, before the first step"),
    "doctor": ("eager_offload.doctor", "what this machine offers to offloading, and which settings fit"),
    "report": ("eager_offload.report", "a trace as one page to look at"),
    "run": ("eager_offload.run", "runs a training script, which offloads without a change"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that ``arguments`` begin with, or lists all of them.

    Returns:
        The exit status of the command; 0 for the list, 2 for anything else.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in COMMANDS:
        module, _ = COMMANDS[given[0]]
        status: int = importlib.import_module(module).main(given[1:])
        return status
    if given == ["--version"]:
        print(VERSION)
        return 0
    is_asked = not given or given[0] in ("-h", "--help")
    if not is_asked:
        print(f"eager_offload: {given[0]!r} is not a command", file=sys.stderr)
    print(_usage(), file=sys.stdout if is_asked else sys.stderr)
    return 0 if is_asked else 2


def _usage() -> str:
    listed = [f"  {name:<8}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: python -m eager_offload [--version] ({' | '.join(COMMANDS)}) [ARGUMENTS]...",
            "",
            *listed,
            "",
            "`python -m eager_offload COMMAND --help` lists what a command takes. Launchers take it as a module:",
            "`torchrun -m eager_offload.run train.py`.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
