"""Imports point one way: what is below knows nothing of what is above it, lazily or for types neither.

Tests hold the library to its contract, and so know its public names. Those that know more, or reach for a private
attribute of what a public name gives them, are listed in ``tests/internals.txt``, and no further ones may: the list
gets shorter only.

    python -m tests.test_layers     takes those out of the list that know no more than others
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import eager_offload as eo
from tests.test_import import PACKAGE, imports_of

TESTS = Path(__file__).parent
INTERNALS = TESTS / "internals.txt"
#: Packages whose ``__all__`` is public, and modules of which every name is that does not begin with an underscore.
PUBLIC = {f"eager_offload.{name}" for name in ("graphs", "kernels")}
PUBLIC_MODULES = {
    *("eager_offload.__main__", "eager_offload.integrations", "eager_offload.planning"),
    *(f"eager_offload.integrations.{name}" for name in ("accelerate", "lightning", "transformers")),
}

#: Functions whose second argument names an attribute of their first.
_BY_NAME = {"getattr", "setattr", "hasattr", "object", "gate_before"}

#: What chooses for a plan: numbers, which know no tensor, no graph and nothing else of it. Compilers ask it too.
CHOOSER = {f"eager_offload.planning.{name}" for name in ("choose", "problem", "program", "replay")}
#: Modules that train by an ``Offload``, where the rest of their folder is beneath that.
ABOVE = {"eager_offload.compile.backend", "eager_offload.observe.doctor"}
#: What each room may import of the others, from below to above. A room is a module, or a folder with all its modules.
#: Those inside of a folder are `chooser`, and each of ``ABOVE``.
ROOMS: dict[str, set[str]] = {
    "torch_private": set(),
    "errors": set(),
    "names": {"errors"},
    "schedule": set(),
    "budget": set(),
    "version": set(),
    "rates": set(),
    "module_calls": {"torch_private", "tiers"},
    "trace_file": {"errors"},
    "config": {"errors", "names", "schedule"},
    "machine": {"torch_private", "config", "errors", "names", "rates", "runtime", "tiers"},
    "malloc": {"config"},
    "tiers": {"torch_private", "config", "errors", "rates"},
    "live_bytes": {"torch_private", "tiers"},
    "runtime": {"torch_private", "config", "errors", "malloc", "rates", "tiers"},
    "stats": {"config", "live_bytes", "runtime", "tiers"},
    "step_memory": {"config", "stats"},
    "out_of_memory": {"torch_private", "config", "contexts", "kernels", "stats", "step_memory", "tiers"},
    "selection": {"torch_private", "config", "stats"},
    "marks": {"torch_private", "errors", "selection", "tiers"},
    "matched_modules": {"config", "errors", "marks", "module_calls"},
    "contexts": {"torch_private", "config", "errors", "tiers"},
    "in_vain": {"config", "contexts", "errors", "matched_modules", "stats", "step_memory"},
    "step_table": {"budget", "config", "errors", "schedule", "stats", "tiers"},
    "plan_settings": {"config", "errors", "machine", "stats"},
    "kernels": {"torch_private", "config", "errors"},
    "chooser": {"budget", "machine", "schedule", "stats", "tiers"},
    "engine": {
        *(
            "torch_private",
            "config",
            "errors",
            "live_bytes",
            "malloc",
            "runtime",
            "schedule",
            "selection",
            "stats",
            "tiers",
        ),
    },
    "eager": {
        *("torch_private", "budget", "config", "contexts", "engine", "errors", "kernels"),
        *("marks", "runtime", "schedule", "selection", "stats", "step_table", "tiers"),
    },
    "compile": {
        *("torch_private", "config", "contexts", "engine", "errors", "machine", "marks", "names"),
        *(
            "matched_modules",
            "plan_settings",
            "runtime",
            "schedule",
            "selection",
            "chooser",
            "stats",
            "tiers",
            "version",
        ),
    },
    "observe": {
        *("torch_private", "config", "eager", "engine", "errors", "runtime", "selection", "stats"),
        *("step_memory", "tiers", "trace_file", "version"),
    },
    "offload": {
        *("torch_private", "budget", "compile", "config", "contexts", "eager", "engine", "errors"),
        *("in_vain", "kernels", "marks", "matched_modules", "module_calls", "names", "observe", "out_of_memory"),
        *("plan_settings", "runtime"),
        *("stats", "step_memory", "step_table", "tiers"),
    },
    "backend": {"torch_private", "compile", "config", "errors", "matched_modules", "names", "offload"},
    "graphs": {
        "torch_private",
        "config",
        "eager",
        "engine",
        "errors",
        "offload",
        "runtime",
        "stats",
        "step_table",
        "tiers",
    },
    "planning": {
        *("torch_private", "compile", "config", "contexts", "eager", "errors"),
        *("machine", "marks", "matched_modules", "module_calls", "observe", "offload", "plan_settings", "runtime"),
        *("rates", "schedule", "selection", "chooser", "stats", "step_table", "tiers", "version"),
    },
    "eager_offload": {
        *("config", "errors", "machine", "malloc", "marks", "offload", "planning", "stats", "step_table"),
        "version",
    },
    "integrations": {
        *("torch_private", "config", "eager_offload", "errors", "module_calls", "observe", "out_of_memory", "tiers"),
    },
    "doctor": {"torch_private", "config", "errors", "machine", "offload", "tiers", "version"},
    "running": {
        *("torch_private", "config", "contexts", "errors", "offload", "out_of_memory", "stats", "step_memory", "tiers"),
    },
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
    if module in CHOOSER:
        return "chooser"
    if module in ABOVE:
        return module.split(".")[2]
    return module.split(".")[1] if "." in module else module


def test_no_module_imports_what_imports_it() -> None:
    list(TopologicalSorter(imports()).static_order())  # raises CycleError, which names the modules


def test_every_room_has_a_row_and_no_row_is_in_a_cycle() -> None:
    assert imports().keys() >= CHOOSER
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


# -- what tests know --------------------------------------------------------------------------------------------------


def is_public(module: str, name: str | None) -> bool:
    """Whether tests may take ``name`` from a module of the package, or import the module where there is no name."""
    if module == PACKAGE.name:
        found = f"{module}.{name}"
        return name is None or name in eo.__all__ or name == "__version__" or found in PUBLIC | PUBLIC_MODULES
    if module in PUBLIC:
        return name is None or name in importlib.import_module(module).__all__
    return module in PUBLIC_MODULES and not str(name).startswith("_")


@functools.cache
def private_names() -> frozenset[str]:
    """Every attribute, function and class of the package whose name begins with one underscore."""
    named: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    named.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    named.add(name)
                case ast.Constant(value=str(name)) if name.isidentifier():  # as in `__slots__`
                    named.add(name)
    return frozenset(name for name in named if _is_private(name))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_uses_of(tree: ast.Module) -> Iterator[str]:
    """The private attributes of the package that a file takes of anything but its own ``self`` and ``cls``.

    A name that the package shares with torch or Python (``_replace``) counts only where the package has made it.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private_names():
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls") and owner.split(".")[0] != "torch":
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _BY_NAME:
            for given in node.args[1:2]:
                if isinstance(given, ast.Constant) and given.value in private_names():
                    yield f"{ast.unparse(node.args[0])}.{given.value}"


