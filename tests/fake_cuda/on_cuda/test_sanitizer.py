"""Torch's CUDA sanitizer sees every copy of the library, finds no race, and does find each wait that is left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import printed_by

MODULE = "tests.fake_cuda.on_cuda.sanitized"


def run(*arguments: str, **knobs: str) -> dict[str, Any]:
    printed = printed_by("-m", MODULE, *arguments, TORCH_CUDA_SANITIZER="1", **knobs)
    return dict(json.loads(printed.splitlines()[-1]))


CLEAN = ("train", "beside another mode", "on side streams", "retained")


@pytest.mark.parametrize("program", CLEAN)
def test_h44_it_sees_every_copy_and_finds_no_race(program: str) -> None:
    found = run(program)
    assert found["races"] == []
    assert found["seen"] == found["moved"]
    assert min(found["moved"]) > 8 << 20


def test_it_sees_what_goes_to_disk_and_finds_no_race() -> None:
    """It is not shown the copies of threads, since it mixes up what threads do at once.

    A thread copies all that comes back, and what leaves while memory for it is pinned.
    """
    found = run("disk")
    assert found["races"] == []
    (seen, back), moved = found["seen"], found["moved"]
    assert back == 0
    assert moved[0] / 2 < seen <= moved[0]
    assert min(moved) > 8 << 20


def test_it_sees_what_is_captured_and_finds_no_race() -> None:
    found = run("captured")
    assert found["races"] == []
    out, back = zip(found["seen"], found["moved"], strict=True)
    assert out[0] > out[1], "a captured copy counts as none that has moved bytes"
    assert back[0] > back[1]
    assert min(found["moved"]) > 8 << 20


@pytest.mark.parametrize(
    ("wait", "first", "second"),
    [
        ("a copy out for compute", "gelu", "copy_"),
        ("compute for a reload", "copy_", None),
        ("a copy back for the last owner of its target", "empty", "copy_"),
        ("the release of a source for its copy", "copy_", "free"),
    ],
)
def test_it_finds_each_wait_that_is_left_out(wait: str, first: str, second: str | None) -> None:
    """``second``: ``None`` for any kernel of backward. The link is slow, so that there is something to wait for."""
    races = run("train", wait, FAKE_CUDA_GBPS="0.5")["races"]
    assert any(race[0] == first and second in (None, race[1]) for race in races), races
