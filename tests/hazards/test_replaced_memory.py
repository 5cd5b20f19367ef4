"""H36: a storage whose memory is replaced while its copy runs.

``share_memory_()`` (which a queue of ``torch.multiprocessing`` calls) and ``resize_()`` of a storage give it other
memory with the same values and free the old one at once, whatever is still reading it.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.compile import ops
from eager_offload.tiers import disk, memory, pool, spill
from eager_offload.tiers.memory import PAGE, anonymous_slab, move_if_there
from eager_offload.tiers.spill import SpillFile
from tests.hazards.backends import Backend, assert_settled, gate_before
from tests.hazards.programs import Around, Settled, assert_identical, assert_moved
from tests.programs import leaf
from tests.programs.parts.functions import custom

COUNT = 16 * PAGE
pytestmark = pytest.mark.filterwarnings('ignore:eager_offload. tier="host" on a CPU')


class Memory:
    """A tensor on pages of its own: who has them after it is up to the test."""

    def __init__(self, phase: int) -> None:
        self._pages: mmap.mmap | None = mmap.mmap(-1, COUNT + PAGE)
        self.tensor = torch.frombuffer(self._pages, dtype=torch.float32, offset=phase, count=COUNT // 4)
        self.tensor.copy_(leaf(COUNT // 4, grad=False))

    def replace(self, by: str) -> None:
        """The source gives them up: they are written by their next owner, or no tensor has them."""
        self.tensor.share_memory_()
        if by == "another":
            self._pages[:] = b"\x07" * (COUNT + PAGE)
        else:
            self._pages = None


def square(x: Tensor, around: Around, meanwhile: Callable[[], None] = lambda: None) -> Tensor | None:
    w = leaf(COUNT // 4, seed=2)
    with around:
        loss = (w * x * x).sum()  # which saves it twice, and moves it once
    meanwhile()
    del x
    loss.backward()
    return w.grad


@pytest.mark.parametrize(
    ("owner", "name", "phase", "fields", "by"),
    [
        pytest.param(SpillFile, "write", 0, {}, "the system", id="in place"),
        pytest.param(spill, "move_if_there", 4, {}, "another", id="through a buffer"),
        pytest.param(disk, "move_if_there", 0, {"verify": True}, "the system", id="checksummed"),
        pytest.param(pool, "move_if_there", 0, {"tier": "host"}, "the system", id="to the host tier"),
    ],
)
def test_h36_a_source_whose_memory_goes_while_it_is_read_stays_with_its_new_memory(
    owner: object, name: str, phase: int, fields: dict[str, Any], by: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Nor does it count against the disk."""
    monkeypatch.chdir(tmp_path)
    source = Memory(phase)
    expected = square(source.tensor.clone(), nullcontext())
    offload = Offload(**{"tier": "disk", "min_bytes": 0, "keep_last_bytes": 0, **fields})

    def swap() -> None:
        gate.wait_until_reached()
        source.replace(by)
        gate.open()
        with pytest.warns(RuntimeWarning, match="replaced while it was copied"):
            offload.stats(synchronize=True)

    with gate_before(owner, name) as gate:  # where its address has been taken, and is about to be read
        assert_identical(expected, square(source.tensor, offload, swap))
    stats = assert_settled(offload)
    assert (stats.fallbacks, stats.kept_bytes["failed"], stats.shared_bytes) == ({"write_failed": 1}, 2 * COUNT, 0)
    again = leaf(COUNT // 4, seed=3, grad=False)
    assert_identical(square(again, nullcontext()), square(again, Settled(offload)))
    stats = assert_settled(offload)
    assert (stats.fallbacks, stats.bytes_out) == ({"write_failed": 1}, COUNT), "the tier works as before"
    offload.close()


def share(tensor: Tensor) -> None:
    tensor.share_memory_()


def grow(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(2 * tensor.untyped_storage().nbytes())


def grow_and_shrink(tensor: Tensor) -> None:
    storage, nbytes = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
    before, taken = storage.data_ptr(), []
    while storage.data_ptr() == before:  # it must not come back to where it was
        storage.resize_(3 * nbytes)
        taken.append(torch.empty(nbytes, dtype=torch.uint8))
        storage.resize_(nbytes)


@pytest.mark.parametrize("replace", [share, grow, grow_and_shrink], ids=lambda replace: replace.__name__)
@pytest.mark.parametrize("when", ["before it is copied", "on its way", "when it has arrived"])
def test_h36_whenever_memory_is_replaced_backward_is_exact(
    when: str, replace: Callable[[Tensor], None], backend: Backend
) -> None:
    def program(around: Around, arrive: Callable[[], None]) -> object:
        x = leaf(64, 64)
        with around:
            h = x * 2
            swapped = h.detach()
            if when == "before it is copied":
                torch.no_grad()(replace)(swapped)
            loss = (h.sin() * h).sum() + (h.exp() @ h).sum()
        if when == "when it has arrived":
            arrive()
        if when != "before it is copied":
            replace(swapped)
        junk = [torch.full((64, 64), 7.0) for _ in range(50)]
        arrive()
        del h, swapped, junk
        loss.backward()
        return x.grad

    expected, offload = program(nullcontext(), lambda: None), backend.offload()
    backend.sources_change = True
    with backend.gate() as gate, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "eager_offload: offloading failed", RuntimeWarning)

        def arrive() -> None:
            gate.open()
            offload.stats(synchronize=True)

        assert_identical(expected, program(offload, arrive))
    stats = assert_settled(offload)
    assert stats.bytes_out > 0
    # It is saved, and leaves, twice; once where such a step is known.
    assert stats.fallbacks in ([{"write_failed": 2}, {"write_failed": 1}] if when == "on its way" else [{}])


def test_h36_what_is_let_go_before_it_is_copied_and_filled_again_stays(backend: Backend) -> None:
    """As a library does that shards: memory goes after its use in forward, and is there again before backward."""

    def program(around: Around) -> object:
        x = leaf(64, 64)
        with around:
            h = x * 2
            loss = h.sin().sum()
            storage, values = h.untyped_storage(), h.detach().clone()
            storage.resize_(0)
            loss = loss + x.exp().exp().sum()
        storage.resize_(values.nbytes)
        storage.copy_(values.untyped_storage())
        loss.backward()
        return x.grad

    offload = backend.offload()
    assert_identical(program(nullcontext()), program(Settled(offload)))
    stats = assert_settled(offload)
    assert (stats.kept_bytes["layout"], stats.fallbacks) == (64 * 64 * 4, {})
    assert stats.bytes_out == 2 * 64 * 64 * 4


def let_go(tensor: Tensor) -> None:
    if tensor.untyped_storage().resizable():
        tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("replace", [share, let_go], ids=lambda replace: replace.__name__)
def test_h36_what_backward_was_given_may_be_replaced_there(replace: Callable[[Tensor], None], backend: Backend) -> None:
    """All saves share one copy, and each of them is given the same memory for as long as that lives."""

    def program(around: Around, replace: Callable[[Tensor], None]) -> object:
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (h,) = ctx.saved_tensors
            result = gradient * h
            replace(h.detach())
            return result

        x = leaf(64, 64)
        with around:
            h = y = x * 2
            for _ in range(2):
                y = custom(x, backward, h, forward=lambda x, h=h: x * h.detach()) + y
            loss = (y * h.sin()).sum()
        del h, y
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad

    expected, offload = program(nullcontext(), lambda _: None), backend.offload()
    assert_identical(expected, program(Settled(offload), replace))
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.bytes_in > 0


def test_h36_a_graph_waits_for_a_source_whose_memory_was_replaced_and_keeps_its_values() -> None:
    source, offload = Memory(0), Offload(tier="disk", min_bytes=0)
    expected = source.tensor.clone()
    with gate_before(SpillFile, "write") as gate, offload:
        host = ops.offload(source.tensor, config=offload.config_key, wait=False)
        gate.wait_until_reached()
        source.replace("another")
        gate.open()
        with pytest.warns(RuntimeWarning, match="replaced while it was copied"):
            ops.wait_tensor(host, source.tensor)
        source.tensor.zero_()
        assert torch.equal(ops.reload(host, torch.device("cpu"), config=offload.config_key, wait=True), expected)
        del host
    assert assert_settled(offload).fallbacks == {"write_failed": 1}
    offload.close()


@pytest.mark.skipif(memory._reader() is None, reason="the system has no process_vm_readv, or forbids it")
def test_h36_reading_memory_that_is_gone_is_an_error_and_not_the_end_of_the_process() -> None:
    slab, target = anonymous_slab(4 * PAGE), torch.zeros(4 * PAGE, dtype=torch.uint8)
    address = slab.data_ptr()
    slab.copy_(torch.arange(4 * PAGE) % 251)
    move_if_there(target.data_ptr(), address + 3, 4 * PAGE - 3)
    assert torch.equal(target[: 4 * PAGE - 3], slab[3:])
    del slab
    with pytest.raises(OSError, match="Bad address"):
        move_if_there(target.data_ptr(), address, 4 * PAGE)
