"""What Inductor makes of graphs with transfers: their order, what it fuses, and whose memory it uses again."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import memory
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from eager_offload.compile import ops, order
from eager_offload.compile.decide import counts_flops
from eager_offload.compile.graphs import copied
from eager_offload.compile.order import pin_in_place
from tests.compile.compiled import compiler, fresh_compiler, results_of, step_of
from tests.compile.happens_before import run
from tests.hazards.backends import assert_settled
from tests.programs import leaf

ROWS, WIDTH, LAYERS = 512, 64, 5
#: Of what each layer saves; what the last one saves is the network's output, which no graph may move.
NBYTES = 4 * ROWS * WIDTH
_CALL = re.compile(r"torch\.ops\.eager_offload\.(offload|reload|wait)\w*\.default\(|extern_kernels\.\w+\(")
_KINDS = {ops.offload: "offload", ops.reload: "reload", ops.wait_tensor: "wait"}


@dataclass
class Compiled:
    """What was decided, what the code says, and what came out."""

    #: For forward and backward: transfers and products in order.
    decided: list[list[str]] = field(default_factory=list)
    found: list[list[str]] = field(default_factory=list)
    #: The graphs after the last of our passes.
    graphs: list[Graph] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    #: What Inductor takes for the peak of forward and backward, in bytes, with each order of kernels it thinks of.
    peaks: list[list[int]] = field(default_factory=list)
    stats: eo.OffloadStats | None = None


def compiled_step(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """A compiled step of a small network on a link so slow that reloads start as early as the cap allows."""
    record = Compiled()

    def pin(graph: Graph) -> None:
        kinds = [_KINDS.get(node.target, "product" if counts_flops(node) else "") for node in graph.nodes]
        record.decided.append([kind for kind in kinds if kind])
        pin_in_place(graph)
        record.graphs.append(copied(graph)[0])
        record.peaks.append([])

    estimate = memory.estimate_peak_memory

    def estimate_peak_memory(*given: Any) -> Any:
        found = estimate(*given)
        record.peaks[-1].append(found[0])
        return found

    monkeypatch.setattr(memory, "estimate_peak_memory", estimate_peak_memory)
    monkeypatch.setattr(order, "pin_in_place", pin)
    monkeypatch.setattr(order, "bandwidth_of", lambda *_: 1.0)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    x = torch.randn(ROWS, WIDTH)
    windows = {"max_inflight_bytes": 2 * NBYTES, "prefetch_bytes": 2 * NBYTES}
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0, **windows)

    def step() -> None:
        with offload:
            loss = compiled(x).square().mean()
        loss.backward()

    with fresh_compiler():
        compiled = torch.compile(model)
        _, codes = run_and_get_code(step)
    for code in codes:
        assert "resize_" not in code
        lines = [line for line in code[code.index("def call(") :].splitlines() if not line.lstrip().startswith("#")]
        record.found.append([match[1] or "product" for line in lines if (match := _CALL.search(line))])
    record.gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    record.stats = offload.stats(synchronize=True)
    offload.close()
    return record


def inputs_like(graph: Graph) -> list[Tensor]:
    """Random inputs of the sizes that ``graph`` was compiled for."""
    values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    return [torch.randn(value.numel()).as_strided(value.size(), value.stride()) for value in values]


@pytest.mark.long
def test_pins_hold_transfers_where_they_were_put_and_host_tensors_are_in_no_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All host tensors at once would be the peak up to which a compiler keeps buffers, in both graphs."""
    record = compiled_step(monkeypatch)
    forward, backward = record.found
    assert record.found == record.decided
    assert "".join(one[0] for one in forward).count("wo") == LAYERS - 3, "waits are where the window gets full"
    assert backward[:2] == ["reload"] * 2, "and reloads start when the cap allows it"
    in_forward, in_backward = map(min, record.peaks)
    assert in_forward <= (2 + 2) * NBYTES, "the window, and what a layer is given and makes"
    assert in_backward < (2 + 4) * NBYTES, "what comes back ahead, and two gradients beside what they are made of"
    assert len(record.gradients) == 2 * LAYERS
    assert record.stats.inflight_bytes_peak <= 2 * NBYTES
    assert record.stats.bytes_in == (LAYERS - 1) * NBYTES
    for graph in record.graphs:
        ran = run(graph, *inputs_like(graph))
        assert ran.violations == []
        assert ran.stats.bytes_out == (LAYERS - 1) * NBYTES
    assert ran.stats.bytes_in == (LAYERS - 1) * NBYTES, "the last one is the backward"


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


def recomputed_attention(x: Tensor, weight: Tensor) -> Tensor:
    def segment(x: Tensor, weight: Tensor) -> Tensor:
        heads = (x @ weight).view(2, 8, 4, 8).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)
        return mixed.transpose(1, 2).reshape(16, 32).exp()

    hidden = checkpoint(segment, (x @ weight).sin(), weight, use_reentrant=False)
    return checkpoint(segment, hidden.cos(), weight, use_reentrant=False).sigmoid()


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
