"""What a compiled graph is given, changes and returns is the same inside an ``Offload``, whatever shares memory."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import eager_offload as eo
from eager_offload.compile import ops
from tests.compile.compiled import BOTH, Compile, compare, deep, exact, fresh_compiler, step_of
from tests.hazards.programs import leaf


@exact(leaf(8, 8), leaf(8, 8), torch.zeros(8, 8))
def test_an_input_that_is_changed_in_place_comes_out_changed(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    hidden = (x @ weight).sigmoid() @ weight
    buffer.add_(hidden.detach())
    hidden.mul_(2)
    return (hidden * buffer).sin() @ weight


@exact(leaf(8, 8), torch.ones(8, 8))
def test_a_changed_input_that_is_saved_after_the_change_stays(x: Tensor, buffer: Tensor) -> Tensor:
    hidden = (x @ x).exp()
    buffer.copy_(hidden.detach().cos() @ buffer)
    return (hidden @ x).sin() @ buffer


@exact(leaf(8, 8), leaf(8, 8))
def test_an_output_may_be_an_input_or_a_view_of_one(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    hidden = (x @ weight).exp().sin().exp()
    return x, x.t(), weight[1:], hidden.sum()


@exact(leaf(8, 8, seed=2), leaf(8, 8, seed=2))
def test_an_output_may_be_a_view_of_an_intermediate_that_is_saved(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    hidden = (x @ weight).exp()
    other = (hidden @ weight).sigmoid()
    return hidden.t(), hidden[2:5], (hidden * other).exp()


@exact(leaf(8, 8))
def test_outputs_may_be_views_of_one_base_that_is_returned_nowhere(x: Tensor) -> tuple[Tensor, ...]:
    base = x.sin().exp()
    middle = base.cos().exp().tanh()
    return base.view(-1), base.t(), middle.view(4, 16), middle.exp()


@exact(leaf(8, 8), as_eager=False)
def test_outputs_may_be_each_other(x: Tensor) -> tuple[Tensor, ...]:
    hidden = (x @ x).exp().cos()
    saved = (hidden @ x).exp().sigmoid()
    return hidden, hidden, hidden.detach(), saved, saved.view_as(saved), (saved * saved).exp().sin()


@BOTH
def test_a_view_output_can_be_changed_by_the_caller(backend: str) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        x = leaf(8, 8).detach().requires_grad_()
        run = compile(lambda x: ((hidden := (x @ x).cos().sigmoid() @ x)[1:], hidden.view(-1)))
        with around:
            rows, flat = run(x)
            rows.mul_(3)
            loss = (flat.sin() * flat).sum()
        loss.backward()
        return [rows, flat, loss, x.grad]

    compare(step, backend)


@BOTH
def test_views_of_one_intermediate_are_saved_as_one_and_come_back_as_they_were(backend: str) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = F.linear(x, weight).split(8, -1)
        return ((q @ k.t()).softmax(-1) @ v.relu() * q.sin()).exp() * k.cos()

    stats = compare(step_of(function, leaf(8, 8), leaf(24, 8)), backend)
    assert stats.kept_bytes.get("layout", 0) == 0


@exact(leaf(8, 8), leaf(8, 8))
def test_strided_and_expanded_intermediates_come_back_as_they_were(x: Tensor, weight: Tensor) -> Tensor:
    hidden = (x @ weight).sin().t()
    strided = hidden[::2].exp()
    wide = (x @ weight).cos().mean(0, keepdim=True).expand(8, 8)
    return (strided.t() @ strided * wide).exp() @ hidden.contiguous().sigmoid()


@BOTH
def test_donated_buffers_are_still_reused_and_nothing_is_wrong(backend: str) -> None:
    with torch._functorch.config.patch(donated_buffer=True):
        compare(step_of(deep, leaf(8, 8), leaf(8, 8)), backend)


@BOTH
def test_weights_and_buffers_with_a_fixed_address_never_move(backend: str) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 8))
        static = torch.randn(4, 8)
        torch._dynamo.mark_static_address(static)
        run = compile(lambda x: model(x + static).exp())
        x, results = leaf(4, 8).detach().requires_grad_(), []
        for _ in range(2):
            with around:
                loss = run(x).sum()
            loss.backward()
            results.append(loss)
        return [*results, x.grad, *model.buffers(), *(weight.grad for weight in model.parameters())]

    stats = compare(step, backend)
    assert stats.offloaded_bytes <= 4 * 4 * 16 * (8 * 4)  # eight activations of each of four steps, and no weight


class SavesWithoutAVersion(torch.autograd.Function):
    """Saves what it changes again before backward."""

    @staticmethod
    def forward(context: object, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = x @ x
        context.save_for_backward(kept, x)
        context.mark_non_differentiable(kept)
        return x.exp(), kept

    @staticmethod
    def backward(context: object, gradient: Tensor, _: Tensor) -> Tensor:
        kept, x = context.saved_tensors
        return gradient * kept * x.cos()


@exact(leaf(8, 8))
def test_what_a_function_of_ones_own_saves_comes_back(x: Tensor) -> Tensor:
    result, kept = SavesWithoutAVersion.apply(x.cos().sin())
    return (result @ x).exp() * kept


@exact(leaf(2, 4, 6, 6), leaf(8, 4, 3, 3), leaf(8, 8, 3, 3), as_eager=False)
def test_views_of_what_a_compiler_lays_out_anew_come_back_as_they_were(
    x: Tensor, weight: Tensor, other: Tensor
) -> Tensor:
    """Convolutions like their channels last, and a view is told by strides."""
    hidden = F.conv2d(x, weight, padding=1)
    flat = hidden.flatten(2)
    scores = (flat.transpose(1, 2) @ flat).softmax(-1)
    return (F.conv2d(hidden, other, padding=1).flatten(2) @ scores).sin()


@pytest.mark.long
def test_no_kernel_computes_into_what_an_offload_returned(offload: eo.Offload) -> None:
    """In one graph that offloads and reloads, a host tensor is done with after its reload. Its memory is a slot's."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        host = ops.offload(x.sin(), config=offload.config_key)
        product = x @ weight
        again = ops.reload(host, x.device, config=offload.config_key)
        result = (again.cos() @ product) @ weight
        return (result.sin() @ weight) @ result

    x, weight = leaf(16, 16).detach(), leaf(16, 16).detach()
    with fresh_compiler(), offload, torch.no_grad():
        result, (code,) = run_and_get_code(torch.compile(function), x, weight)
    hosts = set(re.findall(r"wait_tensor\.default\(\w+, (\w+)", code)) & set(
        re.findall(r"reload\.default\((\w+),", code)
    )
    (read,) = re.findall(r"offload\.default\((\w+), ", code)
    assert hosts, "the reload keeps the host tensor alive"
    assert not re.search(rf"= ({'|'.join(hosts)}); del", code), "its memory was handed on"
    # What was read is what is kept alive: no copy of it, and not what was computed again for it.
    assert re.search(rf"wait_tensor\.default\(\w+, {read}\b", code)
    assert offload.stats(synchronize=True).bytes_in == x.nbytes
    assert result.shape == x.shape
