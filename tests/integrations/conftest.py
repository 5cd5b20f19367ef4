"""Tests of a framework run in one process; where it is not installed they are skipped, each file with the reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import eager_offload as eo
from tests.integrations.leftovers import nothing_outlives_a_file
from tests.integrations.moving import fields

__all__ = ["nothing_outlives_a_file"]


#: What files import, by how their names begin.
_NEEDS = {
    "test_accelerate_": ["accelerate", "yaml"],
    "test_lightning_": ["lightning", "pytorch_lightning", "yaml"],
    "test_transformers_": ["transformers", "accelerate"],
    "test_trl_": ["trl", "transformers", "accelerate", "peft", "datasets", "tokenizers"],
}


class _Skipped(pytest.Module):
    """A file that is not imported."""

    missing: list[str]

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        pytest.skip(f"not installed: {', '.join(self.missing)}", allow_module_level=True)


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[eo.Offload]:
    to_disk = eo.Offload(**fields(tmp_path))
    yield to_disk
    to_disk.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a framework imports when it is first used takes seconds: one worker of xdist uses it."""
    for item in items:
        for prefix in _NEEDS:
            if item.path.parent == Path(__file__).parent and item.path.name.startswith(prefix):
                item.add_marker(pytest.mark.xdist_group(prefix.removeprefix("test_").removesuffix("_")))


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    needed = [name for prefix, names in _NEEDS.items() if module_path.name.startswith(prefix) for name in names]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    module: _Skipped = _Skipped.from_parent(parent, path=module_path)
    module.missing = missing
    return module
