"""A recording double of ``torch.accelerator``: not a device, and no proof of one.

It answers the calls that ``AcceleratorRuntime`` makes, on CPU memory, and writes each of them down. What it copies
from a CUDA device is what goes wrong there:

- Work is only *enqueued*. A stream is a queue that runs when a test says so, in the order that the test chooses, so
  that every order which the events allow can be tried.
- Kernels and copies hold memory, not tensors: a tensor that was dropped is overwritten by those that are still queued.
- A block that is given back is handed out again at once, to the same stream, queued work or not.
- Waiting for an event that was never recorded does nothing, and it claims to be complete.
- ``current_stream`` answers with a new Python object each time; device and streams are selected for each thread apart.
- While a stream is being captured, calls are refused, and make the capture void (``recording_captures.py``).
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eager_offload.runtime.accelerator_api import AcceleratorApi
from eager_offload.tiers.memory import PAGE
from tests.doubles.recording_captures import DriverCaptures, RecordingGraph
from tests.doubles.recording_streams import Key, Mark, RecordingEvent, RecordingStream, Step

_BLOCK_ALIGNMENT = 512  # cudaMalloc's


@dataclass(eq=False)
class _Block:
    """Memory that the double never gives back, so that its address names it for good."""

    memory: Tensor
    key: Key


class RecordingAccelerator(AcceleratorApi):
    """The machine: an ``AcceleratorApi`` for the runtime.

    Args:
        devices: how many there are; 0 for a machine without an accelerator.
        skew: the address of every block modulo 512, and of pinned memory modulo a page: for allocators that align less.
        rate: bytes a second of a copy, on the machine's own clock.
        can_time: whether its events tell the time.
        can_stream: whether streams can be created.
        can_register: whether memory can be pinned where it lies.
    """

    #: The kind of device that it says to be.
    kind: ClassVar[str] = "cuda"

    def __init__(
        self,
        devices: int = 1,
        *,
        skew: int = 0,
        rate: float = 1e9,
        can_time: bool = True,
        can_stream: bool = True,
        can_register: bool = False,
    ) -> None:
        self.devices = devices
        self.skew = skew
        self.rate = rate
        self.can_time = can_time
        self.can_stream = can_stream
        self.can_register = can_register
        #: What ``pci_address`` answers, by device.
        self.pci_addresses: dict[int, str] = {}
        #: Bytes that are registered, by address; and those that torch would have pinned, each block a power of two.
        self.registered: dict[int, int] = {}
        self.pinned_by_torch = 0
        self.captures = DriverCaptures()
        #: Where matrix products work, by stream: in memory of the pool of a graph, or for ``None`` of eager code.
        self.workspaces: dict[Key, tuple[int, int] | None] = {}
        #: Runs inside every ``copy``, on the thread that makes it.
        self.during_copy: Callable[[], object] = lambda: None
        #: Every call, in order, with the stream or device that it was about.
        self.calls: list[str] = []
        self.clock = 0.0
        self._selected = threading.local()
        self._lock = threading.RLock()
        self._queues: dict[Key, deque[Step]] = defaultdict(deque)
        self._created = 0
        self._pools = itertools.count(1)
        self._faults: dict[str, deque[Exception]] = defaultdict(deque)
        self._blocks: list[_Block] = []
        self._addresses: list[int] = []
        self._idle: dict[Key, list[_Block]] = defaultdict(list)

    # -- AcceleratorApi ---------------------------------------------------------------------------------------------

    def current_accelerator(self) -> torch.device | None:
        return torch.device(self.kind) if self.devices else None

    def current_device_index(self) -> int:
        return getattr(self._selected, "index", 0)

    @contextmanager
    def device_index(self, index: int) -> Iterator[None]:
        self.note(f"device {index}")
        before = self.current_device_index()
        self._selected.index = index
        try:
            yield
        finally:
            self.note(f"device {before}")
            self._selected.index = before

    def current_stream(self, device: torch.device) -> torch.Stream:
        assert 0 <= device.index < self.devices
        return RecordingStream(self, self.selected(device.index))

    def is_capturing(self, index: int | None) -> bool:
        key = self.selected(self.current_device_index() if index is None else index)
        return self.captures.of(key) is not None

    def makes_graphs(self) -> bool:
        return True

    def graph(self, keep: bool) -> RecordingGraph:
        return RecordingGraph(self)

    def memory_pool(self) -> tuple[int, int]:
        return next(self._pools), 0

    def begin_graph(self, graph: RecordingGraph, memory: tuple[int, int] | None, mode: str) -> None:
        graph.capture_begin(memory, mode)

    def release_failed_graph(
        self, graph: RecordingGraph, index: int, memory: tuple[int, int] | None, *, ended: bool
    ) -> None:
        graph.reset()

    def synchronize(self, index: int) -> None:
        self.note(f"synchronize_device {index}")
        self.captures.check_device(index, "synchronize_device")
        for key in [key for key in self._queues if key.device_index == index]:
            stream, event = RecordingStream(self, key), RecordingEvent(self, False)
            stream.record_event(event)
            assert event.mark is not None
            self.run_until(event.mark)
            self.on_over(event.mark)

    def empty_cache(self) -> None:
        self.note("empty_cache")

    def forget_workspaces(self) -> None:
        self.note("forget_workspaces")
        self.workspaces.clear()

    def multiply(self, stream: torch.Stream) -> None:
        """A matrix product, in the workspace that torch has for ``stream`` until it is told to forget it."""
        assert isinstance(stream, RecordingStream)
        capture = self.captures.of(stream.key)
        pool = self.workspaces.setdefault(stream.key, None if capture is None else capture.pool)
        if capture is not None:
            capture.workspaces.add(pool)

    def set_stream(self, stream: torch.Stream) -> None:
        assert isinstance(stream, RecordingStream)
        self.note(f"set_stream {stream.key.device_index}/{stream.key.stream_id}")
        self._selected.index = stream.key.device_index
        self._stream_ids()[stream.key.device_index] = stream.key.stream_id

    def stream(self, device: torch.device, priority: int = 0) -> torch.Stream:
        self.note(f"stream {device.index}")
        if not self.can_stream:
            raise NotImplementedError("this device has one stream")
        with self._lock:
            self._created += 1
            return RecordingStream(self, Key(device.index, self._created))

    def event(self, device: torch.device, enable_timing: bool) -> torch.Event:
        return RecordingEvent(self, enable_timing)

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        key = self.selected(device.index)
        self.note(f"empty {nbytes} on {key.device_index}/{key.stream_id}")
        with self._lock:
            fitting = [block for block in self._idle[key] if block.memory.numel() >= nbytes]
            if fitting:
                block = min(fitting, key=lambda block: (block.memory.numel(), block.memory.data_ptr()))
                self._idle[key].remove(block)
            else:
                block = self._new_block(nbytes, key)
        return self._lend(block, nbytes)

    def empty_pinned(self, nbytes: int) -> Tensor:
        self.note(f"empty_pinned {nbytes}")
        self.captures.check_unsafe("pin")
        # Pinned memory starts at a page; this memory is not pinned, nothing here could tell.
        # Filled, so that a copy that comes too early cannot find the right bytes left there by chance.
        room = torch.full((nbytes + 2 * PAGE,), 0xEE, dtype=torch.uint8, device="cpu")
        rounded = 1 << (nbytes - 1).bit_length()
        self.pinned_by_torch += rounded
        weakref.finalize(room.untyped_storage(), self._unpinned, rounded).atexit = False
        start = (self.skew - room.data_ptr()) % PAGE
        return room[start : start + nbytes]

    def register(self, address: int, nbytes: int) -> None:
        self.note(f"register {nbytes}")
        if not self.can_register:
            raise NotImplementedError("this device cannot register memory")
        self.captures.check_unsafe("pin")
        assert not any(start < address + nbytes and address < start + n for start, n in self.registered.items())
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self.note("unregister")
        self.captures.check_unsafe("unpin")
        del self.registered[address]

    def pci_address(self, index: int) -> str | None:
        return self.pci_addresses.get(index)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        key = (self._block_of(dst) or self._block_of(src) or _nowhere()).key
        current = self.selected(key.device_index)
        self.note(f"copy {dst.numel()} on {current.device_index}/{current.stream_id}")
        self.during_copy()
        to, by = self._memory(dst), self._memory(src)

        def run() -> None:
            to.copy_(by)
            self.clock += to.numel() / self.rate

        self.enqueue(current, Step(run=run))

    def device_of(self, tensor: Tensor) -> torch.device:
        return torch.device("cuda", (self._block_of(tensor) or _nowhere()).key.device_index)

    # -- what a test does with it -----------------------------------------------------------------------------------

    def launch(self, stream: torch.Stream, kernel: Callable[..., object], *args: Tensor) -> None:
        """Enqueues a kernel of the user's."""
        memory = [self._memory(tensor) for tensor in args]
        self.enqueue(Key(stream.device.index, stream.stream_id), Step(run=lambda: kernel(*memory)))

    def fail(self, call: str, error: Exception) -> None:
        """Lets a call (by its first word in ``calls``) raise, once."""
        self._faults[call].append(error)

    def run_all(self, first: Sequence[torch.Stream] = ()) -> None:
        """Runs everything: of what may run next, the streams of ``first`` go as far ahead as events let them."""
        preferred = [Key(stream.device.index, stream.stream_id) for stream in first]
        while any(self._queues.values()):
            keys = [*preferred, *(key for key in self._queues if key not in preferred)]
            assert any(self._step(key) for key in keys), "streams wait for each other"

    def run_until(self, mark: Mark) -> None:
        """Runs no more than what it takes for ``mark`` to pass."""
        with self._lock:
            while not mark.passed:
                if not self._step(mark.key):
                    awaited = self._queues[mark.key][0].awaits
                    assert awaited is not None
                    self.run_until(awaited)

    def pending(self, stream: torch.Stream) -> int:
        """How many steps of ``stream`` have not run."""
        return len(self._queues[Key(stream.device.index, stream.stream_id)])

    def selected(self, device_index: int) -> Key:
        """The stream that the calling thread has selected on a device."""
        return Key(device_index, self._stream_ids().get(device_index, 0))

    # -- for those who write down what is called --------------------------------------------------------------------

    def on_record(self, key: Key, mark: Mark) -> None:
        """An event was recorded."""

    def on_wait(self, key: Key, event: Mark | RecordingEvent) -> None:
        """A stream was told to wait for an event: one record of it, or itself where it never was recorded."""

    def admits(self, mark: Mark) -> bool:
        """Whether a query says that a mark has passed."""
        return mark.passed

    def on_over(self, event: Mark | RecordingEvent) -> None:
        """The host was told that an event is over."""

    def _unpinned(self, nbytes: int) -> None:
        self.pinned_by_torch -= nbytes

    # -- inside -----------------------------------------------------------------------------------------------------

    def note(self, call: str) -> None:
        with self._lock:
            self.calls.append(call)
            faults = self._faults[call.partition(" ")[0]]
            error = faults.popleft() if faults else None
        if error is not None:
            raise error

    def enqueue(self, key: Key, step: Step) -> None:
        with self._lock:
            if not self.captures.takes(key, step):
                self._queues[key].append(step)

    def _step(self, key: Key) -> bool:
        queue = self._queues[key]
        if not queue or (queue[0].awaits is not None and not queue[0].awaits.passed):
            return False
        step = queue.popleft()
        if step.run is not None:
            step.run()
        if step.marks is not None:
            step.marks.passed, step.marks.seconds = True, self.clock
        return True

    def _stream_ids(self) -> dict[int, int]:
        ids: dict[int, int] | None = getattr(self._selected, "stream_ids", None)
        if ids is None:
            ids = self._selected.stream_ids = {}
        return ids

    def _new_block(self, nbytes: int, key: Key) -> _Block:
        with torch.inference_mode(False):
            room = torch.zeros(nbytes + 2 * _BLOCK_ALIGNMENT, dtype=torch.uint8, device="cpu")
        start = (self.skew - room.data_ptr()) % _BLOCK_ALIGNMENT
        block = _Block(room[start : start + max(nbytes, 1)], key)
        at = bisect.bisect(self._addresses, block.memory.data_ptr())
        self._addresses.insert(at, block.memory.data_ptr())
        self._blocks.insert(at, block)
        return block

    def _lend(self, block: _Block, nbytes: int) -> Tensor:
        """A tensor over a block, which comes back when the tensor's storage goes."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        lease = (ctypes.c_uint8 * nbytes).from_address(block.memory.data_ptr())
        weakref.finalize(lease, self._idle[block.key].append, block).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def _block_of(self, tensor: Tensor) -> _Block | None:
        at = bisect.bisect(self._addresses, tensor.data_ptr()) - 1
        if at < 0 or tensor.data_ptr() >= self._addresses[at] + self._blocks[at].memory.numel():
            return None
        return self._blocks[at]

    def _memory(self, tensor: Tensor) -> Tensor:
        """The bytes of ``tensor`` without the tensor: a queued operation keeps nothing alive."""
        block = self._block_of(tensor)
        if block is None:
            return tensor
        start = tensor.data_ptr() - block.memory.data_ptr()
        return block.memory[start : start + tensor.numel()]


def _nowhere() -> _Block:
    raise AssertionError("this tensor is not in the memory of the double")
