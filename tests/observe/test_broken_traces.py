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
    with pytest.raises(eo.ConfigError, match="path=7 is not accepted"):
        offload.trace(7)  # type: ignore[arg-type]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file"]


def test_a_device_a_pipe_and_a_link_stay_what_they_are_and_a_file_keeps_its_mode(
    tmp_path: Path, net: Net, offload: eo.Offload
) -> None:
    pipe, target, link = (tmp_path / name for name in ("pipe", "target.json", "link.json"))
    os.mkfifo(pipe)
    link.symlink_to(target)  # which is not there yet
    read = list[str]()
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    for path in (Path(os.devnull), pipe, link, link):
        with offload.trace(path):
            step(net, offload)
        target.touch()
        target.chmod(0o640)
    reader.join()
    assert read_trace(target).saved
    assert json.loads(read[0])["traceEvents"]
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(one.name for one in tmp_path.glob("*.json")) == ["link.json", "target.json"]


def test_a_trace_of_nothing_warns_and_leaves_no_file(path: Path) -> None:
    path.write_text("before")
    with (
        pytest.warns(RuntimeWarning, match="nothing ran inside `with offload.trace.*so no trace is written"),
        eo.Offload().trace(path),
    ):
        torch.ones(3).sum()
    assert path.read_text() == "before"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(eo.ConfigError, match="Permission denied"):
        eo.Offload().trace(tmp_path / "step.json")
    tmp_path.chmod(0o700)


def test_two_traces_at_the_same_time_are_of_two_offloads(
    path: Path, tmp_path: Path, net: Net, offload: eo.Offload, disk: DiskBackend
) -> None:
    other = tmp_path / "other.json"
    with offload.trace(path), disk.offload(**FIELDS).trace(other):
        with pytest.raises(eo.OffloadError, match=r"being traced already.*third\.json"):
            offload.trace(tmp_path / "third.json").__enter__()
        step(net, offload)
    assert_sound(read_trace(path))
    assert (read_trace(other).stats["saved_bytes"], of(read_trace(other), SliceKind.OFFLOAD)) == (0, [])
    assert nothing_is_left(offload)
    assert sorted(tmp_path.iterdir()) == [other, path]


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
