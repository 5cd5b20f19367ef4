"""Random training programs as data, and a machine that runs them.

A program is a list of blocks, a block a list of instructions. An instruction names its operands by age: operand 0 is
the newest register. So every program can be run, whatever was drawn and however much of it was taken away again; what
autograd or an operator refuses becomes an entry of the trace, which has to be the same with and without offload.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import eager_offload as eo

MODIFIED = "a saved tensor was modified"

#: More registers than this, and the oldest go: a program of many views would grow without end.
_MOST_REGISTERS = 10
#: Torch's own generator of random numbers is everybody's; a thread that seeds it takes this.
_generator = threading.Lock()


class Instruction:
    """One step; subclasses say what it does."""

    def run(self, machine: Machine) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Leaf:
    """A tensor that is there before the program starts."""

    rows: int
    columns: int
    kind: str = "leaf"
    """``leaf`` and ``parameter`` require grad, a ``buffer`` does not."""
    dtype: torch.dtype = torch.float32

    def make(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(self.rows, self.columns, dtype=self.dtype, generator=generator)
        return Parameter(values) if self.kind == "parameter" else values.requires_grad_(self.kind == "leaf")


@dataclass(frozen=True)
class Block:
    """Instructions inside one context."""

    where: str
    """``offload``, ``twice`` (the same, nested), ``other`` (a second object inside the first), ``region``
    (``no_offload`` inside the context), or ``bare``."""
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Program:
    """Blocks over some leaves."""

    leaves: tuple[Leaf, ...]
    blocks: tuple[Block, ...]


class Stop(Exception):
    """Raised by a program on purpose, to leave a context in the middle."""


@dataclass
class Machine:
    """Runs a program, with up to two offloads or with none."""

    offload: eo.Offload | None = None
    other: eo.Offload | None = None
    #: What instructions name by age.
    registers: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    #: What was computed, in order: copies of tensors, and what was raised.
    trace: list[Tensor | str | None] = field(default_factory=list)
    _weights: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    #: How many values have been drawn.
    _drawn: int = 0
    #: Whether something was saved without our hooks, so that autograd checks it itself.
    _autograd_may_raise: bool = True

    def run(self, program: Program) -> None:
        """Runs all of it; then nothing of it is alive but the trace."""
        self._autograd_may_raise = self.offload is None or any(block.where == "bare" for block in program.blocks)
        # When a backward raises, torch's queue keeps the nodes that were ready to run until a later backward comes to a
        # node that is older than they are: this one.
        oldest = torch.ones((), requires_grad=True) * 1
        self.leaves += [leaf.make(seed) for seed, leaf in enumerate(program.leaves)]
        self.registers += self.leaves
        for block in program.blocks:
            try:
                with self._around(block.where):
                    for instruction in block.instructions:
                        instruction.run(self)
            except Stop:
                pass
        self._finish()
        for leaf in (*self.leaves, *self._weights.values()):
            self.note(leaf)
            self.note(leaf.grad)
        self.registers.clear()
        self.leaves.clear()
        self._weights.clear()
        oldest.backward()

    def _finish(self) -> None:
        """What is left is looked at, and some of it differentiated after the rest has gone."""
        for register in self.registers:
            self.note(register)
        self.registers[:-3] = self.registers[:-3:4]
        for age in range(len(self.registers)):
            Backward(age, retain=True, accumulate=True).run(self)

    def _around(self, where: str) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if self.offload is not None and self.other is not None and where != "bare":
            stack.enter_context(self.offload)
            if where != "offload":
                inner = {"twice": self.offload, "other": self.other, "region": eo.no_offload()}
                stack.enter_context(inner[where])
        return stack

    def get(self, age: int) -> Tensor:
        return self.registers[-1 - age % len(self.registers)]

    def put(self, tensor: Tensor) -> None:
        self.registers.append(tensor)
        if len(self.registers) > _MOST_REGISTERS:
            del self.registers[0]

    def note(self, tensor: Tensor | None) -> None:
        """Enters the values of a tensor into the trace."""
        self.trace.append(None if tensor is None else tensor.detach().clone())

    def attempt(self, step: Callable[[], object]) -> None:
        """Runs one step; what it raises goes into the trace."""
        try:
            step()
        except Exception as error:
            self.trace.append(self._described(error))

    def weight(self, *shape: int) -> Tensor:
        """A parameter, shared by all layers that want one of this shape."""
        if shape not in self._weights:
            generator = torch.Generator().manual_seed(len(self._weights))
            self._weights[shape] = Parameter(torch.randn(shape, generator=generator))
        return self._weights[shape]

    def sources(self) -> list[Tensor]:
        """All that gradients are taken for."""
        return [t for t in (*self.leaves, *self._weights.values()) if t.requires_grad]

    def seed(self) -> int:
        """Another one each time, and the same ones in every run of a program."""
        self._drawn += 1
        return self._drawn

    def _described(self, error: Exception) -> str:
        if "modified by an inplace operation" in str(error):
            assert isinstance(error, eo.SavedTensorModifiedError) or self._autograd_may_raise, repr(error)
            return MODIFIED
        if "has been modified inplace" in str(error):  # autograd's words for one of several views
            assert not isinstance(error, eo.OffloadError), repr(error)
            return MODIFIED
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


# -- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call(Instruction):
    """New registers from old ones."""

    name: str
    of: int = 0
    other: int = 1

    def run(self, machine: Machine) -> None:
        one, two = machine.get(self.of), machine.get(self.other)

        def call() -> None:
            if self.name in RANDOM:
                with _generator:
                    torch.default_generator.manual_seed(machine.seed())
                    result: object = RANDOM[self.name](one)
            elif self.name in BINARY:
                result = BINARY[self.name](one, two)
            elif self.name in LAYERS:
                result = LAYERS[self.name](one, machine)
            else:
                result = (UNARY.get(self.name) or VIEWS[self.name])(one)
            for tensor in result if isinstance(result, tuple | list) else (result,):
                assert isinstance(tensor, Tensor)
                machine.put(tensor)

        machine.attempt(call)


@dataclass(frozen=True)
class Change(Instruction):
    """Changes a register in place."""

    name: str
    of: int = 0
    other: int = 1
    without_grad: bool = False
    """Whether under ``no_grad``; autograd follows the version all the same."""

    def run(self, machine: Machine) -> None:
        one, two = machine.get(self.of), machine.get(self.other)
        with torch.no_grad() if self.without_grad else nullcontext():
            machine.attempt(lambda: CHANGES[self.name](one, two))


@dataclass(frozen=True)
class Backward(Instruction):
    """Differentiates a register."""

    of: int = 0
    retain: bool = False
    again: bool = False
    """A second time at once."""
    create: bool = False
    """``create_graph``: the gradients become registers."""
    accumulate: bool = False
    """``backward()``, which adds to ``.grad``, in place of ``grad()``, which returns."""

    def run(self, machine: Machine) -> None:
        result = machine.get(self.of)
        for _ in range(2 if self.again else 1):
            machine.attempt(lambda: self._backward(machine, result))

    def _backward(self, machine: Machine, result: Tensor) -> None:
        generator = torch.Generator().manual_seed(machine.seed())
        weight = torch.randn(result.shape, dtype=result.dtype, generator=generator)
        if self.accumulate:
            # A graph in `.grad` would be a cycle through the leaf; torch itself warns of that.
            torch.autograd.backward(result, weight, retain_graph=self.retain)
            return
        flags = {"retain_graph": self.retain or self.create, "create_graph": self.create}
        gradients = torch.autograd.grad(result, machine.sources(), weight, allow_unused=True, **flags)
        for gradient in gradients:
            machine.note(gradient)
        for gradient in [g for g in gradients if g is not None and g.requires_grad][:2]:
            machine.put(gradient)


@dataclass(frozen=True)
class Act(Instruction):
    """Does something with a register besides computing with it."""

    name: str
    of: int = 0

    def run(self, machine: Machine) -> None:
        ACTS[self.name](machine, machine.get(self.of))


def _abandon(machine: Machine, register: Tensor) -> None:
    """One of two branches is differentiated; the other, of which backward may have brought something back, goes."""

    def abandon() -> None:
        other = (register.tanh() * register).sin()
        branch = (register.sigmoid() * register).cos()
        for gradient in torch.autograd.grad(branch.sum(), machine.sources(), retain_graph=True, allow_unused=True):
            machine.note(gradient)
        del other

    machine.attempt(abandon)


def _drop(machine: Machine, register: Tensor) -> None:
    others = [one for one in machine.registers if one is not register]
    machine.registers[:] = others or machine.registers


def _mark(machine: Machine, register: Tensor, mark: Callable[[Tensor], object]) -> None:
    if machine.offload is not None:
        mark(register)


def _hook(machine: Machine, register: Tensor, factor: float) -> None:
    """Has a gradient looked at, and changed, on its way."""

    def watch(gradient: Tensor) -> Tensor:
        machine.note(gradient)
        return gradient * factor

    def hook() -> None:
        # Of the register itself torch crashes in `register_hook`, where that is a view of one changed in place.
        result = register * 1
        result.register_hook(watch)
        machine.put(result)

    machine.attempt(hook)


def _train(machine: Machine, register: Tensor) -> None:
    """An optimizer's step: leaves and weights change in place, and their gradients go."""
    with torch.no_grad():
        for source in machine.sources():
            if source.grad is not None:
                source.sub_(source.grad, alpha=0.1)
                source.grad = None


