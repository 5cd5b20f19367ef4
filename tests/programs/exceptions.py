"""Steps that an error of the user's ends half-way, and those behind it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from tests.programs import Flag, Run, leaf, program
from tests.programs.streams import in_a_thread


class Fault(Exception):
    """What a test raises where a user's own code would."""


class Trainer:
    """Is trained a step at a time, and its steps can be made to fail half-way."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @property
    def state(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def step(
        self,
        run: Run,
        seed: int,
        forward: Callable[[], None] = lambda: None,
        backward: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """One step; ``forward`` and ``backward`` are called in the middle of each."""
        self.optimizer.zero_grad()
        with run.around:
            h = self.model[:3](leaf(16, 32, seed=seed))
            h.register_hook(lambda _: backward())
            forward()
            loss = self.model[3:](h).square().mean()
        del h
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


def raising(kind: type[BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise kind("on purpose")

    return fail


def undisturbed(steps: int) -> list[object]:
    """The losses and the model after so many steps without offload."""
    trainer = Trainer()
    return [[trainer.step(Run(nullcontext()), seed) for seed in range(steps)], trainer.state]


def _add(name: str, kind: type[BaseException], where: str, run_it: Callable[[Callable[[], object]], object]) -> None:
    @program(f"H10-{name}", Flag.EAGER, Flag.NO_SCRIPT)
    def _(run: Run) -> object:
        trainer, losses = Trainer(), []

        def fail(seed: int) -> None:
            raised = []
            try:
                trainer.step(run, 100 + seed, **{where: raising(kind)})
            except kind as error:
                raised.append(str(error))
            assert raised == ["on purpose"]
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

        for seed in range(4):
            if seed in (1, 2):
                run_it(lambda seed=seed: fail(seed))  # type: ignore[misc]
            losses.append(trainer.step(run, seed))
        return losses, trainer.state


for _where in ("forward", "backward"):
    for _kind in (Fault, KeyboardInterrupt):
        _add(f"{_kind.__name__}-in-{_where}", _kind, _where, lambda work: work())
_add("an-error-in-a-forward-of-a-thread", Fault, "forward", in_a_thread)
