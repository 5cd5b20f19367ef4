"""What cannot work is one clear error before the first step; afterwards everything goes on without ``Offload``."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import eager_offload as eo
from eager_offload._torch import require_torch
from tests.hazards.backends import assert_settled, hooks_are_gone
from tests.hazards.programs import assert_identical, assert_moved
from tests.threads import on_a_thread

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """Small, with everything that saves: weights, activations, a norm."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.layers(batch)
        return out.square().mean()


BATCH = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)


def step(model: nn.Module, around: AbstractContextManager[Any] | None = None) -> list[Tensor]:
    """One step of training; returns the parameters after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with around or nullcontext():
        loss = model(BATCH)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def model() -> Iterator[Model]:
    """A model that has to train on afterwards as if nothing had happened, in this thread and in others."""
    model = Model()
    untouched = copy.deepcopy(model)
    yield model
    assert hooks_are_gone()
    assert_identical(step(untouched), step(model), "after the error")
    assert_identical(step(untouched), step(model), "and again")
    assert_identical(step(untouched), on_a_thread(lambda: step(model)), "and in another thread")


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[eo.Offload]:
    """An ``Offload`` that works, before and after whatever goes wrong inside it."""
    offload = eo.Offload(tier="disk", disk_path=tmp_path, min_bytes=0, keep_last_bytes=0)
    yield offload
    plain, model = Model(), Model()
    assert_identical(step(plain), step(model, offload), "with offload, after the error")
    assert_moved(assert_settled(offload))
    offload.close()


# -- models ---------------------------------------------------------------------------------------------------------


# -- where bytes should go ------------------------------------------------------------------------------------------


NO_PLACES = [
    ("missing", "does not exist"),
    ("file", "is no directory"),
    ("file/directory", "does not exist"),
    ("link", "does not exist"),
    ("/proc" if os.geteuid() == 0 else "read-only", ""),  # where even root creates no file
]
if os.path.isdir("/dev/shm"):
    NO_PLACES.append(("/dev/shm", "tmpfs, which is memory itself"))


@pytest.mark.parametrize("tier", ["disk", "auto"])
@pytest.mark.parametrize(("place", "why"), NO_PLACES)
def test_h27_a_path_that_cannot_serve_is_an_error_before_the_first_step(
    tier: str, place: str, why: str, model: Model, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "read-only").mkdir(mode=0o500)
    path = tmp_path / place
    for given in (path, str(path), [tmp_path, path]):
        with pytest.raises(eo.ConfigError) as raised:
            eo.Offload(tier=tier, disk_path=given)
        text = str(raised.value)
        assert text.startswith(f"disk_path: {str(path)!r} cannot serve: ")
        assert why in text
        assert "accepted is a writable directory" in text
        assert isinstance(raised.value.__cause__, OSError)
    assert hooks_are_gone()


@pytest.mark.parametrize("field", ["host_budget", "disk_budget"])
@pytest.mark.parametrize("nothing", [0, "0", "0GiB"])
def test_a_budget_of_nothing_is_an_error_before_the_first_step(field: str, nothing: int | str, model: Model) -> None:
    with pytest.raises(eo.ConfigError, match=rf"^{field}={nothing!r} is not accepted.*leave the context out"):
        eo.Offload(**{field: nothing})


@pytest.mark.parametrize("version", ["2.10.1", "2.10.0+cu130", "2.10.9.dev20260101", "1.13.1", "2.9"])
def test_a_torch_that_is_too_old_is_an_error_that_says_which_is_needed(version: str) -> None:
    with pytest.raises(ImportError) as raised:
        require_torch(version)
    assert str(raised.value) == f"eager_offload needs torch 2.11 or newer, but {version} is installed: upgrade torch"
    for enough in ("2.11.0", "2.11.0a0+git1234567", "2.13.0+cpu", "2.100.0", "3.0.0", "10.1", "2.11"):
        require_torch(enough)


# -- transforms -----------------------------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 12)


def function(x: Tensor) -> Tensor:
    return (x * 2).sigmoid().square().sum()


FORBIDDEN: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda f: grad(f)(X),
    "vjp": lambda f: vjp(f, X)[1](torch.ones(())),
    "jacrev": lambda f: jacrev(f)(X),
    "hessian": lambda f: hessian(f)(X),
    "grad of grad": lambda f: grad(lambda x: grad(f)(x).sum())(X),
    "vmap of grad": lambda f: vmap(grad(f))(X.reshape(3, 4)),
}
ALLOWED: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "vmap": lambda f: vmap(f)(X.reshape(3, 4)),
    "jvp": lambda f: jvp(f, (X,), (X,)),
    "jacfwd": lambda f: jacfwd(f)(X),
    "vmap with a backward behind it": lambda f: torch.autograd.grad(vmap(f)(ROWS).sum(), ROWS),
    "a hessian without transforms": lambda f: torch.autograd.functional.hessian(f, X),
}
ROWS = X.clone().reshape(3, 4).requires_grad_()


def around(transform: Callable[..., Any], offload: eo.Offload) -> Any:
    with offload:
        return transform(function)


def inside(transform: Callable[..., Any], offload: eo.Offload) -> Any:
    def f(x: Tensor) -> Tensor:
        with offload:
            return function(x)

    return transform(f)


@pytest.mark.parametrize("place", [around, inside])
@pytest.mark.parametrize("name", FORBIDDEN)
def test_h31_where_torch_forbids_hooks_its_error_is_ours_with_the_way_out(
    place: Callable[..., Any], name: str, offload: eo.Offload, model: Model
) -> None:
    transform = FORBIDDEN[name]
    expected = transform(function)
    with pytest.raises(eo.OffloadError, match="torch does not allow saved-tensor hooks here") as raised:
        place(transform, offload)
    assert "outside `with offload:`" in str(raised.value)
    assert type(raised.value.__cause__) is RuntimeError
    assert str(raised.value.__cause__) in str(raised.value), "torch's own words are there"
    assert hooks_are_gone()
    assert_identical(expected, transform(function), "the way out")


@pytest.mark.parametrize("place", [around, inside])
@pytest.mark.parametrize("name", ALLOWED)
def test_h31_transforms_that_torch_allows_are_exact(place: Callable[..., Any], name: str, offload: eo.Offload) -> None:
    transform = ALLOWED[name]
    assert_identical(transform(function), place(transform, offload))


@pytest.mark.parametrize("error", [ValueError("theirs"), RuntimeError("shapes do not match"), KeyboardInterrupt()])
def test_h10_an_error_of_the_users_own_passes_as_it_is(error: BaseException, offload: eo.Offload, model: Model) -> None:
    def fail() -> None:
        with offload:
            model(BATCH)
            raise error

    with pytest.raises(type(error)) as raised:
        fail()
    assert raised.value is error
    assert error.__cause__ is None
