"""Every mode of Lightning's Trainer: the parameters of three steps are those without the callback, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import eager_offload as eo
from eager_offload._torch import top_pack_hook
from eager_offload.integrations.lightning import OffloadCallback
from tests.integrations.lightning_training import (
    PACKAGES,
    Manual,
    SecondOrder,
    Several,
    Silent,
    Steps,
    WithoutLoss,
    assert_same_parameters,
    fit,
    small,
)
from tests.integrations.moving import fields

MODES: dict[str, dict[str, Any]] = {
    "automatic": {"steps": Steps},
    "manual": {"steps": Manual},
    "several optimizers": {"steps": Several},
    "lbfgs": {"steps": SecondOrder},
    "accumulation": {"steps": Steps, "accumulate_grad_batches": 2, "batches": 6},
    "no loss": {"steps": WithoutLoss, "batches": 4},
    "validation": {"steps": Steps, "val_check_interval": 1, "num_sanity_val_steps": 1},
    "clipping": {"steps": Steps, "gradient_clip_val": 0.1},
    "bf16 mixed": {"steps": Steps, "precision": "bf16-mixed"},
    "bf16 true": {"steps": Steps, "precision": "bf16-true"},
    "checkpointing": {"steps": Steps, "options": {"recompute": "not reentrant"}},
    "reentrant checkpointing": {"steps": Steps, "options": {"recompute": "reentrant"}},
    "detecting anomalies": {"steps": Steps, "detect_anomaly": True},
}
#: Modes that go a way of their own through the callback. One class serves both packages, which take turns.
QUICK = {"automatic", "manual", "accumulation", "validation", "no loss"}
CASES = [
    pytest.param(PACKAGES[place % 2], mode, marks=() if mode in QUICK else pytest.mark.long)
    for place, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("package", "mode"), CASES)
def test_parameters_are_the_same_bit_for_bit(package: str, mode: str, tmp_path: Path) -> None:
    expected = fit(package, tmp_path=tmp_path, callback=None, **MODES[mode])
    offload = small(tmp_path)
    fitted = fit(package, tmp_path=tmp_path, callback=OffloadCallback(offload), **MODES[mode])
    assert_same_parameters(fitted, expected)
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0
    assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
    assert fitted.seen == expected.seen
    assert set(fitted.hooked) == {"training"}
    assert expected.hooked == []
    assert top_pack_hook() is None


@pytest.mark.long
def test_a_compiled_module_offloads_inside_of_its_graphs(tmp_path: Path) -> None:
    compiled = functools.partial(torch.compile, backend="aot_eager")
    expected = fit(PACKAGES[0], Silent, tmp_path, None, wrap=compiled)
    offload = small(tmp_path)
    fitted = fit(PACKAGES[0], Silent, tmp_path, OffloadCallback(offload), wrap=compiled)
    assert_same_parameters(fitted, expected)
    stats = offload.stats(synchronize=True)
    assert stats.compiled_regions > 0
    assert stats.bytes_out > 0


@pytest.mark.long
def test_inductor_and_the_compiler_backend_serve_a_trainer(tmp_path: Path) -> None:
    options = fields(tmp_path)
    named = functools.partial(torch.compile, backend="eager_offload", options=options)
    expected = fit(PACKAGES[0], Silent, tmp_path, None, wrap=torch.compile)
    for offload, wrap in (small(tmp_path), torch.compile), (eo.Offload.serving(**options), named):
        callback = OffloadCallback(offload) if wrap is torch.compile else None
        assert_same_parameters(fit(PACKAGES[0], Silent, tmp_path, callback, wrap=wrap), expected)
        assert offload.stats(synchronize=True).bytes_out > 0
        offload.close()
    beside = small(tmp_path)  # of the configuration that the graphs are compiled for: it serves them
    assert_same_parameters(fit(PACKAGES[0], Silent, tmp_path, OffloadCallback(beside), wrap=named), expected)
    assert beside.stats(synchronize=True).bytes_out > 0
