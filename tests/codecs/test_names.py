"""A codec is given by its name, or by names for patterns of module names, in whatever way a setting is given."""

from __future__ import annotations

import json
from typing import Any

import pytest

import eager_offload as eo
from eager_offload.codecs.names import CodecRules, shared_name

MIXED = {"*": "lossless", "*.mlp": "fp8", "*.mlp.out": "identity"}


@pytest.mark.parametrize(
    ("inside", "name"),
    [
        ((), "lossless"),
        (("*.mlp",), "fp8"),
        (("*.mlp", "*.mlp.out"), "identity"),
        (("*.mlp.out", "*.mlp"), "identity"),
        (("of another setting",), "lossless"),
    ],
)
def test_of_the_patterns_that_match_the_last_one_counts(inside: tuple[str, ...], name: str) -> None:
    assert CodecRules(MIXED).name_in(inside) == name
    assert CodecRules(MIXED).of_modules == ("*.mlp", "*.mlp.out")
    assert CodecRules({"*.mlp": "fp8", "*": "bf16"}).name_in(inside) == "bf16"
    assert CodecRules({"*.mlp": "fp8"}).name_in(()) == "identity"


def test_bytes_that_are_saved_under_several_names_are_rounded_for_none() -> None:
    assert shared_name(["fp8", "fp8"]) == "fp8"
    assert shared_name(["fp8", "bf16"]) == shared_name(["fp8", "lossless"]) == "lossless"
    assert shared_name(["fp8", "identity"]) == shared_name([]) == "identity"


def test_a_mapping_is_a_setting_like_any_other() -> None:
    config = eo.OffloadConfig(codec=MIXED)
    assert config.codec == MIXED
    assert config == eo.OffloadConfig.from_env({"EAGER_OFFLOAD_CODEC": json.dumps(MIXED)})
    assert hash(config) == hash(eo.OffloadConfig(codec=dict(MIXED)))
    turned = eo.OffloadConfig(codec=dict(reversed(MIXED.items())))
    assert turned != config, "the order counts"
    assert turned == eo.OffloadConfig.from_text(turned.to_text())
    assert turned.to_text() != config.to_text()


def test_it_is_kept_as_it_was_given() -> None:
    given = dict(MIXED)
    config = eo.OffloadConfig(codec=given)
    given["*.head"] = "bf16"
    assert config.codec == MIXED
    with pytest.raises(TypeError):
        config.codec["*"] = "fp8"  # type: ignore[index]  # which is to raise


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("int4", "codec='int4' is not accepted"),
        ({}, "has to name a codec"),
        ({"*.mlp": "int8_sr"}, r"codec=\{'\*.mlp': 'int8_sr'\} is not accepted: the codecs are"),
        ({"*.mlp": None}, "is not accepted"),
        ({"": "fp8"}, "patterns of module names are texts"),
        ({1: "fp8"}, "patterns of module names are texts"),
        ("{fp8", "or a mapping from patterns of module names to names in JSON"),
        ({"lossless": True, "rules": {"MmBackward0": "int8"}}, "rules for the nodes that read in backward are gone"),
        ({"MmBackward0": "int8"}, "rules for the nodes that read in backward are gone"),
    ],
    ids=str,
)
def test_anything_else_is_an_error(codec: Any, message: str) -> None:
    with pytest.raises(eo.ConfigError, match=message):
        eo.OffloadConfig(codec=codec)


def test_a_region_of_no_codec_is_an_error() -> None:
    with pytest.raises(eo.ConfigError, match=r"eager_offload\.codec\('int4'\) is not accepted: the codecs are"):
        eo.codec("int4")


@pytest.mark.parametrize("name", ["CodecPolicy", "PrecisionError", "simulation"])
def test_what_is_gone_says_what_to_write(name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}' any more: "):
        getattr(eo, name)
