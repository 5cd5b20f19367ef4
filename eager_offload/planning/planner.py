"""``plan``: from a model and its inputs to what a step of it will take.

[Note: what is computed again]
A model is mostly blocks that repeat. Each has a few levels, by what a second of the device buys: what is cheaper for a
byte than the level's price is computed again, the rest is kept, and of that a part moves. All blocks have one level, or
two that alternate evenly: a link that is busy with what some blocks keep hides behind the compute of the others. Of
these mixtures the fastest one that fits is taken. Only the step without checkpoints is traced (``levels.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eager_offload.config import OffloadConfig, parse_size
from eager_offload.core.schedule import bounded_window
from eager_offload.errors import ConfigError, PlanError
from eager_offload.planning import OF_TORCHSCRIPT, POLICIES
from eager_offload.planning.figures import Again, Point
from eager_offload.planning.levels import Kept, Mixture, Recording, computed_again, levels_of, mixtures
from eager_offload.planning.machine import TABLE, Machine, here
from eager_offload.planning.plan import Plan
from eager_offload.planning.program import Problem, Program, floor_seconds, kind_of, modules_around
from eager_offload.planning.replay import WINDOWS, Chooser, Chosen
from eager_offload.planning.sharding import (
    Asked,
    Mesh,
    agreed,
    are_several,
    mesh_of,
    model_text,
    on_one_device,
    shape_on,
    sharding_of,
)
from eager_offload.planning.states import Optimizing, States, states_of
from eager_offload.tiers.limits import ranks_here
from eager_offload.torch_private.inductor import is_compiled
from eager_offload.torch_private.memory import tree_iter

#: The device that this process has.
_HERE = "here"
#: Of a step, the part that compute waits where it may be worth much to compute something again.
_MUCH = 0.1
#: So many mixtures are replayed in all windows, of those that come roughly as near to the best; of a sum of seconds, an
#: error.
_FINALISTS, _NEAR, _ROUNDING = 3, 1.01, 1e-9
#: Devices of a node, where nothing says how many there are.
_NODE = 8
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
    mesh: tuple[int, ...] | Mapping[str, int] | None = None,
    accumulation: int = 1,
    policy: str = "least",
    recompute: bool = False,
    config: OffloadConfig | Mapping[str, Any] | None = None,
) -> Plan:
    """Says what a training step will take on a device, and which saved tensors are to move, before anything runs.

        plan = eo.plan(model, tokens, device="h200", device_budget="40GiB")
        print(plan)

    A copy of the model is traced: forward and backward on tensors without bytes, on the accelerator that the process
    has, or as CUDA's kernels and autocast would have it where there is none; the plan names the functions of which that
    is a guess. Nothing of the model's or of the process changes, and nothing is allocated but for integers and
    booleans. A compiled model is planned as it is written. Times are those of a roofline: see :class:`Machine`.

    Args:
        model: real, or on ``meta``, in the mode in which it is trained.
        inputs: what it is called with: a tensor, a tuple or list of arguments, or a mapping of keywords, which may hold
            objects, such as a cache: they are copied. Integers and booleans should be real ones: models look at masks.
        loss: makes the loss of what the model returns; ``None``: what it returns itself, or its ``loss``.
        device: ``"here"``, whose link is measured, and whose speed unless the card is one of these; ``"h200"``,
            ``"h100"``, ``"a100"``, ``"l40s"`` or ``"rtx4090"``; or a :class:`Machine`.
        device_budget: bytes of the device that the step may take, or a text such as ``"40GiB"``; ``None`` or
            ``"auto"``: all that it has; ``"here"``, the memory in use plus nine tenths of the free.
        host_budget: bytes that may rest in the tier at one time, in the same form, of which an eighth is left for what
            its slabs round; ``None``: any number. What finds no room there stays. The ``Offload`` has it too.
        optimizer: a class, an instance, or a function that makes one of a list of parameters. The states that a step of
            it would leave for each parameter that is trained are there all the time; ``None``: none are counted.
        optimizer_bytes: of its states, in place of what ``optimizer`` would have, such as those in 8 bits.
        mesh: the sizes of the mesh over which FSDP2 will shard the whole model that is given: ``(8,)``, or ``(2, 8)``
            with two replicas. The plan is that of one device, where each of the repeated blocks is gathered while it
            runs, and one ahead; collectives take no time. Or sizes by name, ``{"fsdp": 8, "tp": 2}`` or with
            ``"replicate"``: ``parallelize_module`` has divided the model, in a process that may have no other ranks (a
            group of the backend ``"fake"``). A model that ``fully_shard`` has sharded needs no ``mesh``.
        accumulation: backwards to a step of the optimizer. From 2 on the gradients of the last one are there from the
            beginning, under FSDP2 in shards.
        policy: ``"least"``: the least movement that fits the budget, where compute waits as little as can be;
            ``"free"``: only what the link hides; ``"max"``: all that may move.
        recompute: whether the blocks that repeat may be computed again in backward, all of each or but for the results
            that cost most seconds a byte, where that takes less time than moving what they save. :meth:`Plan.apply`
            puts checkpoints around them. Only with ``policy="least"``, whose plan says without it what it would bring
            where nothing fits or compute waits for a tenth of the step.
        config: the settings of the ``Offload`` that will be used: ``min_bytes``, windows, ``skip`` and ``only`` are
            heeded, and budgets that are not given here. As for :class:`Offload`, which has them from ``plan=...``.

    Where ``torch.distributed`` has a process group of several ranks, all of them have to call it together. They get one
    plan, by what rank 0 gives and for the least of their budgets; an error of one is an error of all.

    Returns:
        The plan. Where nothing fits, its ``fits`` is false.

    Raises:
        ConfigError: an unknown device or policy, a size below 0, a pattern of ``skip`` or ``only`` that matches no
            module, ``keep_last_bytes`` beside it, an optimizer that cannot be tried, or a ``mesh`` beside a model that
            is sharded, or that tensor parallelism divides otherwise.
        PlanError: the step depends on numbers that no trace has (train with ``device_budget=`` then, which measures),
            calls what torch does not differentiate on a CPU, such as FlexAttention, changes a tensor outside of it, or
            has a module of TorchScript; an input cannot be copied; something outside of the model holds a tensor of the
            trace afterwards; or the shards of the model are gathered now. The text names the module or the tensor. An
            error of the model's own comes as it is, with a note that names the module.
    """
    return agreed(
        lambda: asked_for(
            model,
            loss,
            policy,
            recompute=recompute,
            device=device,
            device_budget=device_budget,
            host_budget=host_budget,
            optimizer=optimizer,
            optimizer_bytes=optimizer_bytes,
            mesh=mesh,
            accumulation=accumulation,
            config=config,
        ),
        lambda asked: _make(asked, model, inputs, loss, policy, recompute=recompute),
    )


def asked_for(
    model: nn.Module,
    loss: Callable[[Any], Tensor] | None,
    policy: str,
    *,
    recompute: bool,
    device: str | Machine,
    device_budget: int | str | None,
    host_budget: int | str | None,
    optimizer: Optimizing | None,
    optimizer_bytes: int | str | None,
    mesh: tuple[int, ...] | Mapping[str, int] | None,
    accumulation: int,
    config: OffloadConfig | Mapping[str, Any] | None,
) -> Asked:
    """Checks the arguments of :func:`plan`, and works out what does not depend on a step."""
    _check_what(model, loss, policy, recompute=recompute)
    if type(accumulation) is not int or accumulation < 1:
        raise ConfigError(
            f"accumulation={accumulation!r} is not accepted: accumulation takes a whole number, 1 or more"
        )
    sizes = mesh_of(mesh)
    sharding = sharding_of(model, sizes, mesh)
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
        meshes: dict[Tensor, Mesh | None] = {}
        if isinstance(loss, nn.Module):
            meshes.update((one, None) for one in loss.parameters())
        meshes.update((one, sizes) for one in model.parameters())
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
            raise ConfigError(f"device_budget=None is not accepted, since the memory of {machine.name} is not known")
    text = model_text(model) if are_several() else ""
    return Asked(settings, machine, budget, states, text, sharding, accumulation > 1)


def _make(
    asked: Asked,
    model: nn.Module,
    inputs: object,
    loss: Callable[[Any], Tensor] | None,
    policy: str,
    *,
    recompute: bool,
) -> Plan:
    settings, machine, budget = asked.settings, asked.machine, asked.budget
    search = search_of(asked, model, inputs, loss)
    whole, may_again = search.nothing, None
    if recompute:
        found = search.best(search.mixtures())
    else:
        match policy:
            case "least":
                chosen = whole.within(budget)
            case "free":
                chosen = whole.hidden()
            case _:
                chosen = whole.share(1.0)
        found = _Found({}, whole, chosen)
        if policy == "least" and (
            chosen.peak_bytes > budget or whole.nothing.step_seconds < (1 - _MUCH) * chosen.step_seconds
        ):  # nothing fits, or compute waits
            better = search.best(search.levels, found)
            if kept := search.kept(better):
                may_again = Again(tuple(kept), better.chosen.peak_bytes, better.chosen.step_seconds)
    chosen, kept = found.chosen, search.kept(found)
    lowest = [found.chooser.least, *([search.all_again.least] if recompute else [])]

    # What it was worked out for is what is in force from the first step on.
    settings = replace(settings, max_inflight_bytes=chosen.problem.window, prefetch_bytes=chosen.problem.ahead)
    made = Plan(
        type(model).__name__,
        machine,
        budget,
        policy,
        *chosen,
        settings,
        Point.least_of(min(lowest, key=attrgetter("peak_bytes"))),
        found.chooser.windows,
        tuple(kept),
        tuple(kept.values()),
        whole.problem if kept else None,
        whole.windows if kept else (),
        search.checkpointing if recompute else None,
        tuple(search.best_points) if recompute else (),
        may_again,
        search.is_compiled,
        asked.states,
        *((1, 1, 1) if (of := asked.sharding) is None else (of.shards, of.parts, min(of.devices, _node()))),
    )
    if recompute:
        made.search_with(search.points_within)
    return made


def _node() -> int:
    """Returns how many devices a node has: as many as a launcher has started ranks here, or as are usual."""
    ranks = ranks_here()
    return _NODE if ranks.is_guess or ranks.number == 1 else ranks.number


def search_of(asked: Asked, model: nn.Module, inputs: object, loss: Callable[[Any], Tensor] | None) -> Search:
    """Traces a step, and returns what looks for the best of it."""
    from eager_offload.planning.trace import record  # it brings in what only tracing needs

    least, patterns = asked.settings.size("min_bytes"), asked.settings.patterns
    recording = record(model, inputs, loss, min_bytes=least, patterns=patterns, target=asked.machine.kernels)
    return Search(recording, asked, is_compiled=any(map(is_compiled, (*model.modules(), loss))))


class _Found(NamedTuple):
    """A mixture, and what comes of it."""

    mixture: Mixture
    chooser: Chooser
    chosen: Chosen


class Search:
    """Looks for the fastest step that fits among what blocks may keep of themselves: see
    [Note: what is computed again]."""

    def __init__(self, recording: Recording, asked: Asked, *, is_compiled: bool) -> None:
        self._recording, self._asked, self.is_compiled = recording, asked, is_compiled
        # Of one that saves nothing but what it is given, nothing would run again.
        self._blocks, self._inner = (
            [name for name in names if recording.stop(call := recording.calls[name]) > call.begin]
            for names in _blocks(recording.program)
        )
        self._seconds = recording.program.seconds(asked.machine)
        #: The same for all blocks; operators of compiled code cannot be told apart.
        self.levels = levels_of(recording, self._blocks, self._seconds)
        if is_compiled:
            self.levels = [self.levels[0], self.levels[-1]]
        #: What was found on the way.
        self.points: list[Point] = []

    def mixtures(self) -> list[Mixture]:
        inner = [dict.fromkeys(self._inner, frozenset[int]())] if self._inner else []
        return [*mixtures(self._blocks, self.levels), *inner]

    @cached_property
    def nothing(self) -> Chooser:
        """That of the step in which nothing is computed again."""
        return self._chooser({})

    @cached_property
    def all_again(self) -> Chooser:
        return self._chooser(self.levels[-1])

    def least(self) -> Point:
        """Returns that of the least peak where all that a level keeps stays, or leaves in the smallest window; the
        first one that fits, if one does, since each level takes a while."""
        others = (dict.fromkeys(self._inner, frozenset[int]()), *self.levels[-2::-1])
        found = list[Point]()
        for chooser in (self.all_again, *map(self._chooser, others)):
            found += (Point.least_of(chooser.share(part)) for part in (0.0, 1.0))
            if min(found).peak_bytes <= self._asked.budget:
                break
        return min(found)

    @property
    def checkpointing(self) -> Point | None:
        return Point.least_of(self.all_again.nothing) if self._blocks else None

    @property
    def best_points(self) -> Iterator[Point]:
        """Yields those of which none has a smaller peak and a faster step, the least peak first."""
        fastest = inf
        for point in sorted([*self.points, *filter(None, [self.checkpointing])]):
            if point.step_seconds < fastest:
                fastest = point.step_seconds
                yield point

    def kept(self, found: _Found) -> dict[str, tuple[Kept, ...]]:
        """Returns by name the blocks that are computed again, and what each keeps."""
        of = self._recording
        return {name: of.kept(of.calls[name], kept) for name, kept in found.mixture.items()}

    def points_within(self, budget: int) -> Iterator[Point]:
        """Returns all of ``best_points`` once the best step of that budget is among them."""
        self.best(self.mixtures(), budget=budget)
        return self.best_points

    def best(self, among: Sequence[Mixture], found: _Found | None = None, budget: int | None = None) -> _Found:
        """Returns the best of those mixtures, and of ``found``, by default for the budget that was asked for.

        Each has a step that it cannot be faster than: compute, and the link's time for what has to leave. They are
        replayed in that order, with few windows, until none that is left could be faster than the best; then that is
        replayed with all of them.
        """
        budget, machine = self._asked.budget if budget is None else budget, self._asked.machine

        def rank(one: _Found) -> tuple[float, ...]:
            chosen = one.chosen
            return max(chosen.peak_bytes - budget, 0), chosen.step_seconds, chosen.outcome.moved_bytes

        # A mixture stands in the heap with its compute, and once that is the least, with its floor.
        todo: list[tuple[float, int, Mixture, Chooser | None]] = []
        todo += [(self._compute_seconds(one), order, one, None) for order, one in enumerate(among)]
        heapify(todo)
        finalists = [] if found is None else [found]
        while todo:
            seconds, order, mixture, chooser = heappop(todo)
            bound = min((one.chosen.step_seconds for one in finalists if one.chosen.peak_bytes <= budget), default=inf)
            if seconds >= bound:
                break
            if chooser is None:
                chooser = self._chooser(mixture)
                problem = chooser.problem
                peak = problem.unmoved_peak
                forward, backward = problem.forward_seconds, problem.compute_seconds - problem.forward_seconds
                floor = floor_seconds(forward, backward, max(peak - budget, 0), machine.out, machine.back)
                self.points.append(Point(peak, peak, problem.compute_seconds))
                heappush(todo, (floor, order, mixture, chooser))
                continue
            one = _Found(mixture, chooser, chooser.within(budget, roughly=True, below=_NEAR * bound))
            self.points += map(Point.least_of, chooser.tried)
            finalists = sorted([*finalists, one], key=rank)[:_FINALISTS]
        best = finalists[0]
        if best is found:
            return best
        if best.mixture:  # with all windows, what moves alone may be faster than it was roughly
            finalists.append(_Found({}, self.nothing, best.chosen))
        for mixture, chooser, _ in finalists:
            bound = best.chosen.step_seconds if best.chosen.peak_bytes <= budget else inf
            best = min(best, _Found(mixture, chooser, chooser.within(budget, below=bound)), key=rank)
        self.points.append(Point.least_of(best.chosen))
        return best

    def _compute_seconds(self, mixture: Mixture) -> float:
        """Returns what the step of a mixture takes at least, without making it."""
        of, seconds = self._recording, self._seconds
        total = sum(seconds)
        for name, kept in mixture.items():
            left_out = {of.dispatches[number].op for number in kept}
            call = of.calls[name]
            total += sum(seconds[op] for op in range(call.begin, of.stop(call)) if op not in left_out)
        return (1 - _ROUNDING) * total

    def _chooser(self, mixture: Mixture) -> Chooser:
        program = computed_again(self._recording, mixture)
        seconds = tuple(program.seconds(self._asked.machine))
        step = on_one_device(program, self._asked.sharding, accumulates=self._asked.accumulates)
        return _chooser(step, seconds, self._asked)


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


#: Of what the repeated modules save, the part that smaller ones in their place have to save, too.
_NEARLY_ALL = 0.9
#: Parts of the names of operators that attend: a product of products, and what is between them.
_ATTENDS = ("attention", "softmax")


def _blocks(program: Program) -> tuple[list[str], list[str]]:
    """Returns the names of the modules that may be computed again, none inside of another one, in their order; and
    right below each the one that saves most of those that attend to nothing, which takes less memory to compute again.

    Those are the ones that repeat and save most together, and beside them others with a number in their name, such as
    the stages of a U-Net.
    """
    saved: dict[str, int] = defaultdict(int)
    for storage in program.storages:
        for name in modules_around(program.modules[storage.module]):
            saved[name] += storage.nbytes
    repeatable = [program.modules[number] for number in program.repeatable]
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in repeatable:
        if (kind := kind_of(name)) != name and saved[name]:
            kinds[kind].append(name)
    together = {kind: sum(saved[name] for name in names) for kind, names in kinds.items()}
    chosen = set[str]()
    while together:
        most = _NEARLY_ALL * max(together.values())
        # Of those that save nearly as much, the most modules; of one that is all of another, the outer one.
        kind = max((one for one in together if together[one] >= most), key=lambda one: (len(kinds[one]), -len(one)))
        around = {outer for name in chosen for outer in modules_around(name)}
        if not any(name in around or chosen.intersection(modules_around(name)) for name in kinds[kind]):
            chosen.update(kinds[kind])
        del together[kind]
    attend = set[str]()
    for op in program.ops:
        if any(part in op.name for part in _ATTENDS):
            attend.update(modules_around(program.modules[op.module]))
    blocks, inner = [name for name in repeatable if name in chosen], list[str]()
    for block in blocks:
        below = [one for one in repeatable if one.startswith(f"{block}.") and "." not in one[len(block) + 1 :]]
        inner += sorted((one for one in below if one not in attend and saved[one]), key=saved.__getitem__)[-1:]
    return blocks, inner
