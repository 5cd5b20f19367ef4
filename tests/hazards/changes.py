"""Programs that change a saved tensor in place and read it in backward: autograd finds out, and so must we."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hazards.programs import leaf

__all__ = ["MODIFIED"]

Around: TypeAlias = AbstractContextManager[Any]
Program: TypeAlias = Callable[[Around], object]


def no_grad(change: Callable[[], object]) -> None:
    with torch.no_grad():
        change()


def an_input(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        y = w * x
        x.mul_(10)
    y.sum().backward()
    return w.grad


def an_input_after_the_context(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        y = w * x
    x.mul_(10)
    y.sum().backward()
    return w.grad


def an_output(offload: Around) -> object:
    a = leaf(64, 64)
    with offload:
        b = a.exp()
        b.add_(1)
    b.sum().backward()
    return a.grad


def an_output_after_the_context(offload: Around) -> object:
    a = leaf(64, 64)
    with offload:
        b = (a * 2).exp()
    b.add_(1)
    b.sum().backward()
    return a.grad


def an_intermediate_with_a_history(offload: Around) -> object:
    a, w = leaf(64, 64), leaf(64, 64, seed=2)
    with offload:
        h = a * 2
        y = h @ w
        h.relu_()
        z = y + h
    z.sum().backward()
    return w.grad


def changed_and_changed_back(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        y = w * x
    x.mul_(2).div_(2)
    y.sum().backward()
    return w.grad


def an_added_zero(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        y = w * x
    x.add_(0)
    y.sum().backward()
    return w.grad


def a_base_through_a_view(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        y = w * x
    x[0].zero_()
    y.sum().backward()
    return w.grad


def a_small_view_through_its_base(offload: Around) -> object:
    w, x = leaf(64), leaf(64, 64, seed=2, grad=False)
    with offload:
        y = w * x[3]
    x[0].zero_()
    y.sum().backward()
    return w.grad


def a_transpose_through_its_base(offload: Around) -> object:
    w, x = leaf(32, 64), leaf(64, 32, seed=2, grad=False)
    with offload:
        y = w * x.t()
    x.zero_()
    y.sum().backward()
    return w.grad


def through_a_detached_alias(offload: Around) -> object:
    a, w = leaf(64, 64), leaf(64, 64, seed=2)
    with offload:
        h = a * 2
        y = h * w
    h.detach().add_(1)
    y.sum().backward()
    return w.grad


def by_an_out_argument(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        y = w * x
    torch.add(x, 1, out=x)
    y.sum().backward()
    return w.grad


def by_an_index(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        y = w * x
    x[x > 0] = 0
    y.sum().backward()
    return w.grad


def in_inference_mode(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        y = w * x
    with torch.inference_mode():
        x.mul_(10)
    y.sum().backward()
    return w.grad


def only_its_shape(offload: Around) -> object:
    w, x = leaf(32, 64), leaf(32, 64, seed=2, grad=False)
    with offload:
        y = w * x
    x.t_()
    y.sum().backward()
    return w.grad


def an_index(offload: Around) -> object:
    table, index = leaf(64, 64), torch.arange(64)
    with offload:
        y = F.embedding(index, table)
    index.fill_(0)
    y.sum().backward()
    return table.grad


def the_earlier_of_two_saves(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        first = w * x
        x.mul_(2)
        second = w * x
    (first + second).sum().backward()
    return w.grad


def a_parameter_by_its_optimizer(offload: Around) -> object:
    layer, x = nn.Linear(64, 64), leaf(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with offload:
        y = layer(x * 2).tanh()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    y.sum().backward()
    return x.grad


def a_leaf_that_requires_grad(offload: Around) -> object:
    a, b = leaf(64, 64), leaf(64, 64, seed=2)
    with offload:
        y = a * b.exp()
    no_grad(lambda: a.mul_(2))
    y.sum().backward()
    return b.grad


def a_sparse_tensor(offload: Around) -> object:
    dense, w = torch.eye(64).to_sparse(), leaf(64, 64)
    with offload:
        y = torch.sparse.mm(dense, w.exp())
    dense.mul_(2)
    y.sum().backward()
    return w.grad


def between_two_backwards(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        y = (w * x).sum()
    y.backward(retain_graph=True)
    x.mul_(2)
    y.backward()
    return w.grad


class DoublingItsSave(torch.autograd.Function):
    """Changes what it saved, in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, payload: Tensor) -> Tensor:
        ctx.save_for_backward(payload)
        return x * payload

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (payload,) = ctx.saved_tensors
        result = gradient * payload
        payload.mul_(2)
        return result, None


def by_its_own_backward(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        y = DoublingItsSave.apply(w, x + 1).sum()
    y.backward(retain_graph=True)
    y.backward()
    return w.grad


MODIFIED: list[Program] = [
    an_input,
    an_input_after_the_context,
    an_output,
    an_output_after_the_context,
    an_intermediate_with_a_history,
    changed_and_changed_back,
    an_added_zero,
    a_base_through_a_view,
    a_small_view_through_its_base,
    a_transpose_through_its_base,
    through_a_detached_alias,
    by_an_out_argument,
    by_an_index,
    in_inference_mode,
    only_its_shape,
    an_index,
    the_earlier_of_two_saves,
    a_parameter_by_its_optimizer,
    a_leaf_that_requires_grad,
    a_sparse_tensor,
    between_two_backwards,
    by_its_own_backward,
]