def _quiesce(machine: Machine, register: Tensor) -> None:
    """Waits until nothing is on its way."""
    if machine.offload is not None:
        machine.offload.stats(synchronize=True)


def _fail(machine: Machine, register: Tensor) -> None:
    """Leaves the block by an exception."""
    raise Stop


ACTS: dict[str, Callable[[Machine, Tensor], None]] = {
    "abandon": _abandon,
    "drop": _drop,
    "keep": partial(_mark, mark=eo.keep),
    "prefer": partial(_mark, mark=eo.prefer_offload),
    "hook": partial(_hook, factor=0.5),
    "train": _train,
    "quiesce": _quiesce,
    "fail": _fail,
}


# -- what can be called -----------------------------------------------------------------------------------------------


class Twice(torch.autograd.Function):
    """Saves an input, an intermediate and an output, and reads them twice."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        middle = tensor.sin()
        result = middle * tensor
        context.save_for_backward(tensor, middle, result)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        tensor, middle, _ = context.saved_tensors
        again, _, result = context.saved_tensors
        return gradient * (middle + again.cos() * tensor + 0 * result)


class Spoil(torch.autograd.Function):
    """Changes what it saved in its own backward, so that a second backward must not use it."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        middle = tensor.cos()
        context.save_for_backward(tensor, middle)
        return middle * tensor

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        tensor, middle = context.saved_tensors
        with torch.no_grad():
            return gradient * middle.mul_(0.5) + tensor.detach().add_(0.25)


