"""ms-swift's own import of external plugins and its table of callbacks.

Its trainers need older releases of Transformers and TRL: Transformers' trainer stands where ms-swift makes its own.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from tests.integrations.training import exact, fields, spill_files
from tests.integrations.transformers_training import run, trainer_of

swift = pytest.importorskip("swift.callbacks")
utils = pytest.importorskip("swift.utils")


def test_a_trainer_with_the_callback_of_the_table_trains_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fields(tmp_path).items():
        monkeypatch.setenv(f"EAGER_OFFLOAD_{name.upper()}", str(value))
    spec = importlib.util.find_spec("eager_offload.integrations.swift")
    assert spec is not None
    monkeypatch.setattr(sys, "path", [*sys.path])
    utils.import_external_file(str(spec.origin))
    for framework in "accelerate", "transformers", "trl":
        assert "eager_offload" not in str(PathFinder.find_spec(framework)), "the folder is in front of sys.path now"
    expected = run(trainer_of(tmp_path))
    trainer = trainer_of(tmp_path)
    callback = swift.callbacks_map["eager_offload"](trainer.args, trainer)  # as its trainers do
    trainer.add_callback(callback)
    exact(expected, run(trainer), callback.offload)
    assert trainer.state.log_history[0]["offload/moved_mib"] > 0
    assert spill_files(tmp_path) == []
