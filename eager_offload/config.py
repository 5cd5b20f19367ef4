"""The settings, validated when they are given and not when they are first used."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, cast, get_type_hints
from urllib.parse import unquote

from eager_offload.core.schedule import Windows, fourth_largest
from eager_offload.errors import ConfigError, briefly, check_names, checks_names, unknown_name

MIB = 1 << 20

#: Bytes: a number, or a text such as ``"256MiB"``. A config stores the number.
Size: TypeAlias = str | int  # in this order: a command line's text is kept, since its unit may be missing
Auto: TypeAlias = Literal["auto"]
if TYPE_CHECKING:
    PathLike: TypeAlias = str | os.PathLike[str]
else:  # Parsers of command lines read these annotations, and know PathLike without its parameter.
    PathLike = str | os.PathLike

_TIERS = ("auto", "host", "disk")
#: The variable that switches every ``Offload`` on or off, whatever the code says; the prefix of a field's variable.
_SWITCH, _ENV_PREFIX = "EAGER_OFFLOAD", "EAGER_OFFLOAD_"
# As many digits as any size needs: Python refuses to read much longer numbers.
_SIZE_PATTERN = re.compile(r"\s*(\d{1,99}(?:\.\d{1,99})?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE | re.ASCII)
_UNITS = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)},
}
_SIZE_ACCEPTED = 'a whole number of bytes, 0 or more, or a text such as "256MiB" or "1.5GB"'
_SIZE_OR_AUTO = f'"auto" or {_SIZE_ACCEPTED}'
_BUDGET_ACCEPTED = 'None, "auto" or a whole number of bytes, more than 0, or a text such as "20GiB"'
_TIER_BUDGET = 'more than 0 bytes, or "auto" (to switch offloading off, leave the context out)'
#: The fields that hold a size and accept "auto": what they accept, and what they accept in place of 0 (or 0, too).
_SIZES = {
    "max_inflight_bytes": (_SIZE_OR_AUTO, "more than 0 bytes: with no window nothing could ever leave"),
    "prefetch_bytes": (_SIZE_OR_AUTO, None),
    "keep_last_bytes": (_SIZE_OR_AUTO, None),
    "host_budget": (_SIZE_OR_AUTO, _TIER_BUDGET),
    "disk_budget": (_SIZE_OR_AUTO, _TIER_BUDGET),
    "device_budget": (_BUDGET_ACCEPTED, _BUDGET_ACCEPTED),
}
_POLICIES = ("max", "free")
#: Fewer bytes than this are not a budget for a device, but a number without its unit.
_NO_BUDGET = MIB
#: The advice for a model given to an ``Offload``, as one gives it to DDP.
TAKES_NO_MODEL = "an Offload takes no model: write `with offload:` around the forward, or offload.compile(model)"
#: Replaces characters that end or change a literal in source code; ``unquote`` undoes ``%``.
_TO_LITERAL = str.maketrans({'"': "'", "'": "%27", "\\": "%5C", "%": "%25"})
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def parse_size(value: object, field: str = "size", accepted: str = _SIZE_ACCEPTED) -> int:
    """Returns bytes from an int or from a text with a unit (``B``, ``KB`` = 1000, ``KiB`` = 1024, up to ``T``).

    Raises:
        ConfigError: ``value`` is not a size; the text names ``field``, the value and the ``accepted`` ones.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := _SIZE_PATTERN.fullmatch(value)):
        number, unit = match.groups()
        nbytes = Fraction(number) * _UNITS[(unit or "B").upper()]
        if nbytes.denominator == 1:
            return int(nbytes)
    raise _refuse(field, value, accepted)


def size_text(nbytes: int) -> str:
    """Returns a number of bytes for a reader, such as ``"1.5 GiB"``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{nbytes:,} B" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def rate_text(bytes_a_second: float) -> str:
    """Returns a rate for a reader, such as ``"1.50 GB/s"``, in powers of 1,000 as links and disks are sold."""
    return f"{bytes_a_second / 1e9:,.2f} GB/s" if bytes_a_second >= 1e9 else f"{bytes_a_second / 1e6:,.1f} MB/s"


def size_literal(nbytes: int) -> str:
    """Returns the exact number of bytes as a config takes it, such as ``"4MiB"``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return f"{nbytes}B"


