"""Compiled kernels have the bits of their reference, are kept once for each text, and go with their last user."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload.kernels import (
    CapabilityError,
    Kernel,
    KernelError,
    LaunchSpec,
    Scalar,
    Signature,
    TensorSpec,
    as_torch_kernel,
    compiled,
)
from eager_offload.kernels.compiled import kept
from tests.kernels.int8 import int8_blocks
from tests.threads import collect

SPEC = LaunchSpec((1, 1, 1), (32, 1, 1))
#: Magnitudes far apart, zeros, denormals, halves that are rounded to even.
BLOCKS = torch.cat(
    [torch.randn(5, 64, generator=torch.manual_seed(0)) * scale for scale in (1e-40, 1e-6, 1.0, 3e30)]
    + [torch.zeros(1, 64), torch.arange(64).view(1, 64) / 2]
)


def kept_count() -> int:
    """How many compiled kernels are alive."""
    return sum(reference() is not None for reference in compiled._kept.values())


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a test compiles goes with it; the process keeps those of its codecs."""
    monkeypatch.setattr(compiled, "_kept", {})
    yield
    collect()
    assert kept_count() == 0


@pytest.mark.long
def test_what_inductor_compiles_has_the_bits_of_the_reference() -> None:
    kernel = int8_blocks(len(BLOCKS))
    expected = as_torch_kernel(kernel, "torch")(BLOCKS)
    assert expected[0].abs().max() == 127
    compiled = as_torch_kernel(kernel, "inductor")
    for _ in range(2):
        assert all(map(torch.equal, compiled(BLOCKS), expected))
    mine = tuple(torch.full_like(one, 99) for one in expected)
    assert compiled(BLOCKS, out=mine)[0] is mine[0]
    assert all(map(torch.equal, mine, expected))
    # Another one of the same text, by another name for it: nothing is compiled anew.
    assert kept_count() == 1
    again = as_torch_kernel(int8_blocks(len(BLOCKS)))
    assert all(map(torch.equal, again(BLOCKS), expected))
    assert kept_count() == 1


def test_what_is_read_and_written_is_so_once_although_the_first_call_compiles() -> None:
    ones = TensorSpec((8,), torch.float32)
    adds = Kernel(
        "adds", Signature((ones, Scalar(torch.float32)), (), (ones,)), SPEC, {"torch": lambda x, a, y: y.add_(x * a)}
    )
    counts = Kernel(
        "counts", Signature((ones,), (ones,), aliases=((0, 0),)), SPEC, {"torch": lambda x, y: y.copy_(x + 1)}
    )
    add, count = as_torch_kernel(adds, "inductor"), as_torch_kernel(counts, "inductor")
    y = torch.zeros(8)
    for number in range(1, 4):  # one compiled kernel for all numbers
        assert add(torch.ones(8), number, y) is y
        assert count(y) is y
    assert torch.equal(y, torch.full((8,), 1.0 + 1 + 2 + 1 + 3 + 1))
    assert kept_count() == 2


def test_arguments_that_are_one_tensor_in_the_first_call_may_be_two_in_the_next() -> None:
    from torch._inductor.codecache import PyCodeCache

    spec = TensorSpec((8,), torch.float32)
    kernel = Kernel("sub", Signature((spec, spec), (spec,)), SPEC, {"torch": lambda x, y, z: z.copy_(x - y)})
    subtract = as_torch_kernel(kernel, "inductor")
    x, y = torch.ones(8), torch.full((8,), 5.0)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        assert [subtract(*given)[0].item() for given in ((x, x), (x, y), (y, x), (y, y))] == [0, -4, 4, 0]
        assert subtract(torch.nn.Parameter(x), y)[0].item() == -4  # nor is anything compiled anew
    # It goes with its owner, at once; the code that it ran is torch's to hold, which a captured graph may run.
    loaded = [module.__file__ for module in PyCodeCache.modules]
    assert loaded
    assert kept_count() == 1
    del subtract
    assert kept_count() == 0
    assert [module.__file__ for module in PyCodeCache.modules] == loaded


def test_a_tensor_that_a_body_closes_over_is_told_and_auto_computes_all_the_same() -> None:
    spec = TensorSpec((8,), torch.float32)

    def adding(number: float) -> Kernel:
        held = torch.full((8,), number)
        return Kernel("adds", Signature((spec,), (spec,)), SPEC, {"torch": lambda x, y: y.copy_(x + held)})

    with pytest.raises(CapabilityError, match=r"adds: the body cannot be traced .* has to be one of its inputs"):
        as_torch_kernel(adding(1), "inductor")(torch.zeros(8))
    for number in (1.0, 100.0):
        with pytest.warns(RuntimeWarning, match="torch's own operators in its place"):
            assert as_torch_kernel(adding(number))(torch.zeros(8))[0].item() == number


