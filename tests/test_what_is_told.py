"""What a user is told: once that nothing moves, at a line of his; and by an out-of-memory error, what would help."""

from __future__ import annotations

import linecache
import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from tests.hazards.backends import DiskBackend
from tests.processes import printed_by, python
from tests.texts import PAGE, texts
from tests.threads import collect

MOVES = {"tier": "disk", "min_bytes": 0, "keep_last_bytes": 0}

# -- nothing moves ----------------------------------------------------------------------------------------------------


def forward(size: int = 1024, *, grad: bool = True) -> Tensor:
    return (torch.ones(size, requires_grad=grad) * 2).exp().sum()


def train(offload: eo.Offload, size: int = 1024) -> None:
    with offload:
        loss = forward(size)
    loss.backward()


def train_large(offload: eo.Offload) -> None:
    train(offload, 1 << 16)


def inside_of_another(offload: eo.Offload) -> None:
    with offload:
        train_large(eo.Offload(**MOVES))


def around_backward(offload: eo.Offload) -> None:
    loss = forward()
    with offload:
        loss.backward()


def without_a_gradient(offload: eo.Offload) -> None:
    with offload:
        forward(grad=False)


def validate(offload: eo.Offload) -> None:
    with torch.no_grad(), offload:
        forward()


def count_anew(offload: eo.Offload) -> None:
    offload.reset_stats()
    train(offload)


def be_cut_short(offload: eo.Offload) -> None:
    with pytest.raises(ZeroDivisionError), offload:
        raise ZeroDivisionError(forward())


#: So many steps, and what is said in them, and when the ``Offload`` is closed; nothing where that is empty.
TOLD: list[tuple[Callable[[eo.Offload], None], int, dict[str, Any], str, str]] = [
    (train, 5, {}, "nothing moved, because of the 4.0 KiB that a step .* min_bytes", ""),
    (train, 2, {}, "", "min_bytes, which is 1.0 MiB"),
    (train, 1, {"min_bytes": 0}, "", "are the newest ones, which stay"),
    (train, 1, {"min_bytes": 0, "device_budget": "1TiB"}, "", ""),  # nothing is known yet: all moves
    (
        count_anew,
        4,
        {"min_bytes": 0, "device_budget": "1TiB"},
        "",
        "saves fit into device_budget with all other memory",
    ),
    (train, 1, {"min_bytes": 0, "policy": "free"}, "", 'as long as policy="free" has not found that they move'),
    (train_large, 4, MOVES, "", ""),
    (train_large, 3, {**MOVES, "disk_budget": 1}, "no room for", ""),
    (be_cut_short, 3, {}, "", ""),
    (validate, 4, {"min_bytes": 0}, "", ""),
    (inside_of_another, 4, {}, "another Offload, entered inside this context, took all that was saved", ""),
    (around_backward, 4, {}, "this context is around backward alone", ""),
    (without_a_gradient, 2, {}, "", ""),
    (without_a_gradient, 6, {}, "no saved tensor was seen in 3 contexts", ""),
]


@pytest.mark.parametrize(("step", "count", "fields", "said", "at_the_end"), TOLD)
def test_a_run_of_which_nothing_moves_says_so_once(
    step: Callable[[eo.Offload], None], count: int, fields: dict[str, Any], said: str, at_the_end: str
) -> None:
    offload = eo.Offload(**fields)

    def steps() -> None:
        for _ in range(count):
            step(offload)

    for work, expected in ((steps, said), (lambda: offload.close(), at_the_end)):
        with warnings.catch_warnings(record=True, action="always") as caught:
            work()
        assert len(caught) == bool(expected)
        for one in caught:
            assert re.search(expected, str(one.message)), one.message
            line = linecache.getline(one.filename, one.lineno)
            assert one.filename == __file__
            assert "offload:" in line or "offload.close" in line or "work()" in line, line
    assert fields is not MOVES or offload.stats().bytes_out > 0


UNUSED = """
import copy, os, pickle
import torch
import eager_offload as eo

def train():
    (torch.ones(8, requires_grad=True) * 2).exp().sum().backward()

if os.fork() == 0:
    offload = eo.Offload()
    train()
    raise ValueError
os.wait()
def main():
    used, shared, sent, off = eo.Offload(), eo.Offload(), eo.Offload(), eo.Offload(enabled=False)
    with used:
        train()
    copy.deepcopy(shared), pickle.loads(pickle.dumps(sent))
    unused = eo.Offload()
    train()
    late = eo.Offload()
main()
"""


