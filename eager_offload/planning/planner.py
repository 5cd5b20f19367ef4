"""``plan``: from a model and its inputs to what a step of it will take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eager_offload._torch import is_compiled
from eager_offload.config import OffloadConfig, parse_size
from eager_offload.errors import ConfigError
from eager_offload.machine import LAUNCH_SECONDS, TABLE, Machine, machine_of
from eager_offload.matched_modules import patterns_of
from eager_offload.planning import POLICIES
from eager_offload.planning.decide import Outcome, RehearsedSolver, TracedSolver
from eager_offload.planning.files import Point
from eager_offload.planning.plan import Plan
from eager_offload.planning.predict import Problem
from eager_offload.planning.program import Program
from eager_offload.planning.ranks import Asked, agreed, are_several, model_text
from eager_offload.planning.solve import EQUAL
from eager_offload.schedule import Windows, largest_of

#: The device that this process has.
_HERE = "here"
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
    optimizer_bytes: int | str = 0,
    policy: str = "least",
    recompute: bool = False,
    steps: int = 0,
    config: OffloadConfig | Mapping[str, Any] | None = None,
) -> Plan:
    """Says what a training step will take on a device, and which saved tensors are to move, before anything runs.

        plan = eo.plan(model, tokens, device="h200", device_budget="40GiB")
        print(plan)

    Without ``steps`` the model is traced as it would run on a CPU: forward and backward on tensors without bytes. A
    kernel that only an accelerator has is not seen; the plan names the functions whose saves depend on it. Nothing of
    the program's changes: not the model, not what its functions and ``loss`` reach beside it, not random numbers, not
    what is compiled. A compiled model is planned as it is written. Nothing is allocated but for integers and booleans.
    Times are those of a roofline: see :class:`Machine`.

    Args:
        model: real, or on ``meta``, in the mode in which it is trained.
        inputs: what it is called with: a tensor, a tuple or list of arguments, or a mapping of keywords. Integers and
            booleans in it should be real ones, since models look at masks and the like.
        loss: makes the loss of what the model returns; ``None``: what it returns itself, or its ``loss``.
        device: ``"here"``, which is measured; ``"h200"``, ``"h100"``, ``"a100"``, ``"l40s"`` or ``"rtx4090"``; or a
            :class:`Machine`.
        device_budget: bytes of the device that the step may take, or a text such as ``"40GiB"``; ``None`` or
            ``"auto"``: all that it has; of the device that is here, what is free, less a tenth.
        host_budget: bytes that may rest in the tier at one time, in the same form; ``None``: any number. What finds no
            room there stays. It is the ``host_budget`` of the ``Offload`` too, and an eighth of it is left for what its
            slabs round.
        optimizer_bytes: that are there beside parameters and gradients all the time: the states of an optimizer.
        policy: ``"least"``: the least movement that fits the budget, where compute waits as little as can be;
            ``"free"``: only what the link hides; ``"max"``: all that may move.
        recompute: whether modules may be computed again in backward, where that takes less time than moving what they
            save: :meth:`Plan.apply` puts checkpoints around them. Only with ``policy="least"``.
        steps: so many real steps are run in place of tracing one, without an optimizer, and their operators timed: for
            models whose steps depend on numbers. 2 are enough: the first one is slower. Gradients, buffers, attributes
            and random numbers are afterwards what they were. Only with ``device="here"``, on a CPU, in one process.
        config: the settings of the ``Offload`` that will be used: ``min_bytes``, ``max_inflight_bytes``,
            ``prefetch_bytes``, ``skip`` and ``codec`` are heeded, and ``device_budget`` and ``host_budget`` where these
            are not given here. As for :class:`Offload`, which has all of them from ``plan=...``.

    Where ``torch.distributed`` has a process group of several ranks, all of them have to call it together. They get one
    plan, by what rank 0 gives and for the least of their budgets; an error of one is an error of all.

    Returns:
        The plan. Where nothing fits, its ``fits`` is false.

    Raises:
        ConfigError: an unknown device or policy, a size below 0, a pattern of ``skip`` that matches no module,
            ``keep_last_bytes`` beside it, or ``steps`` that cannot be timed.
        PlanError: what the model does depends on numbers that no trace has, it calls what torch does not
            differentiate on a CPU, such as FlexAttention, or it changes what is outside of it where that cannot be put
            back; the text names the module. An error of the model's own comes as it is, with a note that names the
            module.
    """

    def ask() -> Asked:
        _check_what(model, loss, policy, recompute=recompute)
        _check_steps(steps, device, recompute=recompute)
        given = OffloadConfig.from_given(config, {})
        if given.keep_last_bytes != "auto":
            raise ConfigError(
                f"keep_last_bytes={given.given('keep_last_bytes')!r} does not go with a plan, which says itself what "
                "stays: leave it out, give a device_budget, or mark what has to stay with eager_offload.keep"
            )
        settings = replace(given, device_budget=None, policy="max", max_slowdown=None)
        if host_budget is not None:
            settings = replace(settings, host_budget=host_budget)
        named = given.device_budget if device_budget is None else device_budget
        budget = None if named is None or named == "auto" else parse_size(named, "device_budget")
        written = given.written("device_budget") if device_budget is None else device_budget
        if isinstance(written, str):
            OffloadConfig(device_budget=written).check_unit_of_budget(partial(_bytes_of, model), "the model alone")
        standing = parse_size(optimizer_bytes, "optimizer_bytes")
        machine = _machine(device, settings)
        if budget is None:
            budget = machine.memory_bytes
            if not budget:
                raise ConfigError(
                    f"device_budget=None is not accepted, since the memory of {machine.name} is not known"
                )
        is_cpu = device == _HERE and torch.accelerator.current_accelerator(check_available=True) is None
        text = model_text(model) if are_several() else ""
        return Asked(settings, machine, budget, standing, steps, text, is_cpu)

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
    from eager_offload.planning.real_steps import record  # they bring in what only tracing needs
    from eager_offload.planning.target import CPU
    from eager_offload.planning.trace import trace

    settings, machine, budget = asked.settings, asked.machine, asked.budget

    def traced(again: Sequence[str] = ()) -> Problem:
        least, patterns, rules = settings.size("min_bytes"), patterns_of(settings), settings.codec_rules
        if asked.steps:
            program, seconds = record(model, inputs, loss, asked.steps, min_bytes=least, patterns=patterns, rules=rules)
        else:
            target = CPU if asked.is_cpu else machine.kernels
            program = trace(
                model, inputs, loss, min_bytes=least, patterns=patterns, again=again, rules=rules, target=target
            )
            seconds = tuple(program.seconds(machine))
        windows, rests = _windows(settings, program, machine), settings.host_budget
        room = rests - rests // _ROUNDED if isinstance(rests, int) else None
        links = machine.out, machine.back, windows.inflight, windows.prefetch
        problem = Problem(program, seconds, *links, room, machine.memory)
        problem = problem.with_more(asked.standing)
        return problem.packing(pays=True) if recompute and problem.packs else problem

    name, problem = type(model).__name__, traced()
    if recompute:
        solver = TracedSolver(problem, traced, machine.launch_seconds)
        found, least = solver.within(budget), Point.least_of(solver.least)
    else:
        found, least = _solve(problem, machine, budget, policy), None
    # What it was worked out for is what is in force from the first step on.
    settings = replace(settings, max_inflight_bytes=found.problem.window, prefetch_bytes=found.problem.ahead)
    decided = found.problem, found.moves, settings, found.course, found.again, found.whole
    is_eager = not any(map(is_compiled, (*model.modules(), loss)))
    return Plan(name, machine, budget, policy, *decided, least, asked.steps, not is_eager)


def _windows(settings: OffloadConfig, program: Program, machine: Machine) -> Windows:
    """Returns the windows of a step that goes like ``program``."""
    windows = settings.windows(lambda: machine.memory_bytes or None)
    windows.begin(program.movable_bytes, largest_of(storage.nbytes for storage in program.storages))
    return windows


def _solve(problem: Problem, machine: Machine, budget: int, policy: str) -> Outcome:
    """What is to move, and with which of the codecs that the user allows: all, those that pay, or none."""

    def outcome(problem: Problem) -> Outcome:
        solver = RehearsedSolver(problem, machine.launch_seconds)
        return solver.within(budget) if policy == "least" else solver.free() if policy == "free" else solver.all()

    def cost(found: Outcome) -> tuple[float, ...]:
        storages, over = found.problem.program.storages, max(found.peak_bytes - budget, 0)
        moved = [storages[number] for number, moves in enumerate(found.moves) if moves]
        seconds = round(found.step_seconds / (problem.compute_seconds * EQUAL or 1.0))
        if policy == "free":
            return over, -sum(one.nbytes for one in moved), seconds
        return over, seconds, sum(one.moved_bytes for one in moved)

    problems = [problem]
    if problem.packs and policy != "max":
        problems += [problem.packing(pays=True), problem.packing(pays=False)]
    known = {one.program.storages: one for one in problems}
    return min(map(outcome, known.values()), key=cost)


def _check_what(model: object, loss: object, policy: str, *, recompute: object) -> None:
    """Raises ``ConfigError`` where that cannot be planned, or not to that aim."""
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


def _bytes_of(model: nn.Module) -> int:
    return sum(one.numel() * one.itemsize for one in model.parameters())


def _check_steps(steps: object, device: str | Machine, *, recompute: bool) -> None:
    """Raises ``ConfigError`` where so many real steps cannot be timed."""
    if type(steps) is not int or steps < 0:
        raise ConfigError(f"steps={steps!r} is not accepted: steps takes a whole number, 0 or more")
    if not steps:
        return
    why = ""
    if device != _HERE:
        why = f'real steps take the time of this machine: take device="here" in place of {device!r}'
    elif recompute:
        why = "what is computed again is decided by a trace: leave recompute out"
    elif are_several():
        why = "rank 0 alone would run them, and wait for the others: plan in one process"
    elif torch.accelerator.current_accelerator(check_available=True) is not None:
        why = "operators of an accelerator run after their calls, which does not tell their time: leave steps out"
    if why:
        raise ConfigError(f"steps={steps!r} is not accepted: {why}")


def _machine(device: str | Machine, settings: OffloadConfig) -> Machine:
    """The device that a user names; raises ``ConfigError`` for another name."""
    if isinstance(device, Machine):
        return device
    if device == _HERE:
        return here(settings)
    if (found := TABLE.get(str(device))) is not None:
        return found
    raise ConfigError(
        f"device={device!r} is not accepted: device takes {_or((_HERE, *TABLE))}, or an eager_offload.Machine"
    )


def here(settings: OffloadConfig) -> Machine:
    """The device of this process (:func:`~eager_offload.machine.machine_of`) and the tier that it offloads to, measured
    in about a second: the accelerator and host memory, or the CPU and the disk."""
    from eager_offload.compile.cost import disk_bandwidth
    from eager_offload.runtime.accelerator import accelerator_runtime
    from eager_offload.runtime.base import Direction
    from eager_offload.runtime.host import host_runtime
    from eager_offload.tiers.limits import host_headroom

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        device, memory_bytes = torch.device("cpu"), host_headroom().nbytes
    else:
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        # Other processes and the driver have some of it, and an allocator cannot hand out all: as device_budget="auto".
        used, free = accelerator_runtime().memory(device), accelerator_runtime().free_memory(device)
        memory_bytes = int((0 if used is None else used.used) + 0.9 * free)
    if settings.tier == "disk" or (accelerator is None and settings.tier == "auto"):
        disk = disk_bandwidth(settings.to_text())
        out, back = disk.write, disk.read
    else:
        runtime = host_runtime() if accelerator is None else accelerator_runtime()
        out, back = (runtime.bandwidth(device, direction) for direction in (Direction.OUT, Direction.IN))
    return replace(
        machine_of(device),
        name=f"here ({device})",
        out=out,
        back=back,
        memory_bytes=memory_bytes,
        launch_seconds=0.0 if accelerator is None else LAUNCH_SECONDS,
    )


def _or(names: tuple[str, ...]) -> str:
    return " or ".join(f'"{name}"' for name in names)
