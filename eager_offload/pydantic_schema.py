"""A configuration as a field of a pydantic model. Pydantic is imported when it asks, and not before."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def schema_of(
    cls: type[Any], annotations: Mapping[str, Any], defaults: Mapping[str, Any], generate: Callable[[Any], Any]
) -> Any:
    """Returns pydantic's schema for fields of type ``cls``, a class with ``from_dict`` and ``to_dict``.

    A model takes an object of ``cls``, or a mapping for ``from_dict``, whose ``ConfigError`` pydantic reports with the
    place in the file, since it is a ``ValueError``. The model's dump has the result of ``to_dict``, and its JSON schema
    the names, types and defaults of the fields.

    Args:
        annotations: the types of the fields, by name.
        defaults: the values of ``to_dict`` for fields that are left out.
        generate: makes pydantic's schema of a type; pydantic gives it.
    """
    core_schema = importlib.import_module("pydantic_core.core_schema")  # which pydantic has brought

    def check(value: object) -> object:
        return value if isinstance(value, cls) else cls.from_dict(value)

    def field(name: str) -> Any:
        of_type = core_schema.with_default_schema(generate(annotations[name]), default=defaults[name])
        return core_schema.typed_dict_field(of_type, required=False)

    accepted = core_schema.typed_dict_schema({name: field(name) for name in annotations}, extra_behavior="forbid")
    return core_schema.no_info_plain_validator_function(
        check,
        json_schema_input_schema=accepted,
        serialization=core_schema.plain_serializer_function_ser_schema(
            cls.to_dict, return_schema=core_schema.dict_schema()
        ),
    )
