"""``eo.longest`` and ``plan --longest``: the longest sequence that fits, in each way."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import eager_offload as eo
from eager_offload.__main__ import main
from tests.planning.models_of_a_user import blocks_of

MIB = 1 << 20
BUDGET = 512 * MIB
MINE = "tests.planning.models_of_a_user:blocks_of"


def peak(way: str, length: int) -> int:
    """Returns what a plan of that length says of a way."""
    model, x = blocks_of(length)
    match way:
        case "none":
            return eo.plan(model, x, device="h100", device_budget="1TiB").peak_bytes
        case "checkpointing":
            again = eo.plan(model, x, device="h100", device_budget="1TiB", recompute=True).checkpointing
            assert again is not None
            return again.peak_bytes
        case "offload":
            return eo.plan(model, x, device="h100", policy="max").peak_bytes
    return eo.plan(model, x, device="h100", device_budget=BUDGET, recompute=True).peak_bytes


def test_each_way_fits_with_that_length_and_not_with_the_next_multiple() -> None:
    tried: list[tuple[str, int]] = []
    found = eo.longest(
        blocks_of, BUDGET, device="h100", at_least=2000, multiple_of=1024, progress=lambda *one: tried.append(one)
    )
    assert [row.way for row in found.rows] == ["none", "checkpointing", "offload", "plan"]
    none, again, moves, plan = (row.length for row in found.rows)
    assert 2048 < none < min(again, moves)
    assert plan >= max(again, moves)
    for row in found.rows:
        assert row.length % 1024 == 0
        assert row.peak_bytes == peak(row.way, row.length) <= BUDGET < peak(row.way, row.length + 1024)
        assert row.step_seconds > 0
    lengths = [length for _, length in tried]
    assert len(lengths) <= len({*lengths}) + 3 <= 16, "each is traced once, and those of the plan again for its step"
    text = str(found)
    assert "512.0 MiB on h100" in text
    assert all(f"{row.length:,}" in text for row in found.rows)


def test_where_not_even_the_shortest_fits_the_length_is_0() -> None:
    found = eo.longest(blocks_of, "8MiB", device="h100", at_least=1000, multiple_of=256)
    assert {row.length for row in found.rows} == {0}
    assert all(row.peak_bytes > 8 * MIB for row in found.rows)
    assert str(found).count("  less than 1,024  ") == 4


def linear(length: int) -> tuple[nn.Module, Any, Any]:
    with torch.device("meta"):
        return nn.Linear(64, 64), torch.empty(length, 64), lambda out: out.exp().sum()


def test_without_blocks_that_repeat_checkpointing_is_no_way() -> None:
    found = eo.longest(linear, "8MiB", device="h100", optimizer=None)
    assert [row.way for row in found.rows] == ["none", "offload", "plan"]
    assert found.rows[0].length > 1024


def test_where_all_lengths_fit_the_longest_that_is_tried_is_a_lower_bound() -> None:
    found = eo.longest(linear, "1TiB", device="h100", optimizer=None, at_least=500, at_most=6500, multiple_of=1000)
    assert {row.length for row in found.rows} == {found.at_most} == {6000}
    assert str(found).count("6,000 or more") == 3


def test_checkpointing_is_a_way_where_only_longer_sequences_save_what_is_worth_it() -> None:
    found = eo.longest(blocks_of, "1TiB", device="h100", at_least=128, at_most=2048)
    assert [row.way for row in found.rows] == ["none", "checkpointing", "offload", "plan"]
    assert found.rows[1].peak_bytes < found.rows[0].peak_bytes


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"at_least": 0}, "at_least=0 is not accepted"),
        ({"multiple_of": 1.5}, "multiple_of=1.5 is not accepted"),
        ({"at_most": 1000}, "at_most=1000 is not accepted: no multiple of 128 is from 1024 to 1000"),
        ({"make": lambda: None}, r"<lambda> is not accepted: it is to be called with a length alone \(too many"),
        ({"device_budget": "75"}, r"give it a unit, such as device_budget=\"75GiB\"$"),
        ({"device_budget": "much"}, "device_budget='much' is not accepted"),
        ({"make": lambda length: length}, r"it must return \(model, inputs\) or .* and returned int"),
    ],
    ids=["at_least", "multiple_of", "at_most", "no length", "no unit", "no size", "no pair"],
)
def test_what_is_not_accepted(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(eo.ConfigError, match=said):
        eo.longest(**{"make": blocks_of, "device_budget": BUDGET, "device": "h100", **fields})


def test_an_error_of_the_users_own_names_the_length() -> None:
    def make(length: int) -> tuple[nn.Module, Any]:
        if length > 1024:
            raise IndexError("positions")
        return blocks_of(length)

    with pytest.raises(IndexError, match="positions") as raised:
        eo.longest(make, BUDGET, device="h100")
    assert raised.value.__notes__ == ["eager_offload.longest met this error with a length of 4096"]


def test_the_command_prints_the_table_and_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device", "h100", "--optimizer", "sgd", "--longest", "96MiB", "--at-most", "2048")
    assert main(["plan", MINE, *options, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert (found["device_budget"], found["machine"]["name"], found["at_least"]) == (96 * MIB, "h100", 1024)
    assert [row["way"] for row in found["rows"]] == ["none", "checkpointing", "offload", "plan"]
    assert all(row["length"] % 128 == 0 < row["length"] and row["peak_bytes"] <= 96 * MIB for row in found["rows"])
    assert main(["plan", MINE, "--device", "h100", "--longest", "8MiB"]) == 1
    out, err = capsys.readouterr()
    assert err.splitlines() == ["none: a sequence of 1,024 ..."]
    assert "less than 1,024" in out
    for options, said in (
        (("--longest", "much"), "device_budget='much' is not accepted"),
        (("--longest", "1GiB", "--at-most", "100"), "at_most=100 is not accepted"),
        (("--longest", "1GiB", "--recompute"), "--recompute does not go with --longest"),
        (("--longest", "1GiB", "--mesh", "2x8"), "--mesh '2x8' is not accepted"),
    ):
        assert main(["plan", MINE, "--device", "h100", *options]) == 2
        assert said in capsys.readouterr().err
    assert main(["plan", "tests.planning.models_of_a_user:two_blocks", "--longest", "1GiB", "--device", "h100"]) == 2
    assert "two_blocks is not accepted: it is to be called with a length alone" in capsys.readouterr().err
