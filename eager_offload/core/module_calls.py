"""A function around the calls of one module.

[Note: Not by forward hooks] A forward hook registered with ``always_call=True`` is not called after a
``KeyboardInterrupt``: saved-tensor hooks would stay installed in a notebook whose cell was stopped. The attribute with
which ``module.compile()`` replaces a module's call allows a plain ``with``, and its value stands outside of the code of
a compiled module, so that no graph breaks.

[Note: copies of modules whose call is replaced]
A copy has its own call. ``nn.Module`` leaves the attribute out of copies and pickles; classes that copy their
attributes by themselves do not: ``DistributedDataParallel``, recurrent layers, parametrized modules. So a copy or a
pickle of a ``ModuleCall`` is ``None``, the value of a module whose call is not replaced. If attributes are copied as
they are, the copy has the ``ModuleCall`` of the original, which looks for the module that it is called for.

[Note: models that are written down]
``torch.export`` and ``torch.jit.trace`` call the module and write down what runs: they get the call inside of ours.
``torch.jit.script`` reads the attributes of a module and not its call; ``set_module_call`` has it pass over this one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from eager_offload.tiers.forking import Living
from eager_offload.torch_private import Patch
from eager_offload.torch_private.calls import (
    is_jit_tracing,
    module_call,
    module_called_by,
    own_call,
    replaced_calls_in_graphs,
    set_module_call,
)
from eager_offload.torch_private.inductor import compiler_is_loaded

#: Is given the inner call, the positional arguments and the named ones; returns the result of the call.
Around: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


class ModuleCall:
    """The call of a module, while it has users."""

    def __init__(self, module: nn.Module, around: Around) -> None:
        self._module, self._inner = weakref.ref(module), _call_of(module)  # a strong reference would be a cycle
        self._around: Around | None = around
        self._users = 0
        #: Whether the module has been called; calls that a compiler has traced are not seen.
        self.has_run = False
        set_module_call(module, self)

    @classmethod
    def begin(cls, module: nn.Module, around: Around) -> ModuleCall:
        """Puts ``around`` around the calls of ``module`` from now on, once for all users of the same ``around``."""
        call = _call_of(module)
        call = call if isinstance(call, cls) and call._around is around else cls(module, around)
        call._users += 1
        _in_place.add(call)
        _compiling.put_on()
        return call

    def end(self) -> None:
        """Ends one use. After the last one, calls go as before, even if another has put its own around them since."""
        self._users -= 1
        if self._users > 0:
            return
        self._around, module = None, self._module()
        if module is not None and module_call(module) is self:
            set_module_call(module, _call_of(module))
        _in_place.discard(self)
        if not _in_place:
            _compiling.take_off()
            replaced_calls_in_graphs.take_off()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        module, is_written_down = self._module(), torch.compiler.is_exporting()
        if not torch.compiler.is_dynamo_compiling():  # a call that Dynamo traces has no frames to look at
            called = module_called_by(self)
            if called is not None and called is not module:
                return own_call(called)(*arguments, **named)
            self.has_run = True
            is_written_down = is_written_down or is_jit_tracing()
        assert module is not None  # it is being called
        call, around = self._inner or own_call(module), self._around
        return call(*arguments, **named) if around is None or is_written_down else around(call, arguments, named)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def show_to_compilers() -> None:
    """Has graphs that are traced from now on contain the calls that are in place."""
    if _in_place and compiler_is_loaded():
        replaced_calls_in_graphs.put_on()


def _call_of(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the replaced call of ``module``, without calls that are over or belong to the original of a copy."""
    call = _living(module_call(module))
    return None if isinstance(call, ModuleCall) and call._module() is not module else call


def _living(call: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Returns ``call`` without the calls in its chain that are over."""
    if not isinstance(call, ModuleCall):
        return call
    call._inner = _living(call._inner)
    return call._inner if call._around is None else call


def _beneath(compile: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(compile)
    def around(module: nn.Module, *arguments: Any, **named: Any) -> None:
        outermost = call = _call_of(module)
        compile(module, *arguments, **named)
        while isinstance(call, ModuleCall):
            if not isinstance(call._inner, ModuleCall):
                call._inner = module_call(module)
                set_module_call(module, outermost)
                return
            call = call._inner

    return around


#: The calls that stand around those of modules.
_in_place: Living[ModuleCall] = Living()
#: ``module.compile()`` replaces the call of a module: what it makes goes beneath ours, which would be gone otherwise.
_compiling = Patch(nn.Module, "compile", _beneath)