def shown(value: object) -> object:
    """Returns a field's value as a user would write it."""
    if isinstance(value, tuple):
        return value[0] if len(value) == 1 else list(value)
    if isinstance(value, Path):
        return str(value)
    return size_literal(value) if type(value) is int else value


def switched_on(default: bool) -> bool:
    """Returns the value of ``EAGER_OFFLOAD`` in the environment, or ``default`` if it is unset or empty.

    Raises:
        ConfigError: it is not 1 or 0, true or false, yes or no, on or off.
    """
    text = os.environ.get(_SWITCH, "").strip().lower()
    if text and text not in _TRUE + _FALSE:
        raise ConfigError(f"{_SWITCH}={text!r} is not accepted: it takes {', '.join(_TRUE + _FALSE)}")
    return text in _TRUE if text else default


def variable_of(field: str) -> str:
    """Returns the environment variable that is read for a field that the code does not give."""
    return _ENV_PREFIX + field.upper()


class OffloadFields(TypedDict, total=False):
    """The fields of :class:`OffloadConfig` as keywords.

    Type checkers and editors cannot derive ``**fields`` from a dataclass. A test holds these names and types equal to
    those of the fields.
    """

    tier: str
    min_bytes: Size
    max_inflight_bytes: Size
    prefetch_bytes: Size
    keep_last_bytes: Size
    pin_memory: bool | Auto
    host_budget: Size
    disk_budget: Size
    disk_path: PathLike | None
    verify: bool
    step_tables: bool | Auto
    device_budget: Size | None
    policy: str
    skip: tuple[str, ...] | Sequence[str] | str
    only: tuple[str, ...] | Sequence[str] | str
    release_freed_memory: bool | Auto
    enabled: bool


class _BesideFields:
    """The attributes of a config that are not fields."""

    __slots__ = ("_written",)
    #: The texts in which sizes were given: errors and warnings repeat them.
    _written: Mapping[str, str]


