"""Scratch memory: sums, the largest member of a union, and misalignment, which is told."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eager_offload.kernels import KernelError, LaunchSpec, Slot, StagingTree, Union

BYTES = Slot((16,), torch.uint8)
#: Of multiples of 8 bytes, so that none is misaligned.
slots = st.builds(
    lambda count, dtype: Slot((8, count), dtype, 8),
    st.integers(1, 20),
    st.sampled_from((torch.uint8, torch.bfloat16, torch.float32, torch.int64)),
)


def named(inner: Any) -> Any:
    return st.dictionaries(st.sampled_from("abc"), inner, min_size=1)


shapes = st.recursive(
    slots, lambda inner: st.builds(Union, named(inner)) | st.builds(StagingTree, named(inner)), max_leaves=6
)


def size(member: Any) -> int:
    if isinstance(member, Slot):
        return math.prod(member.shape) * member.dtype.itemsize
    sizes = [size(inner) for inner in member.members.values()]
    return max(sizes) if isinstance(member, Union) else sum(sizes)


@given(named(shapes))
def test_members_lie_behind_each_other_and_those_of_a_union_on_each_other(drawn: dict[str, Any]) -> None:
    tree, at = StagingTree(drawn), 0
    assert tree.nbytes == size(tree)
    buffer = torch.zeros(tree.nbytes + 64, dtype=torch.uint8)
    buffer = buffer[-buffer.data_ptr() % 64 :][: tree.nbytes]
    views = tree.place(buffer)
    assert views.keys() == tree.offsets.keys()
    assert all(
        view.data_ptr() == buffer.data_ptr() + tree.offsets[path] for path, view in views.items() if view.numel()
    )
    for name, member in drawn.items():
        inside = [offset for path, offset in tree.offsets.items() if path.split(".")[0] == name]
        assert min(inside) == at
        at += size(member)
        assert max(inside) < at


def test_equal_layouts_are_one_key_and_what_they_were_made_of_may_change() -> None:
    def launch(members: Any) -> LaunchSpec:
        return LaunchSpec((1, 1, 1), (1, 1, 1), shared=StagingTree(members))

    codes, scales = Slot((16,), torch.int8), Slot((32,), torch.int8)
    for members in ({"codes": codes, "both": Union([codes, scales])}, [codes, StagingTree({"scales": scales})]):
        one = launch(members)
        for other in (launch(copy.copy(members)), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert {one: "known"}[other] == "known"
        members.clear()  # type: ignore[attr-defined]  # a dict and a list have it
        assert one.shared_bytes == 48
    assert launch({"a": codes, "b": scales}) != launch({"b": scales, "a": codes}), "they lie in another order"
    assert StagingTree([codes]) != Union([codes])
    with pytest.raises(TypeError):
        StagingTree({"a": codes}).members["b"] = scales  # type: ignore[index]  # which is to raise


def test_a_slot_that_would_be_misaligned_is_told_with_how_far() -> None:
    with pytest.raises(
        KernelError, match=r"'b' would begin at byte 100, 4 behind a multiple of its alignment 16"
    ) as raised:
        StagingTree({"a": Slot((100,), torch.uint8), "b": Slot((1,), torch.float32)})
    assert "Slot((12,), torch.uint8, align=1)" in str(raised.value)
    StagingTree({"a": Slot((100,), torch.uint8), "pad": Slot((12,), torch.uint8, 1), "b": Slot((1,), torch.float32)})
    inner = Union([StagingTree({"a": Slot((16,), torch.uint8), "b": Slot((1,), torch.int64)})])
    with pytest.raises(KernelError, match=r"'1\.0\.a' would begin at byte 8, 8 behind"):  # a part of another tree, too
        StagingTree([Slot((8,), torch.uint8), inner])


def test_the_largest_launch_is_accepted() -> None:
    LaunchSpec(((1 << 31) - 1, 65535, 65535), (4, 4, 64))
    LaunchSpec((16, 1, 1), (1024, 1, 1))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Slot((-1,), torch.int8), "from 0 on"),
        (lambda: Slot((1,), None), "dtype=None.* it is a torch.dtype"),  # type: ignore[arg-type]
        (lambda: Slot((1,), torch.float32, 4.0), "at least 4"),  # type: ignore[arg-type]
        (lambda: Slot((1,), torch.float32, 2), "at least 4"),
        (lambda: Slot((1,), torch.float32, 24), "a power of two"),
        (lambda: Union([]), "it has members"),
        (lambda: StagingTree({}), "it has members"),
        (lambda: StagingTree("ab"), "it has members"),
        (lambda: StagingTree([3]), "has 3 as its member '0'"),
        (lambda: StagingTree({"a.b": BYTES, "a": StagingTree({"b": BYTES})}), "a member 'a.b': .* no dot"),
        (lambda: Union({"": BYTES}), "a member '': .* not empty"),
        (lambda: StagingTree({1: BYTES, "1": BYTES}), "a member 1: names are texts"),
        (lambda: Union(slot for slot in (BYTES,)), "it has members, in a sequence or by their names"),  # type: ignore[arg-type]
        (lambda: LaunchSpec((1, 1), (1, 1, 1)), "three whole numbers"),  # type: ignore[arg-type]
        (lambda: LaunchSpec((0, 1, 1), (1, 1, 1)), "from 1 on"),
        (lambda: LaunchSpec((1, 1, 1), (32, 32, 2)), "2,048 threads"),
        (lambda: LaunchSpec((1, 1, 1), (1, 1, 65)), "64 threads in its third dimension"),
        (lambda: LaunchSpec((1 << 31, 1, 1), (1, 1, 1)), "2,147,483,647, 65,535 and 65,535 blocks"),
        (lambda: LaunchSpec((1, 1 << 16, 1), (1, 1, 1)), r"grid=\(1, 65536, 1\)"),
        (lambda: LaunchSpec((1, 1, 1), (1, 1, 1), shared=-1), "not below 0"),
        (lambda: LaunchSpec((1, 1, 1), (1, 1, 1), shared=True), "StagingTree, bytes or None"),
        (lambda: LaunchSpec((1, 1, 1), (1, 1, 1), shared="48KiB"), "StagingTree, bytes or None"),
    ],
)
def test_what_cannot_be_declared_is_an_error(make: Any, says: str) -> None:
    with pytest.raises(KernelError, match=says):
        make()


def test_a_buffer_that_does_not_do_is_an_error() -> None:
    tree = StagingTree([Slot((16,), torch.uint8)])
    buffer = torch.zeros(128, dtype=torch.uint8)
    start = -buffer.data_ptr() % 16
    for bad, says in (
        (buffer[start : start + 15], "16 contiguous elements"),
        (buffer.view(torch.int8), "torch.int8"),
        (buffer[::2], "strides"),
        (3, "the scratch buffer is 3"),
        (buffer.to_sparse(), "a tensor of contiguous bytes"),
        (buffer[start + 1 :], "1 bytes behind a multiple of 16"),
    ):
        with pytest.raises(KernelError, match=says):
            tree.place(bad)  # type: ignore[arg-type]
    assert set(tree.place(buffer[start:])) == {"0"}
