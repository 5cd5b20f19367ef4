"""Training loops of three steps each: functions of what stands around forwards, which return all that they computed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.virtual_device import NAME

#: Makes the context that forwards run in.
Around: TypeAlias = Callable[[], AbstractContextManager[object]]
#: Losses, gradients and parameters, on the host.
Trace: TypeAlias = list[Tensor]
Loop: TypeAlias = Callable[[Around], Trace]

WIDTH, ROWS, STEPS = 32, 256, 3
WORDS, TOKENS, SEQUENCES = 64, 48, 4


# -- models -----------------------------------------------------------------------------------------------------------


_PRODUCTS = [torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]


class Layer(nn.Module):
    """A layer of a transformer with a causal mask, checkpointed where ``reentrant`` says how.

    Args:
        selective: whether a checkpoint saves products.
    """

    def __init__(self, reentrant: bool | None = None, *, selective: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projection, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.reentrant = reentrant
        self.how = {"context_fn": partial(create_selective_checkpoint_contexts, _PRODUCTS)} if selective else {}

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self._inner(x)
        out: Tensor = checkpoint(self._inner, x, use_reentrant=self.reentrant, **self.how)
        return out

    def _inner(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (4, WIDTH // 4)).transpose(1, 2) for t in self.projection(self.first(x)).chunk(3, dim=-1)
        )
        scores = (q @ k.transpose(-1, -2)) * (WIDTH // 4) ** -0.5
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        out: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return out


def transformer(layers: int = 3, *, reentrant: bool | None = None, selective: bool = False) -> nn.Sequential:
    """From words to a score for each word."""
    return _on_device(
        nn.Embedding(WORDS, WIDTH),
        *(Layer(reentrant, selective=selective) for _ in range(layers)),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WORDS),
    )


def mlp(depth: int = 6) -> nn.Sequential:
    return _on_device(*(part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def _on_device(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers).to(NAME)


def words(rows: int = SEQUENCES, tokens: int = TOKENS) -> Tensor:
    return torch.randint(WORDS, (rows, tokens)).to(NAME)


def numbers(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH).to(NAME)


# -- steps ------------------------------------------------------------------------------------------------------------


def _loss(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    y = model(batch)
    if batch.is_floating_point():
        return y.square().mean()
    return F.cross_entropy(y[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def _train(
    model: nn.Module,
    batches: Sequence[Tensor],
    around: Around,
    *,
    call: Callable[[Tensor], Tensor] | None = None,
    inside: bool = False,
    accumulate: int = 1,
) -> Trace:
    """A step for each ``accumulate`` of ``batches``; with ``inside`` backward is called within the context."""
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), list[Tensor]()
    for place, batch in enumerate(batches, 1):
        with around():
            loss = _loss(call or model, batch)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        seen.append(loss.detach())
        del loss
        if place % accumulate == 0:
            seen += [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return [entry.cpu() for entry in (*seen, *model.parameters(), *model.buffers())]


def _as_it_is(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return model


# -- loops ------------------------------------------------------------------------------------------------------------


def plain_mlp(around: Around) -> Trace:
    return _train(mlp(), [numbers() for _ in range(STEPS)], around)


def plain_transformer(around: Around) -> Trace:
    return _train(transformer(), [words() for _ in range(STEPS)], around)


def llama(around: Around) -> Trace:
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[attr-defined]  # transformers fills itself lazily

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(NAME)

    def call(batch: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=batch, use_cache=False).logits
        return logits

    return _train(model, [words() for _ in range(STEPS)], around, call=call)


def batch_norm_and_dropout(around: Around) -> Trace:
    layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2)]
    model = _on_device(*layers, nn.Linear(2 * WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.1))
    return _train(model, [numbers() for _ in range(STEPS)], around)


def convolutions(around: Around) -> Trace:
    layers = [part for _ in range(4) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU())]
    model = _on_device(*layers, nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.Flatten())
    return _train(model, [torch.randn(8, 4, 16, 16).to(NAME) for _ in range(STEPS)], around)


def accumulation(around: Around) -> Trace:
    return _train(mlp(), [numbers() for _ in range(2 * STEPS)], around, accumulate=2)


def sizes_that_vary(around: Around) -> Trace:
    sizes = [(4, 48), (2, 31), (3, 64), (4, 48), (1, 17)]
    return _train(transformer(2), [words(*size) for size in sizes], around)


def checkpointed(around: Around) -> Trace:
    return _train(transformer(reentrant=False), [words() for _ in range(STEPS)], around)


def checkpointed_selectively(around: Around) -> Trace:
    return _train(transformer(reentrant=False, selective=True), [words() for _ in range(STEPS)], around)


def checkpointed_by_reentry(around: Around) -> Trace:
    return _train(transformer(reentrant=True), [words() for _ in range(STEPS)], around)


def backward_inside(around: Around) -> Trace:
    return _train(transformer(2), [words() for _ in range(STEPS)], around, inside=True)


def several_graphs(around: Around) -> Trace:
    """Graphs that are alive together, whose backwards come in another order than their forwards."""
    model, trace = mlp(4), Trace()
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        losses = []
        for _ in order:
            with around():
                losses.append(_loss(model, numbers(128)))
        for place in order:
            losses[place].backward(retain_graph=place == 1)
        losses[1].backward()
        trace += [loss.detach() for loss in losses]
    return [entry.cpu() for entry in (*trace, *(p.grad for p in model.parameters() if p.grad is not None))]


def two_devices(around: Around) -> Trace:
    """Half of the model on each; autograd has a thread for each."""
    there = torch.device(NAME, 1)
    first, second = mlp(3), mlp(3).to(there)
    model = nn.Sequential(first, second)
    return _train(model, [numbers() for _ in range(STEPS)], around, call=lambda x: second(first(x).to(there)).to(NAME))


def side_stream(around: Around) -> Trace:
    """Every other step computes on a stream of the program's own."""
    model, trace = mlp(), Trace()
    home, side = torch.accelerator.current_stream(), torch.Stream(device=NAME)
    for step in range(STEPS + 1):
        batch = numbers()
        stream = side if step % 2 else home
        stream.wait_stream(home)
        with stream:
            with around():
                loss = _loss(model, batch)
            loss.backward()
        home.wait_stream(stream)
        trace.append(loss.detach().cpu())
        del loss
    return [*trace, *(parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None)]


