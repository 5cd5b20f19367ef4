"""A budget of a device: its rule as numbers, and a CPU, whose memory is the process's."""

from __future__ import annotations

import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eager_offload as eo
from eager_offload.eager.device_budget import Allowance
from tests.processes import printed_by
from tests.simulation.simulated import SimulatedRuntime
from tests.test_exposure import exact_in_threads

MIB = 1 << 20
#: Parts of a budget: what is used anyway, what is saved in a step, and by how much steps of the same bytes differ.
PARTS = {"other": st.floats(0.05, 0.8), "saved": st.floats(0.1, 4.0), "spread": st.floats(0.0, 0.04)}


class Device:
    """A peak for each number of bytes that stay."""

    def __init__(self, budget: int, other: float, saved: float, spread: float, seed: int) -> None:
        self.other, self.saved, self.spread = int(budget * other), int(budget * saved), int(budget * spread)
        self.random = torch.Generator().manual_seed(seed)

    def peak(self, keep: int) -> int:
        more = int(torch.randint(0, self.spread + 1, (), generator=self.random))
        return self.other + min(keep, self.saved) + more


@settings(max_examples=200)
@given(budget=st.integers(10_000, 1 << 40), keep=st.floats(0, 1), seed=st.integers(0, 99), **PARTS)
def test_h55_it_is_rarely_exceeded_and_used_up(
    budget: int, keep: float, seed: int, other: float, saved: float, spread: float
) -> None:
    device, allowance = Device(budget, other, saved, spread, seed), Allowance(budget, int(keep * budget / 8))
    peaks = []
    for _ in range(64):
        peaks.append(device.peak(allowance.keep))
        allowance.adapt(peaks[-1], device.saved, moved=allowance.keep < device.saved)
    assert sum(peak > budget for peak in peaks) <= 4, "as often as a higher rest is seen, each far above the one before"
    assert max(peaks[1:]) <= budget + device.spread
    assert allowance.keep >= min(device.saved, 0.9 * budget - device.other - 2 * device.spread)


@settings(max_examples=200)
@given(budget=st.integers(10_000, 1 << 40), before=st.floats(0, 0.95), seed=st.integers(0, 99), **PARTS)
def test_h55_of_a_peak_that_is_not_known_it_is_enough_that_it_was_at_most_so_much(
    budget: int, before: float, seed: int, other: float, saved: float, spread: float
) -> None:
    """A device remembers its highest peak; what was used before hides the first ones."""
    device, allowance, highest = Device(budget, other, saved, spread, seed), Allowance(budget, 0), int(budget * before)
    peaks = []
    for _ in range(128):
        kept = min(allowance.keep, device.saved)
        peaks.append(device.peak(allowance.keep))
        exact, highest = peaks[-1] > highest, max(peaks[-1], highest)
        allowance.adapt(highest, kept, moved=kept < device.saved, exact=exact)
    assert max(peaks) <= budget + device.spread
    assert allowance.keep >= min(device.saved, 0.9 * budget - device.other - 2 * device.spread)


@settings(max_examples=100)
@given(grown=st.floats(0.01, 0.4), moved=st.booleans())
def test_what_an_optimizer_makes_in_its_first_step_is_taken_off_before(grown: float, moved: bool) -> None:
    budget = 1_000_000
    allowance, growth = Allowance(budget, 200_000), int(grown * budget)
    allowance.adapt(700_000, 200_000, growth, moved=moved)
    assert 500_000 + allowance.keep + growth <= budget


def test_h55_forwards_of_two_kinds_in_turn_keep_to_it_from_the_second_on() -> None:
    budget = 1_000_000
    allowance, peaks = Allowance(budget, 0), []
    for step in range(500):
        peaks.append((700_000 if step % 2 else 300_000) + allowance.keep)
        allowance.adapt(peaks[-1], allowance.keep, moved=True)
    assert max(peaks[2:]) <= budget
    assert allowance.keep >= 250_000


def test_h55_what_may_stay_beyond_what_is_saved_does_not_hide_what_else_is_taken() -> None:
    budget, saved = 10_000_000, 1_000_000
    allowance, peaks = Allowance(budget, 0), []
    for step in range(12):
        other = 1_000_000 if step < 6 else 9_200_000
        peaks.append(other + min(saved, allowance.keep))
        allowance.adapt(peaks[-1], saved, moved=step < 2)
    assert allowance.keep < saved
    assert peaks[6] > budget
    assert max(peaks[7:]) <= budget