def internals_of(source: Path) -> Iterator[str]:
    """What a file of tests imports, names in a text, or takes of the package and its objects, and is not public."""
    of_the_package = re.compile(rf"{PACKAGE.name}(\.\w+)+")
    for module, names in imports_of(source):
        if module.split(".")[0] == PACKAGE.name:
            yield from (f"{module}.{name}" for name in [*names] or [None] if not is_public(module, name))
    tree = ast.parse(source.read_text())
    yield from private_uses_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("eo", PACKAGE.name):
            named = f"{PACKAGE.name}.{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and of_the_package.fullmatch(node.value):
            named = node.value
        else:
            continue
        part = named.split(".")[1]
        if {part, f"{part}.py"} & {path.name for path in PACKAGE.iterdir()} and not is_public(PACKAGE.name, part):
            yield named


def test_no_further_test_knows_what_is_not_public() -> None:
    listed = INTERNALS.read_text().split()
    know = {path.relative_to(TESTS).as_posix(): [*internals_of(path)] for path in TESTS.rglob("*.py")}
    assert {name: internals for name, internals in know.items() if internals and name not in listed} == {}
    assert [name for name in listed if not know.get(name)] == [], "python -m tests.test_layers takes them out"
    assert listed == sorted(set(listed))


if __name__ == "__main__":
    kept = [name for name in INTERNALS.read_text().split() if (TESTS / name).exists()]
    INTERNALS.write_text("".join(f"{name}\n" for name in kept if any(internals_of(TESTS / name))))
