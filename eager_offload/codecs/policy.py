"""Which codecs the user allows, by the nodes that read a saved tensor in backward.

A *consumer* is a node of autograd, by its name: ``MulBackward0`` reads what ``a * b`` has saved. What rounds is allowed
by consumer, since what an error does to a gradient depends on what is computed with it. What no rule names is exact:
integers, statistics of norms, log-softmax and losses, and what attention saves, whose backward recomputes from a sum
that it has saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from eager_offload.codecs.base import Codec, TensorMeta
from eager_offload.codecs.exact import BitMask, Narrow
from eager_offload.codecs.rounded import BF16, BlockFP8, BlockInt
from eager_offload.errors import ConfigError
from eager_offload.names import checks_names, did_you_mean
from eager_offload.pydantic_schema import schema_of

#: What a policy may be named.
CODEC_NAMES = ("identity", "lossless", "bf16", "int8", "fp8")

#: Backward is affine in what these have saved.
_PRODUCTS = ("MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0")
#: They save statistics beside their input, which stay exact.
NORMS = frozenset(
    {
        *("NativeLayerNormBackward0", "NativeGroupNormBackward0", "NativeBatchNormBackward0"),
        *("CudnnBatchNormBackward0", "FusedRmsNormBackward0"),
    }
)
#: What the named policies have rules for.
_NAMED = (*_PRODUCTS, *sorted(NORMS), "MulBackward0", "GeluBackward0", "SiluBackward0", "SoftmaxBackward0")
#: Every consumer of which there may be a rule.
CONSUMERS = frozenset({*_NAMED, "ConvolutionBackward0"})
#: Those that integers of 4 bits are precise enough for.
_COARSE = frozenset({*_PRODUCTS, "ConvolutionBackward0"}) | NORMS
_BLOCK = 64
#: What packs whole storages and changes no bit.
_EXACT: dict[str, Codec] = {"narrow": Narrow(), "bitmask": BitMask()}


class _Rules(Mapping[str, Codec]):
    """Rules that do not change. Unlike a view of a dict they are copied and pickled, by ``dataclasses.asdict`` too."""

    __slots__ = ("_codecs",)

    def __init__(self, codecs: Mapping[str, Codec]) -> None:
        self._codecs = dict(codecs)

    def __getitem__(self, consumer: str) -> Codec:
        return self._codecs[consumer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._codecs)

    def __len__(self) -> int:
        return len(self._codecs)

    def __repr__(self) -> str:
        return repr(self._codecs)


@checks_names
@dataclass(frozen=True)
class CodecPolicy:
    """What packs saved tensors before they travel: ``OffloadConfig(codec=...)``.

    Args:
        lossless: whether what fits into fewer bytes, bit for bit, is packed.
        rules: by the name of a consumer, what may round what it alone reads: ``BF16``, ``BlockInt`` or ``BlockFP8``, or
            a text such as ``"int8_sr"``. They do not change: ``rule`` makes another policy.

    Raises:
        ConfigError: for another consumer or codec, or one that is too coarse for its consumer.
    """

    lossless: bool = True
    rules: Mapping[str, Codec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.lossless, bool):
            raise ConfigError(f"lossless={self.lossless!r} is not accepted: CodecPolicy takes True or False")
        if not isinstance(self.rules, Mapping):
            raise ConfigError(
                f"rules={self.rules!r} is not accepted: CodecPolicy takes codecs by the name of consumers"
            )
        given: list[tuple[Any, Any]] = list(self.rules.items())
        for consumer, _ in given:
            _check_consumer(consumer)
        rules = {consumer: _check(consumer, codec) for consumer, codec in sorted(given)}
        object.__setattr__(self, "rules", _Rules(rules))

    def __hash__(self) -> int:
        return hash((self.lossless, tuple(self.rules.items())))

    def rule(self, consumer: str, codec: Codec | str | None) -> CodecPolicy:
        """The same policy with a rule for ``consumer``; ``None``: without one.

        Raises:
            ConfigError: as for the constructor.
        """
        _check_consumer(consumer)
        others: dict[str, Any] = {name: one for name, one in self.rules.items() if name != consumer}
        return CodecPolicy(self.lossless, others if codec is None else others | {consumer: codec})

    @classmethod
    def named(cls, name: str) -> CodecPolicy:
        """That of ``"identity"``, ``"lossless"``, ``"bf16"``, ``"int8"`` or ``"fp8"``.

        Raises:
            ConfigError: for another name.
        """
        if name not in CODEC_NAMES:
            accepted = ", ".join(f'"{one}"' for one in CODEC_NAMES)
            raise ConfigError(f"{name!r} is not accepted: the codecs that have a name are {accepted}")
        if name in ("identity", "lossless"):
            return cls(lossless=name == "lossless")
        return cls(rules=dict.fromkeys(_NAMED, codec_of("int8_sr" if name == "int8" else name)))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> CodecPolicy:
        """What ``to_dict`` has made.

        Raises:
            ConfigError: for anything else.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"{given!r} is not accepted: from_dict takes a mapping of lossless and rules")
        unknown = set(given) - {"lossless", "rules"}
        if unknown:
            raise ConfigError(f"{sorted(unknown)} of a codec policy is not accepted: it has lossless and rules")
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """The policy in the types that YAML and JSON have; codecs as texts."""
        return {"lossless": self.lossless, "rules": {consumer: text_of(one) for consumer, one in self.rules.items()}}

    @classmethod
    def __get_pydantic_core_schema__(cls, _: object, handler: Any) -> Any:
        annotations = {"lossless": bool, "rules": dict[str, str]}
        return schema_of(cls, annotations, cls().to_dict(), handler.generate_schema)

    def codec(self, text: str) -> Codec | None:
        """The codec that ``text`` stands for, if this has it.

        Raises:
            ConfigError: there is none.
        """
        if (exact := _EXACT.get(text)) is not None:
            return exact if self.lossless else None
        found = codec_of(text)
        return found if found in self.rules.values() else None

    @property
    def rounds(self) -> bool:
        """Whether anything may be rounded."""
        return bool(self.rules)

    def strictest(self, consumers: Iterable[str], meta: TensorMeta) -> Codec | None:
        """What may round a tensor that all of ``consumers`` read; ``None``: nothing, so that it has to be exact.

        It is the codec of one of their rules which each of the others allows too.
        """
        found = {self.rules.get(consumer) for consumer in consumers}
        allowed = [codec for codec in found if codec is not None]
        if len(allowed) < len(found):
            return None
        return next((codec for codec in allowed if all(_is_within(codec, one, meta) for one in allowed)), None)

    def allows(self, consumer: str, codec: Codec, meta: TensorMeta) -> bool:
        """Whether ``consumer`` may be given what ``codec`` has rounded."""
        own = self.rules.get(consumer)
        return own is not None and _is_within(codec, own, meta)


