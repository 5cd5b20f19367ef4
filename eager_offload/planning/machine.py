"""How fast a device is: one description, one table of devices, and one way to measure those that are not in it.

    measure      measures a device and its link, anew at each call
    machine_of   a device by the table, or measured once in this process
    link_of      a link, measured once; ``disk_link`` the one to a disk
    here         the device and the link of this process, by the settings of an ``Offload``

Nothing inside pack or unpack asks any of them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from eager_offload.errors import ConfigError, checks_names
from eager_offload.tiers.base import TIMES, LinkRates, Rate
from eager_offload.tiers.forking import ForkSafeLock

if TYPE_CHECKING:
    import torch  # which names of devices are known without

    from eager_offload.config import OffloadConfig, PathLike
    from eager_offload.runtime.base import Runtime

#: Bytes a second of a link that was not measured: a slow one, so that what comes over it is asked for early.
UNKNOWN_BANDWIDTH = 1e9

#: The least values of fields, where that is not any number above 0.
_LEAST = {"memory_bytes": 0, "launch_seconds": 0, "policy_seconds": 0, "spread": 1}


@checks_names
@dataclass(frozen=True)
class Machine:
    """What a device reaches when it does nothing else. Everything is by the second, but for sizes.

    Args:
        name: what it is called in texts.
        flops: operations of products of 16-bit numbers.
        single_flops: operations of products of 32-bit numbers.
        memory: bytes that the device reads and writes in its own memory.
        out: bytes that travel to the tier.
        back: bytes that come back from it.
        memory_bytes: bytes of the device's memory that a process can allocate; 0 where that is not known.
        launch_seconds: seconds that an operator takes at least, however small it is.
        policy_seconds: seconds of the host that each operator of a block takes besides, in forward and again in
            backward, where the block keeps some of its results and is computed again.
        spread: of the measurements of a rate, the ninth decile divided by the first; of all rates the largest. 1 where
            nothing was measured.
        kernels: whose kernels a plan counts the saves of: ``"cuda"`` or ``"cpu"``. Where the process has an
            accelerator, ``"cuda"`` stands for its own.

    Raises:
        ConfigError: a name that is no text, a rate that is not above 0, a size or a time below 0, a spread below 1, or
            other kernels.
    """

    name: str
    flops: float
    single_flops: float
    memory: float
    out: float = UNKNOWN_BANDWIDTH
    back: float = UNKNOWN_BANDWIDTH
    memory_bytes: int = 0
    launch_seconds: float = 0.0
    spread: float = 1.0
    kernels: str = "cuda"
    policy_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"name={self.name!r} is not accepted: name of a Machine takes a text")
        if self.kernels not in ("cuda", "cpu"):
            raise ConfigError(f'kernels={self.kernels!r} is not accepted: kernels of a Machine takes "cuda" or "cpu"')
        for field in (one for one in fields(self) if one.type != "str"):
            value = getattr(self, field.name)
            least = _LEAST.get(field.name, math.ulp(0.0))
            is_whole = field.name == "memory_bytes"
            is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
            if not is_number or not least <= value <= sys.float_info.max:
                accepted = f"{least:.0f} or more" if field.name in _LEAST else "a number above 0"
                accepted = f"a whole number, {accepted}" if is_whole else accepted
                raise ConfigError(f"{field.name}={value!r} is not accepted: {field.name} of a Machine takes {accepted}")

    def seconds(self, flops: float, nbytes: float, *, single: bool = False, policies: int = 0) -> float:
        """How long an operator takes: as its operations or its bytes do, whichever is longer; 0 where it has neither.

        The roofline model of Williams, Waterman and Patterson.

        Args:
            flops: operations of products.
            nbytes: read and written.
            single: whether the numbers that it multiplies have 32 bits or more.
            policies: how many operators a policy is asked of meanwhile: it and the views before it.
        """
        if nbytes == 0 and flops == 0:
            return 0.0
        peak, asking = self.single_flops if single else self.flops, policies * self.policy_seconds
        seconds = max(flops / peak, nbytes / self.memory)
        # A host that is not the device asks ahead of it.
        return max(seconds, self.launch_seconds + asking) if self.launch_seconds else seconds + asking

    def __str__(self) -> str:
        from eager_offload.config import size_text  # imports torch, which names of machines are known without

        memory = f", {size_text(self.memory_bytes)}" if self.memory_bytes else ""
        spread = f"; medians, spread {self.spread:,.2f}" if self.spread > 1 else ""
        return (
            f"{self.name}: {self.flops / 1e12:,.3g} TFLOP/s, {self.memory / 1e9:,.4g} GB/s of memory{memory}; "
            f"link {self.out / 1e9:,.3g} GB/s out, {self.back / 1e9:,.3g} GB/s back{spread}"
        )


#: Of a data sheet's figure, what training reaches: of the operations of products, and of the bytes of memory.
_PRODUCTS, _MEMORY = 0.6, 0.8
#: Seconds of the host for one operator of eager code, and what a policy adds to one, in forward and in backward alike:
#: 8 and 12 microseconds more than in a block that is computed again whole (torch 2.13, one core of an AMD EPYC).
LAUNCH_SECONDS, POLICY_SECONDS = 5e-6, 1e-5
#: Bytes a second of 16 lanes each way, out of pinned memory: 63 and 31.5 GB/s less what packets take, as copies of
#: 256 MiB reach it.
_PCIE_5, _PCIE_4 = 52e9, 26e9


def _device(name: str, flops: float, single: float, memory: float, link: float, gib: float) -> Machine:
    """By the figures of a data sheet: dense products, and what torch says is the capacity of its memory."""
    capacity = int(gib * (1 << 30))
    return _of_the_table(name, _PRODUCTS * flops, _PRODUCTS * single, _MEMORY * memory, link, link, capacity)


_of_the_table = partial(Machine, launch_seconds=LAUNCH_SECONDS, policy_seconds=POLICY_SECONDS)


#: By the names that a plan takes.
TABLE = {
    machine.name: machine
    for machine in (
        # NVIDIA H200 Tensor Core GPU, data sheet (SXM): 1,979 TFLOP/s in bf16 with sparsity, half of that dense; 67 in
        # fp32; 4.8 TB/s. Of the operations what benchmarks/README.md takes: 11,500 in the time of a byte.
        _of_the_table("h200", 11_500 * _PCIE_5, _PRODUCTS * 67e12, _MEMORY * 4.8e12, _PCIE_5, _PCIE_5, 139 << 30),
        # NVIDIA H100 Tensor Core GPU, data sheet (SXM): the same cores; 3.35 TB/s, 80 GB.
        _device("h100", 989.5e12, 67e12, 3.35e12, _PCIE_5, 79.0),
        # NVIDIA A100 80GB Tensor Core GPU, data sheet (SXM): 312 TFLOP/s dense; 19.5 in fp32; 2,039 GB/s, 80 GB.
        _device("a100", 312e12, 19.5e12, 2.039e12, _PCIE_4, 79.0),
        # NVIDIA L40S, data sheet: 362 TFLOP/s dense; 91.6 in fp32; 864 GB/s, 48 GB.
        _device("l40s", 362e12, 91.6e12, 0.864e12, _PCIE_4, 44.3),
        # NVIDIA Ada GPU architecture, appendix A, GeForce RTX 4090: 165.2 TFLOP/s dense with fp32 accumulation; 82.6 in
        # fp32; 1,008 GB/s, 24 GB.
        _device("rtx4090", 165.2e12, 82.6e12, 1.008e12, _PCIE_4, 23.5),
    )
}
#: What torch calls them. Another form of a device, such as one for a PCIe slot or a slice of one, has another name, and
#: is measured.
_NAMES_IN_TORCH = {
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}


def machine_of(device: torch.device) -> Machine:
    """Returns what ``device`` does in a second: by :data:`TABLE` if it is there, else measured once, in about a second.

    Its link is not measured, and an operator has no least time.

    Raises:
        ConfigError: ``device`` is not in the table, and not on this machine.
    """
    import torch

    known = TABLE.get(_NAMES_IN_TORCH.get(name_of(device), ""))
    if known is None:
        with _measure_lock.lock:
            return _measured(device)
    # TF32 has half of the rate of 16 bits. Of the two ways in which it is set, this one may be asked after either.
    is_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return replace(known, single_flops=known.flops / 2 if is_tf32 else known.single_flops, launch_seconds=0.0)


def name_of(device: torch.device) -> str:
    """Returns what torch calls ``device``; its type where torch has no name for it, or it is not on this machine."""
    import torch

    if device.type == "cpu" or not _is_here(device):
        return device.type
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def memory_of(device: torch.device) -> int | None:
    """Returns the bytes of memory that ``device`` has; ``None`` where that is not known."""
    from eager_offload.runtime.accelerator import accelerator_runtime
    from eager_offload.tiers.limits import host_capacity

    if device.type == "cpu":
        return host_capacity()
    return accelerator_runtime().total_memory(device) if _is_here(device) else None


def here(settings: OffloadConfig) -> Machine:
    """Returns the device of this process, with the link to the tier that it offloads to first by ``settings``.

    That is the accelerator and host memory, or the CPU and a disk, unless the settings name a tier. What the table does
    not have is measured once, in about a second. The memory is what a process can have of it now.
    """
    import torch

    from eager_offload.runtime.accelerator import accelerator_runtime
    from eager_offload.runtime.host import host_runtime
    from eager_offload.tiers.limits import host_part

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        device, memory_bytes = torch.device("cpu"), host_part()
    else:
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        used = accelerator_runtime().memory(device)  # other processes and the driver have some of the rest
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

#: Two threads that measure a link at once would find half of it.
_link_lock = ForkSafeLock(shared=False)


def link_of(runtime: Runtime, device: torch.device) -> LinkRates:
    """Returns the link between ``device`` and host memory, measured at the first question. Thread-safe."""
    with _link_lock.lock:
        if device not in runtime.links:
            with _undisturbed():
                runtime.links[device] = runtime.measure_link(device)
        return runtime.links[device]


def disk_link(directory: PathLike | None) -> LinkRates:
    """Returns the link to the disk tier in ``directory``, measured once, in a file of its own that is counted
    nowhere.

    Args:
        directory: as ``OffloadConfig.disk_path``.
    """
    return _known_disk_link(None if directory is None else str(directory))


def _disk_link(directory: PathLike | None) -> LinkRates:
    from eager_offload.tiers.disk import DiskTier

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

#: For how many seconds a rate is measured each time.
_SECONDS = 0.02
#: Rows and columns of a product and bytes of a copy, at a scale of 1.
_ROWS, _BYTES = 512, 2 << 20
#: Of these the first at which one product, or copy, takes so many seconds, and has no more than so many times the rate
#: of the one before. Threads of a CPU wait for each other, on busy cores for 16 to 50 ms each time: a small product is
#: all waiting there, and a larger one has a higher rate. None is larger that takes longer than the last.
_SCALES, _LARGE_ENOUGH, _RISING, _LONGEST = (1, 2, 3, 4, 6, 8), 0.02, 1.5, 0.1


class _Work(NamedTuple):
    run: Callable[[], object]
    amount: float
    repeats: int = 1

    def seconds(self, device: torch.device) -> float:
        """Has ``device`` do it; returns how long that took."""
        import torch

        started = time.perf_counter()
        for _ in range(self.repeats):
            self.run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return max(time.perf_counter() - started, 1e-9)


def measure(device: torch.device | None = None, *, tier: str = "host", disk_path: PathLike | None = None) -> Machine:
    """Measures ``device``: products of numbers of 16 and of 32 bits, bytes of its memory, and its link to a tier.

    Each rate is the median of 5 measurements after one that is left out, so that it is not that of a moment in which
    something else ran; :attr:`Machine.spread` says how much they differ. Takes at most 0.6 GiB on an accelerator, less
    where that is not free, and about a second; a few on a busy machine or a slow disk.

    Args:
        device: ``None`` is the accelerator, or the CPU if there is none.
        tier: ``"host"``: the link is that to host memory; ``"disk"``: to a disk.
        disk_path: a directory for a file on that disk. ``None``: as ``OffloadConfig.disk_path``.

    Raises:
        ConfigError: ``device`` is not on this machine, another ``tier``, ``disk_path`` beside ``"host"``, or no
            directory serves.
    """
    import torch

    from eager_offload.runtime.accelerator import accelerator_runtime
    from eager_offload.runtime.host import host_runtime

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
    """Compilers trace without bytes, and what is measured is no part of what they trace."""
    import torch

    from eager_offload.torch_private.calls import without_dispatch_modes

    with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def _rates_of(device: torch.device) -> Machine:
    import torch

    if not _is_here(device):
        raise ConfigError(
            f"device={str(device)!r} is not accepted: it is not on this machine, to be measured. Known without that "
            f"are {', '.join(TABLE)}; an eager_offload.Machine describes any other"
        )
    with _undisturbed():
        works = [_sized(device, partial(_product, device, torch.float32)), _sized(device, partial(_copy, device))]
        try:
            works.append(_sized(device, partial(_product, device, torch.bfloat16)))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # not every device has products of such numbers
            works.append(works[0])
        # In turn, so that a moment in which something else runs is in one of each.
        seconds = [[work.seconds(device) for work in works] for _ in range(TIMES)]
        columns = zip(*seconds, strict=True)
        rates = [Rate.of(work.amount * work.repeats, each) for work, each in zip(works, columns, strict=True)]
    single, memory, half = (one.median for one in rates)
    return Machine(name_of(device), half, single, memory, spread=max(one.spread for one in rates))


_measured = cache(_rates_of)
#: Two threads that measure a device at once would find half of it.
_measure_lock = ForkSafeLock(shared=False)


def _product(device: torch.device, dtype: torch.dtype, scale: int) -> _Work:
    import torch

    size = scale * _ROWS
    generator = torch.Generator(device)  # not torch's own, whose numbers belong to the user's training
    # Random ones: a device that is short of power multiplies ones or zeros faster.
    square = torch.randn(size, size, device=device, generator=generator).to(dtype)
    return _Work(partial(torch.mm, square, square, out=torch.empty_like(square)), 2.0 * size**3)


def _copy(device: torch.device, scale: int) -> _Work:
    import torch

    source = torch.ones(scale**2 * _BYTES, dtype=torch.uint8, device=device)
    return _Work(partial(torch.empty_like(source).copy_, source), 2.0 * source.numel())


def _sized(device: torch.device, work_of: Callable[[int], _Work]) -> _Work:
    """Returns the work of the first scale that is large enough, repeated until it takes ``_SECONDS``."""
    import torch

    work, once, rate = None, 0.0, 0.0
    for scale in _SCALES:
        try:
            larger = work_of(scale)
            larger.seconds(device)  # loads kernels, starts threads and fills memory
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
    import torch

    if device.type == "cpu":
        return True
    here = torch.accelerator.current_accelerator(check_available=True)
    return here is not None and here.type == device.type and (device.index or 0) < torch.accelerator.device_count()
