"""Whether a model trains to the same bits with offload; two runs without are the control."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import eager_offload as eo
from benchmarks.gpu.results import Job
from benchmarks.gpu.train import LARGE, SMALL, decoder, random_tokens
from benchmarks.models import Run
from benchmarks.peers import checkpointed, plain

#: Everything leaves, in windows that a tensor of this model fills.
OURS = {
    "tier": "host",
    "keep_last_bytes": 0,
    "min_bytes": "256KiB",
    "max_inflight_bytes": "64MiB",
    "prefetch_bytes": "64MiB",
}
#: What is trained: blocks' run, our fields, and what it has to equal.
FORMS: dict[str, tuple[Run, dict[str, Any] | None, str | None]] = {
    "none": (plain, None, None),
    "none again": (plain, None, "none"),
    "ours": (plain, OURS, "none"),
    "ours, no step plans": (plain, {**OURS, "step_tables": False}, "none"),
    "checkpointing": (checkpointed, None, None),
    "ours + checkpointing": (checkpointed, OURS, "checkpointing"),
}


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    parameters: list[Tensor]
    moved_bytes: int


def bits(job: Job) -> None:
    """Trains every form. Raises SystemExit if one differs, moves nothing or does not train."""
    be_deterministic()
    found: dict[str, Trained] = {}
    wrong = []
    for name, (run, fields, base) in FORMS.items():
        try:
            trained = found[name] = _train(job, run, fields)
        except Exception as error:
            job.add(what="bits", name=name, failure=f"{type(error).__name__}: {error}"[:500])
            wrong.append(name)
            continue
        same = None if base is None else _same(trained, found[base])
        job.add(what="bits", name=name, same=same, moved_bytes=trained.moved_bytes, losses=trained.losses)
        if same is False or (fields is not None and not trained.moved_bytes):
            wrong.append(name)
        if base is not None or fields is not None:
            del found[name]  # it takes a gigabyte
    if wrong:
        raise SystemExit(f"other bits, an error, or nothing moved: {', '.join(wrong)}")


def be_deterministic() -> None:
    """Has kernels add in one order. Flash attention does so where nothing else is allowed, and cuDNN's cannot."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_cudnn_sdp(False)


def _train(job: Job, run: Run, fields: dict[str, Any] | None) -> Trained:
    shape = SMALL if job.small else replace(LARGE, layers=4)
    model = decoder(shape, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    offload = eo.Offload(enabled=fields is not None, **(fields or {}))
    tokens = random_tokens(shape, 2, 1024)
    losses = []
    for _ in range(6):  # steps are looked up from the fourth on
        with offload:
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stats = offload.stats(synchronize=True)
    offload.close()
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return Trained(losses, parameters, stats.bytes_out)


def _same(one: Trained, other: Trained) -> bool:
    return one.losses == other.losses and all(map(torch.equal, one.parameters, other.parameters))
