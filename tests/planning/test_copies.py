"""A plan is made of copies: of the model, of its inputs whatever they are, and of the functions that reach both."""

from __future__ import annotations

import functools
import random
import threading
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from tests.planning.programs import CONFIG, slow, trained

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(model: nn.Module, inputs: object, **fields: Any) -> eo.Plan:
    return eo.plan(model, inputs, **{"device": slow(), "policy": "max", "config": CONFIG, **fields})


def like(plan: eo.Plan) -> tuple[int, ...]:
    return plan.peak_bytes, plan.moved_bytes, plan.movable_bytes


# -- inputs -----------------------------------------------------------------------------------------------------------


class Data:
    """As PyG's: attributes that layers write to."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@dataclass(frozen=True)
class Frozen:
    x: Tensor


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Cache:
    """As those of keys and values: of each layer a tensor, to which forward adds."""

    def __init__(self, x: Tensor) -> None:
        self.layers, self.seen = [x], 0


Pair = namedtuple("Pair", "x y")


def _read(given: Any) -> Any:
    return given.x


def _write(given: Any, made: Tensor) -> None:
    given.x = made


def _nothing(given: Any, made: Tensor) -> None:
    pass


def _of_cache(given: Cache) -> Tensor:
    return given.layers[-1]


def _to_cache(given: Cache, made: Tensor) -> None:
    given.seen += 1
    given.layers.append(made)


#: What holds the batch, how forward reads that, and how it writes to what it was given.
HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], Callable[[Any, Tensor], None]]] = {
    "object": (Data, _read, _write),
    "frozen dataclass": (Frozen, _read, lambda given, made: object.__setattr__(given, "x", made)),
    "slots": (Slotted, _read, _write),
    "cache": (Cache, _of_cache, _to_cache),
    "dict of objects": (lambda x: {"a": Data(x)}, lambda given: given["a"].x, lambda given, made: given.clear()),
    "list": (lambda x: [x], lambda given: given[0], lambda given, made: given.append(made)),
    "namedtuple of objects": (lambda x: Pair(Data(x), 0), lambda given: given.x.x, lambda g, made: _write(g.x, made)),
    "namespace in a tuple": (lambda x: (SimpleNamespace(x=x),), lambda g: g[0].x, lambda g, made: _write(g[0], made)),
    "function": (lambda x: lambda: x, lambda given: given(), _nothing),
}


class Reads(nn.Module):
    """Reads its batch from what it is given, and writes there what it has made."""

    def __init__(self, holder: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 32)
        self.holder, self.kept = holder, None

    def forward(self, given: Any) -> Tensor:
        _, read, write = HOLDERS.get(self.holder, (None, lambda x: x, _nothing))
        made = torch.tanh(self.first(read(given)))
        write(given, made)
        if self.holder == "its own":
            self.kept = made
        return self.last(made).square().mean()


def state_of(one: Any, depth: int = 6) -> list[Any]:
    """What is in an object, in order; tensors and all else by identity."""
    found: list[Any] = [id(one)]
    inside = one if isinstance(one, list | tuple) else list(one.values()) if isinstance(one, dict) else []
    inside = [*inside, *getattr(one, "__dict__", {}).values(), *[one.x for _ in [0] if isinstance(one, Slotted)]]
    return found + [state_of(part, depth - 1) for part in inside if depth and not isinstance(part, int)]


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("is_attribute", [False, True])
def test_h76_an_object_among_the_inputs_is_left_as_it_is(holder: str, is_attribute: bool) -> None:
    x = torch.randn(256, 32)
    model, given = Reads(holder), HOLDERS[holder][0](x)
    if is_attribute:
        model.shared = given  # type: ignore[assignment]
    before = state_of(given)
    plan = planned(model, {"given": given})
    is_kept = holder not in ("function", "dict of objects")
    assert like(plan) == like(planned(Reads("its own" if is_kept else ""), x))
    assert plan.moved_bytes > 0
    assert state_of(given) == before
    assert type(HOLDERS[holder][1](given)) is Tensor


def test_h76_a_tensor_that_an_object_shares_with_the_model_is_one_in_the_copy() -> None:
    x = torch.randn(256, 32)
    model, other = Reads("object"), Reads("object")
    model.register_buffer("table", x)
    other.register_buffer("table", x.clone())
    assert planned(model, (Data(x),)).peak_bytes == planned(other, (Data(x),)).peak_bytes - x.nbytes


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda x: (part for part in [x]), r"inputs\[1\]\['batches'\] is of the type generator"),
        (lambda x: threading.Lock(), r"inputs\[1\]\['batches'\] is of the type lock"),
        (lambda x: SimpleNamespace(x=iter([x]), file=open(__file__)), "is of the type SimpleNamespace"),  # noqa: SIM115
    ],
)
def test_h76_an_input_that_cannot_be_copied_is_named(make: Callable[[Tensor], Any], said: str) -> None:
    x = torch.randn(4, 32)
    given = make(x)
    with pytest.raises(eo.PlanError, match=said):
        planned(Reads(), (x, {"batches": given}))
    if hasattr(given, "__next__"):
        assert next(given) is x, "nothing was taken of it"


@pytest.mark.long
def test_h76_a_cache_of_transformers_is_copied() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model, words = transformers.LlamaForCausalLM(config).train(), torch.arange(32).view(1, 32)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(words, past_key_values=cache)
    assert cache.get_seq_length() == 32
    plan = planned(model, {"input_ids": words, "labels": words, "past_key_values": cache, "use_cache": True})
    assert plan.moved_bytes > 0
    assert cache.get_seq_length() == 32
    assert type(cache.layers[0].keys) is Tensor


# -- functions --------------------------------------------------------------------------------------------------------


class Noted(nn.Module):
    """Goes on by what a hook has noted, if it has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.side = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(256, 256)
        self.features: dict[str, Tensor] = {}
        self.handlers: list[Any] = []

    def note(self, *given: Any) -> None:
        self.features["a"] = given[-1][0] if isinstance(given[-1], tuple) else given[-1]

    def forward(self, x: Tensor) -> Tensor:
        made = torch.relu(self.body(x))
        for handler in self.handlers:
            handler(made)
        loss = self.head(made).square().mean()
        noted = self.features.get("a")
        return loss if noted is None else loss + torch.exp(torch.sin(self.side(noted))).mean()


