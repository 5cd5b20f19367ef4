"""verl's switch ``enable_activation_offload`` with the library under it; no engine of it starts on a CPU."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

_OURS = "eager_offload.integrations.verl"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Returns a module that has imported verl's function before our module is imported, as verl's engines have."""
    found = find_spec("verl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("verl is not installed")
    folder = Path(found.submodule_search_locations[0])
    # Its package imports Ray, and utils what an accelerator has: of those nothing is asked here.
    for name, inside in [("verl", "."), ("verl.utils", "utils")]:
        package = ModuleType(name)
        package.__path__ = [str(folder / inside)]
        monkeypatch.setitem(sys.modules, name, package)
    for name, needed in [("device", "get_torch_device"), ("fsdp_utils", "FSDPModule")]:
        stand_in = ModuleType(f"verl.utils.{name}")
        setattr(stand_in, needed, type(needed, (), {}))
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    made = ModuleType("verl.workers.engine")
    made.enable_activation_offloading = import_module("verl.utils.activation_offload").enable_activation_offloading
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.delitem(sys.modules, _OURS, raising=False)
    for name, value in {"MIN_BYTES": "1KiB", "KEEP_LAST_BYTES": "0", "DISK_PATH": str(tmp_path)}.items():
        monkeypatch.setenv(f"EAGER_OFFLOAD_{name}", value)
    return made


def test_its_switch_has_the_library_under_it(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    width = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **width)).train()
    model.gradient_checkpointing_enable()
    tokens = torch.randint(64, (4, 32))

    def gradients() -> list[torch.Tensor]:
        model(input_ids=tokens, labels=tokens).loss.backward()
        found = [one.grad for one in model.parameters() if one.grad is not None]
        model.zero_grad()
        return found

    expected = gradients()
    ours = import_module(_OURS)  # as external_lib does
    assert engine.enable_activation_offloading is ours.enable_activation_offloading
    offload = engine.enable_activation_offloading(model, "fsdp2", True)
    assert engine.enable_activation_offloading(model, "fsdp2", True) is offload
    found = gradients()
    assert len(expected) == len(found) > 0
    assert all(map(torch.equal, expected, found))
    assert offload.stats(synchronize=True).bytes_out > 0
    assert model.is_gradient_checkpointing  # verl's own switches it off
    offload.close()
