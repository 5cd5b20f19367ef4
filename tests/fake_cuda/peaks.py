"""Peaks of device memory at full size, model by model and way by way, as torch's own allocator counts them.

    .venv-cuda/bin/python -m tests.fake_cuda -m tests.fake_cuda.peaks              beside those that are recorded
    .venv-cuda/bin/python -m tests.fake_cuda -m tests.fake_cuda.peaks --record     records them anew, in peaks.json

No bytes move and nothing takes time: the device has always done what it was given. So a peak is a function of the
program and the library alone, the same to the byte in each run without offload, and with it up to a source or two that
go as soon as the host has seen that their copies are over.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch

import eager_offload as eo
from benchmarks.peers import checkpointed, plain, saved_on_cpu, selectively_checkpointed
from tests.fake_cuda import run
from tests.fake_cuda.models import MODELS

TABLE = Path(__file__).with_name("peaks.json")
#: Of which the first is one in which nothing is known yet.
STEPS = 4
WAYS = ("none", "save_on_cpu", "ours")
GIB = 1 << 30

#: Bytes by the name of a way: the peak of the first step, and that of all steps behind it.
Peaks: TypeAlias = dict[str, list[int]]


def measured(name: str) -> Peaks:
    """Returns the peaks of a model, from a process of its own."""
    found: Peaks = json.loads(run(["-m", "tests.fake_cuda.peaks", "--measure", name], big=True).stdout.splitlines()[-1])
    return found


def recorded() -> dict[str, Peaks]:
    found: dict[str, Peaks] = json.loads(TABLE.read_text())
    return found


def compared(expected: Peaks, found: Peaks) -> Iterator[str]:
    """A line for each way, in GiB, beside what is expected of it."""
    for way, peaks in found.items():
        shown = ", ".join(f"{nbytes / GIB:.3f}" for nbytes in peaks)
        was = ", ".join(f"{nbytes / GIB:.3f}" for nbytes in expected.get(way, []))
        yield f"  {way:26} {shown:18}" + ("" if peaks == expected.get(way) else f" recorded: {was or 'nothing'}")


# -- in a process of its own ------------------------------------------------------------------------------------------


def peaks_of(name: str) -> Peaks:
    return {way: _peaks_of_way(name, way) for way in (*WAYS, *MODELS[name].ways)}


def _peaks_of_way(name: str, way: str) -> list[int]:
    model = MODELS[name]
    runs, around, close = _way(way)
    with torch.device("cuda"):
        module = model.make(runs)
    batch = [part.cuda() for part in model.batch()]
    optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], fused=True)
    peaks = []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        with around(), torch.autocast("cuda", torch.bfloat16, enabled=model.is_mixed):
            loss = module(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        peaks.append(torch.cuda.max_memory_allocated())
    close()
    del module, batch, optimizer
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return [peaks[0], max(peaks[1:])]


def _way(way: str) -> tuple[Any, Callable[[], AbstractContextManager[Any]], Callable[[], None]]:
    """Returns what calls each block, what stands around forward, and what ends it."""
    name, _, setting = way.partition(", ")
    calls = {"selective checkpointing": selectively_checkpointed, "checkpointing": checkpointed}
    call = calls.get(name.removeprefix("ours + "), plain)
    if not name.startswith("ours"):
        return call, saved_on_cpu if name == "save_on_cpu" else nullcontext, lambda: None
    # What a machine has of memory says nothing here: no page is touched.
    fields = {"host_budget": "200GiB"}
    if setting.startswith("windows "):
        fields |= dict.fromkeys(("max_inflight_bytes", "prefetch_bytes"), setting.removeprefix("windows "))
    elif setting:
        fields["device_budget"] = setting
    offload = eo.Offload(**fields)
    return call, lambda: offload, offload.close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("models", nargs="*", help="names of models; all of them, if none is given")
    options = parser.parse_args()
    if options.measure:
        torch.backends.cudnn.enabled = False
        print(json.dumps(peaks_of(options.measure)))
        return
    table = recorded() if TABLE.exists() else {}
    for name in options.models or MODELS:
        found = measured(name)
        print(name, *compared(table.get(name, {}), found), sep="\n", flush=True)
        table[name] = found
    if options.record:
        TABLE.write_text(json.dumps({name: table[name] for name in MODELS if name in table}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
