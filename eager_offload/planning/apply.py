"""Checkpoints around modules, for a while: what a plan has computed again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from eager_offload.errors import ConfigError
from eager_offload.matched_modules import INNER_MODULES, modules_by_name
from eager_offload.module_calls import ModuleCall

_lock = threading.Lock()


@contextmanager
def checkpointed(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Has the modules of these names computed again in backward, until it is left.

    Several may be in force at once, in any thread: a module is computed again once, as long as one of them is. Calls
    that have begun keep their checkpoints.

    Raises:
        ConfigError: ``model`` has no module of a name; nothing has changed then.
    """
    calls: list[ModuleCall] = []
    modules = modules_named(model, names)
    try:
        with _lock:
            for module in modules:
                calls.append(ModuleCall.begin(module, _again))
        yield
    finally:
        with _lock:
            for call in calls:
                call.end()


def modules_named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of these names, in ``model`` or in what it is wrapped in; raises ``ConfigError`` where one is
    missing."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={type(model).__name__} is not accepted: apply takes a torch.nn.Module")
    # Names are those in the model that was planned, which may have been wrapped in another way, by whatever class.
    named = dict(model.named_modules(remove_duplicate=False))
    known = {_without_wrappers(name): module for name, module in named.items()} | modules_by_name(model) | named
    found = [name if name in known else _without_wrappers(name) for name in names]
    for name in found:
        if name not in known:
            raise ConfigError(
                f"model={type(model).__name__} is not accepted: the plan is for a model with a module {name!r}, which "
                "this one does not have"
            )
    return [known[name] for name in found]


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in INNER_MODULES)


def _again(call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    count, keys = len(arguments), tuple(named)

    def run(*given: Any) -> Any:
        return call(*given[:count], **dict(zip(keys, given[count:], strict=True)))

    # What is given by name too is saved as the rest is, and not just held.
    return checkpoint(run, *arguments, *named.values(), use_reentrant=False, preserve_rng_state=True)
