"""``Offload``: the object that a user holds."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack

import torch
from torch import Tensor

import eager_offload.compile.ops  # defines operators, which graphs of other processes may call
import eager_offload.eager.checkpointing  # noqa: F401  # has selective checkpointing save with us in a context
from eager_offload import contexts
from eager_offload._torch import (
    accelerator_in_use,
    compiler_is_loaded,
    no_module,
    on_first_compile,
    without_caller_modes,
)
from eager_offload.codecs.names import ROUNDING
from eager_offload.compile.aim import text_of
from eager_offload.compile.hooks import hook_pair, serve_compiled_backwards
from eager_offload.config import OffloadConfig, OffloadFields, parse_size, size_text
from eager_offload.contexts import Context, explained_ban, plain_hooks
from eager_offload.eager.hooks import Hooks
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.offloaders import Offloaders
from eager_offload.engine.transfer import KEPT, WAITING, CountedBytes
from eager_offload.errors import CaptureStateError, ConfigError, OffloadError, captured, reentered, tell, warn
from eager_offload.in_vain import InVain
from eager_offload.kernels.codecs import CODECS
from eager_offload.matched_modules import MatchedModules, patterns_of
from eager_offload.observe.advice import advise
from eager_offload.observe.summary import describe
from eager_offload.observe.tracing import Tracing
from eager_offload.out_of_memory import Held, watch
from eager_offload.plan_settings import ComputedPlan, settings_of
from eager_offload.runtime.base import Runtime
from eager_offload.stats import Accounts, KeepReason, OffloadStats
from eager_offload.step_table import StepTable
from eager_offload.tiers.base import Tier
from eager_offload.tiers.finalizers import Living
from eager_offload.tiers.forking import can_begin_nothing

#: Every one of the process.
_alive: Living[Offload] = Living()
#: Of an object, what the library has not put there: its attributes, and what its slots hold.
_Added: TypeAlias = tuple[dict[str, Any], dict[str, Any]]


class Offload:
    """Moves what autograd saves for backward off the device, and brings it back just before it is needed.

    A context manager around forward; backward may run inside or outside. It can be entered again and again, nested,
    for several forwards before any backward, and in several threads. Outputs and gradients are the same, bit for bit,
    as without it.

        offload = Offload(min_bytes="4MiB")
        with offload:
            loss = model(batch)
        loss.backward()
        print(offload.stats())

    A copy, a deep copy or a pickle of it, or of a module that holds one, is a new object of the same configuration: in
    no ``with``, with counters of its own, and with tiers of its own, which it opens when it first moves something. A
    copy has the same ``runtime`` and ``around_tier``; a pickle takes the latter along and cannot be made with the
    former. Attributes that a subclass or a user has added go along as they do with any object; ``__init__`` does not
    run.

    Args:
        config: an :class:`OffloadConfig`, beside which no variable is asked; or a mapping of its fields, as from a
            file. What neither this nor ``fields`` give, the ``EAGER_OFFLOAD_<FIELD>`` variables do, else the defaults.
            ``EAGER_OFFLOAD=0`` makes the context do nothing, ``=1`` does away with ``enabled=False``.
        plan: what :func:`eager_offload.plan` has made: its windows and its budget hold, beside the settings that are
            given here. Or a table of a step, as :meth:`step_plan` has returned it for a like one, in which the first
            forward is looked up. Where it does not fit, a warning says so, once, and the forward is decided as any
            first one. A copy of this object has none.
        runtime: moves the bytes of CPU tensors in place of the CPU's own runtime. For rehearsals of
            plans, with ``eager_offload.planning.simulated``, and for tests; training leaves it out.
        around_tier: stands something in front of each tier that is opened. For tests; training leaves it out.
        **fields: fields of :class:`OffloadConfig`, in place of those of ``config``.

    Raises:
        ConfigError: a field that does not exist, a value that is not accepted, or a ``disk_path`` that cannot serve.
    """

    def __init__(
        self,
        config: OffloadConfig | Mapping[str, Any] | None = None,
        *,
        plan: StepTable | ComputedPlan | None = None,
        runtime: Runtime | None = None,
        around_tier: Callable[[Tier], Tier] | None = None,
        **fields: Unpack[OffloadFields],
    ) -> None:
        if isinstance(plan, ComputedPlan):
            self._begin(settings_of(plan, config, fields), runtime, around_tier)
        else:
            self._begin(OffloadConfig.from_given(config, fields), runtime, around_tier)
        if plan is not None:
            self._take(plan)
        if self.config.enabled:
            with without_caller_modes():
                self._offloaders.open_what_is_named()

    def _begin(
        self, config: OffloadConfig, runtime: Runtime | None, around_tier: Callable[[Tier], Tier] | None
    ) -> None:
        #: What is in force: the switch of the environment comes before the field. A config of its own, whose rules are
        #: those of this object alone.
        self.config = OffloadConfig.from_fields({}, config.switched())
        #: Names the configuration in graphs.
        self.config_key = self.config.to_text()
        self._accounts = Accounts()
        self._offloaders = Offloaders(self.config, self._accounts, runtime, around_tier)
        self._hooks = Hooks(self.config, self._accounts, self._offloaders)
        #: What the saved-tensor hooks of eager code do with a tensor.
        self.pack: Callable[[Tensor], object] = self._hooks.pack
        # Here and not in `with`: torch makes a graph module with a cycle that holds the frames of its callers.
        self._hook_pair: tuple[Callable[[Any], Any], Callable[[Any], Any]] = hook_pair(self.config_key)
        #: Whether compilers put its transfers into their graphs, or cannot.
        self._serves_compiled_code = False
        #: The codecs by which it may round.
        self._rounding = frozenset(ROUNDING[one] for one in self.config.codec_rules.values() if one in ROUNDING)
        #: What was warned of.
        self._in_vain = InVain(self.config, self._accounts)
        self._matched = MatchedModules()
        #: Those that need the names of a model's modules.
        self.patterns = patterns_of(self.config)
        _alive.add(self)

    def _take(self, plan: StepTable | ComputedPlan) -> None:
        """Takes in what ``plan`` says beside its settings."""
        if not isinstance(plan, StepTable | ComputedPlan):
            raise ConfigError(
                f"plan={plan!r} is not accepted: plan takes what eager_offload.plan or Plan.load returns, or a "
                "StepTable of step_plan() or StepTable.load"
            )
        if isinstance(plan, ComputedPlan):
            self._accounts.counters.expect(plan)
            self._hook_pair = hook_pair(text_of(self.config_key, plan))
            if plan.is_small or not plan.moved_bytes:
                self._in_vain.expect_nothing()  # as the plan has said
            return
        if self.config.device_budget is not None:
            raise ConfigError("plan=... does not go with device_budget, which says what moves: leave one of them out")
        if self.config.slowdown is not None:
            raise ConfigError(
                f"plan=... does not go with {self.config.says_slowdown}, which says what moves: leave one of them out"
            )
        if self.config.step_plans is False:
            raise ConfigError("plan=... does not go with step_plans=False, which looks nothing up: leave one out")
        plan.check()
        if not plan.movable_bytes:
            self._in_vain.expect_nothing()
        self._hooks.given = plan

    # -- copies: new objects of the same configuration --------------------------------------------------------------

    def __copy__(self) -> Self:
        copied = self._another()
        copied._matched = copy.copy(self._matched)
        copied._add(self._added(copied))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = self._another()
        copied._matched = copy.deepcopy(self._matched, memo)
        copied._add(copy.deepcopy(self._added(copied), memo))
        return copied

    def __getstate__(self) -> tuple[OffloadConfig, Callable[[Tier], Tier] | None, MatchedModules, _Added]:
        if self._offloaders.given_runtime is not None:
            raise OffloadError(
                f"an Offload with a runtime of its own ({type(self._offloaders.given_runtime).__name__}) cannot be "
                "pickled, since that belongs to this process: pickle its config, and make one from that"
            )
        return self.config, self._offloaders.around_tier, self._matched, self._added(self._another())

    def __setstate__(self, state: tuple[OffloadConfig, Callable[[Tier], Tier] | None, MatchedModules, _Added]) -> None:
        config, around_tier, matched, added = state
        self._begin(config, None, around_tier)
        self._matched = matched
        self._add(added)

    def _another(self) -> Self:
        """A new object of the same class and configuration. No ``__init__`` runs: a subclass's may want more."""
        another = object.__new__(type(self))
        another._begin(self.config, self._offloaders.given_runtime, self._offloaders.around_tier)
        return another

    def _added(self, another: Self) -> _Added:
        """The attributes and slots that this object has and ``another`` one, fresh, has not: a subclass's, a user's."""
        state: Any = object.__getstate__(self)
        attributes, slots = state if isinstance(state, tuple) else (state, {})
        return {name: value for name, value in attributes.items() if name not in vars(another)}, slots

    def _add(self, added: _Added) -> None:
        attributes, slots = added
        vars(self).update(attributes)
        for name, value in slots.items():
            object.__setattr__(self, name, value)

    # -- around forward -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if not self.config.enabled:
            return self
        if self.patterns and not self._matched.begin(self.config.codec_rules):
            given = f"skip={list(self.config.skip)}" if self.config.skip else f"codec={self.config.codec}"
            raise ConfigError(
                f"{given} needs the names of a model's modules: call offload.skip_in(model) once, before the first "
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
        # A graph of compiled code would have transfers of its own, which no capture can have: compilers are told
        # nothing there, and autograd calls the hooks for what the code saves.
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
        # No call until `try`, where interrupts are seen to: contexts that nest are the rule.
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
        if kind is None and self._hooks.thread.captured is None:  # a step is not captured now
            tell()

    def _begin_forward(self, context: Context) -> None:
        """The calling thread enters this object, by ``context``."""
        hooks, counters = self._hooks.thread.captured or self._hooks, self._accounts.counters
        self.replace_crashed()
        hooks.thread.begin(writes_rows=counters.writes_rows)
        context.forward.offloaded_before = counters.offloaded_bytes
        if hooks is not self._hooks and self._offloaders.is_capturing():  # which may not ask the driver
            return
        counters.begin()
        self._offloaders.release_idle()
        if self._rounding and accelerator_in_use():
            accelerator: Any = torch.accelerator.current_accelerator()
            CODECS.expect(self._rounding, torch.device(accelerator.type, torch.accelerator.current_device_index()))
        for reason in self._accounts.demoted("uncompiled_codec", CODECS.compile_due()):
            warn(reason)

    def _leave(self, context: Context, *, is_failed: bool) -> None:
        """The calling thread has left ``context``, and this object if it is in no other of it."""
        hooks, is_over = self._hooks.thread.captured or self._hooks, contexts.entered(self) is None
        with without_caller_modes():
            # With an exception it does not wait: an interrupt would wait for room in a full window.
            hooks.leave(waits=not is_failed, is_outermost=is_over)
        with without_caller_modes(), self._accounts.lock:
            if not is_failed:
                if is_over:
                    self._in_vain.look_at(context.forward, self._matched, is_own=hooks.thread.packed > 0)
                self._in_vain.saw_foreign_hooks(context.hiding())
            elif is_over:
                counters = self._accounts.counters
                counters.failed_forwards += 1
                counters.failed_bytes += max(counters.offloaded_bytes - context.forward.offloaded_before, 0)

    def held(self) -> Held:
        """What of saved tensors is on the devices now."""
        counters, stays, waiting, leaving = self._accounts.counters, Counter[tuple[KeepReason, Any]](), 0, 0
        with self._accounts.lock:
            for reason, module, nbytes in counters.live.kept_by():
                stays[reason, module] += nbytes
            resident = 0
            for offloader in self._offloaders.all():
                offloader.poll()
                resident += offloader.resident_bytes
                leaving += offloader.leaving_bytes
                for record in offloader.records:
                    if isinstance(record, CountedBytes) and record.state in (WAITING, KEPT):
                        module = getattr(record, "module", no_module)()
                        stays[record.kept, module] += record.device_bytes
                        waiting += record.device_bytes if record.state is WAITING else 0
            written = self._hooks.thread.rows  # of a step that is not over; else of the largest that is
            rows = counters.rows if written is None else written.rows
            small = tuple(row for row in rows if row.reason is KeepReason.SMALL and row.size)
            returning = max(resident - waiting - leaving, 0)
            is_saving = written is not None and bool(written.rows)
            return Held(
                counters.live.without_offload, stays, leaving, returning, is_saving, counters.prefetch_bytes, small
            )

    def skip_in(self, model: torch.nn.Module) -> None:
        """Tells the modules of ``model`` that the patterns of ``skip`` and of ``codec`` name.

        From now on what is saved in calls of those of ``skip`` stays, kept as ``region``, and what is saved in calls of
        those of ``codec`` is packed by the codec that is named for them.

        The integrations and :meth:`compile` call it by themselves. A second call for the same model changes nothing.
        :meth:`close` puts the modules back.

        A copy or a pickle of the model has a part in it where this object is copied or pickled with it: its copy does
        the same there. A copy of this object alone has the same modules; unpickled alone, it is to be told anew.

        It is the call of a module, ``module(x)``, that counts: ``module.forward(x)``, or another method, is not seen. A
        pattern of which no module has been called after three forwards is warned of, once, in a process that has
        compiled nothing.

        Raises:
            ConfigError: a pattern matches no module of ``model``; the text lists near names.
        """
        if self.config.enabled and self.patterns:
            self._matched.add(model, self.patterns, self.config.codec_rules)

    def check_capture(self) -> None:
        """Raises if the calling thread cannot capture a step in a ``with`` of this object.

        Raises:
            CaptureStateError: the calling thread is in a ``with`` of this object, or the object is being traced, or its
                ``plan`` is a step table.
        """
        if self._hooks.given is not None:
            raise CaptureStateError(
                "an Offload with a StepTable as its plan cannot be captured: a capture does what its warm-ups did. "
                "Leave plan= out"
            )
        if contexts.entered(self) is not None:
            raise CaptureStateError("a step was captured inside of a `with` of its Offload: capture_step enters that")
        if self._offloaders.transfer_log.on_entry is not None:
            raise CaptureStateError(
                "a step was captured while its Offload is traced: a capture runs nothing that a trace could show"
            )

    @contextmanager
    def in_step(self, hooks: Hooks) -> Iterator[None]:
        """A ``with`` of this object, around a step of which ``hooks`` take what is saved.

        For ``eager_offload.graphs.capture_step``.
        """
        thread = self._hooks.thread
        thread.captured = hooks
        try:
            with self:
                yield
        finally:
            thread.captured = None

    def tiers_of(self, device: torch.device) -> Sequence[Tier]:
        """Returns where what is saved on ``device`` rests; empty where it stays."""
        offloader = self._offloaders.of(device)
        return () if isinstance(offloader, KeepReason) else offloader.tiers

    def keep_of(self, device: torch.device) -> int | None:
        """Returns how many of the newest bytes stay on ``device``; ``None`` where nothing was saved there."""
        saves = self._hooks.saved_tensors(device)
        return None if isinstance(saves, KeepReason) else saves.keep

    def refuse_reentry(self) -> None:
        """See [Note: reentry] in ``tiers/forking.py``.

        Raises:
            OffloadError: the calling thread is in the midst of a call of the library.
        """
        if self._is_reentered():
            raise reentered()

    def _is_reentered(self) -> bool:
        return self._accounts.is_held() or can_begin_nothing()

    def compile(self, model: Callable[..., Any], **torch_compile_kwargs: Any) -> Callable[..., Any]:
        """``torch.compile(model, **torch_compile_kwargs)``, which offloads inside of the compiled graphs.

        Every call runs in a ``with`` of this object. Passes of your own in ``options`` stay in force. A module that
        this returns has this object as ``eager_offload``; a copy of the module, or a pickle, has a copy of it there.

        Args:
            model: a module or a function.
            **torch_compile_kwargs: ``fullgraph``, ``dynamic``, ``mode``, ``options`` and so on.

        Raises:
            ConfigError: ``backend="eager_offload"``, which takes its configuration from its options.
        """
        if torch_compile_kwargs.get("backend") == "eager_offload":
            raise ConfigError(
                'backend="eager_offload" is not accepted here, since it has a configuration of its own: leave it out, '
                'or call torch.compile(model, backend="eager_offload", options={...})'
            )
        if self.config.enabled:
            from eager_offload.compile.inductor import with_pass

            if not self._serves_compiled_code:
                self._prepare_for_compiled_code()
            if options := torch_compile_kwargs.get("options"):
                torch_compile_kwargs["options"] = with_pass(options)
        if isinstance(model, torch.nn.Module):
            self.skip_in(model)
        compiled = torch.compile(model, **torch_compile_kwargs)
        if isinstance(compiled, torch.nn.Module):
            from eager_offload.compile.modules import serve

            return serve(compiled, self)
        return self.around(compiled)

    @classmethod
    def serving(
        cls, config: OffloadConfig | Mapping[str, Any] | None = None, **fields: Unpack[OffloadFields]
    ) -> Offload:
        """The one that serves code compiled with ``backend="eager_offload"`` and these options, on this thread.

        That is the innermost of an equal configuration whose ``with`` the thread is in; outside of one, the process's
        own, which lives as long as the process does unless it is closed.
        """
        found = contexts.serving(OffloadConfig.from_given(config, fields).to_text())
        assert isinstance(found, Offload)
        return found

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does ``call`` in a ``with`` of this object."""

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

    # -- what it did ----------------------------------------------------------------------------------------------

    def stats(self, synchronize: bool = False) -> OffloadStats:
        """A snapshot of the counters.

        A signal handler, a ``__del__`` or a callback of the garbage collector may ask for it too. Where it interrupts
        the library itself on the same thread, or while the current stream is being captured into a graph, it is given
        the counters as they are: what has arrived since the last save or unpack is not looked for, nor waited for.

        Args:
            synchronize: first wait until nothing is on its way, so that every figure is final.
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
                return self._accounts.counters.snapshot(self.config)

    def step_plan(self, device: torch.device | str | None = None) -> StepTable | None:
        """Returns the table of the last step that was looked up, or what that has taught; ``None`` where none was.

        ``print`` shows it. Its ``save`` writes it to a file, and ``StepTable.load`` reads it.

        Args:
            device: whose saved tensors; ``None``: those of the device of which a step was looked up.
        """
        return self._hooks.last_table(None if device is None else torch.device(device))

    def reset_stats(self) -> None:
        """Starts every counter anew. What was saved before is not counted any more.

        Raises:
            OffloadError: a signal handler, or the like, calls it in the midst of a call of the library.
        """
        self.refuse_reentry()
        with without_caller_modes(), self._accounts.lock:
            self._offloaders.poll()
            self._offloaders.restart_counters()
            self._in_vain.forwards = 0
            if contexts.entered(self) is not None or any(
                any(offloader.census()) for offloader in self._offloaders.all()
            ):
                self._accounts.counters.begin()  # a step goes on

    def trace(self, path: str | os.PathLike[str]) -> Tracing:
        """A context manager that writes a trace of what runs inside to ``path``, for https://ui.perfetto.dev.

            with offload.trace("step.json"):
                train_one_step()

        It shows forward and backward by module, every offload, reload, prefetch and stall, and the bytes of saved
        tensors by where they are, beside those that autograd would hold otherwise. For a few steps: a trace takes
        memory for each saved tensor. It begins and ends by waiting for all transfers; in between it does not wait. The
        file appears when it is left, with an exception too; where nothing ran, a warning comes in its place. What is
        compiled for the first time inside is compiled again when it is called outside.

        Args:
            path: a file in a directory that exists. One that exists is replaced and keeps its mode; of a link, the
                target is written; a device or a pipe is written to.

        Raises:
            ConfigError: at once, if the file could not be written there.
            OffloadError: when entered, if this object is being traced already; when left, if the file could not be
                written after all.
        """
        return Tracing(self, path)

    def reserve(self, nbytes: int | str) -> None:
        """Takes host memory now, and pins it, in place of in the first step, which would wait for that.

        Afterwards the host tier has at least ``nbytes``: what it has already counts, so a second call changes nothing.
        A step whose saved tensors take at most as much (``host_bytes_peak`` of the stats, and a little for rounding)
        pins nothing more. The memory is for the accelerator that is selected, stays until :meth:`close`, and counts
        against ``host_budget``. With ``tier="auto"`` and no accelerator, when saved tensors go to disk, none is taken.
        ``python -m eager_offload doctor`` says how long pinning takes.

        Args:
            nbytes: a number of bytes, or a text such as ``"20GiB"``.

        Raises:
            ConfigError: ``nbytes`` is no size, or ``tier="disk"``: nothing rests in host memory.
            CapacityError: ``host_budget``, or the machine, has no room for so much. What could be taken stays.
            OffloadError: the current stream is being captured into a graph, or a signal handler, or the like, calls it
                in the midst of a call of the library.
        """
        wanted = parse_size(nbytes, "nbytes")
        if not self.config.enabled:
            return
        self.refuse_reentry()
        if self._offloaders.is_capturing():
            raise captured("host memory was reserved")
        with without_caller_modes():
            self._offloaders.reserve(wanted)
        tell()

    def close(self) -> None:
        """Waits for what is on its way, then gives back every tier's memory and files. Idempotent.

        Graphs that are still alive keep what they need until they go. Using the object again opens it again. What is
        not closed is given back when the object is garbage collected, and at the end of the process.

        Raises:
            OffloadError: a signal handler, or the like, calls it in the midst of a call of the library.
        """
        self.refuse_reentry()
        self._offloaders.close(self._hooks.restart)
        self._matched.end()
        if contexts.entered(self) is None:
            _unprepared.discard(self)
            if self._serves_compiled_code:
                self._serves_compiled_code = False
                with suppress(ImportError, AttributeError):  # names of torch that are private, and gone
                    from eager_offload.compile.inductor import uninstall

                    uninstall(self)
            if self._in_vain.forwards:
                self.warn_if_nothing_moved()
        tell()

    def offloader_of(self, device: torch.device) -> DeviceOffloader:
        """What carries out the transfers that compiled code asks for on ``device``.

        Raises:
            OffloadError: nothing can be moved off such a device here.
        """
        if contexts.entered(self) is None:  # of code that is run outside of every `with`
            self.replace_crashed()
        offloader = self._offloaders.of(device)
        if offloader is KeepReason.REGION:
            raise captured("compiled code that offloads was called")
        if isinstance(offloader, KeepReason):
            raise OffloadError(
                f"a graph was compiled to offload from {device}, which this process cannot: it offloads from the "
                "accelerator that torch.accelerator.current_accelerator() names, and from the CPU where there is none "
                "or a disk_path or a tier is given"
            )
        return offloader

    def replace_crashed(self) -> None:
        """Has new offloaders made in place of those that an interrupt has crashed."""
        self._offloaders.drop_crashed()
        self._hooks.drop_crashed()

    def count_kept(self, region: str) -> None:
        """Counts what a compiled graph keeps that moves nothing, given as ``reason=bytes,...``."""
        with self._accounts.lock:
            self._accounts.counters.kept_by_graph(region)

    def _prepare_for_compiled_code(self) -> None:
        """Has compilers put transfers into their graphs, or says that they cannot."""
        self._serves_compiled_code = True
        serve_compiled_backwards()
        try:
            from eager_offload.compile import aot_hooks, inductor

            inductor.install(self)
            patches = aot_hooks.patches()
        except (ImportError, AttributeError):  # names of torch that are private, and gone
            patches = ()
        contexts.patches.add(patches)
        if not patches:
            # Any other hooks: AOTAutograd leaves these to autograd, which calls them for what a graph saves.
            self._hook_pair = plain_hooks(self.config_key)
            with self._accounts.lock:
                self._accounts.counters.demote("uncompiled")
            self._in_vain.warn_once(
                "uncompiled",
                f"torch {torch.__version__} does not let saved-tensor hooks into compiled graphs as this version of "
                "eager_offload knows it: what a graph saves leaves when all of the graph has run. Gradients are the "
                "same; peak memory is not. Upgrade eager_offload, or use a torch that its README lists",
            )

    def warn_if_nothing_moved(self, moved_before: int = 0) -> None:
        """Warns, once, if forwards were run and nothing of them was offloaded, and says why.

        A plain loop is looked at after its third forward and in :meth:`close`, an integration's at the end of training.

        Args:
            moved_before: the ``offloaded_bytes`` of the stats when the training that is looked at began.
        """
        self._in_vain.warn_if_nothing_moved(moved_before)


def _all_held() -> list[tuple[Held, OffloadConfig]]:
    """Of each that is alive and not in the midst of a call."""
    return [(offload.held(), offload.config) for offload in _alive if not offload._is_reentered()]


def _prepare_all() -> None:
    """Something is about to be compiled, maybe inside of contexts that were entered before the compiler was loaded."""
    _first_compile.take_off()
    for offload in _unprepared:
        _unprepared.discard(offload)
        if not offload._serves_compiled_code:
            offload._prepare_for_compiled_code()


#: Those that were entered before anything had loaded the compiler.
_unprepared: Living[Offload] = Living()
_first_compile = on_first_compile(_prepare_all)
contexts.make_owner = Offload
watch.held, watch.is_wanted = _all_held, _alive.__bool__
OffloadStats._advise, OffloadStats._describe = staticmethod(advise), staticmethod(describe)
