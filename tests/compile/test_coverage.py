"""How much of what graphs save can move, on models small enough for a test."""

from __future__ import annotations

import pytest

from benchmarks.compiled_coverage import LEAST_COVERAGE, MODELS, MOST_MOVED, PARTITIONERS, measure, options_of

SMALL = ["--layers", "2", "--width", "64", "--heads", "4", "--batch", "2", "--sequence", "64", "--min-bytes", "4KiB"]


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("model", MODELS)
def test_nearly_all_that_nothing_else_holds_is_freed(model: str, partitioner: str) -> None:
    found = measure(model, partitioner, options_of(SMALL))
    assert found.freed >= LEAST_COVERAGE
    assert found.moved_bytes <= MOST_MOVED * found.freed_bytes
    assert found.total_bytes > 900_000
    assert "layout" not in found.kept_bytes
    if found.torch_freed_bytes is not None:
        assert found.torch_freed_bytes < 0.7 * found.freed_bytes
