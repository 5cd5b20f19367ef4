"""A trace as a step of a small model leaves one, with what is awkward to show: long names, markup in a name."""

from __future__ import annotations

from eager_offload.trace_file import MemorySample, SavedGroup, Slice, SliceKind, Trace

MIB = 1 << 20
LAYERS = 6
#: No module is called that, and nothing may come of it.
AWKWARD = '</script><img src=x onerror="document.title=1">&amp;'
_LONG = "Transformer.encoder_with_a_rather_long_name.blocks_of_the_second_stage.0.attention.output_projection"

_PARTS = (("attention", "ScaledDotProductFlashAttentionForCpuBackward0", 12), ("mlp", "GeluBackward0", 16))


def example() -> Trace:
    """Forward saves 28 MiB a layer, most of it leaves; backward brings it back and stalls twice."""
    return Trace(
        seconds=0.9,
        config={"tier": "disk", "disk_path": ["/tmp"], "min_bytes": MIB, "keep_last_bytes": "auto", "verify": False},
        stats={
            "saved_tensors": 60,
            "saved_bytes": 196 * MIB,
            "offloaded_tensors": 10,
            "offloaded_bytes": 140 * MIB,
            "shared_bytes": 20 * MIB,
            "kept_bytes": {"newest": 28 * MIB, "small": 3 * MIB, "parameter": 5 * MIB},
            "bytes_out": 140 * MIB,
            "bytes_in": 112 * MIB,
            "disk_bytes_written": 141 * MIB,
            "stall_seconds": 0.015,
            "demotions": {"budget": 2},
        },
        advice=(
            "Transfers held compute up for 0.015 s, 2 % of the time: raise prefetch_bytes from 256.0 MiB.",
            "28.0 MiB stayed because they were the newest: lower keep_last_bytes if memory matters more than time.",
        ),
        saved=tuple(_saved()),
        slices=tuple(_slices()),
        memory=tuple(_memory()),
        versions={"eager_offload": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        dropped=7,
    )


def _saved() -> list[SavedGroup]:
    groups = [
        SavedGroup(operation, f"Net.layers.{layer}.{part}", "offloaded", "", 1, mib * MIB)
        for layer in range(LAYERS - 1)
        for part, operation, mib in _PARTS
    ]
    groups += [
        SavedGroup(operation, f"Net.layers.{LAYERS - 1}.{part}", "kept", "newest", 1, mib * MIB)
        for part, operation, mib in _PARTS
    ]
    groups += [
        SavedGroup("AddmmBackward0", f"Net.layers.{layer}.mlp", "kept", "parameter", 2, MIB) for layer in range(5)
    ]
    groups += [
        SavedGroup("NativeLayerNormBackward0", _LONG, "shared", "", 9, 20 * MIB),
        SavedGroup("", AWKWARD, "kept", "small", 11, 3 * MIB),
    ]
    return sorted(groups, key=lambda group: -group.nbytes)


def _slices() -> list[Slice]:
    slices = [Slice(SliceKind.COMPUTE, "Net", "cpu", "compute forward", 0.0, 0.3)]
    slices += [Slice(SliceKind.COMPUTE, "backward", "cpu", "compute backward", 0.3, 0.58)]
    for layer in range(LAYERS):
        start, name = 0.05 * layer, f"Net.layers.{layer}"
        slices += [Slice(SliceKind.COMPUTE, name, "cpu", "compute forward", start, 0.05, module=name)]
        for half, (part, operation, mib) in enumerate(_PARTS):
            at, module = start + 0.025 * half, f"{name}.{part}"
            slices += [Slice(SliceKind.COMPUTE, module, "cpu", "compute forward", at, 0.024, module=module)]
            back = 0.3 + 0.09 * (LAYERS - 1 - layer) + 0.045 * (1 - half)
            slices += [Slice(SliceKind.COMPUTE, operation, "cpu", "compute backward", back, 0.04, operation=operation)]
            if layer == LAYERS - 1:
                continue
            where = {"module": module, "operation": operation, "tier": "disk"}
            slices += [Slice(SliceKind.OFFLOAD, module, "cpu", "offload", at + 0.025, 0.02, mib * MIB, **where)]
            kind = SliceKind.RELOAD if layer == 0 and half else SliceKind.PREFETCH
            slices += [Slice(kind, module, "cpu", kind.value, back - 0.05, 0.03, mib * MIB, **where)]
    slices += [
        Slice(SliceKind.STALL, "reload", "cpu", "stall", 0.74, 0.01),
        Slice(SliceKind.STALL, AWKWARD, "cpu", "stall", 0.8, 0.005),
    ]
    slices += [Slice(SliceKind.OFFLOAD, "offload", "cuda:0", "offload", 0.1, 0.05, MIB, tier="host")]
    return slices


def _memory() -> list[MemorySample]:
    samples = [MemorySample(0.0, 0, 0, 0, 0)]
    for layer in range(LAYERS):
        whole = 28 * MIB * (layer + 1)
        samples.append(MemorySample(0.05 * (layer + 1), min(whole, 45 * MIB), 0, max(whole - 45 * MIB, 0), whole))
    for layer in reversed(range(LAYERS)):
        whole = 28 * MIB * layer
        samples.append(
            MemorySample(0.3 + 0.09 * (LAYERS - layer), min(whole, 40 * MIB), 0, max(whole - 40 * MIB, 0), whole)
        )
    return samples
