"""What stands around the calls of modules: ``skip``, copies of such modules, and contexts around every model's call."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from eager_offload.integrations.calls import OffloadedCalls, offload_modules
from eager_offload.planning.apply import checkpointed
from tests.copies import pickled, saved

pytestmark = pytest.mark.filterwarnings(
    "ignore:eager_offload. compiled code waits:RuntimeWarning",
    "ignore:eager_offload. nothing of this Offload:RuntimeWarning",
)

NBYTES = 256 * 64 * 4
WITHOUT = nullcontext()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).sin()).exp()


class Model(nn.Module):
    def __init__(self, recomputes: bool = False, calls_head: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.lm_head = nn.Linear(64, 64)
        self.recomputes, self.calls_head = recomputes, calls_head

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layers, x, use_reentrant=False) if self.recomputes else self.layers(x)
        return (self.lm_head(x) if self.calls_head else self.lm_head.forward(x)).square().sum()


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    return {"min_bytes": 1024, "tier": "disk", "disk_path": tmp_path, "keep_last_bytes": 0}


@pytest.fixture
def offload(fields: dict[str, Any]) -> Iterator[eo.Offload]:
    made = eo.Offload(fields, min_bytes=0)
    yield made
    made.close()


def gradients(
    model: nn.Module, around: AbstractContextManager[Any] = WITHOUT, called: Any = None, x: Tensor | None = None
) -> list[Tensor]:
    with around:
        loss = (model if called is None else called)(torch.ones(256, 64) if x is None else x)
    return list(torch.autograd.grad(loss, list(model.parameters())))


# -- skip -------------------------------------------------------------------------------------------------------------


def assert_skips(offload: eo.Offload, model: nn.Module, least: int = NBYTES) -> None:
    """What is skipped stays where it is and all else moves, with the same gradients; and that can be taken back."""
    expected = gradients(model)
    offload.reset_stats()
    assert all(map(torch.equal, gradients(model, offload), expected))
    stats = offload.stats(synchronize=True)
    assert stats.kept_bytes["region"] >= least
    assert stats.bytes_out > 0
    offload.close()
    assert all(map(torch.equal, gradients(model), expected))


@pytest.mark.parametrize(
    "named",
    [
        *({"skip": skip} for skip in ("lm_head", ["*.norm"], ["lm_head", "layers.?.norm"], ["layers"])),
        *({"only": only} for only in ("lm_head", ["layers"], ["layers.0", "layers.1"])),
        {"only": "layers", "skip": "*.norm"},
        {"only": "layers.?.norm", "skip": "layers.0"},
    ],
    ids=str,
)
def test_what_skipped_modules_save_stays_and_the_rest_moves(named: Any, fields: dict[str, Any]) -> None:
    model, offload = Model(), eo.Offload(**named, **fields)
    offload.skip_in(model)
    offload.skip_in(model)
    assert_skips(offload, model)


def test_only_moves_what_skip_would_keep(fields: dict[str, Any]) -> None:
    model, moved, stayed = Model(), [], []
    for named in {}, {"skip": "layers"}, {"only": "layers"}:
        offload = eo.Offload(fields, **named)
        offload.skip_in(model)
        gradients(model, offload)
        stats = offload.stats(synchronize=True)
        moved.append(stats.offloaded_bytes + stats.shared_bytes)
        stayed.append(stats.kept_bytes.get("region", 0))
        offload.close()
    assert moved[0] == moved[1] + moved[2]
    assert moved[1] > 0 < moved[2]
    assert stayed == [0, moved[2], moved[1]]


def test_a_compiled_model_skips_them_in_one_graph(fields: dict[str, Any]) -> None:
    model = Model()
    expected, kept = gradients(model), []
    for named in {}, {"skip": ["*.norm", "lm_head"]}, {"only": ["layers"], "skip": ["*.norm"]}:
        offload = eo.Offload(fields, **named)
        actual = gradients(model, offload, offload.compile(model, backend="aot_eager", fullgraph=True))
        assert all(map(torch.allclose, actual, expected))
        stats = offload.stats(synchronize=True)
        assert stats.compiled_regions == 1
        kept.append(stats.kept_bytes.get("region", 0))
        offload.close()
        torch.compiler.reset()
    assert kept[2] >= kept[1] > kept[0] == 0


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("*.nrom", "layers.0.norm"), ("head", "lm_head"), ("model.lm_head", "lm_head"), ("zzz", "layers")],
)
def test_a_pattern_that_matches_nothing_lists_near_names(pattern: str, near: str) -> None:
    for field in ("skip", "only"):
        with pytest.raises(eo.ConfigError, match=f"matches no module of this model.*{near}") as raised:
            eo.Offload({field: ["lm_head", pattern]}).skip_in(Model())
        assert f"{field}={pattern!r}" in str(raised.value)


def test_without_a_model_it_is_no_silent_one(fields: dict[str, Any]) -> None:
    for field in ("skip", "only"):
        with pytest.raises(eo.ConfigError, match=NEEDS_MODEL), eo.Offload({field: "lm_head"}):
            pass
        compiled = torch.compile(Model(), backend="eager_offload", options={field: "lm_head"})
        reason = r'backend="eager_offload", which sees graphs and no names: .*take offload\.compile\(model\)'
        with pytest.raises(Exception, match=f"{field} is not accepted by {reason}"):
            compiled(torch.ones(256, 64))
        torch.compiler.reset()


NEEDS_MODEL = r"call offload\.skip_in\(model\)"


@pytest.mark.parametrize("make", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("order", [1, -1])
def test_h48_what_is_copied_with_its_model_skips_in_the_copied_one(make: Any, order: int, fields: Any) -> None:
    model, offload = Model(), eo.Offload(skip="lm_head", **fields)
    offload.skip_in(model)
    other, copied = make(make([model, offload][::order]))[::order]
    if make is not copy.deepcopy or order == -1:  # it cannot know the copied model, and says so
        with pytest.raises(eo.ConfigError, match=NEEDS_MODEL), copied:
            pass
        copied.skip_in(other)
    assert_skips(copied, other)
    copied.skip_in(other)
    assert_skips(copied, other)
    assert_skips(offload, model)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, saved])
def test_h48_a_copied_offload_alone_skips_in_the_same_model_and_may_be_given_another(make: Any, fields: Any) -> None:
    model, other, offload = Model(), Model(), eo.Offload(skip="lm_head", **fields)
    offload.skip_in(model)
    copied, again = make(offload), make(make(offload))
    if make is not copy.copy:
        with pytest.raises(eo.ConfigError, match=NEEDS_MODEL), copied:
            pass
    copied.skip_in(other)
    assert_skips(copied, other)
    assert_skips(offload, model)
    if make is copy.copy:
        assert_skips(again, model)


def test_a_pattern_whose_module_is_never_called_is_warned_of_once(fields: dict[str, Any]) -> None:
    model, offload = Model(calls_head=False), eo.Offload(skip=["*_head", "*.norm", "layers"], **fields)
    offload.skip_in(model)
    expected = gradients(model)
    with warnings.catch_warnings(record=True, action="always") as warned:
        for _ in range(5):
            assert all(map(torch.equal, gradients(model, offload), expected))
    assert ["no module that it names has been called" in str(one.message) for one in warned] == [True]
    assert r"skip=['*_head'] has had no effect" in str(warned[0].message)
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.close()


# -- copies of modules ------------------------------------------------------------------------------------------------


class Halves(nn.Module):
    """Has a layer that may be of a class that copies its attributes by itself, and one after it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        return self.last(found[0] if isinstance(found, tuple) else found).exp().mean()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(32, 32),
    "lstm": lambda: nn.LSTM(32, 32),
    "parametrized": lambda: register_parametrization(nn.Linear(32, 32), "weight", nn.Tanh()),
    "ddp": lambda: nn.parallel.DistributedDataParallel(nn.Linear(32, 32)),
}


