"""H43: transforms of ``torch.func`` in compiled code; they run under no hooks, and their errors may leave a ban."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import eager_offload as eo
from tests.compile.compiled import BOTH, compare, fresh_compiler, step_of
from tests.hazards.backends import hooks_are_gone
from tests.hazards.programs import assert_identical, leaf


def inner(x: Tensor) -> Tensor:
    return (x.sin() * x.exp()).square().sum()


def columns(x: Tensor) -> Tensor:
    return x.sin().sum(0)


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "grad": grad(inner),
    "hessian": lambda h: hessian(inner)(h[0])[0] + h,
    "vmap of grad": vmap(grad(inner)),
    "grad of grad": grad(lambda x: grad(inner)(x).sin().sum()),
    "grad and value": lambda h: grad_and_value(inner)(h)[0],
    "vjp": lambda h: vjp(lambda x: x.sin().square(), h)[1](torch.ones_like(h))[0],
    "jvp": lambda h: jvp(lambda x: x.sin(), (h,), (h * 2,))[1],
    "jacrev": lambda h: jacrev(columns)(h).sum(0),
    "jacfwd": lambda h: jacfwd(columns)(h).sum(0),
    "vmap": vmap(lambda row: row.sin() * row.sum()),
}
SOME = [
    pytest.param(name, marks=() if name in ("grad", "hessian", "vmap of grad") else pytest.mark.long)
    for name in TRANSFORMS
]


def around(transform: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """What is computed before a transform and after it is saved by the same graph."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).tanh().exp()
        return (transform(h) @ w).sin() * h

    return function


def bans() -> str | None:
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()


@BOTH
@pytest.mark.parametrize("name", SOME)
def test_h43_transforms_are_compiled_as_without(name: str, backend: str) -> None:
    compare(step_of(around(TRANSFORMS[name]), leaf(8, 8), leaf(8, 8, seed=2), fullgraph=True), backend, as_eager=False)
    assert bans() is None


def test_h43_a_graph_that_is_run_as_it_was_traced_imposes_the_ban_whenever_it_runs(offload: eo.Offload) -> None:
    with fresh_compiler():
        function, x, w = around(TRANSFORMS["grad"]), leaf(8, 8), leaf(8, 8, seed=2)
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        expected = torch.autograd.grad(compiled(x, w).sum(), (x, w))
        for _ in range(2):
            with offload:
                y = compiled(x, w)
            assert_identical(expected, torch.autograd.grad(y.sum(), (x, w)))
            assert bans() is None
        assert offload.stats(synchronize=True).bytes_out > 0


@pytest.mark.filterwarnings("ignore:eager_offload. other saved-tensor hooks:RuntimeWarning")
def test_h43_an_error_under_hooks_of_others_forbids_nothing_afterwards(offload: eo.Offload) -> None:
    theirs = saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    with fresh_compiler():
        function, x, w = around(TRANSFORMS["grad"]), leaf(8, 8), leaf(8, 8, seed=2)
        compiled = torch.compile(function, backend="aot_eager")
        with pytest.raises(eo.OffloadError, match="torch does not allow saved-tensor hooks here"), offload, theirs:
            compiled(x, w)
        assert hooks_are_gone()
        assert bans() is None
        torch._dynamo.reset()
        expected = torch.autograd.grad(compiled(x, w).sum(), (x, w))
        with offload:
            y, z = compiled(x, w), (x @ w).exp().sin()
        assert_identical(expected, torch.autograd.grad(y.sum(), (x, w)))
        z.sum().backward()
        assert offload.stats(synchronize=True).bytes_out > 0
