"""Tests of a framework run in one process; where it is not installed they are skipped, each file with the reason."""

from __future__ import annotations

import importlib
import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.leftovers import nothing_outlives_a_file

__all__ = ["nothing_outlives_a_file"]

#: What files import, by how their names begin.
_NEEDS = {
    "test_accelerate": ["accelerate", "yaml"],
    "test_lightning": ["lightning", "pytorch_lightning", "yaml"],
    "test_transformers": ["transformers", "accelerate"],
    "test_trl": ["trl", "transformers", "accelerate", "peft", "datasets", "tokenizers"],
}
#: Every way to train with offload: the module that has it, and its class there.
WAYS = {
    "accelerate": ("accelerate_training", "WithPlugin"),
    "lightning": ("lightning_training", "WithCallback"),
    "transformers callback": ("transformers_training", "WithCallback"),
    "transformers mixin": ("transformers_training", "WithMixin"),
}


class _Skipped(pytest.Module):
    """A file that is not imported."""

    missing: list[str]

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        pytest.skip(f"not installed: {', '.join(self.missing)}", allow_module_level=True)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One way to train with offload."""
    for needed in _NEEDS[f"test_{request.param.split()[0]}"]:
        pytest.importorskip(needed)
    module, name = WAYS[request.param]
    before = signal.getsignal(signal.SIGINT)
    yield getattr(importlib.import_module(f"tests.integrations.{module}"), name)()
    signal.signal(signal.SIGINT, before)  # Lightning ignores further interrupts once there was one


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a framework imports when it is first used takes seconds: one worker of xdist uses it."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        used = getattr(item, "callspec", None)
        name = f"test_{used.params['way']}" if used is not None and "way" in used.params else item.path.name
        for prefix in _NEEDS:
            if name.startswith(prefix):
                item.add_marker(pytest.mark.xdist_group(prefix.removeprefix("test_")))


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    needed = [name for prefix, names in _NEEDS.items() if module_path.name.startswith(prefix) for name in names]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    module: _Skipped = _Skipped.from_parent(parent, path=module_path)
    module.missing = missing
    return module
