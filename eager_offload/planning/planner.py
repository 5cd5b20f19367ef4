"""``plan``: from a model and its inputs to what a step of it will take.

[Note: what is computed again]
A model is mostly blocks that repeat. Computing every, every second or every fourth of them again, or in each block all
that attends to nothing, comes within a few percent of what a search among all modules finds; so these are traced and
replayed, and the fastest one that fits is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from eager_offload.config import OffloadConfig, parse_size
from eager_offload.core.schedule import bounded_window
from eager_offload.errors import ConfigError, PlanError
from eager_offload.planning import OF_TORCHSCRIPT, POLICIES
from eager_offload.planning.figures import Again, Point
from eager_offload.planning.machine import TABLE, Machine, here
from eager_offload.planning.plan import Plan
from eager_offload.planning.program import Problem, Program, kind_of, modules_around
from eager_offload.planning.replay import WINDOWS, Chooser
from eager_offload.planning.sharding import (
    Asked,
    agreed,
    are_several,
    check_mesh,
    model_text,
    on_one_device,
    shape_on,
    sharding_of,
)
from eager_offload.planning.states import Optimizing, States, states_of
from eager_offload.torch_private.inductor import is_compiled
from eager_offload.torch_private.memory import tree_iter

#: The device that this process has.
_HERE = "here"
#: Of a step, the part that compute waits where it may be worth much to compute something again.
_MUCH = 0.1
#: Of a budget of the tier, one part in so many is left for what its slabs round.
_ROUNDED = 8


def plan(
    model: nn.Module,
    inputs: object,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    device: str | Machine = _HERE,
    device_budget: int | str | None = None,
    host_budget: int | str | None = None,
    optimizer: Optimizing | None = torch.optim.AdamW,
    optimizer_bytes: int | str | None = None,
    mesh: tuple[int, ...] | None = None,
    accumulation: int = 1,
    policy: str = "least",
    recompute: bool = False,
    config: OffloadConfig | Mapping[str, Any] | None = None,
) -> Plan:
    """Says what a training step will take on a device, and which saved tensors are to move, before anything runs.

        plan = eo.plan(model, tokens, device="h200", device_budget="40GiB")
        print(plan)

    The model is traced: forward and backward on tensors without bytes, on the accelerator that the
    process has, or as CUDA's kernels and autocast would have it where there is none; the plan names the functions of
    which that is a guess. A copy is traced, so neither the model changes nor gradients, random numbers, what is
    compiled and the ``functools`` caches of its code. A compiled model is planned as it is written. Nothing is
    allocated but for integers and booleans. Times are those of a roofline: see :class:`Machine`.

    Args:
        model: real, or on ``meta``, in the mode in which it is trained.
        inputs: what it is called with: a tensor, a tuple or list of arguments, or a mapping of keywords, which may hold
            objects, such as a cache: they are copied. Integers and booleans in it should be real ones, since models
            look at masks and the like.
        loss: makes the loss of what the model returns; ``None``: what it returns itself, or its ``loss``.
        device: ``"here"``, which is measured; ``"h200"``, ``"h100"``, ``"a100"``, ``"l40s"`` or ``"rtx4090"``; or a
            :class:`Machine`.
        device_budget: bytes of the device that the step may take, or a text such as ``"40GiB"``; ``None`` or
            ``"auto"``: all that it has; of the device that is here, what is free, less a tenth.
        host_budget: bytes that may rest in the tier at one time, in the same form; ``None``: any number. What finds no
            room there stays. It is the ``host_budget`` of the ``Offload`` too, and an eighth of it is left for what its
            slabs round.
        optimizer: a class, an instance, or a function that makes one of a list of parameters: its states are there all
            the time, for each parameter that is trained. They are found by a step of it on tensors without bytes;
            those that an instance has count as they are. Tensors that live only while it steps are left out. ``None``:
            no states are counted, and the plan says so.
        optimizer_bytes: of its states, in place of what ``optimizer`` would have, such as those in 8 bits.
        mesh: the sizes of the mesh over which FSDP2 will shard the whole model that is given: ``(8,)``, or ``(2, 8)``
            with two replicas. The plan is that of one device, where each member of the repeated blocks is gathered
            while it runs, and one ahead. A model that ``fully_shard`` has sharded is planned as it is, without
            ``mesh``. Collectives take no time.
        accumulation: backwards to a step of the optimizer. From 2 on the gradients of the last one are there from the
            beginning, under FSDP2 in shards.
        policy: ``"least"``: the least movement that fits the budget, where compute waits as little as can be;
            ``"free"``: only what the link hides; ``"max"``: all that may move.
        recompute: whether modules may be computed again in backward, where that takes less time than moving what they
            save: every, every second or every fourth of the blocks that repeat, or what attends to nothing in each.
            :meth:`Plan.apply` puts checkpoints around them. Only with ``policy="least"``; without it the plan says in a
            line what it would bring, where compute waits for a tenth of the step or nothing fits.
        config: the settings of the ``Offload`` that will be used: ``min_bytes``, ``max_inflight_bytes``,
            ``prefetch_bytes`` and ``skip`` are heeded (the plan chooses windows that are ``"auto"``), and
            ``device_budget`` and ``host_budget`` where these are not given here. As for :class:`Offload`, which has all
            of them from ``plan=...``.

    Where ``torch.distributed`` has a process group of several ranks, all of them have to call it together. They get one
    plan, by what rank 0 gives and for the least of their budgets; an error of one is an error of all.

    Returns:
        The plan. Where nothing fits, its ``fits`` is false.

    Raises:
        ConfigError: an unknown device or policy, a size below 0, a pattern of ``skip`` that matches no module,
            ``keep_last_bytes`` beside it, an optimizer that cannot be tried, or a ``mesh`` beside a model that is
            sharded.
        PlanError: what the model does depends on numbers that no trace has (train with ``device_budget=`` then, which
            measures), it calls what torch does not
            differentiate on a CPU, such as FlexAttention, it changes a tensor outside of it, or has a module of
            TorchScript; the text names the module. Or an input cannot be copied, or something outside of the model
            holds a tensor of the trace afterwards: the text names it. An error of the model's own comes as it is, with
            a note that names the module. Or the model is sharded in another way than by ``fully_shard``.
    """

    def ask() -> Asked:
        _check_what(model, loss, policy, recompute=recompute)
        if type(accumulation) is not int or accumulation < 1:
            raise ConfigError(
                f"accumulation={accumulation!r} is not accepted: accumulation takes a whole number, 1 or more"
            )
        check_mesh(mesh)
        sharding = sharding_of(model, mesh)
        given = OffloadConfig.from_given(config, {})
        if given.keep_last_bytes != "auto":
            raise ConfigError(
                f"keep_last_bytes={given.given('keep_last_bytes')!r} does not go with a plan, which says itself what "
                "stays: leave it out, give a device_budget, or mark what has to stay with eager_offload.keep"
            )
        settings = replace(given, device_budget=None, policy="max")
        if host_budget is not None:
            settings = replace(settings, host_budget=host_budget)
        named = given.device_budget if device_budget is None else device_budget
        budget = None if named is None or named == "auto" else parse_size(named, "device_budget")
        written = given.written("device_budget") if device_budget is None else device_budget
        if isinstance(written, str):
            OffloadConfig(device_budget=written).check_unit_of_budget(
                lambda: sum(one.numel() * one.itemsize for one in model.parameters()), "the model alone"
            )
        states: States | None = None
        if optimizer_bytes is not None:
            states = States("optimizer", parse_size(optimizer_bytes, "optimizer_bytes"))
        elif optimizer is not None:
            meshes: dict[Tensor, tuple[int, ...] | None] = {}
            if isinstance(loss, nn.Module):
                meshes.update((one, None) for one in loss.parameters())
            meshes.update((one, mesh) for one in model.parameters())
            states = states_of(optimizer, [*meshes], lambda one: shape_on(one, meshes.get(one)))
        machine: Machine | None = device if isinstance(device, Machine) else TABLE.get(str(device))
        if device == _HERE:
            machine = here(settings)
        elif machine is None:
            raise ConfigError(
                f"device={device!r} is not accepted: device takes {_or((_HERE, *TABLE))}, or an eager_offload.Machine"
            )
        if budget is None:
            budget = machine.memory_bytes
            if not budget:
                raise ConfigError(
                    f"device_budget=None is not accepted, since the memory of {machine.name} is not known"
                )
        text = model_text(model) if are_several() else ""
        return Asked(settings, machine, budget, states, text, sharding, accumulation > 1)

    return agreed(ask, lambda asked: _make(asked, model, inputs, loss, policy, recompute=recompute))


def _make(
    asked: Asked,
    model: nn.Module,
    inputs: object,
    loss: Callable[[Any], Tensor] | None,
    policy: str,
    *,
    recompute: bool,
) -> Plan:
    from eager_offload.planning.trace import trace  # it brings in what only tracing needs

    settings, machine, budget = asked.settings, asked.machine, asked.budget

    def traced(again: Sequence[str] = ()) -> tuple[Program, Sequence[float]]:
        least, patterns = settings.size("min_bytes"), settings.skip
        seen = trace(model, inputs, loss, min_bytes=least, patterns=patterns, again=again, target=machine.kernels)
        seconds = tuple(seen.seconds(machine))
        return on_one_device(seen, asked.sharding, accumulates=asked.accumulates), seconds

    whole = _chooser(*traced(), asked)
    least = whole.least
    match policy:
        case "least":
            chosen = whole.within(budget)
        case "free":
            chosen = whole.hidden()
        case _:
            chosen = whole.share(1.0)
    names: tuple[str, ...] = ()
    steps = {names: whole}
    may_again: Again | None = None
    tried: Sequence[tuple[str, ...]] = ()
    if recompute:
        tried = _positions(whole.problem.program)
    elif policy == "least" and (
        chosen.peak_bytes > budget or whole.nothing.step_seconds < (1 - _MUCH) * chosen.step_seconds
    ):  # nothing fits, or compute waits: one is enough to say that to compute again is worth while
        tried = _positions(whole.problem.program)[1:2]
    for again in tried:
        try:
            step = traced(again)
        except Exception:  # whatever a module raises that does another thing the second time
            continue
        steps[again] = _chooser(*step, asked)
    if tried:
        found = {again: step.within(budget) for again, step in steps.items()}
        names = min(found, key=lambda again: (max(found[again].peak_bytes - budget, 0), found[again].step_seconds))
        best = found[names]
        if recompute:
            chosen, least = best, min((one.least for one in steps.values()), key=attrgetter("peak_bytes"))
        elif names:
            may_again, names = Again(names, best.peak_bytes, best.step_seconds), ()
    # What it was worked out for is what is in force from the first step on.
    settings = replace(settings, max_inflight_bytes=chosen.problem.window, prefetch_bytes=chosen.problem.ahead)
    return Plan(
        type(model).__name__,
        machine,
        budget,
        policy,
        *chosen,
        settings,
        Point.least_of(least),
        steps[names].windows,
        names,
        whole.problem if names else None,
        whole.windows if names else (),
        may_again,
        any(map(is_compiled, (*model.modules(), loss))),
        asked.states,
        1 if asked.sharding is None else asked.sharding.shards,
    )


def _chooser(program: Program, seconds: Sequence[float], asked: Asked) -> Chooser:
    settings, machine = asked.settings, asked.machine
    device_bytes, movable = machine.memory_bytes or None, program.movable_bytes
    windows = settings.windows(lambda: device_bytes, [storage.nbytes for storage in program.storages])
    tried: set[int] = set()
    if settings.max_inflight_bytes == settings.prefetch_bytes == "auto":
        tried = {windows.inflight, *(bounded_window(one, movable, device_bytes) for one in WINDOWS)}
    rests = settings.host_budget
    states = 0 if asked.states is None else asked.states.nbytes
    problem = Problem(
        replace(program, other_bytes=tuple(one + states for one in program.other_bytes)),
        seconds,
        machine.out,
        machine.back,
        windows.inflight,
        windows.prefetch,
        machine.launch_seconds,
        rests - rests // _ROUNDED if isinstance(rests, int) else None,
    )
    return Chooser(problem, sorted(tried))


def _check_what(model: object, loss: object, policy: str, *, recompute: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={type(model).__name__} is not accepted: model takes a torch.nn.Module")
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss={loss!r} is not accepted: loss takes a function that makes the loss")
    if type(recompute) is not bool:
        raise ConfigError(f"recompute={recompute!r} is not accepted: recompute takes True or False")
    if policy not in POLICIES:
        raise ConfigError(f"policy={policy!r} is not accepted: policy takes {_or(POLICIES)}")
    if recompute and policy != "least":
        raise ConfigError(f"recompute={recompute!r} is not accepted: with policy={policy!r} nothing is computed again")
    for part in (model, loss):
        for name, module in part.named_modules() if isinstance(part, nn.Module) else ():
            what = f"module {name!r}" if name else "the loss" if part is loss else "the model itself"
            if isinstance(module, torch.jit.ScriptModule):
                raise PlanError(f"{what} is a module of {OF_TORCHSCRIPT}")
            for key, value in vars(module).items():
                if key != "_modules" and any(isinstance(one, torch.jit.ScriptModule) for one in tree_iter(value)):
                    raise PlanError(f"{key!r} of {what} has a module of {OF_TORCHSCRIPT}")


def _or(names: tuple[str, ...]) -> str:
    return " or ".join(f'"{name}"' for name in names)


#: Of so many blocks one is computed again.
_EVERY = (1, 2, 4)
#: Parts of the names of operators that attend: a product of products, and what is between them.
_ATTENDS = ("attention", "softmax")


def _positions(program: Program) -> list[tuple[str, ...]]:
    """Returns names of modules that may be computed again together, the most bytes first: see
    [Note: what is computed again]."""
    saved: dict[str, int] = defaultdict(int)
    for storage in program.storages:
        for name in modules_around(program.modules[storage.module]):
            saved[name] += storage.nbytes
    repeatable = [program.modules[number] for number in program.repeatable]
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in repeatable:
        if (kind := kind_of(name)) != name and saved[name]:
            kinds[kind].append(name)
    repeated = [names for names in kinds.values() if len(names) > 1]
    # Of one that is all of another, the outer one, whose name is shorter.
    blocks = max(repeated, key=lambda names: (sum(saved[name] for name in names), -len(names[0])), default=list[str]())
    attend = set[str]()
    for op in program.ops:
        if any(part in op.name for part in _ATTENDS):
            attend.update(modules_around(program.modules[op.module]))
    inner = []
    for block in blocks:  # right below it what saves most of that which attends to nothing
        below = [one for one in repeatable if one.startswith(f"{block}.") and "." not in one[len(block) + 1 :]]
        inner += sorted((one for one in below if one not in attend and saved[one]), key=saved.__getitem__)[-1:]
    found = [tuple(blocks[::every]) for every in _EVERY if every < len(blocks)]
    return [*found, tuple(inner)] if inner else found
