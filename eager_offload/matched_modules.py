"""Modules that patterns of ``skip`` and ``codec`` name: their saves stay, or are packed by the codec named for them.

A module is matched when it is called. Its saves are those made in its call, also in the calls of modules inside it.
"""

from __future__ import annotations

import copy
import difflib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.utils.hooks import RemovableHandle

from eager_offload.codecs.names import CodecRules
from eager_offload.config import OffloadConfig
from eager_offload.errors import ConfigError
from eager_offload.marks import NamedModule, in_module, no_offload
from eager_offload.module_calls import ModuleCall


class Pattern(NamedTuple):
    """A pattern of module names, and the field of the configuration that it stands in."""

    field: str
    text: str


#: The state of a copied or pickled hook.
_HookState: TypeAlias = "tuple[MatchedModules, nn.Module | None, frozenset[Pattern], RemovableHandle]"

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


def patterns_of(config: OffloadConfig) -> tuple[Pattern, ...]:
    """Returns the patterns of ``config`` that need the names of a model's modules."""
    skip, codec = config.skip, config.codec_rules.of_modules
    return (*(Pattern("skip", one) for one in skip), *(Pattern("codec", one) for one in codec))


class MatchedModules:
    """The modules whose calls run in a region of ``no_offload`` or of a codec, for one ``Offload``.

    [Note: copies of matched modules]
    torch copies and pickles a module without its replaced call, but with its hooks. So each matched module has a hook
    that does nothing but refer to this object. Objects that are copied together, in whatever order, share one copy of
    this object, so the copied ``Offload`` learns its modules from the copied hooks. A copy of an ``Offload`` alone has
    the modules of the original. Hooks that are copied without the ``Offload`` do nothing.
    """

    def __init__(self) -> None:
        # Not a weak set, whose callbacks are in Python: see [Note: finalizers] in tiers/finalizers.py.
        self._hooks: list[weakref.ref[_Hook]] = []
        #: Hooks of copied modules, until ``begin``.
        self._arrived: list[weakref.ref[_Hook]] = []
        #: The modules of the original, with the patterns that name each, until ``begin``.
        self._same: list[tuple[weakref.ref[nn.Module], frozenset[Pattern]]] = []
        #: The names of modules of several models, if there may be several.
        self._names: dict[str, None] | None = None

    def __copy__(self) -> MatchedModules:
        copied = MatchedModules()
        copied._same = [(weakref.ref(module), hook.patterns) for hook, module in self._alive()] + self._same
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> MatchedModules:
        copied = memo[id(self)] = self.__copy__()
        return copied

    def __reduce__(self) -> tuple[type[MatchedModules], tuple[()]]:
        return MatchedModules, ()

    def add(self, model: nn.Module, patterns: Sequence[Pattern], rules: CodecRules) -> None:
        """Runs the calls of matching modules in a region from now on, beside those that do already.

        Args:
            model: the model, wrapped or not.
            patterns: patterns of names as ``model.named_modules()`` gives them, without the parts that wrappers add;
                ``*`` stands for any text, dots included, ``?`` and ``[...]`` as in :mod:`fnmatch`.
            rules: the rules of ``codec``.

        Raises:
            ConfigError: a pattern matches no module; the text lists near names.
        """
        found = _matching(model, patterns)
        self._same = []
        self.begin(rules)
        self._hooks = [weakref.ref(hook) for hook, _ in self._alive()]
        known = {id(module): hook for hook, module in self._alive()}
        for module, naming in found:
            if (hook := known.get(id(module))) is None:
                self._match(module, naming, rules)
            elif not naming <= hook.patterns:  # a module of several models
                hook.rename(hook.patterns | naming, rules)

    def add_one_of_several(self, model: nn.Module, patterns: Sequence[Pattern], rules: CodecRules) -> None:
        """Does what ``add`` does, with those of ``patterns`` that match in ``model``."""
        names = dict.fromkeys(name for name in modules_by_name(model) if name)
        self._names = {**(self._names or {}), **names}
        self.add(model, [one for one in patterns if _any_matches(one, names)], rules)

    def unmatched(self, patterns: Sequence[Pattern]) -> list[ConfigError]:
        """Returns an error for each of ``patterns`` that matches in none of several models; none before the first."""
        names = self._names
        if names is None:
            return []
        missing = [one for one in patterns if not _any_matches(one, names)]
        return [_no_match(one, list(names), "any model that was called") for one in missing]

    def begin(self, rules: CodecRules) -> bool:
        """Takes over the modules of copies. Returns whether a model was added."""
        arrived, self._arrived = self._arrived, []
        same, self._same = self._same, []
        if arrived:
            for one in arrived:
                if (hook := one()) is not None:
                    hook.begin(rules)
            self._hooks += arrived
        else:
            for known, patterns in same:
                if (module := known()) is not None:
                    self._match(module, patterns, rules)
        return bool(self._hooks) or self._names is not None

    def without_calls(self) -> list[Pattern]:
        """Returns the patterns of which no module has been called yet."""
        hooks = [hook for hook, _ in self._alive()]
        called = {pattern for hook in hooks if hook.has_run for pattern in hook.patterns}
        return sorted({pattern for hook in hooks for pattern in hook.patterns} - called)

    def end(self) -> None:
        """Restores the calls of the modules."""
        hooks = self._hooks + self._arrived
        self._hooks, self._arrived, self._same, self._names = [], [], [], None
        for one in hooks:
            if (hook := one()) is not None:
                hook.end()

    def arrive(self, hook: _Hook) -> None:
        """Adds the hook of a module that has just been copied or unpickled, with this object or without."""
        self._arrived.append(weakref.ref(hook))

    def _match(self, module: nn.Module, patterns: frozenset[Pattern], rules: CodecRules) -> None:
        hook = _Hook(self, module, patterns)
        hook.begin(rules)
        self._hooks.append(weakref.ref(hook))

    def _alive(self) -> list[tuple[_Hook, nn.Module]]:
        hooks = [hook for one in [*self._hooks, *self._arrived] if (hook := one()) is not None]
        return [(hook, module) for hook in hooks if (module := hook.module()) is not None]


