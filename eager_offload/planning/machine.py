"""Rates of a device and its link: ``Machine``, and a table of known devices. ``--help`` needs it without torch."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields
from functools import partial

from eager_offload.errors import ConfigError, checks_names

#: Bytes per second assumed for an unmeasured link: slow, so that storages are prefetched early.
UNKNOWN_BANDWIDTH = 1e9

#: The minimum of each field that is not just above 0.
_LEAST = {"memory_bytes": 0, "launch_seconds": 0, "policy_seconds": 0, "spread": 1}


@checks_names
@dataclass(frozen=True)
class Machine:
    """The rates that a device reaches when it does nothing else.

    Args:
        name: the device's name in texts.
        flops: FLOP/s of products of 16-bit numbers.
        single_flops: FLOP/s of products of 32-bit numbers.
        memory: bytes per second that the device reads and writes in its own memory.
        out: bytes per second to the tier.
        back: bytes per second from the tier.
        memory_bytes: bytes of device memory that a process can allocate; 0 if unknown.
        launch_seconds: the shortest time of an operator, in seconds.
        policy_seconds: extra host time per operator of a recomputed block that keeps some of its results, in seconds,
            in forward and again in backward.
        spread: the ninth decile of a rate's measurements divided by the first, the largest of all rates; 1 if nothing
            was measured.
        kernels: ``"cuda"`` (or the process's accelerator) or ``"cpu"``: the kernels whose saves a plan counts.

    Raises:
        ConfigError: a value of another type or out of range.
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
        """Returns the time of an operator in seconds by the roofline model of Williams, Waterman and Patterson.

        Args:
            flops: FLOP of its products.
            nbytes: bytes read and written.
            single: whether the operands of its products have 32 bits or more.
            policies: calls of a checkpointing policy, for the operator and the views before it.
        """
        if nbytes == 0 and flops == 0:
            return 0.0
        peak, asking = self.single_flops if single else self.flops, policies * self.policy_seconds
        seconds = max(flops / peak, nbytes / self.memory)
        # With an accelerator the host runs ahead, so its time only counts if it is longer.
        return max(seconds, self.launch_seconds + asking) if self.launch_seconds else seconds + asking

    def __str__(self) -> str:
        from eager_offload.config import size_text  # imported late: it imports torch

        memory = f", {size_text(self.memory_bytes)}" if self.memory_bytes else ""
        spread = f"; medians, spread {self.spread:,.2f}" if self.spread > 1 else ""
        return (
            f"{self.name}: {self.flops / 1e12:,.3g} TFLOP/s, {self.memory / 1e9:,.4g} GB/s of memory{memory}; "
            f"link {self.out / 1e9:,.3g} GB/s out, {self.back / 1e9:,.3g} GB/s back{spread}"
        )


#: The fractions of a data sheet's FLOP/s and memory bandwidth that training reaches.
_PRODUCTS, _MEMORY = 0.6, 0.8
#: Host seconds per eager operator, and the extra seconds of a policy: measured as 8 us in forward and 12 us in backward
#: more than in a fully recomputed block (torch 2.13, one core of an AMD EPYC).
LAUNCH_SECONDS, POLICY_SECONDS = 5e-6, 1e-5
#: Bytes per second of 16 lanes in each direction from pinned memory: 63 and 31.5 GB/s without packet overhead, as
#: reached by copies of 256 MiB.
_PCIE_5, _PCIE_4 = 52e9, 26e9


def _device(name: str, flops: float, single: float, memory: float, link: float, gib: float) -> Machine:
    """Returns a machine for dense rates of a data sheet, and a memory capacity as torch reports it."""
    capacity = int(gib * (1 << 30))
    return _of_the_table(name, _PRODUCTS * flops, _PRODUCTS * single, _MEMORY * memory, link, link, capacity)


_of_the_table = partial(Machine, launch_seconds=LAUNCH_SECONDS, policy_seconds=POLICY_SECONDS)


TABLE = {
    machine.name: machine
    for machine in (
        # NVIDIA H200 Tensor Core GPU, data sheet (SXM): 1,979 TFLOP/s in bf16 with sparsity, half of that dense; 67 in
        # fp32; 4.8 TB/s. FLOP/s: 11,500 per byte of the link.
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
