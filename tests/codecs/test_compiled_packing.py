"""Eager code packs sizes that come often with compiled kernels: the same bits, whatever the caller has set."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import eager_offload.context
import eager_offload.eager.packing
import eager_offload.eager.saving
import eager_offload.kernels.codecs as module
from eager_offload import OffloadStats
from eager_offload.codecs import BF16, BitMask, BlockFP8, BlockInt, Codec, Narrow, TensorMeta
from eager_offload.codecs.names import is_compiled
from eager_offload.kernels import TorchKernel, as_torch_kernel
from eager_offload.kernels.codecs import CodecKernels
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.programs import Settled, assert_identical, leaf
from tests.threads import collect

pytestmark = pytest.mark.xdist_group("kernels")

ROWS, WIDTH = 32, 64
INT8, FP8 = BlockInt(), BlockFP8()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> CodecKernels:
    """Those of a process that has packed nothing, in which a size is worth it from its first tensor on."""
    found = CodecKernels()
    monkeypatch.setattr(eager_offload.context, "CODECS", found)
    monkeypatch.setattr(eager_offload.eager.packing, "CODECS", found)
    monkeypatch.setattr(eager_offload.eager.saving, "CODECS", found)
    monkeypatch.setattr(module, "_WORTH", 1)
    return found


def steps(backend: Backend, codec: Codec, count: int, *, followed: bool = False) -> tuple[list[Any], OffloadStats]:
    """The gradients of so many steps."""
    offload = backend.offload(codec=codec.name, step_plans=followed)
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


@pytest.mark.parametrize("codec", [INT8, pytest.param(FP8, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("followed", [False, True], ids=["decided", "followed"])
def test_compiled_kernels_pack_the_same_bits(
    users_backend: Backend, kernels: CodecKernels, codec: Codec, followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as none:
        none.setattr(module, "_MOST", 0)
        expected, before = steps(users_backend, codec, 5, followed=followed)
    assert not kernels._kernels
    kernels._packed.clear()
    launched, launch = Counter[str](), TorchKernel.__call__

    def counting(kernel: TorchKernel, *arguments: Any, **named: Any) -> Any:
        launched[kernel.kernel.name] += 1
        return launch(kernel, *arguments, **named)

    monkeypatch.setattr(TorchKernel, "__call__", counting)
    found, stats = steps(users_backend, codec, 5, followed=followed)
    assert_identical(expected, found)
    assert (stats.bytes_out, stats.packed_bytes) == (before.bytes_out, before.packed_bytes)
    assert [(size.codec, size.numel) for size in kernels._kernels] == [(codec, ROWS * WIDTH)]
    # The first step packs by torch's operators, the second begins with what that was worth: tried, then four launches.
    for verb in ("pack", "unpack"):
        assert launched[f"{verb} {codec.name} of 2,048 float32"] == 5


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autograd.graph.save_on_cpu(),
        lambda: FlopCounterMode(display=False),
        lambda: torch.device("meta"),
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    ],
    ids=["autocast", "hooks", "dispatch mode", "default device", "anomalies"],
)
def test_what_the_caller_has_set_changes_nothing_and_compiles_nothing_anew(
    users_backend: Backend, kernels: CodecKernels, around: Callable[[], AbstractContextManager[object]]
) -> None:
    expected, _ = steps(users_backend, FP8, 3)
    compiled = dict(kernels._kernels)
    assert len(compiled) == 1
    x, packed = leaf(ROWS * WIDTH).detach(), torch.empty(2080, dtype=torch.uint8)
    back = torch.empty_like(x)
    FP8.pack(x, packed)
    with torch._dynamo.config.patch(error_on_recompile=True), around():
        kernels.pack(FP8, x, out := torch.zeros_like(packed, device="cpu"))
        kernels.unpack(FP8, out, back)
        kernels.compile_due()
    assert torch.equal(out, packed)
    FP8.unpack(packed, again := torch.empty_like(x))
    assert torch.equal(back, again)
    assert kernels._kernels == compiled
    assert_identical(expected, steps(users_backend, FP8, 3)[0])


def test_compiling_is_done_where_a_step_begins_whatever_modes_it_begins_in(kernels: CodecKernels) -> None:
    x, out = leaf(ROWS * WIDTH).detach(), torch.empty(2080, dtype=torch.uint8)
    kernels.pack(FP8, x, out)
    assert not kernels._kernels, "a pack compiles nothing: the lock is held there"
    with ExitStack() as modes:
        modes.enter_context(FlopCounterMode(display=False))
        modes.enter_context(torch.device("meta"))
        kernels.compile_due()
    assert len(kernels._kernels) == 1


def steps_in_one_context(backend: Backend) -> tuple[list[Any], OffloadStats]:
    """The gradients of four steps inside of one ``with``."""
    x, weights = leaf(ROWS, WIDTH), [leaf(ROWS, WIDTH, seed=seed) for seed in range(2, 6)]
    offload = backend.offload(codec="fp8", step_plans=False)
    gradients = []
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
    return gradients, stats


def test_one_context_around_all_steps_compiles_as_well(users_backend: Backend, kernels: CodecKernels) -> None:
    gradients, _ = steps_in_one_context(users_backend)
    assert len(kernels._kernels) == 1
    assert_identical(gradients[1], gradients[-1])


def test_a_size_is_worth_it_once_enough_of_it_was_packed_and_only_so_many_are(
    kernels: CodecKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WORTH", 3 * 256)
    monkeypatch.setattr(module, "_MOST", 1)
    monkeypatch.setattr(module, "_COUNTED", 2)

    def pack(count: int, times: int) -> None:
        layout = FP8.layout(TensorMeta((count,), (1,), torch.float32))
        for _ in range(times):
            kernels.pack(FP8, torch.ones(count), torch.empty(layout.nbytes, dtype=torch.uint8))

    pack(64, 2)
    kernels.compile_due()
    assert not kernels._kernels
    pack(64, 4)
    pack(128, 4)
    kernels.compile_due()
    assert [size.numel for size in kernels._kernels] == [64]
    for count in range(192, 1024, 64):
        pack(count, 1)
    assert len(kernels._packed) == 2


def test_what_gains_nothing_or_has_holes_or_another_address_is_left_to_the_codec(kernels: CodecKernels) -> None:
    assert not any(map(is_compiled, (BF16(), BitMask(), Narrow())))
    x, whole = torch.ones(64), torch.empty(128, dtype=torch.uint8)
    layout = FP8.layout(TensorMeta.of(x))
    out = whole[: layout.nbytes]
    kernels.pack(FP8, x, out)
    kernels.compile_due()
    assert len(kernels._kernels) == 1
    given: list[Tensor] = [torch.ones(128)[::2], torch.ones(65)[1:], torch.ones(8, 8)]
    for other in given:
        out.zero_()
        kernels.pack(FP8, other, out)
        FP8.pack(other, expected := torch.empty_like(out))
        assert torch.equal(out, expected)
        kernels.unpack(FP8, out, back := torch.zeros_like(other))
        assert torch.equal(back, other)


def test_a_part_of_a_block_is_not_compiled_on_a_cpu(kernels: CodecKernels) -> None:
    """Inductor would leave the end of what is unpacked as it was: see [Note: whole blocks] in ``codecs/rounded.py``."""
    for count in (100, 2080):
        x = leaf(count).detach()
        layout = FP8.layout(TensorMeta.of(x))
        for _ in range(2):
            kernels.pack(FP8, x, out := torch.zeros(layout.nbytes, dtype=torch.uint8))
            kernels.unpack(FP8, out, back := torch.full_like(x, 77))
            FP8.unpack(out, again := torch.empty_like(x))
            assert torch.equal(back, again)
            kernels.compile_due()
    assert not kernels._kernels


def test_a_kernel_with_other_bits_than_the_codec_is_not_used(
    kernels: CodecKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(kernel: Any, impl: str) -> Any:
        """Leaves the last element of what it unpacks as it was."""
        real = as_torch_kernel(kernel, "torch")

        def launch(*given: Tensor, out: Tensor | None = None) -> Tensor:
            last = None if out is None else out[-1].clone()
            found = real(*given) if out is None else real(*given, out=out)
            if out is not None:
                out[-1] = last
            return found

        return launch

    monkeypatch.setattr(module, "as_torch_kernel", forgetful)
    x = leaf(ROWS * WIDTH).detach()
    kernels.pack(FP8, x, out := torch.empty(2080, dtype=torch.uint8))
    (failure,) = kernels.compile_due()
    assert re.search(r"computes other numbers .* packed by torch's own operators", failure)
    assert not kernels._kernels
    kernels.unpack(FP8, out, back := torch.empty_like(x))
    FP8.unpack(out, again := torch.empty_like(x))
    assert torch.equal(back, again)


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


@pytest.mark.parametrize("name", ["eager_offload._torch.compile_fx", "eager_offload.kernels.compiled._capability"])
def test_where_nothing_compiles_it_is_counted_one_warning_says_so_and_the_bits_are_the_same(
    users_backend: Backend, kernels: CodecKernels, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(name, fails, raising=False)
    for codec in (FP8, INT8):  # the second Offload finds that nothing compiles, and says so too
        with pytest.warns(RuntimeWarning, match="no compiler.* packed by torch's own operators in its place") as told:
            found, stats = steps(users_backend, codec, 4)
        assert_identical(found[1][0], found[2][0])
        assert len([one for one in told if "no compiler" in str(one.message)]) == 1
        assert stats.demotions == {"uncompiled_codec": 1}


def test_a_failure_to_compile_in_the_midst_of_a_context_is_counted_too(
    users_backend: Backend, kernels: CodecKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_compile", lambda _: 1 // 0)
    with pytest.warns(RuntimeWarning, match="by zero"):
        gradients, stats = steps_in_one_context(users_backend)
    assert_identical(gradients[1], gradients[-1])
    assert stats.demotions == {"uncompiled_codec": 1}