def test_an_offload_of_which_nothing_was_used_says_so_once() -> None:
    for train in forward, forward().backward:
        unused, late = eo.Offload(), eo.Offload()
        train()
        unused.stats()  # it may be used later
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            unused.close()
        if train is forward:
            assert not caught, "an evaluation has no use for it"
        else:
            assert "nothing of this Offload was used, although backwards have run" in str(caught[0].message)
            assert (len(caught), caught[0].filename) == (1, __file__)
        with late:
            forward().backward()
        with pytest.warns(RuntimeWarning, match="min_bytes, which is 1.0 MiB"):
            late.close()
    ended = python("-c", UNUSED)
    assert ended.returncode == 0
    said = [line for line in ended.stderr.splitlines() if line.startswith("eager_offload")]
    assert len(said) == 1, ended.stderr
    assert said[0].startswith("eager_offload: nothing of the Offload made at <string>:19 was used")


# -- a device is full -------------------------------------------------------------------------------------------------

ROWS, WIDTH = 64, 64
NBYTES = ROWS * WIDTH * 4


class Full(nn.Module):
    """Finds the device full, in forward or in backward."""

    def __init__(self, *, in_forward: bool) -> None:
        super().__init__()
        self.in_forward = in_forward

    def forward(self, x: Tensor) -> Tensor:
        if self.in_forward:
            self.fail(x)
        (found := x.clone()).register_hook(self.fail)
        return found

    def fail(self, _: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def notes(offload: eo.Offload, *, forward: bool = True, inside: bool = False, last: int = WIDTH) -> list[str]:
    """What the error of a step says, but for what has nothing to do with it: of what earlier tests have left alive."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, last), Full(in_forward=forward), nn.GELU())

    def step(around: eo.Offload, net: nn.Module) -> None:
        with around:
            loss = net(torch.ones(ROWS, WIDTH, requires_grad=True)).square().sum()
            if inside:
                loss.backward()
        loss.backward()

    said = []
    collect()
    for around, model in ((eo.Offload(enabled=False), Full(in_forward=False)), (offload, net)):
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as raised:
            step(around, model)
        said.append(Counter(getattr(raised.value, "__notes__", ())))
        del raised
        collect()  # the frames of the step
    return [*(said[1] - said[0]).elements()]


KEEPS = {"tier": "disk", "min_bytes": 0, "keep_last_bytes": "1MiB"}


def test_an_error_of_forward_names_reasons_and_a_setting() -> None:
    (note,) = notes(eo.Offload(**KEEPS))
    assert note.split("\n") == [
        "eager_offload: 32.0 KiB of saved tensors are on the device",
        "  32.0 KiB are the newest ones, which stay because backward needs them at once: keep_last_bytes is 1MiB",
        "  keep_last_bytes=0 would have freed up to 32.0 KiB",
    ]


@pytest.mark.filterwarnings("ignore:.*no room for")
@pytest.mark.parametrize(
    ("given", "fields", "said"),
    [
        ({"forward": False}, KEEPS, "are the newest ones, which stay"),
        ({"forward": False, "inside": True}, KEEPS, "are the newest ones, which stay"),
        ({}, MOVES | {"disk_budget": 1}, "found no room in any .*a larger host_budget or disk_budget, or a disk_path"),
        ({"last": 2}, {"tier": "disk", "min_bytes": NBYTES + 1}, "are of tensors smaller.*a smaller min_bytes would"),
    ],
)
def test_what_would_have_helped_is_named(given: dict[str, Any], fields: dict[str, Any], said: str) -> None:
    (note,) = notes(eo.Offload(**fields), **given)
    assert re.search(said, note, re.DOTALL), note


def test_what_is_on_its_way_is_told_apart_from_what_stays(disk: DiskBackend) -> None:
    offload = disk.offload()
    with disk.gate():
        (note,) = notes(offload)
    assert "are the newest ones, which stay" in note, "its operator may still write to it"
    assert "16.0 KiB are on their way out" in note
    assert "a smaller max_inflight_bytes would have freed up to 16.0 KiB" in note


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


def test_every_text_is_on_the_page_of_texts() -> None:
    assert PAGE.read_text() == texts(), "python -m tests.texts writes the page anew: read what has changed"
