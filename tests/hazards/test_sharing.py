"""What a second save of a storage may be given that has left already: the bytes of its own version, and no others."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from eager_offload import Offload, SavedTensorModifiedError
from tests.hazards.backends import Backend, offloader_of, tracked_storages
from tests.hazards.programs import Around, leaf

LAYERS = 8


def changed_between_two_saves(around: Around) -> Tensor:
    """The gradient of a product of what was saved, has left, and was changed before it was saved again."""
    x, w = (leaf(32, 32, seed=seed) for seed in range(2))
    with around:
        y = x + 1.0
        first = (y * w).sigmoid()
        if isinstance(around, Offload):
            assert around.stats(synchronize=True).bytes_out > 0, "another storage was saved meanwhile, so it has left"
        y.mul_(2.0)
        second = y * w
        del y
    if isinstance(around, Offload):
        around.stats(synchronize=True)
    (gradient,) = torch.autograd.grad(second.sum(), w)
    assert first.grad_fn is not None, "the first save is alive as long as this, and is never asked for"
    return gradient


def test_h01_a_storage_that_has_left_serves_no_save_of_a_later_version(backend: Backend) -> None:
    expected = changed_between_two_saves(nullcontext())
    offload = backend.offload()
    assert torch.equal(changed_between_two_saves(offload), expected)
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out == 3 * 32 * 32 * 4, "it left twice, in each of its versions"


def test_h07_a_storage_that_has_left_serves_further_saves_of_its_version(backend: Backend) -> None:
    offload = backend.offload()
    x = leaf(32, 32)
    with offload:
        y = x + 1.0
        first = y.square()
        offload.stats(synchronize=True)
        second = y.square()
        del y
    moved = offload.stats(synchronize=True).bytes_out
    assert moved == 32 * 32 * 4, "once, for both"
    (first + second).sum().backward()
    assert torch.equal(x.grad, 4.0 * (x + 1.0))


def masked_in_every_layer(around: Around) -> list[Tensor]:
    """The gradients of layers that all save one mask, which goes with the forward."""
    x = leaf(32, 32)
    with around:
        mask = leaf(32, 32, seed=2, grad=False)
        y = x + 1.0
        for _ in range(LAYERS):
            y = (y * mask).sin()
        storage = weakref.ref(mask.untyped_storage())
        del mask
    if isinstance(around, Offload):
        around.stats(synchronize=True)
        assert storage() is None
    return list(torch.autograd.grad(y.sum(), x))


def test_h07_what_every_layer_saves_without_grad_leaves_when_forward_is_over(backend: Backend) -> None:
    offload = backend.offload(step_plans="auto")
    expected = masked_in_every_layer(nullcontext())
    for step in range(1, 4):
        assert all(map(torch.equal, masked_in_every_layer(offload), expected))
        stats = offload.stats(synchronize=True)
        assert stats.kept_bytes == {}
        copies = (3 + LAYERS) + (step - 1) * (1 + LAYERS)
        assert stats.bytes_out == copies * 32 * 32 * 4, "the mask three times at first, then after its last save"
        assert stats.shared_bytes == (2 * step * LAYERS - copies) * 32 * 32 * 4


def test_h01_what_every_layer_saves_and_changes_in_between_raises_as_autograd_does(backend: Backend) -> None:
    def program(around: Around) -> Tensor:
        x = leaf(32, 32)
        with around:
            mask = torch.ones(32, 32)
            y = x + 1.0
            for _ in range(LAYERS):
                y = (y * mask).sin()
            mask.mul_(2.0)
            for _ in range(LAYERS):
                y = (y * mask).sin()
        return y.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program(nullcontext()).backward()
    backend.sources_change = True
    offload = backend.offload()
    loss = program(offload)
    assert offload.stats(synchronize=True).bytes_out > 0
    with pytest.raises(SavedTensorModifiedError, match="at version 1; expected version 0"):
        loss.backward()


def test_h19_what_came_back_for_a_graph_that_went_is_let_go_though_another_graph_shares_it(backend: Backend) -> None:
    offload = backend.offload()
    x, w, v = (leaf(32, 32, seed=seed) for seed in range(3))
    y = x + 1.0
    with offload:
        first = y * w
    with offload:
        product = y * v
        second = product.sin()
    del y
    offload.stats(synchronize=True)
    assert offloader_of(offload).census().resident_bytes == 0
    torch.autograd.grad(second.sum(), product)  # asks for one save, and has the two before it brought back
    offload.stats(synchronize=True)
    assert offloader_of(offload).census().resident_bytes >= 32 * 32 * 4
    del product, second
    offload.stats(synchronize=True)
    assert tracked_storages(offload) == 1, "that of y, for the first graph"
    assert offloader_of(offload).census().resident_bytes == 0
    (gradient,) = torch.autograd.grad(first.sum(), w)
    assert torch.equal(gradient, x.detach() + 1.0)


def test_h19_a_save_that_shares_what_has_left_holds_nothing_on_the_device(backend: Backend) -> None:
    offload = backend.offload()
    with offload:
        y = torch.arange(1024.0).requires_grad_() + 1.0
        source, values = weakref.ref(y.untyped_storage()), y.detach().clone()
        pack = offload._hooks.pack
        first, again, other = pack(y), y.view(32, 32), y * 1.0
        third = pack(other)  # sets the copy of `y` off, whose operator has run
        offload.stats(synchronize=True)
        second = pack(again)
        assert offload.stats().shared_bytes == 4096, "saved by the operator that set the copy off"
        del y, again, other
    offload.stats(synchronize=True)
    assert source() is None
    assert torch.equal(second.unpack(), values.view(32, 32))
    assert torch.equal(first.unpack(), values)
    assert torch.equal(third.unpack(), values)
