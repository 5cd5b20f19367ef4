"""H13, H74: ``DTensor``, tensors that a collective is still filling, and collectives in a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.hazards.backends import Backend, DiskBackend
from tests.hazards.probes import Transfers
from tests.hazards.programs import REGIMES, Around, same_gradients
from tests.programs import leaf
from tests.programs.parts.blocks import ROWS, WIDTH
from tests.programs.parts.functions import watching

pytestmark = [
    pytest.mark.xdist_group("mesh"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning"),  # torch's own, of collectives
]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    rendezvous = tmp_path_factory.mktemp("mesh") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def local(tensor: DTensor) -> Tensor:
    return tensor.detach().to_local()


def test_h13_a_distributed_tensor_comes_back_with_its_mesh_and_placements(mesh: DeviceMesh, backend: Backend) -> None:
    def program(around: Around) -> object:
        def look(tensor: DTensor) -> None:
            assert tensor.device_mesh == mesh
            seen.append([str(tensor.placements), *tensor.size(), *tensor.stride(), local(tensor)])

        x, seen = leaf(ROWS, WIDTH), list[object]()
        with around:
            cut = distribute_tensor(leaf(ROWS, WIDTH, seed=2), mesh, [Shard(1)])
            whole = distribute_tensor(leaf(ROWS, WIDTH, seed=3, grad=False), mesh, [Replicate()])
            loss = watching(x, look, cut * 2, (cut * 2).t(), whole * 3).sum()
        loss.backward()
        return x.grad, seen

    same_gradients(program, backend)


def test_h13_h06_the_local_part_of_a_weight_stays(mesh: DeviceMesh, backend: Backend) -> None:
    def program(around: Around) -> object:
        w = nn.Parameter(distribute_tensor(leaf(WIDTH, WIDTH, grad=False), mesh, [Shard(0)]))
        x = leaf(ROWS, WIDTH)
        with Transfers(backend.runtime) as transfers:
            with around:
                y = F.linear((x * 2).tanh(), w.to_local()).sin() @ w.to_local().view(WIDTH, WIDTH)
            y.sum().backward()
        assert not transfers.read(local(w).untyped_storage())
        return x.grad, local(w.grad)

    for stats in same_gradients(program, backend):
        assert stats.kept_bytes == {"parameter": 2 * WIDTH * WIDTH * 4}


def test_h13_what_a_collective_is_still_filling_is_waited_for(mesh: DeviceMesh, backend: Backend) -> None:
    waited = list[bool]()

    def program(around: Around) -> object:
        w, seen = leaf(ROWS, WIDTH), list[Tensor]()
        with around:
            filled, inside = (
                collectives.all_gather_tensor(leaf(ROWS, WIDTH, seed=seed, grad=False), 0, mesh) for seed in (2, 3)
            )
            wrapper = DTensor.from_local(inside, mesh, [Shard(0)], run_check=False)
            inside = wrapper._local_tensor
            for pending in (filled, inside):
                assert type(pending) is collectives.AsyncCollectiveTensor
                assert not pending.completed
            # Nothing reads them but the hook.
            y = watching((w * 3).tanh(), lambda tensor: seen.append(tensor.detach() * 2), filled, wrapper)
            waited.extend([filled.completed, inside.completed])
        del filled, inside, wrapper, pending
        y.sum().backward()
        return w.grad, seen[0], local(seen[1])

    same_gradients(program, backend)
    assert waited[:2] == [False, False]
    assert len(waited) > 2 * len(REGIMES)
    assert all(waited[2:])


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD])
def test_h74_collectives_run_as_often_as_without(policy: CheckpointPolicy, mesh: DeviceMesh, disk: DiskBackend) -> None:
    """Other ranks may compute outside of any context, and wait for this one."""
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)

    class Collectives(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[func] += "c10d" in func.namespace
            return func(*args, **(kwargs or {}))

    def block(x: Tensor) -> Tensor:
        dist.all_reduce(reduced := x.sin().detach())
        return collectives.all_gather_tensor_autograd(x.tanh(), 0, mesh).cos() * reduced

    calls = Counter[object]()

    def program(around: Around) -> object:
        x = leaf(ROWS, WIDTH)
        calls.clear()
        with around:
            y = checkpoint(block, x * 2, use_reentrant=False, context_fn=contexts).sum()
        with Collectives():
            y.backward()
        return x.grad, *((str(func), count) for func, count in calls.items() if count)

    for stats in same_gradients(program, disk):
        assert stats.offloaded_bytes >= 2 * ROWS * WIDTH * 4
        assert len(+calls) > 2