@contextmanager
def offloaded(model: nn.Module, offload: eo.Offload) -> Iterator[eo.Offload]:
    """What integrations do with a model, here with a layer that they may be given."""
    calls = OffloadedCalls(model.layer, offload)
    yield offload
    calls.remove()


@contextmanager
def skipped(model: nn.Module, offload: eo.Offload) -> Iterator[eo.Offload]:
    """What ``skip`` does."""
    skipping = eo.Offload(offload.config, skip="layer")
    skipping.skip_in(model)
    yield skipping
    skipping.close()


@contextmanager
def computed_again(model: nn.Module, offload: eo.Offload) -> Iterator[eo.Offload]:
    """What ``plan.apply`` does."""
    with checkpointed(model, {"layer": ()}):
        yield offload


AROUND = pytest.mark.parametrize("around", [offloaded, skipped, computed_again])
Around = Callable[[nn.Module, eo.Offload], AbstractContextManager[eo.Offload]]


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def averaged(value: nn.Module) -> Any:
    return AveragedModel(value).module


def assert_own(model: Halves, other: Halves) -> None:
    """``other`` computes with its own parameters, and gradients go there."""
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    loss = other(torch.ones(4, 8, 32))
    assert loss == 1, "of zeros"
    loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in other.last.parameters())


