"""What stands around the calls of one module, where no hook would do.

[Note: Not by forward hooks] A forward hook registered with ``always_call=True`` is not called when a
``KeyboardInterrupt`` comes: saved-tensor hooks would stay installed in a notebook whose cell was stopped. What
``module.compile()`` uses to call a module in another way lets a plain ``with`` do it, is left out of copies and pickles
by torch itself, and stands outside of the code of a compiled module, so that no graph breaks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import nn

from eager_offload._torch import module_call, own_call, set_module_call

#: Is given what it stands around, with the arguments by place and those by name, and returns what that returns.
Around: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


class ModuleCall:
    """Is called in place of a module, as long as it is used."""

    def __init__(self, module: nn.Module, around: Around) -> None:
        self._module, self._inner = weakref.ref(module), module_call(module)  # weakly, or a module would hold itself
        self._around: Around | None = around
        self._users = 0
        set_module_call(module, self)

    @classmethod
    def begin(cls, module: nn.Module, around: Around) -> ModuleCall:
        """From now on calls of ``module`` go by ``around``; once, however many users there are of the outermost."""
        call = module_call(module)
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
            set_module_call(module, self._inner)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        module = self._module()
        assert module is not None  # it is what is being called
        call = self._inner or own_call(module)
        return call(*arguments, **named) if self._around is None else self._around(call, arguments, named)
