"""What a kernel is given is checked before anything is launched, and the error has both sides."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import OffloadError
from eager_offload.kernels import Kernel, KernelError, LaunchSpec, Scalar, Signature, TensorSpec, as_torch_kernel

FLOATS = TensorSpec((4, 3), torch.float32)
SPEC = LaunchSpec((1, 1, 1), (32, 1, 1))


def scaled(x: dict[str, Tensor] | Tensor, factor: Tensor, y: Tensor) -> None:
    y.copy_(x * factor)


def kernel(**fields: Any) -> Kernel:
    return Kernel("k", **{"signature": Signature((), (FLOATS,)), "spec": SPEC, "impls": {"torch": scaled}, **fields})


def of(signature: Signature, body: Any = scaled) -> Any:
    return as_torch_kernel(kernel(signature=signature, impls={"torch": body}), "torch")


@pytest.fixture
def scale() -> Any:
    return of(Signature(({"x": FLOATS}, Scalar(torch.float32)), (FLOATS,)))


def test_what_fits_is_computed(scale: Any) -> None:
    x = torch.randn(4, 3)
    assert torch.equal(scale({"x": x}, 3), x * 3)
    out = torch.empty(4, 3)
    assert scale({"x": x}, 0.5, out=out) is out
    assert torch.equal(out, x * 0.5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((torch.ones(4, 3), 1.0), r"expected 2 arguments at \[0\]\['x'\], \[1\], and got 2 at \[0\], \[1\]"),
        (({"x": torch.ones(4, 3)},), "and got 1"),
        (({"y": torch.ones(4, 3)}, 1.0), r"\[0\]\['y'\]"),
        (({"x": torch.ones(3, 4)}, 1.0), r"tensor of \(4, 3\).*one of \(3, 4\)"),
        (({"x": torch.ones(4, 3).double()}, 1.0), r"torch\.float32.*torch\.float64"),
        (({"x": torch.ones(3, 4).t()}, 1.0), r"contiguous.*strides \(1, 4\)"),
        (({"x": torch.ones(4, 3).to_sparse()}, 1.0), "layout torch.sparse_coo"),
        (({"x": [1.0]}, 1.0), "expected 2 arguments"),
        (({"x": 1.0}, 1.0), "got float 1.0"),
        (({"x": torch.ones(4, 3)}, torch.ones(())), "a number that torch.float32 holds, and got tensor"),
        (({"x": torch.ones(4, 3)}, "1"), "a number that torch.float32 holds, and got '1'"),
        (({"x": torch.nested.nested_tensor([torch.ones(3)] * 4)}, 1.0), "tensor of .* and got a nested one"),
        (({"x": torch.nested.nested_tensor([torch.ones(3)] * 4, layout=torch.jagged)}, 1.0), "and got a nested one"),
        (({"x": torch._neg_view(torch.ones(4, 3))}, 1.0), r"negated .* pass its resolve_neg\(\)"),
        (({"x": torch.ones(4, 3, requires_grad=True)}, 1.0), "requires grad, and a kernel has no backward"),
        (({"x": torch.ones(4, 3, device="meta")}, 1.0, torch.empty(4, 3)), "and got 3"),
    ],
)
def test_what_does_not_fit_is_an_error_with_both_sides(scale: Any, given: tuple[Any, ...], says: str) -> None:
    with pytest.raises(KernelError, match=says) as raised:
        scale(*given)
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, OffloadError)


def test_under_no_grad_what_requires_grad_is_taken(scale: Any) -> None:
    x = torch.ones(4, 3, requires_grad=True)
    with torch.no_grad():
        assert not scale({"x": x}, 2).requires_grad


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int8, 128),
        (torch.int8, 0.5),
        (torch.int8, True),
        (torch.bool, 1),
        (torch.uint8, -1),
        (torch.float32, None),
        (torch.float32, True),
        (torch.float32, 1e300),
        (torch.float16, -65505),
        pytest.param(torch.float64, 10**400, id="10**400"),
        (torch.float8_e4m3fn, math.inf),
    ],
)
def test_a_number_that_its_dtype_does_not_hold_is_an_error(dtype: torch.dtype, value: Any) -> None:
    with pytest.raises(KernelError, match=re.escape(f"holds, and got {value!r}")):
        of(Signature((FLOATS, Scalar(dtype)), (FLOATS,)))(torch.ones(4, 3), value)


@pytest.mark.parametrize(
    ("dtype", "value", "held"),
    [
        (torch.float32, 16777217, 16777216.0),  # the nearest that there is
        (torch.float32, math.inf, math.inf),
        (torch.float16, -65504, -65504.0),
        (torch.float32, -(10**30), -1e30),
        (torch.uint16, 65535, 65535.0),
        (torch.float8_e5m2, -math.inf, -math.inf),
        (torch.bool, True, 1.0),
        (torch.bfloat16, math.nan, math.nan),
    ],
)
def test_a_number_that_its_dtype_holds_is_rounded_to_it(dtype: torch.dtype, value: Any, held: float) -> None:
    kernel = of(Signature((Scalar(dtype),), (FLOATS,)), lambda x, y: y.fill_(x.float()))
    assert torch.equal(kernel(value).nan_to_num(77), torch.full((4, 3), held).nan_to_num(77))


def test_an_address_that_is_off_is_an_error_that_says_how_far() -> None:
    kernel = of(Signature((TensorSpec((8,), torch.float32, align=64),), (TensorSpec((8,), torch.float32),)))
    buffer = torch.zeros(64)
    first = -buffer.data_ptr() % 64 // 4
    with pytest.raises(KernelError, match="4 bytes behind a multiple of 64"):
        kernel(buffer[first + 1 : first + 9])


def test_a_conjugate_that_is_not_in_memory_is_an_error() -> None:
    spec, x = TensorSpec((2,), torch.complex64), torch.tensor([1j, 2j]).conj()
    kernel = of(Signature((spec,), (spec,)), lambda x, y: y.copy_(x))
    with pytest.raises(KernelError, match=r"conjugated .* resolve_conj\(\)"):
        kernel(x)
    assert kernel(x.resolve_conj()).tolist() == [-1j, -2j]


def test_all_tensors_are_on_one_device() -> None:
    kernel = of(Signature((FLOATS, FLOATS), (FLOATS,)))
    with pytest.raises(KernelError, match=r"\[0\] on cpu, \[1\] on meta"):
        kernel(torch.ones(4, 3), torch.ones(4, 3, device="meta"))
    with pytest.raises(KernelError, match=r"on cpu.*, and got .* on meta"):
        kernel(torch.ones(4, 3), torch.ones(4, 3), out=torch.ones(4, 3, device="meta"))


def test_numbers_alone_go_where_the_outputs_of_the_caller_are() -> None:
    fills = of(Signature((Scalar(torch.float32),), (FLOATS, FLOATS)), lambda x, y, z: (y.fill_(x), z.copy_(x + y)))
    out = torch.empty(4, 3, device="meta"), torch.empty(4, 3, device="meta")
    assert fills(1.0, out=out)[0] is out[0]
    assert fills(1.0)[1].tolist() == [[2.0] * 3] * 4
    with pytest.raises(KernelError, match=r"the output \[1\]: expected .* on meta, and got .* on cpu"):
        fills(1.0, out=(out[0], torch.empty(4, 3)))


def test_an_output_has_memory_of_its_own(scale: Any) -> None:
    memory = torch.ones(8, 3)
    for out in (memory[:4], memory[2:6]):
        with pytest.raises(
            KernelError, match=r"output \[0\] is written, and shares memory with the argument \[0\]\['x'"
        ):
            scale({"x": memory[:4]}, 2, out=out)
    assert torch.equal(memory, torch.ones(8, 3))
    assert scale({"x": memory[:4]}, 2, out=memory[4:]).data_ptr() == memory[4:].data_ptr()
    empty = of(Signature((FLOATS,), (TensorSpec((0, 3), torch.float32),)), lambda x, y: None)
    empty(memory[:4], out=memory[2:2])  # which shares none


def test_an_output_of_the_caller_is_checked_as_an_argument_is(scale: Any) -> None:
    two = of(Signature((FLOATS,), (FLOATS, FLOATS)), lambda x, one, other: (one.copy_(x), other.copy_(-x)))
    same, x = torch.empty(4, 3), torch.ones(4, 3)
    for call, out, says in (
        (partial(scale, {"x": x}, 1), torch.empty(4), r"one of \(4,\)"),
        (partial(scale, {"x": x}, 1), [torch.empty(4, 3)] * 2, "expected 1 outputs"),
        (partial(two, x), 3, r"expected 2 outputs at \[0\], \[1\], and got 1"),
        (partial(two, x), torch.empty(2, 4, 3), r"expected 2 outputs at \[0\], \[1\], and got 1"),
        (partial(two, x), (same, same), r"the output \[\d\] is written, and shares memory with the output"),
    ):
        with pytest.raises(KernelError, match=says):
            call(out=out)


def test_results_come_in_their_structure_and_what_is_inout_behind_them() -> None:
    signature = Signature((FLOATS,), ({"sum": FLOATS},), inout=(FLOATS,))

    def body(x: Tensor, state: Tensor, total: Tensor) -> None:
        state.add_(x)
        total.copy_(x + state)

    state = torch.ones(4, 3)
    first, second = of(signature, body)(torch.ones(4, 3), state)
    assert second is state
    assert torch.equal(first["sum"], torch.full((4, 3), 3.0))
    assert torch.equal(state, torch.full((4, 3), 2.0))


def test_an_alias_is_written_where_its_input_is() -> None:
    kernel = of(Signature((FLOATS,), (FLOATS,), aliases=((0, 0),)), lambda x, y: y.copy_(x + 1))
    x = torch.zeros(4, 3)
    assert kernel(x) is x
    assert torch.equal(x, torch.ones(4, 3))
    with pytest.raises(KernelError, match="out= is given"):
        kernel(x, out=torch.empty(4, 3))


@pytest.mark.parametrize(
    ("signature", "written", "other"),
    [
        (Signature((FLOATS, FLOATS), (), (FLOATS,)), 2, 0),
        (Signature((), (FLOATS,), (FLOATS, FLOATS)), 0, 1),
        (Signature((FLOATS, FLOATS), (FLOATS,), aliases=((0, 0),)), 0, 1),
    ],
    ids=["inout and an input", "inout and inout", "an alias and another input"],
)
def test_what_is_written_shares_no_memory_that_is_not_declared(signature: Signature, written: int, other: int) -> None:
    memory = torch.ones(8, 3)
    arguments = [torch.ones(4, 3) for _ in (*signature.inputs, *signature.inout)]
    launched: list[int] = []
    kernel = of(signature, lambda *given: launched.append(len(given)))
    arguments[written] = memory[:4]
    for shared in (memory[:4], memory[2:6]):
        arguments[other] = shared
        with pytest.raises(KernelError, match=rf"argument \[{written}\] is written, .* the argument \[{other}\]"):
            kernel(*arguments)
    assert not launched
    arguments[other] = memory[4:]  # beside it is not in it
    kernel(*arguments)
    kernel(*(torch.empty(4, 3, device="meta") for _ in arguments))
    assert len(launched) == 2


# What type checkers refuse is refused when it is made, too.
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Signature((FLOATS,), ()), "writes something"),
        (lambda: Signature((FLOATS,), (FLOATS,), (FLOATS,), ((0, 0),)), "both aliases and inout"),
        (lambda: Signature((FLOATS,), (FLOATS,), aliases=((1, 0),)), "1 inputs and 1 outputs"),
        (lambda: Signature((FLOATS, FLOATS), (FLOATS,), aliases=((0, 0), (1, 0))), "names an output twice"),
        (lambda: Signature((FLOATS,), (FLOATS, FLOATS), aliases=((0, 0), (0, 1))), "names an input twice"),
        (lambda: Signature((FLOATS,), (TensorSpec((4, 3), torch.int8),), aliases=((0, 0),)), "torch.int8"),
        (lambda: Signature((FLOATS,), (FLOATS,), aliases=((0,),)), "pairs of whole numbers"),  # type: ignore[arg-type]
        (lambda: Signature((FLOATS,), (FLOATS,), aliases=3), "pairs of whole numbers"),  # type: ignore[arg-type]
        (lambda: Signature((FLOATS,), (FLOATS,), aliases=((False, False),)), "pairs of whole numbers"),
        (lambda: Signature((Scalar(torch.float32),), (FLOATS,), aliases=((0, 0),)), "a number that"),
        (lambda: Signature((FLOATS,), (Scalar(torch.int8),)), r"at outputs\[0\]: it is TensorSpec"),
        (lambda: Signature((3,), (FLOATS,)), r"has 3 at inputs\[0\]"),
        (lambda: Signature({"x": FLOATS}, (FLOATS,)), "a tuple or a list"),
        (lambda: TensorSpec((1,), "float32"), "dtype='float32'.* it is a torch.dtype"),  # type: ignore[arg-type]
        (lambda: Scalar("float32"), "dtype='float32'.* it is a torch.dtype"),  # type: ignore[arg-type]
        (lambda: Scalar(torch.complex64), "dtype=torch.complex64.* or floating ones"),
        (lambda: Scalar(torch.int4), "dtype=torch.int4.* of 8 bits and more"),
        (lambda: Scalar(torch.float4_e2m1fn_x2), "dtype=torch.float4_e2m1fn_x2"),
        (lambda: TensorSpec((-1,), torch.int8), "from 0 on"),
        (lambda: TensorSpec((1.5,), torch.int8), r"shape=\(1\.5,\)"),  # type: ignore[arg-type]
        (lambda: TensorSpec((True,), torch.int8), r"shape=\(True,\)"),
        (lambda: TensorSpec(4, torch.int8), "shape=4.*in a tuple"),  # type: ignore[arg-type]
        (lambda: TensorSpec((1,), torch.int8, align=12), "a power of two"),
        (lambda: TensorSpec((1,), torch.int8, align=2.0), "a power of two"),  # type: ignore[arg-type]
        (lambda: kernel(impls={}), "nothing"),
        (lambda: kernel(impls=[scaled]), "impls=.* is a Mapping"),
        (lambda: kernel(spec=None), "spec=None .* a LaunchSpec"),
        (lambda: kernel(signature=None), "signature=None .* a Signature"),
        (lambda: kernel(impls={"torch": scaled, "hip": scaled}), "'hip'"),
        (lambda: kernel(impls={"torch": scaled, "cuda": scaled}), "source in CUDA C"),
        (lambda: kernel(impls={"torch": 3}), "cannot be called"),
        (lambda: as_torch_kernel(kernel(), "c++"), "'c\\+\\+'"),
        (lambda: as_torch_kernel(kernel(), "pallas"), "no 'pallas'"),
        (lambda: as_torch_kernel(kernel(), "cuda"), "no 'cuda'"),
    ],
)
def test_what_cannot_be_declared_is_an_error(make: Any, says: str) -> None:
    with pytest.raises(KernelError, match=says):
        make()
