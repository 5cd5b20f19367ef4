"""Hooks that look up which module has called them, in a container that has modules, or their ids, as keys."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from tests.planning.programs import CONFIG, slow

pytestmark = pytest.mark.usefixtures("one_thread")


#: By what a hook finds out which module has called it.
LOOKED_UP: dict[str, Callable[[list[nn.Module]], Any]] = {
    "dict": lambda modules: dict.fromkeys(modules, 1),
    "ordered": lambda modules: OrderedDict((module, 1) for module in modules),
    "default": lambda modules: defaultdict(int, dict.fromkeys(modules, 1)),
    "counter": Counter,
    "weak dict": lambda modules: WeakKeyDictionary(dict.fromkeys(modules, 1)),
    "weak set": WeakSet,
    "set": set,
    "tuples": lambda modules: {("a", module) for module in modules},
    "parameters": lambda modules: {module.weight: 1 for module in modules},
    "ids": lambda modules: {id(module): 1 for module in modules},
    "set of ids": lambda modules: {*map(id, modules)},
    "ids of parameters": lambda modules: [id(module.weight) for module in modules],
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
    of = {"tuples": lambda one: ("a", one), "parameters": lambda one: getattr(one, "weight", one)}.get(kind)
    of = of or ((lambda one: id(getattr(one, "weight", one) if "param" in kind else one)) if "ids" in kind else None)
    wanted = LOOKED_UP[kind]([model[2], model[0]])
    before = [*wanted]
    WANTED, holder = wanted, SimpleNamespace(wanted=wanted)

    def closure(module: nn.Module, given: Any, made: Tensor) -> None:
        if (of(module) if of else module) in wanted:
            kept.append(made.sin().exp())

    def named(module: nn.Module, given: Any, made: Tensor) -> None:
        if (of(module) if of else module) in WANTED:
            kept.append(made.sin().exp())

    def held(module: nn.Module, given: Any, made: Tensor) -> None:
        if (of(module) if of else module) in holder.wanted:
            kept.append(made.sin().exp())

    def loss(made: Tensor) -> Tensor:
        assert len(kept) == 2
        return made.mean() + kept[0].mean() + kept[1].mean()

    for module in model:
        module.register_forward_hook({"closure": closure, "global": named, "object": held}[where])
    assert eo.plan(model, torch.randn(64, 64), loss=loss, device=slow(), policy="max", config=CONFIG).moved_bytes > 0
    assert [*wanted] == before, "what is the user's stays"
    assert kept == []
