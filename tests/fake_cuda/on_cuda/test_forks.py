"""A forked child has none of the memory that the driver has pinned where it lies."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from eager_offload import Offload

MIB = 1 << 20


def left_out_of_forks() -> int:
    """Bytes that this process has, and a child of it will not."""
    found, size = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "Rss":
            size = int(rest.split()[0]) << 10
        elif name == "VmFlags" and "dc" in rest.split():  # "do not copy area on fork"
            found += size
    return found


def test_h64_a_child_has_no_page_of_what_is_pinned_and_goes_backward_through_none() -> None:
    before = left_out_of_forks()
    with Offload(min_bytes=0, keep_last_bytes=0, tier="host") as offload:
        x = torch.ones(32 * MIB // 4, device="cuda", requires_grad=True)
        loss = x.exp().exp().sum()
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out >= 64 * MIB
    assert left_out_of_forks() - before >= stats.host_bytes_peak >= 64 * MIB
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert left_out_of_forks() == 0
            loss.backward()
        except RuntimeError:  # of the library, or of torch: CUDA cannot be used in a forked process
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loss.backward()
    assert offload.stats(synchronize=True).reloaded_bytes >= 32 * MIB
    offload.close()