@checks_names
@dataclass(frozen=True)
class OffloadConfig(_BesideFields):
    """How an :class:`~eager_offload.Offload` behaves. Immutable; sizes are stored as bytes.

    Every size accepts an int (bytes) or a text such as ``"256MiB"``.

    Raises:
        ConfigError: a value is not accepted, two values cannot work together, or a name is not a field.
    """

    tier: str = "auto"
    """The place that saved tensors are offloaded to: ``"host"``, ``"disk"`` or ``"auto"``. With ``"auto"`` an
    accelerator offloads to host memory, and to disk once ``host_budget`` is used up if ``disk_path`` is given. A CPU
    device offloads to disk, but in a process with an accelerator only if ``disk_path`` is given. ``"host"`` on a CPU
    device copies within host memory: it frees nothing and exists for tests."""

    min_bytes: Size = 1 * MIB
    """A saved tensor of fewer bytes stays on its device."""

    max_inflight_bytes: Size = "auto"
    """The in-flight window: bytes on their way out whose source is still held. It bounds the extra device memory in
    forward. A larger storage travels alone. ``"auto"`` is the largest of an 8th of the movable bytes of the last step,
    but at most 256 MiB; a 64th of them; and 4 times the fourth-largest tensor. It is at most a quarter of those bytes,
    and a 16th of the device's memory. In a first step it is 64 MiB, or 4 times the fourth-largest tensor so far. On an
    accelerator this is an upper limit: after two timed steps a matching step takes the smallest window that avoids
    stalls, if the link is not busy. The stats report the window in force."""

    prefetch_bytes: Size = "auto"
    """The prefetch window: bytes reloaded before backward needs them. It bounds the extra device memory in backward.
    A larger storage is prefetched alone; with 0 nothing is prefetched. ``"auto"`` as for ``max_inflight_bytes``."""

    keep_last_bytes: Size = "auto"
    """The last saved bytes, kept because backward needs them first; each thread that runs forwards keeps this many,
    outside the in-flight window. ``"auto"`` is ``prefetch_bytes`` in an unknown step. In a
    step like an earlier one, it is at most that, and only tensors stay that backward needed before they could have left
    and returned. If the earlier step saved at most a quarter more than ``prefetch_bytes``, all of it stays, because
    reloading would take the memory that moving frees."""

    pin_memory: bool | Auto = "auto"
    """Whether host buffers are pinned; ``"auto"`` pins them for an accelerator and not for a CPU device."""

    host_budget: Size = "auto"
    """Most bytes held in host memory. ``"auto"`` is half of the memory that could be taken when it is first needed, by
    the limits of control groups, process and machine. The processes on the node share it: a process may exceed its
    equal share only while no other process lacks part of its own. Once it is used up, it is computed again, and grows
    if more memory is free. Memory is taken only while enough is left for others. A budget in bytes is used as given,
    with one warning if the machine has less."""

    disk_budget: Size = "auto"
    """Most bytes held on disk, for all devices together; ``"auto"`` takes a share of the free space when it is first
    needed. A twentieth of each disk, at most 4 GiB, always stays free."""

    disk_path: PathLike | None = None
    """A directory for the spill file. ``None`` means the first of the temporary, cache and working directories that is
    on a real disk (never in memory) with room. ``~`` and variables such as ``$SCRATCH`` are expanded, and a relative
    path is made absolute, when the config is made."""

    verify: bool = False
    """Whether bytes on disk have checksums, which are checked when they come back."""

    step_tables: bool | Auto = "auto"
    """Whether a step follows the table of an earlier step like it, with each save checked: ``"auto"`` after 3 matching
    steps, or after 1 under ``device_budget`` or ``policy="free"``; ``True`` after 1;
    ``False`` never, so that a budget moves everything movable."""

    device_budget: Size | None = None
    """Bytes of the device that training may take: as little moves as fits. ``"auto"`` is the used memory and nine
    tenths of the free memory when it is first needed; ``None`` sets no bound, and everything movable moves. The peak of
    each forward corrects the next one: see the page on budgets. For a CPU device the budget bounds the memory of the
    process. Compiled code is decided when it is compiled, by the memory that its graphs are estimated to take."""

    policy: str = "max"
    """``"max"`` moves everything movable. ``"free"`` moves only bytes that the link hides, with which compute waits for
    at most 1 % of a step: decided for each kind of step by the times of two (see the page on budgets). Only
    ``device_budget`` bounds the bytes that stay. Compiled code is decided when it is compiled, by estimated times."""

    skip: tuple[str, ...] | Sequence[str] | str = ()
    """Patterns of module names, such as ``["lm_head", "*.norm"]``, whose saved tensors stay; ``*`` stands for any text.
    A pattern that matches no module of the model is an error that lists near names. A plain loop gives the model once
    to :meth:`Offload.skip_in <eager_offload.Offload.skip_in>`. A pattern matches calls ``module(x)``:
    ``module.forward(x)`` is not seen, and a warning names patterns whose modules are never called."""

    only: tuple[str, ...] | Sequence[str] | str = ()
    """Patterns of module names, such as ``["*.mlp"]``, whose saved tensors alone may move, also those of modules inside
    them; all others stay. Otherwise as ``skip``, which may exclude modules inside of those. If several ``Offload``
    contexts are open on a thread, a call that one of them names counts for all."""

    release_freed_memory: bool | Auto = "auto"
    """Whether freed memory is returned to the system while CPU tensors move, so that the process shrinks. This affects
    the whole process, from the first ``Offload`` that is entered to move CPU tensors; the stats report it. ``"auto"``
    returns it unless the environment configures malloc (``MALLOC_*``, ``GLIBC_TUNABLES``) or replaces it; ``True``
    always; ``False`` never. Without effect if the C library is not glibc."""

    enabled: bool = True
    """``False``: the context does nothing. ``EAGER_OFFLOAD=0`` or ``=1`` in the environment overrides it."""

    def __post_init__(self) -> None:
        if not _is_one_of(self.tier, _TIERS):
            raise _refuse("tier", self.tier, " or ".join(f'"{t}"' for t in _TIERS))
        sizes = {field: getattr(self, field) for field in ("min_bytes", *_SIZES)}
        self._store(
            "_written", {field: text for field, text in sizes.items() if isinstance(text, str) and text != "auto"}
        )
        self._store("min_bytes", parse_size(self.min_bytes, "min_bytes"))
        for field, (accepted, instead_of_0) in _SIZES.items():
            value = sizes[field]
            if _is_one_of(value, ("auto",)) or (field == "device_budget" and value is None):
                continue
            self._store(field, parse_size(value, field, accepted))
            if getattr(self, field) == 0 and instead_of_0:
                raise _refuse(field, value, instead_of_0)
        if self.device_budget is not None and self.keep_last_bytes != "auto":
            raise ConfigError(
                f"keep_last_bytes={self.given('keep_last_bytes')!r} does not go with device_budget, which says how "
                "many of the newest bytes stay: leave one of them out"
            )
        if not _is_one_of(self.policy, _POLICIES):
            raise _refuse("policy", self.policy, " or ".join(f'"{one}"' for one in _POLICIES))
        if self.is_free and self.keep_last_bytes != "auto":
            raise ConfigError(
                f'keep_last_bytes={self.given("keep_last_bytes")!r} does not go with policy="free", which decides how '
                "many bytes stay: leave one of them out"
            )
        for field in ("pin_memory", "step_tables", "release_freed_memory"):
            if not (isinstance(value := getattr(self, field), bool) or _is_one_of(value, ("auto",))):
                raise _refuse(field, value, 'True, False or "auto"')
        for field in ("verify", "enabled"):
            if not isinstance(getattr(self, field), bool):
                raise _refuse(field, getattr(self, field), "True or False")
        self._store("disk_path", _directory(self.disk_path))
        for field in ("skip", "only"):
            given: object = getattr(self, field)
            patterns = [given] if isinstance(given, str) else given
            if not isinstance(patterns, Sequence) or not all(isinstance(one, str) and one for one in patterns):
                raise _refuse(field, given, "the names of modules, or patterns of them, as a list of texts")
            self._store(field, tuple(patterns))
        if self.tier == "host" and self.disk_path is not None:
            raise ConfigError(
                f'disk_path={self.shown("disk_path")!r} does not go with tier="host", which never writes to disk: '
                'take tier="auto" or tier="disk", or leave disk_path out'
            )

    @property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        """The patterns of module names that are given, by field."""
        return {name: tuple(found) for name in ("skip", "only") if (found := getattr(self, name))}

    @classmethod
    def from_given(cls, config: object, fields: Mapping[str, Any]) -> OffloadConfig:
        """Returns the config of a new ``Offload``: the user's values, and the ``EAGER_OFFLOAD_<FIELD>`` variables.

        Args:
            config: an :class:`OffloadConfig`, for which no variable is read; a mapping of fields; or ``None``.
            fields: fields that override all of that.

        Raises:
            ConfigError: ``config`` is anything else, besides the errors of :meth:`from_dict` and :meth:`from_env`.
        """
        for value in (config, *(value for name, value in fields.items() if name not in FIELDS)):
            if callable(getattr(value, "forward", None)):  # torch is not imported here
                raise ConfigError(f"Offload({briefly(value)}) is not accepted: {TAKES_NO_MODEL}")
        if isinstance(config, OffloadConfig):
            return cls.from_dict(fields, config)
        if config is None or isinstance(config, Mapping):
            return cls.from_dict({**(config or {}), **fields}, cls.from_env())
        raise ConfigError(
            f"config={briefly(config)} is not accepted: config takes an OffloadConfig, a mapping of its fields, or None"
        )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> OffloadConfig:
        """Returns a config from ``EAGER_OFFLOAD_<FIELD>`` variables, such as ``EAGER_OFFLOAD_MIN_BYTES=4MiB``.

        The patterns of ``skip`` and ``only`` are separated by commas. An unset or empty variable leaves the default.

        Raises:
            ConfigError: a variable with the prefix names no field, or a value is not accepted.
        """
        environ = os.environ if environ is None else environ
        fields: dict[str, Any] = {}
        for name, text in environ.items():
            if name.startswith(_ENV_PREFIX) and text:
                field = name.removeprefix(_ENV_PREFIX).lower()
                if field not in FIELDS:
                    known = [variable_of(one) for one in FIELDS]
                    raise unknown_name(f"variable {name}={text!r}", name, known)
                fields[field] = field_from_text(field, text)
        return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], base: OffloadConfig | None = None) -> OffloadConfig:
        """Returns the config with these fields, as a YAML or JSON file holds them, and those of ``base``, or defaults,
        for all others.

        Raises:
            ConfigError: ``fields`` is not a mapping, a field does not exist, or a value is not accepted.
        """
        if not isinstance(fields, Mapping):
            raise ConfigError(
                f"{briefly(fields)} is not accepted: from_dict takes a mapping of the fields of OffloadConfig"
            )
        check_names(fields, FIELDS)
        base = base or cls()
        return dataclasses.replace(base, **{**base._written, **fields})

    def to_dict(self) -> dict[str, Any]:
        """Returns every field, in the types of YAML and JSON: sizes in bytes, ``disk_path`` as a text."""
        fields: dict[str, Any] = json.loads(json.dumps(vars(self), default=os.fspath))
        return fields

    def changed(self) -> dict[str, Any]:
        """Returns the fields that are not at their defaults."""
        return {name: value for name, value in vars(self).items() if value != getattr(_DEFAULTS, name)}

    def to_text(self) -> str:
        """Returns the fields that are not at their defaults as one line for ``from_text``: equal for equal configs.

        It is JSON in printable ASCII without ``"`` and backslashes, because compilers write it into C++ sources between
        quotes and without escapes.
        """
        given = self.changed()
        # Fields are sorted by name. Patterns within a field keep their order, since the last one counts.
        return json.dumps(dict(sorted(given.items())), default=os.fspath).translate(_TO_LITERAL) if given else ""

    @classmethod
    def __get_pydantic_core_schema__(cls, _: object, handler: Any) -> Any:
        """Returns pydantic's schema for fields of this type.

        A model takes an object of this class, or a mapping for ``from_dict``, whose ``ConfigError`` pydantic reports
        with the place in the file, since it is a ``ValueError``. The model's dump has the result of ``to_dict``, and
        its JSON schema the names, types and defaults of the fields.
        """
        core_schema = importlib.import_module("pydantic_core.core_schema")  # which pydantic has brought
        hints, defaults = get_type_hints(cls), _DEFAULTS.to_dict()
        fields = {}
        for name in FIELDS:
            of_type = handler.generate_schema(hints[name])
            with_default = core_schema.with_default_schema(of_type, default=defaults[name])
            fields[name] = core_schema.typed_dict_field(with_default, required=False)
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls.from_dict(value),
            json_schema_input_schema=core_schema.typed_dict_schema(fields, extra_behavior="forbid"),
            serialization=core_schema.plain_serializer_function_ser_schema(
                cls.to_dict, return_schema=core_schema.dict_schema()
            ),
        )

    @classmethod
    def from_text(cls, text: str) -> OffloadConfig:
        """Returns the config that ``to_text`` wrote."""
        return cls(**json.loads(unquote(text.replace("'", '"')))) if text else cls()

    # For the rest of the library: the same values, each in one type.

    def windows(self, device_bytes: Callable[[], int | None], movable: Sequence[int] = ()) -> Windows:
        """Returns the windows of a device, or of a graph.

        Args:
            device_bytes: returns the memory of the device, as for ``auto_window``; called if a window is ``"auto"``.
            movable: the bytes of each storage that a step could move; without them the windows are of a first step.
        """
        inflight, prefetch = (
            None if one == "auto" else cast(int, one) for one in (self.max_inflight_bytes, self.prefetch_bytes)
        )
        windows = Windows(inflight, prefetch, device_bytes() if None in (inflight, prefetch) else None)
        windows.begin(sum(movable), fourth_largest(movable))
        return windows

    def newest_bytes(self, prefetch_bytes: int) -> int:
        """Returns ``keep_last_bytes`` in bytes; ``prefetch_bytes`` is the prefetch window if that is ``"auto"``."""
        if self.keep_last_bytes != "auto":
            return cast(int, self.keep_last_bytes)
        return prefetch_bytes if self.prefetch_bytes == "auto" else cast(int, self.prefetch_bytes)

    def small_step_bytes(self, prefetch_bytes: int) -> int:
        """Returns the size up to which a known step stays as a whole; 0 if a setting decides how much stays."""
        return self.newest_bytes(prefetch_bytes) * 5 // 4 if self.learns_what_stays else 0

    @property
    def learns_what_stays(self) -> bool:
        """Whether earlier steps decide which of the newest bytes stay, and no setting."""
        return self.keep_last_bytes == "auto" and self.device_budget is None and not self.is_free

    @property
    def is_free(self) -> bool:
        """Whether only bytes move that the link hides."""
        return self.policy == "free"

    def check_unit_of_budget(self, used: Callable[[], int | None], what: str) -> None:
        """Raises if ``device_budget`` seems to lack its unit, such as ``"20"`` for 20 GiB.

        A number is in bytes, and a small one is a valid request for the least memory.

        Args:
            used: returns the bytes that the budget must have room for, or ``None``; called only for a small budget.
            what: the owner of these bytes, for the error: ``"the model alone"``.

        Raises:
            ConfigError: the budget is smaller than these bytes, and has no unit.
        """
        budget, given = self.device_budget, self.written("device_budget")
        if not isinstance(budget, int) or budget >= _NO_BUDGET or given is None or any(map(str.isalpha, given)):
            return
        if (nbytes := used()) is not None and budget < nbytes:
            raise ConfigError(
                f"device_budget={given!r} is not accepted, since that is {budget:,} bytes, and {what} takes "
                f'{size_text(nbytes)}: give it a unit, such as device_budget="{budget}GiB"'
            )

    def given(self, field: str) -> object:
        """Returns the value of a field for errors: a size as the text or the number that the user gave."""
        return self._written.get(field, getattr(self, field))

    def written(self, field: str) -> str | None:
        """Returns the text of the size in ``field``; ``None`` if it was given as a number, or not at all."""
        return self._written.get(field)

    def shown(self, field: str) -> object:
        """Returns the value of a field as a user would write it, a size as the user gave it."""
        return shown(self.given(field))

    def size(self, field: str) -> int:
        """Returns the bytes of a field that holds a size and not ``"auto"``."""
        value = getattr(self, field)
        assert isinstance(value, int), field
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), **{**vars(self), **self._written}), ()

    def _store(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)  # the one way to normalise a frozen dataclass


