"""H47: the system has no thread left for transfers."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.compile import ops
from tests.hazards.backends import Backend, assert_settled, transfer_threads
from tests.hazards.programs import REGIMES, Around, assert_identical, assert_moved, leaf
from tests.threads import refuse_threads

#: Of one tensor: enough for its pieces to be shared among threads.
SIDE = 1024


@pytest.fixture
def offload(disk: Backend) -> Offload:
    return disk.offload()


def forward(x: Tensor, around: Around) -> Tensor:
    with around:
        for _ in range(4):
            x = x.sin()
        return x.sum()


def program(around: Around) -> object:
    x = leaf(SIDE, SIDE)
    forward(x, around).backward()
    return x.grad


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_h47_without_threads_compute_carries_the_copies_out(
    regime: Any, disk: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, offload = program(nullcontext()), disk.offload(**regime.fields)
    refuse_threads(monkeypatch)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            assert_identical(expected, program(regime.around(offload)))
    (warning,) = warned
    assert "starts no thread for transfers" in str(warning.message)
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.bytes_in > 0
    assert stats.demotions == {"no_thread": (stats.bytes_out + stats.bytes_in) // (SIDE * SIDE * 4)}
    assert transfer_threads() == []


def test_h47_what_left_by_a_thread_comes_back_without_one(offload: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, x = program(nullcontext()), leaf(SIDE, SIDE)
    loss = forward(x, offload)
    offload.stats(synchronize=True)
    for lane in offload._offloaders.all():
        lane.runtime.close()
    refuse_threads(monkeypatch)
    with pytest.warns(RuntimeWarning, match="starts no thread for transfers"):
        loss.backward()
    del loss
    stats = assert_settled(offload)
    assert_identical(expected, x.grad)
    assert_moved(stats)
    assert stats.demotions["no_thread"] == stats.bytes_in // (SIDE * SIDE * 4) > 0


def test_h47_a_graph_moves_its_tensors_without_threads(offload: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    config, x = offload.config_key, leaf(SIDE, SIDE, grad=False)
    sources = [x * n for n in range(1, 4)]
    with offload:
        with pytest.warns(RuntimeWarning, match="starts no thread for transfers"):
            hosts = [ops.offload(source, config=config, wait=False) for source in sources]
        for host, source in zip(hosts, sources, strict=True):
            ops.wait_tensor(host, source)
        for host, source in zip(hosts, sources, strict=True):
            assert torch.equal(ops.reload(host, torch.device("cpu"), config=config, wait=True), source)
        del host, hosts
        stats = offload.stats(synchronize=True)
    assert stats.bytes_out == stats.bytes_in == 3 * x.nbytes
    assert stats.demotions == {"no_thread": 6}
