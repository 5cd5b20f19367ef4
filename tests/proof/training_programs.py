"""Random training runs, each drawn from one number: models, hooks, losses, and what a loop does with its graphs.

A run draws everything from a generator of its own that sees neither tensors nor the offload, so the same number trains
the same way with and without one. What it computed is a trace of tensors and of what was raised.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: Makes the context that forwards run in: a new ``nullcontext``, or the one ``Offload``.
Around = Callable[[], AbstractContextManager[object]]
Trace = list[Tensor | str | None]

WIDTH = 16
#: torch's generator of random numbers belongs to the process; a run in a thread of its own leaves it alone.
_DRAWS_NUMBERS = frozenset({"Dropout", "Noise", "Attention with dropout"})


# -- modules ----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Adds what a module makes of its input, in place or not."""

    def __init__(self, inner: nn.Module, *, in_place: bool) -> None:
        super().__init__()
        self.inner, self.in_place = inner, in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y.add_(x) if self.in_place and y.data_ptr() != x.data_ptr() else y + x


class Gated(nn.Module):
    """Two readers of one tensor with an operator in between, as in a Llama's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Three views of one fused projection."""

    def __init__(self, *, fused: bool, dropout: float) -> None:
        super().__init__()
        self.projection, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fused, self.dropout = fused, dropout

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            q, k, v = self.projection(x).chunk(3, dim=-1)
        else:
            weights, biases = self.projection.weight.chunk(3), self.projection.bias.chunk(3)
            q, k, v = (F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
        q, k, v = (t.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(x.shape))


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x.transpose(1, 2)))).transpose(1, 2)


class Views(nn.Module):
    """Saves parts, transposes and broadcasts of one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.5
        left, right = y.chunk(2, dim=-1)
        mixed = torch.cat([left.sin() * right, right.exp().clamp(max=3.0) * left], -1)
        scale = y.mean(-1, keepdim=True).expand_as(y)
        return mixed * scale + (y.transpose(-1, -2) @ y).mean(-1).unsqueeze(1) * y


class InPlace(nn.Module):
    """Changes in place that autograd allows."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 0.5
        y.relu_()
        z = y + 1
        z.mul_(0.5).add_(x)
        return z


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(x, training=True)


class Complex(nn.Module):
    """Computes with pairs of numbers as complex ones, conjugated ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH // 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)  # torch hardly computes with complex halves
        z = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2)).contiguous())
        y = (z * torch.view_as_complex(self.weight.to(wide)).conj()).tanh() * z
        return torch.view_as_real(y).flatten(-2).to(x.dtype)


class _Given(torch.autograd.Function):
    """Its backward returns what it saved, as a gradient."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (w * x).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return x, None


class _TwiceRead(torch.autograd.Function):
    """Its backward reads what it saved twice, and in another order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _, y = ctx.saved_tensors
        again = ctx.saved_tensors[1]
        return grad * (1 - y * again)


class TwiceRead(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _TwiceRead.apply(x)


class Measured(nn.Module):
    """Saves a tensor for a number that is not differentiated, then writes where no version counter sees it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        metric = (h * h).mean()
        work = (x @ x.transpose(-1, -2)).tanh().sum() * 0
        del metric
        if self.how == "data":
            h.data.clamp_(-0.5, 0.5)
        elif self.how == "numpy" and h.dtype is torch.float32 and h.is_cpu and not torch.compiler.is_compiling():
            h.detach().numpy()[:] *= 0.5
        return h * self.weight + work


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


