"""What is saved beside plain tensors of one size goes through an ``Offload`` whole: sizes, wrappers, random numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from tests.compile.compiled import BOTH, Compile, compare, compiler, exact, fresh_compiler, results_of, step_of
from tests.hazards.backends import assert_settled
from tests.hazards.programs import leaf


def grown(x: Tensor, weight: Tensor) -> Tensor:
    """Whose backward needs sizes of its input."""
    hidden = (x @ weight).exp()
    rows = hidden.sigmoid().view(-1)[: x.shape[0] * 4].view(x.shape[0], 4).sin()
    return (rows * x.shape[0]).expand(3, x.shape[0], 4).cos() * hidden.mean(1, keepdim=True).sin()


@BOTH
@pytest.mark.parametrize("dynamic", [True, None])
def test_saved_sizes_and_values_of_any_size_come_back(backend: str, dynamic: bool | None) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        run = compile(grown, dynamic=dynamic)
        weight, results = leaf(8, 8, seed=9), list[Tensor | None]()
        for rows in (5, 7, 16, 5):
            x = leaf(rows, 8, seed=rows)
            with around:
                loss = run(x, weight).sum()
            loss.backward()
            results += [loss, x.grad]
        return [*results, weight.grad]

    compare(step, backend, regions=2)


@BOTH
def test_graphs_of_several_sizes_are_alive_at_once(backend: str) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        run = compile(grown, dynamic=True, fullgraph=True)
        weight, losses = leaf(8, 8, seed=9), []
        inputs = [leaf(rows, 8, seed=rows) for rows in (3, 12, 6)]
        with around:
            for x in inputs:
                losses.append(run(x, weight).sum())
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        return [*losses, *(x.grad for x in inputs), weight.grad]

    compare(step, backend)


@BOTH
def test_what_is_inside_a_wrapper_comes_back(backend: str) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        x = TwoTensor(leaf(8, 8, seed=1, grad=False), leaf(8, 8, seed=2, grad=False)).requires_grad_()
        weight = leaf(8, 8, seed=3)
        run = compile(lambda x, weight: ((x @ weight).exp().sin() * x.cos()).sigmoid())
        with around:
            result = run(x, weight)
            loss = result.sum()
        loss.backward()
        return [result, x.grad, weight.grad]

    compare(step, backend)


@BOTH
def test_dropout_drops_the_same(backend: str) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        x, weight = leaf(16, 16, seed=1), leaf(16, 16, seed=2)
        run = compile(lambda x: F.dropout((F.dropout(x, 0.3) @ weight).exp(), 0.5).sin())
        with around:
            losses = [run(x).sum(), run(x).sum()]
        for loss in losses:
            loss.backward()
        return [*losses, x.grad, weight.grad, torch.get_rng_state()]

    compare(step, backend)


@BOTH
def test_a_recomputed_dropout_gets_its_random_numbers_again(backend: str) -> None:
    def segment(x: Tensor, weight: Tensor) -> Tensor:
        return F.dropout((x @ weight).exp(), 0.5).sin().exp()

    def function(x: Tensor, weight: Tensor) -> Tensor:
        hidden = (x @ weight).sigmoid().sin()
        hidden = checkpoint(segment, hidden, weight, use_reentrant=False)
        return F.dropout(hidden.cos(), 0.5) * torch.rand_like(hidden)

    compare(step_of(function, leaf(8, 8, seed=1), leaf(8, 8, seed=2)), backend)


def recomputed_attention(x: Tensor, weight: Tensor) -> Tensor:
    def segment(x: Tensor, weight: Tensor) -> Tensor:
        heads = (x @ weight).view(2, 8, 4, 8).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)
        return mixed.transpose(1, 2).reshape(16, 32).exp()

    hidden = checkpoint(segment, (x @ weight).sin(), weight, use_reentrant=False)
    return checkpoint(segment, hidden.cos(), weight, use_reentrant=False).sigmoid()


@BOTH
def test_the_state_that_a_recomputed_attention_drew_from_stays(backend: str) -> None:
    stats = compare(step_of(recomputed_attention, leaf(16, 32, seed=1), leaf(32, 32, seed=2)), backend)
    if backend == "aot_eager":  # Inductor draws from seeds, which move
        assert stats.kept_bytes["device"] >= 2 * torch.get_rng_state().numel()


@pytest.mark.long
def test_h53_a_kernel_whose_loops_are_made_anew_still_reads_a_reload_after_its_wait(offload: eo.Offload) -> None:
    """Inductor makes those that draw from seeds anew, to fuse them, and forgets what they come after."""
    step = step_of(recomputed_attention, leaf(16, 32, seed=1), leaf(32, 32, seed=2))
    with fresh_compiler():
        _, (_, backward) = run_and_get_code(lambda: results_of(step, compiler("inductor"), offload))
    lines = backward[backward.index("def call(") :].splitlines()
    reloads = 0
    for number, line in enumerate(lines):
        started = re.match(r" *(\w+) = torch.ops.eager_offload.reload", line)
        if started is None:
            continue
        # Some releases give what is returned a second name, and other lines may stand between.
        renamed = re.search(rf"^ *(\w+) = {started[1]}$", "\n".join(lines[number + 1 :]), re.MULTILINE)
        name = (renamed or started)[1]
        named = re.compile(rf"\b{name}[,)]")
        used = [one for one in lines[number + 1 :] if named.search(one) and "assert_" not in one]
        first = next(one for one in used if f"after={name}" not in one)
        assert f"wait_tensor.default({name}," in first, first
        reloads += 1
    assert reloads > 2
    assert assert_settled(offload).bytes_in > 0


@pytest.fixture
def noting() -> Any:
    """An operator that only takes note of a number, in order with its like, and what it noted."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    noted: list[float] = []
    library = torch.library.Library("eager_offload_tests", "FRAGMENT")
    library.define("note(Tensor x, str text) -> ()")
    operator = torch.ops.eager_offload_tests.note.default
    library.impl("note", lambda x, text: noted.append(float(x)), "CompositeExplicitAutograd")
    library.impl("note", lambda x, text: None, "Meta")
    handle = _register_effectful_op(operator, _EffectType.ORDERED)
    yield operator, noted
    handle.destroy()
    library._destroy()


