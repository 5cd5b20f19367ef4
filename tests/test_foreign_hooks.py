"""Saved-tensor hooks of others inside our context: noticed, counted, told once; torch's class is left as it was."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from tests.hazards.backends import DiskBackend
from tests.hazards.programs import assert_identical
from tests.threads import on_a_thread

WARNING = "other saved-tensor hooks were entered inside this context"
ORIGINAL = saved_tensors_hooks.__enter__


@pytest.fixture(autouse=True)
def _torchs_class_is_left_as_it_was() -> Iterator[None]:
    assert saved_tensors_hooks.__enter__ is ORIGINAL
    yield
    assert saved_tensors_hooks.__enter__ is ORIGINAL


def theirs() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


def leaf() -> Tensor:
    return torch.linspace(-1, 1, 100).requires_grad_()


def forward(x: Tensor, inside: AbstractContextManager[Any] | None = None) -> Tensor:
    with inside or nullcontext():
        return (x * 2).sigmoid().square().sum()


def gradient(around: AbstractContextManager[Any], inside: AbstractContextManager[Any] | None = None) -> Tensor:
    x = leaf()
    with around:
        loss = forward(x, inside) + x.exp().sum()
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("hooks", [theirs, save_on_cpu])
def test_h24_hooks_inside_ours_are_counted_and_told_once(
    hooks: Callable[[], AbstractContextManager[Any]], disk: DiskBackend
) -> None:
    offload, expected = disk.offload(), gradient(nullcontext())
    with pytest.warns(RuntimeWarning, match=WARNING) as warned:
        actual = [gradient(offload, hooks()) for _ in range(3)]
    assert all(torch.equal(one, expected) for one in actual)
    assert len(warned) == 1
    assert "Enter this context inside theirs" in str(warned[0].message)
    stats = offload.stats(synchronize=True)
    assert stats.foreign_hooks == 3
    assert stats.bytes_out > 0, "what is saved outside theirs still moves"
    with pytest.warns(RuntimeWarning, match=WARNING):
        gradient(disk.offload(), hooks())  # another object tells its own user


def nothing_is_hidden(run: Callable[[AbstractContextManager[Any]], object], offload: eo.Offload) -> None:
    """Asserts that ``run`` gives the same bits with an ``Offload``, which sees what is saved and warns of nothing."""
    with warnings.catch_warnings(action="error"):
        assert_identical(run(nullcontext()), run(offload))
    stats = offload.stats(synchronize=True)
    assert stats.foreign_hooks == stats.empty_forwards == 0
    assert stats.bytes_out > 0
    assert "hooks" not in str(stats)


def inside_of_theirs(ours: AbstractContextManager[Any]) -> Tensor:
    with theirs():
        return gradient(ours)


def in_another_thread(ours: AbstractContextManager[Any]) -> Tensor:
    with ours:
        found = on_a_thread(lambda: gradient(theirs()))
        loss = forward(leaf())
    loss.backward()
    return found


def twice(ours: AbstractContextManager[Any]) -> Tensor:
    return gradient(ours, ours)


def without_a_forward(ours: AbstractContextManager[Any]) -> Tensor:
    x = leaf()
    with ours:
        pass
    with ours, torch.no_grad():
        forward(x)
    with ours:
        loss = forward(x)
    with ours:
        loss.backward()
    return loss.detach()


def inside_of_a_checkpoint(ours: AbstractContextManager[Any]) -> Tensor:
    """It hides what it computes again by design, and what others' hooks hide in it as well."""
    x = leaf()
    with ours:
        loss = checkpoint(lambda y: forward(y, theirs()), x.exp(), use_reentrant=False) + x.exp().sum()
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("run", [inside_of_theirs, in_another_thread, twice, without_a_forward, inside_of_a_checkpoint])
def test_h24_what_is_around_ours_or_in_another_thread_or_ours_is_not_foreign(
    run: Callable[[AbstractContextManager[Any]], Tensor], disk: DiskBackend
) -> None:
    nothing_is_hidden(run, disk.offload())


# -- hooks that hide nothing: see [Note: which hooks hide] in contexts.py ----------------------------------------------


class HandsOn:
    """What libraries put around hooks that they have found: hands what is saved on to them."""

    def __init__(self) -> None:
        self.found = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(self, tensor: Tensor) -> Any:
        return self.found[0](tensor)

    def unpack(self, packed: Any) -> Tensor:
        return self.found[1](packed)


