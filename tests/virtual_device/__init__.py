"""A device of our own, which torch drives as it drives a GPU: ``install()`` makes it the accelerator of this process.

It is registered as PrivateUse1 and is called ``virtual``. What a GPU does in hardware is done by threads:

    streams     a thread each, 32 in a ring and the default one for each of two devices; events are points in them
    compute     a result has its shape at once, from the meta kernel; the CPU kernel runs on the stream, as late as a
                test wants. Operators without a meta kernel, or whose shapes depend on data, drain the stream first and
                run on the caller's thread
    random      an operator takes one number from the CPU's generator when it is called, and draws from that on its
                stream
    copies      are enqueued, take the time that a test gives the link, and arrive in parts, so that a reader that does
                not wait sees some of them. Pageable memory makes the host wait
    memory      a caching allocator with a pool for each stream, which hands blocks out at host time and paints them
                (every float is NaN), with a capacity, ``record_stream`` and statistics; the host that touches it dies
                of a fault that says so
    the host's  pinned memory is cached and rounded up to powers of two; memory can be registered as the driver does,
                and a copy that straddles two registrations is refused

    graphs      what is enqueued on a stream that is being captured becomes a node with the bytes it reads and writes,
                behind what the stream comes after; streams that wait for its events are captured too. A graph has
                memory of its own, and nodes that paint it where it is handed out and given back. A replay runs the
                nodes one at a time in an order that a seed draws among all that the edges allow (``graphs.py`` shows
                nodes and edges to the happens-before checker), on the stream that it is launched on; each random
                operator takes its number when the replay is launched, as if it were called then. Calls that a driver
                refuses in a capture raise and invalidate it, as its mode has it. ``torch.accelerator.Graph`` drives all
                of this, from torch 2.13 on

So a wait that is missing shows as wrong bits, in any code. Nothing here owns what is enqueued on it: a block that is
given back too early has a new owner while the old one still computes.

What it does not model: copy engines that several streams share, access from one device to the other's memory, kernels
of a compiler (Inductor), layouts other than strided, and a generator of its own. Of graphs: captures over both devices,
operators that drain the stream (an error), a replay inside a capture, changes of a graph once it is captured, and
memory pinned from a pool of the graph's own.
"""

from __future__ import annotations

import atexit
import functools
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.virtual_device import build

NAME = "virtual"
_CYCLES = 1.5e9  # a second, as the tests assume of a GPU


