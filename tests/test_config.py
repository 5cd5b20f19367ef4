"""Every setting: its default, what it takes and refuses, and how it travels: in files, models and command lines."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import pickle
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import eager_offload as eo

MIB = 1 << 20
SIZES = ["min_bytes"]
SIZES_OR_AUTO = [
    *("max_inflight_bytes", "prefetch_bytes", "keep_last_bytes", "host_budget", "disk_budget", "device_budget"),
]
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)
}


class Field(typing.NamedTuple):
    """A field of the contract."""

    default: Any
    #: Another one, as given.
    value: Any
    #: The same as a variable of the environment.
    text: str
    #: The same as arguments of a command line.
    line: str


TABLE = {
    "tier": Field("auto", "disk", "disk", "disk"),
    "min_bytes": Field(MIB, "4MiB", "4MiB", "4MiB"),
    "max_inflight_bytes": Field("auto", "64MB", "64MB", "64MB"),
    "prefetch_bytes": Field("auto", 1024, "1 KiB", "1024"),
    "keep_last_bytes": Field("auto", 0, "0", "0"),
    "pin_memory": Field("auto", False, "no", "False"),
    "host_budget": Field("auto", "2GB", "2GB", "2GB"),
    "disk_budget": Field("auto", "3GB", "3GB", "3GB"),
    "disk_path": Field(None, "/a", "/a", "/a"),
    "verify": Field(False, True, "True", "True"),
    "step_tables": Field("auto", False, "off", "False"),
    "device_budget": Field(None, "auto", "auto", "auto"),
    "policy": Field("max", "free", "free", "free"),
    "skip": Field((), ["lm_head", "*.norm"], "lm_head, *.norm", "lm_head *.norm"),
    "only": Field((), ["*.mlp"], "*.mlp", "*.mlp"),
    "release_freed_memory": Field("auto", False, "0", "False"),
    "enabled": Field(True, False, "0", "False"),
}
EACH = [pytest.param(name, eo.OffloadConfig(**{name: one.value}), id=name) for name, one in TABLE.items()]


# -- fields -----------------------------------------------------------------------------------------------------------


def test_the_fields_are_those_of_the_contract_with_their_types_and_defaults() -> None:
    config = eo.OffloadConfig()
    found = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    assert found == {name: one.default for name, one in TABLE.items()}
    assert list(found) == list(TABLE)
    assert set(typing.get_type_hints(eo.OffloadConfig)) >= set(TABLE)


def test_a_config_does_not_change_and_equal_ones_are_equal() -> None:
    config = eo.OffloadConfig(min_bytes="4MiB", disk_path="/tmp")
    for name in TABLE:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 1)
    same = eo.OffloadConfig(min_bytes=4 * MIB, disk_path=Path("/tmp"))
    assert config == same
    assert hash(config) == hash(same)
    assert dataclasses.replace(config, verify=True) == eo.OffloadConfig(min_bytes="4MiB", disk_path="/tmp", verify=True)


def test_a_disk_path_is_the_directory_that_it_named_when_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spill").mkdir()
    (tmp_path / "elsewhere").mkdir()
    offload = eo.Offload(tier="disk", disk_path="spill", min_bytes=0, keep_last_bytes=0)
    config = offload.config
    for path in ("~/spill", "$SCRATCH/spill", Path("spill"), tmp_path / "spill"):
        assert eo.OffloadConfig(tier="disk", disk_path=path, min_bytes=0, keep_last_bytes=0) == config
    monkeypatch.chdir("elsewhere")
    assert eo.OffloadConfig.from_text(config.to_text()) == dataclasses.replace(config) == config
    offload.close()
    for one in (offload, copy.deepcopy(offload), pickle.loads(pickle.dumps(offload))):
        x = torch.ones(1 << 14, requires_grad=True)
        with one:
            loss = (x * 2).exp().sum()
        loss.backward()
        assert one.stats(synchronize=True).bytes_out > 0
        assert torch.equal(x.grad, 2 * (x.detach() * 2).exp())
        one.close()
    (tmp_path / "elsewhere").rmdir()
    with pytest.raises(eo.ConfigError, match=r"disk_path='here' .* the working directory, which is gone"):
        eo.OffloadConfig(disk_path="here")


@given(
    thousandths=st.integers(0, 10**12) | st.integers(0, 10**30).map(lambda number: number * 1000),
    unit=st.sampled_from(list(UNITS)),
    space=st.sampled_from(["", " ", "\t"]),
)
def test_a_size_is_read_exactly_and_taken_only_if_it_makes_whole_bytes(thousandths: int, unit: str, space: str) -> None:
    number = f"{thousandths // 1000}.{thousandths % 1000:03}".removesuffix(".000")
    exact = Fraction(thousandths, 1000) * UNITS[unit]
    for text in (f"{number}{space}{unit}", f" {number}{space}{unit.lower()} ", f"{number}{space}{unit.upper()}"):
        if exact.denominator == 1:
            assert eo.OffloadConfig(min_bytes=text).min_bytes == exact
        else:
            with pytest.raises(eo.ConfigError, match="whole number of bytes"):
                eo.OffloadConfig(min_bytes=text)


@given(st.one_of(st.text(max_size=12), st.from_regex(r"\A\s*-?\d+\.?\d* ?[kKmMgGtT]?[i\u0130\u0131I]?[bB]?\s*\Z")))
def test_any_other_text_is_refused_with_our_error(text: str) -> None:
    try:
        nbytes = eo.OffloadConfig(min_bytes=text).size("min_bytes")
    except eo.ConfigError as error:
        said = str(error)
    else:
        said = f"min_bytes={text!r} " if nbytes >= 0 else "a negative size"
    assert said.startswith(f"min_bytes={text!r} ")


# -- refusals ---------------------------------------------------------------------------------------------------------

_SIZE = "a whole number of bytes"
#: What each field says that it takes, to which values.
REFUSED: list[tuple[str, str, list[Any]]] = [
    ("tier", '"auto" or "host" or "disk"', ["gpu", None, ["disk"]]),
    ("min_bytes", _SIZE, [-1, "-1", "lots", 1.5, None, True, "auto", b"1", [1], float("nan")]),
    *((name, f'"auto" or {_SIZE}', [-1, "2 cats", False]) for name in SIZES_OR_AUTO),
    ("max_inflight_bytes", "more than 0 bytes", [0, "0MiB"]),
    *((name, 'more than 0 bytes, or "auto"', [0, "0B", "0GiB"]) for name in ("host_budget", "disk_budget")),
    ("device_budget", f"{_SIZE}, more than 0", [0, "0B"]),
    ("policy", '"max" or "free"', ["least", None, True, ["free"]]),
    *(
        (name, 'True, False or "auto"', ["always", 1, None])
        for name in ("pin_memory", "step_tables", "release_freed_memory")
    ),
    ("verify", "True or False", ["auto", 1]),
    *((name, "the names of modules", [3, [""]]) for name in ("skip", "only")),
    ("disk_path", "a directory, or None", ["", [], ["/tmp"], 3, b"/tmp", {"/tmp"}]),
]


@pytest.mark.parametrize(("name", "accepted", "bad"), REFUSED)
def test_a_bad_value_names_the_field_what_was_given_and_what_is_accepted(
    name: str, accepted: str, bad: list[Any]
) -> None:
    for make, value in itertools.product((eo.OffloadConfig, eo.Offload), bad):
        with pytest.raises(eo.ConfigError) as raised:
            make(**{name: value})
        text = str(raised.value)
        assert text.startswith(f"{name}={value!r} is not accepted: {name} takes ")
        assert accepted in text
        assert isinstance(raised.value, ValueError)


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"tier": "host", "disk_path": "/tmp"}, r"disk_path=.*/tmp.* does not go with tier=\"host\".*leave disk_path out"),
    ({"device_budget": "20GB", "keep_last_bytes": "1000KB"}, "keep_last_bytes='1000KB' does not go with device_budget"),
    ({"policy": "free", "keep_last_bytes": "1000KB"}, "keep_last_bytes='1000KB' does not go with policy=\"free\""),
]


@pytest.mark.parametrize(("fields", "said"), IMPOSSIBLE)
def test_an_impossible_pair_is_an_error_that_names_both(fields: dict[str, Any], said: str) -> None:
    first, *others = fields
    with pytest.raises(eo.ConfigError, match=said):
        eo.OffloadConfig(**fields)
    with pytest.raises(eo.ConfigError, match=said):
        eo.Offload(eo.OffloadConfig(**{first: fields[first]}), **{name: fields[name] for name in others})


@pytest.mark.parametrize("make", [eo.Offload, eo.OffloadConfig.from_dict, lambda given: eo.OffloadConfig(**given)])
@pytest.mark.parametrize(
    ("name", "near"),
    [("min_byts", "min_bytes"), ("Tier", "tier"), ("diskpath", "disk_path"), ("", None), ("__class__", None)],
)
def test_an_unknown_field_is_an_error_with_the_nearest_that_there_is_and_then_all(
    name: str, near: str | None, make: Callable[[dict[str, Any]], object]
) -> None:
    with pytest.raises(eo.ConfigError) as raised:
        make({name: 1})
    question = f": did you mean {near}? Accepted are " if near else ": accepted are "
    assert str(raised.value) == f"unknown field {name!r}{question}{', '.join(TABLE)}"


def test_a_size_is_repeated_as_it_was_given_and_counts_as_its_bytes() -> None:
    """Here the text is the only thing that tells two configs apart."""
    for number, name in enumerate(SIZES + SIZES_OR_AUTO, 1):
        text = f"{number}000000 B"
        config = eo.OffloadConfig(**{name: text})
        assert config == eo.OffloadConfig(**{name: number * 1_000_000})
        assert type(getattr(config, name)) is int
        assert config.to_dict()[name] == number * 1_000_000
        for same in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config)), eo.Offload(config).config):
            assert f"{name}={text!r}" in repr(eo.Offload(same)), same
    overridden = eo.Offload(eo.OffloadConfig(min_bytes="1000000 B"), tier="host")
    assert "min_bytes='1000000 B'" in repr(overridden)


@pytest.mark.parametrize("given", ["disk", 4, eo.OffloadConfig, [("min_bytes", 3)]])
def test_what_is_no_config_and_no_mapping_is_refused(given: Any) -> None:
    with pytest.raises(eo.ConfigError, match="config takes an OffloadConfig, a mapping of its fields, or None"):
        eo.Offload(given)
    with pytest.raises(eo.ConfigError, match="from_dict takes a mapping"):
        eo.OffloadConfig.from_dict(given)


# -- where the values come from -------------------------------------------------------------------------------------


def test_keywords_override_the_fields_of_a_config_and_leave_the_others() -> None:
    base = eo.OffloadConfig(tier="host", min_bytes="2MiB", verify=True)
    assert eo.Offload(base, min_bytes=5).config == dataclasses.replace(base, min_bytes=5)
    assert base.min_bytes == 2 * MIB
    assert eo.Offload(base).config == base
    assert eo.Offload(tier="host").config == eo.OffloadConfig(tier="host")


@pytest.mark.parametrize(("name", "config"), EACH)
def test_every_field_can_come_from_the_environment(name: str, config: eo.OffloadConfig) -> None:
    environ = {f"EAGER_OFFLOAD_{name.upper()}": TABLE[name].text, "PATH": "/bin"}
    assert eo.OffloadConfig.from_env(environ) == config
    nothing = "none" if name == "device_budget" else ""
    assert eo.OffloadConfig.from_env({f"EAGER_OFFLOAD_{name.upper()}": nothing}) == eo.OffloadConfig()


def test_an_offload_takes_what_is_not_given_from_the_environment_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD_MIN_BYTES", "3MiB")
    assert eo.OffloadConfig.from_env() == eo.OffloadConfig(min_bytes="3MiB")
    assert eo.Offload().config.min_bytes == 3 * MIB
    assert eo.Offload(min_bytes=1).config.min_bytes == 1
    mapping = {"prefetch_bytes": "5MiB", "min_bytes": 7}
    config = eo.Offload(mapping, min_bytes=8).config
    assert (config.min_bytes, config.prefetch_bytes) == (8, 5 * MIB)
    assert eo.Offload(mapping).config.min_bytes == 7
    assert eo.Offload(eo.OffloadConfig()).config.min_bytes == MIB, "a whole configuration is taken as it is"
    assert eo.Offload.serving(prefetch_bytes=9).config == eo.OffloadConfig(min_bytes="3MiB", prefetch_bytes=9)
    with pytest.raises(eo.ConfigError, match="unknown field 'min_byte'"):
        eo.Offload({"min_byte": 1})


@pytest.mark.parametrize(
    ("switch", "field", "enabled"), [("", True, True), ("", False, False), ("0", True, False), ("1", False, True)]
)
def test_the_switch_of_the_environment_comes_before_the_field(
    switch: str, field: bool, enabled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD", switch)
    offload = eo.Offload(enabled=field, min_bytes=0, keep_last_bytes=0, tier="disk", disk_path=tmp_path)
    x = torch.ones(1 << 16, requires_grad=True)
    with offload:
        loss = (x * 2).exp().sum()
    loss.backward()
    stats = offload.stats(synchronize=True)
    assert offload.config.enabled is enabled
    assert (stats.bytes_out > 0) is enabled
    assert (stats.saved_tensors > 0) is enabled
    assert torch.equal(x.grad, 2 * (x * 2).exp())
    offload.close()


def test_switched_off_nothing_is_opened_and_compiled_code_is_as_it_is_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD", "0")
    offload, weight = eo.Offload(min_bytes=0, disk_path=tmp_path / "no"), torch.ones(64, 64, requires_grad=True)
    compiled = offload.compile(lambda x: (x @ weight).exp().sum(), backend="aot_eager", fullgraph=True)
    with offload, offload:
        compiled(torch.ones(64, 64)).backward()
    assert offload.stats() == eo.OffloadStats()
    torch.compiler.reset()


def test_an_offload_shows_what_was_set_and_what_it_has_done(tmp_path: Path) -> None:
    assert repr(eo.Offload()) == "<Offload(): nothing saved yet>"
    offload = eo.Offload(min_bytes=4096, keep_last_bytes=0, tier="disk", disk_path=tmp_path)
    shown = f"<Offload(tier='disk', min_bytes='4KiB', keep_last_bytes='0B', disk_path={str(tmp_path)!r}): "
    assert repr(offload) == shown + "nothing saved yet>"
    x = torch.ones(1 << 18, requires_grad=True)
    with offload:
        loss = (x * 2).exp().sum()
    loss.backward()
    assert repr(offload) == shown + "1.0 MiB offloaded of 1.0 MiB saved>"
    offload.close()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("_", "4MiB", "unknown variable EAGER_OFFLOAD_='4MiB': .*accepted are EAGER_OFFLOAD_TIER"),
        ("_CONFIG", "4MiB", "unknown variable EAGER_OFFLOAD_CONFIG='4MiB': .*EAGER_OFFLOAD_MIN_BYTES"),
        ("_MIN_BYTS", "4MiB", r".*: did you mean EAGER_OFFLOAD_MIN_BYTES\? Accepted are EAGER"),
        ("_MIN_BYTES", "lots", "min_bytes='lots' is not accepted"),
        ("_VERIFY", "perhaps", "verify='perhaps' is not accepted"),
        ("_PIN_MEMORY", "2", "pin_memory='2' is not accepted"),
    ],
)
def test_an_unknown_variable_or_a_bad_value_of_one_is_named_as_it_was_written(name: str, text: str, said: str) -> None:
    with pytest.raises(eo.ConfigError, match=f"(?i)^{said}"):
        eo.OffloadConfig.from_env({f"EAGER_OFFLOAD{name}": text})


# -- how it travels ---------------------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=20))
def test_the_text_of_a_config_needs_no_escape_in_a_source(name: str) -> None:
    config = eo.OffloadConfig(tier="disk", disk_path=name, skip=[name], min_bytes=0)
    text = config.to_text()
    assert text.isascii()
    assert text.isprintable()
    assert not set(text) & set('"\\')
    assert eo.OffloadConfig.from_text(text) == config


@dataclass(kw_only=True)
class Trainer:
    """A trainer's own configuration, of which one field is ours."""

    steps: int = 3
    offload: eo.OffloadConfig = field(default_factory=eo.OffloadConfig)


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
    "pydantic": lambda config: pydantic_model()(**pydantic_model()(offload=config).model_dump()).offload,
    "pydantic's json": lambda config: (
        pydantic_model().model_validate_json(pydantic_model()(offload=config).model_dump_json()).offload
    ),
    "pydantic's copy": lambda config: pydantic_model()(offload=config).model_copy(deep=True).offload,
}


