"""H38: a signal handler, a ``__del__`` or a callback of the garbage collector that calls the library in its own midst,
or a ``warnings.showwarning`` that does.

The first three run between two instructions of whatever their thread does. Here they run at the points at which CPython
looks for signals inside the library, which ``Walk`` finds, as well as behind a real signal.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.runtime.host import host_runtime
from eager_offload.tiers.disk import DiskSlot, DiskTier
from eager_offload.tiers.forking import OwnThread, can_begin_nothing
from tests.hazards.backends import Backend, assert_balanced, assert_settled, hooks_are_gone
from tests.hazards.test_interrupts_everywhere import FIELDS, PACKAGE, Walk, gradient
from tests.programs import leaf
from tests.threads import collect

REFUSED = "while another call of eager_offload runs on the same thread"


def train(offload: Offload) -> None:
    """What a handler may do: a step of another model."""
    found, expected = leaf(16, 16, seed=1), leaf(16, 16, seed=1)
    for x, around in ((found, offload), (expected, nullcontext())):
        with around:
            loss = (x * 3.0).sin().exp().sum()
        loss.backward()
    assert torch.equal(found.grad, expected.grad), "the handler's own step"


def save_only(offload: Offload) -> None:
    """The same by hooks that are there already, or not: whatever was interrupted is in a `with`, or in a backward."""
    (leaf(16, 16, seed=1) * 3.0).sin().exp().sum().backward()


class Graph(NamedTuple):
    """A graph that was there before, of which a handler asks for the gradient."""

    x: Tensor
    loss: Tensor
    expected: Tensor


#: That of the test that runs.
EARLIER: list[Graph] = []


def prepare(offload: Offload) -> None:
    x = leaf(16, 16, seed=1)
    with offload:
        loss = (x * 3.0).sin().exp().sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    EARLIER[:] = [Graph(x, loss, expected)]


def ask_only(offload: Offload) -> None:
    """The backward of that."""
    (x, loss, expected), *_ = EARLIER
    (found,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(found, expected), "the handler's own backward"


def adds_up(offload: Offload) -> None:
    assert_balanced(offload.stats(synchronize=True))


def looked_on() -> bool:
    """Whether a simulated device is at work, which is no part of a training process."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if Path(frame.f_code.co_filename).parent == PACKAGE.parent / "tests" / "simulation":
            return True
        frame = frame.f_back
    return False


def count(offload: Offload, call: Callable[[Offload], None], outcomes: Counter[str]) -> None:
    try:
        with torch.enable_grad():
            call(offload)
        outcomes["done"] += 1
    except RuntimeError as error:
        # Where autograd calls a pack hook it records nothing, with whichever hooks: no step can be made there.
        reasons = {REFUSED: "refused", "does not require grad and does not have a grad_fn": "not recorded"}
        outcomes[next((short for reason, short in reasons.items() if reason in str(error)), str(error))] += 1


@pytest.mark.filterwarnings("ignore:eager_offload. no room for:RuntimeWarning")
@pytest.mark.sampled(3, quick=True)
@pytest.mark.parametrize(
    "call", [adds_up, train, save_only, Offload.reset_stats, Offload.close, ask_only], ids=lambda c: c.__name__
)
def test_h38_a_handler_calls_the_library_at_any_point_of_it(call: Callable[[Offload], None], backend: Backend) -> None:
    expected = gradient(nullcontext())
    offload, outcomes, entered = backend.offload(**FIELDS), Counter[str](), Counter[CodeType]()
    if call is ask_only:
        prepare(offload)

    def reached(code: CodeType) -> None:
        """The second time it is a later save, or one of a step that is known."""
        entered[code] += 1
        if entered[code] <= 2 and not looked_on():
            count(offload, call, outcomes)

    for _ in range(2):
        with Walk(reached):  # where CPython looks for signals
            found = gradient(offload, offload.stats)
        assert torch.equal(found, expected)
        assert hooks_are_gone()
    assert torch.equal(gradient(offload), expected)
    EARLIER.clear()
    stats = assert_settled(offload)
    assert stats.bytes_out > 0
    assert outcomes["done"] > 0
    assert set(outcomes) <= ({"done"} if call is adds_up else {"done", "refused", "not recorded"}), outcomes
    assert call is adds_up or outcomes["refused"] > 0


