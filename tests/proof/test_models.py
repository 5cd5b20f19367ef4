"""Whole models, trained for three steps: not one bit of a loss, a weight or a statistic differs with offload."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eager_offload import OffloadStats
from tests.hazards.backends import Backend
from tests.hazards.programs import REGIMES, Program, Regime, same_gradients
from tests.proof.models import FAMILIES, LATENT, SIZE, Checkpointing, Discriminator, Generator

pytestmark = pytest.mark.usefixtures("one_thread")

Around: TypeAlias = AbstractContextManager[Any]

STEPS = 3
#: Everything leaves and comes back; then both windows are too small for more than a few tensors at a time.
TWO_REGIMES = (
    Regime("everything comes back", settled=True),
    Regime("small windows", settled=False, fields={"max_inflight_bytes": 1 << 13, "prefetch_bytes": 1 << 14}),
)


class Case(NamedTuple):
    """One way to train one family."""

    family: str
    checkpointing: Checkpointing
    autocast: bool
    micro_batches: int

    def __str__(self) -> str:
        precision = "bf16" if self.autocast else "fp32"
        accumulation = ", accumulating" if self.micro_batches > 1 else ""
        return f"{self.family}, {precision}, {self.checkpointing.value}{accumulation}".replace(" ", "_")


NONE, REENTRANT, NON_REENTRANT = Checkpointing
#: Each family meets each precision, each kind of checkpointing and accumulation.
FEW = [
    case
    for family in FAMILIES
    for case in (Case(family, NONE, False, 1), Case(family, NON_REENTRANT, True, 1), Case(family, REENTRANT, False, 2))
]
EVERY = [
    Case(family, checkpointing, autocast, micro_batches)
    for family, checkpointing, autocast, micro_batches in itertools.product(
        FAMILIES, Checkpointing, (False, True), (1, 2)
    )
]


def trained(case: Case) -> Program:
    """Three steps of AdamW; returns the losses, the parameters, the statistics and what the optimizer keeps."""

    def program(offload: Around) -> object:
        model = FAMILIES[case.family]()
        model.checkpointing = case.checkpointing
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for step in range(STEPS):
            for micro in range(case.micro_batches):
                with offload, torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    # The loop does not hold the batch: what it holds stays, once that is learnt.
                    loss = model(*model.batch(10 * step + micro)) / case.micro_batches
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        state = [kept for parameter in optimizer.state.values() for kept in parameter.values()]
        return losses, [parameter.detach() for parameter in model.parameters()], list(model.buffers()), state

    return program


def skip_where_torch_computes_none(case: Case) -> None:
    """On a CPU without instructions for it, oneDNN refuses an LSTM in bf16, with offload or without."""
    if case.family == "lstm" and case.autocast:
        try:
            with torch.autocast("cpu", torch.bfloat16):
                nn.LSTM(8, 8)(torch.zeros(1, 1, 8))
        except RuntimeError as error:
            pytest.skip(f"torch refuses an LSTM in bf16 on this CPU: {error}")


def assert_exact(case: Case, backend: Backend, regimes: tuple[Regime, ...]) -> list[OffloadStats]:
    skip_where_torch_computes_none(case)
    backend.sources_change = FAMILIES[case.family].changes_what_it_saves
    every = same_gradients(trained(case), backend, regimes=regimes)
    for stats in every:
        assert stats.foreign_hooks == 0, "checkpointing is no stranger"
        assert stats.demotions == {}
    return every


#: All of these with real files; under the checker, which takes most of the time, one of each family.
WHERE = [("disk", case) for case in FEW] + [
    ("simulated", FEW[3 * family + (family + 2) % 3]) for family in range(len(FAMILIES))
]


@pytest.mark.short
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("backend", "case"), WHERE, ids=str, indirect=["backend"])
def test_a_model_trains_to_the_same_bits(case: Case, backend: Backend) -> None:
    assert_exact(case, backend, TWO_REGIMES)


#: Under the checker half of them, among which each family meets every two of its choices together.
IN_EVERY_WAY = [("disk", case) for case in EVERY] + [
    ("simulated", case)
    for case in EVERY
    if (list(Checkpointing).index(case.checkpointing) + case.autocast + case.micro_batches) % 2
]


@pytest.mark.long
@pytest.mark.sampled(5)  # 5 and the 12 ways of a family have no common factor: families meet different ways
@pytest.mark.parametrize(("backend", "case"), IN_EVERY_WAY, ids=str, indirect=["backend"])
def test_a_model_trains_to_the_same_bits_in_every_way(case: Case, backend: Backend) -> None:
    assert_exact(case, backend, REGIMES)


def adversaries(*, one_context: bool) -> Program:
    """Two optimizers and two graphs: the generator's is alive while the discriminator is trained on what it made.

    Args:
        one_context: whether both forwards of the discriminator's step are inside the context of the generator's.
    """

    def program(offload: Around) -> object:
        generator, discriminator = Generator(), Discriminator()
        of_generator = torch.optim.AdamW(generator.parameters(), lr=1e-2)
        of_discriminator = torch.optim.AdamW(discriminator.parameters(), lr=1e-2)
        losses = []
        for _ in range(STEPS):
            real = torch.rand(3, 3, SIZE, SIZE) * 2 - 1
            with offload:
                made = generator(torch.randn(3, LATENT))
                if one_context:
                    verdict = judged(discriminator, real, made.detach())
            if not one_context:
                with offload:
                    verdict = judged(discriminator, real, made.detach())
            del real
            verdict.backward()  # leaves the generator's graph as it is
            of_discriminator.step()
            of_discriminator.zero_grad()
            with offload:
                loss = F.softplus(-discriminator(made)).mean()
            del made
            loss.backward()  # through both
            of_generator.step()
            of_generator.zero_grad()
            of_discriminator.zero_grad()
            losses += [verdict.detach(), loss.detach()]
        return losses, weights(generator), weights(discriminator)

    return program


def judged(discriminator: Discriminator, real: Tensor, made: Tensor) -> Tensor:
    """The discriminator's loss: a penalty on its slope makes backward save for a backward of its own."""
    loss = F.softplus(discriminator(made)).mean() + F.softplus(-discriminator(real)).mean()
    return loss + 0.1 * discriminator.slope_penalty(real)


def weights(model: nn.Module) -> list[Tensor]:
    return [*(parameter.detach() for parameter in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("one_context", [True, False], ids=["one context", "a context for each"])
def test_a_gan_with_two_optimizers_and_two_graphs_trains_to_the_same_bits(one_context: bool, backend: Backend) -> None:
    backend.sources_change = True  # BatchNorm's statistics, and the vectors of spectral normalization
    # What was made is held by the program while the discriminator learns, and once that is learnt it stays.
    for stats in same_gradients(adversaries(one_context=one_context), backend, regimes=TWO_REGIMES, moved=0.8):
        # The penalty runs a backward inside of the context: what was saved last before it stays.
        assert set(stats.kept_bytes) <= {"parameter", "alive", "newest"}


def test_a_mixture_of_experts_has_other_shapes_in_every_step() -> None:
    model = FAMILIES["experts"]()
    lengths = {tuple(model.batch(10 * step).inputs.shape) for step in range(STEPS)}
    assert len(lengths) == STEPS
