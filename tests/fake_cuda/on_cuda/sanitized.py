"""Training under torch's CUDA sanitizer, in a process of its own: what it saw of the library's copies, and found.

    python -m tests.fake_cuda.on_cuda.sanitized PROGRAM [WITHOUT]

``WITHOUT`` names a wait that is left out. Prints a line of JSON.

[Note: a free is an access] The sanitizer forgets what accessed a block when that is freed. But the allocator hands the
block out again on the stream that it was allocated on, and asks no other stream. So here a free counts as an access by
that stream, and has to come after all others.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda._sanitizer as sanitizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import eager_offload as eo
from eager_offload.graphs import capture_step
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.base import Direction
from eager_offload.runtime.captures import AcceleratorEvent

DEVICE = torch.device("cuda", 0)
WINDOWS = {"min_bytes": 1 << 20, "keep_last_bytes": 0, "max_inflight_bytes": "8MiB", "prefetch_bytes": "8MiB"}


class Seen:
    """The bytes of copies that the sanitizer saw cross the link, each way, and the races that it found."""

    def __init__(self) -> None:
        self.out = self.back = 0
        #: Each as two accesses of which nothing orders the second after the first.
        self.races: list[tuple[str, str]] = []
        self._owners: dict[int, int] = {}
        mode = sanitizer.cuda_sanitizer.dispatch
        handler = mode.event_handler
        self._syncs, self._tensors = handler.syncs, handler.tensors_accessed
        self._launched, handler._handle_kernel_launch = handler._handle_kernel_launch, self._launch
        self._create, self._delete = self._tensors.create_tensor, self._tensors.delete_tensor
        self._tensors.create_tensor, self._tensors.delete_tensor = self._allocated, self._freed
        kind, checked = type(mode), type(mode).__torch_dispatch__

        def dispatch(self_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                self._copied(args[0], args[1])
            return checked(self_, func, types, args, kwargs)

        kind.__torch_dispatch__ = dispatch

    def _copied(self, target: Tensor, source: Tensor) -> None:
        if source.is_cuda and not target.is_cuda:
            self.out += source.nbytes
        elif target.is_cuda and not source.is_cuda:
            self.back += target.nbytes

    def _launch(self, *kernel: Any) -> list[Any]:
        """Writes down what the sanitizer would raise, which does not find its way out of a thread of autograd's."""
        for error in self._launched(*kernel):
            first, second = error.previous_access, error.current_access
            self.races.append((name_of(first.operator), name_of(second.operator)))
        return []

    def _allocated(self, address: int, stack: Any) -> None:
        self._create(address, stack)
        self._owners[address] = torch.cuda.current_stream().cuda_stream

    def _freed(self, address: int) -> None:
        owner = self._owners.pop(address, None)
        known = self._tensors.accesses[address]
        for access in [*known.reads, *filter(None, [known.write])]:
            if owner is not None and not self._syncs.is_ordered_after(owner, access.seq_num, access.stream):
                self.races.append((name_of(access.operator), "free"))
        self._delete(address)


def name_of(operator: Any) -> str:
    """Without its overload and namespace."""
    return str(operator).partition("(")[0].partition(".")[0].removeprefix("aten::")


# -- programs ---------------------------------------------------------------------------------------------------------


def weights(count: int = 6) -> list[Tensor]:
    return [torch.randn(512, 512, device=DEVICE).requires_grad_() for _ in range(count)]


def loss_of(x: Tensor, layers: list[Tensor]) -> Tensor:
    for layer in layers:
        x = torch.nn.functional.gelu(x @ layer)
    return x.square().mean()


def train(**fields: Any) -> eo.Offload:
    """Eight steps: the last ones are looked up in what the first have taught."""
    layers, x, offload = weights(), torch.randn(2048, 512, device=DEVICE), eo.Offload(**WINDOWS, **fields)
    for _ in range(8):
        with offload:
            loss = loss_of(x, layers)
        loss.backward()
        for layer in layers:
            layer.grad = None
    return offload


