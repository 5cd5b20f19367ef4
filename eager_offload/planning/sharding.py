"""Live bytes of parameters and gradients on one device under FSDP2 and tensor parallelism, and one plan for all ranks.

[Note: FSDP2 memory]
The step is traced with whole parameters on one device. In ``other_bytes``, whole parameters and gradients are then
replaced with the memory that FSDP2 holds:

1. the shards of parameters for the whole step, and the shards of a unit's gradients from its reduction on (for the
   whole step with accumulation);
2. a unit's whole parameters while it runs, in forward and in backward. The root's, and those of units that do not
   reshard after forward, stay from forward to the end of backward;
3. the all-gather buffer: in forward until the next unit has its parameters, so that copies overlap; in backward from
   the start of the unit before it, because one unit is prefetched;
4. whole gradients until the unit's backward ends, then the buffer of their reduction until the next unit's backward
   ends.

Under tensor parallelism the model already has one device's part of each matrix, and FSDP2 shards that part. Collectives
take no time in a plan. Shards have the (padded) rows of the first rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from operator import add, attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eager_offload.config import OffloadConfig, size_text
from eager_offload.errors import ConfigError, OffloadError, PlanError
from eager_offload.planning.machine import Machine
from eager_offload.planning.program import Program, live_bytes, modules_around
from eager_offload.planning.states import States
from eager_offload.torch_private.fsdp import ShardedGroup, is_distributed, sharded_groups
from eager_offload.version import digest

#: Bytes, first operator, end.
_Span = tuple[int, int, int]


class Unit(NamedTuple):
    """Parameters that are gathered together."""

    modules: tuple[str, ...]
    """Names of its modules; the root's is empty."""
    frees: bool


class Piece(NamedTuple):
    unit: int
    nbytes: int
    """Size of its shard, and of its gradient's shard."""
    reduced_bytes: int
    """Size of its whole gradient during the reduction."""


class Sharding(NamedTuple):
    """How FSDP2 and tensor parallelism divide a model."""

    shards: int
    units: tuple[Unit, ...]
    pieces: Mapping[str, Piece]
    parts: int
    """Devices among which tensor parallelism divides a matrix."""
    devices: int
    """Devices in all, replicas included."""


class Mesh(NamedTuple):
    """The sizes of a device mesh."""

    fsdp: int | None = None
    """``None``: FSDP2 does not shard the model."""
    tp: int | None = None
    """``None``: the size by which the model is divided."""
    replicate: int = 1


def mesh_of(given: object) -> Mesh | None:
    if given is None:
        return None
    named: dict[Any, Any] = {}
    if isinstance(given, tuple | list) and len(given) <= 2:
        named = dict(zip(("fsdp", "replicate"), reversed(given), strict=False))
    elif isinstance(given, Mapping) and set(given) <= set(Mesh._fields):
        named = dict(given)
    if not named or not all(type(one) is int and one > 0 for one in named.values()):
        raise ConfigError(
            f"mesh={given!r} is not accepted: mesh takes the sizes of a device mesh, such as (8,) to shard over 8 "
            'devices, (2, 8) to shard over 8 and replicate that twice, or {"fsdp": 8, "tp": 2} with tensor parallelism '
            f"(names: {', '.join(Mesh._fields)})"
        )
    return Mesh(**named)


