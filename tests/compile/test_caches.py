"""What compilers keep on disk serves the same configuration again, in another process too, and no other one."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import eager_offload as eo
from eager_offload.compile.keys import cache_key, hook_pair, key_of
from eager_offload.compile.order import OrderTransfers
from tests.compiler_caches import give_machine_code, take_machine_code
from tests.processes import printed_by

_PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
import eager_offload as eo

torch.set_num_threads(1)
torch._functorch.config.enable_autograd_cache = True

def deep(x, weight):
    for _ in range(2):
        x = (x @ weight).sin().exp()
    return x.sum()

def deep_in_a_region(x, weight):
    with eo.no_offload():
        return deep(x, weight)

for case in json.loads(sys.argv[1]):  # each as if it were the first in its process
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(deep_in_a_region if case.pop("region", False) else deep, backend="inductor")
    torch.manual_seed(0)
    x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    offload = eo.Offload(**case)
    with offload:
        loss = run(x, weight)
    loss.backward()
    found = {f"aot_{name}": counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")}
    found |= {f"fx_{name}": counters["inductor"][f"fxgraph_cache_{name}"] for name in ("miss", "bypass")}
    results = [one.tolist() for one in (loss.detach(), x.grad, weight.grad)]
    print(json.dumps({"results": results, "bytes_in": offload.stats(synchronize=True).bytes_in, **found}))
    offload.close()
"""

