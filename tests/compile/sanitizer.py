"""Reports compiled code that writes over what it has started to offload, whether or not a copy lost a race to it.

A graph may write over the source of an offload, or hand its memory on, once it has waited for it and not before.
Whether that does harm depends on how fast the copy was; so here the bytes themselves are compared, as they are when the
offload starts and when its wait comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from eager_offload.compile import ops
from eager_offload.compile.ops import HostBytes, bytes_of, flat_bytes, resolved
from eager_offload.engine.offloader import DeviceOffloader

CHANGED = "a source was written over before the wait of its offload"
#: Bytes; tests of short memory have larger ones, and no room for another copy.
LARGEST = 1 << 26
OTHER = "a wait keeps other memory alive than its offload reads"


class _Source(NamedTuple):
    """What an offload reads. Holds no end of the transfer: tests look at when those go."""

    address: int
    bytes: Tensor
    """As they were when it started."""


@contextmanager
def sanitized() -> Iterator[list[str]]:
    """Watches every transfer that this process's compiled code starts; gives what it finds, in the order found."""
    found: list[str] = []
    sources: dict[int, _Source] = {}  # by the identity of what the host tensor stands for
    offload, finish = ops.move_out, ops._wait_for_offload

    def watched_offload(offloader: DeviceOffloader, source: Tensor, *, wait: bool, region: str | None) -> Tensor:
        watched = not wait and source.device.type == "cpu" and source.nbytes <= LARGEST
        before = flat_bytes(resolved(source)).clone() if watched else None
        host = offload(offloader, source, wait=wait, region=region)
        stands_for = bytes_of(host)
        if before is not None and stands_for is not None and stands_for.slot is not None:
            sources[id(stands_for)] = _Source(source.data_ptr(), before)
        return host

    def watched_wait(stands_for: HostBytes, keepalive: Tensor | None) -> None:
        source = sources.pop(id(stands_for), None)
        if source is not None and keepalive is not None and keepalive is resolved(keepalive):
            if keepalive.data_ptr() != source.address:
                found.append(OTHER)
            elif not torch.equal(flat_bytes(keepalive), source.bytes):
                found.append(CHANGED)
        finish(stands_for, keepalive)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "move_out", watched_offload)
        patch.setattr(ops, "_wait_for_offload", watched_wait)
        yield found
