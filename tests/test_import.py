"""What importing the package does: nothing but defining names. And where torch's private names are."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import eager_offload as eo
from eager_offload.__main__ import COMMANDS
from eager_offload.torch_private import NAMES as OF_TORCH
from eager_offload.torch_private import require_torch
from eager_offload.torch_private.inductor import NAMES_OF_COMPILER
from tests.processes import printed_by, python

pytestmark = pytest.mark.xdist_group("import")

PACKAGE = Path(eo.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
INTEGRATIONS = sorted((PACKAGE / "integrations").rglob("*.py"))
#: Everything that a user may have and that the core does not need.
FOREIGN = {
    *("accelerate", "expecttest", "hypothesis", "lightning", "matplotlib", "pandas", "pydantic", "pydantic_core"),
    *(
        "pytest",
        "pytorch_lightning",
        "rich",
        "scipy",
        "torchtitan",
        "torchvision",
        "transformers",
        "trl",
        "tyro",
        "verl",
    ),
}

PROGRAM = """
import json, os, sys, threading, warnings
import torch, psutil
import torch.utils.checkpoint
import torch.autograd.graph

def state():
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": psutil.Process().num_threads(),
        "files": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                        if os.path.exists(f"/proc/self/fd/{fd}")) if os.path.exists("/proc/self/fd") else [],
        "enter": id(torch.autograd.graph.saved_tensors_hooks.__enter__),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        "filters": len(warnings.filters),
        "random": torch.get_rng_state().tolist(),
        "settings": [torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype())],
        "environ": dict(os.environ),
        "grad": torch.is_grad_enabled(),
        "children": len(psutil.Process().children()),
        "listing": sorted(os.listdir(".")),
    }

before, modules = state(), set(sys.modules)
from eager_offload import *
Offload
after = state()
print(json.dumps([before, after, sorted(set(sys.modules) - modules)]))
"""

TRAINING = """
import sys, torch
import eager_offload as eo

x = torch.randn(64, 1 << 10, requires_grad=True)
torch.optim.SGD([x], lr=0.1)  # brings in half of the compiler
before, offload = set(sys.modules), eo.Offload(min_bytes=0, keep_last_bytes=0)
with offload:
    loss = x.exp().sum()
loss.backward()
assert offload.stats(synchronize=True).bytes_out > 0
brought = {name for name in set(sys.modules) - before if not name.startswith("eager_offload")}
print(len(brought), sorted(brought & {"networkx", "torch._inductor.lowering", "torch._functorch.partitioners"}))
"""


def test_h49_a_step_of_eager_code_does_not_load_the_rest_of_the_compiler() -> None:
    count, named = printed_by("-c", TRAINING).split(maxsplit=1)
    assert named.strip() == "[]"
    assert int(count) < 150, "some 40 MiB of modules that only a compilation needs"


#: Runs the package as ``python -m`` does, and says on its last line whether that has imported torch.
COMMAND = """
import runpy, sys
try:
    runpy.run_module("eager_offload", run_name="__main__", alter_sys=True)
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_it_takes_without_torch(command: str) -> None:
    *said, end = printed_by("-c", COMMAND, command, "--help").splitlines()
    assert said[0].startswith(f"usage: python -m eager_offload {command} ")
    assert end == "0 False"


def test_the_commands_are_listed_without_torch() -> None:
    *said, end = printed_by("-c", COMMAND).splitlines()
    assert end == "0 False"
    assert all(any(line.startswith(f"  {command} ") for line in said) for command in COMMANDS)
    assert printed_by("-c", COMMAND, "--version").splitlines() == [eo.__version__, "0 False"]
    unknown = python("-m", "eager_offload", "docter")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "'docter' is not a command" in unknown.stderr


#: What a program may do before, and after, it asks for a name of the library.
NAMES = """
import sys
import eager_offload as eo
import eager_offload.planning
assert eo.__version__ and set(eo.__all__) < set(dir(eo)) and not hasattr(eo, "offlod")
assert "torch" not in sys.modules
plan = eo.plan
assert plan.__module__ == "eager_offload.planning.planner"
assert hasattr(sys.modules["torch"].ops.eager_offload, "offload")
import eager_offload.planning.figures
from eager_offload import *
from eager_offload import plan as again
assert eo.plan is again is plan
assert eo.graphs.capture_step and not hasattr(eo, "nothing")
eo.plan = "another"
assert eo.plan == "another"
"""


def test_names_are_there_when_they_are_asked_for_and_the_function_is_not_its_package() -> None:
    printed_by("-W", "error", "-c", NAMES)


def test_importing_changes_nothing_and_brings_in_the_package_and_the_standard_library_alone(tmp_path: Path) -> None:
    before, after, modules = json.loads(printed_by("-W", "error", "-c", PROGRAM, cwd=tmp_path))
    assert after == before
    assert after["threads"] == ["MainThread"]
    assert after["hooks"] is True
    roots = {name.partition(".")[0] for name in modules}
    assert not roots & (FOREIGN | {"numpy"})
    assert roots - sys.stdlib_module_names - {"torch", "psutil"} == {"eager_offload"}


def test_what_the_package_asks_for_is_torch_with_what_that_brings_and_psutil() -> None:
    roots = {name.partition(".")[0] for source in {*SOURCES} - {*INTEGRATIONS} for name, _ in imports_of(source)}
    assert roots - sys.stdlib_module_names == {"torch", "psutil", "plotly", "eager_offload"}  # figures ask for plotly


