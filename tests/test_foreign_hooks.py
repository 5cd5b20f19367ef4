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


def around_ours(ours: eo.Offload, _: eo.Offload) -> Tensor:
    with theirs():
        return gradient(ours)


def in_another_thread(ours: eo.Offload, _: eo.Offload) -> Tensor:
    with ours:
        found = on_a_thread(lambda: gradient(theirs()))
        loss = forward(leaf())
    loss.backward()
    return found


def the_same_inside(ours: eo.Offload, _: eo.Offload) -> Tensor:
    return gradient(ours, ours)


@pytest.mark.parametrize("run", [around_ours, in_another_thread, gradient, the_same_inside])
def test_h24_what_is_around_ours_or_in_another_thread_or_ours_is_not_foreign(
    run: Callable[[eo.Offload, eo.Offload], Tensor], disk: DiskBackend
) -> None:
    outer, inner = disk.offload(), disk.offload()
    with warnings.catch_warnings(action="error"):
        assert torch.equal(run(outer, inner), gradient(nullcontext()))
    stats = [offload.stats(synchronize=True) for offload in (outer, inner)]
    assert [one.foreign_hooks for one in stats] == [0, 0]
    assert [one.bytes_out > 0 for one in stats] == [True, run is gradient]


def test_h24_hooks_that_hide_everything_are_told_of_at_the_exit(disk: DiskBackend) -> None:
    offload, x = disk.offload(), leaf()

    def step() -> None:
        with offload:
            forward(x, theirs())

    with warnings.catch_warnings(record=True, action="always") as warned:
        step()
        step()
    assert ["hide from it" in str(w.message) for w in warned].count(True) == 1
    assert ["no saved tensor could be seen" in str(w.message) for w in warned].count(True) == 1
    assert offload.stats().empty_forwards == 2
    assert offload.stats().foreign_hooks == 2


def test_a_context_without_a_forward_is_not_an_empty_one(disk: DiskBackend) -> None:
    offload, x = disk.offload(), leaf()
    with warnings.catch_warnings(action="error"):
        with offload:
            pass
        with offload, torch.no_grad():
            forward(x)
        with offload:
            loss = forward(x)
        with offload:
            loss.backward()
    assert offload.stats().empty_forwards == 0


def checkpointed(
    function: Callable[[Tensor], Tensor], around: AbstractContextManager[Any], *, use_reentrant: bool = False
) -> Tensor:
    """Returns the gradient of a step that has ``function`` in a checkpoint."""
    x = leaf()
    with around:
        loss = checkpoint(function, x.exp(), use_reentrant=use_reentrant) + x.exp().sum()
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_h23_checkpointing_hides_what_it_recomputes_by_design(use_reentrant: bool, disk: DiskBackend) -> None:
    run = partial(checkpointed, forward, use_reentrant=use_reentrant)
    offload = disk.offload()
    with warnings.catch_warnings(action="error"):
        assert torch.equal(run(offload), run(nullcontext()))
    stats = offload.stats(synchronize=True)
    assert stats.foreign_hooks == stats.empty_forwards == 0
    assert stats.bytes_out > 0


# -- hooks that hide nothing: see [Note: which hooks hide] in foreign.py ----------------------------------------------


class HandsOn:
    """What libraries put around hooks that they have found: notes what is saved, and hands it on."""

    def __init__(self) -> None:
        pair = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.found, self.seen = pair, 0

    def __call__(self, tensor: Tensor) -> Any:
        return self.pack(tensor)

    def pack(self, tensor: Tensor) -> Any:
        self.seen += 1
        return self.found[0](tensor)

    def unpack(self, packed: Any) -> Tensor:
        return self.found[1](packed)


def same_pair() -> saved_tensors_hooks:
    return saved_tensors_hooks(*torch._C._autograd._top_saved_tensors_default_hooks(True))


def handing_on_by_a_method() -> saved_tensors_hooks:
    return saved_tensors_hooks((around := HandsOn()).pack, around.unpack)


def handing_on_by_an_object() -> saved_tensors_hooks:
    return saved_tensors_hooks(around := HandsOn(), around.unpack)


def handing_on_by_a_partial() -> saved_tensors_hooks:
    around = HandsOn()
    return saved_tensors_hooks(partial(lambda one, tensor: one.pack(tensor), around), around.unpack)