#: torch pickles no parametrized module.
COPIES = [
    (layer, make)
    for layer in LAYERS
    for make in (copy.deepcopy, averaged, *([] if layer == "parametrized" else [pickled, saved]))
]


@AROUND
@pytest.mark.parametrize(("layer", "make"), COPIES)
def test_h61_a_copy_calls_its_own_and_the_original_goes_on(
    layer: str, make: Callable[[Any], Any], around: Around, offload: eo.Offload
) -> None:
    model, x = Halves(LAYERS[layer]()), torch.ones(16, 8, 32)
    plain = gradients(model, x=x)
    with around(model, offload) as serving:
        other = make(model)
        assert_own(model, other)
        assert_own(model, make(other))
        assert all(map(torch.equal, gradients(model, serving, x=x), plain))
        assert serving.stats(synchronize=True).bytes_out > 0
    assert_own(model, other)
    assert "_compiled_call_impl" not in vars(model.layer)


def replica(module: nn.Module) -> Any:
    """A copy of a module's attributes, as regional compilation and ``nn.DataParallel`` make one."""
    other: Any = type(module).__new__(type(module))
    vars(other).update(vars(module), _parameters=dict(vars(module)["_parameters"]), _modules=dict(module._modules))
    return other


class Scale(nn.Module):
    """Has nothing but a number that is no parameter, so that a shallow copy differs by an attribute."""

    by = 2.0

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.by).exp()


@AROUND
@pytest.mark.parametrize("make", [copy.copy, replica])
def test_h61_a_shallow_copy_calls_its_own(make: Callable[[Any], Any], around: Around, offload: eo.Offload) -> None:
    x, model = torch.ones(8, 32), Halves(Scale())
    with around(model, offload):
        copies = [make(model.layer) for _ in range(2)]
        copies.append(make(copies[0]))
        for number, other in enumerate(copies):
            other.by = number
        for number, other in enumerate(copies[1:], 1):  # the first is called when the model's own calls are as before
            assert other(x).equal((number * x).exp())
        assert model.layer(x).equal((2 * x).exp())
    del model
    for number, other in enumerate(copies):
        assert other(x).equal((number * x).exp())


# -- models that are saved, written down, compiled --------------------------------------------------------------------


