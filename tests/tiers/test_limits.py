"""What one process may take of the machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from eager_offload.tiers import limits
from eager_offload.tiers.limits import disk_budget, host_budget, local_ranks


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "16"}, 16),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 8),
        ({"LOCAL_WORLD_SIZE": "", "SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "-3", "SLURM_NTASKS_PER_NODE": "many"}, 1),
    ],
)
def test_h26_the_launcher_says_how_many_processes_share_the_node(environ: dict[str, str], ranks: int) -> None:
    assert local_ranks(environ) == ranks


def test_h26_ranks_on_one_node_divide_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Memory:
        available = 64 << 30

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 400 << 30}))
    for name in limits._LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    assert (host_budget(), disk_budget(tmp_path)) == (32 << 30, 300 << 30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert (host_budget(), disk_budget(tmp_path)) == (4 << 30, 300 << 27)


def test_budgets_of_this_machine_are_less_than_it_has(tmp_path: Path) -> None:
    assert 0 < host_budget() < psutil.virtual_memory().total
    assert 0 < disk_budget(tmp_path) < psutil.disk_usage(str(tmp_path)).total
    with pytest.raises(FileNotFoundError):
        disk_budget(tmp_path / "missing")
