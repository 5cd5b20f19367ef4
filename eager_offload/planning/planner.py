"""``plan``: predicts a training step, and searches for the fastest one that fits a budget.

[Note: recompute levels]
A *level* is a price in seconds per byte: a recomputed block keeps the results whose recompute costs at least that much.
A fraction of all bytes that the step still saves is offloaded. A *mixture* gives all repeated blocks one level, or two
levels that alternate evenly, so that the recompute of some blocks hides the copies of the others. The search takes the
fastest mixture that fits. Only the step without checkpoints is traced; ``levels.py`` derives the others.
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
from eager_offload.planning.levels import Kept, Mixture, Recording, levels_of, mixtures, with_recompute
from eager_offload.planning.machine import TABLE, Machine
from eager_offload.planning.measuring import here
from eager_offload.planning.plan import Plan
from eager_offload.planning.program import Problem, Program, floor_seconds, kind_of, modules_around
from eager_offload.planning.sharding import (
    Mesh,
    PlanRequest,
    agreed,
    are_several,
    mesh_of,
    model_text,
    on_one_device,
    shape_on,
    sharding_of,
)
from eager_offload.planning.simulate import WINDOWS, Candidate, PolicySearch
from eager_offload.planning.states import Optimizing, States, states_of
from eager_offload.tiers.limits import ranks_here
from eager_offload.torch_private.inductor import is_compiled
from eager_offload.torch_private.memory import tree_iter

_HERE = "here"
#: If compute stalls for a larger fraction of the step, a plan without recompute also reports a step with recompute.
_LONG_STALL = 0.1
#: The number of mixtures that are simulated with all windows; the multiple of the best time above which a mixture is
#: not refined; and the relative error of a sum of seconds.
_FINALISTS, _NEAR, _ROUNDING = 3, 1.01, 1e-9
#: Devices of a node, if no launcher has started ranks.
_NODE = 8
#: 1/8 of the host budget is left for the rounding of slabs.
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
    """Predicts peak memory and time of a training step, and chooses the saved tensors to offload, without running it.

        plan = eo.plan(model, tokens, device="h200", device_budget="40GiB")
        print(plan)

    A copy of the model is traced, forward and backward, on fake tensors of the process's accelerator. Without one, they
    are CPU tensors, and CUDA's kernels and autocast are imitated (unless ``device`` is itself a CPU); the plan lists
    the functions for which this is a guess. The model and
    the process are left unchanged, and only integer and boolean tensors are allocated. A compiled model is planned from
    its eager code. Times follow a roofline: see :class:`Machine`.

    Args:
        model: real, or on ``meta``, in the mode in which it is trained.
        inputs: a tensor, a tuple or list of arguments, or a mapping of keywords. They may include objects (e.g. a
            cache), which are copied. Integers and booleans should be real tensors, because models inspect masks.
        loss: maps the model's result to the loss; ``None``: the result itself, or its ``loss``.
        device: ``"here"``: the process's device, whose link is measured, and also its speed unless it is one of the
            following cards; ``"h200"``, ``"h100"``, ``"a100"``, ``"l40s"`` or ``"rtx4090"``; or a :class:`Machine`.
        device_budget: bytes of device memory that the step may take, or a text (e.g. ``"40GiB"``); ``None`` or
            ``"auto"``: all memory of the device; with ``"here"``, the process's memory plus nine tenths of the free.
        host_budget: bytes that the tier may store at one time, in the same form; an eighth is left for the rounding of
            slabs. Tensors beyond it are kept. ``None``: unlimited. The ``Offload`` gets it too.
        optimizer: a class, an instance, or a function of a list of parameters. Its states count for the whole step;
            ``None``: no states are counted.
        optimizer_bytes: bytes of optimizer states, instead of ``optimizer`` (e.g. for 8-bit states).
        mesh: the sizes of the mesh over which FSDP2 will shard the given, whole model: ``(8,)``, or ``(2, 8)`` with
            two replicas. Or sizes by name (``{"fsdp": 8, "tp": 2}``, also ``"replicate"``) for a model that
            ``parallelize_module`` has divided, possibly in a single process (a group with the backend ``"fake"``). The
            plan is for one device; collectives take no time. A model with ``fully_shard`` needs no ``mesh``.
        accumulation: backward passes per optimizer step. With 2 or more, gradients of the previous pass count from the
            start (sharded under FSDP2).
        policy: ``"least"``: the fastest step that fits the budget (of equally fast ones, the least movement);
            ``"free"``: only tensors whose copies are hidden; ``"max"``: everything movable.
        recompute: whether repeated blocks may be recomputed in backward, except for their costliest results, if that is
            faster than offloading their saves. :meth:`Plan.apply` puts checkpoints around them. Requires
            ``policy="least"``.
        config: the settings of the ``Offload`` that will be used: the plan respects ``min_bytes``, windows, ``skip``
            and ``only``, and its budgets where none is given here. ``Offload(plan=...)`` takes the settings from the
            plan.

    If ``torch.distributed`` has a process group of several ranks, all ranks must call ``plan`` together. They get one
    plan, made from the arguments of rank 0 for the smallest of their budgets; an error on one rank is raised on all.

    Returns:
        The plan. If no step fits the budget, its ``fits`` is false.

    Raises:
        ConfigError: an unknown device or policy; a size below 0; a pattern of ``skip`` or ``only`` that matches no
            module; ``keep_last_bytes`` in ``config``; an optimizer whose trial step fails; or a ``mesh`` with a
            sharded model, or one that differs from the model's tensor parallelism.
        PlanError: the step depends on tensor values, which a trace does not have (train with ``device_budget=``
            instead); it calls a function that cannot be traced (e.g. FlexAttention); it changes a tensor outside of the
            model; a module is of TorchScript; an input cannot be copied; an object outside of the model holds a tensor
            of the trace afterwards; or the model's shards are currently gathered. The model's own errors are raised
            unchanged, with a note that names the module.
    """
    return agreed(
        lambda: request_of(
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
        lambda request: _make(request, model, inputs, loss, policy, recompute=recompute),
    )


def request_of(
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
) -> PlanRequest:
    """Checks the arguments of :func:`plan`, and derives everything that needs no trace."""
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
            f"keep_last_bytes={given.given('keep_last_bytes')!r} does not go with a plan, which decides itself which "
            "tensors stay: leave it out, give a device_budget, or mark tensors to keep with eager_offload.keep"
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
        of_loss = loss.parameters() if isinstance(loss, nn.Module) else ()
        meshes: dict[Tensor, Mesh | None] = {**dict.fromkeys(of_loss), **dict.fromkeys(model.parameters(), sizes)}
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
    return PlanRequest(settings, machine, budget, states, text, sharding, accumulation > 1)


def _make(
    request: PlanRequest,
    model: nn.Module,
    inputs: object,
    loss: Callable[[Any], Tensor] | None,
    policy: str,
    *,
    recompute: bool,
) -> Plan:
    settings, machine, budget = request.settings, request.machine, request.budget
    search = search_of(request, model, inputs, loss)
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
            chosen.peak_bytes > budget or whole.nothing.step_seconds < (1 - _LONG_STALL) * chosen.step_seconds
        ):
            better = search.best(search.levels, found)
            if kept := search.kept(better):
                may_again = Again(tuple(kept), better.chosen.peak_bytes, better.chosen.step_seconds)
    chosen, kept = found.chosen, search.kept(found)
    lowest = [found.candidates.least, *([search.all_again.least] if recompute else [])]

    # Training uses the planned windows from the first step on.
    settings = replace(settings, max_inflight_bytes=chosen.problem.window, prefetch_bytes=chosen.problem.ahead)
    made = Plan(
        type(model).__name__,
        machine,
        budget,
        policy,
        *chosen,
        settings,
        Point.least_of(min(lowest, key=attrgetter("peak_bytes"))),
        found.candidates.windows,
        tuple(kept),
        tuple(kept.values()),
        whole.problem if kept else None,
        whole.windows if kept else (),
        search.checkpointing if recompute else None,
        tuple(search.best_points) if recompute else (),
        may_again,
        search.is_compiled,
        request.states,
        *((1, 1, 1) if (of := request.sharding) is None else (of.shards, of.parts, min(of.devices, _node()))),
    )
    if recompute:
        made.search_with(search.points_within)
    return made


def _node() -> int:
    ranks = ranks_here()
    return _NODE if ranks.is_guess or ranks.number == 1 else ranks.number


def search_of(request: PlanRequest, model: nn.Module, inputs: object, loss: Callable[[Any], Tensor] | None) -> Search:
    from eager_offload.planning.trace import record  # imported late: only tracing needs its imports

    least, patterns = request.settings.size("min_bytes"), request.settings.patterns
    recording = record(model, inputs, loss, min_bytes=least, patterns=patterns, target=request.machine.kernels)
    return Search(recording, request, is_compiled=any(map(is_compiled, (*model.modules(), loss))))


class _Found(NamedTuple):
    mixture: Mixture
    candidates: PolicySearch
    chosen: Candidate


class Search:
    """Searches the mixtures for the fastest step that fits: see [Note: recompute levels]."""

    def __init__(self, recording: Recording, request: PlanRequest, *, is_compiled: bool) -> None:
        self._recording, self._request, self.is_compiled = recording, request, is_compiled
        # A block that saves nothing but its inputs has no operator to run again.
        self._blocks, self._inner = (
            [name for name in names if recording.stop(call := recording.calls[name]) > call.begin]
            for names in _blocks(recording.program)
        )
        self._seconds = recording.program.seconds(request.machine)
        self.levels = levels_of(recording, self._blocks, self._seconds)
        if is_compiled:  # no policy can select single operators of compiled code
            self.levels = [self.levels[0], self.levels[-1]]
        self.points: list[Point] = []

    def mixtures(self) -> list[Mixture]:
        inner = [dict.fromkeys(self._inner, frozenset[int]())] if self._inner else []
        return [*mixtures(self._blocks, self.levels), *inner]

    @cached_property
    def nothing(self) -> PolicySearch:
        return self._candidates({})

    @cached_property
    def all_again(self) -> PolicySearch:
        return self._candidates(self.levels[-1])

    def least(self) -> Point:
        """Returns the point with the lowest peak, of all levels, each with nothing and with everything offloaded.

        Further levels are not tried once a point fits, because each takes a while.
        """
        others = (dict.fromkeys(self._inner, frozenset[int]()), *self.levels[-2::-1])
        found = list[Point]()
        for candidates in (self.all_again, *map(self._candidates, others)):
            found += (Point.least_of(candidates.share(part)) for part in (0.0, 1.0))
            if min(found).peak_bytes <= self._request.budget:
                break
        return min(found)

    @property
    def checkpointing(self) -> Point | None:
        return Point.least_of(self.all_again.nothing) if self._blocks else None

    @property
    def best_points(self) -> Iterator[Point]:
        """Yields the Pareto front of ``points``, the lowest peak first."""
        fastest = inf
        for point in sorted([*self.points, *filter(None, [self.checkpointing])]):
            if point.step_seconds < fastest:
                fastest = point.step_seconds
                yield point

    def kept(self, found: _Found) -> dict[str, tuple[Kept, ...]]:
        of = self._recording
        return {name: of.kept(of.calls[name], kept) for name, kept in found.mixture.items()}

    def points_within(self, budget: int) -> Iterator[Point]:
        """Returns ``best_points`` after a search for ``budget``."""
        self.best(self.mixtures(), budget=budget)
        return self.best_points

    def best(self, among: Sequence[Mixture], found: _Found | None = None, budget: int | None = None) -> _Found:
        """Returns the best of ``among`` and ``found`` for ``budget`` (by default the plan's).

        1. The lower bound on a mixture's step time is its compute time. Once its program is made, the bound also counts
           the time in which the link moves the bytes over the budget (see ``floor_seconds``).
        2. Mixtures are simulated with few windows, the lowest bound first, until no bound is below the best time.
        3. The finalists are simulated with all windows.
        """
        budget, machine = self._request.budget if budget is None else budget, self._request.machine

        def rank(one: _Found) -> tuple[float, ...]:
            chosen = one.chosen
            return max(chosen.peak_bytes - budget, 0), chosen.step_seconds, chosen.outcome.moved_bytes

        # A mixture enters the heap with its compute time, and again with its floor once that time is the lowest.
        todo: list[tuple[float, int, Mixture, PolicySearch | None]] = []
        todo += [(self._compute_seconds(one), order, one, None) for order, one in enumerate(among)]
        heapify(todo)
        finalists = [] if found is None else [found]
        while todo:
            seconds, order, mixture, candidates = heappop(todo)
            bound = min((one.chosen.step_seconds for one in finalists if one.chosen.peak_bytes <= budget), default=inf)
            if seconds >= bound:
                break
            if candidates is None:
                candidates = self._candidates(mixture)
                problem = candidates.problem
                peak = problem.unmoved_peak
                forward, backward = problem.forward_seconds, problem.compute_seconds - problem.forward_seconds
                floor = floor_seconds(forward, backward, max(peak - budget, 0), machine.out, machine.back)
                self.points.append(Point(peak, peak, problem.compute_seconds))
                heappush(todo, (floor, order, mixture, candidates))
                continue
            one = _Found(mixture, candidates, candidates.within(budget, roughly=True, below=_NEAR * bound))
            self.points += map(Point.least_of, candidates.tried)
            finalists = sorted([*finalists, one], key=rank)[:_FINALISTS]
        best = finalists[0]
        if best is found:
            return best
        if best.mixture:  # the few windows may have underrated the step without recompute
            finalists.append(_Found({}, self.nothing, best.chosen))
        for mixture, candidates, _ in finalists:
            bound = best.chosen.step_seconds if best.chosen.peak_bytes <= budget else inf
            best = min(best, _Found(mixture, candidates, candidates.within(budget, below=bound)), key=rank)
        self.points.append(Point.least_of(best.chosen))
        return best

    def _compute_seconds(self, mixture: Mixture) -> float:
        """Returns a lower bound on the step time of ``mixture``, without making its program."""
        of, seconds = self._recording, self._seconds
        total = sum(seconds)
        for name, kept in mixture.items():
            left_out = {of.dispatches[number].op for number in kept}
            call = of.calls[name]
            total += sum(seconds[op] for op in range(call.begin, of.stop(call)) if op not in left_out)
        return (1 - _ROUNDING) * total

    def _candidates(self, mixture: Mixture) -> PolicySearch:
        request, settings, machine = self._request, self._request.settings, self._request.machine
        program = with_recompute(self._recording, mixture)
        seconds = tuple(program.seconds(machine))
        program = on_one_device(program, request.sharding, accumulates=request.accumulates)
        device_bytes, movable = machine.memory_bytes or None, program.movable_bytes
        windows = settings.windows(lambda: device_bytes, [storage.nbytes for storage in program.storages])
        tried: set[int] = set()
        if settings.max_inflight_bytes == settings.prefetch_bytes == "auto":
            tried = {windows.inflight, *(bounded_window(one, movable, device_bytes) for one in WINDOWS)}
        budget = settings.host_budget
        states = 0 if request.states is None else request.states.nbytes
        problem = Problem(
            replace(program, other_bytes=tuple(one + states for one in program.other_bytes)),
            seconds,
            machine.out,
            machine.back,
            windows.inflight,
            windows.prefetch,
            machine.launch_seconds,
            budget - budget // _ROUNDED if isinstance(budget, int) else None,
        )
        return PolicySearch(problem, sorted(tried))


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
        raise ConfigError(f'recompute={recompute!r} is not accepted with policy={policy!r}: it requires policy="least"')
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


#: A kind of modules is a candidate if it saves at least this fraction of what the kind that saves most does.
_NEARLY_ALL = 0.9
#: Parts of the names of attention operators, fused or not.
_ATTENDS = ("attention", "softmax")


def _blocks(program: Program) -> tuple[list[str], list[str]]:
    """Returns the names of the blocks, and of at most one inner module of each, in the order of the model.

    Blocks are disjoint modules with a number in their name (e.g. layers, or the stages of a U-Net). Modules whose names
    differ only in numbers are of one kind; kinds are chosen as a whole, roughly the one that saves most first. The
    inner module is the direct child that saves most among those without attention: its recompute needs less memory than
    the block's.
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
        # Among kinds that save nearly as much: the one with most modules, then the outer one.
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
