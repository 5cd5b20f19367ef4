"""Shared by the integrations: the user's configuration, and calls of modules that run in ``with offload``.

Frameworks without a hook around forward need the latter.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import update_wrapper
from typing import Any, TypeAlias

import torch
from torch import nn

from eager_offload import ConfigError, Offload, OffloadConfig, OffloadError, contexts
from eager_offload.config import FIELDS
from eager_offload.core.modules import ModuleCall, show_to_compilers
from eager_offload.errors import FORKED, warn, warn_once
from eager_offload.integrations.first_batch import FirstBatch
from eager_offload.observe.memory import watch
from eager_offload.torch_private import Patch
from eager_offload.torch_private.autograd import current_autograd_node, top_pack_hook
from eager_offload.torch_private.calls import module_call
from eager_offload.torch_private.fsdp import wrapped_modules
from eager_offload.torch_private.inductor import run_uncompiled
from eager_offload.torch_private.memory import version_of

Given: TypeAlias = Offload | OffloadConfig | Mapping[str, Any] | None


def missing(extra: str, error: Exception) -> ImportError:
    """Returns the error to raise if the framework of ``eager_offload.integrations.<extra>`` cannot be imported."""
    return ImportError(
        f"eager_offload.integrations.{extra} needs {extra}, which cannot be imported here ({error}): "
        f"pip install '.[{extra}]' in a checkout of eager_offload",
        name=getattr(error, "name", None),
    )


def put_everywhere(package: str, name: str, old: object, new: object) -> None:
    """Replaces ``old`` by ``new`` in every imported module of ``package`` that has it as ``name``."""
    for module, inside in list(sys.modules.items()):
        if module.startswith(f"{package}.") and vars(inside).get(name) is old:
            setattr(inside, name, new)


def offload_from(given: Given, fields: Mapping[str, Any] | None = None) -> Offload:
    """Returns the :class:`~eager_offload.Offload` for an integration.

    Args:
        given: an ``Offload``, returned unchanged; an ``OffloadConfig``; or a mapping of its fields or ``None``, with
            ``EAGER_OFFLOAD_*`` for fields that are absent.
        fields: fields that override ``given``; fields that are ``None`` are ignored.

    Raises:
        ConfigError: for another type, an unknown field, or fields other than ``enabled`` together with an ``Offload``.
    """
    fields = {name: value for name, value in (fields or {}).items() if value is not None or name not in FIELDS}
    if not isinstance(given, Offload):
        made = Offload(OffloadConfig.from_given(given, fields))
        made.no_effect.note_use()  # training may never begin
        return made
    given.no_effect.note_use()
    if others := fields.keys() - {"enabled"}:
        raise ConfigError(
            f"{', '.join(sorted(others))} beside an Offload is not accepted: it has its configuration already. Give "
            "them to Offload(...), or leave them out here"
        )
    return given if fields.get("enabled", True) else Offload(given.config, **fields)


#: Steps without saved tensors before a warning; and backwards before unmatched patterns are reported, by which each
#: model of the script has been called.
_LOOKED_AT = 3


def is_training(module: nn.Module) -> bool:
    """Returns whether a backward may follow a forward of ``module``."""
    return module.training and torch.is_grad_enabled()


_NOT_TRACED = (
    "eager_offload enters its context around calls of this module, which a graph cannot contain. Use "
    "module.compile(...), which may have fullgraph=True, or torch.compile without fullgraph"
)


class OffloadedCalls:
    """Runs calls of ``module`` in ``with offload`` until :meth:`remove`.

    Warns once, with the reason, after three backwards that gave parameters of ``module`` a gradient while ``offload``
    saw no saved tensor.

    Args:
        module: the model's outermost wrapper, as ``DistributedDataParallel``, ``fully_shard`` or ``torch.compile``
            returned it. It must not be inside of a module compiled with ``fullgraph=True``.
        offload: the context to enter.
        when: returns whether to offload a call; called only if :func:`is_training` holds.
        instead: the end of the warning: another way to offload.
        first: plans the first of these calls.

    Raises:
        ConfigError: for ``torch.nn.DataParallel`` on several devices, which runs forward in threads that the context
            does not reach.
    """

    def __init__(
        self,
        module: nn.Module,
        offload: Offload,
        when: Callable[[nn.Module], bool] = is_training,
        instead: str = "enter the Offload around the forward",
        first: FirstBatch | None = None,
    ) -> None:
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise ConfigError(
                "model=DataParallel is not accepted: it runs forward in its own threads, in which nothing can be "
                "offloaded. Start one process per device (`torchrun`, `accelerate launch`), or show the process only "
                "one device (CUDA_VISIBLE_DEVICES)"
            )
        self._module = called = weakref.ref(module)  # `module` holds `around`, which must not hold `module`
        self._offload, self._instead, self._first = offload, instead, first
        self.is_first = first is not None
        self._saved_before = offload.stats().saved_tensors
        self._unseen = 0  # steps without saved tensors
        self._is_offloaded = self._is_in_eval_mode = False
        process = os.getpid()

        def offloaded(call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
            module = called()
            assert module is not None  # its call is running
            if os.getpid() != process:
                warn_once("forked", FORKED.format(where="after its parent had prepared this model"))
                return call(*arguments, **named)
            if not when(module):
                return call(*arguments, **named)
            if first is not None:
                first.begin(module, arguments, named)
            self._is_offloaded = True
            with offload:
                return call(*arguments, **named)

        # torch.compile traces the module's forward, but not the `with` around it.
        unseen = torch.compiler.disable(offloaded, recursive=False, reason=_NOT_TRACED)  # type: ignore[no-untyped-call]
        for method in (Offload.__enter__, Offload.__exit__, FirstBatch.begin):
            run_uncompiled(method)

        def around(call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
            module = called()
            if module is None or not is_training(module):
                if not torch.compiler.is_compiling():  # a graph cannot contain this side effect
                    self._is_in_eval_mode |= torch.is_grad_enabled()
                return call(*arguments, **named)
            return unseen(call, arguments, named)

        # Weak: the ModuleCall holds the call that `module.compile()` made, and that call holds the module, which would
        # never be freed.
        self._call = weakref.ref(ModuleCall.begin(module, around))
        show_to_compilers()
        watch.put_on()
        watch.watching.add(self)

    def remove(self) -> None:
        """Restores the module's calls. Idempotent."""
        watch.watching.discard(self)
        if (call := self._call()) is not None:
            call.end()
        if self._first is not None:
            self._first.end()

    # -- steps without saved tensors ------------------------------------------------------------------------------

    def before_backward(self) -> list[tuple[int, int]]:
        """Returns the identities and versions of the parameters' gradients, for :meth:`after_backward`."""
        module = self._module()
        gradients = [] if module is None else [one.grad for one in module.parameters()]
        return [(id(one), version_of(one)) for one in gradients if one is not None]

    def after_backward(self, before: list[tuple[int, int]]) -> None:
        """Counts a training step without saved tensors. Stops watching after the first step that had any."""
        if self._is_offloaded or self._offload.stats().saved_tensors != self._saved_before:
            watch.watching.discard(self)
            self._unseen = 0
        elif self.before_backward() != before:
            self._unseen += 1
            if self._unseen == _LOOKED_AT:
                watch.watching.discard(self)
                self.warn_if_unseen()

    def warn_if_unseen(self) -> None:
        """Warns, with the reason, if the module has trained without saved tensors."""
        if self._unseen and (module := self._module()) is not None:
            self._offload.no_effect.warn_if_nothing_moved(because=f"{self._why(module)}, or {self._instead}")

    def _why(self, module: nn.Module) -> str:
        kind, call = type(module), self._call()
        if call is None or not (call.has_run or module_call(module) is call):
            return (
                f"the calls of this {kind.__name__} were replaced after it was prepared, as model.compile() does: do "
                "that before"
            )
        if self._is_in_eval_mode:
            return (
                f"this {kind.__name__} is trained in eval mode, in which nothing offloads: call train() on it, and "
                "eval() on modules inside that need eval mode, such as BatchNorm"
            )
        if not kind.__call__.__module__.startswith("torch."):
            return f"{kind.__name__} has a __call__ of its own: let that return super().__call__(...)"
        return (
            f"this {kind.__name__} is not trained by model(x), but by a method of its own or forward(x): call model(x)"
        )


