"""H09, H11, H19, H39, H66: what is held and for how long: by handles, never by an address, never by a guess, and never
until the garbage collector comes, which a program may have turned off; and no Python code of the library runs where
something dies, so that no interrupt is lost in a finalizer.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import eager_offload as eo
from eager_offload import Offload
from eager_offload.runtime import transfer_threads
from eager_offload.runtime.host import host_runtime
from eager_offload.tiers.disk import DiskSlot
from tests.hazards.backends import Backend, assert_settled, offloader_of
from tests.hazards.functions import saving
from tests.hazards.probes import Gone
from tests.hazards.programs import Around, Settled, assert_identical, assert_moved, leaf
from tests.hazards.wrappers import two
from tests.programs import Run, corpus
from tests.threads import collect

#: Moves everything at once.
ALL: dict[str, Any] = {"min_bytes": 0, "keep_last_bytes": 0}


@contextmanager
def without_gc() -> Iterator[None]:
    """Lifetimes must not depend on the cyclic collector."""
    collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def forward(offload: Around, storages: Gone, seed: int) -> Tensor:
    x = leaf(16, 16, seed=seed)
    with offload:
        h = storages.see((x * 2).tanh())
        return storages.see(h.exp() @ h).sum()


def a_dropped_graph(offload: Around, storages: Gone, seed: int) -> None:
    forward(offload, storages, seed)


def a_dropped_graph_of_a_module(offload: Around, storages: Gone, seed: int) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 16))
    with offload:
        storages.see(model(storages.see(leaf(16, 16, seed=seed) * 2)))


def a_branch_without_backward(offload: Around, storages: Gone, seed: int) -> None:
    x = leaf(16, 16, seed=seed)
    with offload:
        trunk = storages.see(x.tanh() * 2)
        used, unused = (trunk.exp()).sum(), storages.see(trunk.sin() @ trunk).cos().sum()
    used.backward()
    assert unused.requires_grad


def a_loss_of_none(offload: Around, storages: Gone, seed: int) -> None:
    def step() -> Tensor | None:
        with offload:
            forward(nullcontext(), storages, seed)
            return None  # the batch was skipped

    assert step() is None


def an_expert_that_got_no_tokens(offload: Around, storages: Gone, seed: int) -> None:
    x = leaf(16, 16, seed=seed)
    experts = [leaf(16, 16, seed=seed + index) for index in range(4)]
    with offload:
        routed = [storages.see((x[4 * i : 4 * i + 4] * 2) @ experts[i]).tanh() for i in range(4)]
        loss = routed[seed % 4].square().sum()
    loss.backward()


DROPPED = [
    a_dropped_graph,
    a_dropped_graph_of_a_module,
    a_branch_without_backward,
    a_loss_of_none,
    an_expert_that_got_no_tokens,
]


@pytest.mark.parametrize("step", DROPPED, ids=lambda step: step.__name__)
def test_h09_dropped_graphs_give_everything_back_at_once(
    step: Callable[[Around, Gone, int], None], backend: Backend
) -> None:
    offload, storages = backend.offload(prefetch_bytes=1 << 12), Gone()
    with without_gc():
        for seed in range(50):
            step(offload if seed % 2 else Settled(offload), storages, seed)
        offload.stats(synchronize=True)
        assert storages.alive == 0, f"{storages.alive} of {storages.seen} storages live on"
        # What was saved last need not leave: a graph that is dropped in the context is gone before anything follows.
        assert_moved(assert_settled(offload), least=0.7, held=step is an_expert_that_got_no_tokens)


def test_h09_a_graph_in_a_cycle_waits_for_the_collector_and_no_longer(backend: Backend) -> None:
    """The finalizers run inside the collector, at any moment: also while the library holds its lock."""
    offload, storages = backend.offload(), Gone()
    threshold = gc.get_threshold()
    gc.set_threshold(10, 2, 2)
    try:
        for seed in range(100):
            cycle: list[object] = [forward(offload, storages, seed)]
            cycle.append(cycle)
            del cycle
    finally:
        gc.set_threshold(*threshold)
    collect()
    offload.stats(synchronize=True)
    assert storages.alive == 0
    assert_moved(assert_settled(offload))


class Ground:
    """Places tensors one after the other at one address, each in a storage of its own."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = bytearray(nbytes)
        self._last: weakref.ref[torch.UntypedStorage] | None = None
        self.addresses: list[int] = []

    def place(self, values: Tensor) -> Tensor:
        assert self._last is None or self._last() is None, "the last owner of these bytes still lives"
        tensor = torch.frombuffer(self._bytes, dtype=values.dtype).view(values.size())
        tensor.copy_(values)
        self._last = weakref.ref(tensor.untyped_storage())
        self.addresses.append(tensor.data_ptr())
        return tensor


