"""How fast a device is: from the table, else measured, else an error. And a setting of its C library."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import eager_offload as eo
from eager_offload import machine, malloc
from eager_offload.machine import TABLE, disk_link, here, link_of, machine_of, measure
from eager_offload.rates import LinkRates, Rate
from eager_offload.runtime.host import HostRuntime
from eager_offload.tiers.disk import DiskTier
from tests.processes import printed_by
from tests.simulation.simulated import SimulatedRuntime

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_cpu_is_measured_once_and_another_form_of_a_known_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = machine_of(CPU)
    assert rates is machine_of(torch.device("cpu"))
    assert min(rates.flops, rates.single_flops, rates.memory) > 1e6
    accelerator(monkeypatch, "NVIDIA H100 PCIe")
    monkeypatch.setattr(machine, "_measured", lambda device: eo.Machine("measured", 3.0, 2.0, 1.0))
    assert machine_of(torch.device("cuda", 0)).name == "measured"


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_is_measured_while_a_compiler_traces_is_the_machine_and_not_the_trace(
    tier: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, kinds, product = torch.get_rng_state(), set[type](), machine._product

    def noted(*given: Any) -> Any:
        work = product(*given)
        kinds.add(type(work.run()))
        return work

    monkeypatch.setattr(machine, "_product", noted)
    with FakeTensorMode():
        found = measure(tier=tier, disk_paths=[tmp_path] if tier == "disk" else None)
    assert kinds == {torch.Tensor}
    assert torch.equal(torch.get_rng_state(), before), "the user's random numbers are the user's"
    assert min(found.out, found.back, found.memory_bytes) > 1e6
    assert 1 <= found.spread < 1e6
    assert f"spread {found.spread:,.2f}" in str(found)
    assert list(tmp_path.iterdir()) == [], "a file on the disk leaves nothing behind"


def test_a_tier_that_is_none_is_an_error() -> None:
    with pytest.raises(eo.ConfigError, match='tier takes "host" or "disk"'):
        measure(CPU, tier="tape")
    with pytest.raises(eo.ConfigError, match='disk_paths goes with tier="disk" only'):
        measure(CPU, disk_paths=[Path()])


def test_a_rate_is_the_median_of_several_measurements_after_one_however_slow_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, seconds = 0.0, iter([50.0, 1.0, 50.0, 1.0, 1.0, 1.0, 50.0, 1.0, 1.0])

    def run() -> None:
        nonlocal now
        now += next(seconds)

    monkeypatch.setattr(machine.time, "perf_counter", lambda: now)
    work = machine._sized(CPU, lambda scale: machine._Work(run, 6.0))
    (rate,) = machine._rates(CPU, [work])
    assert rate.median == 6.0
    assert rate.spread > 1.5


def test_a_rate_has_the_deciles_of_its_measurements_as_its_spread() -> None:
    assert Rate.of(8.0, [2.0] * 5) == (4.0, 1.0)
    assert Rate.of(8.0, [2.0]) == (4.0, 1.0)
    assert Rate.of(1.0, [1 / rate for rate in range(1, 12)]) == (pytest.approx(6.0), pytest.approx(5.0))


def test_a_link_is_measured_once_and_the_disk_of_a_cpu_is_its_tier(tmp_path: Path) -> None:
    class Counted(SimulatedRuntime):
        times = 0

        def measure_link(self, device: torch.device) -> LinkRates:
            self.times += 1
            return super().measure_link(device)

    runtime = Counted(out_bandwidth=7.0, in_bandwidth=9.0)
    for _ in range(2):
        assert link_of(runtime, CPU) == ((7.0, 1.0), (9.0, 1.0))
    assert runtime.times == 1
    assert disk_link((tmp_path,)) is disk_link((tmp_path,))
    if not torch.accelerator.is_available():
        found, (out, back) = here(eo.OffloadConfig(tier="disk", disk_path=tmp_path)), disk_link((tmp_path,))
        assert (found.name, found.out, found.back) == ("here (cpu)", out.median, back.median)
        assert found.spread == max(machine_of(CPU).spread, out.spread, back.spread)


def test_training_measures_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor does a budget, a limit of the slowdown, or a window that follows from the steps."""

    def measured(*_: object) -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr(machine, "_rates_of", measured)
    monkeypatch.setattr(machine, "_measured", measured)
    monkeypatch.setattr(HostRuntime, "measure_link", measured)
    monkeypatch.setattr(DiskTier, "measure", measured)
    model, x = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), torch.randn(256, 64)
    for fields in ({"device_budget": "64GiB"}, {"max_slowdown": 0.1}, {"tier": "disk", "disk_path": tmp_path}):
        offload = eo.Offload(min_bytes=1024, **{"tier": "disk", "disk_path": tmp_path, **fields})
        for _ in range(3):
            with offload:
                loss = model(x).square().sum()
            loss.backward()
        assert offload.stats(synchronize=True).saved_tensors > 0
        offload.close()


