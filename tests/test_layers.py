"""Imports point one way: what is below knows nothing of what is above it, lazily or for types neither."""

from __future__ import annotations

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import eager_offload

PACKAGE = Path(eager_offload.__file__).parent
#: What each room may import of the others. What is in no row is a leaf that imports leaves only.
BELOW = {
    "codecs": set(),
    "config": {"codecs"},
    "tiers": {"config", "errors"},
    "runtime": {"tiers"},
    "stats": {"tiers", "runtime"},
    "engine": {"tiers", "runtime", "stats", "schedule", "selection"},
    "eager": {
        *("engine", "tiers", "runtime", "stats", "schedule", "selection", "learning", "marks", "active"),
        *("step_plan", "codecs", "kernels"),
    },
    "compile": {"engine", "tiers", "runtime", "stats", "selection", "marks", "active", "step_plan", "codecs"},
    "plan": {
        *("compile", "tiers", "runtime", "stats", "schedule", "selection", "marks", "skipping", "active"),
        *("observe", "step_plan", "offload", "simulation", "eager", "codecs", "learning"),
    },
    "simulation": {"runtime", "tiers"},
    "graphs": {"runtime", "eager", "offload", "stats", "step_plan", "codecs"},
    "kernels": {"codecs", "observe"},
}
#: The planner's solver: numbers, which know no tensor, no graph and nothing else of the planner. Compilers ask it too.
SOLVER = {f"eager_offload.plan.{name}" for name in ("chain", "paced", "predict", "program", "recompute", "solve")}
LEAVES = {"_torch", "config", "errors", "live_bytes", "machine", "malloc", "module_calls"}


@functools.cache
def imports() -> dict[str, set[str]]:
    """By module, the modules of the package that it imports, wherever in it the import stands."""
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
                full = [f"{node.module}.{one.name}" for one in node.names]
                found[name] |= {one if one in modules else str(node.module) for one in full}
            elif isinstance(node, ast.Import):
                found[name] |= {one.name for one in node.names if one.name in modules}
    return found


def room_of(module: str) -> str:
    """The first name below the package: a folder, or a module of its own."""
    return module.split(".")[1] if "." in module else module


def test_no_module_imports_what_imports_it() -> None:
    list(TopologicalSorter(imports()).static_order())  # raises CycleError, which names the modules


@pytest.mark.parametrize("room", BELOW)
def test_a_room_knows_what_is_below_it_and_nothing_else(room: str) -> None:
    known = {
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if room_of(module) == room and room_of(other) not in {room, *BELOW[room], *LEAVES}
        if not (room == "compile" and other in SOLVER)
    }
    assert known == set()
    assert any(room_of(module) == room for module in imports())


def test_the_solver_knows_numbers_only() -> None:
    assert imports().keys() >= SOLVER
    known = {other for module in SOLVER for other in imports()[module]} - SOLVER
    assert {room_of(other) for other in known} <= {"machine", "stats", "tiers"}
