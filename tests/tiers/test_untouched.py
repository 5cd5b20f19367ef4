"""H49: what was never touched does not travel, and takes no memory when it comes back."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from eager_offload.tiers import memory
from eager_offload.tiers.memory import PAGE, Span, touched_spans
from tests.tiers.files import Cached, Watched
from tests.tiers.rig import MIB, content, noise, open_tier, reserve, stored

#: Of 24 MiB, in MiB from the beginning: what is touched.
TOUCHED: dict[str, list[tuple[float, float]]] = {
    "the beginning": [(0, 5.3)],
    "the middle": [(7.1, 9.9)],
    "the end": [(20.2, 24)],
    "two parts": [(2, 6.5), (14.7, 18)],
    "one page": [(11, 11.001)],
    "nothing": [],
}
SIZE = 24 * MIB


def pages(nbytes: int) -> Tensor:
    """Fresh pages, small ones: a huge one is there as a whole."""
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def partly_touched(parts: list[tuple[float, float]], phase: int = 0) -> Tensor:
    source = pages(SIZE + PAGE)[phase : phase + SIZE]
    for seed, (start, stop) in enumerate(parts):
        part = source[int(start * MIB) : int(stop * MIB)]
        part.copy_(noise(part.numel(), seed))
    return source


def resident() -> int:
    """Bytes of the process; the page of zeros that stands for all that were only read does not count."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.sampled(5, quick=True)
@pytest.mark.parametrize("file_type", [Watched, Cached])
@pytest.mark.parametrize("phase", [0, 64])
@pytest.mark.parametrize("parts", TOUCHED.values(), ids=TOUCHED.keys())
def test_h49_only_what_was_touched_travels(
    directory: Path, parts: list[tuple[float, float]], phase: int, file_type: type[Watched]
) -> None:
    tier, file = open_tier(directory, file_type)
    stored(tier, noise(SIZE, 9))  # what the file has there already
    source, before = partly_touched(parts, phase), file.written
    slot = stored(tier, source)
    touched = int(sum(stop - start for start, stop in parts) * MIB)
    assert touched <= slot.record.carried <= touched + MIB
    assert file.written - before <= slot.record.carried + PAGE
    target, before, base = pages(SIZE), file.read, resident()
    slot.read(target)
    assert resident() - base <= touched + 6 * MIB
    assert file.read - before <= slot.record.carried + PAGE
    dirty = noise(SIZE, 7)  # memory that is used again
    slot.read(dirty)
    assert torch.equal(target, source)
    assert torch.equal(dirty, source)


@pytest.mark.parametrize("answer", [0, -1], ids=["swapped out, or of a file", "the system does not tell"])
@pytest.mark.parametrize("parts", [TOUCHED["two parts"], [(0, 24)]], ids=["in part", "whole"])
def test_h49_what_is_not_there_and_not_zero_travels(
    directory: Path, monkeypatch: pytest.MonkeyPatch, answer: int, parts: list[tuple[float, float]]
) -> None:
    (tier, file), source = open_tier(directory), partly_touched(parts)
    system = SimpleNamespace(mincore=lambda *arguments: answer, memcmp=memory._system_calls().memcmp)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_system_calls", lambda: system)  # which says of no page that it is there
        assert touched_spans(source.data_ptr(), SIZE) == [Span(0, SIZE)]
        slot = stored(tier, source)
    assert torch.equal(content(slot), source)
    assert file.written >= SIZE


def test_h49_what_is_mapped_travels_whole(directory: Path) -> None:
    """A compiled graph's host tensor shows the file."""
    tier, _ = open_tier(directory)
    stored(tier, noise(SIZE, 9))
    slot, source = reserve(tier, SIZE), partly_touched(TOUCHED["the middle"])
    shown = torch.frombuffer(slot.memory(), dtype=torch.uint8)
    slot.write(source)
    assert slot.record.carried == SIZE
    assert torch.equal(shown, source)
    assert torch.equal(content(slot), source)