def three_threads(around: Around) -> Trace:
    """Three models at the same time, two of them on a device and a stream of the thread's own."""
    runs = [(mlp(4), [numbers(128) for _ in range(STEPS)]) for _ in range(3)]
    all_there = threading.Barrier(len(runs))
    torch.accelerator.synchronize()

    def run(place: int) -> Trace:
        all_there.wait()
        model, batches = runs[place]
        with torch.Stream(device=NAME) if place else torch.accelerator.current_stream():
            return _train(model, batches, around)

    with ThreadPoolExecutor(len(runs)) as pool:
        return list(itertools.chain.from_iterable(pool.map(run, range(len(runs)))))


def sizes_of_an_mlp(around: Around, compile: Callable[[nn.Module], Callable[[Tensor], Tensor]] = _as_it_is) -> Trace:
    """A model that ``compile`` may have made faster, once for the first size and once for all."""
    model = mlp(3)
    return _train(model, [numbers(rows) for rows in (64, 64, 48, 80)], around, call=compile(model))


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        plain_mlp,
        plain_transformer,
        llama,
        batch_norm_and_dropout,
        convolutions,
        accumulation,
        sizes_that_vary,
        checkpointed,
        checkpointed_selectively,
        checkpointed_by_reentry,
        backward_inside,
        several_graphs,
        two_devices,
        side_stream,
        three_threads,
    )
}
#: Elsewhere the peak is that of what a layer recomputes.
PEAKS_OF_ACTIVATIONS = LOOPS.keys() - {"checkpointed", "checkpointed_by_reentry"}
