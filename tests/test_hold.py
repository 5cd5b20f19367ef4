"""``Offload.hold`` and ``Offload.saved_tensors_hooks``: tensors of autograd functions and engines of one's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from tests.hazards.backends import Backend, assert_balanced
from tests.hazards.programs import assert_moved
from tests.programs import leaf
from tests.programs.streams import Streams

pytestmark = pytest.mark.usefixtures("one_thread")
N = 1 << 12


class _Checkpoint(torch.autograd.Function):
    """A reentrant checkpoint, as engines have of their own, whose input is held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], hold: Callable[[Tensor], Any]) -> Tensor:
        ctx.run, ctx.held = run, hold(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        x = ctx.held.restore().detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None, None


class _ChunkedLoss(torch.autograd.Function):
    """A loss over a large projection, a chunk at a time: backward computes each chunk of it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, hold: Callable[[Tensor], Any]) -> Tensor:
        chunks = x.chunk(4)
        ctx.held = [hold(chunk) for chunk in chunks]
        ctx.save_for_backward(weight)
        return sum((chunk @ weight).logsumexp(-1).sum() for chunk in chunks)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        found, of_weight = [], torch.zeros_like(weight)
        for number, held in enumerate(ctx.held):
            for following in ctx.held[number + 1 : number + 2]:
                following.prefetch()
            chunk = held.restore()
            part = gradient * (chunk @ weight).softmax(-1)
            found.append(part @ weight.t())
            of_weight += chunk.t() @ part
        return torch.cat(found), of_weight, None


class _Plain:
    """What holds nothing elsewhere, to compare with."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()

    def restore(self) -> Tensor:
        return self.tensor

    def prefetch(self) -> None:
        pass


class _Storage:
    """A backend of torchtitan's activation storage, by its protocol: ``put``, ``get`` into the caller's, ``free``."""

    def __init__(self, hold: Callable[[Tensor], Any]) -> None:
        self._hold = hold

    def put(self, tensor: Tensor, stream: Streams | None) -> list[Any]:
        return [self._hold(tensor)]  # its copy is ordered behind the current stream, and runs on one of its own

    def get(self, payload: list[Any], out: Tensor, stream: Streams | None) -> None:
        def fill() -> None:
            out.copy_(payload[0].restore())

        fill() if stream is None else stream.run(fill, aside=True)

    def free(self, payload: list[Any]) -> None:
        payload.clear()


@dataclass
class _Saved:
    tensor: Tensor | None
    out: Callable[[], Tensor]
    payload: list[Any] = field(default_factory=list)


class _Store:
    """Puts what autograd saves into a backend once forward has ended, and gets it on a stream aside."""

    def __init__(self, backend: _Storage) -> None:
        self._backend, self._pending = backend, list[_Saved]()

    @contextmanager
    def forward(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        for saved in self._pending:
            assert saved.tensor is not None
            saved.payload, saved.tensor = self._backend.put(saved.tensor, None), None
        self._pending.clear()

    def _pack(self, tensor: Tensor) -> _Saved | Tensor:
        is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        if tensor.is_leaf or not is_whole:
            return tensor.detach()
        self._pending.append(_Saved(tensor.detach(), partial(torch.empty, tensor.size(), device=tensor.device)))
        return self._pending[-1]

    def _unpack(self, saved: _Saved | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        out = saved.out()
        self._backend.get(saved.payload, out, Streams())
        self._backend.free(saved.payload)
        return out


def _checkpointed(x: Tensor, weight: Tensor, hold: Callable[[Tensor], Any]) -> Tensor:
    for _ in range(4):
        x = _Checkpoint.apply(x, lambda y: (y @ weight).tanh(), hold)  # type: ignore[no-untyped-call]
    return x.square().sum()


def _chunked(x: Tensor, weight: Tensor, hold: Callable[[Tensor], Any]) -> Tensor:
    return _ChunkedLoss.apply((x @ weight).tanh(), weight, hold)  # type: ignore[no-any-return, no-untyped-call]


def _stored(x: Tensor, weight: Tensor, hold: Callable[[Tensor], Any]) -> Tensor:
    with _Store(_Storage(hold)).forward():
        for _ in range(4):
            x = (x @ weight).tanh()
        return x.square().sum()


@pytest.mark.parametrize(
    ("program", "is_inside"),
    [*itertools.product([_checkpointed, _chunked], [True, False]), (_stored, False)],
    ids=lambda one: one.__name__ if callable(one) else "in a with" if one else "outside",
)
def test_functions_that_hold_their_tensors_have_the_same_gradients(
    backend: Backend, program: Callable[..., Tensor], is_inside: bool
) -> None:
    offload = backend.offload(step_tables=False)

    def train(hold: Callable[[Tensor], Any], is_offloaded: bool) -> list[Tensor]:
        x, weight, found = leaf(64, 64, seed=1), leaf(64, 64, seed=2), list[Tensor]()
        for _ in range(3):
            if is_offloaded and is_inside:
                with offload:
                    loss = program(x, weight, hold)
            else:
                loss = program(x, weight, hold)
            loss.backward()
            assert x.grad is not None
            found += [loss.detach(), x.grad.clone()]
            with torch.no_grad():
                x -= 0.01 * x.grad
            x.grad = None
        return found

    expected = train(_Plain, False)
    found = train(offload.hold, True)
    assert all(map(torch.equal, found, expected))
    program(leaf(64, 64, seed=1), leaf(64, 64, seed=2), offload.hold)  # a graph that is dropped
    stats = offload.stats(synchronize=True)
    assert_moved(stats, 0.5)
    assert_balanced(stats)


def test_what_is_held_leaves_at_once_and_its_bytes_go_back(backend: Backend) -> None:
    offload = backend.offload()
    storage, kept = _Storage(offload.hold), list[Tensor]()
    with torch.no_grad():  # so that no node is made, and the thread's sequence number stands still
        held = []
        for number in range(4):
            tensor = torch.full((N,), float(number)).t()
            held.append(storage.put(tensor, None))
            kept.append(tensor.clone())
            del tensor
        assert offload.stats(synchronize=True).bytes_out == 4 * 4 * N
        for one, expected in zip(held, kept, strict=True):
            out = torch.empty(N)
            storage.get(one, out, None)
            assert torch.equal(out, expected)
            assert torch.equal(one[0].restore(), expected)  # again
            storage.free(one)
    stats = offload.stats(synchronize=True)
    assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
    # Dropped without being restored.
    dropped = offload.hold(torch.ones(N))
    before = offload.stats(synchronize=True).released_bytes
    del dropped
    assert offload.stats(synchronize=True).released_bytes == before + 4 * N


def test_a_prefetch_brings_it_before_it_is_asked_for(backend: Backend) -> None:
    offload = backend.offload(prefetch_bytes=2 * 4 * N)
    held = [offload.hold(torch.full((N,), float(number))) for number in range(4)]
    offload.stats(synchronize=True)
    for one in held:
        one.prefetch()
        one.prefetch()
    before = offload.stats(synchronize=True)
    assert before.bytes_in == 2 * 4 * N  # no more than there is room for
    assert torch.equal(held[0].restore(), torch.zeros(N))
    assert offload.stats(synchronize=True).bytes_in == before.bytes_in
    assert [float(one.restore()[0]) for one in held] == [0.0, 1.0, 2.0, 3.0]


def test_it_is_shared_with_what_autograd_saves_of_it(backend: Backend) -> None:
    offload = backend.offload()
    x = leaf(N, seed=3)
    with offload:
        y = x.exp()  # saved
        held = offload.hold(y)
        loss = y.square().sum()  # saved once more
        expected = y.detach().clone()
        del y
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out == 4 * N
    assert torch.equal(held.restore(), expected)
    loss.backward()
    assert torch.equal(x.grad, 2 * expected * expected)


def test_what_stays_and_what_is_refused(backend: Backend) -> None:
    offload = backend.offload(min_bytes=1 << 20)
    small, weight = torch.ones(8), nn.Parameter(torch.ones(8))
    assert torch.equal(offload.hold(small).restore(), small)
    restored = offload.hold(weight).restore()
    assert torch.equal(restored, weight)
    assert not restored.requires_grad
    assert offload.stats().kept_bytes == {"small": 32, "parameter": 32}
    large = backend.offload()
    changed = torch.ones(N)
    held = large.hold(changed)
    large.stats(synchronize=True)
    changed.add_(1)
    with pytest.raises(eo.SavedTensorModifiedError):
        held.restore()
    off = eo.Offload(enabled=False)
    assert torch.equal(off.hold(small).restore(), small)
    pack, unpack = off.saved_tensors_hooks()
    assert torch.equal(unpack(pack(small)), small)


def test_compiled_code_breaks_where_it_holds(users_backend: Backend) -> None:
    offload = users_backend.offload()

    def run(x: Tensor) -> Tensor:
        held = offload.hold(x.sin())
        return held.restore().cos()

    x = torch.randn(N)
    assert torch.equal(torch.compile(run, backend="eager")(x), x.sin().cos())
    assert offload.stats(synchronize=True).saved_bytes == 4 * N
    for given in (3, torch.inference_mode()(torch.ones)(N)):
        with pytest.raises(eo.OffloadError, match="is not accepted: hold takes a tensor"):
            offload.hold(given)
    torch.compiler.reset()


@pytest.fixture(params=["torch", "torch_remat"])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Returns what runs a block by a checkpoint whose inputs a pair of hooks packs."""
    if request.param == "torch":

        def run(block: nn.Module, x: Tensor, pair: Any) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(*pair):
                return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]

        yield run
        return
    remat = pytest.importorskip("torch_remat", reason="torch_remat is not installed")
    yield lambda block, x, pair: remat.checkpoint(saved_tensors_hooks=pair)(block)(x)


def test_the_pair_moves_the_inputs_of_an_engines_checkpoints(backend: Backend, engine: Any) -> None:
    offload = backend.offload()
    model = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(3))

    def gradients(pair: Any, context: AbstractContextManager[Any]) -> list[Tensor | None]:
        x = leaf(64, 64, seed=4)
        with context:
            y = x.sin()
            for block in model:
                y = engine(block, y, pair)
        offload.stats(synchronize=True)  # or backward asks for the last one before its copy has begun
        y.sum().backward()
        found = [x.grad, *(one.grad for one in model.parameters())]
        model.zero_grad()
        return found

    expected = gradients((lambda tensor: tensor.detach(), lambda tensor: tensor), nullcontext())
    found = gradients(offload.saved_tensors_hooks(), offload)
    assert all(one is not None and torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert offload.stats(synchronize=True).bytes_out == 3 * 4 * 64 * 64
