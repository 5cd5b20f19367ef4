"""``Offload``: the object that a user holds."""

from __future__ import annotations

import threading
import warnings
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from eager_offload._torch import autograd_sequence
from eager_offload.config import OffloadConfig
from eager_offload.eager import foreign
from eager_offload.eager.hooks import Hooks, Session, unpack
from eager_offload.eager.lane import Lane
from eager_offload.errors import ConfigError, OffloadError
from eager_offload.runtime.accelerator import AcceleratorRuntime, accelerator_runtime
from eager_offload.runtime.base import Runtime
from eager_offload.runtime.host import HostRuntime, host_runtime
from eager_offload.stats import Accounts, OffloadStats, Tally
from eager_offload.tiers.arena import Arena, HostTier
from eager_offload.tiers.base import Tier
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.limits import host_budget

__all__ = ["Offload"]


class Offload:
    """Moves what autograd saves for backward off the device, and brings it back just before it is needed.

    A context manager around forward; backward may run inside or outside. It can be entered again and again, nested,
    for several forwards before any backward, and in several threads. Outputs and gradients are the same, bit for bit,
    as without it.

        offload = Offload(min_bytes="4MiB")
        with offload:
            loss = model(batch)
        loss.backward()
        print(offload.stats())

    Args:
        config: an :class:`OffloadConfig`; the defaults where it is left out.
        runtime: moves the bytes of CPU tensors in place of the CPU's own runtime. For proof and planning with
            ``eager_offload.runtime.simulated``; training leaves it out.
        **fields: fields of :class:`OffloadConfig`, in place of those of ``config``.

    Raises:
        ConfigError: a field that does not exist, a value that is not accepted, or a ``disk_path`` that cannot serve.
    """

    def __init__(self, config: OffloadConfig | None = None, *, runtime: Runtime | None = None, **fields: Any) -> None:
        if config is not None and not isinstance(config, OffloadConfig):
            raise ConfigError(f"config={config!r} is not accepted: config takes an OffloadConfig or None")
        self.config = OffloadConfig.from_fields(fields, config)
        self._given_runtime = runtime
        self._accounts = Accounts()
        self._lanes: dict[torch.device, Lane] = {}
        self._tiers: dict[Runtime, list[Tier]] = {}
        self._session = Session()
        self._contexts = _Contexts()
        self._hooks = Hooks(self.config.size("min_bytes"), self._accounts, self._lane_of, self._session)
        self._told: set[str] = set()
        if self.config.tier == "disk" or self.config.disk_paths is not None:
            self._open_tiers(runtime or host_runtime(), torch.device("cpu"))  # a path that cannot serve is told at once

    # -- around forward -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        context = _Context(self)
        context.__enter__()
        self._contexts.stack.append(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._contexts.stack:
            raise OffloadError("this Offload is left in a thread that did not enter it: use one `with` for both")
        self._contexts.stack.pop().__exit__(kind, error, trace)

    # -- what it did ----------------------------------------------------------------------------------------------

    def stats(self, synchronize: bool = False) -> OffloadStats:
        """A snapshot of the counters.

        Args:
            synchronize: first wait until nothing is on its way, so that every figure is final.
        """
        with self._accounts.lock:
            for lane in self._lanes.values():
                if synchronize:
                    lane.synchronize()
                else:
                    lane.settle()
            self._note_peaks()
            return self._accounts.tally.snapshot()

    def reset_stats(self) -> None:
        """Starts every counter anew. What was saved before is not counted any more."""
        with self._accounts.lock:
            for lane in self._lanes.values():
                lane.settle()
            self._accounts.tally = Tally()
            for tier in self._all_tiers():
                tier.restart_peak()

    def close(self) -> None:
        """Waits for what is on its way, then gives back every tier's memory and files. Idempotent.

        Graphs that are still alive keep what they need until they go. Using the object again opens it again. What is
        not closed is given back when the object is garbage collected, and at the end of the process.
        """
        with self._accounts.lock:
            lanes, self._lanes = self._lanes, {}
            self._session = self._hooks.session = Session()
            for lane in lanes.values():
                lane.synchronize()
            self._note_peaks()
            tiers, self._tiers = self._tiers, {}
            for opened in tiers.values():
                for tier in opened:
                    tier.close()
        if host_runtime() in tiers:
            host_runtime().detach_user(self._accounts)

    def _all_tiers(self) -> list[Tier]:
        return [tier for opened in self._tiers.values() for tier in opened]

    def _note_peaks(self) -> None:
        tally = self._accounts.tally
        for tier in self._all_tiers():
            if tier.name == "disk":
                tally.disk_bytes_peak = max(tally.disk_bytes_peak, tier.peak_bytes)
            else:
                tally.host_bytes_peak = max(tally.host_bytes_peak, tier.peak_bytes)

    # -- devices --------------------------------------------------------------------------------------------------

    def _lane_of(self, device: torch.device) -> Lane | None:
        lane = self._lanes.get(device)
        if lane is None:
            with self._accounts.lock:
                lane = self._lanes.get(device) or self._open_lane(device)
        return lane

    def _open_lane(self, device: torch.device) -> Lane | None:
        if device.type == "cpu":
            runtime = self._given_runtime or host_runtime()
        elif (found := torch.accelerator.current_accelerator()) is not None and found.type == device.type:
            runtime = accelerator_runtime()
        else:
            return None
        lane = self._lanes[device] = Lane(
            device, runtime, self._open_tiers(runtime, device), self.config, self._accounts
        )
        return lane

    def _open_tiers(self, runtime: Runtime, device: torch.device) -> list[Tier]:
        tiers = self._tiers.get(runtime)
        if tiers is None:
            tiers = self._tiers[runtime] = [self._open_tier(runtime, device)]
        if isinstance(runtime, HostRuntime):
            runtime.attach_user(self._accounts)
        return tiers

    def _open_tier(self, runtime: Runtime, device: torch.device) -> Tier:
        config, on_host_runtime = self.config, isinstance(runtime, HostRuntime)
        if device.type != "cpu" and (config.tier == "disk" or config.disk_paths is not None):
            raise ConfigError(
                f"tier={config.tier!r} with disk_path={config.disk_path} is not accepted for tensors on {device}: in "
                'this version the disk tier serves CPU devices; take tier="host" and leave disk_path out'
            )
        if config.tier == "disk" or (config.tier == "auto" and (on_host_runtime or config.disk_paths is not None)):
            return DiskTier(config.disk_paths, _bytes(config.disk_budget), verify=config.verify)
        if on_host_runtime and not _told_about_host_tier.is_set():
            _told_about_host_tier.set()
            warnings.warn(
                'eager_offload: tier="host" on a CPU device copies within host memory: it saves nothing, for tests',
                RuntimeWarning,
                stacklevel=2,
            )
        budget = _bytes(config.host_budget) or host_budget()
        if isinstance(runtime, AcceleratorRuntime):
            # Pinning costs milliseconds, and the next step needs the same slabs again: none goes back before the end.
            slabs = partial(runtime.host_buffer, pin_memory=config.pin_memory is not False)
            return HostTier(Arena(slabs, idle_bytes=budget), budget)
        return HostTier(Arena(runtime.host_buffer), budget)

    def _saw_foreign_hooks(self) -> None:
        with self._accounts.lock:
            self._accounts.tally.foreign_hooks += 1
        self._tell_once(
            "foreign",
            "other saved-tensor hooks were entered inside this context and hide from it what is saved there. Enter "
            "this context inside theirs, or leave one of the two out",
        )

    def _tell_once(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"eager_offload: {message}", RuntimeWarning, stacklevel=4)


_told_about_host_tier = threading.Event()


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Context] = []


