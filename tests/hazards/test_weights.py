"""H06, H67: not one byte of a parameter moves, whatever shape or layout it is saved in, and its gradient has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.hazards.backends import Backend
from tests.hazards.functions import watching
from tests.hazards.probes import Transfers
from tests.hazards.programs import REGIMES, Around, leaf, one_step, same_gradients


def a_linear_layer_saves_a_transpose_of_its_weight() -> Sequence[Tensor]:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32, bias=False)), leaf(16, 32)
    return model(x * 2), *model.parameters()


def weights_that_are_sliced_split_reshaped_and_expanded() -> Sequence[Tensor]:
    fused = nn.Parameter(leaf(96, 32).detach())
    scale = nn.Parameter(leaf(32, seed=2).detach())
    x = leaf(16, 32, seed=3)
    q, k, v = fused.chunk(3)
    h = F.linear(x * 2, q) * scale
    h = h @ k.reshape(32, 32).t() + (h * scale.expand(16, 32)).tanh()
    return (
        (h.view(16, 4, 8) * v.view(4, 8, 32).permute(2, 0, 1)[:16]).sin() + (h @ fused[5:37].T).view(16, 4, 8),
        fused,
        scale,
    )


def a_leaf_that_is_flattened_into_views() -> Sequence[Tensor]:
    flat = leaf(32 * 64 + 64 * 32)  # no Parameter, but a leaf that is trained
    first, second = flat[: 32 * 64].view(32, 64), flat[32 * 64 :].view(64, 32)
    x = leaf(16, 32, seed=2, grad=False)
    return ((x @ first).tanh() @ second).sin(), flat


def tied_weights() -> Sequence[Tensor]:
    table = nn.Embedding(64, 32)
    head = nn.Linear(32, 64, bias=False)
    head.weight = table.weight
    index = torch.arange(48) % 64
    return F.cross_entropy(head(table(index).tanh()), index), table.weight


def a_frozen_weight() -> Sequence[Tensor]:
    frozen, trained = nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32)
    x = leaf(16, 32)
    return trained(frozen(x * 2).tanh()).sin(), *frozen.parameters(), *trained.parameters()


def double_backward_saves_the_weights_again() -> Sequence[Tensor]:
    """What backward was given for a weight is no view of it any more, and is saved for a backward of its own."""
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)), leaf(16, 32)
    y = model(x * 2).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return y + slope.square().sum(), *model.parameters()


class Squared(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.square()


def what_is_computed_from_a_weight_moves_and_the_weight_does_not() -> Sequence[Tensor]:
    layer, x = nn.Linear(64, 64), leaf(16, 64)
    parametrize.register_parametrization(layer, "weight", Squared())
    return layer(x * 2).tanh(), *layer.parameters()


FORWARDS = [
    a_linear_layer_saves_a_transpose_of_its_weight,
    weights_that_are_sliced_split_reshaped_and_expanded,
    a_leaf_that_is_flattened_into_views,
    tied_weights,
    a_frozen_weight,
    double_backward_saves_the_weights_again,
    what_is_computed_from_a_weight_moves_and_the_weight_does_not,
]


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_h06_no_parameter_moves(forward: Callable[[], Sequence[Tensor]], backend: Backend) -> None:
    """Nor is a bit of its gradient another: no copy out reads a storage of the parameters behind a forward's result."""

    def watched(offload: Around) -> object:
        parameters = list[Tensor]()

        @one_step
        def step() -> Sequence[Tensor]:
            y, *parameters[:] = forward()
            return y, *parameters

        with Transfers(backend.runtime) as transfers:
            gradients = step(offload)
            for parameter in parameters:
                assert not transfers.read(parameter.untyped_storage()), f"{tuple(parameter.shape)} was moved"
        return parameters, gradients

    for stats in same_gradients(watched, backend):
        assert stats.kept_bytes.get("parameter", 0) > 0, "no parameter was saved at all"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_h06_the_cast_of_a_weight_that_autocast_caches(dtype: torch.dtype, backend: Backend) -> None:
    @one_step
    def program() -> Sequence[Tensor]:
        model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), leaf(16, 32)
        with torch.autocast(x.device.type, dtype):
            return model(x * 2).float(), *model.parameters()

    for stats in same_gradients(program, backend):
        # Both casts, in two bytes an element, besides whatever else of a parameter is saved.
        assert stats.kept_bytes["parameter"] >= 2 * 2 * 32 * 64
        # The input of each layer in two bytes, what goes into GELU in two: the casts would double that.
        assert stats.bytes_out <= 2 * (16 * 32 + 16 * 64 + 16 * 64) + 4 * 16 * 32


