"""The three operations by themselves: on a disk and on a simulated device, waited for or not, and as torch sees them.

Tensors move as in a compiled graph, whose compiler uses memory again as soon as it may.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import eager_offload as eo
from eager_offload import contexts
from eager_offload.compile import ops
from eager_offload.runtime.base import Layout, Stream
from eager_offload.tiers.base import MustGrow, Slot
from tests.compile.sanitizer import CHANGED, OTHER
from tests.hazards.backends import (
    Backend,
    DiskBackend,
    SimulatedBackend,
    assert_balanced,
    offloader_of,
    open_when_the_host_waits,
)
from tests.simulation.simulated import SimulatedRuntime
from tests.threads import collect, on_a_thread
from tests.tiers.files import Watched

CPU = torch.device("cpu")


@pytest.fixture
def offload(backend: Backend) -> Iterator[eo.Offload]:
    """One that is active; afterwards it holds nothing."""
    with backend.offload() as one:
        yield one
    collect()
    assert_holds_nothing(one)


def assert_holds_nothing(one: eo.Offload) -> None:
    one.stats(synchronize=True)
    assert not any(number for offloader in one._offloaders.all() for number in offloader.census())


def moved(source: Tensor, text: str, wait: bool) -> Tensor:
    host = ops.offload(source, config=text, wait=wait)
    if not wait:
        ops.wait_tensor(host, source)
    return host


def back(host: Tensor, wait: bool) -> Tensor:
    tensor = ops.reload(host, CPU, wait=wait)
    if not wait:
        ops.wait_tensor(tensor, host)
    return tensor


WAITS = pytest.mark.parametrize("wait", [True, False], ids=["synchronous", "asynchronous"])

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": Tensor.t,
    "a part": lambda x: x[3:17],
    "a part from an odd address": lambda x: x.flatten()[5:777],
    "with gaps": lambda x: x[:, ::3],
    "broadcast": lambda x: x[:1].expand(40, -1),
    "bfloat16": lambda x: x.bfloat16(),
    "complex": lambda x: torch.complex(x, -x),
    "conjugate": lambda x: torch.complex(x, -x).conj(),
    "negative": lambda x: torch.complex(x, -x).conj().imag,
    "one element": lambda x: x[0, 0],
    "nothing": lambda x: x[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@WAITS
def test_what_comes_back_is_what_left(layout: Callable[[Tensor], Tensor], wait: bool, offload: eo.Offload) -> None:
    source = layout(torch.randn(32, 48, generator=torch.Generator().manual_seed(0)))
    expected, phase = source.clone(), source.data_ptr() % 64
    host = moved(source, offload.config_key, wait)
    assert torch.equal(host, expected), "a reader of the host tensor finds the bytes"
    source.zero_() if layout is not LAYOUTS["broadcast"] else source[0].zero_()
    found = back(host, wait)
    assert torch.equal(found, expected)
    assert found.stride() == host.stride() == source.stride()
    if source.numel():
        assert source.is_conj() or source.is_neg() or found.data_ptr() % 64 == phase
        found.clone().zero_() if layout is LAYOUTS["broadcast"] else found.zero_()  # it belongs to the caller
        assert torch.equal(back(host, wait), expected), "each reload is memory of its own"
        stats = offload.stats(synchronize=True)
        assert 2 * stats.bytes_out == stats.bytes_in > 0
        assert stats.offloaded_bytes == stats.reloaded_bytes == source.nbytes, "counted once for each save"


def test_a_view_of_a_host_tensor_brings_back_a_view_of_the_whole(offload: eo.Offload) -> None:
    source = torch.randn(8, 6)
    host = ops.offload(source, config=offload.config_key)
    view = ops.reload(host[2:5].t(), CPU)
    assert torch.equal(view, source[2:5].t())
    assert view.stride() == source[2:5].t().stride()
    assert offload.stats(synchronize=True).bytes_in == source.nbytes


def test_a_copy_of_a_host_tensor_holds_the_bytes_itself(offload: eo.Offload) -> None:
    source = torch.randn(64, 64)
    copy = ops.offload(source, config=offload.config_key).clone()
    for wait in (True, False):
        assert torch.equal(back(copy, wait), source)


def test_operations_in_another_order_are_errors_that_say_what_to_pair(offload: eo.Offload) -> None:
    source = torch.randn(4, 4)
    for waited_for in (source, ops.offload(source, config=offload.config_key)):
        with pytest.raises(eo.OffloadError, match=r"without a pending transfer.*offload.*reload.*wait=False"):
            ops.wait_tensor(waited_for)
    host = ops.offload(source, config=offload.config_key, wait=False)
    with pytest.raises(eo.OffloadError, match="before the offload was waited for"):
        ops.reload(host, CPU)
    ops.wait_tensor(host, source)


@pytest.mark.filterwarnings("ignore:eager_offload. autograd recorded operators:RuntimeWarning")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.randn(4, requires_grad=True), r"has no gradient.*torch\.no_grad\(\)"),
        (torch.eye(4).to_sparse(), "strided"),
    ],
)
def test_what_no_operation_takes_is_refused(source: Tensor, message: str, offload: eo.Offload) -> None:
    with pytest.raises(eo.OffloadError, match=message):
        ops.offload(source, config=offload.config_key)
    if source.requires_grad:
        with torch.no_grad():
            ops.offload(source, config=offload.config_key)


def test_outside_of_every_context_one_for_the_process_serves(tmp_path: Path) -> None:
    text = eo.OffloadConfig(tier="disk", disk_path=tmp_path).to_text()
    source = torch.randn(16, 16)
    host = ops.offload(source, config=text)
    standing = eo.Offload.serving(tier="disk", disk_path=tmp_path)
    assert standing is eo.Offload.serving(eo.OffloadConfig(disk_path=tmp_path, tier="disk"))
    assert standing.stats(synchronize=True).offloaded_bytes == source.nbytes
    with eo.Offload(tier="disk", disk_path=tmp_path) as inner:
        assert eo.Offload.serving(tier="disk", disk_path=tmp_path) is inner
    assert torch.equal(ops.reload(host, CPU), source)
    del host
    standing.close()


def test_a_thread_that_has_the_hooks_is_served_by_the_one_that_was_entered_last(offload: eo.Offload) -> None:
    """As autograd's own threads have them, for what a backward saves."""
    source = torch.randn(16, 16)

    def run() -> None:
        with torch.autograd.graph.saved_tensors_hooks(*offload._hook_pair):
            ops.offload(source, config=offload.config_key)

    on_a_thread(run)
    assert offload.stats(synchronize=True).offloaded_bytes == source.nbytes