MODEL: list[Any] = [None]
NAMED: Any = None


def note_named(*given: Any) -> None:
    NAMED.note(*given)


def note_in_turn(*given: Any) -> None:
    note_named(*given)


class Extractor:
    def __init__(self, model: Noted) -> None:
        self.model, self.calls = model, 0

    def hook(self, *given: Any) -> None:
        self.calls += 1
        self.model.note(*given)


def _two_levels(model: Noted) -> Callable[..., None]:
    def note(*given: Any) -> None:
        model.note(*given)

    def around(*given: Any) -> None:
        note(*given)

    return lambda *given: around(*given)


def _itself(model: Noted) -> Callable[..., None]:
    def note(*given: Any, again: bool = True) -> None:
        model.note(*given) if not again else note(*given, again=False)

    return note


def _in_an_object(model: Noted) -> Callable[..., None]:
    extractor = Extractor(model)
    return lambda *given: extractor.hook(*given)


def _bound(model: Noted) -> Callable[..., None]:
    note = model.note
    return lambda *given: note(*given)


def _wrapped(model: Noted) -> Callable[..., None]:
    @functools.wraps(Noted.note)
    def note(*given: Any) -> None:
        with torch.enable_grad():
            model.note(*given)

    return torch.no_grad()(note)


def _unbound(*given: Any) -> None:
    given[0].note(*given)


CLOSURES: dict[str, Callable[[Noted], Callable[..., Any]]] = {
    "closure": lambda model: lambda *given: model.note(*given),
    "default": lambda model: lambda *given, to=model: to.note(*given),
    "partial": lambda model: functools.partial(_unbound, model),
    "partial of a closure": lambda model: functools.partial(lambda _, *given: model.note(*given), 0),
    "two levels": _two_levels,
    "itself": _itself,
    "list": lambda model: (lambda held: lambda *given: held[0].note(*given))([model]),
    "dict of tuples": lambda model: (lambda held: lambda *given: held["a"][0].note(*given))({"a": (model,)}),
    "an object": _in_an_object,
    "method of an object": lambda model: Extractor(model).hook,
    "bound method": _bound,
    "wrapped": _wrapped,
    "features alone": lambda model: (lambda features: lambda *given: features.update(a=given[-1]))(model.features),
    "global": lambda model: note_named,
    "global in turn": lambda model: note_in_turn,
    "list that is global": lambda model: lambda *given: MODEL[0].note(*given),
}


def noted(how: str, where: str) -> Noted:
    """A model with such a hook in such a place."""
    global NAMED
    model = Noted()
    MODEL[0] = NAMED = model
    function = model.note if how == "method" else CLOSURES[how](model)
    if where == "hook":
        model.body.register_forward_hook(function)
    elif where == "pre-hook":
        model.head.register_forward_pre_hook(function)
    elif where == "attribute":
        model.handlers = [(lambda made: None), function]
    elif where == "patched forward":
        own = model.body.forward
        model.body.forward = lambda x: (function(made := own(x)), made)[1]  # type: ignore[method-assign]
    elif where == "patched method":

        def body(self: nn.Linear, x: Tensor) -> Tensor:
            made = nn.functional.linear(x, self.weight, self.bias)
            function(made)
            return made

        model.body.forward = MethodType(body, model.body)  # type: ignore[method-assign]
    return model


@functools.cache
def expected(where: str) -> tuple[int, ...]:
    return like(planned(noted("method", where), torch.randn(512, 64)))


@pytest.mark.parametrize(
    ("how", "where"),
    [*((how, "hook") for how in CLOSURES), *(("closure", where) for where in ("pre-hook", "attribute"))]
    + [("two levels", where) for where in ("patched forward", "patched method")],
)
def test_h76_a_function_that_reaches_its_model_reaches_the_copy(how: str, where: str) -> None:
    model = noted(how, where)
    found = planned(model, torch.randn(512, 64))
    assert like(found) == expected(where)
    assert model.features == {}