class Layer(nn.Module):
    """Is compiled in place, as modules of torch's own are not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin().exp().sin().tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = Layer(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x)).exp().mean()


WRITTEN: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "exported": lambda model, x: torch.export.export(model, (x,)).module(),
    "exported strictly": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "exported without grad": lambda model, x: torch.no_grad()(WRITTEN["exported"])(model, x),
    "scripted": lambda model, x: torch.jit.script(model),
    "traced": torch.jit.trace,
    "traced by fx": lambda model, x: torch.fx.symbolic_trace(model),
}


@AROUND
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_training", [False, True])
def test_h77_a_model_is_saved_and_written_down_as_without(
    is_training: bool, around: Around, offload: eo.Offload
) -> None:
    model, x = Net(), torch.ones(64, 32)
    plain = gradients(model, x=x)
    with around(model, offload) as serving:
        model.train(is_training)
        for one in (model, copy.deepcopy(model)):
            assert b"eager_offload" not in pickle.dumps(one)
            for way, write in WRITTEN.items():
                written = write(one, x)
                assert torch.equal(written(x), model(x)), way
                assert "eager_offload" not in str(written.graph), way
        model.train()
        assert all(map(torch.equal, gradients(model, serving, x=x), plain))
        assert serving.stats(synchronize=True).bytes_out > 0
    assert all(map(torch.equal, gradients(model, x=x), plain))


@pytest.mark.filterwarnings("ignore:eager_offload. compiled code moves the tensors:RuntimeWarning")
@AROUND
def test_h77_a_model_that_is_compiled_afterwards_offloads(around: Around, offload: eo.Offload) -> None:
    model, x = Net(), torch.ones(64, 32)
    alone = copy.deepcopy(model)
    alone.layer.compile(backend="aot_eager", fullgraph=True)
    plain = gradients(alone, x=x)
    with around(model, offload) as serving:
        model.layer.compile(backend="aot_eager", fullgraph=True)
        assert all(map(torch.equal, gradients(model, serving, x=x), plain))
        stats = serving.stats(synchronize=True)
        assert stats.bytes_out > 0
        assert stats.compiled_regions > 0 or around is computed_again
    assert all(map(torch.equal, gradients(model, x=x), plain))
    assert type(model.layer._compiled_call_impl) is type(alone.layer._compiled_call_impl)
    torch.compiler.reset()


def test_h77_a_prepared_model_that_compiled_code_calls_offloads_or_says_why_not(offload: eo.Offload) -> None:
    model, x = Net(), torch.ones(64, 32)
    called = torch.compile(model, backend="aot_eager")
    plain = gradients(model, called=called, x=x)
    with offloaded(model, offload):
        torch.compiler.reset()
        assert all(map(torch.equal, gradients(model, called=called, x=x), plain))
        assert offload.stats(synchronize=True).bytes_out > 0
        torch.compiler.reset()
        whole = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="eager_offload enters its context around calls of this module"):
            whole(x)
        assert torch.equal(whole.eval()(x), model(x))
    torch.compiler.reset()


# -- around every model's call ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "recomputed", "compiled", "compiled in place"])
def test_gradients_are_the_same_and_bytes_move(kind: str, offload: eo.Offload) -> None:
    model = Model(kind == "recomputed")
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if kind == "compiled" else model
    if kind == "compiled in place":
        model.compile(backend="aot_eager", fullgraph=True)
    expected = gradients(model, called=called)
    with offload_modules(offload):
        assert all(map(torch.equal, gradients(model, called=called), expected))
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0
    assert (stats.compiled_regions > 0) is kind.startswith("compiled")
    gradients(model, called=called)
    assert offload.stats().saved_tensors == stats.saved_tensors, "the call of modules is as before"
    torch.compiler.reset()


def test_calls_without_a_backward_in_a_transform_and_under_other_hooks_are_left_alone(offload: eo.Offload) -> None:
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    rows = torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))
    slopes, expected = rows(x), torch.func.vmap(model)(x)
    with offload_modules(offload):
        with torch.no_grad():
            model(x)
        model.eval()
        model(x)
        model.train()
        assert torch.equal(rows(x), slopes)
        with torch.autograd.graph.save_on_cpu():
            model(x)
        assert offload.stats().saved_tensors == 0
        assert torch.equal(torch.func.vmap(model)(x), expected)  # which takes hooks
