"""An out-of-memory error in a step says what offload holds of the device and which setting would have freed most."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from tests.hazards.backends import DiskBackend
from tests.processes import printed_by
from tests.threads import collect

ROWS, WIDTH = 64, 64
NBYTES = ROWS * WIDTH * 4
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Full(torch.autograd.Function):
    """Finds the device full, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_forward: bool) -> Tensor:
        if in_forward:
            raise torch.OutOfMemoryError(FULL)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise torch.OutOfMemoryError(FULL)


class FullIn(nn.Module):
    def __init__(self, *, forward: bool) -> None:
        super().__init__()
        self.in_forward = forward

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Full.apply(x, self.in_forward)
        return found


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    collect()
    yield
    assert not gc.garbage


def model(full: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), full, nn.Linear(WIDTH, WIDTH), nn.GELU())


def notes_of_others() -> Counter[str]:
    """What an error says that has nothing to do with the test: of what earlier ones have left alive."""
    loss = FullIn(forward=False)(torch.ones(1, requires_grad=True)).sum()
    with pytest.raises(torch.OutOfMemoryError) as raised:
        loss.backward()
    return Counter(getattr(raised.value, "__notes__", ()))


def notes(offload: eo.Offload, net: nn.Module, *, inside: bool = False) -> list[str]:
    """What the error of a step says."""
    of_others = notes_of_others()

    def step() -> None:
        with offload:
            loss = net(torch.ones(ROWS, WIDTH)).square().sum()
            if inside:
                loss.backward()
        loss.backward()

    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as raised:
        step()
    return list((Counter(raised.value.__notes__) - of_others).elements())


def test_an_error_of_forward_names_modules_reasons_and_a_setting() -> None:
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes="1MiB")
    (note,) = notes(offload, model(FullIn(forward=True)))
    head, newest, advice = note.split("\n")
    assert head == "eager_offload: 32.0 KiB are saved for backward, of which 0 B have left the device"
    assert newest.startswith("  32.0 KiB (")
    assert newest.endswith(
        ") are the newest ones, which stay since backward asks for them at once, and that is up to 1MiB"
    )
    assert "0 (Linear) 16.0 KiB" in newest
    assert "1 (GELU) 16.0 KiB" in newest
    assert advice == "  keep_last_bytes=0 would have freed up to 32.0 KiB"
    offload.close()


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_an_error_of_backward_has_one_too(inside: bool) -> None:
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes="1MiB")
    (note,) = notes(offload, model(FullIn(forward=False)), inside=inside)
    assert "are the newest ones, which stay" in note
    assert "GELU" in note
    offload.close()


def test_what_is_on_its_way_is_told_apart_from_what_stays(disk: DiskBackend) -> None:
    with disk.gate():
        (note,) = notes(disk.offload(), model(FullIn(forward=True)))
    assert "are the newest ones, which stay" in note, "its operator may still write to it"
    assert "16.0 KiB are on their way out" in note
    assert 'max_inflight_bytes="4KiB" would have freed up to 12.0 KiB' in note
    collect()  # the error that pytest has held, with the frames of the step


def test_where_no_tier_has_room_that_is_what_would_have_helped() -> None:
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0, disk_budget=1)
    with pytest.warns(RuntimeWarning, match="no room for"):
        (note,) = notes(offload, model(FullIn(forward=True)))
    assert "found no room in any tier" in note
    assert "a larger host_budget or disk_budget, or a disk_path would have freed up to" in note
    offload.close()


def test_of_small_tensors_those_count_that_the_setting_would_move() -> None:
    offload, full = eo.Offload(tier="disk", min_bytes=NBYTES + 1), FullIn(forward=True)
    (note,) = notes(offload, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2), nn.GELU(), full))
    assert "KiB more are of tensors smaller than min_bytes" in note
    assert 'min_bytes="8KiB" would have freed up to 48.0 KiB' in note
    offload.close()


ALONE = """
import torch
import eager_offload as eo

own, offload = torch.autograd._engine_run_backward, eo.Offload(tier="disk", min_bytes=0)
try:
    with offload:
        raise ZeroDivisionError
except ZeroDivisionError as error:
    assert not hasattr(error, "__notes__")
assert torch.autograd._engine_run_backward is not own
del offload
torch.ones(1, requires_grad=True).sum().backward()
assert torch.autograd._engine_run_backward is own
"""


def test_other_errors_have_none_and_backwards_are_torchs_own_again() -> None:
    printed_by("-c", ALONE)
