"""Traces of real architectures against their steps on the CPU: saves, reasons and asks, number by number."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from eager_offload.config import parse_size
from eager_offload.planning.trace import trace
from tests.planning.test_trace import assert_like, really
from tests.real_models.models import ARCHITECTURES, Architecture, padded_words
from tests.real_models.training import MIN_BYTES

pytestmark = pytest.mark.usefixtures("one_thread")

NBYTES = parse_size(MIN_BYTES)
FEW = ("Llama", "T5")


def assert_traced_as_it_runs(architecture: Architecture, **config: object) -> None:
    torch.manual_seed(0)
    model, batch = architecture.build(**config).train(), architecture.batch()
    program = trace(model, batch, min_bytes=NBYTES)
    assert_like(program, really(lambda: model(**batch).loss, NBYTES))
    assert program.movable_bytes > 0


@pytest.mark.parametrize("name", FEW)
def test_a_traced_step_is_the_real_one(name: str) -> None:
    assert_traced_as_it_runs(ARCHITECTURES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in FEW])
def test_a_traced_step_is_the_real_one_in_every_architecture(name: str) -> None:
    assert_traced_as_it_runs(ARCHITECTURES[name])


@pytest.mark.long
@pytest.mark.parametrize("config", [{"attn_implementation": "eager"}, {"attention_dropout": 0.1}], ids=str)
def test_a_traced_step_is_the_real_one_in_other_ways(config: dict[str, object]) -> None:
    assert_traced_as_it_runs(ARCHITECTURES["Llama"], **config)
    assert_traced_as_it_runs(ARCHITECTURES["Llama"]._replace(batch=padded_words), **config)


def test_a_traced_step_under_autocast_is_the_real_one() -> None:
    architecture = ARCHITECTURES["GPT-2"]
    model, batch = architecture.build().train(), architecture.batch()
    with torch.autocast("cpu", torch.bfloat16):
        program = trace(model, batch, min_bytes=NBYTES)
        real = really(lambda: model(**batch).loss, NBYTES)
    assert_like(program, real)