@BOTH
def test_effects_happen_in_order_and_once(
    backend: str, noting: tuple[Callable[[Tensor, str], None], list[float]]
) -> None:
    operator, noted = noting

    def function(x: Tensor) -> Tensor:
        hidden = x.sin().exp().sin().cos()
        operator(hidden.detach().sum(), "first")
        hidden = (hidden @ hidden.exp()).sigmoid()
        operator(hidden.detach().sum(), "second")
        return hidden.sin() @ hidden

    with torch._functorch.config.patch(unlift_effect_tokens=True):
        compare(step_of(function, leaf(8, 8)), backend)
    assert len(set(noted[0::2])) == len(set(noted[1::2])) == 1, noted
    assert noted[0] != noted[1]
    runs = 5 if backend == "aot_eager" else 4  # twice without and twice with an Offload, and in eager code
    assert len(noted) == 2 * runs, "once in each run"


@BOTH
def test_autocast_to_bfloat16_casts_the_same(backend: str) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16), nn.Sigmoid())
        x = leaf(8, 16)
        run = compile(model)
        with around, torch.autocast("cpu", torch.bfloat16):
            result = run(x).square()
        result.float().sum().backward()
        return [result, x.grad, *(weight.grad for weight in model.parameters())]

    compare(step, backend)


@exact(leaf(8, 8, seed=1), leaf(8, 8, seed=2))
def test_autocast_inside_of_the_graph_casts_the_same(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = (x @ weight).exp()
    return hidden.float().sin() @ weight


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_values_of_every_type_come_back(backend: str, dtype: torch.dtype) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        x = leaf(8, 8).detach().to(dtype).requires_grad_()
        run = compile(lambda x: ((x @ x).sin() @ x) * x.mean(1, keepdim=True).exp() @ x.cos())
        with around:
            loss = torch.view_as_real(run(x)).sum() if dtype.is_complex else run(x).sum()
        loss.backward()
        return [loss, x.grad]

    # Backward wants complex values conjugated. Inductor saves them so, and those stay: a view with a bit set.
    compare(step, backend, moves=backend == "aot_eager" or not dtype.is_complex)
