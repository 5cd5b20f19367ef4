"""Configurations as other libraries carry them: in models, on command lines, in files. Each field comes back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import io
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

import eager_offload as eo

tyro = pytest.importorskip("tyro")
pydantic = pytest.importorskip("pydantic")

CODECS = {"*": "lossless", "*.mlp": "fp8"}
#: A value of every field that is not its default.
VALUES: dict[str, Any] = {
    "tier": "disk",
    "min_bytes": "4MiB",
    "max_inflight_bytes": "64MB",
    "prefetch_bytes": 1024,
    "keep_last_bytes": 0,
    "pin_memory": False,
    "host_budget": "2GB",
    "disk_budget": "3GB",
    "disk_path": ["/a", "/b"],
    "verify": True,
    "step_plans": False,
    "device_budget": "auto",
    "policy": "free",
    "max_slowdown": 0.05,
    "codec": CODECS,
    "skip": ["lm_head", "*.norm"],
    "enabled": False,
}
EACH = [pytest.param(eo.OffloadConfig(**{name: value}), id=name) for name, value in VALUES.items()]


@dataclass(kw_only=True)
class Trainer:
    """A trainer's own configuration, of which one field is ours."""

    steps: int = 3
    offload: eo.OffloadConfig = field(default_factory=eo.OffloadConfig)


class Model(pydantic.BaseModel):  # type: ignore[misc, name-defined]  # it may not be installed
    """The same for pydantic."""

    model_config = pydantic.ConfigDict(extra="forbid")
    steps: int = 3
    offload: eo.OffloadConfig = eo.OffloadConfig()


WAYS: dict[str, Callable[[eo.OffloadConfig], eo.OffloadConfig]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda config: pickle.loads(pickle.dumps(config)),
    "replace": dataclasses.replace,
    "vars": lambda config: eo.OffloadConfig(**vars(config)),
    "asdict": lambda config: eo.OffloadConfig(**dataclasses.asdict(config)),
    "asdict of another": lambda config: eo.OffloadConfig(**dataclasses.asdict(Trainer(offload=config))["offload"]),
    "json": lambda config: eo.OffloadConfig.from_dict(json.loads(json.dumps(config.to_dict()))),
    "yaml": lambda config: eo.OffloadConfig(**yaml.safe_load(yaml.safe_dump(config.to_dict()))),
    "pydantic": lambda config: Model(**Model(offload=config).model_dump()).offload,
    "pydantic's json": lambda config: Model.model_validate_json(Model(offload=config).model_dump_json()).offload,
    "pydantic's copy": lambda config: Model(offload=config).model_copy(deep=True).offload,
}


def test_there_is_a_value_of_every_field() -> None:
    assert list(VALUES) == [one.name for one in dataclasses.fields(eo.OffloadConfig)]
    assert all(eo.OffloadConfig(**{name: value}).changed() for name, value in VALUES.items())


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("config", EACH)
@pytest.mark.filterwarnings("error")
def test_each_field_comes_back(config: eo.OffloadConfig, way: Callable[[eo.OffloadConfig], eo.OffloadConfig]) -> None:
    found = way(config)
    assert found == config
    assert hash(found) == hash(config)
    assert list(found.changed()) == list(config.changed())


# -- pydantic -------------------------------------------------------------------------------------------------------


def test_a_field_of_a_pydantic_model_is_a_config_or_a_mapping_and_its_errors_are_pydantics() -> None:
    given = {"min_bytes": "4MiB", "disk_path": ["/a"], "codec": CODECS}
    assert Model(offload=given).offload == eo.OffloadConfig(**given)
    config = eo.OffloadConfig()
    assert Model(offload=config).offload is config
    assert pydantic.TypeAdapter(eo.OffloadConfig).validate_python({}) == config
    for bad, words in (
        ({"min_byts": 1}, "unknown field 'min_byts': did you mean min_bytes"),
        ({"tier": "ssd"}, "tier='ssd' is not accepted"),
        (3, "from_dict takes a mapping"),
    ):
        with pytest.raises(pydantic.ValidationError, match=words) as raised:
            Model(offload=bad)
        assert raised.value.errors()[0]["loc"] == ("offload",)


