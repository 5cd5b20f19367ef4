"""H01, H37, H46: what is changed before backward reads it; the programs of ``tests/programs/in_place.py``."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import allow_mutation_on_saved_tensors

from eager_offload import SavedTensorModifiedError
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.programs import assert_identical
from tests.programs import Program, Run, corpus, leaf

pytestmark = pytest.mark.filterwarnings("ignore:eager_offload. nothing moved:RuntimeWarning")


@pytest.mark.parametrize("program", [one for one in corpus() if "H01" in one.hazards], ids=str)
def test_h01_what_stays_is_compared_too(program: Program, users_backend: Backend) -> None:
    kept = users_backend.offload(min_bytes=1 << 30)
    results = []
    for run in (Run(), Run(kept)):
        torch.manual_seed(0)
        results.append(program(run))
    assert_identical(*results)
    assert assert_settled(kept).bytes_out == 0


@pytest.mark.parametrize("on_resave", [False, True])
def test_h37_what_is_written_after_a_copy_is_not_seen_by_earlier_saves_once_the_source_is_gone(
    on_resave: bool, backend: Backend
) -> None:
    """What no library can see: without offload backward reads what was written, for either save."""
    backend.sources_change = True
    x, w = leaf(64, 64), leaf(64, 64, seed=2)
    before, after = x.detach() * 2, x.detach() * 20
    offload = backend.offload()
    with offload:
        h = x * 2
        y = (h * w).sum()
    offload.stats(synchronize=True)
    h.data.mul_(10)
    (seen,) = torch.autograd.grad(y, w, retain_graph=True)
    assert torch.equal(seen, after), "the original still lives, and is what backward is given"
    with offload:
        z = (h * w).sum() if on_resave else None
    del h
    offload.stats(synchronize=True)
    assert torch.equal(torch.autograd.grad(y, w)[0], before)
    assert z is None or torch.equal(torch.autograd.grad(z, w)[0], after)
    assert offload.stats(synchronize=True).bytes_out >= (1 + on_resave) * 64 * 64 * 4


def test_h46_outside_of_the_context_that_allows_it_a_change_is_an_error_again(backend: Backend) -> None:
    backend.sources_change = True
    offload, x = backend.offload(), leaf(16, 16)
    with allow_mutation_on_saved_tensors(), offload:
        b = x.clone()
        y, other = b.square().sum(), (x * 2).square().sum()
    offload.stats(synchronize=True)
    b.mul_(2)
    other.backward()
    assert_identical(x.grad, 8 * x.detach())
    with pytest.raises(SavedTensorModifiedError):
        y.backward()