@pytest.mark.filterwarnings(
    "ignore:eager_offload. offloading failed:RuntimeWarning",
    "ignore:eager_offload. nothing of this Offload:RuntimeWarning",
)
@pytest.mark.parametrize("call", [adds_up, train], ids=lambda call: call.__name__)
@pytest.mark.parametrize(
    ("owner", "name", "by_another"),
    [(DiskTier, "at_hand", False), (OwnThread, "start", True), (warnings, "showwarning", False)],
    ids=["while room is reserved", "while a transfer thread starts", "where a warning is shown"],
)
def test_h38_a_call_in_the_midst_of_the_library(
    owner: Any, name: str, by_another: bool, call: Callable[[Offload], None], monkeypatch: Any, disk: Backend
) -> None:
    expected, outcomes = gradient(nullcontext()), Counter[str]()
    function = getattr(owner, name) if owner is not warnings else lambda *_: None  # it is told, and not shown
    offload, other = disk.offload(**FIELDS), disk.offload(**FIELDS)
    write, failures = DiskSlot.write, iter([OSError(5, "broken")] if owner is warnings else [])

    def writing(slot: DiskSlot, source: Tensor) -> None:
        for failure in failures:
            raise failure
        write(slot, source)

    def handle(*_: object) -> None:
        count(other if by_another else offload, call, outcomes)

    def and_then(*arguments: Any) -> Any:
        result = function(*arguments)
        handle() if owner is warnings else signal.raise_signal(signal.SIGUSR1)
        return result

    handler = signal.signal(signal.SIGUSR1, handle)
    host_runtime().detach_user(None)  # with no thread that an earlier test has left
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("always")
        patch.setattr(DiskSlot, "write", writing)
        patch.setattr(owner, name, and_then)
        found = gradient(offload)
    signal.signal(signal.SIGUSR1, handler)
    assert torch.equal(found, expected)
    assert assert_settled(offload).bytes_out > 0
    assert set(outcomes) == {"refused" if call is train else "done"}, outcomes


@pytest.mark.parametrize(("allocations", "nth"), [(3, 5), (10, 1)])
def test_h38_the_garbage_collector_calls_back_in_the_midst_of_the_library(
    allocations: int, nth: int, backend: Backend
) -> None:
    expected = gradient(nullcontext())
    offload, outcomes, calls = backend.offload(**FIELDS), Counter[str](), 0
    inside = False

    def called_back(phase: str, info: dict[str, int]) -> None:
        nonlocal calls, inside
        calls += 1
        if phase == "start" and not inside and calls % nth == 0 and not looked_on():
            inside = True
            try:
                adds_up(offload)
                count(offload, train, outcomes)
            finally:
                inside = False

    threshold = gc.get_threshold()
    collect()
    gc.callbacks.append(called_back)
    gc.set_threshold(allocations, 1 << 30, 1 << 30)
    try:
        found: Tensor = gradient(offload)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(called_back)
    assert torch.equal(found, expected)
    assert outcomes["done"] > 0
    assert outcomes["refused"] > 0
    assert set(outcomes) <= {"done", "refused", "not recorded"}, outcomes
    assert assert_settled(offload).bytes_out > 0


def test_h38_a_thread_of_the_library_that_python_is_still_starting(disk: Backend) -> None:
    """Who starts it waits for it, with locks of the library, so nothing that is called there may wait for those."""
    expected, began, offload = gradient(nullcontext()), list[tuple[bool, int]](), disk.offload(**FIELDS)

    def called_back(frame: FrameType, event: str, arg: object) -> None:
        sys.settrace(None)
        if threading.current_thread().name.startswith("eager_offload"):
            began.append((can_begin_nothing(), offload.stats(synchronize=True).saved_tensors))

    host_runtime().detach_user(None)  # with no thread that an earlier test has left
    threading.settrace(called_back)  # Python calls it before the thread's own code
    try:
        found = gradient(offload)
    finally:
        threading.settrace(None)  # what the documentation says takes it away
    assert assert_settled(offload).bytes_out > 0
    assert torch.equal(found, expected)
    assert began
    assert all(nothing and saved > 0 for nothing, saved in began)
