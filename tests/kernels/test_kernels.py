"""Compiled kernels have the bits of their reference, are kept once for each text, and go with their last user."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload.kernels import CapabilityError, Kernel, LaunchSpec, Scalar, Signature, TensorSpec, as_torch_kernel
from eager_offload.kernels import kernel as home
from eager_offload.kernels.kernel import kept
from tests.threads import collect

SPEC = LaunchSpec((1, 1, 1), (32, 1, 1))
EIGHT = TensorSpec((8,), torch.float32)
#: Magnitudes far apart, zeros, denormals, halves that are rounded to even.
BLOCKS = torch.cat(
    [torch.randn(5, 64, generator=torch.manual_seed(0)) * scale for scale in (1e-40, 1e-6, 1.0, 3e30)]
    + [torch.zeros(1, 64), torch.arange(64).view(1, 64) / 2]
)


def with_torch(x: Tensor, codes: Tensor, exponents: Tensor) -> None:
    """Blocks of eight-bit integers, with scales that are powers of two."""
    _, above = torch.frexp(x.abs().amax(1, keepdim=True))
    exponents.copy_((above - 7).to(torch.int8))
    codes.copy_(torch.round(torch.ldexp(x, 7 - above)).clamp(-127, 127).to(torch.int8))


def int8_blocks(count: int) -> Kernel:
    """So many blocks of 64 numbers, with an exponent for each of them."""
    outputs = (TensorSpec((count, 64), torch.int8), TensorSpec((count, 1), torch.int8))
    signature = Signature((TensorSpec((count, 64), torch.float32),), outputs)
    return Kernel("int8_blocks", signature, SPEC, {"torch": with_torch})


def kernel_of(body: Any, *inputs: Any, impl: str = "inductor", **fields: Any) -> Any:
    """A kernel of eight numbers, unless other specs are given."""
    signature = Signature(inputs or (EIGHT,), **{"outputs": inputs[:1] or (EIGHT,), **fields})
    return as_torch_kernel(Kernel("named", signature, SPEC, {"torch": body}), impl)


def kept_count() -> int:
    """How many compiled kernels are alive."""
    return len(home._kept)


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a test compiles goes with it."""
    monkeypatch.setattr(home, "_kept", weakref.WeakValueDictionary())
    yield
    collect()
    assert kept_count() == 0


@pytest.mark.long
def test_what_is_compiled_has_the_bits_of_the_reference() -> None:
    blocks, impl = BLOCKS, "inductor"
    kernel = int8_blocks(len(blocks))
    expected = as_torch_kernel(kernel, "torch")(blocks)
    assert expected[0].abs().max() == 127
    launch, memory = as_torch_kernel(kernel, impl), torch.empty(blocks.numel() + 1)
    for at in (0, 1, 0):  # at any address
        x = memory[at : at + blocks.numel()].view_as(blocks).copy_(blocks)
        assert all(map(torch.equal, launch(x), expected))
    mine = tuple(torch.full_like(one, 99) for one in expected)
    assert launch(blocks, out=mine)[0] is mine[0]
    assert all(map(torch.equal, mine, expected))
    # Another one of the same text, by another name for it: nothing is compiled anew.
    assert kept_count() == 1
    again = as_torch_kernel(int8_blocks(len(blocks)), impl)
    assert all(map(torch.equal, again(blocks), expected))
    assert kept_count() == 1


def test_what_is_read_and_written_is_so_once_although_the_first_call_compiles() -> None:
    def adds(x: Any, factor: Any, y: Any) -> None:
        y[...] = y[...] + x[...] * factor[...]

    def counts(x: Any, y: Any) -> None:
        y[...] = x[...] + 1

    add = kernel_of(adds, EIGHT, Scalar(torch.float32), outputs=(), inout=(EIGHT,))
    count, y = kernel_of(counts, aliases=((0, 0),)), torch.zeros(8)
    for number in range(1, 4):  # one compiled kernel for all numbers
        assert add(torch.ones(8), number, y) is y
        assert count(y) is y
    assert torch.equal(y, torch.full((8,), 1.0 + 1 + 2 + 1 + 3 + 1))
    with torch.no_grad():
        assert count(parameter := torch.nn.Parameter(y)) is parameter
    assert parameter.tolist() == [10.0] * 8
    assert kept_count() == 2


