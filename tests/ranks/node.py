"""What the ranks of one node share: its memory, its disks, a directory for spill files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import eager_offload as eo
from eager_offload.tiers.limits import ranks_here
from tests.ranks.launch import Ranks
from tests.ranks.training import batch, blocks


def trained(ranks: Ranks, offload: eo.Offload) -> eo.Offload:
    """A step, all of whose activations had left before its backward."""
    model = blocks()
    with offload:
        loss = model(batch(ranks, 0).requires_grad_()).square().mean()
    offload.stats(synchronize=True)
    loss.backward()
    assert offload.stats(synchronize=True).bytes_out > 0
    return offload


def one_spill_file_a_rank(ranks: Ranks) -> None:
    assert ranks_here().number == ranks.size
    directory = ranks.directory / "spill"
    directory.mkdir(exist_ok=True)
    before = set(open_files(directory))
    assert not before
    offload = eo.Offload(tier="disk", disk_path=directory, min_bytes=0, keep_last_bytes=0)
    trained(ranks, offload)
    trained(ranks, offload)
    own = set(open_files(directory))
    assert len(own) == 1
    assert list(directory.iterdir()) == []
    of_all = [number for each in ranks.gathered(sorted(own)) for number in each]  # type: ignore[attr-defined]
    assert len(set(of_all)) == ranks.size
    offload.close()
    assert set(open_files(directory)) == set()


def open_files(directory: Path) -> Iterator[int]:
    """The numbers of the files below ``directory`` that this process has open; none of them has a name."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target, number = os.readlink(entry), entry.stat().st_ino
        except FileNotFoundError:  # the one that lists them
            continue
        if target.startswith(f"{directory}/"):
            assert target.endswith(" (deleted)"), target
            yield number


SCENARIOS: dict[str, Callable[[Ranks], None]] = {
    "one_spill_file_a_rank": one_spill_file_a_rank,
}
