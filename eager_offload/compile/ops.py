"""The operators with which compiled code transfers bytes, and one for gathered elements.

``offload`` returns a host tensor like the source; ``reload`` returns a tensor like the host tensor on ``device``. With
``wait=False`` they only start the copy. Then call ``wait_tensor`` with the result and the source, before the source of
an offload is overwritten or freed, and before the result of a reload is read.

    host = offload(x, wait=False)        # starts the copy
    ...                                  # x must not change
    wait_tensor(host, x)                 # x may be freed from here on

    y = reload(host, device, wait=False)
    ...
    wait_tensor(y, host)
    y.sum()

Arguments:

- ``config``: from :meth:`OffloadConfig.to_text`. The thread's innermost active :class:`Offload` of this configuration
  does the work and counts it.
- ``after``: a tensor that must be computed before: compilers keep only the order of data flow.
- ``region``: the graph's kept bytes, for the stats; in its first offload. A graph that moves nothing offloads an empty
  tensor to pass them.
- ``window``: the limit in bytes of the graph's transfers in this direction, for the ordering pass and the stats.

``spread`` copies gathered elements to their strides, and to their address modulo the alignment: kernels choose the
order of a summation by strides and alignment.

[Note: waits as mutations]
No operator returns its input: compilers would reuse the memory of the result, and gradients would be wrong. So
``wait_tensor`` returns nothing and is declared to write to its first argument, where the bytes of the transfer appear.
Functionalization would replace a written tensor by a copy, so waits are inserted after functionalization.

[Note: host tensors]
Only tensors pass from the forward graph to the backward graph. So an offload returns a CPU tensor over the memory of
its slot: pinned or plain memory, or a mapping of the spill file, which takes no memory until it is read. The tensor's
storage owns a :class:`HostBytes`, which returns the slot when autograd frees the tensor. This covers ``retain_graph``,
several backwards, and graphs without a backward. Only ``reload`` can read the bytes: after a failed write they are
elsewhere, and on an accelerator a stream waits for them, not the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.library import register_fake

from eager_offload import contexts
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import KEPT, BytesRecord, Transfer
from eager_offload.engine.transfer_log import GraphOffloaded
from eager_offload.engine.transfers import Transfers
from eager_offload.errors import CapacityError, OffloadError
from eager_offload.marks import inside
from eager_offload.runtime.base import ALIGNMENT, Event, Layout
from eager_offload.stats import Counters, KeepReason
from eager_offload.tiers.base import NoRoomError, Slot
from eager_offload.tiers.limits import host_bound
from eager_offload.tiers.memory import view_of
from eager_offload.torch_private.calls import OpOverload, library, set_over
from eager_offload.torch_private.memory import span_of

_library = library("eager_offload", "DEF")
#: A CUDA graph would replay the kernels without the host's transfers. (For strides see lowering.py.)
_TAGS = (torch.Tag.cudagraph_unsafe,)
_library.define(
    'offload(Tensor source, *, str config="", bool wait=True, Tensor? after=None, str? region=None, int window=0) '
    "-> Tensor",
    tags=_TAGS,
)
_library.define(
    'reload(Tensor host, Device device, *, str config="", bool wait=True, Tensor? after=None, int window=0) -> Tensor',
    tags=_TAGS,
)
_library.define("wait_tensor(Tensor(a!) tensor, Tensor? keepalive=None, *, Tensor? after=None) -> ()", tags=_TAGS)
_library.define("spread(Tensor compact, int[] stride, int offset=0) -> Tensor")

offload = torch.ops.eager_offload.offload.default
reload = torch.ops.eager_offload.reload.default
spread = torch.ops.eager_offload.spread.default
wait_tensor = torch.ops.eager_offload.wait_tensor.default
#: The operators that transfer bytes.
OPERATIONS = (offload, reload, wait_tensor)
for _operation in OPERATIONS:
    torch.fx.has_side_effect(_operation)


#: The attribute by which a storage owns an object: torch keeps the Python object of a storage, with its attributes.
_OWNED = "_eager_offload"
_CAPTURED = "compiled code that offloads was called"
_OUT_OF_ROOM = (
    "compiled code cannot keep them on the device, so copies take plain host memory, or memory of the device if there "
    "is none. Raise host_budget or disk_budget, or compile with a larger min_bytes"
)


class _Record(BytesRecord["HostBytes"]):
    fallback = "a copy of the saved tensor stays in memory"
    __slots__ = ()

    def on_transferred(self, transfer: Transfer, failure: OffloadError | None) -> None:
        if (owner := self()) is not None:
            owner.failure = failure


class HostBytes:
    """The bytes of a host tensor, whose storage is the only owner."""

    __slots__ = (
        *("__weakref__", "alignment_offset", "failure", "is_pending", "kept", "nbytes", "offloader", "record", "slot"),
        "transfer",
    )

    def __init__(
        self, offloader: DeviceOffloader, source: Tensor, slot: Slot | None, counters: Counters, kept_bytes: int
    ) -> None:
        self.record = _Record(self, offloader.on_death)
        self.record.save(counters, source.nbytes, KeepReason.BUDGET, source.nbytes)  # until the copy starts
        self.record.keep_beside(kept_bytes)
        offloader.records.add(self.record)
        self.offloader = offloader
        self.slot = slot
        self.nbytes = span_of(source)
        #: The address of the first source byte, modulo the alignment that reloads keep.
        self.alignment_offset = source.data_ptr() % ALIGNMENT
        #: The copy out, and its failure.
        self.transfer: Transfer | None = None
        self.failure: OffloadError | None = None
        #: Until `wait_tensor`.
        self.is_pending = True
        #: A copy of bytes that no tier took, and the event after the copy.
        self.kept: tuple[Tensor, Event] | None = None


class _Reload:
    """A reload, owned by the storage of its target."""

    __slots__ = ("is_pending", "offloader", "transfer")

    def __init__(self, offloader: DeviceOffloader | None = None, transfer: Transfer | None = None) -> None:
        #: ``None`` if the bytes are there already. Weak: the offloader holds the target, whose storage owns this
        #: object.
        self.offloader = None if offloader is None else weakref.ref(offloader)
        self.transfer = transfer
        #: Until `wait_tensor`.
        self.is_pending = True


# -- forward ------------------------------------------------------------------------------------------------------


def move_out(offloader: DeviceOffloader, source: Tensor, *, wait: bool, region: str | None) -> Tensor:
    """Starts the copy of the bytes that ``source`` spans; returns the host tensor.

    If no tier has room, copies the bytes to plain host memory, or else on the device: compiled code frees the source.
    """
    offloader.refuse_call(_CAPTURED)
    with offloader.crashing():
        with offloader.lock, offloader.locked() as transfers:
            transfers.poll()
            counters = transfers.accounts.counters
            kept = 0 if region is None else _begin_region(transfers, region, waits=wait)
        slot = None if offloader.is_crashed else offloader.reserve(span_of(source), fallback=_OUT_OF_ROOM)
        with offloader.lock, offloader.locked() as transfers:
            if transfers.is_crashed:  # crashed while a tier grew
                slot = None
            memory = None
            if slot is not None:
                with suppress(MemoryError):  # each process has a limit of mappings
                    memory = slot.memory()
            host_bytes = HostBytes(offloader, source, None if memory is None else slot, counters, kept)
            if slot is None or memory is None:
                host = _stay(host_bytes, source)
            else:
                host = _over(memory, source, host_bytes)
                record, storage = host_bytes.record, source.untyped_storage()
                transfer = Transfer(slot, host_bytes.nbytes, record.counters, record, storage)
                transfers.add_resident(transfer.nbytes, transfer)
                stream = transfers.runtime.current_stream(transfers.device)
                transfers.offload(flat_bytes(source), slot, stream, transfer, at_once=True)
                host_bytes.transfer = transfer
            if transfers.transfer_log.on_entry is not None:
                transfers.transfer_log.write(GraphOffloaded(host_bytes.record, region or ""))
    if wait:
        _wait_for_offload(host_bytes, source)
    return host


def _begin_region(transfers: Transfers, region: str, *, waits: bool) -> int:
    accounts, counters = transfers.accounts, transfers.accounts.counters
    counters.begin(step=not contexts.thread.contexts)  # the graph may run outside of every `with`
    counters.compiled_regions += 1
    counters.graphs.add(region)
    if waits:
        accounts.fall_back(
            "unpinned",
            "compiled code waits for each of its transfers: the pass that would order them did not run. It runs under "
            "Inductor, unless the options of torch.compile replace post_grad_custom_post_pass: compile with "
            "offload.compile(model, ...), which keeps both",
        )
    if inside.keeps:
        accounts.fall_back(
            "region",
            "compiled code moves the tensors that it saves although it is called in a no_offload() region: its graphs "
            "were made before. Begin the region inside of the compiled code (for a pattern, compile the module that it "
            "names, or one around it), or call the code outside of `with offload:`",
        )
    return counters.kept_by_graph(region)


def _wait_for_offload(host_bytes: HostBytes, keepalive: Tensor | None) -> None:
    """Waits until the source may be overwritten (on an accelerator: by work enqueued from then on).

    After a failed copy, copies the bytes from ``keepalive``, the source.
    """
    offloader, transfer = host_bytes.offloader, host_bytes.transfer
    if transfer is not None:
        # Only the host learns of a failed write to disk. The source is freed after this, so the host waits and not a
        # stream.
        stream = None if transfer.tier == "disk" else offloader.runtime.current_stream(offloader.device)
        failure: OffloadError | None = None
        try:
            offloader.wait(transfer, stream, "offload", fills_window=True)  # the window placed this wait
        except OffloadError as error:
            failure = error.with_traceback(None)
        with offloader.lock, offloader.locked() as transfers:
            host_bytes.is_pending = False
            transfers.complete(transfer, failure)
            if (failure := host_bytes.failure) is not None:
                if keepalive is None:
                    raise failure
                _keep(host_bytes, keepalive)
    host_bytes.is_pending = False


def _stay(host_bytes: HostBytes, source: Tensor) -> Tensor:
    """Returns a host tensor for a copy of the source."""
    host_bytes.record.stay(KeepReason.BUDGET)
    kept = _keep(host_bytes, source)
    if kept.device.type == "cpu":
        return _over(view_of(kept.data_ptr(), host_bytes.nbytes, kept), source, host_bytes)
    # A placeholder without memory: only `reload` uses it.
    host = _fake_offload(source)
    host.untyped_storage().__dict__[_OWNED] = host_bytes
    return host


def _keep(host_bytes: HostBytes, source: Tensor) -> Tensor:
    """Copies the bytes that ``source`` spans to plain host memory, or to its device if the host has none."""
    offloader = host_bytes.offloader
    flat, runtime = flat_bytes(resolved(source)), offloader.runtime
    stream, kept = runtime.current_stream(offloader.device), None
    with runtime.enter(stream):
        for device in _homes(source.device, host_bytes.nbytes):
            try:
                kept = torch.empty_like(flat, device=device).copy_(flat)
                break
            except (MemoryError, RuntimeError):  # torch raises either, depending on the device
                continue
    if kept is None:
        raise CapacityError(
            f"neither a tier nor the memory of the host or of {source.device} has room for {host_bytes.nbytes} bytes, "
            "and compiled code cannot keep the tensor: raise host_budget or disk_budget, or compile with a larger "
            "min_bytes"
        )
    host_bytes.kept, host_bytes.slot = (kept, runtime.record(stream)), None
    return kept


def _homes(device: torch.device, nbytes: int) -> list[torch.device]:
    """Returns the devices for a copy of bytes that no tier takes, in order of preference; the host only if it has
    memory."""
    host = torch.device("cpu")
    if device.type != host.type:
        try:
            host_bound.admit(nbytes)
        except NoRoomError:
            return [device]
    return [host, device]


# -- backward -----------------------------------------------------------------------------------------------------


def bring_back(host_bytes: HostBytes, host: Tensor, *, wait: bool) -> Tensor:
    """Starts the reload of ``host``, which may be a view of a host tensor; returns the device tensor."""
    offloader = host_bytes.offloader
    offloader.refuse_call(_CAPTURED)
    what, found = "reload" if wait else "prefetch", None
    with offloader.lock, offloader.locked() as transfers:
        transfers.poll()
        if host_bytes.is_pending:
            raise OffloadError(
                "reload was called before the offload was waited for: put eager_offload::wait_tensor between "
                "eager_offload::offload(..., wait=False) and the reload of its result"
            )
        if host_bytes.record.state is not KEPT:
            host_bytes.record.on_unpack(resident=False)
        with suppress(torch.OutOfMemoryError, MemoryError):
            found = _start_reload(transfers, host_bytes, what)
    if found is None:
        offloader.make_room()
        failure: Exception | None = None
        with offloader.lock, offloader.locked() as transfers:
            try:
                found = _start_reload(transfers, host_bytes, what)
            except (torch.OutOfMemoryError, MemoryError) as error:
                failure = error
        if failure is not None:
            raise failure
        assert found is not None
    target, pending = found
    tensor = _like_host(target, host)
    tensor.untyped_storage().__dict__[_OWNED] = pending
    if wait:
        _wait_for_reload(pending)
    return tensor


def _start_reload(transfers: Transfers, host_bytes: HostBytes, what: str) -> tuple[Tensor, _Reload]:
    runtime = transfers.runtime
    stream = runtime.current_stream(transfers.device)
    layout = Layout(host_bytes.nbytes, host_bytes.alignment_offset)
    if host_bytes.kept is None:
        assert host_bytes.slot is not None
        assert host_bytes.transfer is not None
        left = host_bytes.transfer.event
        after = () if runtime.query(left) else (left,)
        target, transfer = transfers.reload(host_bytes.slot, layout, stream, what, after=after, held_after=False)
        return target, _Reload(host_bytes.offloader, transfer)
    target, (kept, copied) = runtime.allocate(layout, transfers.device, stream), host_bytes.kept
    runtime.wait(stream, copied)  # the copy may be on another stream
    target.copy_(kept)
    done = runtime.record(stream)
    if not runtime.query(done):  # otherwise `kept` would be held until the next call, which may never come
        runtime.keep_until(done, kept)
    return target, _Reload()


def _wait_for_reload(pending: _Reload) -> None:
    """Waits until the result may be read (on an accelerator: by work enqueued from then on)."""
    if (transfer := pending.transfer) is not None:
        assert pending.offloader is not None
        if (offloader := pending.offloader()) is None:
            raise OffloadError("a reload was waited for after its host tensor had been freed")
        failure: OffloadError | None = None
        try:
            offloader.wait(transfer, offloader.runtime.current_stream(offloader.device), "reload")
        except OffloadError as error:  # an interrupt passes: the copy continues, and its target stays alive
            failure = error
        with offloader.lock, offloader.locked() as transfers:
            transfers.mark_consumed(transfer)
        if failure is not None:
            raise failure
    pending.is_pending = False


# -- tensors ------------------------------------------------------------------------------------------------------


def bytes_of(host: Tensor) -> HostBytes | None:
    found = _owned_by(host)
    return found if isinstance(found, HostBytes) else None


def resolved(tensor: Tensor) -> Tensor:
    """Returns ``tensor``, or a copy if it is lazily conjugated or negated: those bits are not copied with the bytes."""
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    plain = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return plain.copy_(tensor)


def flat_bytes(tensor: Tensor) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage = tensor.untyped_storage()
    return set_over(flat, storage, int(tensor.storage_offset()) * tensor.itemsize, (span_of(tensor),), (1,))


def _over(memory: memoryview, source: Tensor, host_bytes: HostBytes) -> Tensor:
    """Returns a CPU tensor like ``source`` over ``memory``, whose storage owns ``host_bytes``."""
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    storage.__dict__[_OWNED] = host_bytes
    return torch.empty(0, dtype=source.dtype).set_(storage, 0, source.size(), source.stride())


def _like_host(target: Tensor, host: Tensor) -> Tensor:
    """Returns a tensor like ``host``, which may be a view of a host tensor, over the flat ``target``."""
    if target.storage_offset() and target.device.type == "cpu":
        # Compiled code counts from the beginning of a storage, so the target gets a storage of its own.
        target = torch.frombuffer(view_of(target.data_ptr(), target.numel(), target), dtype=torch.uint8)
    offset = int(target.storage_offset()) // host.itemsize + int(host.storage_offset())
    empty = torch.empty(0, dtype=host.dtype, device=target.device)
    return set_over(empty, target.untyped_storage(), offset, host.size(), host.stride())


def _owned_by(tensor: Tensor) -> object:
    return tensor.untyped_storage().__dict__.get(_OWNED)


# -- the operations ----------------------------------------------------------------------------------------------------


def _refuse_autograd(operation: OpOverload, given: Tensor) -> None:
    if given.requires_grad and torch.is_grad_enabled():
        raise OffloadError(
            f"{operation} has no gradient, but its input requires grad: call it under torch.no_grad(), or let "
            "`with offload:` around the forward move the tensors that are saved for backward"
        )


def _offload(
    source: Tensor,
    *,
    config: str = "",
    wait: bool = True,
    after: Tensor | None = None,
    region: str | None = None,
    window: int = 0,
) -> Tensor:
    _refuse_autograd(offload, source)
    if source.layout is not torch.strided:
        raise OffloadError(f"eager_offload::offload takes a strided tensor, not one of layout {source.layout}")
    if source.numel() == 0:
        if region is not None:
            contexts.serving(config).count_kept(region)
        return _fake_offload(source)
    offloader = contexts.serving(config).offloader_of(source.device)
    offloader.accounts.counters.max_inflight_bytes = window
    return move_out(offloader, resolved(source), wait=wait, region=region)


def _reload(
    host: Tensor,
    device: torch.device,
    *,
    config: str = "",
    wait: bool = True,
    after: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    _refuse_autograd(reload, host)
    host_bytes = bytes_of(host)
    if host_bytes is None:
        tensor = _fake_reload(host, device).copy_(host)  # a plain tensor has its own bytes
        tensor.untyped_storage().__dict__[_OWNED] = _Reload()
        return tensor
    host_bytes.offloader.accounts.counters.prefetch_bytes = window
    return bring_back(host_bytes, host, wait=wait)


def _wait_tensor(tensor: Tensor, keepalive: Tensor | None = None, *, after: Tensor | None = None) -> None:
    _refuse_autograd(wait_tensor, tensor)
    pending = _owned_by(tensor)
    if isinstance(pending, HostBytes) and pending.is_pending:
        _wait_for_offload(pending, keepalive)
    elif isinstance(pending, _Reload) and pending.is_pending:
        _wait_for_reload(pending)
    elif tensor.numel():
        raise OffloadError(
            f"wait_tensor was given a tensor of size {list(tensor.size())} without a pending transfer: call it "
            "once for each eager_offload::offload or eager_offload::reload that was called with wait=False"
        )


def _fake_offload(source: Tensor, **_: object) -> Tensor:
    return torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="cpu")


def _fake_reload(host: Tensor, device: torch.device, **_: object) -> Tensor:
    return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)


def _spread(compact: Tensor, stride: Sequence[int], offset: int = 0) -> Tensor:
    return _fake_spread(compact, stride, offset).copy_(compact)


def _fake_spread(compact: Tensor, stride: Sequence[int], offset: int = 0) -> Tensor:
    phase = offset * compact.itemsize % ALIGNMENT // compact.itemsize
    size = compact.size()
    span = 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    return torch.empty(phase + span, dtype=compact.dtype, device=compact.device).as_strided(size, stride, phase)


for _name, _real, _fake in (
    ("offload", _offload, _fake_offload),
    ("reload", _reload, _fake_reload),
    ("wait_tensor", _wait_tensor, lambda *_, **__: None),
    ("spread", _spread, _fake_spread),
):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    register_fake(f"eager_offload::{_name}", _fake, lib=_library)
for _name in ("offload", "reload", "wait_tensor"):
    for _bit in ("Conjugate", "Negative"):  # otherwise torch passes a copy, with other strides than the graph expects
        _library.impl(_name, torch.library.fallthrough_kernel, _bit)
