"""Plans beside what a card took: the rows of an H100 in ``benchmarks/results/gpu``.

Compute of the table's "h100" is scaled by the rows without offload, those of none and of checkpointing, and the link is
the one that was measured. All other rows of the same model are held to what is planned with the windows of their runs.
Left out are budgets, ``free`` and a slowdown, whose share their own steps decided, ways that are not this library's,
and the two runs that were traced ("before").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

import eager_offload as eo
from benchmarks.common import GIB
from benchmarks.gpu.train import LARGE
from benchmarks.models import Llama, Run
from benchmarks.peers import checkpointed, plain, selectively_checkpointed
from tests.processes import ROOT

ROWS = ROOT / "benchmarks" / "results" / "gpu"
RUNS = {"checkpointing": checkpointed, "ours + checkpointing": checkpointed}
RUNS |= {"none": plain, "selective checkpointing": selectively_checkpointed}
RUNS |= dict.fromkeys(("ours", "ours, windows 256 MiB", "ours, windows 5 GiB"), plain)
SCALED_BY = ("none", "checkpointing")
LEFT_OUT = {
    "ours, budget 20 GiB",
    "ours, budget 30 GiB",
    "ours, budget 45 GiB",
    "ours, free",
    "ours, a slowdown of 0.2",
}
#: Ways of others, and of compiled code.
NOT_OURS = {"save_on_cpu", "checkpoints by save_on_cpu", "HF, checkpointing", "HF, offload=True", "TRL"}
COMPILED = {"compiled", "compiled, ours"}
PEAK, STEP = 0.03, 0.07


def rows(run: int) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, (ROWS / f"h100_run{run}.jsonl").read_text().splitlines())


def link(run: int) -> tuple[float, float]:
    (found,) = (row["alone"] for row in rows(run) if row["what"] == "link")
    return found["out"] * 1e9, found["in"] * 1e9


def planned(run: Run, machine: eo.Machine, row: Mapping[str, Any]) -> eo.Plan:
    stats = row.get("stats", {})
    windows = {name: stats[name] for name in ("max_inflight_bytes", "prefetch_bytes") if name in stats}
    with torch.device("meta"):
        model = Llama(LARGE, run).to(torch.bfloat16).train()
    tokens = torch.randint(LARGE.vocabulary, (1, row["length"] + 1))
    policy, optimizer = "max" if stats else "least", partial(torch.optim.AdamW, fused=True)
    return eo.plan(
        model, tokens, device=machine, device_budget="500GiB", policy=policy, config=windows, optimizer=optimizer
    )


# The third and the fourth run had the link of the first, and the sixth that of the fifth.
@pytest.mark.parametrize(
    ("runs", "measured", "count"), [((3, 4), 1, 5), pytest.param((5, 6), 5, 3, marks=pytest.mark.long)]
)
def test_a_plan_is_what_an_h100_took(runs: tuple[int, ...], measured: int, count: int) -> None:
    trained = [row for run in runs for row in rows(run) if row["what"] == "train" and not row["failure"]]
    assert {row["stage"] for row in trained} <= {*RUNS} | LEFT_OUT | NOT_OURS | COMPILED
    found = [(row, median(row["steps"]["step"])) for row in trained if row["stage"] in RUNS]
    out, back = link(measured)
    table = eo.plan(nn.Linear(1, 1), torch.ones(1, 1), device="h100").machine
    machine = replace(table, out=out, back=back)
    scales = [
        step / planned(RUNS[row["stage"]], machine, row).step_seconds
        for row, step in found
        if row["stage"] in SCALED_BY
    ]
    scale = prod(scales) ** (1 / len(scales))
    rates = {name: getattr(machine, name) / scale for name in ("flops", "single_flops", "memory")}
    others = [(row, step) for row, step in found if row["stage"] not in SCALED_BY]
    assert (len(scales), len(others)) == (len(SCALED_BY), count)
    for row, step in others:
        plan = planned(RUNS[row["stage"]], replace(machine, **rates), row)
        off = plan.peak_bytes / GIB / row["peak_gib"] - 1, plan.step_seconds / step - 1
        assert abs(off[0]) <= PEAK, (row["stage"], off)
        assert abs(off[1]) <= STEP, (row["stage"], off)
