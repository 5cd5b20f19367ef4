"""Names that a user may mistype: the error has the nearest that exists, and then all."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from eager_offload.errors import ConfigError

_Class = TypeVar("_Class", bound=type[Any])
_NONE: Mapping[str, str] = {}


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns a question for the nearest of ``known``, with a space behind; an empty text where none is near."""
    by_letters = {one.lower(): one for one in known}
    near = difflib.get_close_matches(str(name).lower(), by_letters, 1)
    return f"did you mean {by_letters[near[0]]}? " if near else ""


def unknown_name(
    what: str, name: object, known: Sequence[str], others: str = "", instead: str | None = None
) -> ConfigError:
    """Returns the error for a name that is none of ``known``.

    Args:
        what: the name as the user has written it, with what it should have been: ``"field 'min_byts'"``.
        others: what is accepted beside ``known``.
        instead: what to use in place of a name that was known, and is gone.
    """
    if instead is not None:
        return ConfigError(f"the {what} is gone: {instead}")
    question = did_you_mean(name, known)
    accepted = "Accepted" if question else "accepted"
    return ConfigError(f"unknown {what}: {question}{accepted} are {', '.join(known)}{others}")


def check_names(given: Iterable[object], known: Sequence[str], gone: Mapping[str, str] = _NONE) -> None:
    """Looks at names of fields.

    Args:
        gone: names that were fields, and what to use in their place.

    Raises:
        ConfigError: one of them is none of ``known``.
    """
    for name in given:
        if name not in known:
            raise unknown_name(f"field {name!r}", name, known, instead=gone.get(str(name)))


def checks_names(gone: Mapping[str, str] = _NONE) -> Callable[[_Class], _Class]:
    """Has the constructor of a dataclass raise ``ConfigError``, and not ``TypeError``, for a name that is not a field.

    A mapping from a file arrives there as ``cls(**mapping)``, from command lines and from ``dataclasses.replace`` too.

    Args:
        gone: as for ``check_names``.
    """

    def decorated(cls: _Class) -> _Class:
        known = [field.name for field in dataclasses.fields(cls)]
        init = cls.__init__

        @functools.wraps(init)
        def checked(self: object, *values: object, **fields: object) -> None:
            check_names(fields, known, gone)
            init(self, *values, **fields)

        cls.__init__ = checked
        return cls

    return decorated
