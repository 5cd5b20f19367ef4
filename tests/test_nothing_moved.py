"""A run of which nothing moved says so once, at the user's line, with the reason and what to change."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import eager_offload as eo
from eager_offload.stats import KeepReason, OffloadStats
from eager_offload.step_memory import why

MOVED_NOTHING = "eager_offload: nothing moved, because "


def forward(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).exp().sum()


def warned(offload: eo.Offload, steps: int, size: int = 1024) -> list[warnings.WarningMessage]:
    x = torch.ones(size, requires_grad=True)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(steps):
            with offload:
                loss = forward(x)
            loss.backward()
    return [one for one in caught if str(one.message).startswith(MOVED_NOTHING)]


def test_a_plain_loop_is_warned_once_at_its_own_line_after_its_third_forward() -> None:
    offload = eo.Offload()
    assert warned(offload, 2) == []
    (warning,) = warned(offload, 3)
    assert "min_bytes, which is 1.0 MiB. None of the settings that were tried lowers that" in str(warning.message)
    assert linecache.getline(__file__, warning.lineno).strip() == "with offload:"
    assert warning.filename == __file__
    assert issubclass(warning.category, RuntimeWarning)
    with warnings.catch_warnings(action="error"):
        offload.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "are the newest ones, which stay"),
        ({"device_budget": "1TiB"}, r"that a step saves fit into device_budget beside all else\."),
        ({"policy": "free"}, 'as long as policy="free" has not found that they move in time'),
    ],
)
def test_a_shorter_run_is_warned_when_it_is_closed(fields: dict[str, Any], said: str) -> None:
    offload = eo.Offload(min_bytes=0, **fields)
    assert warned(offload, 1) == []
    with pytest.warns(RuntimeWarning, match=said):
        offload.close()


def test_a_run_that_moves_bytes_or_is_cut_short_is_not_warned_of(tmp_path: Path) -> None:
    offload = eo.Offload(min_bytes=0, tier="disk", disk_path=tmp_path, keep_last_bytes=0)
    assert warned(offload, 4, 1 << 16) == []
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.reset_stats()
    short = eo.Offload()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), short:
            raise ZeroDivisionError(forward(torch.ones(8, requires_grad=True)))
    with warnings.catch_warnings(action="error"):
        offload.close()
        short.close()


@pytest.mark.parametrize(
    ("counted", "sentence"),
    [
        *(
            ({"saved_tensors": 1, "kept_bytes": {reason: 3 << 20}}, "of the 3.0 MiB that a step")
            for reason in KeepReason
        ),
        ({"saved_tensors": 9, "kept_bytes": {"parameter": 9 << 20, "small": 7}}, "smaller than min_bytes"),
        ({"saved_tensors": 9, "kept_bytes": {"alive": 8 << 20, "small": 7}}, "8.0 MiB are of tensors that something"),
        ({"saved_tensors": 2}, "the 2 tensors that were saved have no bytes"),
        ({}, "put `with offload:` around the forward"),
        ({"empty_forwards": 1}, "other saved-tensor hooks"),
        ({"foreign_hooks": 1, "saved_tensors": 1}, "other saved-tensor hooks"),
    ],
)
def test_every_reason_has_a_sentence_and_the_one_with_most_bytes_is_named(
    counted: dict[str, Any], sentence: str
) -> None:
    said = why(OffloadStats(**counted), eo.OffloadConfig())
    assert sentence in said
    assert "{" not in said


def test_a_warning_of_no_room_names_the_line_of_the_user_too(tmp_path: Path) -> None:
    offload = eo.Offload(min_bytes=0, keep_last_bytes=0, tier="disk", disk_path=tmp_path, disk_budget=1)
    x = torch.ones(1 << 16, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="no room for") as caught, offload:
        loss = forward(x)
    (warning,) = caught
    assert warning.filename == __file__
    loss.backward()
    offload.close()


# -- contexts that can do nothing where they stand --------------------------------------------------------------------


def told(steps: Callable[[], object]) -> list[str]:
    """The warnings of ``steps``, each of which is at a line of this file."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        steps()
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def test_an_outer_offload_says_once_that_the_inner_one_took_what_was_saved() -> None:
    outer, inner = eo.Offload(), eo.Offload(min_bytes=0, tier="disk", keep_last_bytes=0)
    x = torch.ones(1 << 16, requires_grad=True)

    def steps() -> None:
        for _ in range(4):
            with outer, inner:
                loss = forward(x)
            loss.backward()

    (said,) = told(steps)
    assert "another Offload, entered inside this context, took all that was saved here" in said
    assert inner.stats(synchronize=True).bytes_out > 0
    assert outer.stats().saved_tensors == 0
    assert told(inner.close) == told(outer.close) == []


def around_backward(offload: eo.Offload) -> None:
    loss = forward(torch.ones(8, requires_grad=True))
    with offload:
        loss.backward()


def without_a_gradient(offload: eo.Offload) -> None:
    with offload:
        forward(torch.ones(8))


def validating(offload: eo.Offload) -> None:
    with torch.no_grad(), offload:
        forward(torch.ones(8, requires_grad=True))


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (around_backward, ["this context is around backward alone"]),
        (without_a_gradient, ["no saved tensor was seen in 3 contexts"]),
        (validating, []),
    ],
)
def test_contexts_that_can_see_no_save_say_so_once(step: Callable[[eo.Offload], None], said: list[str]) -> None:
    offload = eo.Offload(min_bytes=0)
    found = told(lambda: [step(offload) for _ in range(6)])
    assert len(found) == len(said)
    assert all(sentence in one for sentence, one in zip(said, found, strict=True))
