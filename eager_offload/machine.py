"""What a device, its memory and its link to the host do in a second: one description, for compilers and the planner."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields

from eager_offload.errors import ConfigError
from eager_offload.names import checks_names

#: Bytes a second of a link that was not measured: a slow one, so that what comes over it is asked for early.
_UNKNOWN_BANDWIDTH = 1e9


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

    Raises:
        ConfigError: a name that is no text, a rate that is not above 0, or a size or a time below 0.
    """

    name: str
    flops: float
    single_flops: float
    memory: float
    out: float = _UNKNOWN_BANDWIDTH
    back: float = _UNKNOWN_BANDWIDTH
    memory_bytes: int = 0
    launch_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"name={self.name!r} is not accepted: name of a Machine takes a text")
        for field in fields(self)[1:]:
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
MACHINES = {
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
