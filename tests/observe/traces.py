"""A trace as a step of a small model leaves one, with what is awkward to show: long names, markup in a name."""

from __future__ import annotations

from eager_offload.trace_file import MemorySample, SavedGroup, Slice, SliceKind, Trace

MIB = 1 << 20
LAYERS = 6
#: No module is called that, and nothing may come of it.
AWKWARD = '</script><img src=x onerror="document.title=1">&amp;'
_LONG = "Transformer.encoder_with_a_rather_long_name.blocks_of_the_second_stage.0.attention.output_projection"


def example() -> Trace:
    """Forward saves 28 MiB a layer, most of it leaves; backward brings it back and stalls twice."""
    return Trace(
        seconds=0.9,
        config={"tier": "disk", "disk_path": ["/tmp"], "min_bytes": MIB},
        stats={
            "saved_tensors": 60,
            "saved_bytes": 196 * MIB,
            "offloaded_bytes": 140 * MIB,
            "shared_bytes": 20 * MIB,
            "kept_bytes": {"newest": 28 * MIB, "small": 3 * MIB, "parameter": 5 * MIB},
            "bytes_out": 140 * MIB,
            "bytes_in": 112 * MIB,
            "stall_seconds": 0.015,
            "demotions": {"budget": 2},
        },
        advice=("Transfers held compute up for 0.015 s, 2 % of the time: raise prefetch_bytes from 256.0 MiB.",),
        saved=(
            *(
                SavedGroup("GeluBackward0", f"Net.layers.{layer}.mlp", "offloaded", "", 1, 16 * MIB)
                for layer in range(5)
            ),
            SavedGroup("GeluBackward0", "Net.layers.5.mlp", "kept", "newest", 1, 16 * MIB),
            SavedGroup("NativeLayerNormBackward0", _LONG, "shared", "", 9, 20 * MIB),
            SavedGroup("", AWKWARD, "kept", "small", 11, 3 * MIB),
        ),
        slices=tuple(_slices()),
        memory=tuple(_memory()),
        versions={"eager_offload": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        dropped=7,
    )


def _slices() -> list[Slice]:
    slices = [Slice(SliceKind.COMPUTE, "Net", "cpu", "compute forward", 0.0, 0.3)]
    slices += [Slice(SliceKind.COMPUTE, "backward", "cpu", "compute backward", 0.3, 0.58)]
    for layer in range(LAYERS):
        start, back, name = 0.05 * layer, 0.3 + 0.09 * (LAYERS - 1 - layer), f"Net.layers.{layer}"
        module, where = f"{name}.mlp", {"module": f"{name}.mlp", "operation": "GeluBackward0"}
        slices += [Slice(SliceKind.COMPUTE, name, "cpu", "compute forward", start, 0.05, module=name)]
        slices += [Slice(SliceKind.COMPUTE, module, "cpu", "compute forward", start, 0.024, module=module)]
        slices += [Slice(SliceKind.COMPUTE, module, "cpu", "compute backward", back, 0.04, **where)]
        if layer < LAYERS - 1:
            where |= {"tier": "disk"}
            slices += [Slice(SliceKind.OFFLOAD, "offload", "cpu", "offload", start + 0.025, 0.02, 16 * MIB, **where)]
            slices += [Slice(SliceKind.PREFETCH, "prefetch", "cpu", "prefetch", back - 0.05, 0.03, 16 * MIB, **where)]
    slices += [Slice(SliceKind.RELOAD, "reload", "cpu", "reload", 0.74, 0.01, MIB, tier="disk")]
    slices += [Slice(SliceKind.STALL, "reload", "cpu", "stall", 0.74, 0.01)]
    slices += [Slice(SliceKind.STALL, AWKWARD, "cpu", "stall", 0.8, 0.005)]
    return [*slices, Slice(SliceKind.OFFLOAD, "offload", "cuda:0", "offload", 0.1, 0.05, MIB, tier="host")]


def _memory() -> list[MemorySample]:
    samples = [MemorySample(0.0, 0, 0, 0, 0)]
    for count in (*range(1, LAYERS + 1), *reversed(range(LAYERS))):
        whole = 28 * MIB * count
        samples.append(MemorySample(0.05 * len(samples), min(whole, 45 * MIB), 0, max(whole - 45 * MIB, 0), whole))
    return samples
