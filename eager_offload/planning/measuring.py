"""Measurements of a device and its link, and the device of this process.

    measure      measures a device and its link on each call
    machine_of   a device of the table, or measured once per process
    link_of      the link to host memory, measured once; ``disk_link`` to a disk
    here         the device and the link of this process, for the settings of an ``Offload``

None of them is called inside pack or unpack.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch

from eager_offload.config import OffloadConfig, PathLike
from eager_offload.errors import ConfigError
from eager_offload.planning.machine import LAUNCH_SECONDS, POLICY_SECONDS, TABLE, Machine
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.base import Runtime
from eager_offload.runtime.host import host_runtime
from eager_offload.tiers.base import TIMES, LinkRates, Rate
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.forking import ForkSafeLock
from eager_offload.tiers.limits import host_capacity, host_part
from eager_offload.torch_private.calls import without_dispatch_modes

#: Names in torch. Another variant of a device (e.g. for PCIe, or a MIG slice) has another name, and is measured.
_NAMES_IN_TORCH = {
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}


def machine_of(device: torch.device) -> Machine:
    """Returns the rates of ``device``: from :data:`TABLE`, or measured once, in about a second.

    The link is not measured, and ``launch_seconds`` is 0.

    Raises:
        ConfigError: ``device`` is not in the table, and not on this machine.
    """
    known = TABLE.get(_NAMES_IN_TORCH.get(name_of(device), ""))
    if known is None:
        with _measure_lock.lock:
            return _measured(device)
    # TF32 has half of the 16-bit rate. Of torch's two settings for it, this one may be read after either was set.
    is_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return replace(known, single_flops=known.flops / 2 if is_tf32 else known.single_flops, launch_seconds=0.0)


def name_of(device: torch.device) -> str:
    """Returns torch's name of ``device``; its type if it has no name or is not on this machine."""
    if device.type == "cpu" or not _is_here(device):
        return device.type
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def memory_of(device: torch.device) -> int | None:
    if device.type == "cpu":
        return host_capacity()
    return accelerator_runtime().total_memory(device) if _is_here(device) else None