def _is_within(codec: Codec, rule: Codec, meta: TensorMeta) -> bool:
    """Whether ``codec`` gives all that ``rule`` asks for.

    The bounds alone do not say so: they are relative to the largest magnitude of a block, which has less in common with
    its elements the more of them there are; and no bound makes up for a bias.
    """
    return codec == rule or (
        codec.error_bound(meta, 1.0) <= rule.error_bound(meta, 1.0)
        and getattr(codec, "block", 1) <= getattr(rule, "block", 1)
        and codec.unbiased >= rule.unbiased
    )


def _check_consumer(consumer: object) -> None:
    if not isinstance(consumer, str) or consumer not in CONSUMERS:
        accepted = ", ".join(sorted(CONSUMERS))
        raise ConfigError(
            f"the consumer {consumer!r} is not accepted: {did_you_mean(consumer, CONSUMERS)}what it reads is exact "
            f"whatever a policy says. Rules are for {accepted}"
        )


def _check(consumer: str, given: object) -> Codec:
    codec = codec_of(given) if isinstance(given, str) else given
    # Nor one derived of them: it is written by the name of a codec that is another, or none.
    if not isinstance(codec, BF16 | BlockInt | BlockFP8) or type(codec) not in (BF16, BlockInt, BlockFP8):
        raise ConfigError(
            f"{given!r} for {consumer} is not accepted: a rule takes BF16, BlockInt or BlockFP8; what has none is exact"
        )
    if isinstance(codec, BlockInt) and codec.bits == 4 and consumer not in _COARSE:
        raise ConfigError(f"{text_of(codec)} for {consumer} is not accepted: 4 bits do for products and norms alone")
    return codec


def text_of(codec: Codec) -> str:
    """A codec as a text, of one that rounds as ``codec_of`` reads it: such as ``"int8_sr"`` or ``"fp8:32"``."""
    block = getattr(codec, "block", _BLOCK)
    return codec.name if block == _BLOCK else f"{codec.name}:{block}"


def is_compiled(codec: Codec) -> bool:
    """Whether eager code compiles ``codec``: what changes no bit and what is one operator as it is gain nothing."""
    return not (codec.lossless or isinstance(codec, BF16))


def is_lossless(text: str) -> bool:
    """Whether ``text`` stands for a codec that changes no bit."""
    return text in _EXACT


def codec_of(text: str) -> Codec:
    """The codec that rounds which ``text`` stands for.

    Raises:
        ConfigError: for another text.
    """
    name, colon, block_text = text.partition(":")
    codecs: tuple[BF16 | BlockInt | BlockFP8, ...] = (
        *(BlockInt(bits, rounding=rounding) for bits in (8, 4) for rounding in ("rtn", "sr")),
        *(BlockFP8(), BF16()),
    )
    for codec in codecs:
        if codec.name == name:
            if not colon:
                return codec
            if not isinstance(codec, BF16) and block_text.isdecimal():
                return dataclasses.replace(codec, block=int(block_text))
    accepted = ", ".join(f'"{codec.name}"' for codec in codecs)
    raise ConfigError(
        f"the codec {text!r} is not accepted: those that round are {accepted}, of blocks with ':32' behind"
    )


def named_if_any(policy: CodecPolicy) -> str | CodecPolicy:
    """The name of ``policy`` where it has one, so that equal ones are written alike."""
    return next((name for name in CODEC_NAMES if CodecPolicy.named(name) == policy), policy)
