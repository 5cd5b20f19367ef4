"""A step of which FSDP2 gives this device a shard: what lives of parameters and gradients, and when.

Several ranks have one plan: rank 0 decides, within the limits of all.

[Note: gathered at their time]
The step is traced with whole parameters on one device. What that has of parameters and gradients from their beginning
to the end is then taken out of ``other_bytes``, and what FSDP2 holds is put in their place:

1. all the time the shards of parameters, and from a unit's reduction on (with accumulation: all the time) the shards of
   its gradients;
2. the whole parameters of a unit while it runs, in forward and in backward. Those of the root, and of units that say
   so, stay from forward until backward is over;
3. their copy as it was gathered: in forward until the next unit has its parameters, which lets transfers overlap; in
   backward from the beginning of the unit before on, since one is prefetched;
4. whole gradients from where they are made until the unit's backward is over, and from there on the copy that is
   reduced, until the next unit's backward is over.

The ranks' collectives take no time in the plan. Shards are padded to the rows of the first rank, as FSDP2 pads them.
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
from eager_offload.planning.program import Program, living, modules_around
from eager_offload.planning.states import States
from eager_offload.torch_private.fsdp import is_distributed, sharded_groups
from eager_offload.version import digest

#: Bytes, from which operator and until which.
_Span = tuple[int, int, int]


class Unit(NamedTuple):
    """Parameters that are gathered together."""

    modules: tuple[str, ...]
    """Names of the modules that it runs in; the root's is empty."""
    frees: bool


class Piece(NamedTuple):
    """A parameter on one device."""

    unit: int
    nbytes: int
    """Of its shard; that of its gradient has as many."""
    reduced_bytes: int
    """Of its whole gradient while it is reduced."""


class Sharding(NamedTuple):
    """How FSDP2 shards a model."""

    shards: int
    units: tuple[Unit, ...]
    pieces: Mapping[str, Piece]
    """By the names of the parameters that are sharded."""


def check_mesh(mesh: object) -> None:
    sizes = mesh if isinstance(mesh, tuple | list) else ()
    if mesh is not None and not (0 < len(sizes) <= 2 and all(type(one) is int and one > 0 for one in sizes)):
        raise ConfigError(
            f"mesh={mesh!r} is not accepted: mesh takes the sizes of a device mesh, such as (8,) to shard over 8 "
            "devices, or (2, 8) to shard over 8 and replicate that twice"
        )


