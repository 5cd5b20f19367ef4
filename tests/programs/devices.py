"""Streams, threads and devices of an accelerator: who computes where, and what owns the memory meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.programs import Flag, Run, leaf, program
from tests.programs.parts.blocks import Step, trained
from tests.threads import on_threads

_SIDE = 64
_FLAGS = (Flag.DEVICE, Flag.EAGER)


def _streams(count: int) -> tuple[torch.Stream, list[torch.Stream]]:
    """The one that is current, and others."""
    home = torch.accelerator.current_stream()
    return home, [torch.Stream(device=home.device) for _ in range(count)]


def _meet(*streams: torch.Stream) -> None:
    """Each waits for all of them, as in a program that changes streams."""
    done = [stream.record_event() for stream in streams]
    for stream in streams:
        for event in done:
            stream.wait_event(event)


@program("H14-forward-and-backward-on-streams-of-their-own", *_FLAGS)
def _(run: Run) -> object:
    (home, sides), results = _streams(2), []
    for index in range(6):
        side, step = sides[index % 2], Step(index)
        _meet(home, side)
        with side:
            step.forward(run.around)
        step.backward()
        _meet(home, side)
        results += step.result
        _meet(home, side)
    return results


@program("H14-two-models-on-two-streams-share-nothing-but-slots", *_FLAGS)
def _(run: Run) -> object:
    (home, sides), steps = _streams(2), [Step(seed) for seed in range(2)]
    _meet(home, *sides)
    for round in range(6):
        with sides[round % 2]:
            steps[round % 2].forward(run.around)
        steps[round % 2].backward()
    _meet(home, *sides)
    results = [step.result for step in steps]
    _meet(home, *sides)
    return results


@program("H15-what-was-selected-stays-selected", *_FLAGS)
def _(run: Run) -> object:
    (home, (side,)), results = _streams(1), []
    for seed in range(4):  # from the second step on memory is used again, which is when it shows
        step = Step(seed)
        _meet(home, side)
        with side:
            for part in (lambda step=step: step.forward(run.around), step.backward):
                part()
                assert torch.accelerator.current_stream() == side
        assert torch.accelerator.current_stream() == home
        _meet(home, side)
        results += step.result
        _meet(home, side)
    return results


@program("H16-blocks-of-sources-have-owners-that-paint-them", *_FLAGS)
def _(run: Run) -> object:
    step = Step(1).forward(run.around)
    for _ in range(4):
        painted = [torch.full((32, 32), float("nan")).mul_(2) for _ in range(8)]
        del painted
    return step.backward().result


@program("H29-three-threads-train-on-streams-and-devices-of-their-own", *_FLAGS, Flag.HELD)
def _(run: Run) -> object:
    models = [_mlp(seed) for seed in range(3)]
    batches = [leaf(_SIDE, _SIDE, seed=seed, grad=False) for seed in range(3)]
    torch.accelerator.synchronize()
    device, home, threads = torch.get_default_device(), torch.accelerator.current_stream(), torch.get_num_threads()

    def train(place: int) -> Sequence[Tensor]:
        torch.set_num_threads(threads)
        with device, torch.Stream(device=home.device) if place else home:
            model, batch = models[place], batches[place]
            found = trained(model.parameters(), run.around, lambda _: model(batch).square().mean())
            torch.accelerator.synchronize()
        return found

    return on_threads(3, train)


@program("H30-a-model-on-two-devices", *_FLAGS, Flag.HELD)
def _(run: Run) -> object:
    there = torch.device(torch.accelerator.current_stream().device.type, torch.accelerator.device_count() - 1)
    first, second, x = _mlp(1), _mlp(2).to(there), leaf(_SIDE, _SIDE, grad=False)
    model = nn.Sequential(first, second)

    def loss(_: int) -> Tensor:
        return second(first(x).to(there)).to(x.device).square().mean()

    return [one.cpu() for one in trained(model.parameters(), run.around, loss)]


def _mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(_SIDE, _SIDE), nn.GELU())))
