"""Traces that cannot be written, that end early, and that leave nothing behind all the same."""

from __future__ import annotations

import gc
import json
import os
import stat
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload.observe import tracing as module
from eager_offload.trace_file import SliceKind, read_trace
from tests.hazards.backends import DiskBackend
from tests.observe.steps import FIELDS, Net, assert_sound, nothing_is_left, of, step, traced
from tests.threads import collect


@pytest.mark.parametrize(
    ("name", "why"),
    [("missing/step.json", "No such file"), (".", "is a directory"), ("file/step.json", "Not a directory")],
)
def test_a_path_that_cannot_be_written_is_refused_before_training(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    offload = eo.Offload()
    with pytest.raises(eo.ConfigError, match=f"path=.*{why}.*trace takes the path of a file"):
        offload.trace(tmp_path / name)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file"]


def trace_a_step(path: Path) -> None:
    with DiskBackend() as disk:
        offload = disk.offload(**FIELDS)
        with offload.trace(path):
            step(Net(), offload)


def test_a_special_file_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    trace_a_step(Path(os.devnull))
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    trace_a_step(pipe)
    reader.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert json.loads(read[0])["traceEvents"]


def test_of_a_link_the_target_is_written_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    trace_a_step(link)  # which leads nowhere yet
    assert read_trace(target).saved
    target.write_text("")
    target.chmod(0o640)
    trace_a_step(link)
    assert link.is_symlink()
    assert read_trace(target).saved
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(one.name for one in tmp_path.rglob("*.json")) == ["link.json", "target.json"]


def test_a_trace_of_nothing_warns_and_leaves_no_file(path: Path) -> None:
    path.write_text("before")
    with (
        pytest.warns(RuntimeWarning, match="nothing ran inside `with offload.trace.*so no trace is written"),
        eo.Offload().trace(path),
    ):
        torch.ones(3).sum()
    assert path.read_text() == "before"


def test_something_that_is_no_path_is_refused() -> None:
    with pytest.raises(eo.ConfigError, match="path=7 is not accepted"):
        eo.Offload().trace(7)  # type: ignore[arg-type]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(eo.ConfigError, match="Permission denied"):
        eo.Offload().trace(tmp_path / "step.json")
    tmp_path.chmod(0o700)


def test_a_second_trace_at_the_same_time_is_refused_and_the_first_goes_on(
    path: Path, tmp_path: Path, net: Net, offload: eo.Offload
) -> None:
    with offload.trace(path):
        with (
            pytest.raises(eo.OffloadError, match=r"being traced already.*other\.json"),
            offload.trace(tmp_path / "other.json"),
        ):
            raise AssertionError("two traces of one Offload")
        step(net, offload)
    assert_sound(read_trace(path))
    assert nothing_is_left(offload)
    assert list(tmp_path.iterdir()) == [path]


def test_two_offloads_may_be_traced_at_the_same_time(path: Path, tmp_path: Path, net: Net, disk: DiskBackend) -> None:
    first, second = disk.offload(**FIELDS), disk.offload(**FIELDS)
    with first.trace(path), second.trace(tmp_path / "other.json"):
        step(net, first)
    assert_sound(read_trace(path))
    other = read_trace(tmp_path / "other.json")
    assert other.stats["saved_bytes"] == 0
    assert of(other, SliceKind.OFFLOAD) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_inside_ends_the_trace_and_the_file_is_there(
    path: Path, error: type[BaseException], net: Net, offload: eo.Offload
) -> None:
    class Fails(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error("no")

    def work() -> None:
        step(net, offload)
        with offload:
            Fails()(net(torch.ones(64, 64)))

    with pytest.raises(error, match="no"), offload.trace(path):
        work()
    assert nothing_is_left(offload)
    trace = read_trace(path)
    assert trace.error == f"{error.__name__}: no"
    assert "Fails" in of(trace, SliceKind.COMPUTE)
    assert trace.stats["bytes_out"] > 0
    collect()  # the traceback and what it held


def test_a_backward_that_raises_is_shown_as_far_as_it_came(path: Path, disk: DiskBackend) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
            raise ValueError("no")

    offload = disk.offload(min_bytes=0)

    def work() -> None:
        x = torch.ones(64, 64, requires_grad=True)
        with offload:
            loss = Fails.apply(x.exp()).sin().sum()
        with pytest.raises(ValueError, match="no"):
            loss.backward()

    trace = traced(offload, path, work)
    assert [one.name for one in trace.slices if one.track == "compute backward"] == ["backward", "SinBackward0"]


def test_a_file_that_cannot_be_written_in_the_end_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, net: Net, offload: eo.Offload
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_trace", fail)
    with pytest.raises(eo.OffloadError, match=r"could not be written.*No space left"), offload.trace(path):
        step(net, offload)
    assert nothing_is_left(offload)
    with (
        pytest.warns(RuntimeWarning, match="could not be written"),
        pytest.raises(ValueError, match=r"^mine$"),
        offload.trace(path),
    ):
        raise ValueError("mine")
    assert nothing_is_left(offload)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_h28_a_forked_child_leaves_the_file_to_its_parent(path: Path, net: Net, offload: eo.Offload) -> None:
    with offload.trace(path) as tracing:
        step(net, offload)
        child = os.fork()
        if not child:
            tracing.__exit__(None, None, None)
            os._exit(0 if not path.exists() and nothing_is_left(offload) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_sound(read_trace(path))


def test_nothing_keeps_an_offload_that_was_traced(path: Path, net: Net) -> None:
    eo.Offload(tier="disk", **FIELDS)  # the first of a configuration makes the pair of hooks
    collect()
    gc.disable()
    try:
        offload = eo.Offload(tier="disk", **FIELDS)
        with offload.trace(path), offload:
            loss = net(torch.ones(64, 64))
        offload.close()
        alive = weakref.ref(offload)
        del offload
        assert alive() is None, "handles that outlive a trace hold no Offload"
        loss.backward()
    finally:
        gc.enable()
