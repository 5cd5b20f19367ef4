"""The private names of torch that the library uses, by subject. No module outside of this package imports one."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils.checkpoint

#: Names that every torch from 2.11 to 2.15 has, in each build. Any other name is probed where it is used, and there is
#: a way without it.
NAMES = (
    "torch:_C._autograd._get_current_graph_task_keep_graph",
    "torch:_C._autograd._saved_tensors_hooks_disable",
    "torch:_C._autograd._saved_tensors_hooks_enable",
    "torch:_C._autograd._top_saved_tensors_default_hooks",
    "torch:_C._current_autograd_node",
    "torch:_C._current_graph_task_id",
    "torch:_C._get_dispatch_stack_at",
    "torch:_C._len_torch_dispatch_stack",
    "torch:_C._len_torch_function_stack",
    "torch:_C._SetExcludeDispatchKeyGuard",
    "torch:_neg_view",
    "torch:_ops.HigherOrderOperator",
    "torch:_ops.OpOverload",
    "torch:autograd._engine_run_backward",
    "torch:autograd._get_sequence_nr",
    "torch:autograd.graph._CloneArgBeforeMutateMode",
    "torch:autograd.graph._get_sid",
    "torch:autograd.profiler._is_profiler_enabled",
    "torch:autograd.Variable._execution_engine",
    "torch:cuda._compile_kernel",
    "torch:jit._recursive.ignored_attributes",
    "torch:nn.Module._call_impl",
    "torch:nn.Module._compiled_call_impl",
    "torch:ops.aten._scaled_dot_product_attention_math",
    "torch:ops.aten._scaled_dot_product_efficient_attention",
    "torch:ops.aten._scaled_dot_product_flash_attention",
    "torch:Tensor._base",
    "torch:Tensor._make_subclass",
    "torch:Tensor._use_count",
    "torch:Tensor._version",
    "torch:utils._python_dispatch._disable_current_modes",
    "torch:utils._pytree",
    "torch:utils.checkpoint._CachedTorchDispatchMode",
    "torch:utils.checkpoint._CachingTorchDispatchMode",
)

_OLDEST = (2, 11)


def require_torch(version: str = torch.__version__, names: Iterable[str] = NAMES) -> None:
    """Raises ``ImportError`` if torch is too old, or lacks one of ``names``."""
    if release_of(version) < _OLDEST:
        raise ImportError(
            f"eager_offload needs torch {_OLDEST[0]}.{_OLDEST[1]} or newer, but {version} is installed: upgrade torch"
        )
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"eager_offload needs {name.replace(':', '.')}, which torch 2.11 to 2.15 have and {version} has not: "
                "install one of those"
            ) from error


def release_of(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


require_torch()


class Patch:
    """A replacement for an attribute of torch, while it is put on.

    Args:
        owner: the module, the class or the object with the attribute, which may come from the object's class.
        around: makes the replacement from the present value: torch's own, or that of another library.
    """

    def __init__(self, owner: object, name: str, around: Callable[[Any], object]) -> None:
        self._owner, self._name, self._around = owner, name, around
        #: Made once: the replacement may refer to itself, so each further one would be garbage in a cycle.
        self._ours: object = None
        self._theirs: object = None
        #: Whether the attribute is the owner's own, and not inherited from its class.
        self._is_own = True
        #: The replacement, while it is put on.
        self.active: object = None

    def put_on(self) -> None:
        """Puts the replacement in place."""
        current = getattr(self._owner, self._name)
        if current is not self._ours and (self._ours is None or current is not self._theirs):
            self._theirs, self._ours = current, self._around(current)
            self._is_own = self._name in vars(self._owner)
        self.active = self._ours
        setattr(self._owner, self._name, self._ours)

    def take_off(self) -> None:
        """Restores the attribute. If another library has wrapped the replacement, its wrapper stays and keeps calling
        it."""
        self.active = None
        if getattr(self._owner, self._name) is not self._ours:
            return
        if self._is_own:
            setattr(self._owner, self._name, self._theirs)
        else:
            delattr(self._owner, self._name)


def if_imported(module: str, name: str) -> Any:
    """Returns a name of a module; ``None`` if the module is not imported, so that no object of the kind can exist."""
    return getattr(sys.modules.get(module), name, None)