def test_what_was_too_much_once_is_tried_again_after_many_forwards() -> None:
    allowance, kept = Allowance(1_000_000, 0), []
    for step in range(200):
        kept.append(allowance.keep)
        allowance.adapt((600_000 if step == 50 else 100_000) + allowance.keep, allowance.keep, moved=True)
    assert min(kept[10:51]) > 800_000
    assert max(kept[51:110]) <= 400_000
    assert min(kept[130:]) > 800_000


@pytest.mark.parametrize("budget", [1, "1TiB", "auto"])
def test_h55_threads_share_it_and_gradients_are_exact(budget: int | str, tmp_path: Path) -> None:
    offload = eo.Offload(device_budget=budget, prefetch_bytes="256KiB", min_bytes=0, tier="disk", disk_path=tmp_path)
    with warnings.catch_warnings(action="ignore"):  # that a budget of a byte is not kept
        assert all(exact_in_threads(offload, steps=12))
    stats = offload.stats(synchronize=True)
    offload.close()
    assert stats.bytes_out > 0
    assert ("over_budget" in stats.demotions) == (budget == 1)
    assert (stats.keep_last_bytes == 0) == (budget == 1)
    assert stats.device_memory_peak > 1


def test_a_device_that_does_not_tell_is_an_error() -> None:
    x = torch.ones(64, requires_grad=True)
    offload = eo.Offload(device_budget="1GiB", tier="host", min_bytes=0, runtime=SimulatedRuntime())
    with pytest.raises(eo.ConfigError, match=r"does not tell how much of its memory is used.*keep_last_bytes"), offload:
        x.exp()


@pytest.mark.long
def test_h55_on_a_cpu_it_is_the_memory_of_the_process(tmp_path: Path) -> None:
    """As the system measures it, in a process of its own: the newest hold its peak up to the budget, and no further."""
    script = textwrap.dedent(
        """
        import sys, psutil, torch, eager_offload as eo
        MIB, LAYERS = 1 << 20, 24
        eo.release_freed_memory()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(m for _ in range(LAYERS) for m in (torch.nn.Linear(256, 256), torch.nn.Tanh())))
        process, peaks, used = psutil.Process(), [], []
        for layer in model:
            layer.register_forward_hook(lambda *_: used.append(process.memory_info().rss))
            layer.register_full_backward_hook(lambda *_: used.append(process.memory_info().rss))
        base = process.memory_info().rss
        windows = {"max_inflight_bytes": "16MiB", "prefetch_bytes": "16MiB"}
        offload = eo.Offload(device_budget=base + 130 * MIB, disk_path=sys.argv[1], **windows)
        gradients = []
        for around in (*[offload] * 8, eo.Offload(enabled=False)):
            used.clear()
            with around:
                loss = model(torch.ones(8192, 256)).square().mean()
            loss.backward()
            peaks.append((max(used) - base) // MIB)
            gradients.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
        assert all(torch.equal(one, other) for one, other in zip(gradients[0], gradients[-1], strict=True))
        moved = offload.stats(synchronize=True).bytes_out // MIB
        print(*peaks, moved, offload.stats().demotions.get("over_budget", 0))
        """
    )
    printed = printed_by("-c", script, tmp_path)
    *peaks, without, moved, over = map(int, printed.split())
    assert without > 180
    assert moved > 0
    assert max(peaks[4:]) <= 130 * 1.05, printed
    assert max(peaks[4:]) >= 130 * 0.75, printed
    assert over <= 2, printed


@pytest.mark.parametrize("given", ["20", " 20 ", "20.0"])
def test_a_budget_without_its_unit_is_an_error_that_asks_for_one(given: str, tmp_path: Path) -> None:
    """What is there already takes more than 20 bytes, whatever moves."""
    x = torch.ones(1 << 18, requires_grad=True)
    offload = eo.Offload(device_budget=given, min_bytes=0, tier="disk", disk_path=tmp_path)
    with pytest.raises(eo.ConfigError, match=f'device_budget={given!r} .* 20 bytes.*device_budget="20GiB"'), offload:
        (x * 2).exp()
    meant = eo.Offload(device_budget="20 B", min_bytes=0, tier="disk", disk_path=tmp_path)
    with meant:
        loss = (x * 2).exp().sum()
    loss.backward()
    assert meant.stats(synchronize=True).bytes_out > 0
    for one in (offload, meant):
        one.close()


def test_the_warning_of_a_budget_repeats_it_as_it_was_given(tmp_path: Path) -> None:
    x = torch.ones(1 << 18, requires_grad=True)
    offload = eo.Offload(device_budget="3000 kB", min_bytes=0, tier="disk", disk_path=tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            with offload:
                loss = (x * 2).exp().sum()
            loss.backward()
    assert [str(one.message) for one in caught if "device_budget=3000 kB is not kept" in str(one.message)]
    offload.close()