def _segment(tensor: Tensor) -> Tensor:
    return (tensor.tanh() * tensor).cumsum(0).sin()


def _checkpointed(tensor: Tensor, use_reentrant: bool) -> Tensor:
    # Backward would set torch's generator to what it was in forward, and with it that of a thread that draws just then.
    # Nothing in the segment is random.
    return checkpoint(_segment, tensor, use_reentrant=use_reentrant, preserve_rng_state=False)


def _picked(tensor: Tensor) -> Tensor:
    return tensor[torch.arange(tensor.shape[0]) % max(tensor.shape[0] - 1, 1)]


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "relu": F.relu,
    "gelu": F.gelu,
    "softmax": lambda t: t.softmax(-1),
    "layer_norm": lambda t: F.layer_norm(t, t.shape[-1:]),
    "cumprod": lambda t: (1 + t.tanh() / 8).cumprod(0),
    "largest": lambda t: t.amax(-1, keepdim=True),
    "sorted": lambda t: t.sort(-1)[0],
    "clone": torch.clone,
    "detach": torch.detach,
    "double": lambda t: t.to(torch.float64),
    "complex": lambda t: torch.complex(t, t.sin()),
    "conjugated": lambda t: (torch.complex(t, t.sin()).conj() * torch.complex(t.cos(), t)).real,
    "negated": lambda t: torch.complex(t.cos(), t).conj().imag * t,
    "picked": _picked,
    "twice": Twice.apply,
    "spoil": Spoil.apply,
    "checkpoint": lambda t: _checkpointed(t, use_reentrant=False),
    "checkpoint_reentrant": lambda t: _checkpointed(t, use_reentrant=True),
}

RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda t: F.dropout(t, 0.4),
    "rrelu": lambda t: F.rrelu(t, training=True),
}

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "atan2": torch.atan2,
    "where": lambda a, b: torch.where(a > 0, a * b, b),
    "matmul": lambda a, b: a @ b if a.shape[-1] == b.shape[-2] else a @ a.mT,
    "gram": lambda a, b: a.mT @ a + b.sum(),
    "cat": lambda a, b: torch.cat([a, b], dim=-1 if a.shape[:-1] == b.shape[:-1] else 0),
}

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "transpose": lambda t: t.mT,
    "after_first": lambda t: t[1:],
    "late_part": lambda t: t.reshape(-1)[5 : 5 + t.numel() // 72 * 8].view(-1, 8),
    "shifted": lambda t: t.reshape(-1)[1:].unsqueeze(0),
    "every_other": lambda t: t[:, ::2],
    "expand": lambda t: t[:1].expand(4, -1),
    "halves": lambda t: t.chunk(2),
    "diagonal": lambda t: t.diagonal().unsqueeze(0),
    "overlapping": lambda t: t.as_strided((3, 4), (2, 1)),
    "conj": torch.conj,
    "real": lambda t: t.real,
    "negative": lambda t: t.conj().imag,
}


def _linear(tensor: Tensor, machine: Machine) -> Tensor:
    return F.linear(tensor, machine.weight(8, tensor.shape[-1]), machine.weight(8))


def _batch_norm(tensor: Tensor, machine: Machine) -> Tensor:
    mean, variance = torch.zeros(tensor.shape[1]), torch.ones(tensor.shape[1])
    return F.batch_norm(tensor, mean, variance, machine.weight(tensor.shape[1]), training=True)


def _embedding(tensor: Tensor, machine: Machine) -> Tensor:
    return F.embedding(torch.arange(tensor.shape[0]) % 5, machine.weight(5, tensor.shape[-1])) * tensor


LAYERS: dict[str, Callable[[Tensor, Machine], Tensor]] = {
    "linear": _linear,
    "batch_norm": _batch_norm,
    "embedding": _embedding,
}

CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "mul_": lambda a, b: a.mul_(0.5),
    "add_": lambda a, b: a.add_(b),
    "sub_from_row_": lambda a, b: a[0].sub_(1),
    "zero_slice_": lambda a, b: a[1:].zero_(),
    "copy_row_": lambda a, b: a[:1].copy_(b[:1]),
    "relu_": lambda a, b: a.relu_(),
    "transposed_mul_": lambda a, b: a.mT.mul_(1.5),
    "detached_add_": lambda a, b: a.detach().add_(1),
}


# -- what is drawn ----------------------------------------------------------------------------------------------------

AGES = st.integers(0, 7)


def calls(names: dict[str, Any]) -> st.SearchStrategy[Instruction]:
    return st.builds(Call, st.sampled_from(sorted(names)), AGES, AGES)


def backwards() -> st.SearchStrategy[Instruction]:
    # A second backward of a graph that is gone raises, which is of interest, but not most of the time.
    seldom = st.sampled_from([False, False, False, True])
    return st.builds(Backward, AGES, retain=st.booleans(), again=seldom, create=seldom, accumulate=seldom)


def instructions() -> st.SearchStrategy[Instruction]:
    changes = st.builds(Change, st.sampled_from(sorted(CHANGES)), AGES, AGES, st.booleans())
    acts = st.builds(Act, st.sampled_from(sorted(ACTS)), AGES)
    unary, binary = calls(UNARY | RANDOM), calls(BINARY)
    return st.one_of(unary, unary, binary, binary, calls(VIEWS), calls(LAYERS), backwards(), changes, acts, acts)


def programs() -> st.SearchStrategy[Program]:
    sides = st.sampled_from([8, 1, 4, 64])
    others = [torch.float64, torch.complex64, torch.bfloat16, torch.float16]
    dtypes = st.sampled_from([*[torch.float32] * 5, *others])
    leaves = st.builds(Leaf, sides, sides, st.sampled_from(["leaf", "parameter", "buffer"]), dtypes)
    wheres = st.sampled_from(["offload", "offload", "offload", "offload", "twice", "other", "region", "bare"])
    blocks = st.builds(Block, wheres, st.lists(instructions(), min_size=5, max_size=16).map(tuple))
    # The first leaf is such that something can be learnt from every program.
    firsts = st.just(Leaf(8, 8))
    both = st.tuples(st.lists(leaves, max_size=2), firsts).map(lambda drawn: (*drawn[0], drawn[1]))
    return st.builds(Program, both, st.lists(blocks, min_size=2, max_size=5).map(tuple))
