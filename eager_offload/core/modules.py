"""Replaces the calls of modules that patterns select, so that they run in a context.

Saves in calls of modules of ``skip`` stay; if ``only`` is set, all other saves stay except in calls of its modules.
Modules are matched when they are called; calls of modules inside are included.

[Note: why not forward hooks] After a ``KeyboardInterrupt`` not even forward hooks with ``always_call=True`` are called:
in a notebook, stopping a cell would leave saved-tensor hooks installed. The attribute by which ``module.compile()``
replaces a module's call allows a plain ``with``. Its value is not part of a compiled module's code, so no graph breaks.

[Note: copies of modules whose call is replaced]
A copy has its own call. ``nn.Module`` leaves the attribute out of copies and pickles, but classes that copy their
attributes themselves do not (``DistributedDataParallel``, recurrent layers, parametrized modules). So a ``ModuleCall``
is copied and pickled as ``None``, which means that the call is not replaced. If the attributes are copied by reference,
the copy has the ``ModuleCall`` of the original, which checks on which module it is called.

[Note: models that are written down]
``torch.export`` and ``torch.jit.trace`` call the module and record the operators: they get the inner call.
``torch.jit.script`` reads a module's attributes; ``set_module_call`` hides this one.
"""

from __future__ import annotations

import difflib
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from eager_offload.errors import ConfigError
from eager_offload.marks import moving, no_offload
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

#: Called with the inner call and its positional and keyword arguments; returns the call's result.
Around: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


class ModuleCall:
    """The replaced call of a module, until its last user ends it."""

    def __init__(self, module: nn.Module, around: Around, inner: Callable[..., Any] | None) -> None:
        self._module, self._inner = weakref.ref(module), inner  # weak, because the module holds this call
        self._around: Around | None = around
        self._users = 0
        #: Whether the module has been called, except in code that a compiler traced.
        self.has_run = False

    @classmethod
    def begin(cls, module: nn.Module, around: Around, *, in_regions: bool = False) -> ModuleCall:
        """Wraps the calls of ``module`` in ``around``, once for all users of the same ``around``.

        With ``in_regions`` the call is placed inside those of ``skip`` and ``only``, in whichever order they begin.
        """
        outer, call = None, _call_of(module)
        while in_regions and isinstance(call, cls) and call._around in _AROUND.values():
            outer, call = call, call._inner
        if not (isinstance(call, cls) and call._around is around):
            call = cls(module, around, call)
            if outer is None:
                set_module_call(module, call)
            else:
                outer._inner = call
        call._users += 1
        _in_place.add(call)
        _compiling.put_on()
        return call

    def end(self) -> None:
        """Ends one use. After the last one the original call is restored, even below later replacements of others."""
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
        if not torch.compiler.is_dynamo_compiling():  # Dynamo's frames do not show the caller
            called = module_called_by(self)
            if called is not None and called is not module:
                return own_call(called)(*arguments, **named)
            self.has_run = True
            is_written_down = is_written_down or is_jit_tracing()
        assert module is not None  # alive, because it is being called
        call, around = self._inner or own_call(module), self._around
        return call(*arguments, **named) if around is None or is_written_down else around(call, arguments, named)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def show_to_compilers() -> None:
    """Makes graphs that are traced from now on contain the replaced calls."""
    if _in_place and compiler_is_loaded():
        replaced_calls_in_graphs.put_on()


