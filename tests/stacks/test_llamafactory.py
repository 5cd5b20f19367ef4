"""LLaMA-Factory's ``run_exp(callbacks=[...])``, in its sources: they import packages that need more than a CPU."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("llamafactory") is None:
    pytest.skip("not installed: llamafactory", allow_module_level=True)


def test_run_exp_takes_callbacks_of_transformers_own_class() -> None:
    spec = importlib.util.find_spec("llamafactory")
    assert spec is not None
    assert spec.origin is not None
    train = Path(spec.origin).parent / "train"
    source = (train / "tuner.py").read_text()
    found = {one.name: one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef)}
    assert [one.arg for one in found["run_exp"].args.args] == ["args", "callbacks"]
    assert "from transformers import TrainerCallback" in source
    assert "run_sft(model_args, data_args, training_args, finetuning_args, generating_args, callbacks)" in source
    inner = ast.parse((train / "sft" / "workflow.py").read_text())
    made = [one for one in ast.walk(inner) if isinstance(one, ast.Call) and "Trainer" in ast.unparse(one.func)]
    given = [ast.unparse(each.value) for one in made for each in one.keywords if each.arg == "callbacks"]
    assert given == ["callbacks"]
