"""Checkpoints around modules, for a while: what a plan has computed again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from eager_offload._torch import module_call, own_call, set_module_call
from eager_offload.errors import ConfigError
from eager_offload.skipping import plain_name

__all__ = ["checkpointed", "modules_named"]

_lock = threading.Lock()


@contextmanager
def checkpointed(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Has the modules of these names computed again in backward, until it is left.

    Several may be in force at once, in any thread: a module is computed again once, as long as one of them is. Calls
    that have begun keep their checkpoints.

    Raises:
        ConfigError: ``model`` has no module of a name; nothing has changed then.
    """
    calls: list[_Call] = []
    modules = modules_named(model, names)
    try:
        with _lock:
            for module in modules:
                calls.append(_begun(module))
        yield
    finally:
        with _lock:
            for call in calls:
                call.end()


def modules_named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of these names, as a plan has them, in ``model`` or in what it is wrapped in.

    Raises:
        ConfigError: there is none of a name.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={type(model).__name__} is not accepted: apply takes a torch.nn.Module")
    known = {plain_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    plain = [plain_name(name) for name in names]
    for name in plain:
        if name not in known:
            raise ConfigError(
                f"model={type(model).__name__} is not accepted: the plan is for a model with a module {name!r}, which "
                "this one does not have"
            )
    return [known[name] for name in plain]


class _Call:
    """What is called in place of a module; copies and pickles of the module leave it out."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._inner = weakref.ref(module), module_call(module)
        self.users = 0
        set_module_call(module, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        module = self._module()
        assert module is not None  # it is what is being called
        call = self._inner or own_call(module)
        if not self.users:  # something else has been put around it since
            return call(*arguments, **named)
        count, keys = len(arguments), tuple(named)

        def run(*given: Any) -> Any:
            return call(*given[:count], **dict(zip(keys, given[count:], strict=True)))

        # What is given by name too is saved as the rest is, and not just held.
        return checkpoint(run, *arguments, *named.values(), use_reentrant=False, preserve_rng_state=True)

    def end(self) -> None:
        self.users -= 1
        module = self._module()
        if not self.users and module is not None and module_call(module) is self:
            set_module_call(module, self._inner)


def _begun(module: nn.Module) -> _Call:
    call = module_call(module)
    call = call if isinstance(call, _Call) else _Call(module)
    call.users += 1
    return call
