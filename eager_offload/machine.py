"""How fast a device is: one description, one table of devices, and one way to measure those that are not in it."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from eager_offload.errors import ConfigError
from eager_offload.names import checks_names

if TYPE_CHECKING:
    import torch  # which names of devices are known without

#: Bytes a second of a link that was not measured: a slow one, so that what comes over it is asked for early.
UNKNOWN_BANDWIDTH = 1e9


@checks_names()
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
        kernels: whose kernels a plan counts the saves of: ``"cuda"`` or ``"cpu"``. Where the process has an
            accelerator, ``"cuda"`` stands for its own.

    Raises:
        ConfigError: a name that is no text, a rate that is not above 0, a size or a time below 0, or other kernels.
    """

    name: str
    flops: float
    single_flops: float
    memory: float
    out: float = UNKNOWN_BANDWIDTH
    back: float = UNKNOWN_BANDWIDTH
    memory_bytes: int = 0
    launch_seconds: float = 0.0
    kernels: str = "cuda"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"name={self.name!r} is not accepted: name of a Machine takes a text")
        if self.kernels not in ("cuda", "cpu"):
            raise ConfigError(f'kernels={self.kernels!r} is not accepted: kernels of a Machine takes "cuda" or "cpu"')
        for field in (one for one in fields(self) if one.type != "str"):
            value = getattr(self, field.name)
            least = 0 if field.name in ("memory_bytes", "launch_seconds") else math.ulp(0.0)
            is_whole = field.name == "memory_bytes"
            is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
            if not is_number or not least <= value <= sys.float_info.max:
                accepted = "0 or more" if least == 0 else "a number above 0"
                accepted = "a whole number, 0 or more" if is_whole else accepted
                raise ConfigError(f"{field.name}={value!r} is not accepted: {field.name} of a Machine takes {accepted}")

    def seconds(self, flops: float, nbytes: float, *, single: bool = False) -> float:
        """How long an operator takes: as its operations or its bytes do, whichever is longer; 0 where it has neither.

        The roofline model of Williams, Waterman and Patterson.

        Args:
            flops: operations of products.
            nbytes: read and written.
            single: whether the numbers that it multiplies have 32 bits or more.
        """
        if nbytes == 0 and flops == 0:
            return 0.0
        peak = self.single_flops if single else self.flops
        return max(flops / peak, nbytes / self.memory, self.launch_seconds)

    def __str__(self) -> str:
        from eager_offload.config import size_text  # imports torch, which names of machines are known without

        memory = f", {size_text(self.memory_bytes)}" if self.memory_bytes else ""
        return (
            f"{self.name}: {self.flops / 1e12:,.3g} TFLOP/s, {self.memory / 1e9:,.4g} GB/s of memory{memory}; "
            f"link {self.out / 1e9:,.3g} GB/s out, {self.back / 1e9:,.3g} GB/s back"
        )


GIB = 1 << 30
#: Of a data sheet's figure, what training reaches: of the operations of products, and of the bytes of memory.
_PRODUCTS, _MEMORY = 0.6, 0.8
#: Seconds of the host for one operator of eager code.
LAUNCH_SECONDS = 5e-6
#: Bytes a second of 16 lanes each way, out of pinned memory: 63 and 31.5 GB/s less what packets take, as copies of
#: 256 MiB reach it.
_PCIE_5, _PCIE_4 = 52e9, 26e9


def _device(name: str, flops: float, single: float, memory: float, link: float, gib: float) -> Machine:
    """By the figures of a data sheet: dense products, and what torch says is the capacity of its memory."""
    return Machine(
        name, _PRODUCTS * flops, _PRODUCTS * single, _MEMORY * memory, link, link, int(gib * GIB), LAUNCH_SECONDS
    )


