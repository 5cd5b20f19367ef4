"""The public contract for eager code, as a user would hold us to it."""

from __future__ import annotations

import inspect
import os
import threading
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from tests.hazards.backends import Backend, DiskBackend, assert_balanced
from tests.hazards.programs import assert_moved
from tests.programs import leaf

N = 1 << 14
NBYTES = 4 * N


def chain(x: Tensor, depth: int = 4) -> Tensor:
    """Saves ``depth`` activations of ``NBYTES`` bytes each, and nothing else."""
    for _ in range(depth):
        x = x.sigmoid()
    return x.sum()


def gradient(x: Tensor, depth: int = 4) -> Tensor:
    """Of ``chain``, without offload."""
    return torch.autograd.grad(chain(x, depth), x)[0]


def exact_backward(loss: Tensor, x: Tensor, depth: int = 4) -> None:
    loss.backward()
    assert torch.equal(x.grad, gradient(x, depth))


# -- the surface ----------------------------------------------------------------------------------------------------

PUBLIC = [
    *("CapacityError", "ConfigError", "CorruptionError", "Offload", "OffloadConfig", "OffloadError", "OffloadStats"),
    *("SavedTensorModifiedError", "TransferError", "keep", "no_offload", "prefer_offload"),
    *("HeldTensor", "Longest", "Machine", "Plan", "PlanError", "longest", "plan"),
]


def test_the_names_of_the_contract_are_there() -> None:
    assert set(PUBLIC) <= set(eo.__all__)
    assert list(eo.__all__) == sorted(eo.__all__)
    star: dict[str, object] = {}
    exec("from eager_offload import *", star)
    assert set(eo.__all__) <= set(star)
    assert eo.__version__.count(".") == 2
    assert (Path(eo.__file__).parent / "py.typed").is_file()


def public_callables() -> Iterator[Any]:
    """Every public function, class, and public method of one, with its name."""
    for name in eo.__all__:
        public = getattr(eo, name)
        yield pytest.param(public, id=name)
        if inspect.isclass(public):
            for attribute, value in vars(public).items():
                if not attribute.startswith("_"):
                    inner = getattr(value, "__func__", getattr(value, "fget", value))
                    if inspect.isfunction(inner):
                        yield pytest.param(inner, id=f"{name}.{attribute}")


@pytest.mark.parametrize("public", list(public_callables()))
def test_everything_public_is_documented_and_typed(public: Any) -> None:
    text = inspect.getdoc(public)
    assert text
    assert text[0].isupper() or text.startswith("``"), "a sentence"
    function = public.__init__ if inspect.isclass(public) else public
    if not inspect.isfunction(function):
        return  # built in
    signature, hints = inspect.signature(function), typing.get_type_hints(function)
    for name, parameter in signature.parameters.items():
        assert name in ("self", "cls") or name in hints, f"{name} has no type"
        assert parameter.annotation is not Any
    assert "return" in hints or public in vars(typing)


# -- closing --------------------------------------------------------------------------------------------------------


def spill_files() -> int:
    """How many files without a name this process has open."""
    opened = [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]
    return sum("(deleted)" in os.readlink(one) for one in opened if os.path.lexists(one))


def test_a_forward_of_another_thread_in_the_midst_of_a_close_leaves_the_object_open(disk: DiskBackend) -> None:
    offload, x, losses = disk.offload(), leaf(N), list[Tensor]()

    def forward() -> None:
        with offload:
            losses.append(chain(x))

    with disk.gate() as gate:  # close waits for the copies of one forward while another thread begins a second one

        def other() -> None:
            gate.wait_until_reached()
            forward()
            gate.open()

        forward()
        thread = threading.Thread(target=other)
        thread.start()
        offload.close()
        thread.join()
    forward()
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out == len(losses) * 4 * NBYTES == 3 * 4 * NBYTES
    assert not stats.fallbacks
    while losses:
        losses.pop().backward()
    assert torch.equal(x.grad, 3 * gradient(x))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files by /proc")
def test_graphs_that_are_alive_across_a_close_are_still_right_and_files_go_with_the_last(disk: DiskBackend) -> None:
    before, x, y = spill_files(), leaf(N), leaf(N, seed=2)
    offload = disk.offload()
    assert spill_files() == before + 1
    with offload:
        loss, dropped = chain(x), chain(y, 3)
    assert_moved(offload.stats(synchronize=True), 1.0)
    offload.close()
    offload.close()
    assert spill_files() == before + 1, "what is alive keeps what it needs"
    with offload:
        again = chain(y)
    exact_backward(again, y)  # using it again opens it again
    exact_backward(loss, x)
    del loss, dropped
    stats = offload.stats(synchronize=True)
    assert stats.offloaded_bytes == (4 + 3 + 4) * NBYTES, "what was counted stays"
    assert stats.released_bytes == 3 * NBYTES
    assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
    del again
    offload.close()
    assert spill_files() == before


def test_closing_while_a_forward_runs_keeps_its_gradients(users_backend: Backend) -> None:
    offload, x = users_backend.offload(keep_last_bytes=NBYTES), leaf(N)
    with offload:
        h = x.sigmoid().sigmoid()
        offload.close()
        loss = h.sigmoid().sigmoid().sum()
    exact_backward(loss, x)
    del loss, h
    stats = offload.stats(synchronize=True)
    assert_balanced(stats)
    assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
    assert stats.saved_bytes == 4 * NBYTES
    assert stats.bytes_out > 0
