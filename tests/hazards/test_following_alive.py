"""H54: what a program keeps of a step that followed a plan, or of its gradients, counts for itself alone."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from eager_offload import Offload
from tests.hazards.backends import saves_of
from tests.hazards.programs import leaf
from tests.hazards.test_following_guard import scaling

pytestmark = pytest.mark.filterwarnings("ignore:eager_offload. tier=.host.")


def look_at(node: Any, _: object) -> None:
    """A hook that reads what ``node`` has saved."""
    assert node.saved_tensors


def out_of_order(offload: Offload) -> tuple[list[int], object]:
    """After a backward that read a node before its turn and retained the graph: what each storage still owns.

    The graph is returned with it.
    """
    for is_last in (False, False, False, True):
        x = leaf(64, 64)
        nodes = []
        with offload:
            y: Tensor = x * 2
            for seed in (7, 8, 9):
                y = scaling(y * 1.5, leaf(64, 64, seed=seed).detach() * 1)
                nodes.append(y.grad_fn)
            loss = y.sum()
        offload.stats(synchronize=True)
        first, second, _ = nodes
        if is_last:
            assert second is not None
            second.register_prehook(partial(look_at, first))
        loss.backward(retain_graph=True)
        del y, nodes, first, second
        gc.collect()
    return [len(saved.given) for saved in saves_of(offload).storages()], loss


@pytest.mark.parametrize("step_plans", [True, False], ids=["followed", "decided anew"])
def test_h54_what_a_reload_was_handed_to_is_let_go_when_backward_is_over_though_its_run_is_too(
    step_plans: bool,
) -> None:
    offload = Offload(tier="host", min_bytes=0, keep_last_bytes=0, prefetch_bytes=0, step_plans=step_plans)
    given, graph = out_of_order(offload)
    assert offload.stats().plan_misses.get("order", 0) == step_plans
    assert given
    assert not any(given)
    del graph
    offload.close()