def shape_on(tensor: Tensor, mesh: Sequence[int] | None) -> torch.Size:
    """Returns the shape that a parameter has on one device: of a ``DTensor`` the local one, else a shard of rows."""
    if is_distributed(tensor):
        local: Tensor = cast(Any, tensor.detach()).to_local()
        return local.shape
    if not mesh or not tensor.dim():
        return tensor.shape
    return torch.Size((-(-tensor.shape[0] // mesh[-1]), *tensor.shape[1:]))


def sharding_of(model: nn.Module, mesh: Sequence[int] | None) -> Sharding | None:
    """Returns how ``model`` is sharded, or will be over ``mesh``; ``None``: not at all.

    Raises:
        ConfigError: it is sharded already, and ``mesh`` is given.
        PlanError: it is sharded in another way than by ``fully_shard`` over one mesh.
    """
    parameters = dict(model.named_parameters())
    own = {id(one) for one in parameters.values()}
    if any(id(one) not in own for group in sharded_groups(model) for one in group.parameters):
        raise PlanError(
            "the model is sharded, and has parameters gathered now, as after a forward under torch.no_grad(): call "
            "reshard() of the modules that fully_shard was called with, or plan before"
        )
    is_sharded = any(map(is_distributed, parameters.values()))
    if mesh is None:
        return _of_groups(model, parameters) if is_sharded else None
    if is_sharded:
        raise ConfigError(f"mesh={mesh!r} is not accepted, since the model is sharded already: leave mesh out")
    units = [Unit(("",), frees=False), *(Unit((name,), frees=True) for name in _repeated_blocks(model))]
    numbers = {name: number for number, unit in enumerate(units) for name in unit.modules}
    pieces = {}
    for name, one in parameters.items():
        unit = next(number for module in modules_around(name) if (number := numbers.get(module)) is not None)
        pieces[name] = Piece(unit, shape_on(one, mesh).numel() * one.itemsize, one.numel() * one.itemsize)
    return Sharding(mesh[-1], tuple(units), pieces)


def _repeated_blocks(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yields the names of the outermost modules that are one of several of a class in a list or a mapping of modules,
    or in a sequence of that class alone."""
    kinds = Counter(map(type, module.children()))
    is_sequence = isinstance(module, nn.Sequential) and len(kinds) == 1
    repeats = is_sequence or isinstance(module, nn.ModuleList | nn.ModuleDict)
    for name, child in module.named_children():
        if not repeats or kinds[type(child)] == 1:
            yield from _repeated_blocks(child, f"{prefix}{name}.")
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{name}"


def _of_groups(model: nn.Module, parameters: Mapping[str, Tensor]) -> Sharding:
    names, groups = {one: name for name, one in model.named_modules()}, sharded_groups(model)
    units = [Unit(tuple(names[one] for one in group.modules), group.frees) for group in groups]
    numbers = {id(one): number for number, group in enumerate(groups) for one in group.parameters}
    pieces, shards = {}, 1
    for name, one in parameters.items():
        if not is_distributed(one):  # it was left out, and is whole on each device
            continue
        unit, placements = numbers.get(id(one)), cast(Any, one).placements
        sizes = cast(Any, one).device_mesh.shape
        sharded = [size for place, size in zip(placements, sizes, strict=True) if not place.is_replicate()]
        if unit is None or len(sharded) > 1:
            raise PlanError(
                f"parameter {name!r} is a DTensor with the placements {placements}, and not one that "
                "fully_shard alone has made. Plan the step of one device: a model with the local shapes of its layers "
                "(heads and inner width divided by the size of tensor parallelism), and mesh=... for FSDP2"
            )
        shards = max(shards, *sharded)
        policy = groups[unit].policy
        dtype = policy.reduce_dtype or policy.param_dtype or one.dtype
        pieces[name] = Piece(unit, shape_on(one, None).numel() * one.itemsize, one.numel() * dtype.itemsize)
    # Backward begins with the root, so torch does not free its parameters after forward.
    units = [unit._replace(frees=unit.frees and "" not in unit.modules) for unit in units]
    return Sharding(shards, tuple(units), pieces)


# -- the step on one device -------------------------------------------------------------------------------------------


def on_one_device(program: Program, sharding: Sharding | None, *, accumulates: bool) -> Program:
    """Returns ``program`` with what lives of parameters and gradients on one device.

    Args:
        program: of a step with whole parameters.
        sharding: ``None``: it has whole ones.
        accumulates: whether gradients are there already when the step begins.
    """
    ops = len(program.ops)
    if sharding is not None:
        spans = [*_spans(program, sharding, accumulates=accumulates)]
    elif accumulates:  # a new gradient lives until it is added
        spans = [(one.gradient_bytes, 0, one.gradient_made + 1) for one in program.weights]
    else:
        spans = []
    other_bytes = tuple(map(add, program.other_bytes, living(ops, spans)))
    return replace(program, other_bytes=other_bytes, weights=())


class _Run(NamedTuple):
    begin: int
    end: int
    unit: int


def _spans(program: Program, sharding: Sharding, *, accumulates: bool) -> Iterator[_Span]:
    """Yields what there is more, and with negative bytes what there is less, than in the step of ``program``."""
    ops, turn = len(program.ops), program.forward_ops
    forward, backward = _runs(program, sharding, 0, turn), _runs(program, sharding, turn, ops)
    of_root = [(0, ops), (0, forward[0].begin + 1 if forward else turn)]
    gathered = [
        of_root if "" in unit.modules else _gathered(number, unit, forward, backward, turn)
        for number, unit in enumerate(sharding.units)
    ]
    ended = sorted(backward, key=attrgetter("end"))
    # From where on the gradients of each unit are reduced, and until where.
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
    """Returns the runs of all units but the root in the order in which they begin; operators of no unit do not
    interrupt one."""
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
    """Returns from where until where the parameters of a unit but the root are gathered, and a copy of them."""
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


class Asked(NamedTuple):
    """What a user asks for on one rank; bytes."""

    settings: OffloadConfig
    machine: Machine
    budget: int
    states: States | None
    model: str
    """What is planned, where there are several ranks: see ``model_text``."""
    sharding: Sharding | None = None
    accumulates: bool = False

    def within(self, each: Sequence[Asked]) -> Asked:
        """The same, but what keeps to the limits of all."""
        hosts = [one.settings.host_budget for one in each if isinstance(one.settings.host_budget, int)]
        settings = replace(self.settings, host_budget=min(hosts)) if hosts else self.settings
        states = [one.states for one in each if one.states is not None]
        most = self.states and max(states, key=attrgetter("nbytes"))
        return self._replace(settings=settings, budget=min(one.budget for one in each), states=most)


_P = TypeVar("_P")


def are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agreed(ask: Callable[[], Asked], make: Callable[[Asked], _P]) -> _P:
    """What ``make`` returns for what ``ask`` returns; on several ranks what it returns on rank 0, in the limits of all.

    Modules that only one rank computes again would gather their parameters alone under FSDP2, and wait forever. All
    ranks get an error that one of them meets, so that none waits for it.
    """
    if not are_several():
        return make(ask())
    asked, own, said = _try(ask)
    answers: list[tuple[Asked | None, OffloadError | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(answers, (asked, said))
    _raise_any(own, *(error for _, error in answers))
    assert asked is not None
    each = [one for one, _ in answers if one is not None]
    others = {one.model: rank for rank, one in reversed([*enumerate(each)]) if one.model != each[0].model}
    if others:
        named = ", ".join(f"on rank {rank} {model}" for model, rank in others.items())
        raise PlanError(
            f"ranks plan different models: on rank 0 {each[0].model}, {named}. All get the plan that rank 0 makes, so "
            "give the same model on each; stages of a pipeline cannot be planned"
        )
    made, own, said = _try(lambda: make(asked.within(each))) if dist.get_rank() == 0 else (None, None, None)
    answer = [(made, said)]
    dist.broadcast_object_list(answer, src=0)
    _raise_any(own, answer[0][1])
    found = answer[0][0] if made is None else made
    assert found is not None
    return found


def model_text(model: nn.Module) -> str:
    """The class of a model, the bytes of its parameters, and a digest of its modules, parameters and buffers."""
    parts = [f"{name} {type(module).__qualname__} {module.training}" for name, module in model.named_modules()]
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        parts.append(f"{name} {tuple(one.shape)} {one.dtype} {one.requires_grad}")
    nbytes = sum(one.numel() * one.itemsize for one in model.parameters())
    return f"{type(model).__name__} of {size_text(nbytes)} in {len(parts)} parts, {digest(*parts)[:12]}"


def _try(work: Callable[[], _P]) -> tuple[_P | None, Exception | None, OffloadError | None]:
    """Returns what it does, or its error and what the other ranks raise, which wait for an answer."""
    try:
        return work(), None, None
    except Exception as error:
        text = f"on rank {dist.get_rank()}: {error if isinstance(error, OffloadError) else repr(error)}"
        return None, error, ConfigError(text) if isinstance(error, ConfigError) else PlanError(text)


def _raise_any(*errors: Exception | None) -> None:
    for error in errors:
        if error is not None:
            raise error
