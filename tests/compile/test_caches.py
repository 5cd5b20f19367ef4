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
from eager_offload.compile.cache_key import cache_key
from eager_offload.compile.hooks import hook_pair
from eager_offload.compile.inductor import OrderTransfers
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
    return x

def deep_in_a_region(x, weight):
    for _ in range(2):
        with eo.no_offload():
            x = (x @ weight).sin().exp()
    return x

def step(function, offload):
    torch.manual_seed(0)
    x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    run = torch.compile(function, backend="inductor")
    with offload:
        loss = run(x, weight).sum()
    loss.backward()
    return [one.tolist() for one in (loss.detach(), x.grad, weight.grad)]

for case in json.loads(sys.argv[1]):  # each as if it were the first in its process
    torch._dynamo.reset()
    counters.clear()
    function = deep_in_a_region if case.pop("region", False) else deep
    offload = eo.Offload(**case)
    results = step(function, offload)
    stats = offload.stats(synchronize=True)
    print(json.dumps({
        "results": results,
        "bytes_in": stats.bytes_in,
        "aot_hits": counters["aot_autograd"]["autograd_cache_hit"],
        "aot_misses": counters["aot_autograd"]["autograd_cache_miss"],
        "aot_bypasses": counters["aot_autograd"]["autograd_cache_bypass"],
        "fx_misses": counters["inductor"]["fxgraph_cache_miss"],
        "fx_bypasses": counters["inductor"]["fxgraph_cache_bypass"],
    }))
    offload.close()
"""

FIELDS = {"tier": "disk", "min_bytes": 0, "keep_last_bytes": 0}

#: Whatever decides what moves, or when.
OTHERS = (
    *({"min_bytes": 300}, {"keep_last_bytes": 300}, {"prefetch_bytes": 1 << 20}, {"tier": "host"}),
    *({"device_budget": 1, "keep_last_bytes": "auto"}, {"policy": "free", "keep_last_bytes": "auto"}),
)


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

    (first,) = process({})
    assert (first["aot_hits"], first["aot_misses"], first["aot_bypasses"], first["fx_bypasses"]) == (0, 1, 0, 0)
    assert first["bytes_in"] > 0

    again, within, *others = process({}, {"region": True}, *OTHERS)
    assert (again["aot_hits"], again["aot_misses"], again["aot_bypasses"], again["fx_misses"]) == (1, 0, 0, 0)
    assert again["results"] == first["results"]
    assert again["bytes_in"] == first["bytes_in"]
    assert (within["aot_hits"], within["aot_misses"], within["aot_bypasses"]) == (0, 1, 0)
    assert within["bytes_in"] == 0, "the region was not there when the first was made"
    for other, missed in zip(OTHERS, others, strict=True):
        assert (missed["aot_hits"], missed["aot_misses"]) == (0, 1), other
    assert all(one["results"] == first["results"] for one in (within, *others))

    for hit in process({"region": True}, OTHERS[0]):
        assert hit["aot_hits"] == 1
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

offload = eo.Offload(tier="disk", disk_path=sys.argv[1], codec="lossless", min_bytes=0, keep_last_bytes=0)
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


def test_the_cache_key_knows_the_sources() -> None:
    text = cache_key()
    assert text.startswith(f"eager_offload {eo.__version__} ")
    assert str(OrderTransfers().uuid()).count(text) == 1
    assert len({OrderTransfers(None, one).uuid() for one in (None, "{}", '{"min_bytes": 1}')}) == 3
    (call,) = [node for node in hook_pair("{}").pack.graph.nodes if node.op == "call_function"]
    assert text in call.meta["user_cache_hash"]


#: Says the cache key of the package in each place, in a fork of a process that has torch and nothing of the package.
_REVISIONS = """
import os, sys
import torch
for place in sys.argv[1:]:
    if os.fork() == 0:
        sys.path.insert(0, place)
        import eager_offload.compile.cache_key as one
        print(one.cache_key(), one.__file__.startswith(place), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.long
def test_a_changed_source_is_another_cache_key_in_a_folder_and_in_an_archive(tmp_path: Path) -> None:
    package = Path(eo.__file__).parent

    def copied(name: str) -> Path:
        ignored = shutil.ignore_patterns("__pycache__")
        return Path(shutil.copytree(package, tmp_path / name / package.name, ignore=ignored))

    for name in ("whole", "changed", "compiled"):
        copied(name)
    with open(tmp_path / "changed" / package.name / "compile" / "order.py", "a") as source:
        source.write("# changed\n")
    ops = tmp_path / "compiled" / package.name / "compile" / "ops.py"
    py_compile.compile(str(ops), cfile=str(ops.with_suffix(".pyc")))
    ops.unlink()
    packed = [shutil.make_archive(str(tmp_path / name), "zip", tmp_path / name) for name in ("whole", "changed")]
    places = [str(tmp_path / name) for name in ("whole", "changed", "compiled")] + packed
    command = [sys.executable, "-c", _REVISIONS, *places]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line.rpartition(" ") for line in done.stdout.splitlines()]
    assert [one[2] for one in said] == ["True"] * 5, done.stderr
    whole, changed, compiled, *archives = [one[0] for one in said]
    assert archives == [whole, changed]
    assert whole != changed
    assert compiled == f"eager_offload {eo.__version__}", "not all of the sources are there"
