"""Threads that train at once, and those that leave parts of a step to each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor, nn

from tests.programs import Flag, Run, leaf, program
from tests.programs.parts.blocks import blocks, trained
from tests.programs.streams import computing_alike, in_a_thread

_SIDE = 32


def model_of(seed: int) -> nn.Module:
    return nn.Sequential(*blocks(2, seed))


def train(run: Run, model: nn.Module, seed: int) -> list[Tensor]:
    """Three steps: the losses, and what is trained."""
    return trained(
        model.parameters(), run.around, lambda step: model(leaf(_SIDE, _SIDE, seed=10 * seed + step)).square().mean()
    )


def train_together(runs: list[Run]) -> list[list[Tensor]]:
    """Trains in each of ``runs`` on a thread of its own; they begin at the same moment."""
    start, results = threading.Barrier(len(runs)), dict[int, list[Tensor]]()
    models = [model_of(number) for number in range(len(runs))]

    def work(number: int) -> None:
        start.wait(60)
        results[number] = train(runs[number], models[number], number)

    alike = [computing_alike(lambda number=number: work(number)) for number in range(len(runs))]  # type: ignore[misc]
    with ThreadPoolExecutor(len(runs)) as pool:
        for done in [pool.submit(one) for one in alike]:
            done.result()
    return [results[number] for number in range(len(runs))]


@program("H29-two-threads-with-one-offload", Flag.EAGER, Flag.NO_SCRIPT)
def _(run: Run) -> object:
    return train_together([run, run])


@program("H29-a-forward-whose-backward-is-in-another-thread", Flag.EAGER, Flag.NO_SCRIPT)
def _(run: Run) -> object:
    results = []
    for seed in range(3):
        x = leaf(_SIDE, _SIDE, seed=seed)
        with run.around:
            loss = (x * 2).tanh().exp().sum()
        in_a_thread(loss.backward)
        del loss
        results.append(x.grad)
    return results