_LEAVES: dict[str, Callable[[random.Random], nn.Module]] = {
    "Linear": lambda draw: nn.Linear(WIDTH, WIDTH),
    "LayerNorm": lambda draw: nn.LayerNorm(WIDTH),
    "GELU": lambda draw: nn.GELU(),
    "Softmax": lambda draw: nn.Softmax(-1),
    "SiLU": lambda draw: nn.SiLU(inplace=False),
    "Dropout": lambda draw: nn.Dropout(0.3, inplace=draw.random() < 0.2),
    "Noise": lambda draw: Noise(),
    "Gated": lambda draw: Gated(),
    "Attention": lambda draw: Attention(fused=draw.random() < 0.5, dropout=0.0),
    "Attention with dropout": lambda draw: Attention(fused=draw.random() < 0.5, dropout=0.2),
    "Recurrent": lambda draw: Recurrent(draw.choice(["LSTM", "GRU", "RNN"])),
    "Convolution": lambda draw: Convolution(),
    "Views": lambda draw: Views(),
    "InPlace": lambda draw: InPlace(),
    "TwiceRead": lambda draw: TwiceRead(),
    "Measured": lambda draw: Measured(draw.choice(["data", "numpy"])),
}
#: What a compiler is given: it refuses, or treats as its own affair, what the others do.
_COMPILABLE = sorted(_LEAVES.keys() - {"Measured", "TwiceRead", "Noise", "Recurrent"})