def shape_on(tensor: Tensor, mesh: Mesh | None) -> torch.Size:
    """Returns the shape of a parameter on one device: its tensor-parallel part, sharded by rows over ``mesh``."""
    shape = cast(Any, tensor.detach()).to_local().shape if is_distributed(tensor) else tensor.shape
    if mesh is None or mesh.fsdp is None or not shape:
        return cast(torch.Size, shape)
    return torch.Size((-(-shape[0] // mesh.fsdp), *shape[1:]))


def sharding_of(model: nn.Module, mesh: Mesh | None, given: object) -> Sharding | None:
    """Returns the sharding that ``model`` has, or will have over ``mesh``; ``None`` if it is not divided.

    Args:
        given: the user's argument for ``mesh``, for errors.

    Raises:
        ConfigError: the model is already divided, and differs from ``mesh``.
        PlanError: its shards are currently gathered.
    """
    parameters, groups = dict(model.named_parameters()), sharded_groups(model)
    own = {id(one) for one in parameters.values()}
    if any(id(one) not in own for group in groups for one in group.parameters):
        raise PlanError(
            "the model is sharded, and has parameters gathered now, as after a forward under torch.no_grad(): call "
            "reshard() of the modules that fully_shard was called with, or plan before"
        )
    specs = {id(one): spec for group in groups for one, spec in zip(group.parameters, group.specs, strict=True)}
    divided = (specs.get(id(one), one) for one in parameters.values() if is_distributed(one))
    parts = max((one.device_mesh.size() for one in divided if one is not None), default=1)
    if mesh is not None and groups:
        raise ConfigError(f"mesh={given!r} is not accepted, since the model is sharded already: leave mesh out")
    if mesh is not None and mesh.tp not in (None, parts):
        raise ConfigError(
            f"mesh={given!r} is not accepted, since tensor parallelism divides the model among {parts}: call "
            f"parallelize_module with it before, over a mesh of {mesh.tp}, as before training. A process that has no "
            "other ranks begins a group without them: torch.distributed.init_process_group('fake', rank=0, "
            "world_size=..., store=torch.distributed.HashStore())"
        )
    if groups:
        return _of_groups(groups, model, parameters, parts)
    if mesh is None or mesh.fsdp is None:
        return None if parts == 1 else Sharding(1, (), {}, parts, parts * (1 if mesh is None else mesh.replicate))
    units = [Unit(("",), frees=False), *(Unit((name,), frees=True) for name in _repeated_blocks(model))]
    numbers = {name: number for number, unit in enumerate(units) for name in unit.modules}
    pieces = {}
    for name, one in parameters.items():
        unit = next(number for module in modules_around(name) if (number := numbers.get(module)) is not None)
        pieces[name] = Piece(unit, *(shape_on(one, to).numel() * one.itemsize for to in (mesh, None)))
    return Sharding(mesh.fsdp, tuple(units), pieces, parts, mesh.fsdp * parts * mesh.replicate)


def _repeated_blocks(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yields the names of the outermost modules that repeat: several of one class in a ``ModuleList`` or
    ``ModuleDict``, or in a ``Sequential`` of one class."""
    kinds = Counter(map(type, module.children()))
    is_sequence = isinstance(module, nn.Sequential) and len(kinds) == 1
    repeats = is_sequence or isinstance(module, nn.ModuleList | nn.ModuleDict)
    for name, child in module.named_children():
        if not repeats or kinds[type(child)] == 1:
            yield from _repeated_blocks(child, f"{prefix}{name}.")
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{name}"


def _of_groups(
    groups: Sequence[ShardedGroup], model: nn.Module, parameters: Mapping[str, Tensor], parts: int
) -> Sharding:
    names = {one: name for name, one in model.named_modules()}
    units = [Unit(tuple(names[one] for one in group.modules), group.frees) for group in groups]
    gathered = {
        id(one): (number, size)
        for number, group in enumerate(groups)
        for one, size in zip(group.parameters, group.sizes, strict=True)
    }
    pieces, shards, devices = {}, 1, parts
    for name, one in parameters.items():
        if id(one) not in gathered:  # excluded from FSDP2: each device has all of it, or its tensor-parallel part
            continue
        unit, size = gathered[id(one)]
        mesh, policy = cast(Any, one).device_mesh, groups[unit].policy
        devices = max(devices, mesh.size())
        shards = max(shards, groups[unit].shards)
        dtype = policy.reduce_dtype or policy.param_dtype or one.dtype
        pieces[name] = Piece(unit, shape_on(one, None).numel() * one.itemsize, size.numel() * dtype.itemsize)
    # Backward begins with the root, so torch does not free its parameters after forward.
    units = [unit._replace(frees=unit.frees and "" not in unit.modules) for unit in units]
    return Sharding(shards, tuple(units), pieces, parts, devices)


def on_one_device(program: Program, sharding: Sharding | None, *, accumulates: bool) -> Program:
    """Returns ``program`` with the parameters and gradients of one device: see [Note: FSDP2 memory].

    Args:
        program: the step with whole parameters.
        sharding: ``None`` if they stay whole.
        accumulates: whether gradients exist when the step begins.
    """
    ops = len(program.ops)
    if sharding is not None:
        spans = [*_spans(program, sharding, accumulates=accumulates)]
    elif accumulates:  # a new gradient lives until it is added
        spans = [(one.gradient_bytes, 0, one.gradient_made + 1) for one in program.weights]
    else:
        spans = []
    other_bytes = tuple(map(add, program.other_bytes, live_bytes(ops, spans)))
    return replace(program, other_bytes=other_bytes, weights=())


class _Run(NamedTuple):
    begin: int
    end: int
    unit: int


def _spans(program: Program, sharding: Sharding, *, accumulates: bool) -> Iterator[_Span]:
    """Yields the corrections to the live bytes of ``program``, which may be negative."""
    ops, turn = len(program.ops), program.forward_ops
    forward, backward = _runs(program, sharding, 0, turn), _runs(program, sharding, turn, ops)
    of_root = [(0, ops), (0, forward[0].begin + 1 if forward else turn)]
    gathered = [
        of_root if "" in unit.modules else _gathered(number, unit, forward, backward, turn)
        for number, unit in enumerate(sharding.units)
    ]
    ended = sorted(backward, key=attrgetter("end"))
    # By unit, the start and the end of the reduction of its gradients.
    reduced = {run.unit: (run.end, ops if after is None else after.end) for run, after in zip_longest(ended, ended[1:])}
    for weight in program.weights:
        piece = sharding.pieces.get(weight.name)
        if piece is None:
            if accumulates:
                yield weight.gradient_bytes, 0, weight.gradient_made + 1
            continue
        yield piece.nbytes - weight.nbytes, 0, ops
        yield from ((weight.nbytes, *span) for span in gathered[piece.unit])
        if weight.gradient_bytes:
            begins, ends = reduced.get(piece.unit, (ops, ops))
            begins = max(begins, weight.gradient_made + 1)
            yield -weight.gradient_bytes, begins, ops
            yield piece.reduced_bytes, begins, ends
            yield piece.nbytes, 0 if accumulates else begins, ops


def _runs(program: Program, sharding: Sharding, begin: int, end: int) -> list[_Run]:
    """Returns the runs of all units except the root, by start; operators outside of all units do not end a run."""
    units = {name: number for number, unit in enumerate(sharding.units) for name in unit.modules if name}
    around = [
        {number for name in modules_around(module) if (number := units.get(name)) is not None}
        for module in program.modules
    ]
    found: list[_Run] = []
    running: dict[int, _Run] = {}
    for op in range(begin, end):
        inside = around[program.ops[op].module]
        if not inside:
            continue
        found += [running.pop(unit) for unit in [*running] if unit not in inside]
        for unit in inside:
            running[unit] = running.get(unit, _Run(op, op, unit))._replace(end=op + 1)
    return sorted([*found, *running.values()])


def _gathered(
    number: int, unit: Unit, forward: Sequence[_Run], backward: Sequence[_Run], turn: int
) -> list[tuple[int, int]]:
    """Returns the spans of the whole parameters and of the all-gather buffer of a unit other than the root."""
    nexts = [*(run.begin + 1 for run in forward), turn]
    forwards = [(run, nexts[at + 1]) for at, run in enumerate(forward) if run.unit == number]
    backwards = [
        (backward[at - 1].begin if at else turn, run.end) for at, run in enumerate(backward) if run.unit == number
    ]
    if unit.frees or not forwards:
        copies = [(run.begin, end) for run, end in forwards]
        return [*((run.begin, run.end) for run, _ in forwards), *copies, *backwards]
    (first, copied), last = forwards[0], max(end for _, end in [*backwards, (0, forwards[-1][0].end)])
    return [(first.begin, last), (first.begin, copied)]


class PlanRequest(NamedTuple):
    """The checked arguments of ``plan`` on one rank; sizes in bytes."""

    settings: OffloadConfig
    machine: Machine
    budget: int
    states: States | None
    model: str
    """The ``model_text`` of the model, if there are several ranks."""
    sharding: Sharding | None = None
    accumulates: bool = False

    def within(self, each: Sequence[PlanRequest]) -> PlanRequest:
        """Returns the request with the lowest budgets and the largest optimizer states of ``each``."""
        hosts = [one.settings.host_budget for one in each if isinstance(one.settings.host_budget, int)]
        settings = replace(self.settings, host_budget=min(hosts)) if hosts else self.settings
        states = [one.states for one in each if one.states is not None]
        most = self.states and max(states, key=attrgetter("nbytes"))
        return self._replace(settings=settings, budget=min(one.budget for one in each), states=most)


_P = TypeVar("_P")


def are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agreed(make_request: Callable[[], PlanRequest], make: Callable[[PlanRequest], _P]) -> _P:
    """Returns ``make(make_request())``; with several ranks, the result of rank 0 within the limits of all ranks.

    All ranks need the same plan: under FSDP2 a module that only one rank recomputes would wait forever in its
    all-gather. An error on one rank is raised on all, so that none waits for it.
    """
    if not are_several():
        return make(make_request())
    request, own, said = _try(make_request)
    answers: list[tuple[PlanRequest | None, OffloadError | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(answers, (request, said))
    _raise_any(own, *(error for _, error in answers))
    assert request is not None
    each = [one for one, _ in answers if one is not None]
    others = {one.model: rank for rank, one in reversed([*enumerate(each)]) if one.model != each[0].model}
    if others:
        named = ", ".join(f"on rank {rank} {model}" for model, rank in others.items())
        raise PlanError(
            f"ranks plan different models: on rank 0 {each[0].model}, {named}. All get the plan that rank 0 makes, so "
            "give the same model on each; stages of a pipeline cannot be planned"
        )
    made, own, said = _try(lambda: make(request.within(each))) if dist.get_rank() == 0 else (None, None, None)
    answer = [(made, said)]
    dist.broadcast_object_list(answer, src=0)
    _raise_any(own, answer[0][1])
    found = answer[0][0] if made is None else made
    assert found is not None
    return found


def model_text(model: nn.Module) -> str:
    """Returns the class of a model, the bytes of its parameters, and a digest of its structure."""
    parts = [f"{name} {type(module).__qualname__} {module.training}" for name, module in model.named_modules()]
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        parts.append(f"{name} {tuple(one.shape)} {one.dtype} {one.requires_grad}")
    nbytes = sum(one.numel() * one.itemsize for one in model.parameters())
    return f"{type(model).__name__} of {size_text(nbytes)} in {len(parts)} parts, {digest(*parts)[:12]}"


def _try(work: Callable[[], _P]) -> tuple[_P | None, Exception | None, OffloadError | None]:
    """Returns the result of ``work``, its error, and the error for the other ranks, which wait for an answer."""
    try:
        return work(), None, None
    except Exception as error:
        text = f"on rank {dist.get_rank()}: {error if isinstance(error, OffloadError) else repr(error)}"
        return None, error, ConfigError(text) if isinstance(error, ConfigError) else PlanError(text)


def _raise_any(*errors: Exception | None) -> None:
    for error in errors:
        if error is not None:
            raise error
