"""A traced step is the real one: the same saves in the same order, for the same reasons. And nothing is left behind."""

from __future__ import annotations

import gc
import logging.handlers
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import eager_offload as eo
from eager_offload.core.selection import reason_to_stay
from eager_offload.planning.program import Program
from eager_offload.planning.trace import record
from eager_offload.stats import KeepReason
from eager_offload.torch_private.inductor import FakeTensorMode
from tests.fake_cuda.saves import recorded, saved_bytes
from tests.planning.programs import CONFIG, Stack, small, trained

pytestmark = pytest.mark.usefixtures("one_thread")

Saved = tuple[int, bool, KeepReason | None]


def really(step: Callable[[], Tensor], min_bytes: int) -> tuple[list[Saved], list[int]]:
    """What a real step saves, and the numbers of the saves that it asks for, in order."""
    saves: list[Saved] = []
    unpacks: list[int] = []

    def pack(tensor: Tensor) -> tuple[int, Tensor]:
        saves.append((tensor.nbytes, tensor.requires_grad, reason_to_stay(tensor, min_bytes)))
        return len(saves) - 1, tensor if tensor.is_leaf else tensor.detach()

    def unpack(handle: tuple[int, Tensor]) -> Tensor:
        unpacks.append(handle[0])
        return handle[1]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = step()
    loss.backward()
    return saves, unpacks


def assert_like(program: Program, real: tuple[list[Saved], list[int]]) -> None:
    assert [save[:3] for save in program.saves] == real[0]
    assert [ask.save for ask in program.unpacks] == real[1]


def test_saves_and_asks_of_a_small_model_are_those_of_its_step() -> None:
    model, x = small()
    program = record(model, x, min_bytes=1 << 10).program
    assert_like(program, really(lambda: model(x), 1 << 10))
    assert program.movable_bytes == sum(one.nbytes for one in program.storages) > 0
    assert {save.reason for save in program.saves} == {None, KeepReason.PARAMETER, KeepReason.SMALL}
    forward, backward = program.ops[: program.forward_ops], program.ops[program.forward_ops :]
    for half in (forward, backward):
        assert "blocks.1.gate" in {program.modules[op.module] for op in half}
    tokens, width, shared, inner = 16, 32, 16, 64
    products = 2 * (2 * width**2 + 2 * width * shared + 3 * width * inner)
    assert sum(op.flops for op in forward) == 2 * tokens * (products + 2 * tokens * width)


def test_bytes_that_live_are_parameters_inputs_gradients_and_what_is_computed() -> None:
    model, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    program = record(model, x, lambda out: out.exp().sum(), min_bytes=0).program
    # mm, exp, sum; and backward: the product of both gradients, and the parameter's.
    assert [op.name for op in program.ops[:3]] == ["mm", "exp", "sum"]
    weight, data = 4 * 64, 4 * 32
    assert program.other_bytes[0] == weight + 2 * data, "the product that exp takes; nothing of it is saved"
    (saved,) = program.storages
    assert (saved.nbytes, saved.made, saved.saved) == (data, 1, 2)
    assert max(program.other_bytes) >= 2 * weight + data, "a gradient"


class Routed(nn.Module):
    """What it does depends on numbers."""

    def __init__(self, question: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner, self.question = nn.Linear(4, 4), question

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.question(y)
        return y.sum()


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (lambda y: y.sum().item(), "asks for the value of a tensor"),
        (lambda y: y[y > 0], "makes a tensor whose size depends on the numbers in another"),
        (lambda y: bool(y.isnan().any()), "asks for the value of a tensor"),
        (lambda y: y.detach().numpy(), "asks for the numbers of a tensor"),
    ],
)
def test_a_question_for_numbers_that_are_missing_is_an_error_that_names_the_module(
    question: Callable[[Tensor], object], said: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Routed(question)))
    with pytest.raises(eo.PlanError, match=r"module '1\.0' ") as caught:
        eo.plan(model, torch.ones(2, 4), device="h200")
    assert said in str(caught.value)
    assert isinstance(caught.value, eo.OffloadError)


