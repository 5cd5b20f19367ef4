"""Random training runs have the same losses, gradients and parameters with and without offload, bit for bit.

A fixed set of runs in every test run, and in the long suite fresh ones for a number of seconds. Each run is drawn from
one number, which a failure names: put it into ``FIXED`` to have it tried always.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hazards.backends import Backend, DiskBackend, assert_balanced
from tests.proof.bits import same_bits
from tests.proof.training_programs import Around, Trace, train, train_compiled, train_in_threads
from tests.sampling import run_seed

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
#: Runs that failed once.
FIXED: dict[str, list[int]] = {"eager": [99295102883], "threads": [], "aot_eager": [18, 500000023]}
KINDS: dict[str, Callable[[int, Around, torch.device], Trace]] = {
    "eager": train,
    "threads": train_in_threads,
    "aot_eager": train_compiled,
}
#: Seconds of fresh runs of all kinds together, in the long suite.
SECONDS = float(os.environ.get("FUZZ_SECONDS", "20"))
#: Runs, however long they take: of fewer it may be that none brings anything back.
_LEAST = 8


def fields_of(number: int) -> dict[str, Any]:
    """The settings of a run's ``Offload``."""
    draw = random.Random(-number - 1)
    return {
        "min_bytes": draw.choice([0, 0, 256]),
        "keep_last_bytes": draw.choice([0, 0, 4096]),
        "max_inflight_bytes": draw.choice([1, 8192, 1 << 20]),
        "prefetch_bytes": draw.choice([0, 8192, 1 << 20]),
        "verify": draw.random() < 0.2,
        "tier": draw.choice(["disk", "disk", "host"]),
        "disk_budget": draw.choice(["auto", "auto", "auto", 65536]),
    }


def first_difference(got: Trace, expected: Trace) -> str | None:
    """Where two traces differ, in words."""
    for place, (ours, theirs) in enumerate(zip_longest(got, expected)):
        if isinstance(ours, str) or isinstance(theirs, str):
            same = isinstance(ours, str) and ours == theirs
        else:
            same = same_bits(ours, theirs)
        if not same:
            return f"entry {place} of {len(got)} and {len(expected)}: {_short(ours)} in place of {_short(theirs)}"
    return None


def _short(entry: Tensor | str | None) -> str:
    return f"a {entry.dtype} tensor {tuple(entry.shape)}" if isinstance(entry, Tensor) else repr(entry)


def check(kind: str, number: int, seen: Counter[str], backend: Backend, device: torch.device) -> None:
    """Trains with and without offload and compares everything that both computed."""
    run = KINDS[kind]
    with torch.random.fork_rng(devices=[]), backend:
        torch._dynamo.reset()
        expected = run(number, nullcontext, device)
        torch._dynamo.reset()
        offload = backend.offload(**fields_of(number))
        got = run(number, lambda: offload, device)
        difference = first_difference(got, expected)
        assert difference is None, f"{kind} run {number} with {fields_of(number)}: {difference}"
        del got
        torch._dynamo.reset()
        if not any(isinstance(entry, str) for entry in expected):
            backend.assert_nothing_is_held()  # torch itself keeps graphs whose backward has raised
        stats = offload.stats(synchronize=True)
        assert_balanced(stats)
    seen["runs"] += 1
    seen["bytes out"] += stats.bytes_out
    seen["bytes in"] += stats.bytes_in
    seen["errors"] += sum(isinstance(entry, str) for entry in expected)


def check_all(
    kind: str, numbers: Iterable[int], make: Callable[[], Backend] = DiskBackend, device: torch.device = CPU
) -> None:
    seen: Counter[str] = Counter()
    for number in numbers:
        check(kind, number, seen, make(), device)
    print(f"{kind}: {dict(seen)}")
    assert seen["bytes out"] > 0
    assert seen["bytes in"] > 0


def fresh(seconds: float) -> Iterator[int]:
    """Numbers of runs that follow from the seed of this test run, for so many seconds, but a few at least."""
    first, end = random.Random(run_seed()).randrange(1 << 40), time.monotonic() + seconds
    print(f"runs from number {first} on")
    for number in itertools.count(first):
        if number - first >= _LEAST and time.monotonic() >= end:
            return
        yield number


@pytest.mark.parametrize(
    ("kind", "runs"), [("eager", 40), ("threads", 6), pytest.param("aot_eager", 6, marks=pytest.mark.long)]
)
def test_random_training_runs_are_exact(kind: str, runs: int) -> None:
    check_all(kind, [*FIXED[kind], *range(runs)])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "part"), [("eager", 0.5), ("threads", 0.2), ("aot_eager", 0.3)])
def test_fresh_random_training_runs_are_exact(kind: str, part: float) -> None:
    check_all(kind, fresh(SECONDS * part))
