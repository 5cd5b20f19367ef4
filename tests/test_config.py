"""Every knob: its default, what it takes, and what it says about a value that it does not take."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import typing
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eager_offload as eo
from eager_offload.config import FIELDS, OffloadFields, parse_size
from eager_offload.malloc import release_freed_memory
from eager_offload.stats import KeepReason
from eager_offload.step_plan import Fate, Save

MIB = 1 << 20
SIZES = ["min_bytes"]
SIZES_OR_AUTO = [
    "max_inflight_bytes",
    "prefetch_bytes",
    "keep_last_bytes",
    "host_budget",
    "disk_budget",
    "device_budget",
]
DEFAULTS = {
    "tier": "auto",
    "min_bytes": MIB,
    "max_inflight_bytes": "auto",
    "prefetch_bytes": "auto",
    "keep_last_bytes": "auto",
    "pin_memory": "auto",
    "host_budget": "auto",
    "disk_budget": "auto",
    "disk_path": None,
    "verify": False,
    "step_plans": "auto",
    "device_budget": None,
    "policy": "max",
    "max_slowdown": None,
    "codec": "identity",
    "skip": (),
    "enabled": True,
}
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)
}


# -- defaults -------------------------------------------------------------------------------------------------------


def test_the_fields_are_those_of_the_contract_with_their_defaults() -> None:
    config = eo.OffloadConfig()
    assert {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} == DEFAULTS


def test_a_config_does_not_change_and_equal_ones_are_equal() -> None:
    config = eo.OffloadConfig(min_bytes="4MiB", disk_path="/tmp")
    for field in DEFAULTS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field, 1)
    same = eo.OffloadConfig(min_bytes=4 * MIB, disk_path=[Path("/tmp")])
    assert config == same
    assert hash(config) == hash(same)
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, verify=True) == eo.OffloadConfig(min_bytes="4MiB", disk_path="/tmp", verify=True)


def test_keeping_the_last_bytes_starts_at_the_prefetch_bytes() -> None:
    assert eo.OffloadConfig().newest_bytes(3 * MIB) == 3 * MIB
    assert eo.OffloadConfig(keep_last_bytes="1MiB").newest_bytes(3 * MIB) == MIB
    assert eo.OffloadConfig(keep_last_bytes=0).newest_bytes(3 * MIB) == 0


# -- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", SIZES + SIZES_OR_AUTO)
@pytest.mark.parametrize(("given_size", "nbytes"), [(7, 7), ("7", 7), ("7B", 7), ("2KiB", 2048), ("1.5 MiB", 1572864)])
def test_a_size_is_bytes_or_a_text_and_is_stored_as_bytes(field: str, given_size: int | str, nbytes: int) -> None:
    config = eo.OffloadConfig(**{field: given_size})
    assert config.size(field) == nbytes
    assert type(getattr(config, field)) is int


@settings(deadline=None)
@given(number=st.integers(0, 10**30), unit=st.sampled_from([*UNITS, ""]), space=st.sampled_from(["", " ", "\t"]))
def test_a_whole_number_with_any_unit_is_read_exactly(number: int, unit: str, space: str) -> None:
    expected = number * UNITS.get(unit, 1)
    for text in (f"{number}{space}{unit}", f" {number}{space}{unit.lower()} ", f"{number}{space}{unit.upper()}"):
        assert parse_size(text) == expected
    assert parse_size(number) == number


@settings(deadline=None)
@given(thousandths=st.integers(0, 10**12), unit=st.sampled_from(list(UNITS)))
def test_a_fraction_is_read_exactly_and_taken_only_if_it_makes_whole_bytes(thousandths: int, unit: str) -> None:
    text = f"{thousandths // 1000}.{thousandths % 1000:03}{unit}"
    exact = Fraction(thousandths, 1000) * UNITS[unit]
    if exact.denominator == 1:
        assert parse_size(text) == exact
    else:
        with pytest.raises(eo.ConfigError, match="whole number of bytes"):
            parse_size(text)


@settings(deadline=None)
@given(st.one_of(st.text(max_size=12), st.from_regex(r"\A\s*-?\d+\.?\d* ?[kKmMgGtT]?[i\u0130\u0131I]?[bB]?\s*\Z")))
def test_any_other_text_is_refused_with_our_error(text: str) -> None:
    try:
        nbytes = parse_size(text, "min_bytes")
    except eo.ConfigError as error:
        said = str(error)
    else:
        said = f"min_bytes={text!r} " if nbytes >= 0 else "a negative size"
    assert said.startswith(f"min_bytes={text!r} ")


@settings(deadline=None)
@given(
    st.one_of(st.integers(max_value=-1), st.floats(), st.booleans(), st.none(), st.binary(), st.lists(st.integers()))
)
def test_what_is_neither_a_size_nor_a_text_is_refused(value: object) -> None:
    with pytest.raises(eo.ConfigError, match="whole number of bytes"):
        parse_size(value)


# -- refusals -------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any, str]] = [
    ("tier", "gpu", '"auto" or "host" or "disk"'),
    ("tier", None, '"auto" or "host" or "disk"'),
    ("tier", ["disk"], '"auto" or "host" or "disk"'),
    *(
        (field, bad, "a whole number of bytes")
        for field in SIZES
        for bad in (-1, "-1", "lots", 1.5, None, True, "auto")
    ),
    *(
        (field, bad, '"auto" or a whole number of bytes')
        for field in SIZES_OR_AUTO
        for bad in (-1, "2 cats", None, False)
        if (field, bad) != ("device_budget", None)
    ),
    ("max_inflight_bytes", 0, "more than 0 bytes"),
    ("max_inflight_bytes", "0MiB", "more than 0 bytes"),
    ("host_budget", 0, 'more than 0 bytes, or "auto"'),
    ("disk_budget", "0B", 'more than 0 bytes, or "auto"'),
    ("device_budget", "0B", "a whole number of bytes, more than 0"),
    *(("policy", bad, '"max" or "free"') for bad in ("least", None, True, ["free"])),
    *(
        ("codec", bad, '"identity", "lossless", "bf16", "int8", "fp8", or a mapping from patterns')
        for bad in ("int4", None, True, ["lossless"])
    ),
    *(("max_slowdown", bad, "a number, 0 or more") for bad in (-0.1, "5 %", True, float("nan"), float("inf"), [0.1])),
    ("pin_memory", "yes", 'True, False or "auto"'),
    ("pin_memory", 1, 'True, False or "auto"'),
    ("pin_memory", None, 'True, False or "auto"'),
    ("verify", "auto", "True or False"),
    ("step_plans", "always", 'True, False or "auto"'),
    ("step_plans", 1, 'True, False or "auto"'),
    ("verify", 1, "True or False"),
    ("skip", 3, "the names of modules"),
    ("skip", [""], "the names of modules"),
    ("disk_path", "", "a directory, a list of directories, or None"),
    ("disk_path", [], "a directory, a list of directories, or None"),
    ("disk_path", ["/tmp", ""], "a directory, a list of directories, or None"),
    ("disk_path", ["/tmp", 3], "a directory, a list of directories, or None"),
    ("disk_path", 3, "a directory, a list of directories, or None"),
    ("disk_path", b"/tmp", "a directory, a list of directories, or None"),
    ("disk_path", {"/tmp"}, "a directory, a list of directories, or None"),
]


@pytest.mark.parametrize(("field", "value", "accepted"), REFUSED)
def test_a_bad_value_names_the_field_what_was_given_and_what_is_accepted(field: str, value: Any, accepted: str) -> None:
    for make in (eo.OffloadConfig, eo.Offload):
        with pytest.raises(eo.ConfigError) as raised:
            make(**{field: value})
        text = str(raised.value)
        assert text.startswith(f"{field}={value!r} is not accepted: {field} takes ")
        assert accepted in text
        assert isinstance(raised.value, ValueError)
        assert isinstance(raised.value, eo.OffloadError)


def test_a_host_tier_with_a_disk_path_is_an_impossible_pair() -> None:
    with pytest.raises(eo.ConfigError, match=r"disk_path=.*/tmp.* does not go with tier=\"host\".*leave disk_path out"):
        eo.OffloadConfig(tier="host", disk_path="/tmp")
    with pytest.raises(eo.ConfigError, match="does not go with"):
        eo.Offload(eo.OffloadConfig(tier="host"), disk_path="/tmp")


def test_a_device_budget_says_what_stays_and_what_moves_by_itself() -> None:
    assert not eo.OffloadConfig(device_budget="20GiB").learns_what_stays
    assert eo.OffloadConfig(device_budget="20GiB").small_step_bytes(3 * MIB) == 0
    with pytest.raises(eo.ConfigError, match="keep_last_bytes=0 does not go with device_budget"):
        eo.OffloadConfig(device_budget="20GiB", keep_last_bytes=0)
    plan = eo.StepPlan((Save(Fate.KEEP, KeepReason.SMALL, 1, 1),))
    with pytest.raises(eo.ConfigError, match=r"plan=\.\.\. does not go with device_budget"):
        eo.Offload(device_budget="20GiB", plan=plan)


@pytest.mark.parametrize(
    ("fields", "setting"),
    [({"policy": "free"}, 'policy="free"'), ({"max_slowdown": "0.05"}, r"max_slowdown=0\.05")],
)
def test_a_slowdown_says_what_stays_by_itself(fields: dict[str, Any], setting: str) -> None:
    config = eo.OffloadConfig(**fields)
    assert not config.learns_what_stays
    assert config.slowdown == config.max_slowdown or config.slowdown == 0.0
    with pytest.raises(eo.ConfigError, match=f"keep_last_bytes=0 does not go with {setting}"):
        eo.OffloadConfig(**fields, keep_last_bytes=0)
    plan = eo.StepPlan((Save(Fate.KEEP, KeepReason.SMALL, 1, 1),))
    with pytest.raises(eo.ConfigError, match=rf"plan=\.\.\. does not go with {setting}"):
        eo.Offload(plan=plan, **fields)
    assert eo.OffloadConfig(**fields, device_budget="1GiB").device_budget == 1 << 30
    assert eo.OffloadConfig.from_text(config.to_text()) == config


@given(st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=20))
def test_the_text_of_a_config_needs_no_escape_in_a_source(name: str) -> None:
    config = eo.OffloadConfig(tier="disk", disk_path=name, skip=[name], min_bytes=0)
    text = config.to_text()
    assert text.isascii()
    assert text.isprintable()
    assert not set(text) & set('"\\')
    assert eo.OffloadConfig.from_text(text) == config


def test_two_limits_of_a_slowdown_are_one_too_many() -> None:
    with pytest.raises(eo.ConfigError, match=r'max_slowdown=0\.05 does not go with policy="free"'):
        eo.OffloadConfig(policy="free", max_slowdown=0.05)
    assert eo.OffloadConfig().slowdown is None
    assert eo.OffloadConfig(max_slowdown=0).slowdown == 0.0


MAKE: dict[str, Callable[[dict[str, Any]], object]] = {
    "Offload": lambda given: eo.Offload(**given),
    "Offload of a mapping": eo.Offload,
    "OffloadConfig": lambda given: eo.OffloadConfig(**given),
    "from_dict": eo.OffloadConfig.from_dict,
    "replace": lambda given: dataclasses.replace(eo.OffloadConfig(), **given),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=list(MAKE))
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
    assert str(raised.value) == f"unknown field {name!r}{question}{', '.join(DEFAULTS)}"


def test_a_machine_of_a_file_refuses_a_wrong_name_alike() -> None:
    with pytest.raises(eo.ConfigError, match=r"unknown field 'names': did you mean name\?"):
        eo.Machine(names=1)  # type: ignore[call-arg]  # which is to raise


SPELLED = {field: f"{number}000000 B" for number, field in enumerate(SIZES + SIZES_OR_AUTO, 1)}


def test_a_size_is_repeated_as_it_was_given_and_counts_as_its_bytes(tmp_path: Path) -> None:
    """Here the text is the only thing that tells two configs apart."""
    for field, text in SPELLED.items():
        config = eo.OffloadConfig(**{field: text})
        assert config == eo.OffloadConfig(**{field: parse_size(text)})
        kept = (
            *(dataclasses.replace(config, verify=False), copy.copy(config), copy.deepcopy(config)),
            *(pickle.loads(pickle.dumps(config)), eo.OffloadConfig(**vars(config))),
        )
        assert set(kept) == {config}
        assert config.to_dict()[field] == parse_size(text)
        for same in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config)), eo.Offload(config).config):
            assert f"{field}={text!r}" in repr(eo.Offload(same)), same
    assert f"min_bytes={SPELLED['min_bytes']!r}" in repr(
        eo.Offload(eo.OffloadConfig(min_bytes="1000000 B"), tier="host")
    )
    with pytest.raises(eo.ConfigError, match="keep_last_bytes='1000KB' does not go with device_budget"):
        eo.OffloadConfig(device_budget="20GB", keep_last_bytes="1000KB")
    with pytest.raises(eo.ConfigError, match="keep_last_bytes='1000KB' does not go with policy"):
        eo.OffloadConfig(policy="free", keep_last_bytes="1000KB")


def test_a_config_that_is_no_config_is_refused() -> None:
    for given_config in ("disk", 4, eo.OffloadConfig):
        with pytest.raises(eo.ConfigError, match="config takes an OffloadConfig, a mapping of its fields, or None"):
            eo.Offload(given_config)  # type: ignore[arg-type]


# -- where the values come from -------------------------------------------------------------------------------------


def test_keywords_override_the_fields_of_a_config_and_leave_the_others() -> None:
    base = eo.OffloadConfig(tier="host", min_bytes="2MiB", verify=True)
    offload = eo.Offload(base, min_bytes=5)
    assert offload.config == dataclasses.replace(base, min_bytes=5)
    assert base.min_bytes == 2 * MIB
    assert eo.Offload(base).config == base
    assert eo.Offload(tier="host").config == eo.OffloadConfig(tier="host")


def test_every_field_can_come_from_the_environment(tmp_path: Path) -> None:
    environ = {
        "EAGER_OFFLOAD_TIER": "disk",
        "EAGER_OFFLOAD_MIN_BYTES": "4MiB",
        "EAGER_OFFLOAD_MAX_INFLIGHT_BYTES": "64",
        "EAGER_OFFLOAD_PREFETCH_BYTES": "1 KiB",
        "EAGER_OFFLOAD_KEEP_LAST_BYTES": "auto",
        "EAGER_OFFLOAD_PIN_MEMORY": "no",
        "EAGER_OFFLOAD_HOST_BUDGET": "2GB",
        "EAGER_OFFLOAD_DISK_BUDGET": "3GB",
        "EAGER_OFFLOAD_DISK_PATH": f"{tmp_path}{os.pathsep}/elsewhere",
        "EAGER_OFFLOAD_VERIFY": "True",
        "EAGER_OFFLOAD_STEP_PLANS": "off",
        "EAGER_OFFLOAD_DEVICE_BUDGET": "20GiB",
        "EAGER_OFFLOAD_POLICY": "max",
        "EAGER_OFFLOAD_MAX_SLOWDOWN": "0.05",
        "EAGER_OFFLOAD_CODEC": "lossless",
        "EAGER_OFFLOAD_SKIP": "lm_head, *.norm",
        "EAGER_OFFLOAD_ENABLED": "no",
        "PATH": "/bin",
    }
    assert {name.removeprefix("EAGER_OFFLOAD_").lower() for name in environ} - {"path"} == set(DEFAULTS)
    assert eo.OffloadConfig.from_env(environ) == eo.OffloadConfig(
        tier="disk",
        min_bytes=4 * MIB,
        max_inflight_bytes=64,
        prefetch_bytes=1024,
        keep_last_bytes="auto",
        pin_memory=False,
        host_budget=2 * 10**9,
        disk_budget=3 * 10**9,
        disk_path=[tmp_path, "/elsewhere"],
        verify=True,
        step_plans=False,
        device_budget=20 << 30,
        policy="max",
        max_slowdown=0.05,
        codec="lossless",
        skip=["lm_head", "*.norm"],
        enabled=False,
    )


def test_no_budget_is_a_text_too() -> None:
    for field in ("DEVICE_BUDGET", "MAX_SLOWDOWN"):
        assert eo.OffloadConfig.from_env({f"EAGER_OFFLOAD_{field}": "none"}) == eo.OffloadConfig()


def test_the_environment_is_that_of_the_process_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert eo.OffloadConfig.from_env() == eo.OffloadConfig()
    monkeypatch.setenv("EAGER_OFFLOAD_MIN_BYTES", "3MiB")
    monkeypatch.setenv("EAGER_OFFLOAD_VERIFY", "")
    assert eo.OffloadConfig.from_env() == eo.OffloadConfig(min_bytes="3MiB")
    assert eo.OffloadConfig() == eo.OffloadConfig(min_bytes=MIB), "a configuration does not look at it"


def test_an_offload_takes_what_is_not_given_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD_MIN_BYTES", "3MiB")
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


def test_switched_off_nothing_is_opened_and_compiled_code_is_as_it_is_without(tmp_path: Path) -> None:
    offload = eo.Offload(enabled=False, min_bytes=0, disk_path=tmp_path / "does not exist")
    weight = torch.ones(64, 64, requires_grad=True)
    compiled = offload.compile(lambda x: (x @ weight).exp().sum(), backend="aot_eager", fullgraph=True)
    compiled(torch.ones(64, 64)).backward()
    assert offload.stats() == eo.OffloadStats()
    with offload, offload:
        pass


@pytest.mark.sampled(2, quick=True)
@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_backend_heeds_the_switch(switch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD", switch)
    options = {"min_bytes": 0, "keep_last_bytes": 0, "tier": "disk", "disk_path": str(tmp_path)}
    compiled = torch.compile(lambda x: x.exp().sum(), backend="eager_offload", options=options)
    x = torch.ones(1 << 16, requires_grad=True)
    compiled(x).backward()
    serving = eo.Offload.serving(**options)
    assert (serving.stats(synchronize=True).saved_tensors > 0) is (switch == "1")
    assert torch.allclose(x.grad, x.exp())
    serving.close()
    torch.compiler.reset()


# -- typed, and shown -----------------------------------------------------------------------------------------------


def test_the_keywords_of_an_offload_are_the_fields_with_their_types() -> None:
    types = typing.get_type_hints(OffloadFields)
    assert types == {name: typing.get_type_hints(eo.OffloadConfig)[name] for name in types}
    assert list(types) == list(FIELDS) == list(DEFAULTS)


def test_an_offload_shows_what_was_set_and_what_it_has_done(tmp_path: Path) -> None:
    assert repr(eo.Offload()) == "<Offload(): nothing saved yet>"
    offload = eo.Offload(min_bytes=4096, keep_last_bytes=0, tier="disk", disk_path=[tmp_path])
    shown = f"<Offload(tier='disk', min_bytes='4KiB', keep_last_bytes='0B', disk_path={str(tmp_path)!r}): "
    assert repr(offload) == shown + "nothing saved yet>"
    x = torch.ones(1 << 18, requires_grad=True)
    with offload:
        loss = (x * 2).exp().sum()
    loss.backward()
    assert repr(offload) == shown + "1.0 MiB offloaded of 1.0 MiB saved>"
    offload.close()


@pytest.mark.parametrize(("text", "value"), [("1", True), ("YES", True), ("on", True), ("0", False), ("False", False)])
def test_a_switch_in_the_environment_is_a_word(text: str, value: bool) -> None:
    assert eo.OffloadConfig.from_env({"EAGER_OFFLOAD_VERIFY": text}).verify is value
    assert eo.OffloadConfig.from_env({"EAGER_OFFLOAD_PIN_MEMORY": text}).pin_memory is value


@pytest.mark.parametrize("name", ["EAGER_OFFLOAD_MIN_BYTE", "EAGER_OFFLOAD_", "EAGER_OFFLOAD_CONFIG"])
def test_an_unknown_variable_is_named_as_it_was_written(name: str) -> None:
    with pytest.raises(eo.ConfigError, match="EAGER_OFFLOAD_MIN_BYTES") as raised:
        eo.OffloadConfig.from_env({name: "4MiB"})
    assert str(raised.value).startswith(f"unknown variable {name}='4MiB': ")


def test_of_a_variable_that_is_mistyped_the_nearest_comes_first() -> None:
    with pytest.raises(eo.ConfigError, match=r"BYTS='4MiB': did you mean EAGER_OFFLOAD_MIN_BYTES\? Accepted are EAGER"):
        eo.OffloadConfig.from_env({"EAGER_OFFLOAD_MIN_BYTS": "4MiB"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MIN_BYTES", "lots"),
        ("TIER", "tape"),
        ("VERIFY", "perhaps"),
        ("PIN_MEMORY", "2"),
        ("DISK_PATH", f"/tmp{os.pathsep}"),
        ("HOST_BUDGET", "-1"),
    ],
)
def test_a_bad_value_in_the_environment_is_refused_like_any_other(name: str, text: str) -> None:
    with pytest.raises(eo.ConfigError, match=f"^{name.lower()}=.* is not accepted"):
        eo.OffloadConfig.from_env({f"EAGER_OFFLOAD_{name}": text})


def test_a_size_that_is_no_field_is_named_too() -> None:
    with pytest.raises(eo.ConfigError, match=r"^threshold='a lot' is not accepted: threshold takes"):
        release_freed_memory("a lot")


def test_a_dict_has_the_types_of_a_file_and_gives_the_same_config() -> None:
    config = eo.OffloadConfig(tier="disk", min_bytes="2MiB", disk_path=["/a", "/b"], verify=True)
    fields = config.to_dict()
    assert json.loads(json.dumps(fields)) == fields
    assert fields["disk_path"] == ["/a", "/b"]
    assert fields["min_bytes"] == 2 << 20
    assert eo.OffloadConfig.from_dict(fields) == config
    assert (
        eo.OffloadConfig.from_dict({}) == eo.OffloadConfig() == eo.OffloadConfig.from_dict(eo.OffloadConfig().to_dict())
    )


@pytest.mark.parametrize("given", [None, 3, "min_bytes", [("min_bytes", 3)]])
def test_what_is_no_mapping_is_refused_as_a_dict(given: object) -> None:
    with pytest.raises(eo.ConfigError, match="from_dict takes a mapping"):
        eo.OffloadConfig.from_dict(given)  # type: ignore[arg-type]  # what is tested
