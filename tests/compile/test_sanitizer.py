"""The sanitizer that every test of compiled code runs under finds what it is for, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload.compile import ops
from tests.compile.sanitizer import CHANGED, OTHER


@pytest.fixture
def text(offload: eo.Offload) -> Iterator[str]:
    """The configuration of an ``Offload`` that is active while the test runs."""
    with offload:
        yield offload.config_key
    assert offload.stats(synchronize=True).bytes_out > 0


def written_over(x: Tensor) -> Tensor:
    x[3] = 7
    return x


@pytest.mark.parametrize(("kept", "found"), [(written_over, CHANGED), (Tensor.clone, OTHER)])
def test_h35_what_is_wrong_with_a_source_is_reported_at_its_wait(
    kept: Callable[[Tensor], Tensor], found: str, text: str, violations: list[str]
) -> None:
    x = torch.arange(64.0)
    host = ops.offload(x, config=text, wait=False)
    ops.wait_tensor(host, kept(x))
    assert violations == [found]
    violations.clear()


def test_h35_a_source_may_be_written_over_after_its_wait(text: str, violations: list[str]) -> None:
    x = torch.arange(64.0)
    for part in (x, x.view(8, 8).t()[2:], x.reshape(8, 8)):
        host = ops.offload(part, config=text, wait=False)
        ops.wait_tensor(host, part)
        x.add_(1)
        again = ops.reload(ops.offload(part, config=text), part.device, config=text)
        assert torch.equal(again, part)
    assert violations == []