def _refuse(field: str, given: object, accepted: str) -> ConfigError:
    return ConfigError(f"{field}={briefly(given)} is not accepted: {field} takes {accepted}")


def _is_one_of(value: object, texts: Sequence[str]) -> bool:
    """Returns whether ``value`` is one of ``texts``; a plain ``in`` would compare an array element by element."""
    return isinstance(value, str) and value in texts


def _directory(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise _refuse("disk_path", value, "a directory, or None")
    try:
        return Path(os.path.expanduser(os.path.expandvars(value))).absolute()
    except FileNotFoundError:
        raise ConfigError(
            f"disk_path={value!r} cannot be found: it is relative to the working directory, which is gone. Give an "
            "absolute path"
        ) from None


def field_from_text(field: str, text: str) -> object:
    """Returns the value of a field from the text of a variable or of a command line."""
    if field in ("skip", "only"):
        return [one.strip() for one in text.split(",")]
    if field == "device_budget" and text.lower() == "none":
        return None
    if (
        field in ("verify", "pin_memory", "step_tables", "release_freed_memory", "enabled")
        and text.lower() in _TRUE + _FALSE
    ):
        return text.lower() in _TRUE
    return text


#: The names of the fields of :class:`OffloadConfig`.
FIELDS = tuple(field.name for field in dataclasses.fields(OffloadConfig))

_DEFAULTS = OffloadConfig()
