"""H09, H19, H39, H66: what is held and for how long: by handles, never until the garbage collector comes, which a
program may have turned off; and no Python code of the library runs where something dies.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.probes import Gone
from tests.hazards.programs import Around, Settled, assert_moved
from tests.programs import Run, corpus, leaf
from tests.programs.parts.wrappers import two
from tests.threads import collect

#: Moves everything at once.
ALL: dict[str, Any] = {"min_bytes": 0, "keep_last_bytes": 0}
PACKAGE = Path(eo.__file__).parent


@contextmanager
def without_gc() -> Iterator[None]:
    """Lifetimes must not depend on the cyclic collector."""
    collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def corpus_program(name: str) -> Callable[[Around], object]:
    (program,) = (one for one in corpus() if one.name == name)
    return lambda around: program(Run(around))


def model_of(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.BatchNorm1d(width), nn.Linear(width, width))


# -- graphs that are dropped ------------------------------------------------------------------------------------------


def forward(around: Around, storages: Gone) -> Tensor:
    x = leaf(16, 16)
    with around:
        h = storages.see((x * 2).tanh())
        return storages.see(h.exp() @ h).sum()


#: Of the corpus: they leave without a backward.
DROPPED = [
    "H09-a-graph-that-is-dropped",
    "H09-a-branch-that-nobody-differentiates",
    "H73-a-graph-of-saved-results-that-is-dropped",
]


@pytest.mark.parametrize("name", DROPPED)
def test_h09_nothing_waits_for_the_collector(name: str, backend: Backend) -> None:
    offload = backend.offload(prefetch_bytes=1 << 12)
    with without_gc():
        for around in (offload, Settled(offload)) * 10:
            corpus_program(name)(around)
        assert_moved(assert_settled(offload), least=0.7)


def test_h09_a_graph_in_a_cycle_waits_for_the_collector_and_no_longer(backend: Backend) -> None:
    """The finalizers run inside the collector, at any moment: also while the library holds its lock."""
    offload, storages, threshold = backend.offload(), Gone(), gc.get_threshold()
    gc.set_threshold(10, 2, 2)
    try:
        for _ in range(100):
            cycle: list[object] = [forward(offload, storages)]
            cycle.append(cycle)
            del cycle
    finally:
        gc.set_threshold(*threshold)
    collect()
    offload.stats(synchronize=True)
    assert storages.alive == 0
    assert_moved(assert_settled(offload))


# -- where something dies ---------------------------------------------------------------------------------------------


def entered_in(drop: Callable[[], None]) -> list[str]:
    """The functions of the library, and of weak containers with their callbacks, that are entered in ``drop``."""
    entered = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        # A simulated device is no part of a training process.
        if event == "call" and (
            (PACKAGE in path.parents and path.stem != "simulated") or path.stem in ("weakref", "_weakrefset")
        ):
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
    offload, model, graphs = backend.offload(prefetch_bytes=1 << 20), model_of(16), []
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
    held = [Offload(tier=tier, **ALL)]
    with held[0]:
        loss = leaf(8, 16).sin().cos().sum()
    loss.backward()
    del loss
    assert_moved(assert_settled(held[0]))
    alive = weakref.ref(held[0])
    assert entered_in(held.clear) == []
    assert alive() is None


# -- an Offload that is dropped ---------------------------------------------------------------------------------------


def loss_of(model: Callable[[Tensor], Tensor]) -> Tensor:
    return model(torch.ones(64, 64)).square().sum()


steps = corpus_program("H69-steps-in-turn")


def a_graph_that_outlives_it(offload: Offload) -> Tensor:
    with offload:
        return loss_of(model_of(64))


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
            value = loss_of(model_of(64))
            with save_on_cpu():
                return value + loss_of(model_of(64))

    with pytest.warns(RuntimeWarning, match="other saved-tensor hooks"):
        value = forward()
    value.backward()


def compiled_code(offload: Offload) -> None:
    for compile in (torch.compile, offload.compile):
        with offload:
            loss_of(compile(model_of(64), backend="aot_eager")).backward()
    torch._dynamo.reset()


def all_that_is_read_of_it(offload: Offload) -> None:
    steps(offload)
    assert str(offload.stats(synchronize=True))
    offload.step_table()


SPECIAL: list[Callable[[Offload], object]] = [
    a_graph_that_outlives_it,
    a_trace,
    a_disk_that_fails,
    hidden_hooks,
    compiled_code,
    all_that_is_read_of_it,
]
#: Of the corpus.
CORPUS = [
    "H09-a-branch-that-nobody-differentiates",
    "H10-Fault-in-forward",
    "H10-KeyboardInterrupt-in-backward",
    "H69-several-graphs-at-once",
]
SETTINGS: list[dict[str, Any]] = [
    {"tier": "host"},
    {"step_tables": True},
    {"step_tables": False},
    {"keep_last_bytes": "auto", "device_budget": "1GiB"},
    {"keep_last_bytes": "auto", "policy": "free"},
]
PROGRAMS = {**{one.__name__: one for one in SPECIAL}, **{name: corpus_program(name) for name in CORPUS}}


def parts_of(offload: Offload) -> list[weakref.ref[Any]]:
    """What holds memory, a file or a thread for it."""
    tiers = offload._offloaders.tiers()
    assert tiers, "nothing was opened"
    return [weakref.ref(one) for one in (offload, *offload._offloaders.all(), *tiers)]


def assert_gone(parts: list[weakref.ref[Any]]) -> None:
    assert [type(part).__name__ for ref in parts if (part := ref()) is not None] == []


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


@pytest.mark.filterwarnings("ignore:eager_offload. compiled code waits:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "fields"), [*((name, {}) for name in PROGRAMS), *((CORPUS[-1], fields) for fields in SETTINGS)], ids=str
)
def test_h66_a_dropped_offload_goes_without_the_collector(name: str, fields: dict[str, Any]) -> None:
    with without_gc():
        offload = Offload(**{"tier": "disk", **ALL, **fields})
        files = open_files()
        graph = PROGRAMS[name](offload)
        moves = name != "a_disk_that_fails" and fields.get("keep_last_bytes") != "auto"
        assert offload.stats(synchronize=True).bytes_out > 0 or not moves
        parts = parts_of(offload)
        del offload, graph
        assert_gone(parts)
        assert open_files() < files or not files or "tier" in fields, "its file is open"


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
