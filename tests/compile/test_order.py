"""When transfers run: what sinking waits, prefetching and pinning promise, one property at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from eager_offload.compile import ops
from eager_offload.compile.insert import insert_asynchronous
from eager_offload.compile.order import prefetch, sink_waits
from tests.compile.happens_before import (
    CONFIG,
    CPU,
    asynchronous,
    chain,
    labels,
    of_kind,
    peak_flying,
    run,
    wait_of,
)

#: Bytes of every value of the chain, and what goes through it.
NBYTES = 256
X, WEIGHT = torch.linspace(-1, 1, 64).view(8, 8), torch.linspace(-0.3, 0.4, 64).view(8, 8)


def one_second(node: Node) -> float:
    """Every operator of torch takes a second."""
    return float(node.op == "call_function" and node.target not in (ops.offload, ops.reload, ops.wait_tensor))


def in_order(graph: Graph) -> str:
    """A letter for each node: o, r, w for transfers and waits, c for all else that computes."""
    return "".join(label[0] for label in labels(graph) if label not in ("placeholder", "output"))


def backward(a: Tensor, b: Tensor, grad: Tensor) -> Tensor:
    """All reloads at the top; ``b`` is used after five operators, ``a``, by a view, after seven."""
    x, y = ops.reload(a, CPU, config=CONFIG), ops.reload(b, CPU, config=CONFIG)
    view = x.view(64)
    for _ in range(5):
        grad = grad.sin()
    grad = (grad * y).sin()
    return grad.view(64) * view


def test_a_reload_starts_when_the_operators_before_its_use_take_as_long_as_it_does() -> None:
    graph = asynchronous(backward, X, X + 1, X + 2)
    ready = prefetch(graph, 1 << 20, NBYTES / 2, one_second, margin=1.0)  # each transfer takes two seconds
    soon, late = of_kind(ready, ops.reload)
    assert [node.args[0].name for node in (soon, late)] == ["b_1", "a_1"], "they start in the order of need"
    assert _seconds_between(soon, wait_of(soon)) == 2
    assert _seconds_between(late, wait_of(late)) == 2
    assert torch.equal(run(ready, X, X + 1, X).results[0], run(graph, X, X + 1, X).results[0])


def _seconds_between(first: Node, last: Node) -> float:
    seconds, node = 0.0, first
    while node is not last:
        seconds += one_second(node)
        node = node.next
    return seconds


def test_a_link_carries_one_reload_after_another() -> None:
    def program(a: Tensor, b: Tensor, grad: Tensor) -> Tensor:
        x, y = ops.reload(a, CPU, config=CONFIG), ops.reload(b, CPU, config=CONFIG)
        for _ in range(8):
            grad = grad.sin()
        return torch.addcmul(grad, x, y)

    graph = asynchronous(program, X, X + 1, X + 2)
    ready = prefetch(graph, 1 << 20, NBYTES / 2, one_second, margin=1.0)
    assert in_order(ready) == "ccccrccrccwwc"


def test_a_view_of_what_comes_back_is_no_use_of_it() -> None:
    graph = asynchronous(backward, X, X + 1, X + 2)
    assert of_kind(graph, torch.ops.aten.view.default)[0].prev.target is ops.wait_tensor
    ready = prefetch(graph, 0, 1.0, one_second)
    wait = wait_of(of_kind(ready, ops.reload)[1])
    assert wait.next.target is torch.ops.aten.view.default
    assert wait.next.next.target is not torch.ops.aten.view.default
    ran = run(ready, X, X + 1, X)
    assert ran.violations == []
    assert ran.stats.bytes_in == 2 * NBYTES


def test_reloads_start_behind_the_inputs_however_slow_the_link_is() -> None:
    ready = prefetch(asynchronous(backward, X, X + 1, X + 2), 1 << 20, 1e-9, one_second)
    assert labels(ready)[:5] == ["placeholder"] * 3 + ["reload"] * 2


def test_a_reload_starts_right_behind_a_product_where_it_can_be_pinned() -> None:
    ready = prefetch(asynchronous(chain(4), X, WEIGHT), 1 << 20, NBYTES / 2, one_second)
    before = [node.prev.target for node in of_kind(ready, ops.reload)]
    assert before == [ops.wait_tensor, ops.reload, torch.ops.aten.mm.default, torch.ops.aten.mm.default]


@pytest.mark.parametrize("comes_first", [False, True])
def test_no_reload_starts_between_two_products_that_read_what_one_kernel_makes(comes_first: bool) -> None:
    def program(saved: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        x = ops.reload(saved, CPU, config=CONFIG)
        grad = (grad if comes_first else torch.mm(grad, weight)).sin()
        first, second = torch.mm(grad.t(), grad), torch.mm(grad, weight)
        return first, torch.mm(second, weight) * x

    graph = asynchronous(program, X, WEIGHT, X + 1)
    ready = [prefetch(graph, 1 << 20, NBYTES / seconds, one_second, margin=1.0) for seconds in (1, 2)]
    behind, before = ("ccccrcwc", "rcccccwc") if comes_first else ("cccccrcwc", "crcccccwc")
    assert [in_order(one) for one in ready] == [behind, before], "behind both of them, or before what they read"


def test_reloads_start_between_products_that_read_what_is_in_memory_anyway() -> None:
    def program(saved: list[Tensor], weight: Tensor, grad: Tensor) -> Tensor:
        cast = weight.to(torch.float64).to(torch.float32)
        for one in saved:
            x = ops.reload(one, CPU, config=CONFIG)
            grad = torch.mm(torch.mm(x.t(), torch.mm(grad, cast)), x.t())
        return grad

    graph = asynchronous(program, [X, X + 1, X + 2], WEIGHT, X + 3)
    ready = prefetch(graph, 1 << 20, NBYTES / 2, one_second, margin=1.0)
    assert in_order(ready) == "crccwccrcccwccrcccwcccc"


def test_passes_read_sizes_that_depend_on_the_inputs_without_fixing_them() -> None:
    traced = make_fx(chain(4), tracing_mode="symbolic")(torch.randn(6, 8), WEIGHT)
    shapes = traced.shape_env
    guards = len(shapes.guards)
    graph = insert_asynchronous(traced.graph)
    graph = sink_waits(prefetch(graph, 2 * 6 * 8 * 4, 1e9, one_second), 2 * 6 * 8 * 4)
    assert peak_flying(graph) == (2 * 6 * 8 * 4, 6 * 8 * 4)
    assert len(shapes.guards) == guards


# -- proof ------------------------------------------------------------------------------------------------------------


def test_a_source_that_is_written_over_before_its_wait_is_reported(violations: list[str]) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        host = ops.offload(y, config=CONFIG)
        return ops.reload(host, CPU, config=CONFIG), y.add_(1)

    graph = asynchronous(program, X)
    assert run(graph, X).violations == []
    (change,) = (node for node in graph.nodes if node.target is torch.ops.aten.add_.Tensor)
    of_kind(graph, ops.offload)[0].append(change)
    graph.lint()
    assert run(graph, X).violations
    assert violations, "the sanitizer sees it too"
    violations.clear()