@pytest.mark.parametrize("source", INTEGRATIONS, ids=lambda source: str(source.relative_to(PACKAGE)))
def test_an_integration_asks_for_its_own_framework_alone(source: Path) -> None:
    own = {source.stem} if source.stem in FOREIGN else set()
    own |= {"pytorch_lightning"} if source.stem == "lightning" else set()
    own |= {"trl", "peft", "accelerate"} if source.stem == "transformers" else set()  # what its users combine it with
    own |= {"transformers"} if source.stem == "trl" else set()  # which it is made of
    own |= {"axolotl", "pydantic"} if source.stem == "axolotl" else set()  # whose configuration is pydantic's
    own |= {"swift"} if source.parent.stem == "swift" else set()
    roots = {name.partition(".")[0] for name, _ in imports_of(source)}
    assert roots - sys.stdlib_module_names <= own | {"torch", "eager_offload"}
    assert list(private_names_of_torch(source)) == []


def test_one_package_uses_few_private_names_of_torch_and_puts_something_there() -> None:
    others = [source for source in SOURCES if source.parent.name != "torch_private"]
    assert {source: used for source in others if (used := {*private_names_of_torch(source)})} == {}
    assert {source: assigned for source in others if (assigned := {*assigned_in_torch(source)})} == {}
    assert "_call_impl" in NAMES_OF_TORCH
    assert len(NAMES_OF_TORCH) <= 64


def imports_of(source: Path) -> Iterator[tuple[str, list[str]]]:
    """The modules that a file imports, with the names that it takes from each, and those of ours that it names so."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: a relative import"
            assert node.module is not None
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            match node.args:
                case [ast.Constant(value=str(module))] if module.split(".")[0] == PACKAGE.name:
                    yield module, []


def private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def private_names_in(source: Path) -> Iterator[str]:
    """The private attributes that a file takes of anything but ``self``, and private names in its texts."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            yield from filter(private, [node.attr])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            last = node.value.replace(":", ".").rpartition(".")[2]
            yield from filter(private, [last] if last.isidentifier() else [])


#: Under what private names torch's modules and objects have what the library uses; the others are its own or Python's.
NAMES_OF_TORCH = {name for source in (PACKAGE / "torch_private").glob("*.py") for name in private_names_in(source)} - {
    "_getframe"
}


def private_names_of_torch(source: Path) -> Iterator[str]:
    """What a file imports from, or reaches into, torch under a name that begins with an underscore.

    Of objects that is known by the names that ``torch_private/`` uses; the library has no such names for its own.
    """
    for module, names in imports_of(source):
        if module.partition(".")[0] == "torch":
            yield from (name for name in (module, *(f"{module}.{name}" for name in names)) if private(name))
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            of_an_object = node.attr in NAMES_OF_TORCH and ast.unparse(node.value) != "self"
            if private(dotted) and (dotted.startswith("torch.") or of_an_object):
                yield dotted
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
            yield from (text for text in texts if text in NAMES_OF_TORCH)


def assigned_in_torch(source: Path) -> Iterator[str]:
    """The attributes of torch's modules and classes that a file sets or deletes, dunders included."""
    tree = ast.parse(source.read_text())
    theirs = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            theirs |= {one.asname or one.name for one in node.names}
        elif isinstance(node, ast.Import):
            theirs |= {one.asname for one in node.names if one.asname and one.name.partition(".")[0] == "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            changed, name = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            changed, name = node.args[0], ast.unparse(node.args[1])
        else:
            continue
        if ast.unparse(changed).partition(".")[0] in theirs:
            yield f"{ast.unparse(changed)}.{name}"


MISSING = """
import importlib, sys
for name in ("accelerate", "lightning", "pytorch_lightning", "transformers"):
    sys.modules[name] = None
for name in ("accelerate", "lightning", "transformers"):
    try:
        importlib.import_module(f"eager_offload.integrations.{name}")
    except ImportError as error:
        print(error)
"""


def test_a_framework_that_is_missing_is_an_error_that_names_the_extra() -> None:
    said = printed_by("-c", MISSING).splitlines()
    for line, name in zip(said, ("accelerate", "lightning", "transformers"), strict=True):
        assert line.startswith(f"eager_offload.integrations.{name} needs {name}, which cannot be imported here (")
        assert line.endswith(f"pip install '.[{name}]' in a checkout of eager_offload")


def test_every_extra_that_an_error_names_is_one() -> None:
    extras = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {one for file in INTEGRATIONS for one in re.findall(r'raise missing\("(\w+)"', file.read_text())}
    assert {"transformers", "verl"} <= named <= {*extras}


def test_a_torch_that_is_too_old_is_an_error_that_says_which_is_needed() -> None:
    for version in ("2.10.1", "2.10.0+cu130", "2.10.9.dev20260101", "1.13.1", "2.9"):
        with pytest.raises(ImportError) as raised:
            require_torch(version)
        said = f"eager_offload needs torch 2.11 or newer, but {version} is installed: upgrade torch"
        assert str(raised.value) == said
    for enough in ("2.11.0", "2.11.0a0+git1234567", "2.13.0+cpu", "2.100.0", "3.0.0", "10.1", "2.11"):
        require_torch(enough)


def test_a_torch_that_lacks_a_name_is_an_error_that_names_it_and_the_versions_that_have_it() -> None:
    assert len({*OF_TORCH}) == len(OF_TORCH)
    require_torch(names=NAMES_OF_COMPILER.values())
    lacking = (*OF_TORCH, "torch:Tensor._no_such_name", "torch:_neither")
    with pytest.raises(ImportError) as raised:
        require_torch("2.16.0", lacking)
    assert str(raised.value) == (
        "eager_offload needs torch.Tensor._no_such_name, which torch 2.11 to 2.15 have and 2.16.0 has not: "
        "install one of those"
    )
