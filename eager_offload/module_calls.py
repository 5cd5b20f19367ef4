"""What stands around the calls of one module, where no hook would do.

[Note: Not by forward hooks] A forward hook registered with ``always_call=True`` is not called when a
``KeyboardInterrupt`` comes: saved-tensor hooks would stay installed in a notebook whose cell was stopped. What
``module.compile()`` uses to call a module in another way lets a plain ``with`` do it, and stands outside of the code of
a compiled module, so that no graph breaks.

[Note: copies of modules that are called in another way]
A copy is called in its own way. ``nn.Module`` leaves what is called in its place out of copies and pickles; classes
that copy their attributes by themselves do not: ``DistributedDataParallel``, recurrent layers, parametrized modules. So
a copy or a pickle of a ``ModuleCall`` is ``None``, which is what a module has there that is called in its own way. If
attributes are copied as they are, the copy has the ``ModuleCall`` of the original, which looks for whom it is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from eager_offload._torch import module_call, module_called_by, own_call, set_module_call

#: Is given what it stands around, with the arguments by place and those by name, and returns what that returns.
Around: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


class ModuleCall:
    """Is called in place of a module, as long as it is used."""

    def __init__(self, module: nn.Module, around: Around) -> None:
        self._module, self._inner = weakref.ref(module), _call_of(module)  # weakly, or a module would hold itself
        self._around: Around | None = around
        self._users = 0
        #: Whether the module has been called. Not known of calls that a compiler has traced.
        self.has_run = False
        set_module_call(module, self)

    @classmethod
    def begin(cls, module: nn.Module, around: Around) -> ModuleCall:
        """From now on calls of ``module`` go by ``around``; once, however many users there are of the outermost."""
        call = _call_of(module)
        call = call if isinstance(call, cls) and call._around is around else cls(module, around)
        call._users += 1
        return call

    def end(self) -> None:
        """One user less. After the last one, calls go as before, even where another has put its own around since."""
        self._users -= 1
        if self._users > 0:
            return
        self._around, module = None, self._module()
        if module is not None and module_call(module) is self:
            set_module_call(module, _call_of(module))

    @property
    def is_over(self) -> bool:
        """Whether it has no users any more, or what it was for has gone without a word."""
        is_over = getattr(self._around, "is_over", None)
        return self._around is None or (is_over is not None and is_over())

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        module = self._module()
        if not torch.compiler.is_compiling():  # a compiler has no frames to look at
            called = module_called_by(self)
            if called is not None and called is not module:
                return own_call(called)(*arguments, **named)
            self.has_run = True
        assert module is not None  # it is what is being called
        call = self._inner or own_call(module)
        return call(*arguments, **named) if self._around is None else self._around(call, arguments, named)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _call_of(module: nn.Module) -> Callable[..., Any] | None:
    """What is called for ``module`` in place of its own way, without what is over or is of the module that this one is
    a copy of."""
    call = _living(module_call(module))
    return None if isinstance(call, ModuleCall) and call._module() is not module else call


def _living(call: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """What there is of ``call`` and what it stands around, without what is over."""
    if not isinstance(call, ModuleCall):
        return call
    call._inner = _living(call._inner)
    return call._inner if call.is_over else call