# -- without a storage ------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
    "mkldnn": Tensor.to_mkldnn,
}


@pytest.mark.sampled(3, quick=True)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("is_parameter", [True, False], ids=["a parameter", "a tensor"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_h67_a_weight_that_becomes_sparse_and_dense_again(layout: str, is_parameter: bool, backend: Backend) -> None:
    """It has neither a storage nor, in some layouts, a size in bytes: steps that are alike but for it are others."""

    def program(around: Around) -> list[object]:
        gradients, seen = list[Tensor | None](), list[object]()
        for is_sparse in (False, False, True, True, True, False):
            dense, x = torch.eye(16), leaf(16, 16)
            weight = LAYOUTS[layout](dense) if is_sparse else dense
            weight = nn.Parameter(weight, requires_grad=False) if is_parameter else weight
            with around:
                y = watching((x * 3).tanh(), lambda saved: seen.append([str(saved.layout), saved.to_dense()]), weight)
                y = watching(y.sin(), lambda saved: seen.append(saved.to_dense()), weight).exp().sum()
            del weight, dense
            y.backward()
            gradients.append(x.grad)
        return [gradients, seen]

    for stats in same_gradients(program, backend, regimes=REGIMES[:1], step_plans=True):
        assert stats.kept_bytes["parameter" if is_parameter else "layout"] > 0


def test_h67_a_sparse_weight_is_trained(backend: Backend) -> None:
    def program(around: Around) -> list[object]:
        sparse, layer = nn.Parameter(torch.eye(16).to_sparse()), nn.Linear(16, 16)
        with torch.no_grad():
            layer.weight.copy_(leaf(16, 16, grad=False)), layer.bias.zero_()
        for seed in range(5):
            with around:
                loss = layer(torch.sparse.mm(sparse, layer(leaf(16, 16, seed=seed, grad=False)))).sin().sum()
            loss.backward()
            with torch.no_grad():
                for parameter in (sparse, *layer.parameters()):
                    parameter.sub_(parameter.grad * 0.1)
                    parameter.grad = None
        return [sparse.detach().to_dense(), *layer.parameters()]

    for stats in same_gradients(program, backend, regimes=REGIMES[:1]):
        assert stats.kept_bytes["parameter"] > 0


@pytest.mark.parametrize("views", [False, True], ids=["sparse", "sparse beside views"])
def test_h67_gradients_that_are_sparse_or_views_of_one_buffer(views: bool, backend: Backend) -> None:
    def program(around: Around) -> list[object]:
        torch.manual_seed(0)
        table, layer = nn.Embedding(32, 16, sparse=True), nn.Linear(16, 16)
        optimizer = torch.optim.SGD([*table.parameters(), *layer.parameters()], lr=0.1)
        if views:
            flat = torch.zeros(16 * 16 + 16)
            layer.weight.grad, layer.bias.grad = flat[: 16 * 16].view(16, 16), flat[16 * 16 :]
        for step in range(5):
            with around:
                loss = layer(table(torch.arange(step, step + 12))).tanh().square().sum()
            loss.backward()
            if step % 2:  # else gradients are accumulated
                optimizer.step()
                optimizer.zero_grad(set_to_none=not views)
        return [table.weight.detach(), *layer.parameters()]

    same_gradients(program, backend, regimes=REGIMES[:1])
