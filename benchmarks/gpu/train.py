"""Memory and time of training a Llama one way: every number that a comparison of ways needs."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import eager_offload as eo
from benchmarks.common import GIB
from benchmarks.gpu.results import Job, NotHereError
from benchmarks.models import Llama, Run, Shape
from benchmarks.peers import plain

#: About 1.04 billion parameters; and what shows that everything runs, with windows that its tensors fill.
LARGE = Shape(shared_heads=8)
SMALL = Shape(layers=3, width=256, hidden=768, heads=4, shared_heads=2, vocabulary=512)
SMALL_WINDOWS = {"min_bytes": "64KiB", "max_inflight_bytes": "1MiB", "prefetch_bytes": "1MiB"}


@dataclass(frozen=True)
class Way:
    """What is trained, and how."""

    run: Run = plain
    #: Fields of our ``Offload``; ``None`` without it.
    offload: Mapping[str, Any] | None = None
    #: The budget of a plan with recompute, which is applied; in place of ``offload``.
    plan: str | None = None
    #: Entered around forward in its place.
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    #: Options of ``torch.compile``, or ``None``.
    compiled: Mapping[str, Any] | None = None
    #: Makes the model.
    build: Callable[[Shape, Run], nn.Module] = Llama
    shape: Shape = LARGE
    tokens: int = 32_768
    #: Of one sequence.
    length: int = 32_768
    #: Trains norms and the embedding only.
    frozen: bool = False
    warm_up: int = 2
    steps: int = 3


def decoder(shape: Shape, run: Run, build: Callable[[Shape, Run], nn.Module] = Llama) -> nn.Module:
    """A model in bfloat16 on the accelerator, the same each time."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        return build(shape, run).to(torch.bfloat16)


