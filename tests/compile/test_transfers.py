"""What a graph asks for, in the order of a device: on the host and on a simulated one.

Tensors move as in a compiled graph, whose compiler uses memory again as soon as it may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload.compile import ops
from eager_offload.compile.ops import bytes_of
from eager_offload.runtime.base import Layout, Stream
from tests.compile.sanitizer import CHANGED, OTHER
from tests.hazards.backends import Backend, DiskBackend, SimulatedBackend, offloader_of
from tests.simulation.simulated import SimulatedRuntime
from tests.threads import collect

CPU = torch.device("cpu")
LATE = pytest.mark.parametrize("late", [False, True], ids=["synchronous", "asynchronous"])


@pytest.fixture
def offload(backend: Backend) -> Iterator[eo.Offload]:
    """One that is active while the test runs."""
    with backend.offload() as one:
        yield one
    collect()


def make(seed: int) -> Tensor:
    """A tensor that an operator has just written."""
    return (torch.arange(24 * 32, dtype=torch.float32).view(24, 32) + seed) * 3


def leave(offload: eo.Offload, x: Tensor, *, late: bool = True) -> Tensor:
    return ops.offload(x, config=offload.config_key, wait=not late)


def come_back(offload: eo.Offload, host: Tensor, *, late: bool = False) -> Tensor:
    return ops.reload(host, CPU, config=offload.config_key, wait=not late)


@LATE
def test_memory_is_used_again_as_soon_as_the_waits_allow(late: bool, offload: eo.Offload) -> None:
    x = make(1)
    host = leave(offload, x, late=late)
    make(2).sum()
    if late:
        ops.wait_tensor(host, x)
    x.zero_()  # the next owner of the memory
    back = come_back(offload, host, late=late)
    make(3).sum()
    if late:
        ops.wait_tensor(back, host)
    assert torch.equal(back * 1, make(1))
    back.fill_(7)  # it belongs to the caller
    assert torch.equal(come_back(offload, host), make(1))
    stats = offload.stats(synchronize=True)
    assert (stats.bytes_out, stats.bytes_in) == (x.nbytes, 2 * x.nbytes)
    assert stats.reloaded_bytes == x.nbytes, "counted once per save"


@pytest.mark.parametrize("refusals", [1, 2])
def test_a_reload_without_room_is_tried_again_when_nothing_is_on_its_way(
    refusals: int, backend: Backend, offload: eo.Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, other = make(1), make(2)
    host, leaving = leave(offload, x, late=False), leave(offload, other)
    allocate, refused = backend.runtime.allocate, list[int]()

    def full(layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        refused.append(offloader_of(offload).inflight_bytes)
        if len(refused) <= refusals:
            raise torch.OutOfMemoryError("no room, on purpose")
        return allocate(layout, device, stream)

    monkeypatch.setattr(backend.runtime, "allocate", full)
    with pytest.raises(torch.OutOfMemoryError) if refusals == 2 else nullcontext():
        assert torch.equal(come_back(offload, host), make(1))
    assert refused[1] == 0, "what was on its way out has left"
    ops.wait_tensor(leaving, other)
    assert torch.equal(come_back(offload, host), make(1)), "the next one finds room"
    assert not offload.stats(synchronize=True).is_approximate


def test_a_slot_is_not_free_while_a_write_goes_on_that_a_stream_alone_waits_for() -> None:
    """Other devices have slots in the same memory, and streams of their own that know nothing of this one's order."""
    with closing(eo.Offload(runtime=SimulatedRuntime(out_bandwidth=1e4), tier="host")) as offload, offload:
        x = make(1)
        host = leave(offload, x)
        ops.wait_tensor(host, x)
        sent = bytes_of(host)
        assert sent is not None
        assert sent.slot is not None
        assert any(not fence.passed() for fence in sent.slot.record.fences)
        assert torch.equal(come_back(offload, host), make(1))
        del sent, host
    assert offload.stats(synchronize=True).bytes_out == x.nbytes


@pytest.mark.parametrize("lost", ["offload", "reload"])
def test_ends_of_a_transfer_that_is_not_waited_for_outlive_it(lost: str, backend: Backend, offload: eo.Offload) -> None:
    x = make(1)
    host, nbytes = leave(offload, x, late=lost == "offload"), x.nbytes
    if lost == "reload":
        come_back(offload, host, late=True)
    del x, host
    collect()
    if isinstance(backend, SimulatedBackend):  # where nothing is carried out before the host waits for it
        used = offloader_of(offload).census().used_bytes
        assert used == nbytes, "what is written or read is not free to be used again"
    make(2).zero_()  # what is freed too early is written here
    offload.stats(synchronize=True)
    assert offloader_of(offload).census().in_flight == 0
    collect()
    assert not any(offloader_of(offload).census())


# -- the sanitizer, which every test of compiled code runs under ------------------------------------------------------


def written_over(x: Tensor) -> Tensor:
    x[3] = 7
    return x


@pytest.mark.parametrize(("kept", "found"), [(written_over, CHANGED), (Tensor.clone, OTHER)])
def test_h35_what_is_wrong_with_a_source_is_reported_at_its_wait(
    kept: Callable[[Tensor], Tensor], found: str, disk: DiskBackend, violations: list[str]
) -> None:
    x = torch.arange(64.0)
    with disk.offload() as offload:
        host = leave(offload, x)
        ops.wait_tensor(host, kept(x))
    assert violations == [found]
    violations.clear()
