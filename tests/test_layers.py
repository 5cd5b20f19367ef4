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
    *(f"eager_offload.integrations.{name}" for name in ("torchtitan", "trl", "verl")),
}

#: Functions whose second argument names an attribute of their first.
_BY_NAME = {"getattr", "setattr", "hasattr", "object", "gate_before"}

#: Modules that stand lower or higher than their folder. `chooser`: numbers, which know no tensor, no graph and nothing
#: else of a plan; compilers ask them too. `doctor` trains a step, where all else that observes is told of steps.
APART = {
    **{f"planning.{name}": "chooser" for name in ("machine", "measuring", "program", "settings", "simulate")},
    "core.schedule": "schedule",
    "core.modules": "modules",
    "observe.doctor": "doctor",
    "compile.backend": "backend",
}
#: What each room may import of the others, from below to above. A room is a module, or a folder with all its modules.
ROOMS: dict[str, set[str]] = {
    "torch_private": set(),
    "errors": set(),
    "version": set(),
    "schedule": set(),
    "config": {"errors", "schedule"},
    "tiers": {"config", "errors"},
    "runtime": {"config", "errors", "tiers", "torch_private"},
    "stats": {"config", "errors", "tiers", "torch_private"},
    "core": {"config", "errors", "schedule", "stats", "tiers", "torch_private"},
    "marks": {"core", "errors", "tiers", "torch_private"},
    "modules": {"errors", "marks", "tiers", "torch_private"},
    "contexts": {"config", "errors", "tiers", "torch_private"},
    "kernels": {"errors", "torch_private"},
    "chooser": {"config", "core", "errors", "runtime", "schedule", "stats", "tiers", "torch_private"},
    "engine": {"config", "core", "errors", "runtime", "schedule", "stats", "tiers", "torch_private"},
    "eager": {
        *("config", "contexts", "core", "engine", "errors", "marks", "runtime", "schedule", "stats", "tiers"),
        "torch_private",
    },
    "compile": {
        *("chooser", "config", "contexts", "core", "engine", "errors", "marks", "modules", "runtime", "schedule"),
        *("stats", "tiers", "torch_private", "version"),
    },
    "observe": {
        *("config", "contexts", "core", "eager", "engine", "errors", "modules", "runtime", "stats", "tiers"),
        *("torch_private", "version"),
    },
    "offload": {
        *("chooser", "compile", "config", "contexts", "core", "eager", "engine", "errors", "marks", "modules"),
        *("observe", "runtime", "stats", "tiers", "torch_private"),
    },
    "backend": {"compile", "config", "errors", "modules", "offload", "torch_private"},
    "graphs": {"config", "core", "eager", "engine", "errors", "offload", "runtime", "stats", "tiers", "torch_private"},
    "planning": {
        *("chooser", "compile", "config", "contexts", "core", "eager", "errors", "marks", "modules", "observe"),
        *("offload", "runtime", "schedule", "stats", "tiers", "torch_private", "version"),
    },
    "eager_offload": {
        *("chooser", "config", "core", "eager", "errors", "marks", "offload", "planning", "stats", "tiers", "version"),
    },
    "integrations": {
        *("config", "contexts", "core", "eager_offload", "errors", "modules", "observe", "tiers", "torch_private"),
    },
    "doctor": {"chooser", "config", "errors", "offload", "runtime", "tiers", "torch_private", "version"},
    "checking": {"config", "errors", "offload", "planning", "running", "runtime", "version"},
    "running": {"config", "errors", "integrations", "observe", "offload", "stats", "tiers"},
    "__main__": {"config", "doctor", "errors", "observe", "version"},
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
    """Returns the first name below the package, a folder or a module, unless the module stands apart."""
    name = module.partition(".")[2] or module
    return APART.get(name, name.split(".")[0])


def test_no_module_imports_what_imports_it() -> None:
    list(TopologicalSorter(imports()).static_order())  # raises CycleError, which names the modules


def test_every_room_has_a_row_and_no_row_is_in_a_cycle() -> None:
    assert imports().keys() >= {f"eager_offload.{name}" for name in APART}
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
