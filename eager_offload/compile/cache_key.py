"""What compilers key on what they keep.

[Note: the text of a configuration]
Dynamo guards on hooks of which there is one pair for each text. It begins with the configuration's own, one line, which
names the ``Offload`` that serves a graph. Where a plan says which part of the movable bytes moves, that is the next
line; and where a budget is ``"auto"``, what that has come to is a part of the keys.
"""

from __future__ import annotations

import pkgutil
import sys
from functools import cache

from eager_offload.compile.cost import free_bytes
from eager_offload.config import OffloadConfig
from eager_offload.version import VERSION, digest

#: Beside the modules of this package: what decides which bytes move, and what the operations in a graph mean.
_OTHERS = (
    *(
        "core/budget.py",
        "config.py",
        "planning/machine.py",
        "marks.py",
        "runtime/base.py",
        "core/schedule.py",
        "core/selection.py",
        "tiers/memory.py",
    ),
    *(f"torch_private/{name}.py" for name in ("__init__", "autograd", "calls", "inductor", "memory")),
    *(f"planning/{name}.py" for name in ("program", "replay")),
)


@cache
def cache_key() -> str:
    """Another one for each version of the library, and for each change of a source that decides what is compiled.

    Compilers key on it what they keep. Where there are no sources to read it is the version alone.
    """
    version = f"eager_offload {VERSION}"
    parts = list[str | bytes]()
    for name in _sources():
        try:
            source = pkgutil.get_data("eager_offload", name)
        except OSError:
            source = None
        if source is None:
            return version
        parts += [name, source]
    return f"{version} {digest(*parts)}"


def text_of(config_key: str, fraction: float) -> str:
    """Returns the text of a configuration beside which a plan says that part of the movable bytes."""
    return f"{config_key}\n{fraction!r}"


def read_text(text: str) -> tuple[str, float | None]:
    """Returns the configuration's own text, and the part of the movable bytes that a plan says, where one does."""
    config_key, _, fraction = text.partition("\n")
    return config_key, float(fraction) if fraction else None


def key_of(text: str) -> str:
    """Returns what compilers key on what they have made for that text."""
    config_key, _ = read_text(text)
    if OffloadConfig.from_text(config_key).device_budget != "auto":
        return text
    return f"{text}\n{free_bytes(config_key)}"


def _sources() -> list[str]:
    folders = [f"{place}/compile" for place in sys.modules["eager_offload"].__path__]
    modules = [f"compile/{one.name}.py" for one in pkgutil.iter_modules(folders)]
    return sorted([*_OTHERS, "compile/__init__.py", *modules])