def test_h76_a_plan_by_hooks_that_close_over_their_model_is_followed(tmp_path: Path) -> None:
    x = torch.randn(512, 64)
    trained(planned(noted("list", "hook"), x), noted("list", "hook"), x, tmp_path, 1)


def _ones(keys: list[Any]) -> dict[Any, int]:
    return dict.fromkeys(keys, 1)


def _same(one: Any) -> Any:
    return one


def _weight(one: Any) -> Any:
    return getattr(one, "weight", one)


#: By what a hook finds out which module has called it: the container, and the key of a module in it.
LOOKED_UP: dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any], Any]]] = {
    "dict": (_ones, _same),
    "ordered": (lambda keys: OrderedDict(_ones(keys)), _same),
    "default": (lambda keys: defaultdict(int, _ones(keys)), _same),
    "counter": (Counter, _same),
    "weak dict": (lambda keys: WeakKeyDictionary(_ones(keys)), _same),
    "weak set": (WeakSet, _same),
    "set": (set, _same),
    "tuples": (set, lambda one: ("a", one)),
    "parameters": (_ones, _weight),
    "ids": (_ones, id),
    "set of ids": (set, id),
    "ids of parameters": (list, lambda one: id(_weight(one))),
}
WANTED: Any = None


@pytest.mark.parametrize(
    ("kind", "where"),
    [*((kind, "closure") for kind in LOOKED_UP)]
    + [(kind, where) for kind in ("weak dict", "tuples", "ids") for where in ("global", "object")],
)
def test_h76_modules_that_a_hook_looks_up_are_those_of_the_copy(kind: str, where: str) -> None:
    global WANTED
    model, kept = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), list[Tensor]()
    make, of = LOOKED_UP[kind]
    wanted = make([of(model[2]), of(model[0])])
    before = [*wanted]
    WANTED, holder = wanted, SimpleNamespace(wanted=wanted)
    hooks: dict[str, Callable[..., None]] = {
        "closure": lambda module, given, made: kept.append(made.sin().exp()) if of(module) in wanted else None,
        "global": lambda module, given, made: kept.append(made.sin().exp()) if of(module) in WANTED else None,
        "object": lambda module, given, made: kept.append(made.sin().exp()) if of(module) in holder.wanted else None,
    }

    def loss(made: Tensor) -> Tensor:
        assert len(kept) == 2
        return made.mean() + kept[0].mean() + kept[1].mean()

    for module in model:
        module.register_forward_hook(hooks[where])
    assert planned(model, torch.randn(64, 64), loss=loss).moved_bytes > 0
    assert [*wanted] == before, "what is the user's stays"
    assert kept == []


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_h76_hooks_of_backward_reach_the_copy(kind: str) -> None:
    model, seen = Noted(), list[Tensor]()

    def note(*given: Any) -> None:
        model.note(*given)
        seen.append(given[-1][0])

    getattr(model.head, kind)(note)
    assert planned(model, torch.randn(512, 64)).moved_bytes > 0
    assert (model.features, seen) == ({}, [])


def test_h76_what_a_hook_notes_the_loss_finds_and_the_user_does_not() -> None:
    model, features, calls, drawn, cached = nn.Linear(64, 256), {"a": [0]}, 0, random.Random(3), []
    state = drawn.getstate()

    @functools.lru_cache
    def table(length: int) -> Tensor:
        cached.append(length)
        return torch.ones(length, 1)

    def note(module: nn.Module, given: Any, made: Tensor) -> None:
        nonlocal calls
        calls += 1
        features["a"].append(made)  # type: ignore[arg-type]

    def loss(made: Tensor) -> Tensor:
        (noted,) = features["a"][1:]
        assert calls == 1
        return (noted * table(len(made))).exp().mean() * drawn.random()  # type: ignore[operator]

    model.register_forward_hook(note)
    x = torch.randn(512, 64)
    assert planned(model, x, loss=loss).moved_bytes > 0
    assert (features, calls, drawn.getstate(), cached) == ({"a": [0]}, 0, state, [])
    assert table.cache_info().currsize == 0


class Auxiliary(nn.Linear):
    """Leaves a second loss in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.aux = made.exp().mean()
        return made


@pytest.mark.parametrize("how", ["closure", "object", "default"])
def test_h76_a_loss_reads_an_attribute_of_the_model_of_the_copy(how: str) -> None:
    model = Auxiliary(64, 256)

    class Trainer:
        def __init__(self) -> None:
            self.model, self.lock = model, threading.Lock()

        def loss(self, made: Tensor) -> Tensor:
            return made.square().mean() + self.model.aux

    losses: dict[str, Any] = {
        "closure": lambda made: made.square().mean() + model.aux,
        "object": Trainer().loss,
        "default": lambda made, of=model: made.square().mean() + of.aux,
    }
    assert planned(model, torch.randn(512, 64), loss=losses[how]).moved_bytes > 0
    assert not hasattr(model, "aux")