def accelerator(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One device of CUDA of that name, which torch says is there."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: GPU)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(get_device_name=lambda _: name))


@pytest.mark.parametrize(
    ("name", "flops", "memory"), [("NVIDIA GeForce RTX 4090", 165.2e12, 1.008e12), ("NVIDIA L40S", 362e12, 0.864e12)]
)
def test_a_known_device_is_as_fast_as_its_data_sheet_says(
    name: str, flops: float, memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator(monkeypatch, name)
    found = machine_of(GPU)
    assert (found.flops, found.memory) == (0.6 * flops, 0.8 * memory)
    assert (found.name in TABLE, found.launch_seconds) == (True, 0.0)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert machine_of(GPU).single_flops == found.flops / 2
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("device", ["meta", "cuda:1"])
def test_a_device_that_is_not_here_is_an_error_that_lists_those_that_are_known(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator(monkeypatch, "NVIDIA H100 PCIe")
    with pytest.raises(eo.ConfigError, match=r"is not on this machine.*h200, h100, a100, l40s, rtx4090"):
        machine_of(torch.device(device))


# -- freed memory goes back to the system when the C library is told to -----------------------------------------------

#: What a process says of its advice, and whether freed blocks stay resident, before and after the setting.
PROGRAM = """
import psutil, torch, eager_offload as eo

def advised():
    offload, x = eo.Offload(keep_last_bytes=0), torch.randn(1 << 23, requires_grad=True)
    with offload:
        loss = x.sigmoid().exp().square().sum()
    loss.backward()
    stats = offload.stats(synchronize=True)
    return stats.keeps_freed_memory, any("release_freed_memory()" in one for one in stats.advice)

print(*advised(), eo.release_freed_memory("2MiB"), *advised())
me, mib = psutil.Process(), 1 << 20
for _ in range(3):  # as an allocator meets them in training: again and again
    before = me.memory_info().rss
    blocks = [torch.ones(mib // 2) for _ in range(64)]
    grown = me.memory_info().rss - before
    last = blocks.pop()
    blocks.clear()
    left = me.memory_info().rss - before
    del last
print(grown > 100 * mib, left < 16 * mib)
"""


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_what_is_freed_goes_back_at_once_and_the_advice_names_that_where_it_would_change_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in malloc._OTHERWISE:
        monkeypatch.delenv(name, raising=False)
    assert printed_by("-c", PROGRAM).splitlines() == ["True True True False False", "True True"]
    by_the_environment = printed_by("-c", PROGRAM, MALLOC_TRIM_THRESHOLD_="65536")
    assert by_the_environment.startswith("False False ")


@pytest.mark.parametrize("missing", [OSError, TypeError, AttributeError])
def test_a_c_library_without_the_setting_is_no_error(missing: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", none)
    assert eo.release_freed_memory() is False