def pydantic_model() -> Any:
    """The same for pydantic."""
    pydantic = pytest.importorskip("pydantic")
    config = pydantic.ConfigDict(extra="forbid")
    return pydantic.create_model(
        "Model", __config__=config, steps=(int, 3), offload=(eo.OffloadConfig, eo.OffloadConfig())
    )


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize(("name", "config"), EACH)
@pytest.mark.filterwarnings("error")
def test_each_field_comes_back(
    name: str, config: eo.OffloadConfig, way: Callable[[eo.OffloadConfig], eo.OffloadConfig]
) -> None:
    found = way(config)
    assert found == config
    assert hash(found) == hash(config)
    assert [*found.changed()] == [name]


def test_a_field_of_a_pydantic_model_is_a_config_or_a_mapping_and_its_errors_are_pydantics() -> None:
    pydantic, model = pytest.importorskip("pydantic"), pydantic_model()
    given = {"min_bytes": "4MiB", "disk_path": "/a"}
    assert model(offload=given).offload == eo.OffloadConfig(**given)
    config = eo.OffloadConfig()
    assert model(offload=config).offload is config
    for bad, words in (
        ({"min_byts": 1}, "unknown field 'min_byts': did you mean min_bytes"),
        ({"tier": "ssd"}, "tier='ssd' is not accepted"),
        (3, "from_dict takes a mapping"),
    ):
        with pytest.raises(pydantic.ValidationError, match=words) as raised:
            model(offload=bad)
        assert raised.value.errors()[0]["loc"] == ("offload",)


