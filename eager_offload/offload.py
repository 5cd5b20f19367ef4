"""``Offload``: the context manager of the public API."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import wraps
from types import TracebackType
from typing import Any, NoReturn, Self, TypeAlias, Unpack

import torch
from torch import Tensor

import eager_offload.compile.ops  # defines operators, which graphs of other processes may call
import eager_offload.eager.checkpointing  # noqa: F401  # has selective checkpointing save with us in a context
from eager_offload import contexts
from eager_offload.compile.keys import hook_pair, serve_compiled_backwards, text_of
from eager_offload.config import TAKES_NO_MODEL, OffloadConfig, OffloadFields, parse_size, size_text, switched_on
from eager_offload.contexts import Context, explained_ban, plain_hooks
from eager_offload.core.budget import Controller
from eager_offload.core.modules import MatchedModules, show_to_compilers
from eager_offload.core.step_table import StepTable
from eager_offload.eager.held import HeldTensor, stays
from eager_offload.eager.hooks import Hooks
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.offloaders import Offloaders
from eager_offload.engine.transfer import KEPT, WAITING, CountedBytes
from eager_offload.errors import (
    FORKED,
    CaptureStateError,
    ConfigError,
    OffloadError,
    briefly,
    captured,
    reentered,
    tell,
    warn_once,
)
from eager_offload.marks import no_offload
from eager_offload.observe.advice import advise
from eager_offload.observe.memory import Held, watch
from eager_offload.observe.no_effect import NoEffectWarnings
from eager_offload.observe.report import describe
from eager_offload.observe.trace import Tracing
from eager_offload.planning.settings import PlanSettings, fraction_of, settings_of
from eager_offload.runtime.base import Runtime
from eager_offload.stats import Accounts, KeepReason, OffloadStats
from eager_offload.tiers.base import Tier
from eager_offload.tiers.forking import Living, can_begin_nothing
from eager_offload.torch_private.autograd import HookFunctions
from eager_offload.torch_private.calls import without_caller_modes
from eager_offload.torch_private.inductor import compiler_is_loaded, hide_from_compilers, on_first_compile

#: All live objects of the process.
_alive: Living[Offload] = Living()
#: The attributes and the slot values of an object that a subclass or a user has added.
_Added: TypeAlias = tuple[dict[str, Any], dict[str, Any]]


class Offload:
    """Moves saved tensors off the device, and reloads each just before backward needs it.

    A context manager around forward; backward may run inside or outside. It may be entered repeatedly, nested, for
    several forwards before any backward, and in several threads. Outputs and gradients are bit-equal to a run without
    it.

        offload = Offload(min_bytes="4MiB")
        with offload:
            loss = model(batch)
        loss.backward()
        print(offload.stats())

    A copy, a deep copy or a pickle of an ``Offload``, or of a module that holds one, is a new object with the same
    configuration. It is not entered, and has its own counters and its own tiers, which open when it first moves bytes.
    A copy has the same ``runtime`` and ``around_tier``; a pickle keeps ``around_tier``, and raises if there is a
    ``runtime``. Attributes added by a subclass or a user are copied as usual; ``__init__`` does not run.

    Args:
        config: an :class:`OffloadConfig`, which no environment variable completes; or a mapping of its fields, as from
            a file. Fields that neither this nor ``fields`` give come from the ``EAGER_OFFLOAD_<FIELD>`` variables, else
            from the defaults. ``EAGER_OFFLOAD=0`` makes the context do nothing, ``=1`` overrides ``enabled=False``.
        plan: a plan of :func:`eager_offload.plan`, whose windows and budget are added to the settings given here; on a
            CPU its fraction of the bytes to move replaces the budget. A copy of this object has no plan.
        runtime: for tests: moves the bytes of CPU tensors in place of the CPU's own runtime.
        around_tier: wraps each tier that is opened. For tests.
        **fields: fields of :class:`OffloadConfig`, which override those of ``config``.

    Raises:
        ConfigError: a field that does not exist, a value that is not accepted, or a ``disk_path`` that cannot hold the
            spill file; without a ``disk_path``, if tensors go to disk and no directory can hold it.
    """

    def __init__(
        self,
        config: OffloadConfig | Mapping[str, Any] | None = None,
        *,
        plan: PlanSettings | None = None,
        runtime: Runtime | None = None,
        around_tier: Callable[[Tier], Tier] | None = None,
        **fields: Unpack[OffloadFields],
    ) -> None:
        if plan is None:
            self._begin(OffloadConfig.from_given(config, fields), runtime, around_tier)
        elif isinstance(plan, PlanSettings):
            self._begin(settings_of(plan, config, fields), runtime, around_tier)
            self._expect(plan)
        else:
            raise ConfigError(
                f"plan={briefly(plan)} is not accepted: plan takes a result of eager_offload.plan or Plan.load"
            )
        if self.config.enabled:
            with without_caller_modes():
                self._offloaders.open_disk()
            self.no_effect.expect_use()
            watch.put_on()

    def _begin(
        self,
        config: OffloadConfig,
        runtime: Runtime | None,
        around_tier: Callable[[Tier], Tier] | None,
        accounts: Accounts | None = None,
    ) -> None:
        #: The settings in force, after the switch of the environment.
        self.config = OffloadConfig.from_dict({"enabled": switched_on(config.enabled)}, config)
        #: The name of the configuration in compiled graphs.
        self.config_key = self.config.to_text()
        #: Whether all that may move does, so that nothing stays as the newest, for a budget or by a plan.
        self.moves_all = config.newest_bytes(1) == 0 and config.device_budget is None and not config.is_free
        self._accounts = accounts or Accounts()
        self._offloaders = Offloaders(self.config, self._accounts, runtime, around_tier)
        self._hooks = Hooks(self.config, self._accounts, self._offloaders)
        #: The pack hook of eager code.
        self.pack: Callable[[Tensor], object] = self._hooks.pack
        # Here and not in `with`: torch makes a graph module with a cycle that holds the frames of its callers.
        self._hook_pair: HookFunctions = hook_pair(self.config_key)
        #: Whether ``_prepare_for_compiled_code`` has run.
        self._serves_compiled_code = False
        #: The warnings about contexts without effect. An integration tells it what it expects, and when training ends.
        self.no_effect = NoEffectWarnings(self.config, self._accounts)
        self._matched = MatchedModules()
        _alive.add(self)

    def follow(self, plan: PlanSettings, config: OffloadConfig) -> None:
        """Continues as ``Offload(config, plan=plan)``. Call it outside of every ``with``; the plan replaces the budget.

        Counters continue. Modules already found for ``skip`` stay the same, even if the plan has other names for them.
        """
        matched, offloaders = self._matched.copy(), self._offloaders
        self.close()
        settings = settings_of(
            plan, replace(config, device_budget=None, skip=plan.config.skip, only=plan.config.only), {}
        )
        settings = replace(settings, skip=config.skip, only=config.only)
        self._begin(settings, offloaders.given_runtime, offloaders.around_tier, self._accounts)
        self._matched = matched
        self._expect(plan)

    def _expect(self, plan: PlanSettings) -> None:
        self._accounts.counters.expect(plan)
        if (fraction := fraction_of(plan)) is not None:
            self._hooks.fraction = fraction
            self.moves_all = False
            self._hook_pair = hook_pair(text_of(self.config_key, fraction))
        if plan.is_small or not plan.moved_bytes:
            self._accounts.said.add("nothing")  # the warning of that: the plan has said it

    # -- copies: new objects of the same configuration --------------------------------------------------------------

    def __copy__(self) -> Self:
        self.no_effect.note_use()
        copied = self._another()
        copied._matched = self._matched.copy()
        copied._add(self._added(copied))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.no_effect.note_use()
        copied = memo[id(self)] = self._another()
        copied._matched = self._matched.copy(memo)
        copied._add(copy.deepcopy(self._added(copied), memo))
        return copied

    def __getstate__(self) -> tuple[OffloadConfig, Callable[[Tier], Tier] | None, _Added]:
        if self._offloaders.given_runtime is not None:
            raise OffloadError(
                f"an Offload with a runtime of its own ({type(self._offloaders.given_runtime).__name__}) cannot be "
                "pickled, since that belongs to this process: pickle its config, and make one from that"
            )
        self.no_effect.note_use()
        return self.config, self._offloaders.around_tier, self._added(self._another())

    def __setstate__(self, state: tuple[OffloadConfig, Callable[[Tier], Tier] | None, _Added]) -> None:
        config, around_tier, added = state
        self._begin(config, None, around_tier)
        self._add(added)

    def _another(self) -> Self:
        """Returns a new object of the same class and configuration. No ``__init__`` runs: a subclass may change it."""
        another = object.__new__(type(self))
        another._begin(self.config, self._offloaders.given_runtime, self._offloaders.around_tier)
        return another

    def _added(self, another: Self) -> _Added:
        """Returns the attributes and slots that this object has and a fresh ``another`` has not."""
        state: Any = object.__getstate__(self)
        attributes, slots = state if isinstance(state, tuple) else (state, {})
        return {name: value for name, value in attributes.items() if name not in vars(another)}, slots

    def _add(self, added: _Added) -> None:
        attributes, slots = added
        vars(self).update(attributes)
        for name, value in slots.items():
            object.__setattr__(self, name, value)

    # -- around forward -------------------------------------------------------------------------------------------

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raises ``TypeError`` if called like a wrapper (e.g. as ``DistributedDataParallel(model)`` is)."""
        raise TypeError(f"this Offload was called: {TAKES_NO_MODEL}")

    def __enter__(self) -> Self:
        if not self.config.enabled:
            return self
        self.no_effect.note_use()
        if (patterns := self.config.patterns) and not self._matched.begin():
            named = " and ".join(f"{field}={list(own)}" for field, own in patterns.items())
            raise ConfigError(
                f"{named} needs the names of a model's modules: call offload.skip_in(model) once, before the first "
                "`with offload:`"
            )
        self.refuse_reentry()
        is_captured = self._hooks.thread.captured is not None
        if not is_captured and self._offloaders.is_capturing():
            raise captured("an Offload was entered")
        if not is_captured:
            tell()
        if not self._serves_compiled_code:
            if compiler_is_loaded():
                self._prepare_for_compiled_code()
            else:
                _unprepared.add(self)
                _first_compile.put_on()
        watch.put_on()
        # A compiled graph would have transfers of its own, which no capture can hold. So compilers are told nothing in
        # a capture, and autograd calls the hooks for the saves of compiled code.
        hooks = plain_hooks(self.config_key) if is_captured else self._hook_pair
        context = Context(self, hooks)
        try:
            if context.is_outermost:
                self._begin_forward(context)
            context.put_on()
        except BaseException:
            context.give_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.config.enabled:
            return
        entered = contexts.thread.contexts
        # Contexts usually nest: then no call precedes the `try`, which handles interrupts.
        context = entered[-1] if entered and entered[-1].owner is self else contexts.entered(self)
        if error is not None:
            watch.note(error)
        if context is None:
            raise OffloadError(
                "this Offload is left in a thread that did not enter it, or that has left it already: use one `with` "
                "for both"
            )
        try:
            context.take_off()
            self._leave(context, is_failed=kind is not None)
        finally:
            context.give_up()
        if (ban := explained_ban(error)) is not None:
            raise ban from error
        if kind is None and self._hooks.thread.captured is None:
            tell()

    def _begin_forward(self, context: Context) -> None:
        hooks, counters = self._hooks.thread.captured or self._hooks, self._accounts.counters
        self.replace_crashed()
        hooks.thread.begin()
        contexts.watch_pipelines()
        context.forward.offloaded_before = counters.offloaded_bytes
        if hooks is not self._hooks and self._offloaders.is_capturing():  # a capture may not call the driver
            return
        counters.begin()
        self._offloaders.release_freed()
        self._offloaders.release_idle()

    def _leave(self, context: Context, *, is_failed: bool) -> None:
        """Ends ``context``, and the forward if the calling thread is in no other context of this object."""
        hooks, is_over = self._hooks.thread.captured or self._hooks, contexts.entered(self) is None
        with without_caller_modes():
            # No wait after an exception: an interrupt would wait for room in a full window.
            hooks.leave(waits=not is_failed)
        with without_caller_modes(), self._accounts.lock:
            if not is_failed:
                if is_over:
                    self.no_effect.look_at(context.forward, self._matched, is_own=hooks.thread.packed > 0)
                self.no_effect.saw_foreign_hooks(context.hiding())
            elif is_over:
                counters = self._accounts.counters
                counters.failed_forwards += 1
                counters.failed_bytes += max(counters.offloaded_bytes - context.forward.offloaded_before, 0)

    @contextmanager
    def rest_of_step(self) -> Iterator[None]:
        """Adds tensors saved in a backward to the step whose forward the thread has left, instead of a new step."""
        if not self.config.enabled or contexts.entered(self) is not None or self._is_reentered():
            yield
            return
        context = Context(self, self._hook_pair)
        try:
            context.put_on()
            yield
            context.take_off()
            with without_caller_modes():
                self._hooks.leave(waits=True)
        finally:
            context.give_up()

    def hold(self, tensor: Tensor) -> HeldTensor:
        """Offloads a tensor of the caller's as if autograd had saved it, and returns a handle to restore it.

            class Chunked(torch.autograd.Function):
                @staticmethod
                def forward(ctx, logits):
                    ctx.held = offload.hold(logits)
                    ...

                @staticmethod
                def backward(ctx, grad):
                    logits = ctx.held.restore()

        For autograd functions, checkpoints and engines that keep tensors outside of autograd. All settings apply: small
        tensors, parameters and tensors that others keep alive stay, and the stats count them as kept. It may be called
        inside or outside of a ``with``. Kernels that write the tensor must be queued on the current stream already.

        Args:
            tensor: of any shape, type and device; it keeps its memory (no ``resize_``) until its copy is over. In
                compiled code the call breaks the graph.

        Raises:
            OffloadError: ``tensor`` is none, or an inference tensor; the current stream is being captured into a graph
                that is not ours; or a signal handler or the like calls it during a call of the library.
        """
        given: object = tensor
        if not isinstance(given, Tensor) or given.is_inference():
            what = "an inference tensor, which has no version," if isinstance(given, Tensor) else briefly(given)
            raise OffloadError(f"{what} is not accepted: hold takes a tensor that was made outside of inference mode")
        if not self.config.enabled:
            return HeldTensor(stays(tensor))
        self.no_effect.note_use()
        self.refuse_reentry()
        if self._hooks.thread.captured is None and self._offloaders.is_capturing():
            raise captured("a tensor was held")
        if contexts.entered(self) is None:
            self.replace_crashed()
        held = HeldTensor(self._hooks.hold(tensor))
        tell()
        return held

    def saved_tensors_hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Returns the pair of hooks that ``with offload:`` installs, for engines that take a pair.

            torch_remat.checkpoint(saved_tensors_hooks=offload.saved_tensors_hooks())(block)(x)

        The hooks pack for this object in any thread, inside or outside of a ``with``; outside, the last saves leave
        only after further saves. Compilers leave the hooks to autograd. With ``enabled=False`` everything stays.
        ``torch_remat`` tells such a pair, but not a ``with``, which tensors are inputs of checkpoints: these leave
        first if a ``device_budget`` lets others stay.
        """
        if not self.config.enabled:
            return stays, contexts.unpack
        self.no_effect.note_use()
        return contexts.PackHook(self.config_key, self), contexts.unpack

    def held(self) -> Held:
        """Returns the bytes of saved tensors that are on the devices now."""
        counters, stays = self._accounts.counters, Counter[KeepReason]()
        waiting = leaving = resident = 0
        with self._accounts.lock:
            for reason, nbytes in counters.live.kept_by():
                stays[reason] += nbytes
            for offloader in self._offloaders.all():
                offloader.poll()
                resident += offloader.resident_bytes
                leaving += offloader.leaving_bytes
                for record in offloader.records:
                    if isinstance(record, CountedBytes) and record.state in (WAITING, KEPT):
                        stays[record.kept] += record.device_bytes
                        waiting += record.device_bytes if record.state is WAITING else 0
            is_saving = contexts.entered(self) is not None and self._hooks.thread.packed > 0
            if is_saving or counters.live.without_offload:  # which leaves small ones out
                stays[KeepReason.SMALL] += counters.kept_bytes[KeepReason.SMALL] // max(counters.steps, 1)
            return Held(stays, leaving, max(resident - waiting - leaving, 0), counters.prefetch_bytes)

    def skip_in(self, model: torch.nn.Module) -> None:
        """Finds the modules of ``model`` that the patterns of ``skip`` and ``only`` name.

        From now on, tensors stay with the reason ``region`` if they are saved in calls of modules that ``skip`` names,
        or, with ``only``, outside of calls of modules that ``only`` names. :meth:`close` restores the modules. The
        integrations and :meth:`compile` call this method themselves. A second call for the same model changes nothing.

        If one ``copy.deepcopy`` copies the model and then this object (e.g. a module that holds both), the copy acts on
        the copied modules; ``copy.copy`` acts on the same modules. Any other copy, and every pickle, needs its own
        call. Pickles of the model and of its copies do not refer to this library.

        A pattern matches calls ``module(x)``: ``module.forward(x)`` and other methods are not seen. One warning names
        the patterns of which no module was called in three forwards, in a process that has compiled nothing.

        Raises:
            ConfigError: a pattern matches no module of ``model``; the text lists near names.
        """
        if self.config.enabled and (patterns := self.config.patterns):
            self._matched.add(model, patterns)

    def skip_in_one_of(self, model: torch.nn.Module) -> None:
        """Does the same as :meth:`skip_in` for one of several models; each pattern must match in at least one."""
        if self.config.enabled and (patterns := self.config.patterns):
            self._matched.add_one_of_several(model, patterns)

    def unmatched(self) -> list[ConfigError]:
        """Returns an error for each pattern that has matched in none of the models of :meth:`skip_in_one_of`."""
        return self._matched.unmatched(self.config.patterns)

    def check_capture(self) -> None:
        """Raises ``CaptureStateError`` if the calling thread is in a ``with`` of this object, or a trace runs."""
        if contexts.entered(self) is not None:
            raise CaptureStateError("a step was captured inside of a `with` of its Offload: capture_step enters that")
        if self._offloaders.transfer_log.on_entry is not None:
            raise CaptureStateError(
                "a step was captured while its Offload is traced: a capture runs nothing that a trace could show"
            )

    @contextmanager
    def in_step(self, hooks: Hooks) -> Iterator[None]:
        """Enters this object for a step of ``graphs.capture_step``, whose saved tensors ``hooks`` take."""
        thread = self._hooks.thread
        thread.captured = hooks
        try:
            with self:
                yield
        finally:
            thread.captured = None

    def tiers_of(self, device: torch.device) -> Sequence[Tier]:
        """Returns the tiers for tensors saved on ``device``; empty if these stay."""
        offloader = self._offloaders.of(device)
        return () if isinstance(offloader, KeepReason) else offloader.tiers

    def controller_of(self, device: torch.device) -> Controller | None:
        """Returns the controller of the fraction moved on ``device``; ``None`` if no setting needs one."""
        saves = self._hooks.saved_tensors(device)
        return None if isinstance(saves, KeepReason) else saves.tables.controller

    def refuse_reentry(self) -> None:
        """Raises if the calling thread is inside a call of the library: see [Note: reentry] in ``tiers/forking.py``."""
        if self._is_reentered():
            raise reentered()

    def _is_reentered(self) -> bool:
        return self._accounts.is_held() or can_begin_nothing()

    def compile(self, model: Callable[..., Any], **torch_compile_kwargs: Any) -> Callable[..., Any]:
        """Returns ``torch.compile(model, **torch_compile_kwargs)``, which offloads inside the compiled graphs.

        Every call runs in a ``with`` of this object. Your own passes in ``options`` stay in force. A module that is
        returned has this object as its attribute ``eager_offload``; its copies and pickles have a copy of this object.

        Args:
            model: a module or a function.
            **torch_compile_kwargs: ``fullgraph``, ``dynamic``, ``mode``, ``options`` and so on.

        Raises:
            ConfigError: ``backend="eager_offload"`` is given, which takes its configuration from its options.
        """
        if torch_compile_kwargs.get("backend") == "eager_offload":
            raise ConfigError(
                'backend="eager_offload" is not accepted here, since it has a configuration of its own: leave it out, '
                'or call torch.compile(model, backend="eager_offload", options={...})'
            )
        self.no_effect.note_use()
        if self.config.enabled:
            from eager_offload.compile.order import with_pass

            if not self._serves_compiled_code:
                self._prepare_for_compiled_code()
            if options := torch_compile_kwargs.get("options"):
                torch_compile_kwargs["options"] = with_pass(options)
        if isinstance(model, torch.nn.Module):
            self.skip_in(model)
        compiled = torch.compile(model, **torch_compile_kwargs)
        if isinstance(compiled, torch.nn.Module):
            from eager_offload.compile.order import serve

            return serve(compiled, self)
        return self.around(compiled)

    @classmethod
    def serving(
        cls, config: OffloadConfig | Mapping[str, Any] | None = None, **fields: Unpack[OffloadFields]
    ) -> Offload:
        """Returns the ``Offload`` that serves code compiled with ``backend="eager_offload"`` and these options.

        It is the innermost of an equal configuration whose ``with`` the thread is in; outside of any, one object for
        the process, which lives until it is closed.
        """
        found = contexts.serving(OffloadConfig.from_given(config, fields).to_text())
        assert isinstance(found, Offload)
        return found

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs ``call`` in a ``with`` of this object."""
        self.no_effect.note_use()

        @wraps(call)
        def around(*arguments: Any, **named: Any) -> Any:
            with self:
                return call(*arguments, **named)

        return around

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={self.config.shown(name)!r}" for name in self.config.changed())
        counted = self._accounts.counters
        moved = f"{size_text(counted.offloaded_bytes)} offloaded of {size_text(counted.saved_bytes)} saved"
        return f"<{type(self).__name__}({given}): {moved if counted.saved_tensors else 'nothing saved yet'}>"

    # -- stats, traces, memory ------------------------------------------------------------------------------------

    def stats(self, synchronize: bool = False) -> OffloadStats:
        """Returns a snapshot of the counters.

        Signal handlers, ``__del__`` methods and callbacks of the garbage collector may call it too. If such a call
        interrupts the library on the same thread, or if the current stream is being captured into a graph, the snapshot
        leaves out transfers that ended since the last save or unpack, and waits for none.

        Args:
            synchronize: waits until all transfers are over, so that every figure is final, and warns of failures.
        """
        if self._is_reentered() or self._offloaders.is_capturing():
            return self._accounts.counters.snapshot(self.config)
        with without_caller_modes():
            if synchronize:
                for offloader in self._offloaders.all():
                    offloader.synchronize()
            with self._accounts.lock:
                self._offloaders.poll()
                self._offloaders.snapshot_peaks()
                found = self._accounts.counters.snapshot(self.config)
        if synchronize:
            tell()
        return found

    def step_table(self, device: torch.device | str | None = None) -> StepTable | None:
        """Returns the step table that the last step followed, in its current state; ``None`` if none was followed.

        ``print`` shows the table.

        Args:
            device: the device of the saved tensors; ``None``: the device of the last step.
        """
        return self._hooks.last_table(None if device is None else torch.device(device))

    def reset_stats(self) -> None:
        """Sets every counter to zero. Tensors saved before are no longer counted.

        Raises:
            OffloadError: a signal handler or the like calls it during a call of the library.
        """
        self.refuse_reentry()
        with without_caller_modes(), self._accounts.lock:
            self._offloaders.poll()
            self._offloaders.restart_counters()
            self.no_effect.forwards = 0
            if contexts.entered(self) is not None or any(
                any(offloader.census()) for offloader in self._offloaders.all()
            ):
                self._accounts.counters.begin()  # a step goes on

    def trace(self, path: str | os.PathLike[str]) -> Tracing:
        """Returns a context manager that writes a trace of its body to ``path``, for https://ui.perfetto.dev.

            with offload.trace("step.json"):
                train_one_step()

        The trace shows forward and backward by module, every offload, reload, prefetch and stall, and the bytes of
        saved tensors by place, beside the bytes without offload. It takes memory for each saved tensor, so trace a few
        steps. It begins and ends by waiting for all transfers; in between it does not wait. The file appears when the
        ``with`` is left, also by an exception; if nothing ran, a warning comes in its place. Code that is compiled for
        the first time inside is compiled again when it is called outside.

        Args:
            path: a file in a directory that exists. A file that exists is replaced and keeps its mode. The target of a
                link is written; a device or a pipe is written to.

        Raises:
            ConfigError: at once, if the file cannot be written there.
            OffloadError: on entry, if this object is being traced already; on exit, if the file cannot be written.
        """
        return Tracing(self, path)

    def reserve(self, nbytes: int | str) -> None:
        """Allocates and pins host memory now, so that the first step does not wait for it.

        Afterwards the host tier has at least ``nbytes``. Memory that it has already counts, so a second call changes
        nothing. A step whose saved tensors take no more (``host_bytes_peak`` of the stats, and a little for rounding)
        pins nothing. The memory is for the selected accelerator, stays until :meth:`close`, and counts against
        ``host_budget``. With ``tier="auto"`` and no accelerator, saved tensors go to disk, and no memory is taken.
        ``python -m eager_offload doctor`` measures how long pinning takes.

        Args:
            nbytes: a number of bytes, or a text such as ``"20GiB"``.

        Raises:
            ConfigError: ``nbytes`` is not a size, or ``tier="disk"`` is set, which uses no host memory.
            CapacityError: ``host_budget`` or the machine has less room. Memory that was reserved stays.
            OffloadError: the current stream is being captured into a graph, or a signal handler or the like calls it
                during a call of the library.
        """
        wanted = parse_size(nbytes, "nbytes")
        if not self.config.enabled:
            return
        self.no_effect.note_use()
        self.refuse_reentry()
        if self._offloaders.is_capturing():
            raise captured("host memory was reserved")
        with without_caller_modes():
            self._offloaders.reserve(wanted)
        tell()

    def close(self) -> None:
        """Waits for all transfers, then frees the memory and the files of every tier. Idempotent.

        Live graphs keep the slots that they need. The object may be used again, which opens its tiers again. An object
        that is not closed frees everything when it is garbage collected, and at the end of the process.

        Raises:
            OffloadError: a signal handler or the like calls it during a call of the library.
        """
        self.refuse_reentry()
        self.no_effect.warn_if_unused()
        self._offloaders.close(self._hooks.restart)
        self._matched.end()
        if contexts.entered(self) is None:
            _unprepared.discard(self)
            if self._serves_compiled_code:
                self._serves_compiled_code = False
                with suppress(ImportError, AttributeError):  # a private name of torch is gone
                    from eager_offload.compile.order import uninstall

                    uninstall(self)
            if self.no_effect.forwards:
                self.no_effect.warn_if_nothing_moved()
        tell()

    def offloader_of(self, device: torch.device) -> DeviceOffloader:
        """Returns the offloader that serves compiled code on ``device``.

        Raises:
            OffloadError: this process cannot move tensors off such a device.
        """
        if contexts.entered(self) is None:  # compiled code may run outside every `with`
            self.replace_crashed()
            self._offloaders.release_freed()
        offloader = self._offloaders.of(device)
        if offloader is KeepReason.REGION:
            raise captured("compiled code that offloads was called")
        if isinstance(offloader, KeepReason):
            raise OffloadError(
                f"a graph was compiled to offload from {device}, which this process cannot: it offloads from the "
                "accelerator that torch.accelerator.current_accelerator() names, and from the CPU if there is none or "
                "if a disk_path or a tier is given"
            )
        return offloader

    def leave_to_parent(self) -> None:
        """In a forked child, keeps tensors saved in the ``with`` that its parent had entered."""

        inherited, replaced = contexts.entered(self), self.pack
        assert inherited is not None

        def pack(tensor: Tensor) -> object:
            context = contexts.entered(self)
            if context is None or context.forward is not inherited.forward:  # it has entered one of its own
                self.pack = replaced
                return replaced(tensor)
            forked = FORKED.format(where="inside of its parent's `with offload`")
            warn_once("forked", forked, self._accounts.said)
            with no_offload():
                return replaced(tensor)

        self.pack = pack

    def replace_crashed(self) -> None:
        """Replaces the offloaders that an interrupt has crashed."""
        self._offloaders.drop_crashed()
        self._hooks.drop_crashed()

    def count_kept(self, region: str) -> None:
        """Counts the saves of a compiled graph that moves nothing, given as ``reason=bytes,...``."""
        with self._accounts.lock:
            self._accounts.counters.kept_by_graph(region)

    def _prepare_for_compiled_code(self) -> None:
        """Makes compilers put transfers into their graphs, or warns that they cannot."""
        self._serves_compiled_code = True
        serve_compiled_backwards()
        try:
            from eager_offload.compile import insert, order

            order.install(self)
            patches = insert.patches()
        except (ImportError, AttributeError):  # a private name of torch is gone
            patches = ()
        contexts.patches.add(patches)
        show_to_compilers()
        if not patches:
            # AOTAutograd leaves plain hooks to autograd, which calls them for the saves of a graph.
            self._hook_pair = plain_hooks(self.config_key)
            with self._accounts.lock:
                self._accounts.counters.fall_back("uncompiled")
            warn_once(
                "uncompiled",
                f"torch {torch.__version__} does not let saved-tensor hooks into compiled graphs in a way that this "
                "version of eager_offload supports: tensors leave only after the whole graph has run. Gradients are "
                "the same; peak memory is not. Upgrade eager_offload, or use a torch that its README lists",
                self._accounts.said,
            )


