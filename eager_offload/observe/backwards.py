"""Where backward is, while a trace runs: from where an operation asks for what it saved to where the next one does."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from eager_offload._torch import after_backward, current_autograd_node, current_backward, node_sequence
from eager_offload.observe.moments import Clock, Mark, Moments
from eager_offload.observe.trace import Kind
from eager_offload.runtime.base import Stream

__all__ = ["Backwards"]

_TRACK = "compute backward"


class _Flow:
    """A backward as far as one thread runs it: what it is at, and since when."""

    __slots__ = ("began", "module", "node", "operation", "step", "stream", "thread")

    def __init__(self, began: Mark, stream: Stream) -> None:
        self.began = began
        self.stream = stream
        self.thread = threading.get_ident()
        #: When the operation that it is at began.
        self.step = began
        self.node: int | None = None
        self.module = ""
        self.operation = ""


class Backwards:
    """The backwards that run during a trace. Whoever calls a method holds the accounts' lock."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments
        self._flows: dict[tuple[int, int], _Flow] = {}
        self._is_over = False

    def asked(self, clock: Clock, module: str) -> str:
        """An operation asks for what it saved; its name, empty outside of a backward.

        Args:
            clock: of the device on which it computes.
            module: the path of the module that it belongs to.
        """
        node: Any = current_autograd_node()
        task = current_backward()
        if node is None or task < 0 or self._is_over:
            return ""
        key = task, threading.get_ident()
        flow, number, name = self._flows.get(key), node_sequence(node), str(node.name())
        if flow is not None and flow.node == number:
            return name
        stream = clock.current_stream
        now = clock.at(stream)
        if flow is None:
            after_backward(partial(self._ended, task))
            flow = self._flows[key] = _Flow(now, stream)
        else:
            self._end_step(flow, now)
        flow.node, flow.step, flow.stream, flow.module, flow.operation = number, now, stream, module, name
        return name

    def close(self) -> None:
        """The trace ends. A backward that has not come to its end ends where it was seen last."""
        self._is_over = True
        for flow in self._flows.values():
            self._end(flow, flow.step)
        self._flows = {}

    def _ended(self, task: int) -> None:
        """Called by autograd, which must not hear of an error here: nothing below raises."""
        if not self._is_over:
            for key in [key for key in list(self._flows) if key[0] == task]:
                flow = self._flows.pop(key, None)
                if flow is not None:
                    self._end(flow, flow.step.clock.at(flow.stream))

    def _end_step(self, flow: _Flow, now: Mark) -> None:
        self._moments.add_work(
            Kind.COMPUTE,
            flow.module or flow.operation,
            flow.step,
            now,
            track=_TRACK,
            lane=flow.thread,
            module=flow.module,
            operation=flow.operation,
        )

    def _end(self, flow: _Flow, now: Mark) -> None:
        self._end_step(flow, now)
        self._moments.add_work(Kind.COMPUTE, "backward", flow.began, now, track=_TRACK, lane=flow.thread)