def test_the_json_schema_of_a_model_names_the_fields_with_types_and_defaults() -> None:
    model, defaults = pydantic_model(), eo.OffloadConfig().to_dict()
    found = model.model_json_schema()["properties"]["offload"]
    assert {name: one["default"] for name, one in found["properties"].items()} == defaults
    assert found["additionalProperties"] is False
    assert found["properties"]["verify"]["type"] == "boolean"
    assert {one["type"] for one in found["properties"]["device_budget"]["anyOf"]} == {"integer", "string", "null"}
    assert model.model_json_schema(mode="serialization")["properties"]["offload"]["default"] == defaults


#: Further lines of arguments than those of the table.
LINES: list[tuple[list[str], dict[str, Any]]] = [
    *(
        ([f"--offload.{name.replace('_', '-')}", *one.line.split(" ")], {name: one.value})
        for name, one in TABLE.items()
        if name not in ("verify", "enabled")
    ),
    (["--offload.pin-memory", "auto", "--offload.step-tables", "True"], {"step_tables": True}),
    (["--offload.disk-path", "None", "--offload.device-budget", "None"], {}),
    (["--offload.verify", "--offload.no-enabled"], {"verify": True, "enabled": False}),
    (["--offload.skip", "lm_head"], {"skip": "lm_head"}),
]