def test_h41_a_tier_grows_without_the_lock(offload: eo.Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = offload.offloader_of(CPU)
    (tier,) = lane.tiers
    reserve, owned = tier.reserve, list[bool]()

    def at_hand(nbytes: int) -> Slot | None:
        raise MustGrow

    def growing(nbytes: int) -> Slot | None:
        owned.append(lane.lock._is_owned())
        return reserve(nbytes)

    monkeypatch.setattr(tier, "at_hand", at_hand)
    monkeypatch.setattr(tier, "reserve", growing)
    source = torch.randn(64, 64)
    host = ops.offload(source, config=offload.config_key)
    assert owned == [False]
    assert offload.stats(synchronize=True).stall_seconds > 0
    assert torch.equal(ops.reload(host, CPU), source)


def test_outside_of_every_context_what_an_interrupt_has_crashed_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = eo.Offload(tier="disk", disk_path=tmp_path, min_bytes=0)
    source = torch.randn(64, 64)
    monkeypatch.setattr(contexts.process, "make_owner", lambda config: one)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(one.offloader_of(CPU), "reserve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ops.offload(source, config=one.config_key)
    assert torch.equal(ops.reload(ops.offload(source, config=one.config_key), CPU), source)
    stats = one.stats(synchronize=True)
    assert stats.bytes_out == stats.bytes_in == source.nbytes
    assert stats.is_approximate
    contexts._default_owners.pop(one.config_key)
    one.close()


def test_a_wait_for_what_leaves_counts_as_the_windows(disk: DiskBackend) -> None:
    offload, source = disk.offload(), torch.randn(64, 64)
    with offload:
        ops.offload(source, config=offload.config_key)  # the file grows, which is a stall as well
        offload.reset_stats()
        with disk.gate() as gate, ThreadPoolExecutor(1) as pool:
            opened = pool.submit(open_when_the_host_waits, gate, offload)
            ops.offload(source, config=offload.config_key, region="")
            opened.result()
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out == source.nbytes
    assert stats.seconds > stats.window_stall_seconds == stats.stall_seconds > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads its own size from /proc")
@WAITS
def test_without_room_anywhere_an_error_says_so_and_the_next_call_goes_on(wait: bool, disk: DiskBackend) -> None:
    one = disk.offload(disk_budget=1)
    with one:
        source = torch.full((1 << 26,), 3.0)  # 256 MiB
        with pytest.warns(RuntimeWarning, match="no room"), at_most(1 << 26), pytest.raises(eo.CapacityError) as caught:
            moved(source, one.config_key, wait)
        assert str(source.nbytes) in str(caught.value)
        assert "raise host_budget or disk_budget" in str(caught.value)
        del caught
        host = moved(source[:64], one.config_key, wait)
        assert torch.equal(ops.reload(host, CPU), source[:64])
        del host
        collect()
    assert_holds_nothing(one)


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Lets this process take that many more bytes of addresses."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@WAITS
@pytest.mark.parametrize(("budget", "reason"), [({"disk_budget": 1}, "budget"), ({}, "failed")])
def test_bytes_that_cannot_leave_are_copied(
    budget: dict[str, int], reason: str, wait: bool, watched: Callable[..., tuple[eo.Offload, Watched]]
) -> None:
    one, file = watched(**budget)
    file.on_write = OSError(5, "on purpose")
    with one:
        source = torch.randn(64, 64)
        expected = source.clone()
        with pytest.warns(RuntimeWarning, match="no room|failed"):
            host = moved(source, one.config_key, wait)
    source.zero_()
    found = back(host, wait)
    assert torch.equal(found, expected)
    found.zero_()
    assert torch.equal(ops.reload(host, CPU), expected), "each reload is memory of its own"
    stats = one.stats(synchronize=True)
    assert stats.kept_bytes == {reason: source.nbytes}
    assert_balanced(stats)
    assert stats.fallbacks == {{"budget": "budget", "failed": "write_failed"}[reason]: 1}


# -- in the order of a device -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusals", [1, 2])
def test_a_reload_without_room_is_tried_again_when_nothing_is_on_its_way(
    refusals: int, backend: Backend, offload: eo.Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, other = torch.randn(24, 32), torch.randn(24, 32)
    host, leaving = moved(x, offload.config_key, True), ops.offload(other, config=offload.config_key, wait=False)
    allocate, refused = backend.runtime.allocate, list[int]()

    def full(layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        refused.append(offloader_of(offload).inflight_bytes)
        if len(refused) <= refusals:
            raise torch.OutOfMemoryError("no room, on purpose")
        return allocate(layout, device, stream)

    monkeypatch.setattr(backend.runtime, "allocate", full)
    with pytest.raises(torch.OutOfMemoryError) if refusals == 2 else nullcontext():
        assert torch.equal(back(host, True), x)
    assert refused[1] == 0, "what was on its way out has left"
    ops.wait_tensor(leaving, other)
    assert torch.equal(back(host, True), x), "the next one finds room"
    assert not offload.stats(synchronize=True).is_approximate


def test_a_slot_is_not_free_while_a_write_goes_on_that_a_stream_alone_waits_for() -> None:
    """Other devices have slots in the same memory, and streams of their own that know nothing of this one's order."""
    with closing(eo.Offload(runtime=SimulatedRuntime(out_bandwidth=1e4), tier="host")) as offload, offload:
        x = torch.randn(24, 32)
        host = moved(x, offload.config_key, False)
        sent = ops.bytes_of(host)
        assert sent is not None
        assert sent.slot is not None
        assert any(not fence.passed() for fence in sent.slot.record.fences)
        assert torch.equal(back(host, True), x)
        del sent, host
    assert offload.stats(synchronize=True).bytes_out == x.nbytes


@pytest.mark.parametrize("lost", ["offload", "reload"])
def test_ends_of_a_transfer_that_is_not_waited_for_outlive_it(lost: str, backend: Backend, offload: eo.Offload) -> None:
    x = torch.randn(24, 32) * 3
    host, nbytes = ops.offload(x, config=offload.config_key, wait=lost == "reload"), x.nbytes
    if lost == "reload":
        ops.reload(host, CPU, wait=False)
    del x, host
    collect()
    if isinstance(backend, SimulatedBackend):  # where nothing is carried out before the host waits for it
        used = offloader_of(offload).census().used_bytes
        assert used == nbytes, "what is written or read is not free to be used again"
    (torch.randn(24, 32) * 3).zero_()  # what is freed too early is written here
    offload.stats(synchronize=True)
    assert offloader_of(offload).census().in_flight == 0


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
        host = ops.offload(x, config=offload.config_key, wait=False)
        ops.wait_tensor(host, kept(x))
    assert violations == [found]
    violations.clear()


# -- as torch sees them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [torch.randn(4, 6), torch.randn(4, 6).t(), torch.randn(3), torch.empty(0, 2)])
def test_torch_finds_no_fault_with_offload_and_reload(source: Tensor, disk: DiskBackend) -> None:
    with disk.offload() as offload:
        opcheck(ops.offload, (source,), {"config": offload.config_key})
        opcheck(ops.reload, (ops.offload(source, config=offload.config_key), CPU))
        opcheck(ops.reload, (source, CPU))


@pytest.mark.parametrize(
    "subtest", ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
)
def test_torch_finds_no_fault_with_the_form_of_a_wait(subtest: str) -> None:
    """It copies what it is given, and a copy has no transfer pending; of nothing there is nothing to wait for."""
    opcheck(ops.wait_tensor, (torch.empty(0), torch.empty(3)), test_utils=subtest)
    opcheck(ops.wait_tensor, (torch.empty(0),), test_utils=subtest)


@pytest.mark.parametrize("operation", [ops.offload, ops.reload, ops.wait_tensor])
def test_graphs_keep_them_and_cuda_graphs_are_cut_around_them(operation: torch._ops.OpOverload) -> None:
    assert torch.Tag.cudagraph_unsafe in operation.tags
    graph = torch.fx.Graph()
    graph.call_function(operation, (graph.placeholder("x"),))
    graph.output(())
    graph.eliminate_dead_code()
    assert any(node.target is operation for node in graph.nodes)