def handing_on_by_a_closure() -> saved_tensors_hooks:
    around = HandsOn()
    return saved_tensors_hooks(lambda tensor: around.pack(tensor), around.unpack)


HANDING_ON = [
    same_pair,
    handing_on_by_a_method,
    handing_on_by_an_object,
    handing_on_by_a_partial,
    handing_on_by_a_closure,
]


@pytest.mark.parametrize("hooks", HANDING_ON)
def test_h24_hooks_that_hand_on_to_ours_hide_nothing(
    hooks: Callable[[], saved_tensors_hooks], disk: DiskBackend
) -> None:
    def run(around: AbstractContextManager[Any], *, is_ours: bool) -> Tensor:
        x = leaf()
        with around:
            with hooks() if is_ours else nullcontext():
                y = x * 2  # saves nothing to be handed on
            with hooks() if is_ours else nullcontext(), hooks() if is_ours else nullcontext():
                loss = y.exp().sigmoid().square().sum()
        loss.backward()
        assert x.grad is not None
        return x.grad

    offload = disk.offload()
    with warnings.catch_warnings(action="error"):
        assert torch.equal(run(offload, is_ours=True), run(nullcontext(), is_ours=False))
    stats = offload.stats(synchronize=True)
    assert stats.foreign_hooks == 0
    assert stats.bytes_out > 0
    assert "hooks" not in str(stats)


def test_h24_hooks_inside_of_a_checkpoint_hide_nothing_from_ours(disk: DiskBackend) -> None:
    run = partial(checkpointed, partial(forward, inside=theirs()))
    offload = disk.offload()
    with warnings.catch_warnings(action="error"):
        assert torch.equal(run(offload), run(nullcontext()))
    assert offload.stats(synchronize=True).foreign_hooks == 0
    assert offload.stats().bytes_out > 0


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


def test_h24_remat_enters_our_own_hooks_and_hands_on_to_them(disk: DiskBackend) -> None:
    expected = remat_step(nullcontext())
    assert len(expected) == 12
    offload = disk.offload()
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            assert all(map(torch.equal, remat_step(offload), expected))
        with offload:
            ours = HandsOn().found
        assert all(map(torch.equal, remat_step(offload, ours), expected))
    stats = offload.stats(synchronize=True)
    assert stats.foreign_hooks == 0
    assert stats.bytes_out > 0
    other = disk.offload(min_bytes=1 << 30)
    with pytest.warns(RuntimeWarning, match="nothing moved, because .* min_bytes"):
        _ = [remat_step(other) for _ in range(3)]


def test_h24_hooks_that_are_given_to_remat_are_foreign(disk: DiskBackend) -> None:
    offload = disk.offload()
    with pytest.warns(RuntimeWarning, match=WARNING):
        remat_step(offload, (lambda tensor: tensor.detach(), lambda tensor: tensor))
    assert offload.stats(synchronize=True).foreign_hooks == 3


# -- what is put into torch's class -----------------------------------------------------------------------------------


def test_torchs_class_is_changed_only_while_an_offload_watches(disk: DiskBackend) -> None:
    first, second = disk.offload(), disk.offload()
    seen: list[bool] = []
    entered, leave = threading.Event(), threading.Event()

    def changed() -> bool:
        return saved_tensors_hooks.__enter__ is not ORIGINAL

    def other() -> None:
        with second:
            entered.set()
            leave.wait()
        seen.append(changed())

    thread = threading.Thread(target=other)
    with first, first:
        thread.start()
        entered.wait()
        assert changed()
    assert changed(), "the other thread still watches"
    leave.set()
    thread.join()
    assert seen == [False]
    with pytest.raises(ZeroDivisionError), first:
        raise ZeroDivisionError
    assert not changed()


def test_what_others_have_put_into_torchs_class_is_called_and_put_back(
    disk: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload, calls = disk.offload(), []

    def patched(hooks: saved_tensors_hooks) -> None:
        calls.append(hooks)
        ORIGINAL(hooks)

    monkeypatch.setattr(saved_tensors_hooks, "__enter__", patched)
    with pytest.warns(RuntimeWarning, match=WARNING):
        gradient(offload, theirs())
    assert saved_tensors_hooks.__enter__ is patched
    assert len(calls) == 2, "theirs, and ours"


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