@pytest.mark.parametrize(("line", "fields"), LINES, ids=[" ".join(line) for line, _ in LINES])
def test_tyro_parses_each_field_of_a_trainers_own_configuration(line: list[str], fields: dict[str, Any]) -> None:
    tyro = pytest.importorskip("tyro")
    assert tyro.cli(Trainer, args=line).offload == eo.OffloadConfig(**fields)


def test_tyros_help_shows_every_field_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    tyro = pytest.importorskip("tyro")
    default = Trainer(offload=eo.OffloadConfig(disk_path="/a", skip=["lm_head"], min_bytes="4MiB"))
    with pytest.raises(SystemExit, match="0"):
        tyro.cli(Trainer, args=["--help"], default=default)
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert [name for name in TABLE if f"--offload.{name.replace('_', '-')}" not in said] == []
    assert [value for value in ("/a", "lm_head", 4 * MIB) if f"(default: {value})" not in said] == []


def test_jsonargparse_takes_the_fields_from_a_command_line_and_a_file(tmp_path: Path) -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--offload", type=eo.OffloadConfig)
    parser.add_argument("--file", action="config")
    given = {"disk_path": "/a", "skip": "lm_head", "min_bytes": "4MiB"}
    (tmp_path / "offload.yaml").write_text(yaml.safe_dump({"offload": given}))
    line = [f"--file={tmp_path / 'offload.yaml'}", "--offload.device_budget=20GiB"]
    found = parser.instantiate(parser.parse_args(line)).offload
    assert found == eo.OffloadConfig(**given, device_budget="20GiB")
