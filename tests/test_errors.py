"""What a user is told when something cannot work or fails, what becomes of the bytes, and why a saved tensor stays."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import eager_offload as eo
from tests.hazards.backends import DiskBackend, assert_settled, hooks_are_gone, offloader_of
from tests.hazards.programs import assert_identical, assert_moved
from tests.programs import leaf
from tests.test_contract import NBYTES, N, chain, exact_backward
from tests.threads import collect, on_a_thread
from tests.tiers.files import Watched

# -- before the first step --------------------------------------------------------------------------------------------

NO_PLACES = [
    ("missing", "does not exist"),
    ("file", "is not a directory"),
    ("file/directory", "does not exist"),
    ("link", "does not exist"),
    ("/proc" if os.geteuid() == 0 else "read-only", ""),  # where even root creates no file
    *([("/dev/shm", "tmpfs, which is memory itself")] if os.path.isdir("/dev/shm") else []),
]


@pytest.mark.parametrize("tier", ["disk", "auto"])
@pytest.mark.parametrize(("place", "why"), NO_PLACES)
def test_h27_a_path_that_cannot_serve_is_an_error_before_the_first_step(
    tier: str, place: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "read-only").mkdir(mode=0o500)
    path = tmp_path / place
    for given in (path, str(path)):
        with pytest.raises(eo.ConfigError, match=f"{why}.*accepted is a writable directory") as raised:
            eo.Offload(tier=tier, disk_path=given)
        assert str(raised.value).startswith(f"disk_path: {str(path)!r} cannot serve: ")
        assert isinstance(raised.value.__cause__, OSError)
    assert hooks_are_gone()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a plain Offload needs no disk there")
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="this system has no /dev/shm")
@pytest.mark.parametrize("fields", [{}, {"tier": "disk"}], ids=str)
def test_h27_where_all_directories_are_memory_an_offload_cannot_be_made(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/shm/missing")
    monkeypatch.chdir("/dev/shm")
    with pytest.raises(eo.ConfigError, match=r"no place was found .*tmpfs, which is memory itself"):
        eo.Offload(**fields)
    for switched_off in ({"enabled": False}, {"tier": "host"}):
        eo.Offload(**switched_off)


def test_an_offload_that_is_not_used_holds_no_file() -> None:
    eo.Offload()
    before = len(os.listdir("/proc/self/fd"))
    unused = [eo.Offload() for _ in range(4)]
    assert (len(unused), len(os.listdir("/proc/self/fd"))) == (4, before)


def test_a_model_is_not_taken_and_one_line_says_what_to_write() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(100)))
    told = r"an Offload takes no model: write `with offload:` around the forward, or offload.compile\(model\)$"
    with pytest.raises(eo.ConfigError, match=rf"^Offload\(<Sequential>\) is not accepted: {told}"):
        eo.Offload(model)
    with pytest.raises(TypeError, match=rf"^this Offload was called: {told}"):
        eo.Offload()(model)
    with pytest.raises(eo.ConfigError, match=told):
        eo.Offload(model=model)  # type: ignore[call-arg]
    with pytest.raises(eo.ConfigError, match=r"^config=<Offload.* is not accepted"):
        eo.Offload(eo.Offload())
    for given in ({"config": [model]}, {"min_bytes": model}, {"plan": model}):
        with pytest.raises(eo.ConfigError, match=r"^\w+=<\w+> is not accepted") as raised:
            eo.Offload(**given)
        assert "\n" not in str(raised.value)


# -- in a step --------------------------------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 12)
ROWS = X.clone().reshape(3, 4).requires_grad_()
Function = Callable[[Tensor], Tensor]


def function(x: Tensor) -> Tensor:
    return (x * 2).sigmoid().square().sum()


FORBIDDEN: dict[str, Callable[[Function], Any]] = {
    "grad": lambda f: grad(f)(X),
    "vjp": lambda f: vjp(f, X)[1](torch.ones(())),
    "jacrev": lambda f: jacrev(f)(X),
    "hessian": lambda f: hessian(f)(X),
    "grad of grad": lambda f: grad(lambda x: grad(f)(x).sum())(X),
    "vmap of grad": lambda f: vmap(grad(f))(X.reshape(3, 4)),
}
ALLOWED: dict[str, Callable[[Function], Any]] = {
    "vmap": lambda f: vmap(f)(X.reshape(3, 4)),
    "jvp": lambda f: jvp(f, (X,), (X,)),
    "jacfwd": lambda f: jacfwd(f)(X),
    "vmap with a backward behind it": lambda f: torch.autograd.grad(vmap(f)(ROWS).sum(), ROWS),
    "a hessian without transforms": lambda f: torch.autograd.functional.hessian(f, X),
}


def around(transform: Callable[[Function], Any], offload: eo.Offload) -> Any:
    with offload:
        return transform(function)


def inside(transform: Callable[[Function], Any], offload: eo.Offload) -> Any:
    def f(x: Tensor) -> Tensor:
        with offload:
            return function(x)

    return transform(f)


@pytest.fixture
def works_on(disk: DiskBackend) -> Iterator[eo.Offload]:
    """An ``Offload`` that works, here and in another thread, after whatever goes wrong inside of it."""
    offload = disk.offload()

    def step() -> None:
        x = leaf(N)
        with offload:
            loss = chain(x)
        exact_backward(loss, x)

    yield offload
    assert hooks_are_gone()
    step()
    on_a_thread(step)
    assert_moved(offload.stats(synchronize=True))


@pytest.mark.parametrize("place", [around, inside])
@pytest.mark.parametrize("name", FORBIDDEN)
def test_h31_where_torch_forbids_hooks_its_error_is_ours_with_the_way_out(
    place: Callable[..., Any], name: str, works_on: eo.Offload
) -> None:
    with pytest.raises(eo.OffloadError, match="torch does not allow saved-tensor hooks here") as raised:
        place(FORBIDDEN[name], works_on)
    assert "outside `with offload:`" in str(raised.value)
    assert type(raised.value.__cause__) is RuntimeError
    assert str(raised.value.__cause__) in str(raised.value), "torch's own words are there"


@pytest.mark.parametrize("place", [around, inside])
@pytest.mark.parametrize("name", ALLOWED)
def test_h31_transforms_that_torch_allows_are_exact(place: Callable[..., Any], name: str, works_on: eo.Offload) -> None:
    assert_identical(ALLOWED[name](function), place(ALLOWED[name], works_on))


# -- what is raised ---------------------------------------------------------------------------------------------------


def test_errors_are_of_the_kinds_that_the_contract_names_and_travel_between_processes() -> None:
    for kind in (eo.ConfigError, eo.CapacityError, eo.CorruptionError, eo.SavedTensorModifiedError):
        assert issubclass(kind, eo.OffloadError)
        assert str(pickle.loads(pickle.dumps(kind("why")))) == "why"
    assert issubclass(eo.OffloadError, RuntimeError)
    assert issubclass(eo.ConfigError, ValueError)
    error = eo.TransferError("lost", errno=errno.EIO, tier="disk", nbytes=77)
    error.add_note("on node 3")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is eo.TransferError
    assert (str(again), again.errno, again.tier, again.nbytes) == ("lost", errno.EIO, "disk", 77)
    assert again.__notes__ == ["on node 3"]


Make = Callable[..., tuple[eo.Offload, Watched]]


def test_h27_a_write_that_fails_keeps_what_it_could_not_move_and_is_told_once(watched: Make) -> None:
    (offload, file), x = watched(), leaf(N)
    file.on_write = OSError(errno.EIO, os.strerror(errno.EIO))

    def step() -> None:
        with offload:
            loss = chain(x)
        offload.stats(synchronize=True)
        x.grad = None
        exact_backward(loss, x)

    with pytest.warns(RuntimeWarning, match=r"offloading failed.*stays on cpu.*Input/output error"):
        step()
    collect()
    gc.disable()
    try:
        with warnings.catch_warnings(action="error"):
            step()
        assert set(offloader_of(offload).census()) == {0}, "what failed leaves nothing to the garbage collector"
    finally:
        gc.enable()
    stats = assert_settled(offload)
    assert stats.kept_bytes == {"failed": 8 * NBYTES}
    assert stats.fallbacks == {"write_failed": 8}
    assert stats.offloaded_bytes == stats.bytes_out == stats.bytes_in == 0
    file.on_write = None
    with offload:
        loss = chain(x)
    assert offload.stats(synchronize=True).offloaded_bytes == 4 * NBYTES, "it moves again once the disk does"
    loss.backward()


def test_h27_a_read_that_fails_is_raised_from_backward_and_a_second_try_may_succeed(watched: Make) -> None:
    (offload, file), x = watched(prefetch_bytes=0), leaf(N)
    with offload:
        loss = chain(x)
    assert_moved(offload.stats(synchronize=True), 1.0)
    file.on_read = OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.raises(eo.TransferError, match=f"could not read {NBYTES} bytes") as raised:
        loss.backward(retain_graph=True)
    assert (raised.value.errno, raised.value.tier, raised.value.nbytes) == (errno.EIO, "disk", NBYTES)
    assert x.grad is None
    file.on_read = None
    exact_backward(loss, x)
    del raised, loss
    assert_settled(offload)


def test_what_comes_back_changed_is_never_used(watched: Make) -> None:
    (offload, file), x = watched(verify=True), leaf(N)
    with offload:
        loss = chain(x, 1)
    assert_moved(offload.stats(synchronize=True), 1.0)
    file.overwrite(100, b"\xff\xff\xff\xff")
    with pytest.raises(eo.CorruptionError, match="checksum does not match"):
        loss.backward()
    assert x.grad is None
    collect()  # the error's traceback is in a cycle with the frames of the backward that it ended