def _notes() -> list[str]:
    """Returns a note for each live object that holds saved tensors, and that no call of the library is using."""
    found = ((offload.held(), offload.config) for offload in _alive if not offload._is_reentered())
    return [held.note(config) for held, config in found if held.leaving or held.returning or any(held.stays.values())]


def _made(config: OffloadConfig) -> Offload:
    """Returns an object for the whole process: a graph uses it, or whoever has asked for it."""
    made = Offload(config)
    made.no_effect.note_use()
    return made


def _note_step_peaks() -> None:
    """Makes each live object record the memory peak of the step whose backward has ended."""
    for offload in _alive:
        if not offload._is_reentered() and not offload._offloaders.is_capturing():
            offload._offloaders.note_step_peak()


def _prepare_all() -> None:
    """Prepares every object that was entered before the compiler was loaded. Called as the first code is compiled."""
    _first_compile.take_off()
    for offload in _unprepared:
        _unprepared.discard(offload)
        if not offload._serves_compiled_code:
            offload._prepare_for_compiled_code()


#: Objects that were entered before the compiler was loaded.
_unprepared: Living[Offload] = Living()
_first_compile = on_first_compile(_prepare_all)
contexts.process.make_owner = _made
watch.notes, watch.is_wanted, watch.ended = _notes, _alive.__bool__, _note_step_peaks
OffloadStats._advise, OffloadStats._describe = staticmethod(advise), staticmethod(describe)
hide_from_compilers(Offload.hold)
