"""H10: a KeyboardInterrupt at any line of a trace ends the trace, and nothing of it stays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import eager_offload as eo
from eager_offload.observe import tracing
from tests.observe.steps import Net, nothing_is_left, step
from tests.sampling import one_in

#: Of these something is called, or nothing has happened yet, or the `with` is not entered yet.
_UNSEEN = {"__enter__", "__exit__", "_take_all_away"}


@contextmanager
def lines(call: Callable[[FrameType], None]) -> Iterator[None]:
    """Calls ``call`` before each line of what observes, on this thread."""

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if Path(code.co_filename).parent != Path(tracing.__file__).parent or code.co_name in _UNSEEN:
            return None
        return line

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            call(frame)
        return line

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def test_h10_an_interrupt_at_any_line_of_a_trace_is_harmless(path: Path, net: Net, offload: eo.Offload) -> None:
    expected = step(net, nullcontext())
    reached: dict[tuple[str, int], None] = {}
    with lines(lambda frame: reached.setdefault((frame.f_code.co_filename, frame.f_lineno))), offload.trace(path):
        step(net, offload)
    assert len(reached) > 100
    raised, places = set[tuple[str, int]](), one_in(16, list(reached))
    for place in places:

        def interrupt(frame: FrameType, place: tuple[str, int] = place) -> None:
            if (frame.f_code.co_filename, frame.f_lineno) == place and place not in raised:
                raised.add(place)
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt), lines(interrupt), offload.trace(path):
            step(net, offload)
        assert nothing_is_left(offload), place
        assert all(map(torch.equal, step(net, offload), expected)), place
    assert len(raised) > 0.7 * len(places), "most are reached in every step"
    with offload.trace(path):
        step(net, offload)
    assert offload.stats(synchronize=True).bytes_out > 0
