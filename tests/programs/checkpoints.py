"""Checkpoints of all kinds inside of the context and around it, and validation between steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.programs import Flag, Run, leaf, program, raises, step
from tests.programs.in_place import everything_has_left
from tests.programs.parts.blocks import ROWS, WIDTH, blocks, gradients
from tests.programs.parts.wrappers import parts_of, wrapped_pair

aten = torch.ops.aten


def saving(
    *operators: object,
    policy: object = CheckpointPolicy.MUST_SAVE,
    see: Callable[[Tensor], object] = lambda tensor: None,
) -> Any:
    """Returns a policy that saves what ``operators``, or all that torch asks about, return."""

    def policy_fn(context: Any, operator: object, *arguments: object, **named: object) -> object:
        if operators and operator not in operators:
            return CheckpointPolicy.PREFER_RECOMPUTE
        see(context.op_output)
        return policy

    return policy_fn


def selectively(policy: Any, function: Callable[..., Tensor], *inputs: Any, **options: bool) -> Tensor:
    """Calls ``function`` in a checkpoint that saves by ``policy``."""
    contexts = partial(create_selective_checkpoint_contexts, policy, **options)
    result: Tensor = checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)
    return result


for _name, _mode, _outside in (("no-grad", torch.no_grad, True), ("inference-mode", torch.inference_mode, False)):
    # BatchNorm writes to the statistics that it saved the step before.
    @program(f"H22-a-validation-pass-in-{_name}", Flag.EAGER, Flag.SOURCES_CHANGE)
    def _(run: Run, mode: Callable[[], AbstractContextManager[object]] = _mode, outside: bool = _outside) -> object:
        model, losses = nn.Sequential(*blocks(2), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)), []
        for seed in range(3):
            model.train()
            with run.around:
                loss = model(leaf(ROWS, WIDTH, seed=seed)).square().mean()
            model.eval()
            first, second = (mode(), run.around) if outside else (run.around, mode())
            with first, second:
                losses.append(model(leaf(ROWS, WIDTH, seed=50)).mean().item())
            loss.backward()  # validation came between forward and backward
        return losses, gradients(model)


@program("H23-backward-inside-the-context", Flag.EAGER, Flag.NOTHING_BACK)
def _(run: Run) -> object:
    model = nn.Sequential(*blocks(2))
    for seed in range(3):
        with run.around:
            model(leaf(ROWS, WIDTH, seed=seed)).square().mean().backward()
    return gradients(model)


#: Calls a function in a checkpoint.
HOW: dict[str, Callable[..., Tensor]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(selectively, saving(aten.mm.default, aten.addmm.default)),
}


def _add(kind: str, inside: bool) -> None:
    # A reentrant recomputation inside the context is seen, and stays: it is asked for at once.
    least = (0.0 if kind == "reentrant" else 0.7) if inside else 0.9
    name, flags = f"H23-{kind}", [Flag.NOTHING_BACK] if inside else []

    @program(f"{name}{'-backward-inside' * inside}", Flag.EAGER, *flags, moved=least)
    def _(run: Run) -> object:
        model, x = blocks(), leaf(ROWS, WIDTH)
        with run.around:
            h = x * 2
            for block in model:
                h = HOW[kind](block, h)
            loss = h.square().mean()
            del h
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return x.grad, gradients(model)


def around_the_context(run: Run, kind: str) -> object:
    """Runs each of several blocks inside of the context, and that inside of a checkpoint."""
    model, x = blocks(), leaf(ROWS, WIDTH)

    def offloaded(block: nn.Module, x: Tensor) -> Tensor:
        with run.around:
            return block(x)

    h = x * 2
    for block in model:
        h = HOW[kind](partial(offloaded, block), h)
    h.square().mean().backward()
    return x.grad, gradients(model)


for _kind in HOW:
    _add(_kind, inside=False)
    _add(_kind, inside=True)
    if _kind != "reentrant":
        program(f"H23-around-the-context-{_kind}", Flag.EAGER)(partial(around_the_context, kind=_kind))


@step(
    "H62-a-checkpoint-computes-again-with-the-attributes-of-its-inputs", Flag.EAGER, Flag.NO_CAPTURE, Flag.NO_CHECKPOINT
)
def _() -> tuple[Callable[..., Tensor], list[Any]]:
    def block(layer: nn.Module, x: Tensor, mask: Any) -> Tensor:
        return torch.where(mask, 0.0, layer(x) * mask.scale)

    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        mask: Any = leaf(32, 32, seed=2, grad=False) > 0
        mask.scale = 2.0
        return checkpoint(block, layer, x * 2, mask, use_reentrant=False)

    return forward, [nn.Linear(32, 32), leaf(32, 32)]


# -- what a policy saves ----------------------------------------------------------------------------------------------

_POLICIES = {
    "must": saving(aten.addmm.default),
    "prefer": saving(aten.addmm.default, policy=CheckpointPolicy.PREFER_SAVE),
    "bool": lambda context, operator, *arguments, **named: operator is aten.addmm.default,
    "list": [aten.addmm.default],
}
for _policy in _POLICIES:

    @program(f"H73-a-policy-of-{_policy}", Flag.EAGER)
    def _(run: Run, policy: str = _policy) -> object:
        model, x = blocks(), leaf(ROWS, WIDTH)
        for _ in range(2):
            with run.around:
                h = x * 2
                for block in model:
                    h = selectively(_POLICIES[policy], block, h)
                loss = h.square().mean()
            del h
            loss.backward()
        return x.grad, gradients(model)


def _attention(norm: nn.Module, x: Tensor) -> Tensor:
    """Calls operators that return several tensors, views, numbers and none."""
    q, k, v = norm(x).view(ROWS, 3, 4, -1).permute(1, 2, 0, 3)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    values, places = y.transpose(0, 1).flatten(1).topk(8)
    return torch.cat([values.sin(), y.exp().flatten(1).t()[:4].t().reshape(ROWS, -1)], 1) * places.max()


step("H73-everything-is-saved", Flag.NO_CHECKPOINT)(
    lambda: (
        lambda norm, x: selectively(saving(), torch.sin, selectively(saving(), _attention, norm, x * 2)),
        [nn.LayerNorm(96), leaf(ROWS, 96)],
    )
)


@program("H73-H13-wrappers", Flag.EAGER)
def _(run: Run) -> object:
    x, w = wrapped_pair(16, 16), wrapped_pair(16, 16, seed=4)
    with run.around:
        y = selectively(saving(aten.mm.default, aten.t.default), lambda x: (x @ w).sin().t().cos() @ w, x * 2)
        y = y.sin().sum()
    y.backward()
    return parts_of(x.grad), parts_of(w.grad)


def _add_nested(both: bool, inside: bool) -> None:
    name = f"H73-{'both' if both else 'the-inner'}-of-two-checkpoints{'-backward-inside' * inside}"

    # What is computed again, in backward, is asked for at once.
    @program(name, Flag.EAGER, *([Flag.NOTHING_BACK] if inside else []), moved=0.3 if inside else 0.9)
    def _(run: Run) -> object:
        w, x = leaf(WIDTH, WIDTH, seed=2), leaf(ROWS, WIDTH)

        def layer(h: Tensor) -> Tensor:
            return (h.cos() @ w).sin()

        def layers(h: Tensor) -> Tensor:
            return layer(selectively([aten.mm.default], layer, layer(h)))

        with run.around:
            y = selectively([aten.mm.default] if both else [], layers, x * 2).square().sum()
            if inside:
                y.backward()
        if not inside:
            y.backward()
        return x.grad, w.grad


for _both in (False, True):
    for _inside in (False, True):
        _add_nested(_both, _inside)


def _changing(convolution: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
    h = F.relu(convolution(x), inplace=True)
    h = h.view(2, 8, -1).mul_(1.5)
    h = linear(h.mean(-1))
    return h.sin_().square() + h


def _offloaded(operators: tuple[Any, ...], *inputs: Any) -> list[Tensor]:
    policies = CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD
    *models, x = inputs
    calls = (selectively(saving(*operators, policy=policy), _changing, *models, x * 2) for policy in policies)
    return [(y * 2).sigmoid() for y in calls]


#: What is to be offloaded, of a block that changes it in place: then it is computed again.
for _name, _operators in {
    "everything": (),
    "what-is-changed-after-it": (aten.convolution.default,),
    "what-changes-it-too": (aten.convolution.default, aten.relu_.default),
    "what-changes-alone": (aten.relu_.default, aten.mul_.Tensor, aten.sin_.default),
    "a-view": (aten.view.default, aten.mul_.Tensor),
    "what-is-not-changed": (aten.mean.dim, aten.square.default),
}.items():
    step(f"H46-{_name}-is-to-be-offloaded", Flag.EAGER, Flag.NO_CHECKPOINT, Flag.SOURCES_CHANGE, moved=0.5)(
        lambda operators=_operators: (
            partial(_offloaded, operators),
            [nn.Conv2d(3, 8, 3), nn.Linear(8, 8), leaf(2, 3, 16, 16)],
        )
    )


@program("H73-a-graph-of-saved-results-that-is-dropped", Flag.EAGER, Flag.NOTHING_BACK)
def _(run: Run) -> object:
    for _ in range(2):
        with run.around:
            y = selectively(saving(aten.sin.default), lambda x: x.sin().cos(), leaf(ROWS, WIDTH) * 2).sum()
        del y
    return None


for _allowed in (False, True):
    # What is meant then is what is there when backward asks: it stays.
    @program(f"H73-a-change-{'that-is-allowed' * _allowed or 'raises'}", Flag.EAGER, Flag.SOURCES_CHANGE, moved=0.4)
    def _(run: Run, allowed: bool = _allowed) -> object:
        x, policy = leaf(ROWS, WIDTH), saving(aten.sin.default)
        options = {"allow_cache_entry_mutation": True} if allowed else {}
        with run.around:
            y = selectively(policy, lambda x: x.sin().mul_(2).cos(), x * 2, **options).sum()
            other = (x * 3).sin().cos().sum()
        everything_has_left(run.around)
        with nullcontext() if allowed else raises("cached during selective activation checkpoint has been mutated"):
            y.backward()
        other.backward()
        return x.grad
