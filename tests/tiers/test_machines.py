"""Groups that tests make: that one is asked for its memory, and hides no failure when it cannot go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.machines import group_in


def test_a_group_without_a_limit_has_its_parent_asked_for_one(tmp_path: Path) -> None:
    control = tmp_path / "cgroup.subtree_control"
    control.touch()
    with pytest.raises(pytest.skip.Exception, match="do not limit memory"), group_in(tmp_path, "memory.max"):
        raise AssertionError("it has no limit")
    assert control.read_text() == "+memory"
    assert list(tmp_path.iterdir()) == [control]


def test_a_group_that_cannot_go_hides_no_failure(tmp_path: Path) -> None:
    def fail() -> None:
        with group_in(tmp_path, ".") as group:
            (group.directory / "held").touch()
            raise ValueError("the test's own")

    with pytest.raises(ValueError, match="the test's own"):
        fail()
