"""Programs that change saved tensors in place: where autograd finds out, and where it must not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hazards.programs import leaf

__all__ = ["MODIFIED", "UNMODIFIED"]

Around: TypeAlias = AbstractContextManager[Any]
Program: TypeAlias = Callable[[Around], object]


def no_grad(change: Callable[[], object]) -> None:
    with torch.no_grad():
        change()


# -- programs in which a saved tensor is changed and read -------------------------------------------------------------


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


# -- programs in which nothing that is read was changed after it was saved --------------------------------------------


def batch_norm_statistics(offload: Around) -> object:
    norm, x = nn.BatchNorm1d(64), leaf(64, 64)
    with offload:
        y = norm(norm(x * 2).tanh())
    y.square().sum().backward()
    return x.grad, norm.running_mean, norm.running_var, norm.weight.grad


def an_optimizer_whose_parameters_are_not_read(offload: Around) -> object:
    layer, x = nn.Linear(64, 64), leaf(64, 64, grad=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with offload:
        y = layer(x).tanh()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    y.sum().backward()
    return layer.weight.grad


def an_optimizer_between_steps(offload: Around) -> object:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), leaf(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        with offload:
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, list(model.parameters()), x.grad


def a_branch_that_backward_never_visits(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        unused = w * x
        used = (w * 3).tanh()
    x.mul_(10)
    used.sum().backward()
    return unused.detach(), w.grad


def a_save_that_no_gradient_needs(offload: Around) -> object:
    a, b = leaf(64, 64), leaf(64, 64, seed=2)
    with offload:
        u, v = a * 2, b * 3
        y = u.square().sum() + v.square().sum()
    u.detach().mul_(10)
    return torch.autograd.grad(y, b)


def before_it_is_saved(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        x.mul_(10)
        y = (w * 1).mul_(3).sin() * x
    y.sum().backward()
    return w.grad


def the_later_of_two_saves(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        first = w * x
        x.mul_(2)
        second = w * x
    second.sum().backward()
    return first.detach(), w.grad


def after_backward(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    gradients = []
    for _ in range(3):
        with offload:
            y = w * x
        y.sum().backward()
        x.mul_(10)
        gradients.append(w.grad.clone())
    return gradients


def activations_in_place(offload: Around) -> object:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ELU(inplace=True)), leaf(8, 64)
    with offload:
        y = model(x)
    y.sum().backward()
    return x.grad, [p.grad for p in model.parameters()]


def a_clone_of_what_is_saved(offload: Around) -> object:
    w, x = leaf(64, 64), leaf(64, 64, seed=2, grad=False)
    with offload:
        y = w * x
        x.clone().mul_(10)
    y.sum().backward()
    return w.grad


def a_leaf_that_gets_other_data(offload: Around) -> object:
    layer, x = nn.Linear(64, 64), leaf(64, 64)
    with offload:
        y = layer(x * 2).tanh()
    layer.weight.data = layer.weight.data * 2
    y.sum().backward()
    return x.grad


UNMODIFIED: list[Program] = [
    batch_norm_statistics,
    an_optimizer_whose_parameters_are_not_read,
    an_optimizer_between_steps,
    a_branch_that_backward_never_visits,
    a_save_that_no_gradient_needs,
    before_it_is_saved,
    the_later_of_two_saves,
    after_backward,
    activations_in_place,
    a_clone_of_what_is_saved,
    a_leaf_that_gets_other_data,
]