class _Context:
    """One ``with``: installs the hooks, and sees to what is left when they go."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._hooks = foreign.ours(offload._hooks.pack, unpack)
        self._watch = foreign.watch(offload._saw_foreign_hooks)  # not a method of this: a cycle for each `with`
        self._session = offload._hooks.session
        self._nodes_before = 0
        self._packed_before = 0

    def __enter__(self) -> None:
        offload, session = self._offload, self._session
        if not offload._contexts.stack:
            session.begin()
        self._packed_before = session.packed
        self._nodes_before = autograd_sequence()
        try:
            self._hooks.__enter__()
        except RuntimeError as error:
            raise _explained(error) from error
        self._watch.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        offload = self._offload
        self._watch.__exit__()
        self._hooks.__exit__(kind, error, trace)
        session = offload._hooks.session
        with offload._accounts.lock:
            for lane, line in session.lines.items():
                lane.flush(line)
            seen = session is not self._session or session.packed != self._packed_before  # another: closed meanwhile
            if kind is None and not seen and autograd_sequence() > self._nodes_before:
                offload._accounts.tally.empty_forwards += 1
                offload._tell_once(
                    "empty",
                    "autograd recorded operators inside the context, but no saved tensor could be seen: other hooks "
                    "inside it hide them, or the forward ran elsewhere. Enter this context inside the others, around "
                    "the forward alone",
                )
        if isinstance(error, RuntimeError) and _is_forbidden(error):
            raise _explained(error) from error


def _is_forbidden(error: RuntimeError) -> bool:
    """Whether torch refused hooks, as ``torch.func`` transforms do."""
    return "saved tensor hooks" in str(error) and not isinstance(error, OffloadError)


def _explained(error: RuntimeError) -> OffloadError:
    return OffloadError(
        f"torch does not allow saved-tensor hooks here: {error} "
        "Call the transform outside `with offload:`, or leave the context out around it"
    )


def _bytes(budget: int | str) -> int | None:
    return None if isinstance(budget, str) else budget
