"""The corpus: every program that tests train with offload and without.

A program is a function of a :class:`Run`. It makes its inputs and models, has its forwards run the way that the run
says, and returns whatever must have the same bits each time::

    @program("H04-a-matrix-and-its-transpose")
    def _(run: Run) -> object:
        x = leaf(64, 64)
        with run.around:
            result = run.forward(lambda x: (x * 2).t() @ (x * 2))(x)
        result.sum().backward()
        return x.grad

Most have one forward and one backward, and are written as that forward with its inputs (:func:`step`). The name of a
program begins with the ids of the hazards that it shows. ``tests/test_matrix.py`` runs the corpus.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Flag(Enum):
    """What not every way and every place can do with a program, or what is different about its counts."""

    EAGER = auto()
    """Its forward cannot be compiled as one function, or a compiler saves other tensors of it."""
    COMPILED = auto()
    """Only a compiler takes it, or eager code has nothing of the kind to show: it does not run uncompiled."""
    NO_INDUCTOR = auto()
    """Inductor does not compile it even without offload, or makes nothing else of it than ``aot_eager`` does."""
    NO_CAPTURE = auto()
    """No replay repeats it: it draws numbers, changes buffers, or asks the host or a backward of its own."""
    NO_CHECKPOINT = auto()
    """Its forward may not run twice, or what it saves is the point."""
    HOST = auto()
    """It needs tensors that the virtual device does not have."""
    DEVICE = auto()
    """It computes on streams of an accelerator: the virtual device, or a GPU."""
    HELD = auto()
    """The program itself holds what it saves: that need not leave a second time."""
    SOURCES_CHANGE = auto()
    """It writes over what it saved, while that may be on its way out: see :attr:`tests.hazards.backends.Backend`."""
    NO_SCRIPT = auto()
    """When its copies start depends on threads, or on what the process has done before."""
    NOTHING_BACK = auto()
    """Backward asks for nothing that has left."""


@dataclass
class Run:
    """One way of running a program: what stands around its forwards, and what becomes of them."""

    around: AbstractContextManager[Any] = field(default_factory=nullcontext)
    #: Takes a forward and returns what is called in its place: compiled, checkpointed, or the same.
    forward: Callable[..., Any] = lambda function: function


#: Makes a forward and its inputs: tensors and modules.
Step = Callable[[], tuple[Callable[..., Any], Sequence[Any]]]


@dataclass(frozen=True, eq=False)
class Program:
    """A program of the corpus."""

    name: str
    body: Callable[[Run], object]
    #: The part of the bytes that could move that has to.
    moved: float
    flags: frozenset[Flag]
    #: Of the ``Offload``.
    fields: dict[str, Any]
    #: Makes its forward and the inputs, where it has one forward and one backward.
    step: Step | None = None

    @property
    def hazards(self) -> list[str]:
        """The ids of the hazards that it shows."""
        return re.findall(r"H\d\d", self.name)

    @property
    def file(self) -> str:
        """Where it is written, as named from ``tests/`` on."""
        function: Any = self.step or self.body
        while isinstance(function, partial):
            function = function.func
        return "/".join(function.__module__.split(".")[1:]) + ".py"

    def __str__(self) -> str:
        return self.name

    def __call__(self, run: Run) -> object:
        return self.body(run)


#: The files of the corpus. In this order their programs share out the ways and places of the matrix.
FILES = (
    *("compiled", "in_place", "checkpoints", "custom_functions", "devices", "streams", "exceptions", "graphs"),
    *("layers", "layouts", "regions", "repeated", "tables", "threads", "views", "weights", "wrappers"),
)
#: All programs, by name; filled by :func:`corpus`.
_PROGRAMS: dict[str, Program] = {}


def program(
    name: str, *flags: Flag, moved: float = 0.9, step: Step | None = None, **fields: Any
) -> Callable[[Callable[[Run], object]], None]:
    """Adds a function of a :class:`Run` to the corpus.

    Args:
        name: begins with the hazards' ids, and has no spaces.
        flags: what is different about it.
        moved: the part of the bytes that could move that has to.
        step: makes its forward and inputs, where it has one of each.
        fields: of the ``Offload``.
    """

    def added(body: Callable[[Run], object]) -> None:
        assert name not in _PROGRAMS, name
        assert " " not in name, name
        _PROGRAMS[name] = Program(name, body, moved, frozenset(flags), fields, step)

    return added


def step(name: str, *flags: Flag, moved: float = 0.9, **fields: Any) -> Callable[[Step], None]:
    """Adds a program of one forward and one backward to the corpus: a function that returns both it and its inputs.

    What is differentiated is the sum of what forward returns. Compared are that, the inputs afterwards, lists of what
    backward has seen among them, and the gradients of inputs and of the parameters of models among them.
    """

    def added(make: Step) -> None:
        def body(run: Run) -> object:
            function, inputs = make()
            with run.around:
                outputs = run.forward(function)(*inputs)
            return differentiated(outputs, inputs)

        program(name, *flags, moved=moved, step=make, **fields)(body)

    return added


def differentiated(outputs: Any, inputs: Sequence[Any]) -> list[object]:
    """What there is to compare once the sum of ``outputs`` is differentiated."""
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    shown, loss = [one.detach() for one in outputs], sum_of(outputs)
    del outputs
    loss.backward()  # type: ignore[no-untyped-call]
    del loss
    trained = [one for given in inputs for one in (given.parameters() if isinstance(given, nn.Module) else [given])]
    buffers = [one for given in inputs if isinstance(given, nn.Module) for one in given.buffers()]
    return [
        shown,
        [one.detach() for one in (*trained, *buffers) if isinstance(one, Tensor)],
        [one.grad for one in trained if isinstance(one, Tensor) and one.is_leaf and one.requires_grad],
        [one for one in inputs if isinstance(one, list)],
    ]


class raises:  # as pytest has it
    """Asserts that what is done inside raises a ``RuntimeError`` that says this, where pytest may not be installed.

    A class, since from Python 3.12 on a generator that has taken an error is in a cycle with it, and so are the frames
    of that, until the garbage collector comes.
    """

    def __init__(self, said: str) -> None:
        self.said = said

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is not None and not isinstance(error, RuntimeError):
            return False
        found = "nothing was raised" if error is None else str(error)
        assert self.said in found, found
        return True


def sum_of(outputs: Sequence[Tensor]) -> Tensor:
    """The sum of all that can be differentiated."""
    parts = [one.abs() if one.is_complex() else one for one in outputs if one.requires_grad]
    return torch.stack([one.sum().double() for one in parts]).sum()


def corpus() -> list[Program]:
    """Every program, in the order of :data:`FILES` and of their texts, whichever file was imported first."""
    for name in FILES:
        importlib.import_module(f"{__name__}.{name}")
    return sorted(_PROGRAMS.values(), key=lambda one: FILES.index(Path(one.file).stem))


def leaf(*size: int, seed: int = 1, grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    """A leaf on the default device with values of its own, the same ones for the same ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator, dtype=dtype, device="cpu")
    return values.to(torch.get_default_device()).requires_grad_(grad)
