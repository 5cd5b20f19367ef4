"""Calls of a module in a context: never in the way of what else stands around them, nor of what frees the module."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import eager_offload as eo
from eager_offload.integrations.calls import OffloadedCalls
from tests.integrations.training import WIDTH, Model, fields
from tests.threads import collect


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("first", ["calls", "module", "nothing"])
def test_a_module_goes_with_its_last_reference(first: str, is_compiled: bool) -> None:
    model = Model()
    if is_compiled:
        model.compile(backend="aot_eager")  # a cycle of torch's own
    calls, alive = OffloadedCalls(model, eo.Offload()), weakref.ref(model)
    gc.disable()
    try:
        if first == "calls":
            calls.remove()
        del model
        if is_compiled:
            collect()
        assert alive() is None
    finally:
        gc.enable()
    if first == "module":
        calls.remove()


@pytest.mark.filterwarnings("ignore:eager_offload. nothing of this Offload:RuntimeWarning")
def test_what_was_put_around_it_later_stays_when_it_goes(tmp_path: Path) -> None:
    model, batch = Model(), torch.randn(64, WIDTH)
    offload, other = eo.Offload(**fields(tmp_path)), eo.Offload(min_bytes=1 << 30)
    below, above = OffloadedCalls(model, offload), OffloadedCalls(model, other)
    below.remove()
    model(batch).sum().backward()
    assert offload.stats().saved_tensors == 0
    assert (saved := other.stats().saved_tensors) > 0
    above.remove()
    assert "_compiled_call_impl" not in vars(model)
    model(batch).sum().backward()
    assert offload.stats().saved_tensors == 0
    assert other.stats().saved_tensors == saved


def test_data_parallel_that_hands_on_to_its_module_offloads(tmp_path: Path) -> None:
    model, batch = Model(), torch.randn(64, WIDTH)
    expected = torch.autograd.grad(model(batch).sum(), list(model.parameters()))
    wrapped, offload = nn.DataParallel(model), eo.Offload(**fields(tmp_path), skip="last")
    offload.skip_in(wrapped)
    calls = OffloadedCalls(wrapped, offload)
    got = torch.autograd.grad(wrapped(batch).sum(), list(model.parameters()))
    assert all(map(torch.equal, got, expected))
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0
    assert stats.kept_bytes["region"] > 0
    calls.remove()
    offload.close()
