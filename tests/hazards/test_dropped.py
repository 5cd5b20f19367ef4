"""H66: an ``Offload`` that is dropped is gone at once, with its pool, its file and its threads: nothing of it waits for
the garbage collector, which a program may have turned off, or which ``gc.freeze()`` blinds."""

from __future__ import annotations

import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import eager_offload as eo
from eager_offload.runtime import transfer_threads
from eager_offload.runtime.host import host_runtime
from eager_offload.tiers.disk import DiskSlot
from tests.threads import collect

SIZE = 64


@pytest.fixture(autouse=True)
def _the_collector_is_off() -> Iterator[None]:
    collect()
    gc.disable()
    yield
    gc.enable()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE), nn.GELU())


def loss(model: Callable[[Tensor], Tensor], rows: int = SIZE) -> Tensor:
    return model(torch.ones(rows, SIZE)).square().sum()


def steps(offload: eo.Offload) -> None:
    """Some that are unknown, some that follow a plan, and one of another size."""
    net = model()
    for rows in (*[SIZE] * 5, SIZE // 2, SIZE):
        with offload:
            value = loss(net, rows)
        value.backward()


def a_graph_that_is_dropped(offload: eo.Offload) -> None:
    for _ in range(5):
        with offload:
            loss(model())


def a_graph_that_outlives_it(offload: eo.Offload) -> Tensor:
    with offload:
        return loss(model())


def fail(offload: eo.Offload) -> None:
    with offload:
        loss(model())
        raise ValueError("of the user")


def an_exception(offload: eo.Offload) -> None:
    steps(offload)
    with pytest.raises(ValueError, match="of the user"):
        fail(offload)
    steps(offload)


def an_interrupt(offload: eo.Offload) -> None:
    def interrupt(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    with offload:
        value = loss(model())
        value.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        value.backward()


def a_trace(offload: eo.Offload, tmp_path: Path) -> None:
    with offload.trace(tmp_path / "trace.json"):
        steps(offload)
    steps(offload)


def a_disk_that_fails(offload: eo.Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(slot: DiskSlot, source: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskSlot, "write", no_space)
    with warnings.catch_warnings(record=True, action="always") as caught:
        steps(offload)
        offload.stats(synchronize=True)
    assert "offloading failed" in str(caught[0].message)


def hidden_hooks(offload: eo.Offload) -> None:
    def forward() -> Tensor:
        with offload:
            value = loss(model())
            with save_on_cpu():
                return value + loss(model())

    with pytest.warns(RuntimeWarning, match="other saved-tensor hooks"):
        value = forward()
    value.backward()


def compiled_code(offload: eo.Offload) -> None:
    for compiled in (torch.compile(model(), backend="aot_eager"), offload.compile(model(), backend="aot_eager")):
        with offload:
            loss(compiled).backward()
    torch._dynamo.reset()


def what_is_read_of_it(offload: eo.Offload) -> None:
    steps(offload)
    assert str(offload.stats(synchronize=True))
    assert offload.step_plan() is not None
    offload.close()


PROGRAMS: list[Callable[..., object]] = [
    steps,
    a_graph_that_is_dropped,
    a_graph_that_outlives_it,
    an_exception,
    an_interrupt,
    a_trace,
    a_disk_that_fails,
    hidden_hooks,
    compiled_code,
    what_is_read_of_it,
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


def parts_of(offload: eo.Offload) -> list[weakref.ref[Any]]:
    """What holds memory, a file or a thread for it."""
    offloaders = offload._offloaders.all()
    tiers = offload._offloaders.tiers()
    assert tiers, "nothing was opened"
    return [weakref.ref(one) for one in (offload, *offloaders, *tiers)]


def assert_gone(parts: list[weakref.ref[Any]]) -> None:
    assert [type(part).__name__ for ref in parts if (part := ref()) is not None] == []


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_h66_a_dropped_offload_goes_without_the_collector(program: Callable[..., object], request: Any) -> None:
    asked = program.__code__.co_varnames[1 : program.__code__.co_argcount]
    given = [request.getfixturevalue(name) for name in asked]
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0)
    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    graph = program(offload, *given)
    if program is not a_disk_that_fails:
        assert offload.stats(synchronize=True).bytes_out > 0
    parts = [weakref.ref(offload)] if program is what_is_read_of_it else parts_of(offload)
    del offload, graph
    assert_gone(parts)
    assert not descriptors or len(os.listdir("/proc/self/fd")) < descriptors, "its file is closed"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_h66_whatever_its_settings_are(settings: dict[str, Any]) -> None:
    offload = eo.Offload(**{"tier": "host", "min_bytes": 0, "keep_last_bytes": 0, **settings})
    steps(offload)
    assert offload.stats(synchronize=True).saved_bytes > 0
    parts = parts_of(offload)
    del offload
    assert_gone(parts)


def test_h66_its_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    host_runtime().close()
    monkeypatch.setattr(transfer_threads, "_IDLE_SECONDS", 600.0)
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0)
    steps(offload)
    offload.stats(synchronize=True)
    threads = [one for one in threading.enumerate() if one.name.startswith("eager_offload-")]
    assert threads
    del offload
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_h66_one_that_follows_a_plan_that_was_given() -> None:
    first = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0, step_plans=True)
    steps(first)
    second = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0, plan=first.step_plan())
    steps(second)
    assert second.stats(synchronize=True).bytes_out > 0
    parts = [*parts_of(first), *parts_of(second)]
    del first, second
    assert_gone(parts)
