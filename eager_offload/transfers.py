"""What compiled code asks for, carried out: a graph says itself when bytes leave and when they come back.

    offload   device -> slot of a tier; a host tensor stands for the bytes from then on
    reload    slot -> device, by that host tensor
    wait      whoever reads, or writes over, one end of a transfer comes after it

Eager code is given saved tensors one by one and has to plan as it goes (``eager/lane.py``). A graph was planned as a
whole before it runs, so nothing here decides: the same runtime, registry, tiers and accounts do what the graph says.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from eager_offload.eager.ground import Ground
from eager_offload.errors import CapacityError, OffloadError
from eager_offload.observe.seam import Waiting
from eager_offload.parcels import (
    Arrival,
    Parcel,
    Remains,
    flat_bytes,
    host_tensor,
    like_host,
    own,
    owned_by,
    resolved,
    span_bytes,
)
from eager_offload.runtime.base import Direction, Event, Layout, Stream
from eager_offload.stats import KeepReason, Tally
from eager_offload.tiers.base import Slot, Tier
from eager_offload.tiers.guard import NoHeadroomError, process_guard
from eager_offload.tiers.memory import view_of

__all__ = ["Transfers", "reload_copy", "wait_for"]


#: A transfer that somebody has still to wait for, and the bytes on the device that it holds until it is over. A plain
#: tuple, which is made without a call: see [Note: interrupts] in eager/ground.py.
_Under: TypeAlias = tuple[Event, int]


_OUT_OF_ROOM = (
    "compiled code cannot keep them where they are, so copies take plain host memory, or memory of the device where "
    "there is none. Raise host_budget or disk_budget, or compile with a larger min_bytes"
)


class Transfers:
    """The transfers that graphs ask of one device."""

    def __init__(self, ground: Ground, tiers: Sequence[Tier]) -> None:
        self.graveyard: deque[Remains] = deque()
        self._ground = ground
        self._tiers = tiers
        self._out: dict[int, _Under] = {}  # by ticket
        self._in: dict[int, _Under] = {}
        self._inflight_bytes = 0

    def __len__(self) -> int:
        """How many transfers nobody has waited for."""
        return len(self._out) + len(self._in)

    # -- forward --------------------------------------------------------------------------------------------------

    def offload(self, source: Tensor, *, wait: bool, region: str | None) -> Tensor:
        """Starts to move the bytes that ``source`` spans; returns the host tensor that stands for them.

        Where no tier has room, the bytes are copied to plain host memory, or else on the device: a graph has no way to
        keep what it was compiled to let go of.

        Args:
            source: strided, without a conjugate or negative bit.
            wait: whether ``source`` may be written over when this returns; else ``wait`` has to be called first.
            region: with the first offload of a graph: the bytes that the graph keeps, as ``reason=bytes,...``.

        Raises:
            CapacityError: nothing has room for the bytes.
        """
        ground = self._ground
        with ground.accounts.lock:
            self.settle()
            tally = ground.accounts.tally
            if region is not None:
                tally.begin()  # nothing of it need run inside a `with`
                _count_region(tally, region)
                if wait and tally.demote("unpinned"):
                    ground.tell(
                        "compiled code waits for each of its transfers: the pass that would order them did not run. It "
                        "runs under Inductor, unless the options of torch.compile replace post_grad_custom_post_pass: "
                        "compile with offload.compile(model, ...), which keeps both"
                    )
            slot = ground.reserve(self._tiers, span_bytes(source), else_=_OUT_OF_ROOM)
            parcel = Parcel(self, slot, source, tally)
            tally.kept(KeepReason.BUDGET, parcel.logical_bytes)  # until it is on its way
            memory = None if slot is None else _memory_of(slot)
            if slot is None or memory is None:
                host = self._stay(parcel, source)
            else:
                host = host_tensor(memory, source, parcel)
                self._send(parcel, slot, source)
            if (recorder := ground.accounts.recorder) is not None:
                recorder.parcel(ground, parcel, region)
        if wait:
            self.leave(parcel, source)
        return host

    def _send(self, parcel: Parcel, slot: Slot, source: Tensor) -> None:
        ground, runtime, tally = self._ground, self._ground.runtime, parcel.tally
        flat = flat_bytes(source)
        ordering = runtime.record(runtime.current_stream(ground.device))
        out = runtime.transfer_stream(ground.device, Direction.OUT)
        earlier = [fence.event for fence in slot.fences if not fence.passed()]
        ground.copy(slot, flat, slot, out, (ordering, *earlier), keepalive=(flat, slot), transfer=parcel)
        assert parcel.ticket is not None
        # [Note: interrupts] in ground.py: it is on its way, and no call stands between that and whoever has to know.
        self._out[parcel.ticket] = parcel.event, parcel.nbytes
        tally.kept_bytes[KeepReason.BUDGET] -= parcel.logical_bytes
        tally.offloaded_bytes += parcel.logical_bytes
        tally.offloaded_tensors += 1
        tally.bytes_out += parcel.nbytes
        self._inflight_bytes += parcel.nbytes
        ground.resident_bytes += parcel.nbytes
        ground.note_peak()
        tally.inflight_bytes_peak = max(tally.inflight_bytes_peak, self._inflight_bytes)

    def leave(self, parcel: Parcel, keepalive: Tensor | None) -> None:
        """The source may be written over once this returns (on an accelerator: by what is enqueued from then on).

        Args:
            keepalive: the source, from which the bytes are saved if they did not arrive.

        Raises:
            OffloadError: they did not, and there is no ``keepalive``.
            CapacityError: they did not, and nothing has room for them.
        """
        ground, slot = self._ground, parcel.slot
        if slot is None:
            parcel.is_pending = False
            return
        runtime, recorder = ground.runtime, ground.accounts.recorder
        waiting: Waiting | None = None
        started = None if runtime.query(parcel.event) else time.perf_counter()
        failure: OffloadError | None = None
        try:
            # Of a disk only the host learns whether a write has failed, and the source goes after this.
            stream = None if slot.tier == "disk" else runtime.current_stream(ground.device)
            if recorder is not None and started is not None:
                waiting = recorder.waits(ground, stream)
            if stream is None:
                runtime.synchronize(parcel.event)
            else:
                runtime.wait(stream, parcel.event)
        except OffloadError as error:
            failure = error.with_traceback(None)
        if waiting is not None:
            waiting.over("offload")
        with ground.accounts.lock:
            if started is not None:
                waited = time.perf_counter() - started
                ground.accounts.tally.stall_seconds += waited
                ground.accounts.tally.window_stall_seconds += waited  # which says how late a graph waits
            parcel.is_pending = False
            self._is_over(self._out, parcel.ticket, out=True)
            if failure is None:
                return
            if keepalive is None:
                raise failure
            if ground.accounts.tally.demote("write_failed"):
                ground.tell(f"offloading failed, a copy of the saved tensor stays in memory: {failure}")
            parcel.tally.reclassify(parcel.logical_bytes, None, KeepReason.FAILED)
            if recorder is not None:
                recorder.parcel_stays(parcel)
            parcel.tally.bytes_out -= parcel.nbytes
            self._keep(parcel, keepalive)

    def _stay(self, parcel: Parcel, source: Tensor) -> Tensor:
        """No tier has room: the host tensor stands for a copy."""
        kept = self._keep(parcel, source)
        if kept.device.type == "cpu":
            return host_tensor(view_of(kept.data_ptr(), parcel.nbytes, kept), source, parcel)
        # It only has to say what it stands for: nobody touches it, so it takes no memory.
        host = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="cpu")
        own(host.untyped_storage(), parcel)
        return host

    def _keep(self, parcel: Parcel, source: Tensor) -> Tensor:
        """Copies what ``source`` spans into plain host memory, or where there is none on its device."""
        flat, runtime = flat_bytes(resolved(source)), self._ground.runtime
        kept: Tensor | None = None
        with runtime.enter(runtime.current_stream(self._ground.device)):
            for device in _homes(source.device, parcel.nbytes):
                try:
                    kept = torch.empty_like(flat, device=device).copy_(flat)
                    break
                except (MemoryError, RuntimeError):  # torch says the one or the other
                    continue
        if kept is None:
            raise CapacityError(
                f"neither a tier nor the memory of the host or of {source.device} has room for {parcel.nbytes} bytes, "
                "and compiled code cannot keep the tensor: raise host_budget or disk_budget, or compile with a larger "
                "min_bytes"
            )
        parcel.event = runtime.record(runtime.current_stream(self._ground.device))
        parcel.kept, parcel.slot = kept, None
        return kept

    # -- backward -------------------------------------------------------------------------------------------------

    def reload(self, parcel: Parcel, host: Tensor, *, wait: bool) -> Tensor:
        """Starts to bring back what ``host`` stands for; returns a tensor like it, on the device.

        Args:
            host: what ``offload`` returned, or a view of it.
            wait: whether the tensor may be read when this returns; else ``wait`` has to be called first.

        Raises:
            TransferError, CorruptionError: the bytes did not come back (or the wait says so).
        """
        ground = self._ground
        runtime = ground.runtime
        with ground.accounts.lock:
            self.settle()
            stream = runtime.current_stream(ground.device)
            if parcel.is_pending:
                raise OffloadError(
                    "reload was called before the offload was waited for: put eager_offload::wait_tensor between "
                    "eager_offload::offload(..., wait=False) and the reload of its result"
                )
            self._note_asked(parcel)
            if (recorder := ground.accounts.recorder) is not None:
                recorder.graph_reloads(ground)
            target = runtime.allocate(Layout(parcel.nbytes, parcel.phase), ground.device, stream)
            if parcel.slot is None:
                assert parcel.kept is not None
                runtime.wait(stream, parcel.event)  # another stream may have made the copy
                target.copy_(parcel.kept)
                runtime.leave_behind(runtime.record(stream), parcel.kept)
                arrival = Arrival(None, parcel.nbytes)
            else:
                arrival = Arrival(self, parcel.nbytes)
                self._fetch(parcel, parcel.slot, target, arrival, stream, "reload" if wait else "prefetch")
        tensor = like_host(target, host)
        own(tensor.untyped_storage(), arrival)
        if wait:
            arrive(arrival)
        return tensor

    def _fetch(self, parcel: Parcel, slot: Slot, target: Tensor, arrival: Arrival, stream: Stream, what: str) -> None:
        ground, runtime, tally = self._ground, self._ground.runtime, self._ground.accounts.tally
        # See [Note: the block's last owner] in eager/reloading.py.
        allocated = runtime.record(stream)
        back = runtime.transfer_stream(ground.device, Direction.IN)
        after = (allocated,) if runtime.query(parcel.event) else (allocated, parcel.event)
        ground.copy(target, slot, slot, back, after, keepalive=(target, slot), transfer=arrival, what=what)
        assert arrival.ticket is not None
        self._in[arrival.ticket] = arrival.event, arrival.nbytes
        ground.resident_bytes += arrival.nbytes
        tally.bytes_in += arrival.nbytes
        ground.note_peak()

    def arrive(self, arrival: Arrival) -> None:
        """What was reloaded may be read once this returns (on an accelerator: by what is enqueued from then on).

        Raises:
            TransferError, CorruptionError: the bytes did not come back.
        """
        ground = self._ground
        runtime, recorder = ground.runtime, ground.accounts.recorder
        waiting: Waiting | None = None
        started = None if runtime.query(arrival.event) else time.perf_counter()
        failure: OffloadError | None = None
        try:
            stream = runtime.current_stream(ground.device)
            if recorder is not None and started is not None:
                waiting = recorder.waits(ground, stream)
            runtime.wait(stream, arrival.event)
        except OffloadError as error:
            failure = error
        if waiting is not None:
            waiting.over("reload")
        # Not where the wait was interrupted: the copy goes on, and what it writes to has to outlive it.
        with ground.accounts.lock:
            if started is not None:
                ground.accounts.tally.stall_seconds += time.perf_counter() - started
            self._is_over(self._in, arrival.ticket, out=False)
        if failure is not None:
            raise failure

    def _note_asked(self, parcel: Parcel) -> None:
        if not parcel.was_asked and parcel.kept is None:
            parcel.tally.reloaded_bytes += parcel.logical_bytes
        parcel.was_asked = True

    # -- in between -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Notices host tensors that went, and transfers whose wait never came; never blocks. The lock is held."""
        while self.graveyard:
            remains = self.graveyard[0]
            if not remains.is_kept and not remains.was_asked:
                remains.tally.released_bytes += remains.logical_bytes
            del self.graveyard[0]
        for under, out in ((self._out, True), (self._in, False)):
            if under:
                for ticket in [ticket for ticket, (event, _) in under.items() if self._ground.runtime.query(event)]:
                    # An event that is over needs no keepalive any more, and can still be waited for.
                    self._is_over(under, ticket, out=out)

    def synchronize(self) -> None:
        """Waits until nothing is on its way. The lock is held."""
        for event, _ in (*self._out.values(), *self._in.values()):
            try:
                self._ground.runtime.synchronize(event)
            except OffloadError:  # whoever waits for it hears of it
                continue
        self.settle()

    def _is_over(self, under: dict[int, _Under], ticket: int | None, *, out: bool) -> None:
        if ticket is None or ticket not in under:
            return
        ground, (event, nbytes) = self._ground, under[ticket]
        ground.registry.forget(ticket)
        seconds, tally = ground.runtime.seconds(event) or 0.0, ground.accounts.tally
        if out:
            tally.out_seconds += seconds
        else:
            tally.in_seconds += seconds
        ground.resident_bytes -= nbytes
        self._inflight_bytes -= nbytes if out else 0
        del under[ticket]  # no call since the accounts changed: see [Note: interrupts] in eager/ground.py


