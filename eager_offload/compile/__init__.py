"""Offloading in compiled code: passes over FX graphs, each usable alone.

    choice = choose(forward, backward, num_outputs, config)            what moves, and why the rest stays
    pair = insert_synchronous(forward, backward, num_outputs, choice, config)
    forward = sink_waits(insert_asynchronous(pair.forward), window_bytes)
    backward = prefetch(insert_asynchronous(pair.backward), ...)

Each is a function from graphs to new graphs; what it was given is as it was. On one graph of forward and backward:

    boundary = boundary_of(graph, num_outputs=1)
    choice = choose_joint(graph, boundary, config)
    graph = insert_asynchronous(insert_synchronous_joint(graph, boundary, choice, config))

They ask for graphs whose nodes have the fake tensors that they stand for in ``meta["val"]``, as
``make_fx(f, tracing_mode="fake")`` and AOTAutograd make them.
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

#: By their modules. Importing those imports what tracing needs, which takes a second: not before they are asked for.
_HOMES = {
    "insert": ("Pair", "insert_asynchronous", "insert_synchronous"),
    "joint": ("boundary_of", "choose_joint", "insert_synchronous_joint"),
    "order": ("pin", "prefetch", "sink_waits"),
    "select": ("Choice", "Group", "choose"),
}


def __getattr__(name: str) -> Any:
    """Imports a pass when it is first asked for."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