def random_tokens(shape: Shape, sequences: int, length: int) -> Tensor:
    """Tokens of so many sequences and of the token behind each, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(shape.vocabulary, (sequences, length + 1), generator=generator).cuda()


def train(job: Job, way: Way) -> None:
    """Takes warm-up steps and measured ones, and adds what was found, also of a way that ends in an error."""
    began = time.perf_counter()
    if job.small:
        way = replace(way, shape=SMALL, tokens=2048, length=1024, warm_up=min(way.warm_up, 4), steps=2)
    fields = way.offload if way.offload is None or not job.small else {**way.offload, **SMALL_WINDOWS}
    offload = None if fields is None else eo.Offload(**fields)
    plan, applied = None, ExitStack()
    rows: list[dict[str, float]] = []
    losses: list[float] = []
    first_peak, failure, fault = 0, None, None
    try:
        step = Step(way, offload)
        if way.plan is not None:
            plan = planned(step, way.plan, job.small)
            applied.enter_context(plan.apply(step.model))
            offload = eo.Offload(plan=plan)
            step.enter(offload)
        for number in range(way.warm_up + way.steps):
            if number == way.warm_up:
                first_peak = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                if offload is not None:
                    offload.stats(synchronize=True)
                    offload.reset_stats()
            row, loss = step()
            losses.append(loss)
            rows += [row] if number >= way.warm_up else []
    except NotHereError as reason:
        failure = str(reason)
    except torch.OutOfMemoryError as error:  # it is what ways differ in
        failure = str(error)[:500]
    except Exception as error:  # of torch, a peer or ours
        failure, fault = f"{type(error).__name__}: {error}"[:500], error
    finally:
        applied.close()
    job.add(
        what="train",
        parameters=sum(parameter.numel() for parameter in step.model.parameters()) if losses else None,
        layers=way.shape.layers,
        tokens=way.tokens,
        length=way.length,
        failure=failure,
        peak_gib=torch.cuda.max_memory_allocated() / GIB,
        reserved_gib=torch.cuda.max_memory_reserved() / GIB,
        warm_up_peak_gib=first_peak / GIB,
        process_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
        steps={key: [row[key] for row in rows] for key in (rows[0] if rows else ())},
        losses=losses,
        **({} if plan is None else predicted_by(plan)),
        seconds=time.perf_counter() - began,
        **_of(offload, max(len(rows), 1)),
    )
    if fault is not None:
        raise fault


def planned(step: Step, budget: str, small: bool) -> eo.Plan:
    """Plans a step of this machine; a small one for half of what it may save."""
    given: dict[str, Any] = {"recompute": True}
    if small:
        given["config"] = SMALL_WINDOWS
        whole = eo.plan(step.model, step.tokens, **given)
        budget = str((whole.peak_bytes + whole.least_budget) // 2)
    return eo.plan(step.model, step.tokens, device_budget=budget, **given)


def predicted_by(plan: eo.Plan) -> dict[str, Any]:
    """Returns what a plan says of a step, to stand beside what is measured."""
    return {
        "predicted_peak_gib": plan.peak_bytes / GIB,
        "predicted_step": plan.step_seconds,
        "plan": str(plan).splitlines()[:8],
    }


class Step:
    """Forward, backward and a fused AdamW; called, it takes one step and returns its seconds and its loss."""

    def __init__(self, way: Way, offload: eo.Offload | None) -> None:
        self.model = decoder(way.shape, way.run, way.build)
        if way.frozen:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_("norm" in name or "embedding" in name)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        self.around = way.around
        if offload is not None:
            self.enter(offload)
        self.call: Callable[..., Any] = self.model
        if way.compiled is not None:
            options = {"dynamic": False, **way.compiled}
            self.call = (torch.compile if offload is None else offload.compile)(self.model, **options)
            self.around = nullcontext
        self.tokens = random_tokens(way.shape, max(way.tokens // way.length, 1), way.length)

    def enter(self, offload: eo.Offload) -> None:
        """Has forward run in a ``with`` of ``offload`` from now on."""
        self.around = lambda: offload

    def __call__(self) -> tuple[dict[str, float], float]:
        began, marks = time.perf_counter(), [_mark()]
        with self.around():
            loss = self.call(self.tokens)
        called = time.perf_counter()
        marks.append(_mark())
        loss.backward()
        marks.append(_mark())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(_mark())
        marks[-1].synchronize()
        wall = time.perf_counter() - began
        parts = [start.elapsed_time(stop) / 1e3 for start, stop in itertools.pairwise(marks)]
        named = dict(zip(("forward", "backward", "optimizer"), parts, strict=True))
        return {"step": sum(parts), **named, "wall": wall, "host_forward": called - began}, loss.item()


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _of(offload: eo.Offload | None, steps: int) -> dict[str, Any]:
    """What our object says of the measured steps: bytes and stalls a step, and every counter that is not 0."""
    if offload is None:
        return {}
    stats = offload.stats(synchronize=True)
    return {
        "out_gib": stats.bytes_out / steps / GIB,
        "in_gib": stats.bytes_in / steps / GIB,
        "host_gib": stats.host_bytes_peak / GIB,
        "stall_seconds": stats.stall_seconds / steps,
        "stats": {name: value for name, value in stats.to_dict().items() if value},
        "advice": stats.advice,
    }


# -- a model of Transformers ------------------------------------------------------------------------------------------


class HuggingFace(nn.Module):
    """The same decoder, as Transformers has it, under its own checkpointing."""

    def __init__(self, shape: Shape, *, offload: bool) -> None:
        import inspect

        import transformers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

        enable = getattr(PreTrainedModel, "_activation_checkpointing_enable", None)
        if enable is None or "offload" not in inspect.signature(enable).parameters:
            raise NotHereError(f"transformers {transformers.__version__} has no checkpointing with offload=True")
        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocabulary,
                hidden_size=shape.width,
                intermediate_size=shape.hidden,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.shared_heads,
                max_position_embeddings=1 << 17,
                tie_word_embeddings=True,
                use_cache=False,
            )
        )
        self.model.gradient_checkpointing_enable({"use_reentrant": False}, offload=offload)
        self.train()

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
        return loss