def test_what_is_known_does_not_depend_on_what_had_its_memory_before() -> None:
    class Overwritten(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = x.exp()
            for _ in range(4):
                unknown = mask.clone()
                unknown &= h.sum() > 0
                del unknown
                if bool(mask.clone().all()):  # where the other one was
                    h = h.relu()
            return h.sum()

    x = torch.ones(2, 4, requires_grad=True)
    program = record(Overwritten(), (x, torch.ones(4, dtype=torch.bool)), min_bytes=0).program
    assert [op.name for op in program.ops].count("relu") == 4


def test_integers_and_booleans_of_the_inputs_may_steer() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(8, 16)

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            rows = self.words(words)[mask.nonzero().flatten()]
            return (rows.exp() if bool(mask.all()) else rows.sigmoid().tanh()).sum()

    model, words = Masked(), torch.arange(8)
    for mask in (torch.ones(8, dtype=torch.bool), torch.arange(8) < 5):
        program = record(model, (words, mask), min_bytes=0).program
        assert_like(program, really(lambda mask=mask: model(words, mask), 0))


def test_a_model_that_saves_nothing_or_returns_no_loss_is_an_error() -> None:
    with pytest.raises(eo.PlanError, match="requires no gradient"):
        eo.plan(nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2), device="h200")

    class Nothing(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"logits": super().forward(x)}

    with pytest.raises(eo.PlanError, match="no loss was found: the model returns dict"):
        eo.plan(Nothing(2, 2), torch.ones(1, 2), device="h200")
    with pytest.raises(eo.PlanError, match=r"loss=... returns float, which has no gradients"):
        eo.plan(Nothing(2, 2), torch.ones(1, 2), loss=lambda out: 1.0, device="h200")
    program = record(Nothing(2, 2), torch.ones(1, 2), lambda out: out["logits"].sum(), min_bytes=0).program
    assert program.forward_ops == 2


def test_the_first_trace_of_a_recurrent_layer_is_as_the_next_ones() -> None:
    model, x = nn.LSTM(64, 128), torch.randn(4, 2, 64)
    FakeTensorMode.cache_clear()
    first, second = (record(model, x, lambda out: out[0].sum(), min_bytes=0).program for _ in range(2))
    assert first.other_bytes == second.other_bytes


def _fails(y: Tensor) -> None:
    raise KeyError("its own")


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        (_fails, KeyError),
        (lambda y: y.view(3, 7), RuntimeError),
        (lambda y: y @ y.double()[:1], RuntimeError),
        (lambda y: y + torch.ones(3), RuntimeError),
    ],
)
def test_an_error_of_the_models_own_is_no_error_of_the_plan(
    question: Callable[[Tensor], object], kind: type[Exception]
) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Routed(question))), torch.ones(2, 4)
    with pytest.raises(kind):
        model(x)
    logger, logged = logging.getLogger("torch._subclasses.fake_tensor"), logging.handlers.BufferingHandler(99)
    logger.addHandler(logged)
    with pytest.raises(kind) as caught:
        eo.plan(model, x, device="h200")
    logger.removeHandler(logged)
    assert not logged.buffer, "the error says it all"
    assert not logger.filters
    assert not isinstance(caught.value, eo.OffloadError)
    assert "in module '1.0', while it traced" in "".join(caught.value.__notes__)


class Checkpointed(Stack):
    """Every block is, with such options."""

    options: dict[str, Any]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return x.sum()


