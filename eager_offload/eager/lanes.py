"""Which device has which runtime, tiers and lane, for one ``Offload``."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eager_offload.config import OffloadConfig
from eager_offload.eager.lane import Lane
from eager_offload.runtime.accelerator import AcceleratorRuntime, accelerator_runtime
from eager_offload.runtime.base import Runtime
from eager_offload.runtime.host import HostRuntime, host_runtime
from eager_offload.stats import Accounts, Tally
from eager_offload.tiers.arena import Arena
from eager_offload.tiers.base import Tier
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.guard import process_guard
from eager_offload.tiers.host import HostTier, shared_arena

__all__ = ["Lanes"]

_told_about_host_tier = threading.Event()


class Lanes:
    """The lanes of one ``Offload``, opened when a tensor of their device is first saved. Methods take the lock."""

    def __init__(
        self,
        config: OffloadConfig,
        accounts: Accounts,
        given: Runtime | None,
        around_tier: Callable[[Tier], Tier] | None = None,
    ) -> None:
        self._config = config
        self._accounts = accounts
        self._given = given
        self._around_tier = around_tier
        self._lanes: dict[torch.device, Lane] = {}
        self._outlived: list[Lane] = []  # closed, and graphs of theirs are still alive
        self._tiers: dict[Runtime, list[Tier]] = {}
        self._written: weakref.WeakKeyDictionary[Tier, int] = weakref.WeakKeyDictionary()
        if config.tier == "disk" or config.disk_paths is not None:
            self._open_tiers(given or host_runtime())  # a path that cannot serve is told at once

    def of(self, device: torch.device) -> Lane | None:
        """The lane of ``device``, or ``None`` where its tensors cannot move.

        Raises:
            ConfigError: the configuration cannot work with this device.
        """
        lane = self._lanes.get(device)
        if lane is None:
            with self._accounts.lock:
                lane = self._lanes.get(device) or self._open(device)
        return lane

    def all(self) -> list[Lane]:
        """Every lane that is open or that graphs have outlived: what becomes of them still counts."""
        self._outlived = [lane for lane in self._outlived if any(lane.census())]
        return [*self._lanes.values(), *self._outlived]

    def trim(self) -> None:
        """A forward begins."""
        for lane in self.all():
            lane.runtime.trim()
        for tier in self.tiers():
            tier.trim()

    def snapshot_peaks(self) -> None:
        """Brings what the tiers measure into the tally."""
        tally = self._accounts.tally
        for tier in self.tiers():
            if tier.name == "disk":
                tally.disk_bytes_peak = max(tally.disk_bytes_peak, tier.peak_bytes)
            else:
                tally.host_bytes_peak = max(tally.host_bytes_peak, tier.peak_bytes)
            written = tier.written_bytes
            tally.disk_bytes_written += written - self._written.get(tier, 0)
            self._written[tier] = written

    def new_tally(self) -> None:
        """Starts counting anew, with the peaks at what is held now."""
        with self._accounts.lock:
            self.snapshot_peaks()  # what was written so far is not counted any more
            tally = self._accounts.tally = Tally()
            tally.resident_bytes_peak = sum(lane.resident_bytes for lane in self.all())
            tally.inflight_bytes_peak = max((lane.inflight_bytes for lane in self.all()), default=0)
            for tier in self.tiers():
                tier.restart_peak()

    def close(self) -> None:
        """Waits for what is on its way and gives every tier back; lanes open again when they are needed."""
        with self._accounts.lock:
            for lane in self.all():
                lane.synchronize()
            self._outlived += self._lanes.values()
            self._lanes = {}
            self.snapshot_peaks()
            tiers, self._tiers = self._tiers, {}
            for opened in tiers.values():
                for tier in opened:
                    tier.close()
        for runtime in tiers:
            runtime.detach_user(self._accounts)

    def runtime_of(self, device: torch.device) -> Runtime | None:
        """What moves the bytes of the tensors of ``device``; ``None`` where they cannot move."""
        if device.type == "cpu":
            return self._given or host_runtime()
        if (found := torch.accelerator.current_accelerator()) is not None and found.type == device.type:
            return accelerator_runtime()
        return None

    def tiers(self) -> list[Tier]:
        """Every tier that is open."""
        return [tier for opened in self._tiers.values() for tier in opened]

    def _open(self, device: torch.device) -> Lane | None:
        runtime = self.runtime_of(device)
        if runtime is None:
            return None
        lane = self._lanes[device] = Lane(device, runtime, self._open_tiers(runtime), self._config, self._accounts)
        return lane

    def _open_tiers(self, runtime: Runtime) -> list[Tier]:
        tiers = self._tiers.get(runtime)
        if tiers is None:
            around = self._around_tier or (lambda tier: tier)
            tiers = self._tiers[runtime] = [around(tier) for tier in self._new_tiers(runtime)]
        runtime.attach_user(self._accounts)
        return tiers

    def _new_tiers(self, runtime: Runtime) -> list[Tier]:
        """The tiers of ``runtime``, the one that is to be filled first in front."""
        config, on_device = self._config, isinstance(runtime, AcceleratorRuntime)
        if config.tier == "auto" and on_device and config.disk_paths is not None:
            return [self._host_tier(runtime), self._disk_tier()]
        on_host_runtime = isinstance(runtime, HostRuntime)
        if config.tier == "disk" or (config.tier == "auto" and (on_host_runtime or config.disk_paths is not None)):
            return [self._disk_tier()]
        if on_host_runtime and not _told_about_host_tier.is_set():
            _told_about_host_tier.set()
            warnings.warn(
                'eager_offload: tier="host" on a CPU device copies within host memory: it saves nothing, for tests',
                RuntimeWarning,
                stacklevel=2,
            )
        return [self._host_tier(runtime)]

    def _disk_tier(self) -> DiskTier:
        config = self._config
        return DiskTier(config.disk_paths, _bytes(config.disk_budget), verify=config.verify)

    def _host_tier(self, runtime: Runtime) -> HostTier:
        pin_memory = isinstance(runtime, AcceleratorRuntime) and self._config.pin_memory is not False
        arena = shared_arena(runtime, pin_memory, lambda: _new_arena(runtime, pin_memory=pin_memory))
        return HostTier(arena, _bytes(self._config.host_budget))


def _new_arena(runtime: Runtime, *, pin_memory: bool) -> Arena:
    """An arena over the host buffers of ``runtime``, which takes no more than the machine has to give."""
    guard, allocate = process_guard(), runtime.host_buffer
    more: dict[str, Any] = {}
    if isinstance(runtime, AcceleratorRuntime):
        allocate = partial(runtime.host_buffer, pin_memory=pin_memory)
        # Pinning costs milliseconds, and the next step needs the same slabs again: none goes back before the end.
        more = {"idle_bytes": sys.maxsize, "sizes": runtime.slab_sizes(pin_memory=pin_memory)}

    def take(nbytes: int) -> Tensor:
        guard.admit(nbytes)
        return allocate(nbytes)

    def given_back() -> None:
        runtime.tidy()  # what is pinned has to be unpinned before it is back
        guard.forget()

    return Arena(take, given_back=given_back, **more)


def _bytes(budget: int | str) -> int | None:
    return None if isinstance(budget, str) else budget
