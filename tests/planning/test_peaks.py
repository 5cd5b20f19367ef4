"""The predicted peak of a step that moves nothing is the most bytes that live in a real one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eager_offload._torch import OpOverload, TorchDispatchMode, storage_key, tree_iter, without_dispatch_modes
from eager_offload.config import parse_size
from eager_offload.planning.predict import Problem
from eager_offload.planning.trace import trace
from eager_offload.selection import reason_to_stay
from tests.planning.programs import slow, small, wide

pytestmark = pytest.mark.usefixtures("one_thread")


class Live(TorchDispatchMode):
    """The bytes of all storages that operators have made and that live, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = set(storages((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for key, storage in storages(result).items():
            if key not in self._live and key not in given:
                self._live[key] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, key)
        self.peak = max(self.peak, sum(self._live.values()))
        return result


def storages(values: object) -> dict[int, torch.UntypedStorage]:
    found = (one.untyped_storage() for one in tree_iter(values) if isinstance(one, Tensor))
    return {storage_key(storage): storage for storage in found}


def peaks(model: nn.Module, inputs: Any, step: Callable[[], Tensor], min_bytes: int) -> tuple[int, int]:
    """The predicted one, and the real one."""
    program = trace(model, inputs, min_bytes=min_bytes)
    problem = Problem(program, program.seconds(slow()), 1.0, 1.0, 1, 1)
    there = storages([*model.parameters(), *model.buffers(), *tree_iter(inputs)])
    with Live() as live:
        step().backward()
    real = sum(storage.nbytes() for storage in there.values()) + live.peak
    return problem.predict((False,) * len(program.storages)).peak_bytes, real


class Away:
    """A storage that has left, until the last graph lets go of it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        with without_dispatch_modes():
            self.host = storage.clone()
        self.origin = weakref.ref(storage)  # its address may have a new owner
        self.back: torch.UntypedStorage | None = None

    def storage(self) -> torch.UntypedStorage:
        if self.back is None:
            self.back = torch.empty(self.host.nbytes(), dtype=torch.uint8).untyped_storage()
            with without_dispatch_modes():
                self.back.copy_(self.host)
        return self.back


def emptied(model: nn.Module, x: Tensor, min_bytes: int) -> int:
    """The real peak where all that may move leaves at once and comes back when it is asked for."""
    away = weakref.WeakValueDictionary[int, Away]()
    kept = storages(x)

    def pack(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if reason_to_stay(tensor, min_bytes) is not None or storage_key(storage) in kept:
            return tensor if tensor.is_leaf else tensor.detach()
        one = away.get(storage_key(storage))
        if one is None or one.origin() is not storage:
            one = away[storage_key(storage)] = Away(storage)
        return one, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def unpack(handle: Any) -> Tensor:
        if isinstance(handle, Tensor):
            return handle
        one, dtype, *place = handle
        storage = one.storage()
        with without_dispatch_modes():
            return torch.empty(0, dtype=dtype).set_(storage, *place)

    with Live() as live:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model(x)
        loss.backward()
    return live.peak + sum(one.nbytes() for one in storages([*model.parameters(), x]).values())


def test_the_peak_where_everything_moves_at_once_is_the_real_one() -> None:
    model, x = wide()
    program = trace(model, x, min_bytes=1 << 10)
    problem = Problem(program, program.seconds(slow()), 1e30, 1e30, 1 << 50, 0)
    assert problem.predict((True,) * len(program.storages)).peak_bytes == emptied(model, x, 1 << 10)


@pytest.mark.parametrize("min_bytes", [0, 1 << 10, 1 << 30])
def test_the_peak_of_a_small_model_is_the_real_one(min_bytes: int) -> None:
    model, x = small()
    predicted, real = peaks(model, x, lambda: model(x), min_bytes)
    assert predicted == real


@pytest.mark.parametrize("name", ["Llama", *(pytest.param(one, marks=pytest.mark.long) for one in ("T5", "GPT-2"))])
def test_the_peak_of_a_real_architecture_is_the_real_one(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    from tests.real_models.models import ARCHITECTURES
    from tests.real_models.training import MIN_BYTES

    model, batch = ARCHITECTURES[name].build().train(), ARCHITECTURES[name].batch()
    predicted, real = peaks(model, batch, lambda: model(**batch).loss, parse_size(MIN_BYTES))
    assert predicted == real
