"""``skip``: what modules save that are named by a pattern stays, in eager and in compiled code; a typo is an error."""

from __future__ import annotations

import copy
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import eager_offload as eo
from tests.copies import pickled, saved
from tests.threads import collect

NBYTES = 256 * 64 * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x).sin()).exp()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.lm_head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.layers(x)).square().sum()


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    return {"min_bytes": 1024, "tier": "disk", "disk_path": tmp_path, "keep_last_bytes": 0}


def gradients(model: nn.Module, offload: eo.Offload | None, called: Any = None) -> list[torch.Tensor]:
    x = torch.ones(256, 64)
    if offload is None:
        loss = model(x)
    else:
        with offload:
            loss = (model if called is None else called)(x)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_skips(offload: eo.Offload, model: nn.Module, least: int = NBYTES) -> None:
    """What is skipped stays where it is and all else moves, with the same gradients; and that can be taken back."""
    expected = gradients(model, None)
    offload.reset_stats()
    assert all(map(torch.equal, gradients(model, offload), expected))
    stats = offload.stats(synchronize=True)
    assert stats.kept_bytes["region"] >= least
    assert stats.bytes_out > 0
    offload.close()
    assert all(map(torch.equal, gradients(model, None), expected))


@pytest.mark.parametrize("skip", ["lm_head", ["*.norm"], ["lm_head", "layers.?.norm"], ["layers"]])
def test_what_skipped_modules_save_stays_and_the_rest_moves(skip: Any, fields: dict[str, Any]) -> None:
    model, offload = Model(), eo.Offload(skip=skip, **fields)
    offload.skip_in(model)
    offload.skip_in(model)
    assert_skips(offload, model)


def test_a_compiled_model_skips_them_in_one_graph(fields: dict[str, Any]) -> None:
    model = Model()
    expected = gradients(model, None)
    saved = {}
    for skip in (), ["*.norm", "lm_head"]:
        offload = eo.Offload(skip=skip, **fields)
        compiled = offload.compile(model, backend="aot_eager", fullgraph=True)
        actual = gradients(model, offload, compiled)
        assert all(torch.allclose(one, other) for one, other in zip(actual, expected, strict=True))
        stats = offload.stats(synchronize=True)
        assert stats.compiled_regions == 1
        saved[bool(skip)] = stats.kept_bytes.get("region", 0)
        offload.close()
        torch.compiler.reset()
    assert saved[True] > saved[False] == 0


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("*.nrom", "layers.0.norm"), ("head", "lm_head"), ("model.lm_head", "lm_head"), ("zzz", "layers")],
)
def test_a_pattern_that_matches_nothing_lists_near_names(pattern: str, near: str) -> None:
    with pytest.raises(eo.ConfigError, match=f"matches no module of this model.*{near}") as raised:
        eo.Offload(skip=["lm_head", pattern]).skip_in(Model())
    assert repr(pattern) in str(raised.value)


def test_without_a_model_it_is_no_silent_one(fields: dict[str, Any]) -> None:
    with pytest.raises(eo.ConfigError, match=r"call offload\.skip_in\(model\)"), eo.Offload(skip="lm_head"):
        pass
    compiled = torch.compile(Model(), backend="eager_offload", options={"skip": "lm_head"})
    reason = r'backend="eager_offload", which sees graphs and no names: .*take offload\.compile\(model\)'
    with pytest.raises(Exception, match=f"skip is not accepted by {reason}"):
        compiled(torch.ones(256, 64))
    torch.compiler.reset()


def test_names_are_those_without_wrappers_and_the_offload_does_not_keep_the_model(fields: dict[str, Any]) -> None:
    model, offload = Model(), eo.Offload(skip=["lm_head"], **fields)
    offload.skip_in(torch.compile(model, backend="eager"))
    assert_skips(copy.deepcopy(offload), model)
    alive = weakref.ref(model)
    del model
    collect()
    assert alive() is None
    offload.close()


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("order", [("model", "offload"), ("offload", "model")])
def test_h48_what_is_copied_with_its_model_skips_in_the_copied_one(make: Any, order: Any, fields: Any) -> None:
    model, offload = Model(), eo.Offload(skip="lm_head", **fields)
    offload.skip_in(model)
    pair = {"model": model, "offload": offload}
    pair = make(make({name: pair[name] for name in order}))
    assert_skips(pair["offload"], pair["model"])
    pair["offload"].skip_in(pair["model"])
    assert_skips(pair["offload"], pair["model"])
    assert_skips(offload, model)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_h48_a_copied_offload_alone_skips_in_the_same_model(make: Any, fields: dict[str, Any]) -> None:
    model, offload = Model(), eo.Offload(skip="lm_head", **fields)
    offload.skip_in(model)
    copied = make(make(offload))
    offload.close()
    assert_skips(copied, model)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, saved])
def test_h48_a_copied_offload_alone_may_be_given_another_model(make: Any, fields: dict[str, Any]) -> None:
    model, other, offload = Model(), Model(), eo.Offload(skip="lm_head", **fields)
    offload.skip_in(model)
    copied = make(offload)
    if make is saved:
        with pytest.raises(eo.ConfigError, match=r"call offload\.skip_in\(model\)"), copied:
            pass
    copied.skip_in(other)
    assert_skips(copied, other)
    assert_skips(offload, model)


# -- what is not called -----------------------------------------------------------------------------------------------


class Direct(Model):
    """Uses its head without calling it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head.forward(self.layers(x)).square().sum()


def test_a_pattern_whose_module_is_never_called_is_warned_of_once(fields: dict[str, Any]) -> None:
    model, offload = Direct(), eo.Offload(skip=["*_head", "*.norm", "layers"], **fields)
    offload.skip_in(model)
    expected = gradients(model, None)
    with warnings.catch_warnings(record=True, action="always") as warned:
        for _ in range(5):
            assert all(map(torch.equal, gradients(model, offload), expected))
    assert ["no module that it names has been called" in str(one.message) for one in warned] == [True]
    assert r"skip=['*_head'] has had no effect" in str(warned[0].message)
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.close()