def test_kernels_that_differ_in_the_tensors_that_they_make_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is compiled is kept in the same way.
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    monkeypatch.setattr("eager_offload._torch.compile_fx", lambda graph, _: graph, raising=False)
    spec = TensorSpec((2,), torch.bfloat16)

    def adding(number: float) -> Any:
        def body(x: Tensor, y: Tensor) -> None:
            y.copy_(x + torch.tensor([number, 2], dtype=torch.bfloat16))

        return as_torch_kernel(Kernel("adds", Signature((spec,), (spec,)), SPEC, {"torch": body}), "inductor")

    one, other, same = adding(1), adding(100), adding(1)
    assert [kernel(torch.zeros(2, dtype=torch.bfloat16))[0].item() for kernel in (one, other, same)] == [1, 100, 1]
    assert kept_count() == 2

    def choosing(number: float) -> Any:
        def body(x: Tensor, y: Tensor) -> None:
            y.copy_(torch.cond(x[0] > 0, lambda x: x * number, lambda x: x + number, (x,)))

        return as_torch_kernel(Kernel("chooses", Signature((spec,), (spec,)), SPEC, {"torch": body}), "inductor")

    chosen = [choosing(2), choosing(3)]
    assert [kernel(torch.zeros(2, dtype=torch.bfloat16))[0].item() for kernel in chosen] == [2, 3]
    assert kept_count() == 4


@pytest.mark.parametrize("impl", ["torch", "inductor"])
def test_what_the_caller_has_set_changes_no_bit(impl: str) -> None:
    """Autocast and the default dtype, in the first call or in a later one."""
    spec = TensorSpec((16, 16), torch.float32)

    def body(a: Tensor, b: Tensor, y: Tensor) -> None:
        y.copy_(a @ b + (torch.full((16, 16), 1 + 2.0**-40) - 1) * 2.0**40)  # 1 in float64, 0 in float32

    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    kernel = Kernel("product", Signature((spec, spec), (spec,)), SPEC, {"torch": body})
    expected = as_torch_kernel(kernel, "torch")(a, b)
    for outside_first in (True, False):
        product = as_torch_kernel(kernel, impl)
        if outside_first:
            assert torch.equal(product(a, b), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(product(a, b), expected)
        assert torch.equal(product(a, b), expected)
    torch.set_default_dtype(torch.float64)
    try:
        exact = as_torch_kernel(kernel, "torch")(a, b)
        assert torch.equal(product(a, b), exact)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(product(a, b), expected)


def test_threads_that_call_a_new_kernel_at_once_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = kept

    def counting(text: str, compile_it: Any) -> Any:
        made.append(text)
        return real(text, compile_it)

    monkeypatch.setattr("eager_offload.kernels.compiled.kept", counting)
    spec = TensorSpec((4,), torch.float32)
    kernel = as_torch_kernel(
        Kernel("k", Signature((spec,), (spec,)), SPEC, {"torch": lambda x, y: y.copy_(x * 2)}), "inductor"
    )
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(kernel(torch.ones(4)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.tolist() for one in results] == [[2.0] * 4] * 3
    assert len(made) == 1


def test_where_nothing_compiles_auto_says_so_once_and_computes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("no compiler")

    monkeypatch.setattr("eager_offload._torch.compile_fx", fails, raising=False)
    kernel = int8_blocks(len(BLOCKS))
    with pytest.raises(CapabilityError, match=r"int8_blocks: Inductor has failed here \(OSError: no compiler"):
        as_torch_kernel(kernel, "inductor")(BLOCKS)
    auto = as_torch_kernel(kernel)
    with pytest.warns(RuntimeWarning, match="torch's own operators in its place") as warned:
        results = [auto(BLOCKS) for _ in range(2)]
    assert len(warned) == 1
    for result in results:
        assert all(map(torch.equal, result, as_torch_kernel(kernel, "torch")(BLOCKS)))


def test_a_call_that_is_refused_launches_nothing() -> None:
    launched: list[Tensor] = []
    spec = TensorSpec((4,), torch.float32)
    kernel = as_torch_kernel(
        Kernel("k", Signature((spec,), (spec,)), SPEC, {"torch": lambda *all: launched.extend(all)}), "torch"
    )
    with pytest.raises(KernelError):
        kernel(torch.ones(5))
    assert not launched
    kernel(torch.ones(4))
    assert len(launched) == 2


def test_cuda_is_refused_at_once_where_there_is_none_and_with_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec((4,), torch.float32)

    def kernel(**fields: Any) -> Kernel:
        launch = LaunchSpec((4, 1, 1), (32, 1, 1), **fields)
        return Kernel("k", Signature((spec,), (spec,)), launch, {"torch": print, "cuda": "__global__ void k() {}"})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CapabilityError, match=r"k: impl='cuda' needs a CUDA device, .* take impl='inductor'"):
        as_torch_kernel(kernel(), "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.0")
        with pytest.raises(CapabilityError, match="this torch is built for ROCm"):
            as_torch_kernel(kernel(), "cuda")
    with pytest.raises(CapabilityError, match=r"k: cluster=\(2, 1, 1\), and .* no clusters"):
        as_torch_kernel(kernel(cluster=(2, 1, 1)), "cuda")
    with pytest.raises(CapabilityError, match="k: impl='cuda' takes CUDA tensors, and these are on cpu"):
        as_torch_kernel(kernel(), "cuda")(torch.ones(4))
    monkeypatch.setattr("eager_offload.kernels.cuda.compile_cuda", None)
    with pytest.raises(CapabilityError, match="this torch compiles none"):
        as_torch_kernel(kernel(), "cuda")
