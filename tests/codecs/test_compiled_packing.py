"""Eager code packs sizes that come often with compiled kernels: the same bits, whatever the caller has set."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import eager_offload.eager.packing
import eager_offload.eager.saved_tensors
import eager_offload.kernels.codecs as module
import eager_offload.offload
from eager_offload import OffloadStats
from eager_offload.codecs import BF16, BitMask, BlockFP8, BlockInt, Codec, Narrow, TensorMeta
from eager_offload.codecs.names import is_compiled
from eager_offload.kernels import TorchKernel, as_torch_kernel
from eager_offload.kernels.codecs import CodecKernels
from tests.hazards.backends import DiskBackend, assert_settled
from tests.hazards.programs import Settled, assert_identical
from tests.programs import leaf
from tests.threads import collect

pytestmark = pytest.mark.xdist_group("kernels")

ROWS, WIDTH = 32, 64
INT8, FP8 = BlockInt(), BlockFP8()
WITHOUT = nullcontext()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> CodecKernels:
    """Those of a process that has packed nothing, in which a size is worth it from its first tensor on."""
    found = CodecKernels()
    monkeypatch.setattr(eager_offload.offload, "CODECS", found)
    monkeypatch.setattr(eager_offload.eager.packing, "CODECS", found)
    monkeypatch.setattr(eager_offload.eager.saved_tensors, "CODECS", found)
    monkeypatch.setattr(module, "_WORTH", 1)
    return found


def steps(disk: DiskBackend, codec: Codec, count: int, **fields: Any) -> tuple[list[Any], OffloadStats]:
    """The gradients of so many steps."""
    offload = disk.offload(codec=codec.name, **fields)
    found = []
    for _ in range(count):
        x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
        with Settled(offload):
            loss = (x.sin() * weight).sum()
        loss.backward()
        found.append([x.grad, weight.grad])
        del loss, x, weight
        collect()
    stats = assert_settled(offload)
    offload.close()
    assert stats.coded_bytes == {codec.name: count * ROWS * WIDTH * 4}, "else the test says nothing"
    return found, stats


def steps_in_one_context(disk: DiskBackend) -> tuple[list[Any], OffloadStats]:
    """The gradients of four steps inside of one ``with``, the first of which packs by torch's own operators."""
    x, weights = leaf(ROWS, WIDTH), [leaf(ROWS, WIDTH, seed=seed) for seed in range(2, 6)]
    offload, gradients = disk.offload(codec="fp8", step_plans=False), []
    with offload:
        for _ in range(4):
            y = x
            for weight in weights:
                y = y.sin() * weight
            loss = y.sum()
            del y
            offload.stats(synchronize=True)
            gradients.append(torch.autograd.grad(loss, weights))
            del loss
            collect()
    stats = assert_settled(offload)
    assert stats.packed_bytes
    assert_identical([gradients[1]] * 2, gradients[2:])
    return gradients, stats


def assert_the_codecs_bits(kernels: CodecKernels, x: Tensor, around: Any = WITHOUT) -> None:
    """``kernels`` pack and unpack ``x`` as the codec itself does, every byte of it; ``around``: what they run in."""
    out = torch.zeros(FP8.layout(TensorMeta.of(x)).nbytes, dtype=torch.uint8)
    expected, back, again = torch.ones_like(out), torch.full_like(x, 77), torch.full_like(x, 55)
    with around:
        kernels.pack(FP8, x, out)
        kernels.unpack(FP8, out, back)
        if around is not WITHOUT:
            kernels.compile_due()
    FP8.pack(x, expected)
    FP8.unpack(expected, again)
    assert torch.equal(out, expected)
    assert torch.equal(back, again)