class _Hook:
    """A hook of one module that is matched; see [Note: copies of matched modules]."""

    def __init__(self, matched: MatchedModules, module: nn.Module, patterns: frozenset[Pattern]) -> None:
        self._matched = matched
        #: The patterns that name the module.
        self.patterns = patterns
        self._module: weakref.ref[nn.Module] | None = weakref.ref(module)  # a strong one would be a cycle
        self._handle = module.register_forward_pre_hook(self)
        self._call: ModuleCall | None = None

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        pass  # Dynamo inlines the forward of a module without hooks, and would bypass the replaced call

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        copied = memo[id(self)] = object.__new__(_Hook)
        # Looked up and not copied: a module that makes its own copies may not be there yet, which would never end.
        module = memo.get(id(self.module()))
        matched, handle = copy.deepcopy(self._matched, memo), copy.deepcopy(self._handle, memo)
        copied.__setstate__((matched, module, self.patterns, handle))
        return copied

    def __getstate__(self) -> _HookState:
        return self._matched, self.module(), self.patterns, self._handle

    def __setstate__(self, state: _HookState) -> None:
        self._matched, module, self.patterns, self._handle = state
        self._module = None if module is None else weakref.ref(module)
        self._call = None
        if module is not None:
            self._matched.arrive(self)

    def module(self) -> nn.Module | None:
        return None if self._module is None else self._module()

    @property
    def has_run(self) -> bool:
        """Whether the module has been called."""
        return self._call is not None and self._call.has_run

    def begin(self, rules: CodecRules) -> None:
        if (module := self.module()) is not None:
            keeps = any(one.field == "skip" for one in self.patterns)
            around = _in_no_offload if keeps else _InCodec(rules, self.patterns)
            self._call = ModuleCall.begin(module, around)

    def rename(self, patterns: frozenset[Pattern], rules: CodecRules) -> None:
        self._end_call()
        self.patterns = patterns
        self.begin(rules)

    def end(self) -> None:
        self._handle.remove()
        self._end_call()

    def _end_call(self) -> None:
        if self._call is not None:
            self._call.end()
            self._call = None


def _in_no_offload(call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    with no_offload():
        return call(*arguments, **named)


class _InCodec:
    """Runs the calls of a module that patterns of ``codec`` name in a region of that codec."""

    def __init__(self, rules: CodecRules, patterns: frozenset[Pattern]) -> None:
        self._named = NamedModule(rules, tuple(sorted(one.text for one in patterns)))

    def __call__(self, call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        with in_module(self._named):
            return call(*arguments, **named)

    def is_over(self) -> bool:
        """Returns whether the ``Offload`` has gone without having been closed."""
        return self._named.rules() is None


def _attribute_of_inner(module: nn.Module) -> str | None:
    """Returns the attribute of a wrapper that holds its inner module; ``None`` if ``module`` is not a wrapper.

    Classes are recognized by name, so that nothing has to be imported.
    """
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)
    return next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of ``model`` by name, without wrappers and the parts that they add to names."""
    inside: dict[str, tuple[nn.Module, str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, attribute = name.rpartition(".")
        plain = ""
        if name:
            outer, plain = inside.get(parent, (model, parent))
            if attribute != _attribute_of_inner(outer):
                plain = f"{plain}.{attribute}" if plain else attribute
        inside[name] = module, plain
    return {plain: module for module, plain in inside.values()}


def _matching(model: nn.Module, patterns: Iterable[Pattern]) -> list[tuple[nn.Module, frozenset[Pattern]]]:
    """Returns the modules that patterns name, each with its patterns."""
    modules = modules_by_name(model)
    names = [name for name in modules if name]
    found: dict[int, tuple[nn.Module, frozenset[Pattern]]] = {}
    for pattern in patterns:
        matching = [modules[name] for name in names if fnmatchcase(name, pattern.text)]
        if not matching:
            raise _no_match(pattern, names)
        for module in matching:
            _, naming = found.get(id(module), (module, frozenset[Pattern]()))
            found[id(module)] = module, naming | {pattern}
    return list(found.values())


def _any_matches(pattern: Pattern, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern.text) for name in names)


def _no_match(pattern: Pattern, names: Sequence[str], where: str = "this model") -> ConfigError:
    field, text = pattern
    literal = text.replace("*", "").strip(".")
    near = [name for name in names if literal and literal in name] + difflib.get_close_matches(text, names, 5)
    listed = ", ".join(dict.fromkeys(near or names[:5])) if names else "none at all"
    return ConfigError(
        f"{field}={text if field == 'skip' else {text: '...'}!r} is not accepted: it matches no module of {where}. "
        f"{'Near' if near else 'Its'} names: {listed}"
    )
