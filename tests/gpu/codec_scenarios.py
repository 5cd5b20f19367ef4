"""What codecs have to do on an accelerator. As ``scenarios.py``, they need torch alone."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import torch
from torch import Tensor

import eager_offload as eo
from eager_offload.codecs import BF16, BitMask, Codec, Gather, Narrow, TensorMeta
from eager_offload.codecs.names import ROUNDING
from eager_offload.codecs.rounded import compiled_multiple
from eager_offload.kernels import Kernel, LaunchSpec, Signature, TensorSpec, as_torch_kernel
from tests.gpu.machine import Machine, Skipped
from tests.gpu.scenarios import Around, Late, Step, same, scenarios_in
from tests.hazards.backends import assert_settled
from tests.hazards.programs import Settled


def packed_by(codec: Codec, x: Tensor) -> tuple[Tensor, bool]:
    """``x`` packed, on its device, and whether the codec holds it."""
    layout = codec.layout(TensorMeta.of(x))
    out = torch.zeros(layout.nbytes, dtype=torch.uint8, device=x.device)
    holds = codec.pack(x, out)
    return out, holds is None or bool(holds)


def unpacked_by(codec: Codec, packed: Tensor, like: Tensor) -> Tensor:
    out = torch.zeros_like(like)
    codec.unpack(packed, out)
    return out


def hard_numbers(count: int) -> Tensor:
    """Of every magnitude, with denormals and zeros, and a block each with what is not finite."""
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(0))
    numbers *= 2.0 ** torch.linspace(-140, 120, count).round()
    numbers[::7] = 0.0
    numbers[0], numbers[64], numbers[128] = float("nan"), float("inf"), -float("inf")
    return numbers


def packing_has_the_bits_that_it_has_on_a_cpu(machine: Machine) -> None:
    numbers = hard_numbers(64 * machine.width)
    mask = numbers > 0
    cases: list[tuple[Codec, Tensor]] = [
        *((codec, numbers) for codec in ROUNDING.values()),
        *((codec, numbers.bfloat16()) for codec in ROUNDING.values() if not isinstance(codec, BF16)),
        (Narrow(), numbers),
        (Narrow(), numbers.bfloat16().float()),
        (BitMask(), mask),
        (BitMask(), torch.where(mask, 1.25, 0.0)),
        (BitMask(), numbers),
        (Gather(), numbers.view(-1, 64)[:, ::3]),
    ]
    for codec, x in cases:
        expected, holds = packed_by(codec, x)
        there = x.to(machine.device)
        packed, holds_there = packed_by(codec, there)
        assert holds_there == holds or not machine.computes, codec
        if not holds:
            continue
        # Of a NaN that is rounded devices make different ones.
        assert isinstance(codec, BF16) or torch.equal(packed.cpu(), expected) or not machine.computes, (codec, x.dtype)
        one, two = unpacked_by(codec, expected, x), unpacked_by(codec, packed, there).cpu()
        assert torch.allclose(one, two, rtol=0, atol=0, equal_nan=True) or not machine.computes, (codec, x.dtype)


def compiled_kernels_have_the_bits_of_the_reference(machine: Machine) -> None:
    if machine.device.type == "virtual":
        raise Skipped("Inductor knows no such device")
    numbers = hard_numbers(64 * machine.width).nan_to_num(1.0)
    for codec, x in itertools.product(ROUNDING.values(), (numbers, numbers[5:].bfloat16())):
        meta, spec = TensorMeta.of(x), TensorSpec(tuple(x.shape), x.dtype)
        if (layout := codec.layout(meta)) is None or len(x) % compiled_multiple(codec, machine.device):
            continue
        packed = TensorSpec((layout.nbytes,), torch.uint8)
        launch = LaunchSpec((1, 1, 1), (32, 1, 1))

        def pack(x: Tensor, out: Tensor, codec: Codec = codec) -> None:
            codec.pack(x, out)

        packing = Kernel(f"pack_{codec.name}", Signature((spec,), (packed,)), launch, {"torch": pack})
        unpacking = Kernel(f"unpack_{codec.name}", Signature((packed,), (spec,)), launch, {"torch": codec.unpack})
        results = []
        for impl in ("torch", "inductor"):
            out = torch.zeros(layout.nbytes, dtype=torch.uint8, device=machine.device)  # no kernel writes the padding
            as_torch_kernel(packing, impl)(x.to(machine.device), out=out)
            results.append((out, as_torch_kernel(unpacking, impl)(out)))
        ours, theirs = ([part.view(torch.uint8) for part in one] for one in results)  # the bits: NaN is in them
        assert all(map(torch.equal, ours, theirs)) or not machine.computes, (codec, x.dtype)


def saved(machine: Machine, around: Around, seed: int) -> tuple[Tensor, Tensor]:
    """The gradient of a weight is what backward was given of ``h``; a mask, a cast and a view with holes leave too."""
    x, w = machine.leaf(seed), machine.leaf(seed + 100)
    half = machine.leaf(seed + 200).detach().bfloat16().requires_grad_()
    with around:
        h = Late.apply(x, machine).sin()
        cast = half.float()
        y = torch.where(cast > 0, cast * cast, cast.sin()) + (cast[:, ::8] * cast[:, ::8]).repeat(1, 8)
        loss = (h * w).sum() + y.sum()
    del h, cast, y
    return torch.autograd.grad(loss, [w, half])


def packing_on_side_streams_is_exact(machine: Machine) -> None:
    home, sides = machine.current, [machine.side_stream(), machine.side_stream()]

    def program(around: Around) -> object:
        results = []
        for index in range(4):
            side = sides[index % 2]
            machine.meet(home, side)
            with machine.computing_on(side):
                step = Step(machine, index)
            step.both_on(side, around)
            with machine.computing_on(side):
                found = saved(machine, around, index)
            machine.meet(home, side)
            results += [step.result, *(one.clone() for one in found)]
            machine.meet(home, side)
            del found
        return results

    # Where nothing is computed a verdict is any: what is refused stays.
    same(machine, program, least=0.7 if machine.computes else 0, codec="lossless")


def what_is_rounded_on_side_streams_is_what_was_packed(machine: Machine) -> None:
    home, side = machine.current, machine.side_stream()
    expected = [saved(machine, nullcontext(), seed) for seed in range(4)]
    machine.finish()
    for name in ("bf16", "fp8"):
        codec = ROUNDING[name]
        for slow in (machine.slow_links, machine.slow_compute):
            offload = machine.offload(codec=name, step_plans=False)
            found = []
            with slow():
                for seed in range(4):
                    machine.meet(home, side)
                    with machine.computing_on(side):
                        gradient = saved(machine, Settled(offload), seed)[0]
                    machine.meet(home, side)
                    found.append(gradient.clone())
                    machine.meet(home, side)
                    del gradient
            for one, (exact, _) in zip(found, expected, strict=True):
                packed, _ = packed_by(codec, exact)
                assert torch.equal(one, unpacked_by(codec, packed, exact)) or not machine.computes, name
            assert assert_settled(offload).packed_bytes[name] > 0


def no_bit_changes_outside_of_a_region(machine: Machine) -> None:
    """Two products of one storage each: what the one inside has saved is rounded, the other's is exact."""
    x, weights = machine.leaf(1), [machine.leaf(seed) for seed in (2, 3)]

    def program(around: Around) -> list[Tensor]:
        with around:
            inside, outside = x.sin(), x.cos()
            with eo.codec("int8"):
                y = inside * weights[0]
            loss = (y + outside * weights[1]).sum()
        del inside, outside, y
        return [one.clone() for one in torch.autograd.grad(loss, weights)]

    codec, exact = ROUNDING["int8"], program(nullcontext())
    offload = machine.offload()
    found = program(Settled(offload))
    packed, _ = packed_by(codec, exact[0])
    assert torch.equal(found[0], unpacked_by(codec, packed, exact[0])) or not machine.computes
    assert torch.equal(found[1], exact[1]) or not machine.computes
    stats = assert_settled(offload)
    assert stats.bytes_out > stats.packed_bytes["int8"] > 0


def a_verdict_travels_and_what_is_refused_stays(machine: Machine) -> None:
    """The host reads it when the bytes have arrived; until then the source is held, whatever waits."""

    def program(around: Around, shift: float) -> object:
        half = machine.leaf(1).detach().bfloat16().requires_grad_()
        with around:
            cast = half.float()
            cast.data.add_(shift)  # changes no version: autograd still says that this is a cast
            loss = Late.apply(cast.square(), machine).sum()
        del cast
        return torch.autograd.grad(loss, half)

    for shift in (1e-3, 0.0):
        expected = program(nullcontext(), shift)
        for slow in (machine.slow_links, machine.slow_compute):
            for settled in (False, True):
                offload = machine.offload(codec="lossless")
                with slow():
                    machine.assert_identical(expected, program(Settled(offload) if settled else offload, shift))
                    machine.finish()
                stats = assert_settled(offload)
                assert not stats.demotions
                if settled and machine.device.type != "cpu" and machine.computes:
                    assert stats.refused.get("narrow", 0) == (1 if shift else 0)
                    assert stats.kept_bytes.get("failed", 0) == (4 * machine.width**2 if shift else 0)


CODEC_SCENARIOS = scenarios_in(globals())