class VirtualDevice:
    """What a test may ask of the device beyond torch's own calls."""

    def __init__(self, extension: ModuleType) -> None:
        self._extension: Any = extension

    @contextmanager
    def slow_links(
        self, latency: float = 0.0, bandwidth: float = 0.0, *, out: bool = True, back: bool = True
    ) -> Iterator[None]:
        """Copies take ``latency`` seconds and move ``bandwidth`` bytes a second (0: as fast as memory).

        Args:
            out, back: which of the two ways.
        """
        ways = [way for way, slow in ((True, out), (False, back)) if slow]
        for way in ways:
            self._extension.set_link(way, latency, bandwidth)
        try:
            yield
        finally:
            for way in ways:
                self._extension.set_link(way, 0.0, 0.0)

    @contextmanager
    def slow_compute(self, seconds: float, **operators: float) -> Iterator[None]:
        """Every operator takes ``seconds`` longer; those that are named (``mm=0.01``) take as long as is said there."""
        for name, delay in {"": seconds, **operators}.items():
            self._extension.set_delay(name, delay)
        try:
            yield
        finally:
            self._extension.clear_delays()

    @contextmanager
    def capacity(self, nbytes: int, device: int = 0) -> Iterator[None]:
        """``device`` has ``nbytes`` bytes of memory."""
        _, before = torch.accelerator.get_memory_info(device)
        self._extension.set_capacity(device, nbytes)
        try:
            yield
        finally:
            self._extension.set_capacity(device, before)

    @contextmanager
    def replays(self, seed: int, without: Iterable[tuple[int, int]] = ()) -> Iterator[None]:
        """Graphs replay their nodes inside in orders that ``seed`` draws, each time another.

        Args:
            without: edges that replays do not keep, each as the numbers of a node and of one that comes after it.
        """
        self._extension.set_replays(seed, set(without))
        try:
            yield
        finally:
            self._extension.set_replays(0, set())

    @property
    def graphs_alive(self) -> int:
        """How many graphs, or captures of one, are held; one that runs is held by its stream."""
        return int(self._extension.graphs_alive())

    @contextmanager
    def held(self, device: int | None = None) -> Iterator[None]:
        """The stream that is current on entering stands still inside, where the host may not wait for it."""
        gate = self._extension.hold(torch.accelerator.current_device_index() if device is None else device)
        try:
            yield
        finally:
            gate.open()

    @contextmanager
    def held_stream(self, stream: torch.Stream) -> Iterator[None]:
        """``stream`` stands still inside, where the host may not wait for it."""
        with _selected(stream):
            gate = self._extension.hold(stream.device_index)
        try:
            yield
        finally:
            gate.open()

    @contextmanager
    def held_link(self) -> Iterator[tuple[Any, Any]]:
        """Copies to the host stand still inside; yields two gates.

        The first ``is_open`` when a copy stands still; they go on once the test has called the second's ``open``.
        """
        reached, opened = self._extension.hold_link(True)
        try:
            yield reached, opened
        finally:
            opened.open()

    @contextmanager
    def without_a_clock(self) -> Iterator[None]:
        """Events do not tell the time inside."""
        self._extension.set_clock(False)
        try:
            yield
        finally:
            self._extension.set_clock(True)

    @contextmanager
    def noted(self) -> Iterator[list[str]]:
        """Yields what at the end has the calls that were made inside, in order, as ``wait_event 0/3`` on stream 3.

        They are ``make_event``, ``record_event``, ``wait_event``, ``query`` and ``synchronize`` (of an event),
        ``set_stream``, ``copy`` across the link and ``empty``, both with their bytes.
        """
        calls: list[str] = []
        self._extension.start_noting()
        try:
            yield calls
        finally:
            calls += self._extension.noted()

    def peek(self, tensor: Tensor) -> Tensor:
        """A copy of the bytes that ``tensor`` has at this moment, in no order with any stream."""
        copy: Tensor = self._extension.peek(tensor)
        return copy

    @property
    def copied_bytes(self) -> tuple[int, int]:
        """Bytes that have crossed the link so far: out, in."""
        out, back = self._extension.copied_bytes()
        return out, back

    @property
    def host_waits(self) -> int:
        """How many times the host has waited for a stream or an event so far."""
        return int(self._extension.waits()[0])

    @property
    def devices(self) -> int:
        return int(self._extension.DEVICES)


@functools.cache
def install() -> VirtualDevice:
    """Registers the device with torch, for the rest of this process."""
    extension = build.load()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(extension))
    torch.utils.generate_methods_for_privateuse1_backend()
    # Before this torch neither synchronizes the device nor takes memory for pinned.
    torch.empty(1, device=NAME)
    torch.empty(1, pin_memory=True)
    atexit.register(_finish, extension)
    return VirtualDevice(extension)


def _finish(extension: Any) -> None:
    for index in range(extension.DEVICES):
        torch.accelerator.synchronize(index)


@contextmanager
def _selected(stream: torch.Stream) -> Iterator[None]:
    """Computes on ``stream`` inside, as ``torch.cuda.stream`` has it: one object may be entered by many."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _device_module(extension: Any) -> types.ModuleType:
    """``torch.virtual``: what torch and its users ask for by the name of the device."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._lazy_init = lambda: None  # without it torch takes the device for one that is not in use yet
    module.device_count = lambda: extension.DEVICES
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.device = torch.accelerator.device_index
    module.synchronize = torch.accelerator.synchronize
    module.current_stream = torch.accelerator.current_stream
    module.Stream = functools.partial(torch.Stream, device=NAME)
    module.stream = _selected
    module._sleep = lambda cycles: extension.sleep(torch.accelerator.current_device_index(), cycles / _CYCLES)
    module._is_in_bad_fork = lambda: False
    # Its random numbers come from the CPU's generator, which a program that seeds or saves that sees to.
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8)
    module.set_rng_state = lambda state, device=None: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    # As ``torch.cuda.cudart()`` has it: the driver's calls.
    module.cudart = lambda: types.SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: extension.register_host(address, nbytes),
        cudaHostUnregister=extension.unregister_host,
    )
    return module  # type: ignore[no-any-return]  # a module takes any attribute