def test_arguments_that_are_one_tensor_in_the_first_call_may_be_two_in_the_next() -> None:
    from torch._inductor.codecache import PyCodeCache

    subtract = kernel_of(lambda x, y, z: z.copy_(x - y), EIGHT, EIGHT)
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
    for number in (1.0, 100.0):
        held = torch.full((8,), number)

        def adds(x: Tensor, y: Tensor, held: Tensor = held) -> None:
            y.copy_(x + held)

        with pytest.raises(CapabilityError, match=r"named: the body cannot be traced .* use only its inputs"):
            kernel_of(adds)(torch.zeros(8))
        with pytest.warns(RuntimeWarning, match="torch's own operators in its place"):
            assert kernel_of(adds, impl="auto")(torch.zeros(8))[0].item() == number


def test_kernels_that_differ_in_the_tensors_that_they_make_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is compiled is kept in the same way.
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    monkeypatch.setattr("eager_offload.torch_private.inductor.compile_fx", lambda graph, _: graph, raising=False)
    spec, zeros = TensorSpec((2,), torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)

    def adding(number: float) -> Any:
        return kernel_of(lambda x, y: y.copy_(x + torch.tensor([number, 2], dtype=torch.bfloat16)), spec)

    def choosing(number: float) -> Any:
        branches = (lambda x: x * number, lambda x: x + number)
        return kernel_of(lambda x, y: y.copy_(torch.cond(x[0] > 0, *branches, (x,))), spec)

    made = [adding(1), adding(100), adding(1), choosing(2), choosing(3)]
    assert [kernel(zeros)[0].item() for kernel in made] == [1, 100, 1, 2, 3]
    assert kept_count() == 4


@pytest.mark.parametrize("impl", ["torch", "inductor"])
def test_what_the_caller_has_set_changes_no_bit(impl: str) -> None:
    """Autocast and the default dtype, in the first call or in a later one."""
    spec = TensorSpec((16, 16), torch.float32)

    def body(a: Tensor, b: Tensor, y: Tensor) -> None:
        y.copy_(a @ b + (torch.full((16, 16), 1 + 2.0**-40) - 1) * 2.0**40)  # 1 in float64, 0 in float32

    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = kernel_of(body, spec, spec, impl="torch")(a, b)
    for outside_first in (True, False):
        product = kernel_of(body, spec, spec, impl=impl)
        if outside_first:
            assert torch.equal(product(a, b), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(product(a, b), expected)
        assert torch.equal(product(a, b), expected)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(product(a, b), kernel_of(body, spec, spec, impl="torch")(a, b))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(product(a, b), expected)


def test_threads_that_call_a_new_kernel_at_once_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, results = list[str](), list[Tensor]()

    def counting(text: str, compile_it: Any) -> Any:
        made.append(text)
        return kept(text, compile_it)

    monkeypatch.setattr("eager_offload.kernels.kernel.kept", counting)
    kernel = kernel_of(lambda x, y: y.copy_(x * 2))
    threads = [threading.Thread(target=lambda: results.append(kernel(torch.ones(8)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.tolist() for one in results] == [[2.0] * 8] * 3
    assert len(made) == 1


def test_where_nothing_compiles_auto_says_so_once_and_computes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("no compiler")

    monkeypatch.setattr("eager_offload.torch_private.inductor.compile_fx", fails, raising=False)
    kernel = int8_blocks(len(BLOCKS))
    with pytest.raises(CapabilityError, match=r"int8_blocks: Inductor has failed here \(OSError: no compiler"):
        as_torch_kernel(kernel, "inductor")(BLOCKS)
    auto = as_torch_kernel(kernel)
    with pytest.warns(RuntimeWarning, match="torch's own operators in its place") as warned:
        results = [auto(BLOCKS) for _ in range(2)]
    assert len(warned) == 1
    for result in results:
        assert all(map(torch.equal, result, as_torch_kernel(kernel, "torch")(BLOCKS)))


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
