"""Which codec is allowed for which consumer, and how a policy is written down."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch

from eager_offload import CodecPolicy, ConfigError, Offload, OffloadConfig
from eager_offload.codecs import BF16, BlockFP8, BlockInt, Codec, TensorMeta
from eager_offload.codecs.policy import CODEC_NAMES, CONSUMERS, NORMS, codec_of, text_of
from eager_offload.step_plan import Ask, Coded, Fate, Save, StepPlan

META = TensorMeta((1024,), (1,), torch.float32)
MIXED = CodecPolicy(False, {"MulBackward0": "int8:32", "MmBackward0": BF16(), "AddmmBackward0": BlockInt(4)})  # type: ignore[dict-item]
CODECS = [BF16(), BlockFP8(), BlockFP8(32), *(BlockInt(bits, 16, how) for bits in (4, 8) for how in ("rtn", "sr"))]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_named_policy_is_kept_under_its_name(name: str) -> None:
    policy = CodecPolicy.named(name)
    assert policy.rounds == (name not in ("identity", "lossless"))
    assert policy.lossless == (name != "identity")
    config = OffloadConfig(codec=policy)
    assert config.codec == name
    assert config == OffloadConfig(codec=name)
    assert config.to_text() == OffloadConfig(codec=name).to_text(), "equal configurations share what was compiled"
    assert config.codec_policy == policy


@pytest.mark.parametrize("policy", [MIXED, CodecPolicy.named("int8").rule("MulBackward0", None)])
def test_a_policy_goes_through_every_form_that_a_configuration_has(policy: CodecPolicy) -> None:
    config = OffloadConfig(codec=policy)
    assert config.codec == policy
    assert OffloadConfig.from_text(config.to_text()) == config
    assert OffloadConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    text = json.dumps(policy.to_dict())
    assert OffloadConfig.from_env({"EAGER_OFFLOAD_CODEC": text}) == config
    assert OffloadConfig.from_env({"EAGER_OFFLOAD_CODEC": "fp8"}).codec == "fp8"
    for other in (copy.copy(policy), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert (other, hash(other)) == (policy, hash(policy))
    assert Offload(codec=policy).config.codec_policy == policy


@pytest.mark.parametrize("codec", CODECS, ids=text_of)
def test_a_codec_is_read_as_it_is_written(codec: Any) -> None:
    assert codec_of(text_of(codec)) == codec


def test_rules_are_added_and_taken_away() -> None:
    policy = CodecPolicy().rule("MulBackward0", "fp8").rule("MmBackward0", BlockInt(4))
    assert policy.rules == {"MulBackward0": BlockFP8(), "MmBackward0": BlockInt(4)}
    assert policy.rule("MulBackward0", BF16()).rules["MulBackward0"] == BF16()
    assert policy.rule("MulBackward0", None).rules == {"MmBackward0": BlockInt(4)}
    assert CodecPolicy().rules == {}, "a policy does not change"
    with pytest.raises(TypeError):
        policy.rules["LogSoftmaxBackward0"] = BF16()  # type: ignore[index]  # which is to raise
    given = {"MmBackward0": BF16()}
    kept = CodecPolicy(rules=given)
    given["LogSoftmaxBackward0"] = BF16()
    assert kept == CodecPolicy(rules={"MmBackward0": BF16()})


def test_the_strictest_of_several_consumers_decides() -> None:
    assert MIXED.strictest(["MulBackward0", "MmBackward0"], META) == BF16()
    assert MIXED.strictest(["MulBackward0", "AddmmBackward0"], META) == BlockInt(8, 32)
    assert MIXED.strictest(["AddmmBackward0"], META) == BlockInt(4)
    for with_an_exact_one in (["MulBackward0", "SinBackward0"], ["MulBackward0", ""], []):
        assert MIXED.strictest(with_an_exact_one, META) is None
    assert MIXED.allows("AddmmBackward0", BF16(), META)
    assert not MIXED.allows("MmBackward0", BlockInt(4), META)
    assert not MIXED.allows("SinBackward0", BF16(), META)


@pytest.mark.parametrize(
    ("one", "two", "both"),
    [
        (BlockInt(8, 32), BlockInt(8, 1024), BlockInt(8, 32)),
        (BlockFP8(32), BlockInt(8, 64), None),
        (BF16(), BlockFP8(32), BF16()),
        (BlockInt(8, rounding="sr"), BlockInt(4), BlockInt(8, rounding="sr")),
        (BlockInt(8, rounding="sr"), BlockInt(8), None),
        (BlockInt(8, rounding="sr"), BF16(), None),
        (BlockInt(4, rounding="sr"), BlockInt(8, rounding="sr"), BlockInt(8, rounding="sr")),
    ],
    ids=str,
)
def test_what_two_read_is_within_what_each_asks_for(one: Codec, two: Codec, both: Codec | None) -> None:
    for first, second in ((one, two), (two, one)):
        policy = CodecPolicy().rule("MmBackward0", first).rule("AddmmBackward0", second)
        assert policy.strictest(["MmBackward0", "AddmmBackward0"], META) == both
        for consumer, own, other in (("MmBackward0", first, second), ("AddmmBackward0", second, first)):
            assert policy.allows(consumer, own, META)
            assert policy.allows(consumer, other, META) == (other == both)


def test_named_policies_have_no_rule_for_what_is_to_be_exact() -> None:
    for name in ("bf16", "int8", "fp8"):
        rules = CodecPolicy.named(name).rules
        assert rules.keys() < CONSUMERS
        assert rules.keys() > NORMS
        assert not [one for one in rules if "Attention" in one or "LogSoftmax" in one or "Loss" in one]
    assert CodecPolicy.named("int8").rules["MmBackward0"].unbiased


class Derived(BF16):
    name = "derived"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CodecPolicy.named("int4"), "'int4' is not accepted"),
        (lambda: CodecPolicy(lossless=1), "lossless=1 is not accepted"),
        (
            lambda: CodecPolicy(rules=["MmBackward0"]),
            "is not accepted: CodecPolicy takes codecs by the name of consumers",
        ),
        (
            lambda: CodecPolicy(rules={"LogSoftmaxBackward0": BF16()}),
            "the consumer 'LogSoftmaxBackward0' is not accepted",
        ),
        (lambda: CodecPolicy().rule("mm", BF16()), "the consumer 'mm' is not accepted"),
        (lambda: CodecPolicy().rule(("MmBackward0",), BF16()), "the consumer .* is not accepted"),
        (lambda: CodecPolicy().rule("MmBackward0", "int2"), "the codec 'int2' is not accepted"),
        (lambda: CodecPolicy().rule("MmBackward0", "int8:x"), "the codec 'int8:x' is not accepted"),
        (lambda: CodecPolicy().rule("MmBackward0", "bf16:32"), "the codec 'bf16:32' is not accepted"),
        (lambda: CodecPolicy().rule("MmBackward0", "int8:7"), "block=7 is not accepted"),
        (lambda: CodecPolicy().rule("MmBackward0", torch.int8), "torch.int8 for MmBackward0 is not accepted"),
        (lambda: CodecPolicy().rule("MmBackward0", Derived()), r"Derived\(\) for MmBackward0 is not accepted"),
        (lambda: CodecPolicy().rule("GeluBackward0", "int4_sr"), "4 bits do for products and norms alone"),
        (lambda: OffloadConfig(codec={"lossy": True}), "'lossy'.* of a codec policy is not accepted"),
        (lambda: OffloadConfig.from_env({"EAGER_OFFLOAD_CODEC": "{int8"}), "codec='{int8' is not accepted"),
    ],
)
def test_what_a_policy_cannot_be_made_of_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_plan_that_rounds_asks_for_the_rule() -> None:
    rounded = Coded("int8", "torch.float32", "SinBackward0", 4160)
    save = Save(Fate.OFFLOAD, None, 16384, 16384, 16384, True, 0, 0, 1, coded=rounded)
    plan = StepPlan((save,), (Ask(0),), end=(0,), slots=(4160,))
    plan.check()
    Offload(plan=plan, codec=CodecPolicy().rule("MulBackward0", BlockInt(8))).close()
    for codec in ("identity", "int8", CodecPolicy().rule("MulBackward0", BlockInt(8, 32))):
        with pytest.raises(ConfigError, match="save 0 of the step plan is packed by the codec 'int8'"):
            Offload(plan=plan, codec=codec)