def _model(draw: random.Random, names: list[str], *, may_checkpoint: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(draw.randint(2, 5)):
        layer = _LEAVES[draw.choice(names)](draw)
        if draw.random() < 0.4:
            layer = Residual(layer, in_place=draw.random() < 0.3)
        # A recomputation stops when the last tensor has been saved, which `rrelu` does before it has filled it.
        if may_checkpoint and draw.random() < 0.2 and not any(isinstance(part, Noise) for part in layer.modules()):
            layer = Checkpointed(layer, reentrant=draw.random() < 0.5)
        layers.append(layer)
    if draw.random() < 0.3:  # tied weights
        first = nn.Linear(WIDTH, WIDTH)
        second = nn.Linear(WIDTH, WIDTH, bias=False)
        second.weight = first.weight
        layers += [first, second]
    return nn.Sequential(*layers)


def _dtype_and_layers(number: int, device: torch.device) -> tuple[torch.dtype, list[nn.Module]]:
    """In what a run trains that is one of float32, and layers that it has beside those that are drawn.

    By a generator of its own, so that a number stands for the same run in all else; and of such a seed that the runs
    that failed once are the same.
    """
    draw = random.Random(f"{number} in other dtypes")
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    layers: list[nn.Module] = [Complex()] if draw.random() < 0.25 else []
    # Elsewhere torch lowers some modules to operators that mix halves with float32, and raise.
    return dtype if device.type == "cpu" else torch.float32, layers


def _hook_modules(draw: random.Random, model: nn.Sequential, trace: Trace) -> list[Tensor]:
    """Installs hooks that read, replace, or hold on to what modules make; returns where the last kind puts it."""
    held: list[Tensor] = []

    def replace(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    def watch(module: nn.Module, arguments: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: trace.append(grad.clone()))

    def hold(module: nn.Module, arguments: Any, output: Tensor) -> None:
        held.append(output.detach())

    def scale(module: nn.Module, arguments: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: grad * 0.5)

    for layer in model:
        if draw.random() < 0.25:
            layer.register_forward_hook(draw.choice([replace, watch, hold, scale]))
    return held


# -- loops ------------------------------------------------------------------------------------------------------------


class _Loop:
    """One training run."""

    def __init__(self, number: int, around: Around, device: torch.device, *, alone: bool) -> None:
        draw = random.Random(number)
        self.draw, self.around, self.device, self.trace = draw, around, device, Trace()
        names = sorted(_LEAVES if alone else _LEAVES.keys() - _DRAWS_NUMBERS)
        self.dtype = draw.choice([torch.float32, torch.float32, torch.float32, torch.float64])
        self.autocast = alone and self.dtype is torch.float32 and draw.random() < 0.2
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        self.model = _model(draw, names, may_checkpoint=alone).to(self.dtype)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=self.dtype) * 0.2)
        self.model.to(device)
        self.gain = nn.Parameter(torch.randn(WIDTH, generator=generator, dtype=self.dtype).to(device))
        self.held = _hook_modules(draw, self.model, self.trace)
        self._take_other_dtypes(number)
        self.generator, self.alone = generator, alone
        self.batch, self.length = draw.choice([2, 3, 4]), draw.choice([4, 6, 8])
        parameters = [*self.model.parameters(), self.gain]
        kinds: list[Callable[..., torch.optim.Optimizer]] = [torch.optim.SGD, torch.optim.AdamW]
        self.optimizer = draw.choice(kinds)(parameters, lr=1e-2)
        self.gives = draw.random() < 0.3

    def _take_other_dtypes(self, number: int) -> None:
        dtype, layers = _dtype_and_layers(number, self.device)
        if self.dtype is torch.float32 and not self.autocast:
            self.dtype = dtype
        self.model.extend(layers).to(self.device, self.dtype)
        self.gain.data = self.gain.data.to(self.dtype)

    def steps(self) -> Trace:
        # When a backward raises, torch's queue keeps the nodes that were ready to run until a later backward comes to a
        # node that is older than they are: this one.
        oldest = torch.ones((), requires_grad=True, device=self.device) * 1
        for _ in range(self.draw.randint(2, 4)):
            try:
                self._step()
            except RuntimeError as error:
                self.trace.append(_kind_of(error))
            self.held.clear()
            self.optimizer.zero_grad(set_to_none=self.draw.random() < 0.5)
        oldest.backward()
        self.trace += [parameter.detach().clone() for parameter in self.model.parameters()]
        return self.trace

    def _input(self) -> Tensor:
        if self.draw.random() < 0.2:
            self.batch = self.draw.choice([2, 3, 4])
        x = torch.randn(self.batch, self.length, WIDTH, generator=self.generator, dtype=self.dtype).to(self.device)
        if self.draw.random() < 0.3:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        return x.requires_grad_(self.draw.random() < 0.3)

    def _forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            y = self.model(x).to(self.dtype)
        loss: Tensor = (y * self.gain).square().mean()
        if self.gives:
            loss = loss + _Given.apply(self.gain, x.detach()[0, 0])
        return loss

    def _step(self) -> None:
        draw = self.draw
        if self.alone:
            torch.manual_seed(draw.randrange(1 << 30))
        way = draw.choice(_WAYS)
        x = self._input()
        loss: Tensor = way(self, x)
        everything = [*self.model.parameters(), self.gain]
        self.trace += [loss.detach().clone(), x.grad]
        if draw.random() < 0.3:
            torch.nn.utils.clip_grad_norm_(everything, 1.0)
        self.trace += [None if parameter.grad is None else parameter.grad.clone() for parameter in everything]
        self.trace.append(x.detach().clone())
        self.optimizer.step()

    def _inside(self, x: Tensor) -> Tensor:
        with self.around():
            return self._forward(x)

    # -- what a step does with its graphs; each returns the loss ---------------------------------------------------

    def plain(self, x: Tensor) -> Tensor:
        loss = self._inside(x)
        if self.draw.random() < 0.2 and self.held:
            self.held[0].mul_(2)  # a saved tensor changes before backward: autograd raises, if it is asked for
        loss.backward()
        return loss

    def backward_inside(self, x: Tensor) -> Tensor:
        with self.around():
            loss = self._forward(x)
            loss.backward()
        return loss

    def accumulate(self, x: Tensor) -> Tensor:
        for _ in range(self.draw.randint(2, 3)):
            loss = self._inside(x)
            (loss / 2).backward()
        return loss

    def two_graphs(self, x: Tensor) -> Tensor:
        first, second = self._inside(x), self._inside(x * 2)
        for loss in self.draw.sample([first, second], 2):
            loss.backward()
        return second

    def dropped(self, x: Tensor) -> Tensor:
        self._inside(x)
        return self.plain(x)

    def retained(self, x: Tensor) -> Tensor:
        loss = self._inside(x)
        loss.backward(retain_graph=True)
        torch.nn.utils.clip_grad_norm_([self.gain], 0.1)
        loss.backward()
        return loss

    def part_of_the_graph(self, x: Tensor) -> Tensor:
        half = len(self.model) // 2
        with self.around():
            middle = self.model[:half](x)
            loss = (self.model[half:](middle) * self.gain).square().mean()
        if middle.requires_grad:
            self.trace += torch.autograd.grad(loss, middle, retain_graph=self.draw.random() < 0.5)
        return loss

    def second_order(self, x: Tensor) -> Tensor:
        with self.around():
            loss = self._forward(x)
            wanted = [x] if x.requires_grad else [self.gain]
            grads = torch.autograd.grad(loss, wanted, create_graph=True)
            loss = loss + torch.stack([grad.square().mean() for grad in grads]).sum()
        loss.backward()
        return loss

    def failed_before(self, x: Tensor) -> Tensor:
        with suppress(ValueError), self.around():
            self._forward(x)
            raise ValueError("on purpose")
        return self.plain(x)