def wait_for(tensor: Tensor, keepalive: Tensor | None) -> None:
    """Waits for the transfer of which ``tensor`` is the end that an operation returned.

    Raises:
        OffloadError: none is pending.
    """
    pending = owned_by(tensor)
    if isinstance(pending, Parcel) and pending.is_pending:
        pending.transfers.leave(pending, keepalive)
    elif isinstance(pending, Arrival) and pending.is_pending:
        arrive(pending)
    elif tensor.numel():
        raise OffloadError(
            f"wait_tensor was given a tensor of size {list(tensor.size())} of which no transfer is pending: pair it, "
            "once, with an eager_offload::offload or eager_offload::reload that was called with wait=False"
        )


def arrive(arrival: Arrival) -> None:
    """Waits for a reload."""
    if arrival.transfers is not None:
        arrival.transfers.arrive(arrival)
    arrival.is_pending = False


def reload_copy(host: Tensor, device: torch.device) -> Tensor:
    """What a reload is for a host tensor that stands for nothing but holds the bytes itself."""
    tensor = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device).copy_(host)
    own(tensor.untyped_storage(), Arrival(None, tensor.nbytes))
    return tensor


def _homes(device: torch.device, nbytes: int) -> list[torch.device]:
    """Where a copy of bytes that no tier takes may go, the first choice in front; not to a host that is short too."""
    host = torch.device("cpu")
    if device.type != host.type:
        try:
            process_guard().admit(nbytes)
        except NoHeadroomError:
            return [device]
    return [host, device]


def _memory_of(slot: Slot) -> memoryview | None:
    """The memory of a slot; ``None`` where the system refuses, which has a limit of mappings for each process."""
    try:
        return slot.memory()
    except MemoryError:
        return None


def _count_region(tally: Tally, region: str) -> None:
    tally.compiled_regions += 1
    for item in filter(None, region.split(",")):
        reason, _, nbytes = item.partition("=")
        tally.kept(KeepReason(reason), int(nbytes))
