"""How fast a device is: from the table, else measured, else an error. And a setting of its C library."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import eager_offload as eo
from eager_offload.planning import measuring
from eager_offload.planning.machine import TABLE
from eager_offload.planning.measuring import disk_link, here, link_of, machine_of, measure
from eager_offload.runtime.host import HostRuntime
from eager_offload.tiers import host as host_tier
from eager_offload.tiers.base import LinkRates
from eager_offload.tiers.disk import DiskTier
from tests.processes import printed_by
from tests.simulation.simulated import SimulatedRuntime

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_cpu_is_measured_once_and_another_form_of_a_known_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = machine_of(CPU)
    assert rates is machine_of(torch.device("cpu"))
    assert min(rates.flops, rates.single_flops, rates.memory) > 1e6
    accelerator(monkeypatch, "NVIDIA H100 PCIe")
    monkeypatch.setattr(measuring, "_measured", lambda device: eo.Machine("measured", 3.0, 2.0, 1.0))
    assert machine_of(torch.device("cuda", 0)).name == "measured"


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_is_measured_while_a_compiler_traces_is_the_machine_and_not_the_trace(
    tier: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, kinds, product = torch.get_rng_state(), set[type](), measuring._product

    def noted(*given: Any) -> Any:
        work = product(*given)
        kinds.add(type(work.run()))
        return work

    monkeypatch.setattr(measuring, "_product", noted)
    with FakeTensorMode():
        found = measure(tier=tier, disk_path=tmp_path if tier == "disk" else None)
    assert kinds == {torch.Tensor}
    assert torch.equal(torch.get_rng_state(), before), "the user's random numbers are the user's"
    assert min(found.out, found.back, found.memory_bytes) > 1e6
    assert 1 <= found.spread < 1e6
    assert f"spread {found.spread:,.2f}" in str(found)
    assert list(tmp_path.iterdir()) == [], "a file on the disk leaves nothing behind"


def test_a_tier_that_is_none_is_an_error() -> None:
    with pytest.raises(eo.ConfigError, match='tier takes "host" or "disk"'):
        measure(CPU, tier="tape")
    with pytest.raises(eo.ConfigError, match='disk_path goes with tier="disk" only'):
        measure(CPU, disk_path=Path())


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
    assert disk_link(tmp_path) is disk_link(tmp_path)
    if not torch.accelerator.is_available():
        found, (out, back) = here(eo.OffloadConfig(tier="disk", disk_path=tmp_path)), disk_link(tmp_path)
        assert (found.name, found.out, found.back) == ("here (cpu)", out.median, back.median)
        assert found.spread == max(machine_of(CPU).spread, out.spread, back.spread)


def test_training_measures_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor does a budget, what the link hides, or a window that follows from the steps."""

    def measured(*_: object) -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr(measuring, "_rates_of", measured)
    monkeypatch.setattr(measuring, "_measured", measured)
    monkeypatch.setattr(HostRuntime, "measure_link", measured)
    monkeypatch.setattr(DiskTier, "measure", measured)
    model, x = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), torch.randn(256, 64)
    for fields in ({"device_budget": "64GiB"}, {"policy": "free"}, {"tier": "disk", "disk_path": tmp_path}):
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
    module = SimpleNamespace(get_device_name=lambda _: name, is_available=lambda: False)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)


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
    offload = eo.Offload(keep_last_bytes=0, release_freed_memory=False)
    x = torch.randn(1 << 23, requires_grad=True)
    with offload:
        loss = x.sigmoid().exp().square().sum()
    loss.backward()
    stats = offload.stats(synchronize=True)
    offload.close()
    assert offload.stats().advice == stats.advice, "closing changes nothing that is said"
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


def plain_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the C library's allocator as it is by default."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))]:
        monkeypatch.delenv(name)


of_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")


@pytest.mark.long
@of_glibc
def test_what_is_freed_goes_back_at_once_and_the_advice_names_that_where_it_would_change_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain_malloc(monkeypatch)
    assert printed_by("-c", PROGRAM).splitlines() == ["True True True False False", "True True"]