#: By the names that a plan takes.
TABLE = {
    machine.name: machine
    for machine in (
        # NVIDIA H200 Tensor Core GPU, data sheet (SXM): 1,979 TFLOP/s in bf16 with sparsity, half of that dense; 67 in
        # fp32; 4.8 TB/s. Of the operations what benchmarks/README.md takes: 11,500 in the time of a byte.
        Machine(
            "h200", 11_500 * _PCIE_5, _PRODUCTS * 67e12, _MEMORY * 4.8e12, _PCIE_5, _PCIE_5, 139 * GIB, LAUNCH_SECONDS
        ),
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
    known = TABLE.get(_NAMES_IN_TORCH.get(name_of(device), ""))
    if known is None:
        return _measured(device)
    return replace(known, single_flops=known.flops / 2 if _takes_tf32() else known.single_flops, launch_seconds=0.0)


def name_of(device: torch.device) -> str:
    """Returns what torch calls ``device``; its type where torch has no name for it, or it is not on this machine."""
    import torch

    if device.type == "cpu" or not _is_here(device):
        return device.type
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


class Measurement(NamedTuple):
    """What :func:`measure` finds."""

    machine: Machine
    spread: float
    """The distance of the quartiles of a rate as a part of its median: of all rates the largest."""


#: How often a rate is measured, and for how many seconds each time.
_TIMES, _SECONDS = 5, 0.02
#: Rows and columns of a product and bytes of a copy, at a scale of 1.
_ROWS, _BYTES = 512, 2 << 20
#: Of these the first at which one product, or copy, takes so many seconds: threads of a CPU wait for each other, which
#: on shared cores takes up to 16 ms, and a small one would be all waiting.
_SCALES, _LARGE_ENOUGH = (1, 2, 3, 4, 6, 8), 0.02

#: Makes a piece of work of a scale: what does it, and the operations or bytes of it.
_Work = Callable[[int], tuple[Callable[[], object], float]]


def measure(device: torch.device | None = None) -> Measurement:
    """Measures the rates of ``device``: products of numbers of 16 and of 32 bits, and bytes read and written in memory.

    Each rate is the median of 5 measurements of 20 ms or more, so that it is not that of a moment in which something
    else ran. Takes at most 0.4 GiB on an accelerator, less where that is not free, and needs about a second.

    Args:
        device: ``None`` is the accelerator, or the CPU if there is none.

    Raises:
        ConfigError: ``device`` is not on this machine.
    """
    import torch

    from eager_offload._torch import without_dispatch_modes

    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if not _is_here(device):
        raise ConfigError(
            f"device={str(device)!r} is not accepted: it is not on this machine, to be measured. Known without that "
            f"are {', '.join(TABLE)}; an eager_offload.Machine describes any other"
        )
    # Compilers trace without bytes, and what is measured is no part of what they trace.
    with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        rate = partial(_rate, device)
        single = rate(partial(_product, device, torch.float32))
        try:
            half = rate(partial(_product, device, torch.bfloat16))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # not every device has products of such numbers
            half = single
        memory = rate(partial(_copy, device))
    machine = Machine(name_of(device), half[0], single[0], memory[0])
    return Measurement(machine, max(spread for _, spread in (half, single, memory)))


@cache
def _measured(device: torch.device) -> Machine:
    return measure(device).machine


def _product(device: torch.device, dtype: torch.dtype, scale: int) -> tuple[Callable[[], object], float]:
    import torch

    size = scale * _ROWS
    generator = torch.Generator(device)  # not torch's own, whose numbers belong to the user's training
    # Random ones: a device that is short of power multiplies ones or zeros faster.
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    return partial(torch.mm, left, right, out=torch.empty_like(left)), 2.0 * size**3


def _copy(device: torch.device, scale: int) -> tuple[Callable[[], object], float]:
    import torch

    source = torch.ones(scale**2 * _BYTES, dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source), 2.0 * source.numel()


def _rate(device: torch.device, work: _Work) -> tuple[float, float]:
    """The median of the rate at which ``device`` does ``work``, and its spread."""
    import torch

    def seconds_of(run: Callable[[], object], repeats: int) -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return max(time.perf_counter() - started, 1e-9)

    run, amount, once = None, 0.0, 0.0
    for scale in _SCALES:
        try:
            larger, its_amount = work(scale)
            seconds_of(larger, 1)  # loads kernels, starts threads and fills memory
            run, amount, once = larger, its_amount, seconds_of(larger, 1)
        except torch.OutOfMemoryError:
            if run is None:
                raise
            break
        if once > _LARGE_ENOUGH:
            break
    assert run is not None
    repeats = max(round(_SECONDS / once), 1)
    rates = [amount * repeats / seconds_of(run, repeats) for _ in range(_TIMES)]
    lower, median, upper = statistics.quantiles(rates, n=4)
    return median, (upper - lower) / median


def _is_here(device: torch.device) -> bool:
    import torch

    if device.type == "cpu":
        return True
    here = torch.accelerator.current_accelerator(check_available=True)
    return here is not None and here.type == device.type and (device.index or 0) < torch.accelerator.device_count()


def _takes_tf32() -> bool:
    """Whether products of numbers of 32 bits are made in TF32, at half of the rate of 16 bits."""
    import torch

    # Of the two ways in which this is set, this one may be asked after either.
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