def warn_of_hiding_wrappers(model: nn.Module, instead: str) -> None:
    """Warns of modules inside of torch's ``offload_wrapper``: only the innermost hooks see a saved tensor.

    Checkpointing without that wrapper hides nothing: the inputs of checkpointed modules are offloaded. ``instead`` says
    how to remove the wrapper in the caller's framework.
    """
    if names := wrapped_modules(model, "OffloadWrapper"):
        warn(
            f"offload_wrapper stands around modules of this model ({len(names)}, {names[0]!r} the first "
            f"of them) and hides the tensors saved there from Offload. Leave it out: {instead}. The inputs of "
            "checkpointed modules move anyway"
        )


@contextmanager
def offload_modules(
    offload: Offload, calls: Counter[str] | None = None, first: FirstBatch | None = None
) -> Iterator[None]:
    """While entered, runs outermost calls of modules in training mode in ``with offload``.

    A call is outermost if no saved-tensor hooks are active. Hooks of the script or of a framework, another ``Offload``
    among them, take precedence. Recomputation in backward is left to the hooks of torch's checkpointing.

    Args:
        offload: the context to enter.
        calls: counts the outermost calls that were ``"offloaded"``, ``"in eval mode"``, ``"without gradients"`` or
            ``"under hooks"``, and ``"backwards"``.
        first: plans the first of these calls that calls the model.
    """
    calls = Counter() if calls is None else calls

    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or current_autograd_node() is not None:
                return inner(self, *arguments, **named)
            if top_pack_hook() is not None:
                if contexts.current() is not offload:
                    calls["under hooks"] += 1
                return inner(self, *arguments, **named)
            if not is_training(self):
                calls["in eval mode" if torch.is_grad_enabled() else "without gradients"] += 1
                return inner(self, *arguments, **named)
            calls["offloaded"] += 1
            if first is not None and first.is_the_model(self):
                first.begin(self, arguments, named)
            if offload.config.patterns and next(self.parameters(), None) is not None:
                offload.skip_in_one_of(self)
                if contexts.process.backwards - before >= _LOOKED_AT and not calls["warned"]:
                    calls["warned"] += 1
                    for unmatched in offload.unmatched():
                        warn(f"{unmatched}; the exit status will be 2 unless one that is called later has it")
            with ExitStack() as stack:
                with suppress(OffloadError):  # in a transform of torch.func, or while a graph is captured
                    stack.enter_context(offload)
                return inner(self, *arguments, **named)

        return call

    # Patch the class: torch's global module hooks cannot surround a call with a context.
    patch, before = Patch(nn.Module, "__call__", around), contexts.process.backwards
    watch.put_on()
    patch.put_on()
    try:
        yield
    finally:
        patch.take_off()
        calls["backwards"] = contexts.process.backwards - before


def around_step(offload: Offload, first: FirstBatch | None) -> AbstractContextManager[object]:
    """Returns the context of a training step: ``offload``, or :func:`offload_modules` until ``first`` has a plan."""
    if first is None:
        return offload
    first.count_step()
    return offload if first.is_planned else offload_modules(offload, first=first)


class InContext:
    """A method that runs in a context. A copy or a pickle contains only the method, without the context."""

    def __init__(self, method: Callable[..., Any], context: Callable[[], AbstractContextManager[object]]) -> None:
        self._method, self.context = method, context
        update_wrapper(self, method)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with self.context():
            return self._method(*arguments, **named)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        return _same, (self._method,)  # a bound method: its copy is bound to the copy of its object


def _same(method: Callable[..., Any]) -> Callable[..., Any]:
    return method
