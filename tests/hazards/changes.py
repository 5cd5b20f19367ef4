"""Programs that change tensors in place, with what autograd makes of each; so must we.

Of ``MODIFIED`` a tensor is saved, changed and read in backward: autograd raises. Of ``UNMODIFIED`` none is all of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hazards.functions import custom
from tests.hazards.programs import Around, Program, leaf, one_step, trained


def plain() -> Tensor:
    return leaf(64, 64, seed=2, grad=False)


def product(w: Tensor, x: Tensor) -> Tensor:
    return w * x


def after(
    name: str,
    save: Callable[[Tensor, Tensor], Tensor],
    change: Callable[[Tensor, Tensor], object],
    *,
    inside: bool = False,
    w: tuple[int, ...] = (64, 64),
    x: Callable[[], Tensor] = plain,
) -> Program:
    """Saves, changes, and returns the gradient of ``w``.

    Args:
        save: makes an output of a leaf and of what ``x`` makes.
        change: is given the latter and the output, inside of the context or behind it.
    """

    def program(offload: Around) -> object:
        weight, other = leaf(*w), x()
        with offload:
            y = save(weight, other)
            if inside:
                change(other, y)
        if not inside:
            change(other, y)
        y.sum().backward()
        return weight.grad

    program.__name__ = name
    return program


@torch.no_grad()
def doubled(x: Tensor, y: Tensor) -> None:
    x.mul_(2)


@torch.inference_mode()
def in_inference_mode(x: Tensor, y: Tensor) -> None:
    x.mul_(10)


def zeroed_where_positive(x: Tensor, y: Tensor) -> None:
    x[x > 0] = 0


@one_step
def an_intermediate_with_a_history() -> tuple[Tensor, ...]:
    a, w = leaf(64, 64), leaf(64, 64, seed=2)
    h = a * 2
    y = h @ w
    h.relu_()
    return y + h, w


@one_step
def the_earlier_of_two_saves() -> tuple[Tensor, ...]:
    w, x = leaf(64, 64), plain()
    first = w * x
    x.mul_(2)
    second = w * x
    return first + second, w


def a_parameter_by_its_optimizer(offload: Around) -> object:
    layer, x = nn.Linear(64, 64), leaf(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with offload:
        y = layer(x * 2).tanh()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    y.sum().backward()
    return x.grad


def between_two_backwards(offload: Around) -> object:
    w, x = leaf(64, 64), plain()
    with offload:
        y = (w * x).sum()
    y.backward(retain_graph=True)
    x.mul_(2)
    y.backward()
    return w.grad


def by_its_own_backward(offload: Around) -> object:
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        result = gradient * saved
        saved.mul_(2)
        return result

    w, x = leaf(64, 64), plain()
    with offload:
        y = custom(w, backward, x + 1).sum()
    y.backward(retain_graph=True)
    y.backward()
    return w.grad


MODIFIED: list[Program] = [
    after("an_input", product, lambda x, y: x.mul_(10), inside=True),
    after("an_input_after_the_context", product, lambda x, y: x.mul_(10)),
    after("an_output", lambda w, x: w.exp(), lambda x, y: y.add_(1), inside=True),
    after("an_output_after_the_context", lambda w, x: (w * 2).exp(), lambda x, y: y.add_(1)),
    an_intermediate_with_a_history,
    after("changed_and_changed_back", product, lambda x, y: x.mul_(2).div_(2)),
    after("an_added_zero", product, lambda x, y: x.add_(0)),
    after("a_base_through_a_view", product, lambda x, y: x[0].zero_()),
    after("a_small_view_through_its_base", lambda w, x: w * x[3], lambda x, y: x[0].zero_(), w=(64,)),
    after(
        "a_transpose_through_its_base",
        lambda w, x: w * x.t(),
        lambda x, y: x.zero_(),
        w=(32, 64),
        x=lambda: leaf(64, 32, seed=2, grad=False),
    ),
    after("through_a_detached_alias", product, lambda x, y: x.detach().add_(1), x=lambda: leaf(64, 64, seed=2) * 2),
    after("by_an_out_argument", product, lambda x, y: torch.add(x, 1, out=x)),
    after("by_an_index", product, zeroed_where_positive),
    after("in_inference_mode", product, in_inference_mode),
    after("only_its_shape", product, lambda x, y: x.t_(), w=(32, 64), x=lambda: leaf(32, 64, seed=2, grad=False)),
    after("an_index", lambda w, x: F.embedding(x, w), lambda x, y: x.fill_(0), x=lambda: torch.arange(64)),
    the_earlier_of_two_saves,
    a_parameter_by_its_optimizer,
    after("a_leaf_that_requires_grad", lambda w, x: x * w.exp(), doubled, x=lambda: leaf(64, 64, seed=2)),
    after(
        "a_sparse_tensor",
        lambda w, x: torch.sparse.mm(x, w.exp()),
        lambda x, y: x.mul_(2),
        x=lambda: torch.eye(64).to_sparse(),
    ),
    between_two_backwards,
    by_its_own_backward,
]


@one_step
def batch_norm_statistics() -> tuple[Tensor, ...]:
    norm, x = nn.BatchNorm1d(64), leaf(64, 64)
    y = norm(norm(x * 2).tanh())
    return y.square(), x, norm.running_mean, norm.running_var, norm.weight


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
    return trained(model.parameters(), offload, lambda _: model(x).square().mean(), torch.optim.AdamW), x.grad


def a_branch_that_backward_never_visits(offload: Around) -> object:
    w, x = leaf(64, 64), plain()
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


@one_step
def before_it_is_saved() -> tuple[Tensor, ...]:
    w, x = leaf(64, 64), plain()
    x.mul_(10)
    return (w * 1).mul_(3).sin() * x, w


@one_step
def the_later_of_two_saves() -> tuple[Tensor, ...]:
    w, x = leaf(64, 64), plain()
    first = w * x
    x.mul_(2)
    return w * x, w, first


def after_backward(offload: Around) -> object:
    w, x = leaf(64, 64), plain()
    gradients = []
    for _ in range(3):
        with offload:
            y = w * x
        y.sum().backward()
        x.mul_(10)
        gradients.append(w.grad.clone())
    return gradients


@one_step
def activations_in_place() -> tuple[Tensor, ...]:
    model, x = (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ELU(inplace=True)),
        leaf(8, 64),
    )
    return model(x), x, *model.parameters()


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
    after("a_clone_of_what_is_saved", product, lambda x, y: x.clone().mul_(10), inside=True),
    a_leaf_that_gets_other_data,
]
