"""``torch.compile(model, backend="eager_offload", options={...})``: Inductor, with offloading in its graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch.fx import GraphModule

from eager_offload import offload as _offload  # noqa: F401  # sets contexts.process.make_owner
from eager_offload.compile.insert import compiling_for
from eager_offload.compile.order import with_pass
from eager_offload.config import FIELDS, OffloadConfig, switched_on
from eager_offload.errors import ConfigError, unknown_name
from eager_offload.torch_private.inductor import compile_fx, inductor_config


def eager_offload(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles ``graph`` with Inductor and offloads the tensors that its forward saves for its backward.

    A call runs under the innermost ``with offload:`` of an equal configuration, whose stats count it; outside of one it
    runs under ``Offload.serving(**options)``.

    Args:
        options: fields of :class:`OffloadConfig`, and options of Inductor. A missing field is read from
            ``EAGER_OFFLOAD_<FIELD>``; with ``EAGER_OFFLOAD=0`` nothing is offloaded.
        mode: not accepted; Inductor's modes are sets of options.

    Raises:
        ConfigError: an unknown option, a value that is not accepted, or a ``mode``.
    """
    if mode is not None:
        raise ConfigError(
            f'mode={mode!r} is not accepted by backend="eager_offload": pass the options that it stands for '
            f"(torch._inductor.list_mode_options({mode!r}) lists them), or leave the backend out and call the compiled "
            "model inside of `with offload:`"
        )
    given = dict(options or {})
    config = OffloadConfig.from_given(None, {name: value for name, value in given.items() if name in FIELDS})
    for field in config.patterns:
        raise ConfigError(
            f'{field} is not accepted by backend="eager_offload", which sees graphs and no names: leave the backend '
            "and take offload.compile(model)"
        )
    patches = {name.replace("-", "_"): value for name, value in given.items() if name not in FIELDS}
    unknown = sorted(patches.keys() - inductor_config.get_config_copy().keys())
    if unknown:
        others = ", and the options of Inductor that torch._inductor.list_options() lists"
        raise unknown_name(f'option {unknown[0]!r} of backend="eager_offload"', unknown[0], sorted(FIELDS), others)
    if not switched_on(config.enabled):
        return cast(Callable[..., Any], compile_fx(graph, example_inputs, config_patches=patches))
    text = config.to_text()
    with compiling_for(text):
        return cast(Callable[..., Any], compile_fx(graph, example_inputs, config_patches=with_pass(patches, text)))
