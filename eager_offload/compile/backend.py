"""``torch.compile(model, backend="eager_offload", options={...})``: Inductor, with offloading inside of its graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch.fx import GraphModule

from eager_offload._torch import compile_fx, inductor_options
from eager_offload.compile.inductor import with_passes
from eager_offload.config import OffloadConfig
from eager_offload.errors import ConfigError

__all__ = ["eager_offload"]

_FIELDS = frozenset(field.name for field in dataclasses.fields(OffloadConfig))


def eager_offload(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles ``graph`` with Inductor and moves what its forward saves for its backward.

    The innermost ``with offload:`` of an equal configuration that a call runs in serves it and counts; outside of one
    it is ``Offload.serving(**options)``.

    Args:
        options: fields of :class:`OffloadConfig`, and options of Inductor.
        mode: not accepted; Inductor's modes are sets of options.

    Raises:
        ConfigError: an option that neither knows, a value that is not accepted, or a ``mode``.
    """
    if mode is not None:
        raise ConfigError(
            f'mode={mode!r} is not accepted by backend="eager_offload": pass what it stands for as options '
            f"(torch._inductor.list_mode_options({mode!r}) lists it), or leave the backend out and call the compiled "
            "model inside of `with offload:`"
        )
    given = dict(options or {})
    config = OffloadConfig.from_fields({name: value for name, value in given.items() if name in _FIELDS})
    patches = {name.replace("-", "_"): value for name, value in given.items() if name not in _FIELDS}
    unknown = sorted(patches.keys() - inductor_options())
    if unknown:
        raise ConfigError(
            f'unknown option {unknown[0]!r} of backend="eager_offload": accepted are {", ".join(sorted(_FIELDS))}, '
            "and the options of Inductor that torch._inductor.list_options() lists"
        )
    return cast(
        Callable[..., Any], compile_fx(graph, example_inputs, config_patches=with_passes(patches, config.to_text()))
    )