def _call_of(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the replaced call of ``module``, skipping calls that have ended or belong to the original of a copy."""
    call = _living(module_call(module))
    return None if isinstance(call, ModuleCall) and call._module() is not module else call


def _living(call: Callable[..., Any] | None) -> Callable[..., Any] | None:
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


_in_place: Living[ModuleCall] = Living()
#: ``module.compile()`` would discard a replaced call. The patch places the compiled call below it instead.
_compiling = Patch(nn.Module, "compile", _beneath)


#: Classes of modules that wrap another module, and the attribute that holds it.
_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
}
INNER_MODULES = frozenset(_WRAPPERS.values())


class _Matched:
    """One module that patterns select. Refers weakly to the module and its call, which hold each other."""

    def __init__(self, module: nn.Module, field: str, patterns: frozenset[str]) -> None:
        self.module = weakref.ref(module)
        #: The patterns that select the module, and their field.
        self.field, self.patterns = field, patterns
        self.call: Callable[[], ModuleCall | None] = lambda: None

    def begin(self) -> None:
        if (module := self.module()) is not None and self.call() is None:
            self.call = weakref.ref(ModuleCall.begin(module, _AROUND[self.field]))
            show_to_compilers()

    def end(self) -> None:
        if (call := self.call()) is not None:
            call.end()
        self.call = lambda: None


class MatchedModules:
    """The modules that ``skip`` and ``only`` of one ``Offload`` select.

    [Note: copies of matched modules]
    A copied or pickled module has no state of the library. A copied ``Offload`` takes its modules from the original: a
    shallow copy has the same modules, a deep copy has the copies that were made of them earlier. If there are none, or
    after a pickle, the copy has no modules and needs a call of ``skip_in``.
    """

    def __init__(self) -> None:
        self._matched: list[_Matched] = []
        #: Whether this is a copy whose calls are not replaced yet.
        self._is_copy = False
        #: The names of modules of all models, if there may be several models.
        self._names: dict[str, None] | None = None

    def copy(self, memo: Mapping[int, Any] | None = None) -> MatchedModules:
        """Returns a copy for a copied ``Offload``.

        Args:
            memo: the memo of a deep copy; ``None`` for a shallow one.
        """
        copied = MatchedModules()
        copied._is_copy = True
        for one, module in self._alive():
            its = module if memo is None else memo.get(id(module))
            if its is None:
                copied._matched = []
                break
            copied._matched.append(_Matched(its, one.field, one.patterns))
        return copied

    def add(self, model: nn.Module, patterns: Mapping[str, Sequence[str]]) -> None:
        """Replaces the calls of matching modules, in addition to those replaced already.

        Args:
            model: the model, wrapped or not.
            patterns: for each field, patterns of names as in ``model.named_modules()``, without the parts that wrappers
                add; ``*`` matches any text, including dots, ``?`` and ``[...]`` work as in :mod:`fnmatch`.

        Raises:
            ConfigError: a pattern matches no module; the text lists similar names.
        """
        found = [(field, *one) for field, own in patterns.items() for one in _matching(model, field, own)]
        alive = [] if self._is_copy else self._alive()  # a copied `Offload` alone may be given another model
        self._matched, self._is_copy = [one for one, _ in alive], False
        known = {(one.field, id(module)): one for one, module in alive}
        for field, module, naming in found:
            if (one := known.get((field, id(module)))) is None:
                self._matched.append(one := _Matched(module, field, naming))
            elif not naming <= one.patterns:  # a module that several models share
                one.end()
                one.patterns |= naming
            one.begin()

    def add_one_of_several(self, model: nn.Module, patterns: Mapping[str, Sequence[str]]) -> None:
        """Does the same as ``add``, for those of ``patterns`` that match in ``model``."""
        names = dict.fromkeys(name for name in modules_by_name(model) if name)
        self._names = {**(self._names or {}), **names}
        self.add(model, {field: [one for one in own if _any_matches(one, names)] for field, own in patterns.items()})

    def unmatched(self, patterns: Mapping[str, Sequence[str]]) -> list[ConfigError]:
        """Returns an error for each pattern that matches in none of several models; none before the first model."""
        names = self._names
        if names is None:
            return []
        missing = [(field, one) for field, own in patterns.items() for one in own if not _any_matches(one, names)]
        return [_no_match(*one, list(names), "any model that was called") for one in missing]

    def begin(self) -> bool:
        """Replaces the calls of a copy's modules. Returns whether a model was added."""
        if self._is_copy:
            self._is_copy = False
            for one in self._matched:
                one.begin()
        return bool(self._matched) or self._names is not None

    def without_calls(self) -> dict[str, list[str]]:
        """Returns, by field, the patterns whose modules have not been called yet."""
        named, called = set[tuple[str, str]](), set[tuple[str, str]]()
        for one, _ in self._alive():
            own = {(one.field, pattern) for pattern in one.patterns}
            named |= own
            if (call := one.call()) and call.has_run:
                called |= own
        missing: dict[str, list[str]] = {}
        for field, pattern in sorted(named - called):
            missing.setdefault(field, []).append(pattern)
        return missing

    def end(self) -> None:
        matched, self._matched, self._names = self._matched, [], None
        for one in matched:
            one.end()

    def _alive(self) -> list[tuple[_Matched, nn.Module]]:
        return [(one, module) for one in self._matched if (module := one.module()) is not None]


def in_no_offload(call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    with no_offload():
        return call(*arguments, **named)


def _moving(call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    with moving():
        return call(*arguments, **named)


#: The wrapper for calls of each field's modules.
_AROUND: dict[str, Around] = {"skip": in_no_offload, "only": _moving}


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of ``model`` by name, without wrappers and the parts that wrappers add to names."""
    inside: dict[str, tuple[nn.Module, str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, attribute = name.rpartition(".")
        plain = ""
        if name:
            outer, plain = inside.get(parent, (model, parent))
            # Compared by name, so that no wrapper's package has to be imported.
            classes = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(outer).__mro__)
            if attribute != next((_WRAPPERS[one] for one in classes if one in _WRAPPERS), None):
                plain = f"{plain}.{attribute}" if plain else attribute
        inside[name] = module, plain
    return {plain: module for module, plain in inside.values()}


def own_loss(returned: object) -> Any:
    """Returns the ``loss`` entry or attribute of a model's result, or ``None``."""
    return returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)


def _matching(model: nn.Module, field: str, patterns: Iterable[str]) -> list[tuple[nn.Module, frozenset[str]]]:
    modules = modules_by_name(model)
    names = [name for name in modules if name]
    found: dict[int, tuple[nn.Module, frozenset[str]]] = {}
    for pattern in patterns:
        matching = {name: modules[name] for name in names if fnmatchcase(name, pattern)}
        if not matching:
            raise _no_match(field, pattern, names)
        for name, module in matching.items():
            if isinstance(module, torch.jit.ScriptModule):
                raise ConfigError(
                    f"{field}={pattern!r} is not accepted: it matches {name!r}, a module of TorchScript, "
                    "whose calls Python does not see. Name the modules around it, or script it after training"
                )
            _, naming = found.get(id(module), (module, frozenset[str]()))
            found[id(module)] = module, naming | {pattern}
    return list(found.values())


def _any_matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _no_match(field: str, pattern: str, names: Sequence[str], where: str = "this model") -> ConfigError:
    literal = pattern.replace("*", "").strip(".")
    near = [name for name in names if literal and literal in name] + difflib.get_close_matches(pattern, names, 5)
    listed = ", ".join(dict.fromkeys(near or names[:5])) if names else "none at all"
    return ConfigError(
        f"{field}={pattern!r} is not accepted: it matches no module of {where}. "
        f"{'Near' if near else 'Its'} names: {listed}"
    )