def checkpointed(**options: Any) -> tuple[nn.Module, Tensor]:
    model = Checkpointed(3, 32, 4, 2, 64)
    model.options = options
    return model, torch.randn(16, 32, requires_grad=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_model_checkpoints_itself_is_computed_again_in_the_trace(reentrant: bool) -> None:
    model, x = checkpointed(use_reentrant=reentrant)
    program = record(model, x, min_bytes=0).program
    assert_like(program, really(lambda: model(x), 0))
    assert len(program.ops) - program.forward_ops > 2 * program.forward_ops


def test_what_a_models_checkpoints_save_is_planned_and_followed(tmp_path: Path) -> None:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    model, x = checkpointed(use_reentrant=False, context_fn=contexts)
    seen_by_hooks, _ = really(lambda: model(x), 1 << 10)
    assert len(record(model, x, min_bytes=1 << 10).program.saves) > len(seen_by_hooks)
    model.zero_grad()
    trained(eo.plan(model, x, policy="max", config={"min_bytes": "1KiB"}), model, x, tmp_path, 1)


def test_regions_marks_and_skipped_modules_stay() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            with eo.no_offload():
                x = x.exp()
            return eo.keep(self.second(self.first(x).sigmoid()).tanh()).sum()

    model, x = Marked(), torch.randn(16, 32, requires_grad=True)
    reasons = [save.reason for save in record(model, x, min_bytes=64).program.saves]
    assert reasons.count(KeepReason.REGION) == 1
    skipped = record(model, x, min_bytes=64, patterns={"skip": ["second"]}).program
    assert [save.reason for save in skipped.saves].count(KeepReason.REGION) == 2
    only = record(model, x, min_bytes=64, patterns={"only": ["second"]}).program
    assert [save.reason for save in only.saves].count(None) == 1
    for field in ("skip", "only"):
        with pytest.raises(eo.ConfigError, match=f"{field}='third'"):
            record(model, x, min_bytes=64, patterns={field: ["third"]})


# -- nothing is left behind -------------------------------------------------------------------------------------------


def state_of(model: nn.Module, *leaves: Tensor) -> list[object]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [
        {name: (id(one), one.requires_grad, one.tolist()) for name, one in named},
        [(id(one.grad), one.grad is not None and one.grad.tolist()) for one in (*leaves, *model.parameters())],
        [(list(one._forward_hooks), list(one._forward_pre_hooks), one.training) for one in model.modules()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        numpy.random.get_state()[2],
        torch.is_grad_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
    ]


class Noisy(nn.Module):
    """Dropout, running statistics, a buffer that it replaces, random numbers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = F.rrelu(F.dropout(self.norm(self.layer(x)), 0.5), training=True)
        self.last = x.detach().mean(0)
        return (x * random.random() * numpy.random.rand() if torch.rand([]) < 2 else x).sum()


@pytest.mark.parametrize("fails", ["", "forward", "backward"])
def test_planning_leaves_nothing_behind_under_no_grad_too(fails: str) -> None:
    model, x = Noisy(), torch.randn(4, 8, requires_grad=True)
    model(x).backward()
    alive = (model.norm.weight * x).sum()

    def fail(*_: object) -> None:
        raise KeyError("its own")

    def loss(total: Tensor) -> Tensor:
        if fails == "forward":
            fail()
        if fails == "backward":
            total.register_hook(fail)
        return total

    fields: Any = {"config": {"min_bytes": 1, "skip": ["norm"], "tier": "host"}, "device_budget": "1GiB"}
    before = state_of(model, x)
    with torch.no_grad(), pytest.raises(KeyError) if fails else nullcontext():
        eo.plan(model, x, loss=loss, device="h200", **fields)
        assert not torch.is_grad_enabled()
    assert state_of(model, x) == before
    alive.backward()


def test_nothing_of_the_model_or_the_inputs_is_held_afterwards() -> None:
    model, x = small()
    plan = eo.plan(model, x, device="h200", config={"min_bytes": 0})
    gone = [weakref.ref(model), weakref.ref(x), weakref.ref(model.blocks[0].query.weight)]
    del model, x
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    assert plan.fits


def test_a_model_on_meta_is_planned_as_a_real_one() -> None:
    model, x = small()
    with torch.device("meta"):
        other = Stack(2, 32, 4, 2, 64)
    assert record(other, x.to("meta"), min_bytes=0).program == record(model, x, min_bytes=0).program
    assert {one.device.type for one in other.parameters()} == {"meta"}


def test_tied_parameters_and_views_of_one_are_one_storage() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(64, 8)
            self.head = nn.Linear(8, 64, bias=False)
            self.head.weight = self.words.weight
            self.part = self.words.weight.detach()[:4]

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.words(words) + self.part.sum()).exp().sum()

    program = record(Tied(), torch.arange(8), min_bytes=0).program
    assert program.other_bytes[0] < 2 * 4 * 64 * 8


# -- compiled code ----------------------------------------------------------------------------------------------------


class Written(nn.Module):
    """Is no module of torch's, which torch compiles only in a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x).square()


@pytest.mark.parametrize("what", ["torch.compile(model)", "model.compile()", "loss"])
def test_h63_compiled_code_is_compiled_after_a_plan(what: str) -> None:
    torch._dynamo.reset()
    graphs, x = list[object](), torch.randn(256, 64)

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def loss(made: Tensor) -> Tensor:
        return made.square().mean()

    model: Any = Written()
    if what == "torch.compile(model)":
        model = torch.compile(model, backend=backend)
    elif what == "model.compile()":
        model.compile(backend=backend)
    else:
        loss = torch.compile(loss, backend=backend)
    plan = eo.plan(model, x, loss=loss, device_budget="1GiB", config={"tier": "host"})
    assert not graphs
    assert plan.is_compiled
    assert "of the model as it is written" in str(plan)
    loss(model(x)).backward()
    assert len(graphs) == 1
    torch._dynamo.reset()


# -- the device that a step is planned for ----------------------------------------------------------------------------

#: A machine with an accelerator traces for that.
without_accelerator = pytest.mark.skipif(
    torch.accelerator.current_accelerator(check_available=True) is not None, reason="this machine has an accelerator"
)
Sized = tuple[tuple[int, ...], torch.dtype]
HALVES = [torch.float16, torch.bfloat16]


class Calling(nn.Module):
    """Calls one function with its input and parameters."""

    def __init__(self, function: Callable[..., Tensor], *parameters: Tensor) -> None:
        super().__init__()
        self.function, self.given = function, nn.ParameterList(parameters)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.given).sum()


class Noting(Calling):
    """Notes the sizes and types of what that saves, which no one else sees then."""

    def forward(self, x: Tensor) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            noted.put((tuple(tensor.shape), tensor.dtype))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = self.function(x, *self.given)
        return made.sum()


#: What is noted while a step is traced.
noted: SimpleQueue[Any] = SimpleQueue()


def taken() -> list[Any]:
    """What was noted since the last call."""
    return [noted.get() for _ in range(noted.qsize())]


def saved(function: Callable[..., Tensor], x: Tensor, *parameters: Tensor, target: str = "cuda") -> list[Sized]:
    """What ``function`` saves in a trace for ``target``, in any order."""
    record(Noting(function, *parameters), x, min_bytes=0, target=target)
    return sorted(taken(), key=str)


def traced(function: Callable[..., Tensor], x: Tensor, *parameters: Tensor) -> Program:
    return record(Calling(function, *parameters), x, min_bytes=0, target="cuda").program


def in_order(*found: Sized) -> list[Sized]:
    return sorted(found, key=str)


def empty(*size: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta", requires_grad=grad)


@without_accelerator
@pytest.mark.parametrize("stride", [pytest.param(9, marks=pytest.mark.short), pytest.param(1, marks=pytest.mark.long)])
def test_saves_are_those_of_cudas_kernels(stride: int) -> None:
    """Of dropout, attention and norms, in each type and in autocasts; ``make fake-gpu`` holds the file to CUDA."""
    found, expected = saved_bytes(stride), recorded()
    assert found == {name: expected[name] for name in found}
    assert len(found) > 150 // stride


def test_a_trace_for_a_cpu_has_its_kernels_and_guesses_nothing() -> None:
    program = record(Calling(lambda x: F.dropout(x, 0.1)), empty(4, 8), min_bytes=0).program
    assert "bernoulli_" in [op.name for op in program.ops]
    assert program.guessed == ()


@contextmanager
def caller_in(kind: str, dtype: torch.dtype) -> Iterator[None]:
    """The caller's thread is in an autocast that torch would not enter here."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


@without_accelerator
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, dtype) for kind in ("cuda", "around") for dtype in (None, *HALVES, torch.float32)),
        *(("cpu", dtype) for dtype in (None, *HALVES)),
    ],
)
def test_autocast_of_the_target_takes_effect(kind: str, dtype: torch.dtype | None) -> None:
    named = {} if dtype is None else {"dtype": dtype}
    if dtype is None:
        dtype = torch.bfloat16 if kind == "cpu" else torch.float16

    def layers(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        with nullcontext() if kind == "around" else torch.autocast(kind, **named):
            states.put((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))
            with torch.autocast("cuda", enabled=False):
                x = x.exp()
            return F.layer_norm(F.linear(x, weight).softmax(-1).to(dtype), (16,), scale)

    states: SimpleQueue[Any] = SimpleQueue()
    here = torch.get_autocast_dtype("cuda")
    with warnings.catch_warnings(), caller_in("cuda", dtype) if kind == "around" else nullcontext():
        warnings.simplefilter("error")
        found = saved(layers, empty(8, 4), empty(16, 4), empty(16))
    single = torch.float32
    product = [((8, 4), single), ((8, 4), dtype), ((4, 16), dtype)]
    norm = [((8, 16), single), ((16,), single), *[((8, 1), single)] * 2]
    assert found == in_order(*product, ((8, 16), single), *norm), "softmax and norm compute in float32"
    assert states.get() == (True, dtype)
    assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == (False, here)


@without_accelerator
def test_a_context_that_a_model_makes_in_a_trace_and_keeps_is_what_torch_would_have_made() -> None:
    @cache
    def kept() -> torch.autocast:
        return torch.autocast("cuda", torch.bfloat16)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        with kept():
            return F.linear(x, weight)

    assert ((8, 4), torch.bfloat16) in saved(layer, empty(8, 4), empty(16, 4))
    x = torch.ones(8, 4)
    with kept():
        assert F.linear(x, torch.ones(16, 4)).dtype is torch.float32
    assert not torch.is_autocast_enabled("cuda")


@without_accelerator
def test_what_is_computed_again_has_the_kernels_and_the_autocast_of_the_target() -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        x = F.linear(x, weight)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def layers(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return checkpoint(block, x, weight, use_reentrant=False)

    ops = [op.name for op in traced(layers, empty(2, 4, 16, 8), empty(8, 8)).ops]
    assert ops.count("_scaled_dot_product_flash_attention") == 2


@without_accelerator
def test_autocast_of_other_threads_is_what_it_was() -> None:
    def elsewhere() -> str:
        with torch.autocast("cuda"):
            return str(torch.is_autocast_enabled("cpu"))

    def function(x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as other:
            noted.put(other.submit(elsewhere).result())
        return x.exp()

    own = torch.autocast.__init__
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert "False" in saved(function, empty(4))
    assert torch.autocast.__init__ is own


class Noise(nn.Module):
    """Its dropout saves other tensors than the one that was planned for: of another size and type."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x), 0.1)
        return x.square().mean()


class Mask(Noise):
    """The same with the operator of CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.native_dropout(layer(x), 0.1, True)[0]
        return x.square().mean()


@without_accelerator
@pytest.mark.parametrize("kind", [Noise, Mask])
@pytest.mark.parametrize("device", ["h200", "here"])
def test_h70_a_step_is_followed_whatever_its_kernels_save(kind: type[Noise], device: str, tmp_path: Path) -> None:
    x = torch.randn(256, 64)
    config = {**CONFIG, "tier": "host"}
    plan = eo.plan(Noise(), x, device=device, device_budget="1GiB", policy="max", config=config)
    assert [one.partition(" ")[0] for one in plan.guessed] == (["dropout"] if device == "h200" else [])
    assert ("guessed, " in str(plan)) is (device == "h200")
    trained(plan, kind(), x, tmp_path, steps=1)