def test_h11_an_address_that_a_new_tensor_got_is_not_taken_for_the_old_one(backend: Backend) -> None:
    def program(offload: Around, place: Callable[[Tensor], Tensor]) -> object:
        w, losses = leaf(32, 32), []
        for seed in range(6):
            with offload:
                x = place(leaf(32, 32, seed=10 + seed, grad=False))
                losses.append((w * x).sum() + (w[1:] * x[1:]).sum() + (w[3] * x[3]).sum())
            del x
        for index in (0, 5, 2, 4, 1, 3):
            losses[index].backward()
        return w.grad

    expected, ground, offload = program(nullcontext(), torch.clone), Ground(32 * 32 * 4), backend.offload()
    assert_identical(expected, program(Settled(offload), ground.place))
    assert len(set(ground.addresses)) == 1
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.offloaded_bytes + stats.shared_bytes == stats.saved_bytes
    assert stats.offloaded_tensors >= 6, "a storage was taken for an older one"


def test_h11_the_address_is_used_again_within_one_forward(backend: Backend) -> None:
    def program(offload: Around, place: Callable[[Tensor], Tensor], let_go: Callable[[], object]) -> object:
        w, seen = leaf(32, 32), []
        with offload:
            total = (w * 0).sum()
            for seed in range(6):
                x = place(leaf(32, 32, seed=10 + seed, grad=False))
                total = total + saving(w, x, seen=seen).sum()
                del x
                w.sin()  # the operator before it has run: what it saved may leave
                let_go()
        total.backward()
        return w.grad, [given[:-1] for given in seen]

    offload, ground = backend.offload(max_inflight_bytes=1), Ground(32 * 32 * 4)

    def let_go() -> None:
        w = leaf(2)
        (w * w.exp()).sum()
        offload.stats(synchronize=True)

    expected = program(nullcontext(), torch.clone, lambda: None)
    assert_identical(expected, program(offload, ground.place, let_go))
    assert len(set(ground.addresses)) == 1
    assert_moved(assert_settled(offload))


def test_h19_what_was_prefetched_and_never_asked_for_is_freed_and_counted(backend: Backend) -> None:
    limit = 1 << 16
    offload = backend.offload(prefetch_bytes=limit)

    def program() -> None:
        leaves = [leaf(16, 16, seed=seed) for seed in range(8)]
        with Settled(offload):
            losses = [((x * 2).tanh().exp()).sum() for x in leaves]
        losses[-1].backward()
        before = offload.stats(synchronize=True)
        assert before.bytes_in > before.reloaded_bytes, "nothing was brought back that was not asked for"
        assert 0 < offloader_of(offload).resident_bytes <= limit
        del losses
        after = offload.stats(synchronize=True)
        assert offloader_of(offload).resident_bytes == 0
        assert after.released_bytes == after.offloaded_bytes - after.reloaded_bytes - after.forwarded_bytes > 0

    program()
    assert_moved(assert_settled(offload))


PACKAGE = Path(eo.__file__).parent
#: A simulated device is no part of a training process.
_SIMULATION = {"simulated"}
#: The modules of weak containers and finalizers, whose callbacks are in Python.
_WEAK = {"weakref", "_weakrefset"}


def entered_in(drop: Callable[[], None]) -> list[str]:
    """The functions of the library, and of weak containers, that are entered while ``drop`` runs."""
    entered = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.stem not in _SIMULATION and (PACKAGE in path.parents or path.stem in _WEAK):
            entered.append(f"{path.name}: {frame.f_code.co_name}")

    collect()  # what other tests have left behind
    sys.setprofile(note)
    try:
        drop()
        collect()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("way", ["leaving", "away", "traced", "wrapped", "back"])
def test_h39_no_python_runs_when_a_graph_goes(way: str, backend: Backend, tmp_path: Path) -> None:
    offload = backend.offload(prefetch_bytes=1 << 20)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Tanh(), nn.Linear(16, 16))
    graphs = []
    with offload.trace(tmp_path / "trace.json") if way == "traced" else offload, offload:
        source = two(lambda number: leaf(8, 16, seed=number)).requires_grad_() if way == "wrapped" else leaf(8, 16)
        graphs.append(source.sin().cos() if way == "wrapped" else model(source))
    if way in ("away", "back"):
        offload.stats(synchronize=True)
    if way == "back":
        graphs[0].sum().backward(retain_graph=True)
    assert entered_in(graphs.clear) == []
    assert_moved(assert_settled(offload))


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_h39_no_python_runs_when_an_offload_goes(tier: str) -> None:
    offload = Offload(tier=tier, **ALL)
    with offload:
        loss = leaf(8, 16, seed=0).sin().cos().sum()
    loss.backward()
    assert_moved(assert_settled(offload))
    del loss
    held, alive = [offload], weakref.ref(offload)
    del offload
    assert entered_in(held.clear) == []
    assert alive() is None


