"""Offloading in compiled code: passes over FX graphs, each usable alone.

    choice = choose(forward, backward, num_outputs, config)            # decides which values move
    pair = insert_synchronous(forward, backward, num_outputs, choice, config)
    forward = sink_waits(insert_asynchronous(pair.forward), window_bytes)
    backward = prefetch(insert_asynchronous(pair.backward), ...)

Each pass returns new graphs and leaves its arguments unchanged. On a joint graph of forward and backward:

    boundary = boundary_of(graph, num_outputs=1)
    choice = choose_joint(graph, boundary, config)
    graph = insert_asynchronous(insert_synchronous_joint(graph, boundary, choice, config))

Each node must have its fake tensor in ``meta["val"]``, as in graphs of ``make_fx(f, tracing_mode="fake")`` and of
AOTAutograd.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eager_offload.compile.insert import Pair, insert_asynchronous, insert_synchronous
    from eager_offload.compile.joint import boundary_of, choose_joint, insert_synchronous_joint
    from eager_offload.compile.order import pin, prefetch, sink_waits
    from eager_offload.compile.select import Choice, Group, choose

__all__ = [
    "Choice",
    "Group",
    "Pair",
    "boundary_of",
    "choose",
    "choose_joint",
    "insert_asynchronous",
    "insert_synchronous",
    "insert_synchronous_joint",
    "pin",
    "prefetch",
    "sink_waits",
]

#: Names by module. Imported on first use, because tracing takes a second to import.
_HOMES = {
    "insert": ("Pair", "insert_asynchronous", "insert_synchronous"),
    "joint": ("boundary_of", "choose_joint", "insert_synchronous_joint"),
    "order": ("pin", "prefetch", "sink_waits"),
    "select": ("Choice", "Group", "choose"),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