_WAYS: list[Callable[[_Loop, Tensor], Tensor]] = [
    _Loop.plain,
    _Loop.plain,
    _Loop.backward_inside,
    _Loop.accumulate,
    _Loop.two_graphs,
    _Loop.dropped,
    _Loop.retained,
    _Loop.part_of_the_graph,
    _Loop.second_order,
    _Loop.failed_before,
]


def _kind_of(error: RuntimeError) -> str:
    """What was raised, where autograd's words and the library's may differ."""
    # Of one among several views autograd says the second: it looks for the view's node before it looks at the version.
    modified = ("modified by an inplace operation", "has been modified inplace")
    return "modified" if any(text in str(error) for text in modified) else type(error).__name__ + str(error)[:60]


def train(number: int, around: Around, device: torch.device) -> Trace:
    """The run that ``number`` stands for, in eager code."""
    return _Loop(number, around, device, alone=True).steps()


def train_in_threads(number: int, around: Around, device: torch.device) -> Trace:
    """Three runs at the same time, in threads of their own."""
    all_there = threading.Barrier(3)

    def run(thread: int) -> Trace:
        all_there.wait()
        return _Loop(3 * number + thread, around, device, alone=False).steps()

    # A new thread may begin with another number of OpenMP threads than torch's, and end sums in other bits.
    with ThreadPoolExecutor(3, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)) as pool:
        return [entry for trace in pool.map(run, range(3)) for entry in trace]


def train_compiled(number: int, around: Around, device: torch.device) -> Trace:
    """A run whose model is compiled with ``aot_eager``, in whole or by layers."""
    draw, trace = random.Random(number), Trace()
    torch.manual_seed(number)
    dtype, layers = _dtype_and_layers(number, device)
    model = _model(draw, _COMPILABLE, may_checkpoint=draw.random() < 0.3).extend(layers).to(device, dtype)
    if draw.random() < 0.3:
        for layer in model:
            layer.compile(backend="aot_eager")
        call: Callable[[Tensor], Tensor] = model
    else:
        call = torch.compile(model, backend="aot_eager", dynamic=draw.choice([None, None, True]))
    gain = nn.Parameter(torch.ones(WIDTH, device=device, dtype=dtype))
    batches = draw.choice([[2, 2, 2], [2, 4, 3]])
    for batch in batches:
        x = torch.randn(batch, 4, WIDTH).to(device, dtype).requires_grad_(draw.random() < 0.5)
        retain = draw.random() < 0.2
        dropped = draw.random() < 0.2
        try:
            with around():
                loss = (call(x) * gain).square().mean()
            if dropped:
                del loss
                with around():
                    loss = (call(x) * gain).square().mean()
        except RuntimeError as error:  # torch does not compile the model: it changes in place what it has saved
            return [*trace, _kind_of(error)]
        try:
            loss.backward(retain_graph=retain)
            if retain:
                loss.backward()
        except RuntimeError as error:  # torch has donated buffers of the graph to its backward
            trace.append(_kind_of(error))
        trace += [loss.detach().clone(), x.grad, *(p.grad for p in model.parameters()), gain.grad]
        for parameter in (*model.parameters(), gain):
            parameter.grad = None
    return trace