class Copies(TorchDispatchMode):
    """A mode of the user's: it is to see no copy."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.copy_.default or args[0].device == args[1].device
        return func(*args, **(kwargs or {}))


def beside_another_mode() -> eo.Offload:
    with Copies():
        return train()


def on_side_streams() -> eo.Offload:
    layers, x, offload = weights(), torch.randn(2048, 512, device=DEVICE), eo.Offload(**WINDOWS)
    streams, main = [torch.cuda.Stream() for _ in range(2)], torch.cuda.current_stream()
    for number in range(6):
        side = streams[number % 2]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            with offload:
                loss = loss_of(x, layers)
            loss.backward()
            for layer in layers:
                layer.grad = None
        main.wait_stream(side)
    return offload


def retained() -> eo.Offload:
    """Two backwards of each graph, and views: parts of a storage, and a gathered one."""
    layer, x = weights(1)[0], torch.randn(2048, 512, device=DEVICE)
    offload = eo.Offload(**WINDOWS, step_tables=False)
    for _ in range(3):
        with offload:
            h = (x @ layer).tanh()
            left, right = h.exp().chunk(2, dim=1)
            loss = ((left * right).sin() * h[:, ::2].cos()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        layer.grad = None
    return offload


def captured() -> eo.Offload:
    """A step without inputs: to the sanitizer its kernels run in the capture, so new inputs would race with them."""
    layers, x, offload = weights(), torch.randn(2048, 512, device=DEVICE), eo.Offload(**WINDOWS)

    def step() -> Tensor:
        with offload:
            loss = loss_of(x, layers)
        loss.backward()
        return loss.detach()

    with capture_step(step, offload=offload) as replayed:
        for _ in range(3):
            replayed()
        torch.cuda.synchronize()
    return offload


PROGRAMS: dict[str, Callable[[], eo.Offload]] = {
    "train": train,
    "beside another mode": beside_another_mode,
    "on side streams": on_side_streams,
    "retained": retained,
    "disk": lambda: train(tier="disk"),
    "captured": captured,
}


# -- waits that are left out ------------------------------------------------------------------------------------------


def leave_out(what: str) -> None:
    """Leaves out every wait of the kind ``what``."""
    out, back = (accelerator_runtime().transfer_stream(DEVICE, direction) for direction in Direction)
    wait_on = AcceleratorEvent.wait_on

    def skipping(is_skipped: Callable[[torch.Stream, torch.Stream], bool]) -> None:
        def wait(self: AcceleratorEvent, stream: torch.Stream) -> None:
            if not is_skipped(stream, self.recorded_on):
                wait_on(self, stream)

        AcceleratorEvent.wait_on = wait

    if what == "compute for a reload":
        skipping(lambda waits, of: of == back and waits not in (out, back))
    elif what == "a copy out for compute":
        skipping(lambda waits, of: waits == out and of not in (out, back))
    elif what == "a copy back for the last owner of its target":
        skipping(lambda waits, of: waits == back and of not in (out, back))
    elif what == "the release of a source for its copy":
        query, synchronize = AcceleratorEvent.query, AcceleratorEvent.synchronize
        AcceleratorEvent.query = lambda self: self.recorded_on == out or query(self)
        AcceleratorEvent.synchronize = lambda self: None if self.recorded_on == out else synchronize(self)
    else:
        raise ValueError(what)


def main(program: str, without: str | None = None) -> None:
    if without is not None:
        leave_out(without)
    seen = Seen()
    offload = PROGRAMS[program]()
    stats = offload.stats(synchronize=True)
    offload.close()
    print(json.dumps({"seen": [seen.out, seen.back], "moved": [stats.bytes_out, stats.bytes_in], "races": seen.races}))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # torch's tracing calls Python from threads that may outlive the interpreter, which ends in a signal