# -- an Offload that is dropped ---------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())


def loss_of(model: Callable[[Tensor], Tensor]) -> Tensor:
    return model(torch.ones(64, 64)).square().sum()


def corpus_program(name: str) -> Callable[[Offload], object]:
    (program,) = (one for one in corpus() if one.name == name)
    return lambda offload: program(Run(offload))


steps = corpus_program("H69-steps-in-turn")


def a_graph_that_outlives_it(offload: Offload) -> Tensor:
    with offload:
        return loss_of(model())


def an_interrupt(offload: Offload) -> None:
    def interrupt(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    with offload:
        value = loss_of(model())
        value.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        value.backward()


def a_trace(offload: Offload) -> None:
    with offload.trace(os.devnull):
        steps(offload)
    steps(offload)


def a_disk_that_fails(offload: Offload) -> None:
    def no_space(slot: DiskSlot, source: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True, action="always") as caught:
        patch.setattr(DiskSlot, "write", no_space)
        steps(offload)
        offload.stats(synchronize=True)
    assert "offloading failed" in str(caught[0].message)


def hidden_hooks(offload: Offload) -> None:
    def forward() -> Tensor:
        with offload:
            value = loss_of(model())
            with save_on_cpu():
                return value + loss_of(model())

    with pytest.warns(RuntimeWarning, match="other saved-tensor hooks"):
        value = forward()
    value.backward()


def compiled_code(offload: Offload) -> None:
    for compiled in (torch.compile(model(), backend="aot_eager"), offload.compile(model(), backend="aot_eager")):
        with offload:
            loss_of(compiled).backward()
    torch._dynamo.reset()


def a_table_that_was_given(offload: Offload) -> None:
    first = Offload(tier="disk", step_plans=True, **ALL)
    steps(first)
    given = Offload(tier="disk", plan=first.step_plan(), **ALL)
    steps(given)
    parts = [*parts_of(first), *parts_of(given)]
    del first, given
    assert_gone(parts)
    steps(offload)


def all_that_is_read_of_it(offload: Offload) -> None:
    steps(offload)
    assert str(offload.stats(synchronize=True))
    offload.step_plan()


#: Of the corpus.
CORPUS = [
    "H09-a-branch-that-nobody-differentiates",
    "H10-Fault-in-forward",
    "H69-several-graphs-at-once",
]
SPECIAL: list[Callable[[Offload], object]] = [
    a_graph_that_outlives_it,
    an_interrupt,
    a_trace,
    a_disk_that_fails,
    hidden_hooks,
    compiled_code,
    a_table_that_was_given,
    all_that_is_read_of_it,
]
SETTINGS: list[dict[str, Any]] = [
    {"tier": "host"},
    {"step_plans": True},
    {"step_plans": False},
    {"keep_last_bytes": "auto", "device_budget": "1GiB"},
    {"keep_last_bytes": "auto", "policy": "free"},
    {"codec": "lossless"},
    {"codec": "bf16"},
]
PROGRAMS: dict[str, Callable[[Offload], object]] = {
    **{one.__name__: one for one in SPECIAL},
    **{name: corpus_program(name) for name in CORPUS},
}


def parts_of(offload: Offload) -> list[weakref.ref[Any]]:
    """What holds memory, a file or a thread for it."""
    tiers = offload._offloaders.tiers()
    assert tiers, "nothing was opened"
    return [weakref.ref(one) for one in (offload, *offload._offloaders.all(), *tiers)]


def assert_gone(parts: list[weakref.ref[Any]]) -> None:
    assert [type(part).__name__ for ref in parts if (part := ref()) is not None] == []


@pytest.mark.parametrize(
    ("name", "fields"), [*((name, {}) for name in PROGRAMS), *((CORPUS[-1], fields) for fields in SETTINGS)], ids=str
)
def test_h66_a_dropped_offload_goes_without_the_collector(name: str, fields: dict[str, Any]) -> None:
    with without_gc():
        offload = Offload(**{"tier": "disk", **ALL, **fields})
        descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        graph = PROGRAMS[name](offload)
        moves = name != "a_disk_that_fails" and fields.get("keep_last_bytes") != "auto"
        assert offload.stats(synchronize=True).bytes_out > 0 or not moves
        parts = parts_of(offload)
        del offload, graph
        assert_gone(parts)
        has_file = descriptors and "tier" not in fields
        assert not has_file or len(os.listdir("/proc/self/fd")) < descriptors, "its file is closed"


def test_h66_its_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    host_runtime().close()
    monkeypatch.setattr(transfer_threads, "_IDLE_SECONDS", 600.0)
    with without_gc():
        offload = Offload(tier="disk", **ALL)
        steps(offload)
        offload.stats(synchronize=True)
        threads = [one for one in threading.enumerate() if one.name.startswith("eager_offload-")]
        assert threads
        del offload
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