def test_the_json_schema_of_a_model_names_the_fields_with_types_and_defaults() -> None:
    found = Model.model_json_schema()["properties"]["offload"]
    defaults = eo.OffloadConfig().to_dict()
    assert {name: one["default"] for name, one in found["properties"].items()} == defaults
    assert found["additionalProperties"] is False
    assert found["properties"]["verify"]["type"] == "boolean"
    assert {one["type"] for one in found["properties"]["device_budget"]["anyOf"]} == {"integer", "string", "null"}
    assert {one["type"] for one in found["properties"]["codec"]["anyOf"]} == {"string", "object"}
    assert Model.model_json_schema(mode="serialization")["properties"]["offload"]["default"] == defaults


# -- command lines --------------------------------------------------------------------------------------------------

TYPED = [
    ("--offload.tier disk", {"tier": "disk"}),
    ("--offload.min-bytes 4MiB --offload.prefetch-bytes 1024", {"min_bytes": "4MiB", "prefetch_bytes": 1024}),
    ("--offload.keep-last-bytes 0", {"keep_last_bytes": 0}),
    ("--offload.host-budget auto --offload.disk-budget 3GB", {"disk_budget": "3GB"}),
    ("--offload.pin-memory False --offload.step-plans True", {"pin_memory": False, "step_plans": True}),
    ("--offload.pin-memory auto", {}),
    ("--offload.disk-path /a", {"disk_path": "/a"}),
    ("--offload.disk-path /a /b", {"disk_path": ["/a", "/b"]}),
    ("--offload.disk-path None", {}),
    ("--offload.verify --offload.no-enabled", {"verify": True, "enabled": False}),
    ("--offload.device-budget 20GiB", {"device_budget": "20GiB"}),
    ("--offload.device-budget None --offload.policy free", {"policy": "free"}),
    ("--offload.max-slowdown 0.05", {"max_slowdown": 0.05}),
    ("--offload.codec lossless", {"codec": "lossless"}),
    ("--offload.skip lm_head *.norm", {"skip": ["lm_head", "*.norm"]}),
    ("--offload.skip lm_head", {"skip": "lm_head"}),
]


@pytest.mark.parametrize(("line", "fields"), TYPED, ids=[line for line, _ in TYPED])
def test_tyro_parses_each_field_of_a_trainers_own_configuration(line: str, fields: dict[str, Any]) -> None:
    assert tyro.cli(Trainer, args=line.split()).offload == eo.OffloadConfig(**fields)


@pytest.mark.parametrize("default", [{}, {"disk_path": ["/a", "/b"], "skip": ["lm_head"], "min_bytes": "4MiB"}])
def test_tyros_help_shows_every_field_with_its_default(default: dict[str, Any]) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as ended:
        tyro.cli(Trainer, args=["--help"], default=Trainer(offload=eo.OffloadConfig(**default)))
    assert ended.value.code == 0
    for name in VALUES:
        assert f"--offload.{name.replace('_', '-')}" in said.getvalue()


def test_a_mapping_of_codecs_is_a_text_of_json_too() -> None:
    text = json.dumps(CODECS)
    assert eo.OffloadConfig(codec=text) == eo.OffloadConfig(codec=CODECS)
    assert tyro.cli(Trainer, args=["--offload.codec", text]).offload == eo.OffloadConfig(codec=CODECS)


@pytest.mark.skipif(importlib.util.find_spec("jsonargparse") is None, reason="jsonargparse is not installed")
def test_jsonargparse_takes_the_fields_from_a_command_line_and_a_file(tmp_path: Path) -> None:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--offload", type=eo.OffloadConfig)
    parser.add_argument("--file", action="config")
    file = tmp_path / "offload.yaml"
    file.write_text(yaml.safe_dump({"offload": {"disk_path": ["/a", "/b"], "skip": "lm_head", "min_bytes": "4MiB"}}))
    given = parser.parse_args([f"--file={file}", "--offload.device_budget=20GiB", "--offload.codec=fp8"])
    assert parser.instantiate(given).offload == eo.OffloadConfig(
        disk_path=["/a", "/b"], skip="lm_head", min_bytes="4MiB", device_budget="20GiB", codec="fp8"
    )
