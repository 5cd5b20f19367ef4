"""Where the machine pins less than is asked for, training goes on, and the doctor says how much and what binds."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eager_offload.__main__ import main
from tests.fake_cuda import StandIn, run
from tests.threads import collect

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def limit(cuda: StandIn, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many MiB more may be pinned."""

    def set_limit(mebibytes: int) -> None:
        monkeypatch.setenv("FAKE_CUDA_PINNED_GIB", repr((cuda.pinned_bytes + mebibytes * MIB) / GIB))

    return set_limit


def test_an_error_of_cuda_stays_behind_until_a_kernel_is_launched(limit: Callable[[int], None]) -> None:
    memory = torch.empty(64 * MIB, dtype=torch.uint8)
    limit(63)
    assert int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 2
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.cuda._sleep(0)
    torch.cuda._sleep(0)
    limit(64)
    assert int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def test_a_step_whose_pinning_fails_part_way_goes_on() -> None:
    run(["-m", "tests.fake_cuda.pinning"], FAKE_CUDA_PINNED_GIB=str(40 / 1024))


def test_the_doctor_says_how_much_can_be_pinned_and_what_binds(
    cuda: StandIn,
    limit: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    limit_of, pinned = resource.getrlimit, cuda.pinned_bytes
    limits = {resource.RLIMIT_MEMLOCK: (600 * MIB, 600 * MIB)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which) or limit_of(which))
    limit(600)
    main(["doctor", "--json", "--disk-path", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    assert (found["pinned"]["pinned_bytes"], found["pinned"]["refused"]) == (512 * MIB, True)
    assert found["pinned"]["bound_by"] == "memlock: this process may lock 600.0 MiB of memory (RLIMIT_MEMLOCK)"
    assert "At most 512.0 MiB of host memory can be pinned (memlock" in " ".join(found["verdict"]["advice"])
    collect()
    torch._C._host_emptyCache()
    assert cuda.pinned_bytes < pinned + 256 * MIB, "it is given back"