@pytest.mark.long
@pytest.mark.parametrize("codec", [INT8, FP8], ids=str)
@pytest.mark.parametrize("followed", [False, True], ids=["decided", "followed"])
def test_compiled_kernels_pack_the_same_bits(
    disk: DiskBackend, kernels: CodecKernels, codec: Codec, followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as none:
        none.setattr(module, "_MOST", 0)
        expected, before = steps(disk, codec, 5, step_plans=followed)
    assert not kernels._kernels
    kernels._packed.clear()
    launched, launch = Counter[str](), TorchKernel.__call__

    def counting(kernel: TorchKernel, *arguments: Any, **named: Any) -> Any:
        launched[kernel.kernel.name] += 1
        return launch(kernel, *arguments, **named)

    monkeypatch.setattr(TorchKernel, "__call__", counting)
    found, stats = steps(disk, codec, 5, step_plans=followed)
    assert_identical(expected, found)
    assert (stats.bytes_out, stats.packed_bytes) == (before.bytes_out, before.packed_bytes)
    assert [(size.codec, size.numel) for size in kernels._kernels] == [(codec, ROWS * WIDTH)]
    # The first step packs by torch's operators, the second begins with what that was worth: tried, then four launches.
    assert launched == {f"{verb} {codec.name} of 2,048 float32": 5 for verb in ("pack", "unpack")}


def test_a_pack_compiles_nothing_and_what_the_caller_has_set_changes_nothing(kernels: CodecKernels) -> None:
    """The lock is held in a pack: compiling is done where a step begins, whatever modes it begins in."""
    x = leaf(ROWS * WIDTH).detach()
    assert_the_codecs_bits(kernels, x)
    assert not kernels._kernels
    with FlopCounterMode(display=False), torch.device("meta"):
        kernels.compile_due()
    compiled = dict(kernels._kernels)
    assert len(compiled) == 1
    for around in (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.graph.save_on_cpu(),
        FlopCounterMode(display=False),
        torch.device("meta"),
        torch.autograd.set_detect_anomaly(True, check_nan=False),
    ):
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_the_codecs_bits(kernels, x, around)
        assert kernels._kernels == compiled


def test_one_context_around_all_steps_compiles_as_well(disk: DiskBackend, kernels: CodecKernels) -> None:
    steps_in_one_context(disk)
    assert len(kernels._kernels) == 1


def test_a_size_is_worth_it_once_enough_of_it_was_packed_and_only_so_many_are(
    kernels: CodecKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_WORTH": 3 * 256, "_MOST": 1, "_COUNTED": 2}.items():
        monkeypatch.setattr(module, name, value)

    def pack(count: int, times: int) -> list[int]:
        for _ in range(times):
            assert_the_codecs_bits(kernels, torch.ones(count))
        kernels.compile_due()
        return [size.numel for size in kernels._kernels]

    assert pack(64, 2) == []
    assert pack(64, 1) == pack(128, 4) == [64]
    for count in range(192, 1024, 64):
        pack(count, 1)
    assert len(kernels._packed) == 2


def test_what_gains_nothing_or_has_holes_or_another_address_is_left_to_the_codec(kernels: CodecKernels) -> None:
    """So is a part of a block, on a CPU: see [Note: whole blocks] in ``codecs/rounded.py``."""
    assert not any(map(is_compiled, (BF16(), BitMask(), Narrow())))
    for count in (100, 2080, 64):
        assert_the_codecs_bits(kernels, leaf(count).detach())
        kernels.compile_due()
        assert [size.numel for size in kernels._kernels] == [64] * (count == 64)
    for other in (torch.ones(128)[::2], leaf(65).detach()[1:], torch.ones(8, 8)):
        assert_the_codecs_bits(kernels, other)


def test_a_kernel_with_other_bits_than_the_codec_is_not_used(
    kernels: CodecKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(kernel: Any, impl: str) -> Any:
        """Leaves the last element of what it unpacks as it was."""
        real = as_torch_kernel(kernel, "torch")

        def launch(*given: Tensor, out: Tensor | None = None) -> Tensor:
            if out is None:
                return real(*given)
            last = out[-1].clone()
            real(*given, out=out)
            out[-1] = last
            return out

        return launch

    monkeypatch.setattr(module, "as_torch_kernel", forgetful)
    x = leaf(ROWS * WIDTH).detach()
    assert_the_codecs_bits(kernels, x)
    (failure,) = kernels.compile_due()
    assert re.search(r"computes other numbers .* packed by torch's own operators", failure)
    assert not kernels._kernels
    assert_the_codecs_bits(kernels, x)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory")], ids=repr)
def test_without_memory_to_try_a_kernel_it_is_not_compiled(
    kernels: CodecKernels, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise error

    kernels.pack(FP8, leaf(ROWS * WIDTH).detach(), torch.empty(2080, dtype=torch.uint8))
    monkeypatch.setattr(torch, "linspace", full)
    kernels.compile_due()
    assert not kernels._kernels


@pytest.mark.parametrize("name", ["_torch.compile_fx", "kernels.compiled._capability", "kernels.codecs._compile"])
def test_where_nothing_compiles_it_is_counted_one_warning_says_so_and_the_bits_are_the_same(
    disk: DiskBackend, kernels: CodecKernels, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where a step begins, or in the midst of a context."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(f"eager_offload.{name}", fails, raising=False)
    first = steps_in_one_context if name == "kernels.codecs._compile" else partial(steps, codec=FP8, count=4)
    for run in (first, partial(steps, codec=INT8, count=4)):  # a second Offload finds it too, and says so
        with pytest.warns(RuntimeWarning, match="no compiler.* packed by torch's own operators in its place") as told:
            found, stats = run(disk)
        assert_identical(found[1], found[2])
        assert len([one for one in told if "no compiler" in str(one.message)]) == 1
        assert stats.demotions == {"uncompiled_codec": 1}
