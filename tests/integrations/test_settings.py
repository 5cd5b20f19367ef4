"""What is given comes first, then the environment, then the defaults."""

from __future__ import annotations

import pytest

import eager_offload as eo
from eager_offload.config import switched_on
from eager_offload.integrations.settings import offload_from


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD_MIN_BYTES", "4MiB")
    monkeypatch.setenv("EAGER_OFFLOAD_PREFETCH_BYTES", "8MiB")


def test_the_environment_says_what_is_not_given() -> None:
    assert offload_from(None).config == eo.OffloadConfig.from_env()
    config = offload_from({"min_bytes": "2MiB"}, {"tier": "disk"}).config
    assert (config.min_bytes, config.prefetch_bytes, config.tier) == (2 << 20, 8 << 20, "disk")


def test_a_whole_configuration_or_object_is_taken_as_it_is() -> None:
    config = eo.OffloadConfig(min_bytes=7)
    assert offload_from(config).config == config
    assert offload_from(config, {"tier": "disk"}).config == eo.OffloadConfig(min_bytes=7, tier="disk")
    offload = eo.Offload(config)
    assert offload_from(offload) is offload


@pytest.mark.parametrize("given", [17, "disk", ["disk"]])
def test_anything_else_is_refused(given: object) -> None:
    with pytest.raises(eo.ConfigError, match="config takes an OffloadConfig, a mapping"):
        offload_from(given)  # type: ignore[arg-type]  # what is tested


def test_fields_beside_an_object_are_refused() -> None:
    with pytest.raises(eo.ConfigError, match="tier beside an Offload"):
        offload_from(offload := eo.Offload(), {"tier": "disk", "enabled": True})
    assert offload_from(offload, {"enabled": True}) is offload
    assert not offload_from(offload, {"enabled": False}).config.enabled


@pytest.mark.parametrize(("text", "on"), [("1", True), ("Yes", True), ("0", False), ("off", False), (" ", None)])
def test_the_switch(monkeypatch: pytest.MonkeyPatch, text: str, on: bool | None) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD", text)
    assert [switched_on(default) for default in (True, False)] == ([True, False] if on is None else [on, on])


def test_a_switch_that_is_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD", "maybe")
    with pytest.raises(eo.ConfigError, match="EAGER_OFFLOAD='maybe'"):
        switched_on(True)
