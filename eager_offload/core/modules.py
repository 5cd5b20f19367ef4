"""Functions around the calls of modules, and the modules that patterns name.

What those of ``skip`` save stays, and where ``only`` is given what all others save.

A module is matched when it is called. Its saves are those made in its call, also in the calls of modules inside it.

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

#: Is given the inner call, the positional arguments and the named ones; returns the result of the call.
Around: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


class ModuleCall:
    """The call of a module, while it has users."""

    def __init__(self, module: nn.Module, around: Around, inner: Callable[..., Any] | None) -> None:
        self._module, self._inner = weakref.ref(module), inner  # a strong reference would be a cycle
        self._around: Around | None = around
        self._users = 0
        #: Whether the module has been called; calls that a compiler has traced are not seen.
        self.has_run = False

    @classmethod
    def begin(cls, module: nn.Module, around: Around, *, in_regions: bool = False) -> ModuleCall:
        """Puts ``around`` around the calls of ``module`` from now on, once for all users of the same ``around``.

        With ``in_regions`` it stands inside of the regions of ``skip`` and ``only``, whichever begins first.
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


#: Classes of modules that wrap another one, and the attribute that holds it.
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
    """One module that patterns name. Refers to it and to its call weakly: it holds the call, and a compiled call it."""

    def __init__(self, module: nn.Module, field: str, patterns: frozenset[str]) -> None:
        self.module = weakref.ref(module)
        #: The patterns that name the module, and the field that has them.
        self.field, self.patterns = field, patterns
        self.call: Callable[[], ModuleCall | None] = _no_call

    def begin(self) -> None:
        if (module := self.module()) is not None and self.call() is None:
            self.call = weakref.ref(ModuleCall.begin(module, _AROUND[self.field]))
            show_to_compilers()

    def end(self) -> None:
        if (call := self.call()) is not None:
            call.end()
        self.call = _no_call


class MatchedModules:
    """The modules of ``skip``, whose calls run in a region of ``no_offload``, and those of ``only``, for one
    ``Offload``.

    [Note: copies of matched modules]
    A copy or a pickle of a module has nothing of the library. So the copy of an ``Offload`` learns its modules from the
    original: a copy has the same ones, and a deep copy those of their copies that were made before it. If they were
    not, or it was pickled, it has none, and needs a call of ``skip_in``.
    """

    def __init__(self) -> None:
        self._matched: list[_Matched] = []
        #: Whether those of a copy have yet to begin.
        self._is_copy = False
        #: The names of modules of several models, if there may be several.
        self._names: dict[str, None] | None = None

    def copy(self, memo: Mapping[int, Any] | None = None) -> MatchedModules:
        """Returns a copy for a copied ``Offload``; ``memo``: of a deep copy."""
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
        """Runs the calls of matching modules in a region from now on, beside those that do already.

        Args:
            model: the model, wrapped or not.
            patterns: for each field, patterns of names as ``model.named_modules()`` gives them, without the parts that
                wrappers add; ``*`` stands for any text, dots included, ``?`` and ``[...]`` as in :mod:`fnmatch`.

        Raises:
            ConfigError: a pattern matches no module; the text lists near names.
        """
        found = [(field, *one) for field, own in patterns.items() for one in _matching(model, field, own)]
        alive = [] if self._is_copy else self._alive()  # what is copied alone may be given another model
        self._matched, self._is_copy = [one for one, _ in alive], False
        known = {(one.field, id(module)): one for one, module in alive}
        for field, module, naming in found:
            if (one := known.get((field, id(module)))) is None:
                self._matched.append(one := _Matched(module, field, naming))
            elif not naming <= one.patterns:  # a module of several models
                one.end()
                one.patterns |= naming
            one.begin()

    def add_one_of_several(self, model: nn.Module, patterns: Mapping[str, Sequence[str]]) -> None:
        """Does what ``add`` does, with those of ``patterns`` that match in ``model``."""
        names = dict.fromkeys(name for name in modules_by_name(model) if name)
        self._names = {**(self._names or {}), **names}
        self.add(model, {field: [one for one in own if _any_matches(one, names)] for field, own in patterns.items()})

    def unmatched(self, patterns: Mapping[str, Sequence[str]]) -> list[ConfigError]:
        """Returns an error for each of ``patterns`` that matches in none of several models; none before the first."""
        names = self._names
        if names is None:
            return []
        missing = [(field, one) for field, own in patterns.items() for one in own if not _any_matches(one, names)]
        return [_no_match(*one, list(names), "any model that was called") for one in missing]

    def begin(self) -> bool:
        """Begins with the modules of a copy. Returns whether a model was added."""
        if self._is_copy:
            self._is_copy = False
            for one in self._matched:
                one.begin()
        return bool(self._matched) or self._names is not None

    def without_calls(self) -> dict[str, list[str]]:
        """Returns, by field, the patterns of which no module has been called yet."""
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
        """Restores the calls of the modules."""
        matched, self._matched, self._names = self._matched, [], None
        for one in matched:
            one.end()

    def _alive(self) -> list[tuple[_Matched, nn.Module]]:
        return [(one, module) for one in self._matched if (module := one.module()) is not None]


def _no_call() -> None:
    return None


def in_no_offload(call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Has what a call saves stay."""
    with no_offload():
        return call(*arguments, **named)


def _moving(call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    with moving():
        return call(*arguments, **named)


#: What calls of the modules that a field names run in.
_AROUND: dict[str, Around] = {"skip": in_no_offload, "only": _moving}


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of ``model`` by name, without wrappers and the parts that they add to names."""
    inside: dict[str, tuple[nn.Module, str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, attribute = name.rpartition(".")
        plain = ""
        if name:
            outer, plain = inside.get(parent, (model, parent))
            # By their names, so that nothing has to be imported.
            classes = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(outer).__mro__)
            if attribute != next((_WRAPPERS[one] for one in classes if one in _WRAPPERS), None):
                plain = f"{plain}.{attribute}" if plain else attribute
        inside[name] = module, plain
    return {plain: module for module, plain in inside.values()}


def own_loss(returned: object) -> Any:
    """Returns the ``loss`` in what a model returns; ``None`` without one."""
    return returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)


def _matching(model: nn.Module, field: str, patterns: Iterable[str]) -> list[tuple[nn.Module, frozenset[str]]]:
    """Returns the modules that patterns name, each with its patterns."""
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