@pytest.mark.parametrize("missing", [OSError, TypeError, AttributeError])
def test_a_c_library_without_the_setting_is_no_error(missing: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", none)
    assert eo.release_freed_memory() is False


#: Trains with saved tensors of many sizes, which leave holes of no use to each other. Prints the peak of the process.
TRAINS = """
import hashlib, sys, torch, eager_offload as eo
from contextlib import nullcontext

offload, w = eo.Offload(), torch.linspace(-1, 1, 1 << 20, requires_grad=True)
for _ in range(2):
    w.grad = None
    with offload if "offload" in sys.argv else nullcontext():
        x = w
        for n in range(24):
            wide = torch.cat((x, x[: n << 14], w)).sigmoid()
            x = wide[: w.numel()] * wide[-w.numel() :].exp()
    x.sum().backward()
with open("/proc/self/status") as status:
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in status if line.startswith("Vm")}
stats = offload.stats(synchronize=True)
if "offload" in sys.argv:
    assert stats.bytes_out > 200 << 20
    assert stats.bytes_in > 0
    assert sizes["VmRSS"] // 2 < stats.step_memory_peak <= sizes["VmHWM"] + (1 << 20)
    offload.close()
    for one in (stats, offload.stats()):
        assert one.releases_freed_memory
        assert not one.keeps_freed_memory
        assert "not with EAGER_OFFLOAD_RELEASE_FREED_MEMORY=0" in str(one)
        assert "in use by the process at the peak of the last step" in str(one)
print(sizes["VmHWM"], hashlib.sha256(w.grad.numpy().tobytes()).hexdigest())
"""


@of_glibc
def test_h79_a_plain_offload_lowers_the_peak_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_malloc(monkeypatch)
    without, bits = printed_by("-c", TRAINS, OMP_NUM_THREADS="1").split()
    peak, same = printed_by("-c", TRAINS, "offload", OMP_NUM_THREADS="1").split()
    assert same == bits
    assert int(peak) < 0.7 * int(without)  # 0.55, and 0.85 where freed memory stays


FIELD = "EAGER_OFFLOAD_RELEASE_FREED_MEMORY"
#: Fields, the environment, and whether freed memory goes back once an ``Offload`` was entered.
WHERE: dict[str, tuple[dict[str, Any], dict[str, str], bool]] = {
    "defaults": ({}, {}, True),
    "disk": ({"tier": "disk"}, {}, True),
    "field": ({"release_freed_memory": False}, {}, False),
    "variable": ({}, {FIELD: "0"}, False),
    "arenas": ({}, {"MALLOC_ARENA_MAX": "2"}, False),
    "threshold": ({}, {"MALLOC_TRIM_THRESHOLD_": "65536"}, False),
    "tunables": ({}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=65536"}, False),
    "another tunable": ({}, {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, True),
    "another allocator": ({}, {"LD_PRELOAD": "libjemalloc.so.2"}, False),
    "always": ({"release_freed_memory": True}, {"MALLOC_ARENA_MAX": "2"}, True),
    "disabled": ({"enabled": False}, {}, False),
    "host tier": ({"tier": "host"}, {}, False),
}


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The trims of a process in which no ``Offload`` was entered before."""
    made = list[int]()
    plain_malloc(monkeypatch)
    monkeypatch.setattr(host_tier, "ctypes", SimpleNamespace(CDLL=lambda _: SimpleNamespace(malloc_trim=made.append)))
    monkeypatch.setattr(host_tier, "_is_released", False)
    for name in ("_trim", "_level"):
        monkeypatch.setattr(host_tier.trim, name, getattr(host_tier.Trim(), name))
    return made


@of_glibc
@pytest.mark.parametrize("name", WHERE)
def test_the_first_offload_that_is_entered_for_a_cpu_returns_freed_memory_once(
    name: str, trims: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fields, variables, returns = WHERE[name]
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)
    made = [eo.Offload(**fields) for _ in range(2)]
    assert trims == [], "an Offload that is only made changes nothing"
    for offload in made * 2:
        with offload:
            pass
    assert trims == [0] * returns
    assert host_tier.trim.is_on is returns


@of_glibc
def test_an_offload_for_an_accelerator_changes_nothing_of_malloc(
    trims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator(monkeypatch, "NVIDIA H100 PCIe")
    with eo.Offload():
        pass
    assert trims == []
