"""What a kernel is given is checked before anything is launched, and the error has both sides."""

from __future__ import annotations

import math
import re
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


#: A matrix in a structure, and a number.
SCALE = of(Signature(({"x": FLOATS}, Scalar(torch.float32)), (FLOATS,)))
ADD = of(Signature((FLOATS, FLOATS), (FLOATS,)), lambda x, y, out: out.copy_(x + y))
TWO = of(Signature((FLOATS,), (FLOATS, FLOATS)), lambda x, one, other: (one.copy_(x), other.copy_(-x)))
#: Of a number alone.
FILL = of(Signature((Scalar(torch.float32),), (FLOATS, FLOATS)), lambda x, y, z: (y.fill_(x), z.copy_(x + y)))
EMPTY = of(Signature((FLOATS,), (TensorSpec((0, 3), torch.float32),)), lambda x, y: None)
COMPLEX = of(Signature((TensorSpec((2,), torch.complex64),), (TensorSpec((2,), torch.complex64),)))
ALIGNED = of(Signature((TensorSpec((8,), torch.float32, align=64),), (TensorSpec((8,), torch.float32),)))
ONES, META, MEMORY = torch.ones(4, 3), torch.ones(4, 3, device="meta"), torch.ones(8, 3)


def beside(multiple: int) -> Tensor:
    """Eight numbers that begin four bytes behind a multiple of so many bytes."""
    buffer = torch.zeros(64)
    first = -buffer.data_ptr() % multiple // 4
    return buffer[first + 1 : first + 9]


def test_what_fits_is_computed() -> None:
    x, out, memory = torch.randn(4, 3), torch.empty(4, 3), torch.ones(8, 3)
    assert torch.equal(SCALE({"x": x}, 3), x * 3)
    assert SCALE({"x": x}, 0.5, out=out) is out
    assert torch.equal(out, x * 0.5)
    assert SCALE({"x": memory[:4]}, 2, out=memory[4:]).data_ptr() == memory[4:].data_ptr()
    EMPTY(memory[:4], out=memory[2:2])  # which shares no memory
    assert FILL(1.0, out=(META, META.clone()))[0] is META
    assert FILL(1.0)[1].tolist() == [[2.0] * 3] * 4
    with torch.no_grad():
        assert not SCALE({"x": x.requires_grad_()}, 2).requires_grad


@pytest.mark.parametrize(
    ("call", "given", "out", "says"),
    [
        (SCALE, (ONES, 1.0), None, r"expected 2 arguments at \[0\]\['x'\], \[1\], and got 2 at \[0\], \[1\]"),
        (SCALE, ({"x": ONES},), None, "and got 1"),
        (SCALE, ({"y": ONES}, 1.0), None, r"\[0\]\['y'\]"),
        (SCALE, ({"x": torch.ones(3, 4)}, 1.0), None, r"tensor of \(4, 3\).*one of \(3, 4\)"),
        (SCALE, ({"x": ONES.double()}, 1.0), None, r"torch\.float32.*torch\.float64"),
        (SCALE, ({"x": torch.ones(3, 4).t()}, 1.0), None, r"contiguous.*strides \(1, 4\)"),
        (SCALE, ({"x": ONES.to_sparse()}, 1.0), None, "layout torch.sparse_coo"),
        (SCALE, ({"x": [1.0]}, 1.0), None, "expected 2 arguments"),
        (SCALE, ({"x": 1.0}, 1.0), None, "got float 1.0"),
        (SCALE, ({"x": ONES}, torch.ones(())), None, "a number that torch.float32 holds, and got tensor"),
        (SCALE, ({"x": ONES}, "1"), None, "a number that torch.float32 holds, and got '1'"),
        (SCALE, ({"x": torch.nested.nested_tensor([*ONES])}, 1.0), None, "tensor of .* and got a nested one"),
        (SCALE, ({"x": torch.nested.nested_tensor([*ONES], layout=torch.jagged)}, 1.0), None, "and got a nested one"),
        (SCALE, ({"x": torch._neg_view(ONES)}, 1.0), None, r"negated .* pass its resolve_neg\(\)"),
        (SCALE, ({"x": ONES.clone().requires_grad_()}, 1.0), None, "requires grad, and a kernel has no backward"),
        (SCALE, ({"x": META}, 1.0, torch.empty(4, 3)), None, "and got 3"),
        (SCALE, ({"x": ONES}, 1), torch.empty(4), r"one of \(4,\)"),
        (SCALE, ({"x": ONES}, 1), [torch.empty(4, 3)] * 2, "expected 1 outputs"),
        (SCALE, ({"x": MEMORY[:4]}, 2), MEMORY[:4], r"output \[0\] is written, and shares .* argument \[0\]\['x'"),
        (SCALE, ({"x": MEMORY[:4]}, 2), MEMORY[2:6], r"output \[0\] is written, and shares .* argument \[0\]\['x'"),
        (TWO, (ONES,), 3, r"expected 2 outputs at \[0\], \[1\], and got 1"),
        (TWO, (ONES,), torch.empty(2, 4, 3), r"expected 2 outputs at \[0\], \[1\], and got 1"),
        (TWO, (ONES,), [torch.empty(4, 3)] * 2, r"output \[\d\] is written, and shares memory with the output"),
        (ADD, (ONES, META), None, r"\[0\] on cpu, \[1\] on meta"),
        (ADD, (ONES, ONES), META, r"on cpu.*, and got .* on meta"),
        (FILL, (1.0,), (META, ONES), r"the output \[1\]: expected .* on meta, and got .* on cpu"),
        (COMPLEX, (torch.tensor([1j, 2j]).conj(),), None, r"conjugated .* resolve_conj\(\)"),
        (ALIGNED, (beside(64),), None, "4 bytes behind a multiple of 64"),
    ],
)
def test_what_does_not_fit_is_an_error_with_both_sides(call: Any, given: tuple[Any, ...], out: Any, says: str) -> None:
    with pytest.raises(KernelError, match=says) as raised:
        call(*given, out=out) if out is not None else call(*given)
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, OffloadError)
    assert torch.equal(MEMORY, torch.ones(8, 3)), "nothing was launched"


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
        of(Signature((FLOATS, Scalar(dtype)), (FLOATS,)))(ONES, value)


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


def test_results_come_in_their_structure_and_what_is_inout_behind_them() -> None:
    def body(x: Tensor, state: Tensor, total: Tensor) -> None:
        state.add_(x)
        total.copy_(x + state)

    state = torch.ones(4, 3)
    first, second = of(Signature((FLOATS,), ({"sum": FLOATS},), inout=(FLOATS,)), body)(ONES, state)
    assert second is state
    assert torch.equal(first["sum"], torch.full((4, 3), 3.0))
    assert torch.equal(state, torch.full((4, 3), 2.0))


def test_an_alias_is_written_where_its_input_is() -> None:
    kernel, x = of(Signature((FLOATS,), (FLOATS,), aliases=((0, 0),)), lambda x, y: y.copy_(x + 1)), torch.zeros(4, 3)
    assert kernel(x) is x
    assert torch.equal(x, ONES)
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
        (lambda: as_torch_kernel(kernel(), "cuda"), "no 'cuda'"),
    ],
)
def test_what_cannot_be_declared_is_an_error(make: Any, says: str) -> None:
    with pytest.raises(KernelError, match=says):
        make()