FIELDS = {"tier": "disk", "min_bytes": 0, "keep_last_bytes": 0}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_was_made_serves_the_same_in_another_process_and_nothing_else(tmp_path: Path) -> None:
    environment = {**give_machine_code(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def process(*cases: dict[str, Any]) -> list[dict[str, Any]]:
        """What each case said; all processes share one cache."""
        command = [sys.executable, "-c", _PROGRAM, json.dumps([{**FIELDS, **case} for case in cases])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()[-len(cases) :]]

    def counted(said: dict[str, Any]) -> tuple[int, ...]:
        """Hits, misses and bypasses of AOTAutograd's cache, and bypasses of Inductor's."""
        return tuple(said[name] for name in ("aot_hit", "aot_miss", "aot_bypass", "fx_bypass"))

    (first,) = process({})
    assert counted(first) == (0, 1, 0, 0)
    assert first["bytes_in"] > 0
    again, within, other = process({}, {"region": True}, {"min_bytes": 300})
    assert counted(again) == (1, 0, 0, 0)
    assert again["fx_miss"] == 0
    assert again["bytes_in"] == first["bytes_in"]
    assert within["bytes_in"] == 0, "the region was not there when the first was made"
    assert counted(within)[:3] == counted(other)[:3] == (0, 1, 0)
    assert again["results"] == within["results"] == other["results"] == first["results"]
    take_machine_code(tmp_path)


#: Trains by a function that torch.compile is given in a context, or outside, which finds the entries of all others.
_PRECOMPILED = """
import contextlib, sys, torch
from torch._dynamo.precompile_context import PrecompileContext

torch._dynamo.config.caching_precompile = True
offload = contextlib.nullcontext()
if sys.argv[1] == "with":
    import eager_offload as eo
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0)
run = torch.compile(lambda x, weight: (x @ weight).sin().exp().sum(), backend="inductor")
torch.manual_seed(0)
x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
with offload:
    loss = run(x, weight)
loss.backward()
PrecompileContext.save_to_dynamo_cache()
moved = offload.stats(synchronize=True).bytes_in if sys.argv[1] == "with" else 0
print([one.tolist() for one in (loss.detach(), x.grad, weight.grad)], moved > 0, sep="|")
"""


@pytest.mark.long
def test_h72_what_is_kept_precompiled_has_no_transfers(tmp_path: Path) -> None:
    environment = give_machine_code(tmp_path)
    with_it, without = (printed_by("-c", _PRECOMPILED, way, **environment).split("|") for way in ("with", "without"))
    assert with_it[0] == without[0]
    assert (with_it[1].strip(), without[1].strip()) == ("True", "False")
    take_machine_code(tmp_path)


#: Nothing has loaded the compiler before the context is entered.
_FIRST = """
import sys, torch
import eager_offload as eo

x, weight = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)
theirs, offload = torch.compile, eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0)

def deep(x, weight):
    return (x @ weight).sin().exp().cos().sum()

expected = torch.autograd.grad(deep(x, weight), [x, weight])
with offload:
    assert "torch._dynamo" not in sys.modules
    loss = torch.compile(deep, backend="aot_eager")(x, weight)
    assert torch.compile is theirs
assert all(map(torch.equal, torch.autograd.grad(loss, [x, weight]), expected))
stats = offload.stats(synchronize=True)
assert stats.bytes_in > 0 and stats.compiled_regions == 1, stats
"""


@pytest.mark.long
def test_what_is_compiled_first_inside_of_a_context_is_offloaded() -> None:
    printed_by("-W", "ignore", "-c", _FIRST)


_CPP = """
import contextlib, sys, torch
import torch._inductor.config as inductor
import eager_offload as eo

inductor.cpp_wrapper = True

def chain(x, weight):
    y = torch.relu(x @ weight)
    first, second = y.split(y.shape[0] // 2)
    return (first.exp() * second.sin()).mean()

def step(offload):
    torch._dynamo.reset()
    torch.manual_seed(0)
    results, run = [], torch.compile(chain, backend="inductor", dynamic=True)
    for rows in (8, 12):
        x, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        with offload:
            loss = run(x, weight)
        loss.backward()
        results += [loss.detach(), x.grad, weight.grad]
    return results

offload = eo.Offload(tier="disk", disk_path=sys.argv[1], min_bytes=0, keep_last_bytes=0)
assert all(map(torch.equal, step(contextlib.nullcontext()), step(offload)))
assert offload.stats(synchronize=True).bytes_in > 0
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_h72_a_wrapper_in_cpp_takes_what_the_operators_are_given(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "1" \\ %41 \u00e9\n{x}'
    folder.mkdir()
    environment = give_machine_code(tmp_path / "compiled")
    printed_by("-c", _CPP, folder, seconds=560, **environment)
    take_machine_code(tmp_path / "compiled")


def keys(text: str) -> tuple[str, str]:
    """What AOTAutograd and Inductor find a graph by that was compiled for a configuration."""
    (call,) = [node for node in hook_pair(text).pack.graph.nodes if node.op == "call_function"]
    return call.meta["user_cache_hash"], str(OrderTransfers(text=text).uuid())


#: Whatever decides what moves, or when.
FIELDS_THAT_DECIDE: tuple[dict[str, Any], ...] = (
    *({}, {"min_bytes": 300}, {"keep_last_bytes": 300}, {"prefetch_bytes": 1 << 20}, {"tier": "host"}),
    *({"device_budget": 1}, {"device_budget": 2}, {"policy": "free"}),
)


def test_the_sources_and_whatever_decides_are_in_every_key() -> None:
    text = cache_key()
    assert text.startswith(f"eager_offload {eo.__version__} ")
    found = [keys(eo.OffloadConfig(**fields).to_text()) for fields in FIELDS_THAT_DECIDE]
    assert all(one.count(text) == 1 for pair in found for one in pair)
    assert [len(set(some)) for some in zip(*found, strict=True)] == [len(FIELDS_THAT_DECIDE)] * 2


def test_what_auto_has_come_to_is_in_every_key_and_stays_in_a_process() -> None:
    text = eo.OffloadConfig(tier="host", device_budget="auto").to_text()
    budget = key_of(text).removeprefix(f"{text}\n")
    assert int(budget) > 1 << 20
    assert len(f"{int(budget):b}".rstrip("0")) <= 5, "a few leading bits: other processes take the same graphs"
    assert key_of(text) == key_of(text)
    assert all(budget in one for one in keys(text))


#: Says the cache key of the package in each place, in a fork of a process that has torch and nothing of the package.
_REVISIONS = """
import os, sys
import torch
for place in sys.argv[1:]:
    if os.fork() == 0:
        sys.path.insert(0, place)
        import eager_offload.compile.keys as one
        print(one.cache_key(), one.__file__.startswith(place), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.long
def test_a_changed_source_is_another_cache_key_in_a_folder_and_in_an_archive(tmp_path: Path) -> None:
    package = Path(eo.__file__).parent
    for name in ("whole", "changed", "compiled"):
        shutil.copytree(package, tmp_path / name / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "changed" / package.name / "compile" / "order.py", "a") as source:
        source.write("# changed\n")
    ops = tmp_path / "compiled" / package.name / "compile" / "ops.py"
    py_compile.compile(str(ops), cfile=str(ops.with_suffix(".pyc")))
    ops.unlink()
    packed = [shutil.make_archive(str(tmp_path / name), "zip", tmp_path / name) for name in ("whole", "changed")]
    places = [str(tmp_path / name) for name in ("whole", "changed", "compiled")] + packed
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.check_output(
        [sys.executable, "-c", _REVISIONS, *places], env=environment, cwd=tmp_path, text=True
    )
    (whole, *fine), (changed, *_), (compiled, *_), *archives = [line.rsplit(" ", 1) for line in said.splitlines()]
    assert [one[1] for one in ([whole, *fine], *archives)] == ["True"] * 3
    assert [one[0] for one in archives] == [whole, changed]
    assert whole != changed
    assert compiled == f"eager_offload {eo.__version__}", "not all of the sources are there"
