"""Planning inside of a ``with offload:``, and beside other threads: neither notices."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from eager_offload import contexts
from eager_offload.planning.trace import record
from eager_offload.torch_private.autograd import top_pack_hook
from tests.hazards.programs import assert_identical
from tests.planning.programs import CONFIG, assert_trained, gradients, slow, wide

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = slow(out=1e8, back=1e8)


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Checkpointed(nn.Module):
    """Its backward runs a forward, which saves tensors."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self._reentrant = wide()[0], reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self._reentrant)


def planned(model: nn.Module, x: Tensor) -> None:
    eo.plan(model, x, device=DEVICE, recompute=True, config=CONFIG).front(2)


@pytest.mark.parametrize(
    "reentrant", [pytest.param(None, marks=pytest.mark.long), pytest.param(False, marks=pytest.mark.long), True]
)
def test_inside_of_a_context_nothing_is_seen_of_it(reentrant: bool | None, tmp_path: Path) -> None:
    model, x = wide()
    planning = model if reentrant is None else Checkpointed(reentrant=reentrant)
    expected = gradients(model, lambda: model(x))
    with eo.Offload(CONFIG, tier="disk", disk_path=tmp_path) as offload:
        planned(planning, x.clone())
        hooks, entered = top_pack_hook(), list(contexts.thread.contexts)
        assert len(entered) == 1
        assert offload.stats().saved_tensors == 0

        def forward() -> Tensor:
            loss: Tensor = model(x)
            planned(planning, x.clone())  # while what was saved waits to leave
            return loss

        found = gradients(model, forward)
        assert top_pack_hook() is hooks
        assert contexts.thread.contexts == entered
    assert_identical(expected, found)
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0
    assert stats.foreign_hooks == stats.empty_forwards == 0
    assert_trained(model, x, offload)
    assert offload.stats().saved_tensors == 2 * stats.saved_tensors
    offload.close()
    with eo.Offload(CONFIG, tier="host") as offload:
        planned(model, x)
    assert offload.stats().empty_forwards == 0, "where only a plan is made no forward was seen"
    offload.close()


class Drawing(nn.Module):
    """Draws numbers that steer, while another thread draws too."""

    def __init__(self, others: Callable[[], object]) -> None:
        super().__init__()
        self.layer, self._others = nn.Linear(8, 8), others

    def forward(self, x: Tensor) -> Any:
        for one in (
            torch.rand([]),
            torch.rand_like(torch.ones(1)),
            torch.randint(5, (1,)),
            torch.ones(1).uniform_(),
            torch.bernoulli(torch.full((1,), 0.5)),
        ):
            x = x.exp() if float(one) > 9 else x
        self._others()
        return checkpoint(self._inner, x, use_reentrant=False).sum()

    def _inner(self, x: Tensor) -> Tensor:
        self._others()
        return F.dropout(self.layer(x).exp(), 0.5)


def test_what_another_thread_draws_meanwhile_it_does_not_draw_again() -> None:
    """The other one draws while the trace runs, in its forward and in what its backward computes again."""
    asked, drawn, found = threading.Semaphore(0), threading.Semaphore(0), list[Tensor]()

    def draw() -> None:
        for _ in range(3):
            asked.acquire()
            found.append(torch.rand(3))
            torch.set_rng_state(torch.get_rng_state())  # of all threads, for this one
            drawn.release()

    def others() -> None:
        asked.release()
        drawn.acquire()

    model = Drawing(others)
    torch.manual_seed(7)
    expected = [torch.rand(3) for _ in range(3)]
    afterwards = torch.rand(3)
    torch.manual_seed(7)
    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    before = torch.random.default_generator
    program = record(model, torch.ones(4, 8), min_bytes=0).program
    thread.join()
    assert sum(op.name in ("native_dropout", "bernoulli_") for op in program.ops) == 2
    assert torch.equal(torch.cat(found), torch.cat(expected))
    assert torch.equal(torch.rand(3), afterwards), "the trace itself has drawn nothing"
    assert torch.random.default_generator is before is torch.default_generator
