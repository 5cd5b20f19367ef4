"""Traces of real architectures against their steps on the CPU: saves, reasons and asks, number by number."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from eager_offload.planning.trace import record
from tests.planning.test_trace import assert_like, really
from tests.real_models.models import ARCHITECTURES, Batch, padded_words

pytestmark = pytest.mark.usefixtures("one_thread")

NBYTES = 16 << 10
FEW = ("Llama", "T5")
ALL = [
    pytest.param(name, marks=() if name in FEW else pytest.mark.long)
    for name, one in ARCHITECTURES.items()
    if one.package == "transformers"
]


def assert_traced_as_it_runs(name: str, batch: Batch | None = None, **config: object) -> None:
    torch.manual_seed(0)
    model = ARCHITECTURES[name].build(**config).train()
    batch = batch or ARCHITECTURES[name].batch()
    program = record(model, batch, min_bytes=NBYTES).program
    assert_like(program, really(lambda: model(**batch).loss, NBYTES))
    assert program.movable_bytes > 0


@pytest.mark.parametrize("name", ALL)
def test_a_traced_step_is_the_real_one(name: str) -> None:
    assert_traced_as_it_runs(name)


@pytest.mark.long
def test_so_it_is_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert_traced_as_it_runs("GPT-2")


@pytest.mark.long
@pytest.mark.parametrize("config", [{"attn_implementation": "eager"}, {"attention_dropout": 0.1}], ids=str)
def test_so_it_is_in_other_ways(config: dict[str, object]) -> None:
    for batch in (None, padded_words()):
        assert_traced_as_it_runs("Llama", batch, **config)