def here(settings: OffloadConfig) -> Machine:
    """Returns the device of this process, with the link to its first tier by ``settings``.

    This is the accelerator and host memory, or the CPU and a disk, unless the settings name a tier. ``memory_bytes`` is
    the memory that the process can have now.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        device, memory_bytes = torch.device("cpu"), host_part()
    else:
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        used = accelerator_runtime().memory(device)  # other processes and the driver use some of the rest
        memory_bytes = accelerator_runtime().available_memory(device, 0 if used is None else used.used)
    if settings.tier == "disk" or (accelerator is None and settings.tier == "auto"):
        link = disk_link(settings.disk_path)
    else:
        link = link_of(host_runtime() if accelerator is None else accelerator_runtime(), device)
    return replace(
        _with_link(machine_of(device), link),
        name=f"here ({device})",
        memory_bytes=memory_bytes,
        launch_seconds=0.0 if accelerator is None else LAUNCH_SECONDS,
        policy_seconds=POLICY_SECONDS,
        kernels="cpu" if accelerator is None else "cuda",
    )


# -- links ------------------------------------------------------------------------------------------------------------

#: Two threads that measure a link at once would each find half of its rate.
_link_lock = ForkSafeLock(shared=False)


def link_of(runtime: Runtime, device: torch.device) -> LinkRates:
    """Returns the link between ``device`` and host memory, measured on the first call. Thread-safe."""
    with _link_lock.lock:
        if device not in runtime.links:
            with _undisturbed():
                runtime.links[device] = runtime.measure_link(device)
        return runtime.links[device]


def disk_link(directory: PathLike | None) -> LinkRates:
    """Returns the link to the disk tier in ``directory`` (as ``OffloadConfig.disk_path``), measured once, in a file
    that no budget counts."""
    return _known_disk_link(None if directory is None else str(directory))


def _disk_link(directory: PathLike | None) -> LinkRates:
    with _undisturbed():
        tier = DiskTier(directory, None)
        try:
            return tier.measure()
        finally:
            tier.close()


_known_disk_link = cache(_disk_link)


def _with_link(machine: Machine, link: LinkRates) -> Machine:
    spread = max(machine.spread, link.out.spread, link.back.spread)
    return replace(machine, out=link.out.median, back=link.back.median, spread=spread)


# -- measuring --------------------------------------------------------------------------------------------------------

_SECONDS = 0.02
#: Rows and columns of a product and bytes of a copy, at a scale of 1.
_ROWS, _BYTES = 512, 2 << 20
#: Scales are tried in order until a product (or copy) takes more than 0.02 s and is at most 1.5 times as fast as at the
#: scale before, or takes more than 0.1 s. Small products are too short: on busy cores their threads wait 16 to 50 ms
#: for each other.
_SCALES, _LARGE_ENOUGH, _RISING, _LONGEST = (1, 2, 3, 4, 6, 8), 0.02, 1.5, 0.1


class _Work(NamedTuple):
    run: Callable[[], object]
    amount: float
    repeats: int = 1

    def seconds(self, device: torch.device) -> float:
        started = time.perf_counter()
        for _ in range(self.repeats):
            self.run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return max(time.perf_counter() - started, 1e-9)


def measure(device: torch.device | None = None, *, tier: str = "host", disk_path: PathLike | None = None) -> Machine:
    """Measures ``device``: products of 16-bit and of 32-bit numbers, memory bandwidth, and its link to a tier.

    Each rate is the median of 5 measurements after a warm-up; :attr:`Machine.spread` tells how much they differ. Takes
    about a second, or a few on a busy machine or a slow disk, and at most 0.6 GiB of an accelerator's free memory.

    Args:
        device: ``None``: the accelerator, or the CPU if there is none.
        tier: ``"host"``: measures the link to host memory; ``"disk"``: to a disk.
        disk_path: a directory for a file on that disk; ``None``: as ``OffloadConfig.disk_path``.

    Raises:
        ConfigError: ``device`` is not on this machine, ``tier`` is another text, ``disk_path`` is given with
            ``"host"``, or no directory is usable.
    """
    if tier not in ("host", "disk"):
        raise ConfigError(f'tier={tier!r} is not accepted: tier takes "host" or "disk"')
    if tier == "host" and disk_path is not None:
        raise ConfigError('disk_path goes with tier="disk" only: leave it out')
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    machine = replace(_rates_of(device), memory_bytes=memory_of(device) or 0)
    if tier == "disk":
        return _with_link(machine, _disk_link(disk_path))
    runtime = host_runtime() if device.type == "cpu" else accelerator_runtime()
    with _undisturbed():
        return _with_link(machine, runtime.measure_link(device))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Disables modes and autograd: a compiler that traces the caller must not see the measurement."""
    with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def _rates_of(device: torch.device) -> Machine:
    if not _is_here(device):
        raise ConfigError(
            f"device={str(device)!r} is not accepted: it is not on this machine, so it cannot be measured. Known "
            f"without measuring: {', '.join(TABLE)}; describe any other by an eager_offload.Machine"
        )
    with _undisturbed():
        works = [_sized(device, partial(_product, device, torch.float32)), _sized(device, partial(_copy, device))]
        try:
            works.append(_sized(device, partial(_product, device, torch.bfloat16)))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # the device has no bfloat16 products
            works.append(works[0])
        # In turn, so that a disturbance affects one measurement of each rate.
        seconds = [[work.seconds(device) for work in works] for _ in range(TIMES)]
        columns = zip(*seconds, strict=True)
        rates = [Rate.of(work.amount * work.repeats, each) for work, each in zip(works, columns, strict=True)]
    single, memory, half = (one.median for one in rates)
    return Machine(name_of(device), half, single, memory, spread=max(one.spread for one in rates))


_measured = cache(_rates_of)
#: Two threads that measure a device at once would each find half of its rates.
_measure_lock = ForkSafeLock(shared=False)


def _product(device: torch.device, dtype: torch.dtype, scale: int) -> _Work:
    size = scale * _ROWS
    generator = torch.Generator(device)  # torch's default one belongs to the user's training
    # Random numbers: under a power limit a device multiplies constants faster.
    square = torch.randn(size, size, device=device, generator=generator).to(dtype)
    return _Work(partial(torch.mm, square, square, out=torch.empty_like(square)), 2.0 * size**3)


def _copy(device: torch.device, scale: int) -> _Work:
    source = torch.ones(scale**2 * _BYTES, dtype=torch.uint8, device=device)
    return _Work(partial(torch.empty_like(source).copy_, source), 2.0 * source.numel())


def _sized(device: torch.device, work_of: Callable[[int], _Work]) -> _Work:
    """Returns the work of the first scale that is large enough, repeated until it takes ``_SECONDS``."""
    work, once, rate = None, 0.0, 0.0
    for scale in _SCALES:
        try:
            larger = work_of(scale)
            larger.seconds(device)  # warm-up: loads kernels, starts threads, touches memory
            work, once = larger, larger.seconds(device)
        except torch.OutOfMemoryError:
            if work is None:
                raise
            break
        before, rate = rate, work.amount / once
        if once > _LARGE_ENOUGH and (rate <= _RISING * before or once > _LONGEST):
            break
    assert work is not None
    return work._replace(repeats=max(round(_SECONDS / once), 1))


def _is_here(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    here = torch.accelerator.current_accelerator(check_available=True)
    return here is not None and here.type == device.type and (device.index or 0) < torch.accelerator.device_count()
