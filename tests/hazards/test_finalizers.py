"""H39: no interrupt is lost in a finalizer: no Python code of the library runs where something dies."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import eager_offload
from eager_offload import Offload
from tests.hazards.backends import Backend, assert_settled, saves_of
from tests.hazards.programs import assert_moved, leaf
from tests.hazards.wrappers import two

PACKAGE = Path(eager_offload.__file__).parent
#: What simulates devices and looks on is no part of a training process.
_SIMULATION = {"simulated", "checker", "deferred", "observer", "recording", "signatures", "timeline"}
#: The modules of weak containers and finalizers, whose callbacks are in Python.
_WEAK = {"weakref", "_weakrefset"}


def entered_in(drop: Callable[[], None]) -> list[str]:
    """The functions of the library, and of weak containers, that are entered while ``drop`` runs."""
    entered = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.stem not in _SIMULATION and (PACKAGE in path.parents or path.stem in _WEAK):
            entered.append(f"{path.name}: {frame.f_code.co_name}")

    gc.collect()  # what other tests have left behind
    sys.setprofile(note)
    try:
        drop()
        gc.collect()
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
    alive = [saved.record for saved in saves_of(offload).storages()]
    assert entered_in(graphs.clear) == []
    assert alive
    assert all(record() is None for record in alive)
    assert_moved(assert_settled(offload))


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_h39_no_python_runs_when_an_offload_goes(tier: str) -> None:
    offload = Offload(tier=tier, min_bytes=0, keep_last_bytes=0)
    with offload:
        loss = leaf(8, 16, seed=0).sin().cos().sum()
    loss.backward()
    assert_moved(assert_settled(offload))
    del loss
    held, alive = [offload], weakref.ref(offload)
    del offload
    assert entered_in(held.clear) == []
    assert alive() is None
