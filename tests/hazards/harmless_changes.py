"""Programs that change tensors in place, but none that is saved and read: autograd says nothing, and nor must we."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import nn

from tests.hazards.programs import leaf

__all__ = ["UNMODIFIED"]

Around: TypeAlias = AbstractContextManager[Any]
Program: TypeAlias = Callable[[Around], object]


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
    model, x = (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ELU(inplace=True)),
        leaf(8, 64),
    )
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