HANDING_ON: dict[str, Callable[[HandsOn], saved_tensors_hooks]] = {
    "same pair": lambda around: saved_tensors_hooks(*around.found),
    "by a method": lambda around: saved_tensors_hooks(around.pack, around.unpack),
    "by a closure": lambda around: saved_tensors_hooks(lambda tensor: around.pack(tensor), around.unpack),
    "by a partial": lambda around: saved_tensors_hooks(partial(HandsOn.pack, around), around.unpack),
}


@pytest.mark.parametrize("hooks", HANDING_ON.values(), ids=list(HANDING_ON))
def test_h24_hooks_that_hand_on_to_ours_hide_nothing(
    hooks: Callable[[HandsOn], saved_tensors_hooks], disk: DiskBackend
) -> None:
    def run(around: AbstractContextManager[Any]) -> Tensor:
        def inside() -> AbstractContextManager[Any]:
            return hooks(HandsOn()) if around is offload else nullcontext()

        x = leaf()
        with around:
            with inside():
                y = x * 2  # saves nothing to be handed on
            with inside(), inside():
                loss = y.exp().sigmoid().square().sum()
        return torch.autograd.grad(loss, x)[0]

    offload = disk.offload()
    nothing_is_hidden(run, offload)


def remat_step(inside: AbstractContextManager[Any], pair: Any = None) -> list[Tensor]:
    """A step of blocks that ``torch_remat`` computes again, but for a part."""
    remat = pytest.importorskip("torch_remat")
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(3))

    def block(layers: nn.Sequential, x: Tensor) -> Tensor:
        y = remat.region(lambda v: layers[2](torch.relu(layers[0](v))), "feed", recompute=False)(x)
        remat.recompute_needs_tensor(y)
        z = remat.region(torch.sin, "sine", recompute=False)(x.exp())  # what it saves is computed again
        remat.recompute_needs_tensor(z)
        return x + y.tanh() * z

    with inside:
        x = torch.linspace(-1, 1, 32 * 16).view(32, 16).requires_grad_() * 1
        for layers in blocks:
            x = remat.checkpoint(saved_tensors_hooks=pair)(partial(block, layers))(x)
        loss = x.square().mean()
    loss.backward()
    return [parameter.grad for parameter in blocks.parameters() if parameter.grad is not None]


def test_h24_remat_enters_our_own_hooks_and_hands_on_to_them_and_others_are_foreign(disk: DiskBackend) -> None:
    offload = disk.offload()
    for _ in range(3):
        nothing_is_hidden(remat_step, offload)
    with offload:
        ours = HandsOn().found
    nothing_is_hidden(lambda around: remat_step(around, ours if around is offload else None), offload)
    with pytest.warns(RuntimeWarning, match=WARNING):
        remat_step(offload, (lambda tensor: tensor.detach(), lambda tensor: tensor))
    assert offload.stats(synchronize=True).foreign_hooks == 3


# -- what is put into torch's class -----------------------------------------------------------------------------------


def test_torchs_class_is_changed_only_while_an_offload_watches(disk: DiskBackend) -> None:
    first, second = disk.offload(), disk.offload()
    entered, leave = threading.Event(), threading.Event()

    def changed() -> bool:
        return saved_tensors_hooks.__enter__ is not ORIGINAL

    def other() -> None:
        with second:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with first, first:
        thread.start()
        entered.wait()
        assert changed()
    assert changed(), "the other thread still watches"
    leave.set()
    thread.join()
    assert not changed()
    with pytest.raises(ZeroDivisionError), first:
        raise ZeroDivisionError
    assert not changed()


def test_what_others_have_put_around_ours_stays_and_works(disk: DiskBackend) -> None:
    offload, calls = disk.offload(), []
    offload.__enter__()
    ours = saved_tensors_hooks.__enter__

    def around(hooks: saved_tensors_hooks) -> None:
        calls.append(hooks)
        ours(hooks)

    # Undone by hand: what stood there at this moment is ours.
    saved_tensors_hooks.__enter__ = around  # type: ignore[method-assign]
    try:
        forward(leaf(), theirs())
        forward(leaf())
        with pytest.warns(RuntimeWarning, match=WARNING):
            offload.__exit__(None, None, None)
        assert saved_tensors_hooks.__enter__ is around
        assert len(calls) == 1
        gradient(offload, theirs())
        assert len(calls) == 3
        assert saved_tensors_hooks.__enter__ is around
        assert offload.stats().foreign_hooks == 2, "each is counted once"
    finally:
        saved_tensors_hooks.__enter__ = ORIGINAL  # type: ignore[method-assign]
