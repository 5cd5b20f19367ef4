"""A codec is given by its name, or by names for patterns of module names, in whatever way a setting is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import eager_offload as eo
from eager_offload.codecs import BlockInt
from eager_offload.codecs.names import shared_name

GONE = r"is not accepted: .* are gone: name the modules in which may be rounded"
MIXED = {"*": "lossless", "*.mlp": "fp8", "*.mlp.out": "identity"}


def test_bytes_that_are_saved_under_several_names_are_rounded_for_none() -> None:
    assert shared_name(["fp8", "fp8"]) == "fp8"
    assert shared_name(["fp8", "bf16"]) == shared_name(["fp8", "lossless"]) == "lossless"
    assert shared_name(["fp8", "identity"]) == shared_name([]) == "identity"


def test_a_mapping_is_a_setting_like_any_other_and_kept_as_it_was_given() -> None:
    given = dict(MIXED)
    config, turned = eo.OffloadConfig(codec=given), eo.OffloadConfig(codec=dict(reversed(MIXED.items())))
    given["*.head"] = "bf16"
    assert config.codec == MIXED
    assert config == eo.OffloadConfig.from_env({"EAGER_OFFLOAD_CODEC": json.dumps(MIXED)})
    assert hash(config) == hash(eo.OffloadConfig(codec=dict(MIXED)))
    assert turned != config, "the order counts"
    assert turned == eo.OffloadConfig.from_text(turned.to_text())
    assert turned.to_text() != config.to_text()
    with pytest.raises(TypeError):
        config.codec["*"] = "fp8"  # type: ignore[index]  # which is to raise


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("int9", "codec='int9' is not accepted: codec takes"),
        ({}, "has to name a codec"),
        ({"*.mlp": "int9"}, r"codec=\{'\*.mlp': 'int9'\} is not accepted: the codecs are"),
        ({"*.mlp": None}, "is not accepted"),
        ({"": "fp8"}, "patterns of module names are texts"),
        ({1: "fp8"}, "patterns of module names are texts"),
        ("{fp8", "or a mapping from patterns of module names to names in JSON"),
        ({"lossless": True, "rules": {"MmBackward0": "int8"}}, GONE),
        ({"kinds": {"matmul": "int8"}}, GONE),
        ({"*.mlp": "int8_sr"}, GONE),
        ({"*.mlp": BlockInt()}, GONE),
        ("int8:128", GONE),
        ("int4", GONE),
        ("stochastic", GONE),
    ],
    ids=str,
)
def test_anything_else_is_an_error(codec: Any, message: str) -> None:
    with pytest.raises(eo.ConfigError, match=message):
        eo.OffloadConfig(codec=codec)


@pytest.mark.parametrize("codec", [{"rules": "fp8"}, {"lossless": "bf16"}, {"kinds": "int8"}, {"MmBackward0": "int8"}])
def test_a_module_may_have_any_name(codec: dict[str, str]) -> None:
    assert eo.OffloadConfig(codec=codec).codec == codec


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: eo.codec("int9"), r"eager_offload\.codec\('int9'\) is not accepted: the codecs are"),
        (lambda: eo.codec("int8:128"), GONE),
    ],
)
def test_what_is_no_codec_or_gone_says_what_to_write(use: Callable[[], object], message: str) -> None:
    with pytest.raises(eo.ConfigError, match=message):
        use()
