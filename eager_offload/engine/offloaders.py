"""Maps each device to its runtime, tiers and offloader, for one ``Offload``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from eager_offload.config import OffloadConfig, size_text
from eager_offload.core.selection import keeps_cpu_tensors
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer_log import TransferLog
from eager_offload.errors import CapacityError, ConfigError, lacks_descriptor, warn_once
from eager_offload.runtime.accelerator import AcceleratorRuntime, accelerator_runtime
from eager_offload.runtime.base import Runtime
from eager_offload.runtime.host import HostRuntime, host_runtime
from eager_offload.stats import Accounts, Counters, KeepReason
from eager_offload.tiers.base import Tier
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.host import HostTier, keeps_freed_memory, shared_pool, trim
from eager_offload.tiers.limits import host_bound
from eager_offload.tiers.pool import Pool
from eager_offload.torch_private.captures import accelerator_in_use


class Offloaders:
    """The offloaders of one ``Offload``, each made when its device first saves a tensor. Methods take the lock."""

    def __init__(
        self,
        config: OffloadConfig,
        accounts: Accounts,
        given: Runtime | None,
        around_tier: Callable[[Tier], Tier] | None = None,
    ) -> None:
        self._config = config
        self._accounts = accounts
        self.given_runtime = given
        self.around_tier = around_tier
        self.transfer_log = TransferLog()
        self._offloaders: dict[torch.device, DeviceOffloader] = {}
        self._outlived: list[DeviceOffloader] = []  # closed, but still used by living graphs
        self._tiers: dict[Runtime, list[Tier]] = {}
        self._runtimes: set[Runtime] = set()
        #: Shared by all runtimes, so that ``disk_budget`` limits their sum.
        self._disk: Tier | None = None
        #: Bytes of each open tier that ``disk_bytes_written`` includes already, and pageable slabs of each runtime that
        #: ``fallbacks`` includes.
        self._written: dict[Tier, int] = {}
        self._pageable: dict[Runtime, int] = {}
        #: Whether the last step's memory peak was read at the end of that step.
        self._is_noted = False
        self._releases = False

    def open_disk(self) -> None:
        """Opens the disk tier that tensors will go to, so that an unusable directory is an error at once.

        Raises:
            ConfigError: the given directory cannot be used, or no directory was found.
        """
        is_named = self._config.tier == "disk" or self._config.disk_path is not None
        is_plain = self.given_runtime is None and self._config.tier == "auto" and not keeps_cpu_tensors(self._config)
        if not is_named and not is_plain:
            return
        runtime = self.given_runtime or host_runtime()
        try:
            self._tiers_of(runtime)
        except OSError as error:
            if not lacks_descriptor(error):
                raise
            return
        if not is_named:  # the default directory works; close the tier, so that an unused one holds no file
            for tier in self._tiers.pop(runtime):
                tier.close()
            self._disk = None

    def reserve(self, nbytes: int) -> None:
        """Reserves ``nbytes`` of the host tier for this process's accelerator, or for its CPU if it has none.

        Does nothing if the configuration has no host tier.

        Raises:
            ConfigError: the configuration has the disk tier only.
            CapacityError: the host tier has less room.
        """
        if self._config.tier == "disk":
            raise ConfigError(
                'reserve takes host memory, but tier="disk" stores nothing there: give tier="auto" or "host", or '
                "do not call reserve"
            )
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        runtime = self.given_runtime or self.runtime_of(device)
        with self._accounts.lock:
            tiers = [] if runtime is None else self._open_tiers(runtime)
        tier = next((tier for tier in tiers if tier.name == "host"), None)
        if tier is None:
            return
        shortage = tier.take(nbytes)
        if shortage is not None:
            raise CapacityError(
                f"{size_text(nbytes)} of host memory cannot be reserved. The reason: {shortage.reason}. To change that,"
                f" {shortage.remedy}"
            )
        tier.warn(self._accounts.said)

    def of(self, device: torch.device) -> DeviceOffloader | KeepReason:
        """Returns the offloader of ``device``, or the reason why its tensors stay.

        Raises:
            ConfigError: the configuration cannot work with this device.
        """
        offloader = self._offloaders.get(device)
        if offloader is not None:
            return offloader
        with self._accounts.lock:
            try:
                return self._offloaders.get(device) or self._open(device)
            except OSError as error:
                if not lacks_descriptor(error):
                    raise
                self._accounts.fall_back(
                    "no_descriptor",
                    f"nothing moves as long as this process has no free file descriptor ({error.strerror}): close "
                    "files, or raise the limit (ulimit -n)",
                )
                return KeepReason.FAILED

    def is_capturing(self) -> bool:
        given = self.given_runtime
        if given is not None and given.is_capturing():
            return True
        return accelerator_in_use() and accelerator_runtime().is_capturing()

    def all(self) -> list[DeviceOffloader]:
        """Returns the open offloaders, and closed ones with living graphs or running copies, which still count."""
        with self._accounts.lock:
            self._outlived = [one for one in self._outlived if one.census().records or one.census().in_flight]
            return [*self._offloaders.values(), *self._outlived]

    def poll(self) -> None:
        for offloader in self.all():
            with offloader.lock, offloader.locked() as transfers:
                transfers.poll()

    def drop_crashed(self) -> None:
        """Removes crashed offloaders; new ones are made on demand: see [Note: interrupts]."""
        with self._accounts.lock:
            for offloader in [one for one in self._offloaders.values() if one.is_crashed]:
                self._outlived.append(offloader)
                del self._offloaders[offloader.device]

    def release_freed(self) -> None:
        """Applies ``release_freed_memory`` if CPU tensors may move. Only the first call acts."""
        if self._releases:
            return
        self._releases = True
        if self.given_runtime is None and self._config.tier != "host" and not keeps_cpu_tensors(self._config):
            host_runtime().release_freed(self._config.release_freed_memory)

    def release_idle(self) -> None:
        self._is_noted = False
        for offloader in self.all():
            offloader.runtime.release_idle()
        for tier in self.tiers():
            tier.release_idle()

    def snapshot_peaks(self) -> None:
        counters = self._accounts.counters
        for tier in self.tiers():
            if tier.name == "disk":
                counters.disk_bytes_peak = max(counters.disk_bytes_peak, tier.peak_bytes)
                # By device, not by tier: an accelerator's bytes may spill to disk too.
                moves_cpu_tensors = torch.device("cpu") in self._offloaders
                counters.keeps_freed_memory = moves_cpu_tensors and keeps_freed_memory()
                counters.releases_freed_memory = moves_cpu_tensors and trim.is_on
            else:
                counters.host_bytes_peak = max(counters.host_bytes_peak, tier.peak_bytes)
                users = [runtime for runtime, tiers in self._tiers.items() if tier in tiers and tier.peak_bytes]
                counters.copies_within_host |= any(isinstance(runtime, HostRuntime) for runtime in users)
            written = tier.written_bytes
            counters.disk_bytes_written += written - self._written.get(tier, 0)
            self._written[tier] = written
        for runtime, before in self._pageable.items():
            if more := runtime.pageable_slabs - before:
                counters.fallbacks["pageable"] = counters.fallbacks.get("pageable", 0) + more
                self._pageable[runtime] += more
        if not self._is_noted:  # within a step
            self.note_step_peak()
            self._is_noted = False

    def note_step_peak(self) -> None:
        for device, offloader in self._offloaders.items():
            self._accounts.counters.step_memory_peak = offloader.runtime.step_peak(device)
        self._is_noted = True

    def restart_counters(self) -> None:
        """Resets the counters; peaks restart at the amounts held now."""
        with self._accounts.lock:
            self.snapshot_peaks()  # bytes written so far must not be counted after the reset
            before = self._accounts.counters
            plan = None if before.plan is None else replace(before.plan, peak_bytes=None, step_seconds=None)
            counters = self._accounts.counters = Counters(before.live, plan, before.planned, before.stage)
            counters.max_inflight_bytes, counters.prefetch_bytes = before.max_inflight_bytes, before.prefetch_bytes
            counters.note_resident(sum(offloader.resident_bytes for offloader in self.all()))
            counters.inflight_bytes_peak = max((offloader.inflight_bytes for offloader in self.all()), default=0)
            for tier in self.tiers():
                tier.restart_peak()

    def close(self, forget: Callable[[], None]) -> None:
        """Waits for all transfers and closes every tier. Offloaders and tiers are made again on demand.

        Args:
            forget: makes callers look up their offloaders again. Called under the lock that guards the removal, so that
                no other thread saves a tensor in between.
        """
        for offloader in self.all():
            offloader.synchronize()
        with self._accounts.lock:
            forget()
            self.snapshot_peaks()
            self._outlived += self._offloaders.values()
            self._offloaders = {}
            tiers = self.tiers()
            self._tiers, self._written, self._disk = {}, {}, None
        for tier in tiers:
            tier.close()
        self.all()  # drops offloaders without living graphs, and thereby their tiers
        for runtime in list(self._runtimes):  # including earlier ones: living graphs may have used them since
            runtime.detach_user(self._accounts)

    def runtime_of(self, device: torch.device) -> Runtime | None:
        """Returns the runtime that moves tensors of ``device``; ``None`` if they cannot move."""
        if device.type == "cpu":
            return self.given_runtime or (None if keeps_cpu_tensors(self._config) else host_runtime())
        if (found := torch.accelerator.current_accelerator()) is not None and found.type == device.type:
            return accelerator_runtime()
        return None

    def tiers(self) -> list[Tier]:
        return list(dict.fromkeys(tier for opened in list(self._tiers.values()) for tier in opened))

    def _open(self, device: torch.device) -> DeviceOffloader | KeepReason:
        runtime = self.runtime_of(device)
        if runtime is None:
            return KeepReason.LAYOUT if device.type == "meta" else KeepReason.DEVICE
        if runtime.is_capturing(device):
            return KeepReason.REGION  # opening tiers asks the driver how to pin memory, which a capture forbids

        def used() -> int | None:
            memory = runtime.memory(device)
            return None if memory is None else memory.used

        self._config.check_unit_of_budget(used, f"the memory in use on {device}")
        windows = self._config.windows(partial(runtime.total_memory, device))
        tiers = self._open_tiers(runtime)
        offloader = self._offloaders[device] = DeviceOffloader(
            device, runtime, tiers, self._accounts, self.transfer_log, windows=windows
        )
        runtime.poll_when_idle(offloader)
        return offloader

    def _open_tiers(self, runtime: Runtime) -> list[Tier]:
        """Opens the tiers of ``runtime`` and registers this object as a user until ``close``."""
        tiers = self._tiers_of(runtime)
        self._runtimes.add(runtime)
        self._pageable.setdefault(runtime, runtime.pageable_slabs)
        runtime.attach_user(self._accounts)
        return tiers

    def _tiers_of(self, runtime: Runtime) -> list[Tier]:
        if runtime not in self._tiers:
            config, on_host_runtime = self._config, isinstance(runtime, HostRuntime)
            is_auto, is_named = config.tier == "auto", config.disk_path is not None
            to_disk = config.tier == "disk" or (is_auto and (is_named or on_host_runtime))
            to_host = not to_disk or (is_auto and isinstance(runtime, AcceleratorRuntime))
            if to_host and on_host_runtime:
                warn_once(
                    "host_tier",
                    'tier="host" on a CPU device copies within host memory: it frees nothing and is meant for tests',
                )
            hosts = [self._host_tier(runtime)] if to_host else []
            self._tiers[runtime] = [*hosts, self._disk_tier()] if to_disk else hosts
        return self._tiers[runtime]

    def _disk_tier(self) -> Tier:
        if self._disk is None:
            config = self._config
            budget = None if config.disk_budget == "auto" else config.size("disk_budget")
            tier = DiskTier(config.disk_path, budget, given=config.written("disk_budget"), verify=config.verify)
            self._disk = self._around(tier)
        return self._disk

    def _host_tier(self, runtime: Runtime) -> Tier:
        config = self._config
        pin_memory = isinstance(runtime, AcceleratorRuntime) and config.pin_memory is not False
        pool = shared_pool(runtime, pin_memory, lambda: _new_pool(runtime, pin_memory=pin_memory))
        budget = None if config.host_budget == "auto" else config.size("host_budget")
        return self._around(HostTier(pool, budget, given=config.written("host_budget")))

    def _around(self, tier: Tier) -> Tier:
        return tier if self.around_tier is None else self.around_tier(tier)


def _new_pool(runtime: Runtime, *, pin_memory: bool) -> Pool:
    allocate = runtime.host_buffer
    more: dict[str, Any] = {}
    if isinstance(runtime, AcceleratorRuntime):
        allocate = partial(runtime.host_buffer, pin_memory=pin_memory)
        # Pinning takes milliseconds, and the next step needs the same slabs: none is freed before the end.
        more = {"idle_bytes": sys.maxsize, "sizes": runtime.slab_sizes(pin_memory=pin_memory)}
    # A freed pinned buffer has to be unpinned before its memory is available: `poll` does that.
    return Pool(allocate, bound=host_bound, on_freed=runtime.poll, **more)
