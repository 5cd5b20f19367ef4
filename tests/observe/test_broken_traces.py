"""Traces that cannot be written, that end early, and that leave nothing behind all the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from eager_offload import observe
from eager_offload.observe.timeline import SliceKind
from eager_offload.observe.trace import read_trace
from tests.hazards.backends import DiskBackend
from tests.observe.steps import FIELDS, Layer, Net, assert_sound, nothing_is_left, of, step
from tests.sampling import one_in
from tests.threads import collect


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing/step.json", "No such file"),
        (".", "is a directory"),
        ("file/step.json", "Not a directory"),
        ("step.json", "Permission denied"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    offload = eo.Offload()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(eo.ConfigError, match=f"path=.*{why}.*trace takes the path of a file"):
        offload.trace(tmp_path / name)
    with pytest.raises(eo.ConfigError, match="path=7 is not accepted"):
        offload.trace(7)  # type: ignore[arg-type]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file"]


def test_a_trace_of_nothing_warns_and_leaves_no_file(path: Path) -> None:
    path.write_text("before")
    with (
        pytest.warns(RuntimeWarning, match="nothing ran inside `with offload.trace.*so no trace is written"),
        eo.Offload().trace(path),
    ):
        torch.ones(3).sum()
    assert path.read_text() == "before"


@pytest.mark.filterwarnings("ignore:eager_offload. nothing of this Offload:RuntimeWarning")
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


@pytest.mark.parametrize(
    ("error", "in_backward"), [(ValueError, False), (KeyboardInterrupt, False), (ValueError, True)]
)
def test_an_exception_inside_ends_the_trace_which_is_shown_as_far_as_it_came(
    error: type[BaseException], in_backward: bool, path: Path, net: Net, offload: eo.Offload
) -> None:
    def fail(_: object) -> None:
        raise error("no")

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not in_backward:
                fail(x)
            x.register_hook(fail)
            return x

    with pytest.raises(error, match="no"), offload.trace(path):
        step(nn.Sequential(Layer(), Fails(), net), offload)
    assert nothing_is_left(offload)
    trace = read_trace(path)
    assert trace.error == f"{error.__name__}: no"
    forward, backward = (
        {one.module for one in trace.slices if one.track == f"compute {way}"} for way in ("forward", "backward")
    )
    assert forward >= {"Sequential", "Sequential.0", "Sequential.1"}
    assert ("Sequential.2.layers.0" in backward) == ("Sequential.2" in forward) == in_backward
    assert "Sequential.0" not in backward
    assert trace.stats["bytes_out"] > 0
    collect()  # the traceback and what it held


def test_a_file_that_cannot_be_written_in_the_end_is_an_error(net: Net, offload: eo.Offload) -> None:
    full = "/dev/full"
    if not os.path.exists(full):
        pytest.skip("this system has no device that is always full")
    with pytest.raises(eo.OffloadError, match=r"could not be written.*No space left"), offload.trace(full):
        step(net, offload)
    assert nothing_is_left(offload)
    with (
        pytest.warns(RuntimeWarning, match="could not be written"),
        pytest.raises(ValueError, match=r"^mine$"),
        offload.trace(full),
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


#: Of these something is called, or nothing has happened yet, or the `with` is not entered yet.
_UNSEEN = {"__enter__", "__exit__", "_take_all_away"}


@pytest.mark.filterwarnings("ignore:eager_offload. nothing of this Offload:RuntimeWarning")
def test_h10_an_interrupt_at_any_line_of_a_trace_is_harmless(path: Path, net: Net, offload: eo.Offload) -> None:
    expected = step(net, nullcontext())

    def traced_step(reached: Callable[[tuple[str, int]], None]) -> None:
        """Calls ``reached`` before each line of what observes, on this thread."""

        def follow(frame: FrameType, event: str, argument: Any) -> Any:
            code = frame.f_code
            if os.path.dirname(code.co_filename) not in observe.__path__ or code.co_name in _UNSEEN:
                return None
            if event == "line":
                reached((code.co_filename, frame.f_lineno))
            return follow

        before = sys.gettrace()
        sys.settrace(follow)
        try:
            with offload.trace(path):
                step(net, offload)
        finally:
            sys.settrace(before)

    lines: dict[tuple[str, int], None] = {}
    traced_step(lambda line: lines.setdefault(line))
    assert len(lines) > 100
    raised, places = set[tuple[str, int]](), one_in(16, list(lines))
    for place in places:

        def interrupt(line: tuple[str, int], place: tuple[str, int] = place) -> None:
            if line == place and place not in raised:
                raised.add(place)
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            traced_step(interrupt)
        assert nothing_is_left(offload), place
        assert all(map(torch.equal, step(net, offload), expected)), place
    assert len(raised) > 0.7 * len(places), "most are reached in every step"
    assert offload.stats(synchronize=True).bytes_out > 0
