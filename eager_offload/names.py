"""Errors for mistyped names: each has the nearest accepted name, then all of them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from eager_offload.errors import ConfigError

_Class = TypeVar("_Class", bound=type[Any])


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns a question about the nearest of ``known``, with a space behind; an empty text if none is near."""
    by_letters = {one.lower(): one for one in known}
    near = difflib.get_close_matches(str(name).lower(), by_letters, 1)
    return f"did you mean {by_letters[near[0]]}? " if near else ""


def briefly(value: object) -> str:
    """Returns the ``repr`` of a value for an error; the type alone where that is not one short line, as of a model."""
    text = repr(value)
    is_short = isinstance(value, str) or (len(text) <= 200 and "\n" not in text)
    return text if is_short else f"<{type(value).__name__}>"


def unknown_name(what: str, name: object, known: Sequence[str], others: str = "") -> ConfigError:
    """Returns the error for a name that is not in ``known``.

    Args:
        what: the kind and the name, as in ``"field 'min_byts'"``.
        others: values that are accepted beside ``known``, as the end of the sentence.
    """
    question = did_you_mean(name, known)
    accepted = "Accepted" if question else "accepted"
    return ConfigError(f"unknown {what}: {question}{accepted} are {', '.join(known)}{others}")


def check_names(given: Iterable[object], known: Sequence[str]) -> None:
    """Raises ``ConfigError`` if a name of a field is not in ``known``."""
    for name in given:
        if name not in known:
            raise unknown_name(f"field {name!r}", name, known)


def checks_names(cls: _Class) -> _Class:
    """Makes the constructor of a dataclass raise ``ConfigError``, and not ``TypeError``, for an unknown field.

    Files, command lines and ``dataclasses.replace`` call ``cls(**mapping)``.
    """
    known = [field.name for field in dataclasses.fields(cls)]
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: object, *values: object, **fields: object) -> None:
        check_names(fields, known)
        init(self, *values, **fields)

    cls.__init__ = checked
    return cls
