"""How well transfers in compiled graphs hide behind compute, on a virtual clock: 32 blocks, an H200 and PCIe 5 x16.

    python -m benchmarks.compiled_simulate
    python -m benchmarks.compiled_simulate --tokens 32k --jitter 0

The graphs are those of the large model itself, without its numbers; what moves, when it starts and when compute waits
is decided by the library's passes. They believe in other rates than the clock has, and every operator takes a time that
differs by up to 30 percent from what it should take. Beside it: torch's own passes on the same graphs, which get the
true time of every operator, for the values of our choice that they accept.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, replace
from statistics import median
from unittest.mock import patch

import torch
from torch.fx import Graph, Node

import eager_offload as eo
from benchmarks.common import GIB, Report, Spread, drive, show
from benchmarks.simulate import LIMIT, options_of
from eager_offload.compile import prefetch, sink_waits
from eager_offload.compile.cost import roofline
from eager_offload.compile.graphs import nbytes_of
from eager_offload.planning.predict import floor_seconds
from tests.simulation.graphs import halves_of, peak_bytes
from tests.simulation.large import H200, LARGE, SEQUENCES
from tests.simulation.player import OURS, Kind, play

try:
    import torch._functorch._activation_offloading.activation_offloading as torch_passes
    from torch._functorch import config as functorch_config

    AO: dict[object, Kind] = {
        torch.ops.ao.offload.default: Kind.OUT,
        torch.ops.ao.reload.default: Kind.BACK,
        torch.ops.ao.wait_tensor.default: Kind.WAIT,
    }
except (ImportError, AttributeError):  # a torch without them
    AO = {}


PEAKS = ("inflight", "prefetched")


@dataclass(frozen=True)
class Step:
    """One step. Seconds and bytes."""

    seed: int
    step_seconds: float
    compute_seconds: float
    floor_seconds: float
    bytes_out: int
    bytes_back: int
    inflight_bytes_peak: int
    prefetched_bytes_peak: int

    @property
    def over_floor(self) -> float:
        return self.step_seconds / self.floor_seconds


@dataclass(frozen=True)
class Ordered:
    """Both graphs of a step with transfers in their places."""

    forward: Graph
    backward: Graph
    kinds: dict[object, Kind]
    #: Most bytes of activations on the device in each half.
    forward_bytes: int
    backward_bytes: int


class Simulation:
    """One sequence length.

    Args:
        tokens: of the one sequence.
        options: the command line.
    """

    def __init__(self, tokens: int, options: argparse.Namespace) -> None:
        self.tokens = tokens
        self.options = options
        #: What the clock has, and what the passes believe.
        self.truth = replace(H200, single_flops=H200.flops / 16, launch_seconds=0.0)
        wrong = 1.0 + options.wrong
        self.belief = replace(
            self.truth,
            flops=self.truth.flops * wrong,
            single_flops=self.truth.single_flops * wrong,
            memory=self.truth.memory / wrong,
        )
        self.shape = replace(LARGE, layers=options.layers)
        self.halves = halves_of(self.shape, tokens)
        self.saved_bytes = sum(nbytes_of(node.meta["val"]) for node in self.halves.saved())
        largest = max(nbytes_of(node.meta["val"]) for node in self.halves.saved())
        self.window = int(options.window_tensors * largest)
        self.config = eo.OffloadConfig(tier="host", max_inflight_bytes=self.window, prefetch_bytes=self.window)
        self.choice = self.halves.choose(self.config)

    def ours(self) -> Ordered:
        """The library's passes."""
        forward, backward = self.halves.with_transfers(self.choice, self.config)
        forward = sink_waits(forward, self.window)
        backward = prefetch(backward, self.window, self.truth.back, roofline(self.belief))
        return self._ordered(forward, backward, OURS)

    def torchs(self) -> Ordered | None:
        """torch's passes on the same graphs; ``None`` where this torch has none."""
        if not AO:
            return None
        halves = halves_of(self.shape, self.tokens)
        marked = {node.name for group in self.choice.groups for node in (group.base, *group.members)}
        for node in halves.forward.graph.nodes:
            node.meta["should_offload"] = node.name in marked
        estimate = roofline(self.truth)
        settings = functorch_config.patch(
            activation_offload_separate_stream=True,
            activation_offload_sink_wait=True,
            activation_reload_prefetch=True,
            activation_offload_cpu_gpu_bw=self.truth.back / GIB,
        )
        # It times kernels on the device that it compiles for; here is none, so it is told the truth instead.
        with settings, patch.object(torch_passes, "benchmark_node", lambda node: 1e3 * estimate(node)):
            torch_passes.enable_activation_offloading(halves.forward, halves.backward, halves.num_outputs, set())
        return self._ordered(halves.forward.graph, halves.backward.graph, AO)

    def run(self, ordered: Ordered, seed: int) -> Step:
        """A step, with the operator times of ``seed``."""
        estimate, jitter, link = roofline(self.truth), self.options.jitter, self.truth

        def seconds(node: Node) -> float:
            # By name: the same operator takes the same time, whatever has put transfers around it.
            return estimate(node) * (1 + random.Random(f"{seed} {node.name}").uniform(-jitter, jitter))

        forward, backward = (play(one, seconds, link, ordered.kinds) for one in (ordered.forward, ordered.backward))
        assert forward.bytes_out == backward.bytes_back
        compute = forward.compute_seconds, backward.compute_seconds
        return Step(
            seed=seed,
            step_seconds=forward.seconds + backward.seconds,
            compute_seconds=sum(compute),
            floor_seconds=floor_seconds(*compute, forward.bytes_out, link.out, link.back),
            bytes_out=forward.bytes_out,
            bytes_back=backward.bytes_back,
            inflight_bytes_peak=forward.most[Kind.OUT],
            prefetched_bytes_peak=backward.most[Kind.BACK],
        )

    def without(self) -> Ordered:
        """The graphs as they were."""
        return self._ordered(self.halves.forward.graph, self.halves.backward.graph, {})

    def _ordered(self, forward: Graph, backward: Graph, kinds: dict[object, Kind]) -> Ordered:
        forward.lint()
        backward.lint()
        return Ordered(
            forward,
            backward,
            kinds,
            peak_bytes(forward, host=[target for target, kind in kinds.items() if kind is Kind.OUT]),
            peak_bytes(backward, [node.name for node in self.halves.saved()]),
        )


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    torch.set_num_threads(1)
    samples: dict[str, list[Step]] = {}
    rows = []
    for name in options.tokens:
        simulation = Simulation(SEQUENCES[name], options)
        window = simulation.window
        ways = {"none": simulation.without(), "ours": simulation.ours(), "torch": simulation.torchs()}
        for who, ordered in ways.items():
            if ordered is None:
                continue
            steps = [simulation.run(ordered, number) for number in range(options.steps)]
            inflight, back = (max(getattr(step, f"{what}_bytes_peak") for step in steps) for what in PEAKS)
            if who == "ours":
                report.at_most(f"{name}: step over floor", max(step.over_floor for step in steps), LIMIT)
                report.at_most(f"{name}: in flight over the window", inflight / window, 1)
                report.at_most(f"{name}: brought back over the cap", back / window, 1)
            samples[f"{name}, {who}"] = steps
            rows.append(
                {
                    "tokens, way": f"{name}, {who}",
                    "saved": simulation.saved_bytes / GIB,
                    "window": window / GIB,
                    "moved": steps[0].bytes_out / GIB,
                    "compute s": median(step.compute_seconds for step in steps),
                    "step s": median(step.step_seconds for step in steps),
                    "over floor": Spread.of(step.over_floor for step in steps),
                    "in flight": inflight / GIB,
                    "early": back / GIB,
                    "peak, forward": ordered.forward_bytes / GIB,
                    "backward": ordered.backward_bytes / GIB,
                }
            )
    show("Times of the virtual clock, sizes in GiB; the floor is that of the bytes that a way moves", rows)
    return samples, rows


if __name__ == "__main__":
    # How far off the rates are that the passes believe in.
    sys.exit(drive("compiled_simulate", options_of(__doc__, wrong=0.25), run))
