"""The recording double with whole training steps on it, every call of which goes into the happens-before log.

Not a device, and no proof of one. Torch's own CPU tensors are its memory, so that autograd, optimizers and ``Offload``
run as they are, with the real ``AcceleratorRuntime`` between them and this double:

- Compute runs the moment it is called. When a stream that computes is told to wait, what it waits for runs first.
- Copies are only enqueued and hold no memory. They run when a stream or the host needs them, or earlier by chance. A
  query does not know of it but by chance: the host runs far ahead of a device.
- The log is written *here*, call by call as torch is called: what the runtime means to do does not count. Operators are
  seen by the observer that the simulated runtime uses too, on the stream that is current.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from eager_offload._torch import TorchDispatchMode, weak_storage, without_dispatch_modes
from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.tiers.base import ByteRegion
from tests.doubles.recording_accelerator import RecordingAccelerator
from tests.doubles.recording_streams import Key, Mark, RecordingEvent, RecordingStream, Step
from tests.simulation.checker import Checker
from tests.simulation.log import Log, Operation, Recorded, Synchronized, Waited, WrittenLog
from tests.simulation.observer import OperatorObserver
from tests.simulation.simulated import POISON

_CPU = torch.device("cpu")


class TrainingAccelerator(RecordingAccelerator):
    """See the module.

    Args:
        devices: how many there are. A tensor is on the device that was selected when it was made, whatever torch says.
        haste: how likely something enqueued runs at each call: 0 for as late as possible, 1 for at once.
        seed: of what runs by chance.
    """

    kind = "cpu"

    def __init__(self, devices: int = 1, *, haste: float = 0.0, seed: int = 0, can_register: bool = False) -> None:
        super().__init__(devices, can_register=can_register)
        #: The runtime under test; hand it to ``Offload``.
        self.runtime = AcceleratorRuntime(self, probe_bytes=1 << 16)
        # Here a copy is over when the host waits for it: held back, most would be cancelled, and their order not seen.
        setattr(self.runtime, "holds_copies_back", False)  # noqa: B010  # of its class otherwise
        self.haste = haste
        self._random = random.Random(seed)
        self._side_streams: set[Key] = set()
        self._known: weakref.WeakSet[Mark] = weakref.WeakSet()
        self._pinned: list[object] = []
        #: Where the calls are written, and operators by whom they are seen.
        self.log: Log | None = None
        self._observer: OperatorObserver | None = None

    # -- what a test does with it -----------------------------------------------------------------------------------

    @contextmanager
    def checked(self, recording: WrittenLog | None = None) -> Iterator[Checker]:
        """Logs every operator of this thread and every call into the double; at the end whatever is pending runs.

        Args:
            recording: gets the log too.
        """
        assert self._observer is None, "this double is being checked already"
        checker = Checker()
        log: Log = checker
        if recording is not None:
            recording.then = checker
            log = recording
        home = RecordingStream(self, Key(0, 0))
        self._observer = observer = OperatorObserver(self.runtime, log, _CPU, home=home)
        self.log = observer
        try:
            with observer:
                yield checker
        finally:
            observer.sweep()
            self.run_all()
            self._observer = self.log = None

    def watching(self) -> TorchDispatchMode:
        """A context for a further thread that computes while this one is inside ``checked()``."""
        assert self._observer is not None, "nothing is being checked"
        return self._observer.elsewhere()

    def name(self, tensor: Tensor) -> ByteRegion:
        """The bytes of ``tensor`` as the log names them."""
        assert self._observer is not None, "nothing is being checked"
        return self._observer.region(tensor)

    def side_stream(self, device_index: int = 0) -> torch.Stream:
        """One more stream to compute on."""
        stream = super().stream(torch.device(self.kind, device_index))
        self._side_streams.add(Key(device_index, stream.stream_id))
        return stream

    @contextmanager
    def computing_on(self, stream: torch.Stream) -> Iterator[None]:
        """Selects ``stream`` and its device for what the calling thread computes inside."""
        with self.runtime.enter(stream):
            yield

    # -- AcceleratorApi ---------------------------------------------------------------------------------------------

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        with without_dispatch_modes():
            tensor = super().empty(nbytes, device)
        if self._observer is not None:
            self._observer.allocated(tensor, self._stream(self.selected(device.index)), "reload target")
        return tensor

    def empty_pinned(self, nbytes: int) -> Tensor:
        with without_dispatch_modes():
            slab = super().empty_pinned(nbytes)
        self._pinned.append(weak_storage(slab.untyped_storage()))
        return slab

    def copy(self, dst: Tensor, src: Tensor) -> None:
        key = self.selected(self.current_device_index())
        self.note(f"copy {dst.numel()} on {key.device_index}/{key.stream_id}")
        self.during_copy()
        if self._observer is not None:
            what = "offload" if weak_storage(dst.untyped_storage()) in self._pinned else "reload"
            reads, writes = (self._observer.region(src),), (self._observer.region(dst),)
            self._observer.write(Operation(self._stream(key), reads, writes, what))
        nbytes = dst.numel()
        with without_dispatch_modes():
            target, source = _End(self, dst), _End(self, src)

        def run() -> None:
            with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
                into, out_of = target.bytes(), source.bytes()
                if into is not None:
                    into.copy_(out_of) if out_of is not None else into.fill_(POISON)
            self.clock += nbytes / self.rate

        self.enqueue(key, Step(run=run))

    def device_of(self, tensor: Tensor) -> torch.device:
        if self._observer is None:
            return torch.device(self.kind, self.current_device_index())
        owner = self._observer.owner(tensor)
        assert isinstance(owner, torch.Stream)
        return owner.device

    # -- the log ----------------------------------------------------------------------------------------------------

    def on_record(self, key: Key, mark: Mark) -> None:
        if self.log is not None:
            self.log.write(Recorded(self._stream(key), mark))

    def on_wait(self, key: Key, event: Mark | RecordingEvent) -> None:
        if self.log is not None:
            self.log.write(Waited(self._stream(key), event))

    def admits(self, mark: Mark) -> bool:
        return mark in self._known or (mark.passed and self._random.random() < self.haste)

    def on_over(self, event: Mark | RecordingEvent) -> None:
        if isinstance(event, Mark):
            self._known.add(event)
        if self.log is not None:
            self.log.write(Synchronized(event))

    # -- inside -----------------------------------------------------------------------------------------------------

    def note(self, call: str) -> None:
        super().note(call)
        with self._lock:
            ready = True
            while ready and self._random.random() < self.haste:
                keys = list(self._queues)
                self._random.shuffle(keys)
                ready = any(self._step(key) for key in keys)

    def enqueue(self, key: Key, step: Step) -> None:
        with self._lock:
            super().enqueue(key, step)
            computes = key.stream_id == 0 or key in self._side_streams
            if computes and step.marks is None:
                # What is computed next runs at once, so all that comes before it has to have run.
                while queue := self._queues[key]:
                    if not self._step(key):
                        assert queue[0].awaits is not None
                        self.run_until(queue[0].awaits)

    def _stream(self, key: Key) -> torch.Stream:
        return RecordingStream(self, key)


class _End:
    """One end of a copy, which keeps nothing alive but what the double itself never gives back."""

    def __init__(self, double: RecordingAccelerator, tensor: Tensor) -> None:
        self._block = None if double._block_of(tensor) is None else double._memory(tensor)
        self._storage = weak_storage(tensor.untyped_storage())
        self._start, self._nbytes = int(tensor.storage_offset()), tensor.numel()

    def bytes(self) -> Tensor | None:
        """The bytes, or ``None`` where they are gone."""
        if self._block is not None:
            return self._block
        storage = self._storage()
        if storage is None or storage.nbytes() < self._start + self._nbytes:
            return None
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, self._start, (self._nbytes,), (1,))
