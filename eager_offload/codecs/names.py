"""The codecs that have a name, and which of them packs what: by patterns of the names of modules."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from eager_offload.codecs.base import Codec
from eager_offload.codecs.exact import BitMask, Narrow
from eager_offload.codecs.rounded import BF16, BlockFP8, BlockInt
from eager_offload.errors import ConfigError

IDENTITY, LOSSLESS = "identity", "lossless"
#: The codecs that round, by name.
ROUNDING: dict[str, Codec] = {one.name: one for one in (BF16(), BlockInt(), BlockFP8())}
#: What a user may name. Those that round pack what has to be exact as ``"lossless"`` does.
CODEC_NAMES = (IDENTITY, LOSSLESS, *ROUNDING)
#: The codecs that pack whole storages, by the names that step tables have for them.
_PACKING: dict[str, Codec] = {one.name: one for one in (Narrow(), BitMask())} | ROUNDING

#: Names of codecs that are gone: of 4 bits, with a way of rounding, or with a size of blocks.
_GONE = re.compile(r"int4|stochastic|sr|rtn|(int4|int8|fp8|bf16)(_sr|_rtn|:\w*)+")

_INSTEAD = (
    ". Rules for what reads in backward, 4 bits, sizes of blocks and stochastic rounding are gone: name the modules in "
    'which may be rounded, to nearest, codec={"*": "lossless", "*.mlp": "fp8"}, or write '
    '`with eager_offload.codec("fp8"):` around code'
)


class CodecRules(Mapping[str, str]):
    """Names of codecs by patterns of the names of modules; immutable, and in the order in which they were given.

    A module runs in the modules around it, so of all patterns that match any of these the last one counts. A pattern
    of ``*`` alone matches whatever is saved, in a module or not.

    Args:
        names: ``{"*": "lossless", "*.mlp": "fp8"}``, say.

    Raises:
        ConfigError: it is empty, or has anything but names of codecs.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        if not names:
            raise ConfigError("codec={} is not accepted: a mapping has to name a codec for some pattern")
        given: list[tuple[Any, Any]] = list(names.items())
        for pattern, name in given:
            if not isinstance(pattern, str) or not pattern:
                raise ConfigError(f"codec={{{pattern!r}: ...}} is not accepted: patterns of module names are texts")
            check_name(name, f"codec={{{pattern!r}: {name!r}}}")
        self._names = dict(names)
        #: Equal for equal ones.
        self.text = repr(self._names)
        self._everywhere = [pattern for pattern in names if fnmatchcase("", pattern)]
        #: What counts in no module that a pattern matches: asked for each save.
        self.elsewhere = self.name_in(())

    def __getitem__(self, pattern: str) -> str:
        return self._names[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and [*self.items()] == [*other.items()]  # in order

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return self.text

    @property
    def of_modules(self) -> tuple[str, ...]:
        """The patterns that need the names of a model's modules."""
        return tuple(pattern for pattern in self._names if pattern not in self._everywhere)

    def name_in(self, patterns: Container[str]) -> str:
        """Returns the name of the codec for what is saved in modules that ``patterns`` match."""
        for pattern, name in reversed(self._names.items()):
            if pattern in patterns or pattern in self._everywhere:
                return name
        return IDENTITY

    def codec(self, text: str) -> Codec | None:
        """Returns the codec that a captured step calls ``text``."""
        return _PACKING.get(text)


def check_name(name: object, given: str, accepts: str = "the codecs are", others: str = "") -> None:
    """Raises ``ConfigError`` where no codec has that ``name``.

    Args:
        given: what the error repeats.
        accepts: what stands before the names.
        others: what is accepted beside names.
    """
    if isinstance(name, str) and name in CODEC_NAMES:
        return
    accepted = ", ".join(f'"{one}"' for one in CODEC_NAMES)
    gone = _INSTEAD if _is_gone(name) else ""
    raise ConfigError(f"{given} is not accepted: {accepts} {accepted}{others}{gone}")


def _is_gone(name: object) -> bool:
    """Whether ``name`` is one of earlier codecs, or stands where they had rules, switches and codecs in place of it."""
    if isinstance(name, str):
        return _GONE.fullmatch(name) is not None
    return isinstance(name, Mapping | bool | BF16 | BlockInt | BlockFP8)


def exact_name(name: str) -> str:
    """Returns the name for bytes that nothing may round where ``name`` is in force."""
    return LOSSLESS if name in ROUNDING else name


def shared_name(names: Iterable[str]) -> str:
    """Returns the name for bytes that are saved under all of ``names``: where they differ nothing is rounded."""
    found = set(names)
    if len(found) == 1:
        return found.pop()
    return IDENTITY if not found or IDENTITY in found else LOSSLESS


def is_compiled(codec: Codec) -> bool:
    """Whether eager code compiles ``codec``: what changes no bit and what is one operator as it is gain nothing."""
    return not (codec.lossless or isinstance(codec, BF16))
