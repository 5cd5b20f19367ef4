"""Imports point one way: what is below knows nothing of what is above it, lazily or for types neither."""

from __future__ import annotations

import functools
from graphlib import TopologicalSorter

from tests.test_import import PACKAGE, imports_of

#: The planner's solver: numbers, which know no tensor, no graph and nothing else of the planner. Compilers ask it too.
SOLVER = {f"eager_offload.planning.{name}" for name in ("predict", "program", "recompute", "solve")}
#: What each room may import of the others, from below to above. A room is a module, or a folder with all its modules.
#: Those inside of a folder are `solver`, and `doctor`, which trains a step where all else that observes is told.
ROOMS: dict[str, set[str]] = {
    "_torch": set(),
    "errors": set(),
    "names": {"errors"},
    "pydantic_schema": set(),
    "schedule": set(),
    "version": set(),
    "module_calls": {"_torch"},
    "trace_file": {"errors"},
    "codecs": {"errors"},
    "config": {"codecs", "errors", "names", "pydantic_schema", "schedule"},
    "machine": {"_torch", "config", "errors", "names"},
    "malloc": {"config"},
    "tiers": {"_torch", "config", "errors"},
    "live_bytes": {"_torch", "tiers"},
    "runtime": {"_torch", "config", "errors", "tiers"},
    "stats": {"config", "live_bytes", "runtime", "tiers"},
    "step_memory": {"config", "schedule", "stats"},
    "out_of_memory": {"_torch", "active", "config", "kernels", "stats", "step_memory"},
    "selection": {"_torch", "config", "stats"},
    "marks": {"_torch", "codecs", "errors", "selection", "tiers"},
    "matched_modules": {"codecs", "config", "errors", "marks", "module_calls"},
    "active": {"_torch", "config", "tiers"},
    "step_plan": {"config", "errors", "schedule", "stats"},
    "step_recorder": {"stats", "step_plan"},
    "computed_plan": {"config", "machine", "stats", "step_plan"},
    "plan_settings": {"computed_plan", "config", "errors"},
    "learning": {"step_recorder", "tiers"},
    "kernels": {"_torch", "codecs", "config", "errors"},
    "solver": {"machine", "stats", "tiers"},
    "engine": {
        *("_torch", "config", "errors", "live_bytes", "malloc", "runtime", "schedule", "selection", "stats", "tiers"),
    },
    "eager": {
        *("_torch", "active", "codecs", "computed_plan", "config", "engine", "errors", "kernels", "learning", "marks"),
        *("runtime", "schedule", "selection", "stats", "step_plan", "step_recorder", "tiers"),
    },
    "compile": {
        *("_torch", "active", "codecs", "computed_plan", "config", "engine", "errors", "machine", "marks", "names"),
        *("matched_modules", "runtime", "schedule", "selection", "solver", "stats", "tiers", "version"),
    },
    "context": {"_torch", "active", "eager", "engine", "errors", "kernels", "stats"},
    "observe": {
        *("_torch", "config", "eager", "engine", "errors", "runtime", "selection", "stats"),
        *("step_memory", "tiers", "trace_file", "version"),
    },
    "offload": {
        *("_torch", "active", "codecs", "compile", "computed_plan", "config", "context", "eager", "engine", "errors"),
        *(
            "matched_modules",
            "observe",
            "out_of_memory",
            "plan_settings",
            "runtime",
            "stats",
            "step_memory",
            "step_plan",
            "tiers",
        ),
    },
    "graphs": {"_torch", "config", "eager", "errors", "offload", "runtime", "stats", "step_plan"},
    "planning": {
        *("_torch", "active", "codecs", "compile", "computed_plan", "config", "eager", "errors", "learning", "machine"),
        *("marks", "matched_modules", "module_calls", "observe", "offload", "runtime", "schedule", "selection"),
        *("solver", "stats", "step_plan", "step_recorder", "tiers"),
    },
    "eager_offload": {
        *("codecs", "config", "errors", "machine", "malloc", "marks", "offload", "planning", "stats", "step_plan"),
        "version",
    },
    "integrations": {"_torch", "config", "eager_offload", "errors", "module_calls", "observe", "tiers"},
    "doctor": {"_torch", "config", "errors", "machine", "offload", "runtime", "tiers", "version"},
    "module_contexts": {"_torch", "errors", "offload"},
    "running": {"config", "errors", "module_contexts", "offload", "step_memory", "tiers"},
    "__main__": {"config", "doctor", "errors", "observe", "trace_file", "version"},
}


@functools.cache
def imports() -> dict[str, set[str]]:
    """By module, the modules of the package that it imports, wherever in it the import stands."""
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    return {
        name: {
            full if (full := f"{module}.{one}") in modules else module
            for module, names in imports_of(path)
            if module.split(".")[0] == PACKAGE.name
            for one in names or [""]
        }
        for name, path in modules.items()
    }


def room_of(module: str) -> str:
    """The first name below the package: a folder, or a module of its own."""
    if module in SOLVER:
        return "solver"
    if module == "eager_offload.observe.doctor":
        return "doctor"
    return module.split(".")[1] if "." in module else module


def test_no_module_imports_what_imports_it() -> None:
    list(TopologicalSorter(imports()).static_order())  # raises CycleError, which names the modules


def test_every_room_has_a_row_and_no_row_is_in_a_cycle() -> None:
    assert imports().keys() >= SOLVER
    assert {room_of(module) for module in imports()} == ROOMS.keys()
    list(TopologicalSorter(ROOMS).static_order())


def test_a_room_knows_what_its_row_says_and_nothing_else() -> None:
    known = {
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if room_of(other) not in {room_of(module), *ROOMS[room_of(module)]}
    }
    assert known == set()
