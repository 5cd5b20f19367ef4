"""How much host memory a step takes, and when it is pinned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eager_offload import CapacityError, Offload, OffloadError
from eager_offload.runtime.accelerator_api import AcceleratorApi
from eager_offload.tiers.base import release_idle_slots
from eager_offload.tiers.limits import host_headroom
from tests.threads import collect

MIB = 1 << 20


def step(offload: Offload, mib: int, depth: int = 4) -> None:
    with offload:
        x = torch.ones(mib * MIB // 4, device="cuda", requires_grad=True)
        for _ in range(depth):
            x = x.exp()
        loss = x.sum()
    loss.backward()


def test_a_budget_in_bytes_holds_where_the_machine_says_that_it_has_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has nothing left, as it says: of what may be seen of memory, not of what there is."""
    collect()
    release_idle_slots()  # of earlier tests, which would serve without a look at the machine
    headroom = host_headroom()
    none = headroom._replace(limits=tuple(replace(limit, room=0) for limit in headroom.limits))
    for module in ("guard", "host"):
        monkeypatch.setattr(f"eager_offload.tiers.{module}.host_headroom", lambda: none)
    given = Offload(min_bytes=0, keep_last_bytes=0, host_budget="1GiB")
    with pytest.warns(RuntimeWarning, match="host_budget=1GiB is taken as it was given, although memory is short"):
        step(given, 32)
    assert given.stats(synchronize=True).host_bytes_peak >= 128 * MIB
    assert given.stats().demotions == {}
    given.close()
    auto = Offload(min_bytes=0, keep_last_bytes=0)
    with pytest.warns(RuntimeWarning, match='host_budget="auto" is in use'):
        step(auto, 32)
    assert auto.stats(synchronize=True).bytes_out == 0
    auto.close()


def test_a_step_after_reserve_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, register = [], AcceleratorApi.register

    def counted(api: AcceleratorApi, address: int, nbytes: int) -> None:
        register(api, address, nbytes)
        pinned.append(nbytes)

    monkeypatch.setattr(AcceleratorApi, "register", counted)
    offload = Offload(min_bytes=0, keep_last_bytes=0)
    offload.reserve("192MiB")
    assert sum(pinned) >= 192 * MIB
    pinned.clear()
    for mib in (40, 24, 9):
        step(offload, mib)
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out >= 2 * 40 * MIB
    assert stats.host_bytes_peak <= 192 * MIB
    assert not pinned
    with pytest.raises(CapacityError, match=r"1,024\.0 TiB of host memory cannot be reserved"):
        offload.reserve("1024TiB")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), pytest.raises(OffloadError, match="captured"):
        offload.reserve("256MiB")
    offload.close()
