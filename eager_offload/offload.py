"""``Offload``: the object that a user holds."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from eager_offload import active
from eager_offload._torch import autograd_sequence, compiler_asks_hooks, compiler_is_loaded, has_compiled, top_pack_hook
from eager_offload.compile.hooks import hook_pair
from eager_offload.config import OffloadConfig
from eager_offload.eager import checkpointing, foreign
from eager_offload.eager.hooks import Hooks, Session, unpack
from eager_offload.eager.lanes import Lanes
from eager_offload.errors import ConfigError, OffloadError
from eager_offload.observe.tracing import Tracing
from eager_offload.runtime.base import Runtime
from eager_offload.stats import Accounts, OffloadStats
from eager_offload.tiers.base import Tier
from eager_offload.transfers import Transfers

__all__ = ["Offload"]


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

    Args:
        config: an :class:`OffloadConfig`; the defaults where it is left out.
        runtime: moves the bytes of CPU tensors in place of the CPU's own runtime. For proof and planning with
            ``eager_offload.runtime.simulated``; training leaves it out.
        around_tier: stands something in front of each tier that is opened, such as the token bucket of
            ``eager_offload.tiers.throttle``. For benchmarks and tests; training leaves it out.
        **fields: fields of :class:`OffloadConfig`, in place of those of ``config``.

    Raises:
        ConfigError: a field that does not exist, a value that is not accepted, or a ``disk_path`` that cannot serve.
    """

    def __init__(
        self,
        config: OffloadConfig | None = None,
        *,
        runtime: Runtime | None = None,
        around_tier: Callable[[Tier], Tier] | None = None,
        **fields: Any,
    ) -> None:
        if config is not None and not isinstance(config, OffloadConfig):
            raise ConfigError(f"config={config!r} is not accepted: config takes an OffloadConfig or None")
        self.config = OffloadConfig.from_fields(fields, config)
        #: Names the configuration in graphs.
        self.config_text = self.config.to_text()
        self._accounts = Accounts()
        self._lanes = Lanes(self.config, self._accounts, runtime, around_tier)
        self._session = Session()
        self._contexts = _Contexts()
        self._hooks = Hooks(self.config.size("min_bytes"), self._accounts, self._lanes.of, self._session)
        #: What the saved-tensor hooks of eager code do with a tensor.
        self.pack: Callable[[Tensor], object] = self._hooks.pack
        # Here and not in `with`: torch makes a graph module with a cycle that holds the frames of its callers.
        self._hook_pair: tuple[Callable[[Any], Any], Callable[[Any], Any]] = hook_pair(self.config_text)
        self._serves_compiled_code = False
        self._told: set[str] = set()

    # -- around forward -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if not self._serves_compiled_code and compiler_is_loaded():
            self._prepare_for_compiled_code()
        checkpointing.install()
        context, stack = _Context(self), self._contexts.stack
        try:
            active.entered(self)
            context.__enter__()
            stack.append(context)
        except BaseException:
            context.leave()
            active.left(self)
            if context in stack:
                stack.remove(context)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack = self._contexts.stack
        if not stack:
            raise OffloadError("this Offload is left in a thread that did not enter it: use one `with` for both")
        context = stack[-1]
        try:
            del stack[-1]
            context.__exit__(kind, error, trace)
        finally:
            context.leave()
            active.left(self)

    def compile(self, model: Callable[..., Any], **torch_compile_kwargs: Any) -> Callable[..., Any]:
        """``torch.compile(model, **torch_compile_kwargs)``, which offloads inside of the compiled graphs.

        Every call runs in a ``with`` of this object. Passes of your own in ``options`` stay in force.

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
        from eager_offload.compile.inductor import install, with_passes

        install()
        if options := torch_compile_kwargs.get("options"):
            torch_compile_kwargs["options"] = with_passes(options)
        compiled = torch.compile(model, **torch_compile_kwargs)
        if isinstance(compiled, torch.nn.Module):
            compiled.forward = self._around(compiled.forward)
            return compiled
        return self._around(compiled)

    @classmethod
    def serving(cls, config: OffloadConfig | None = None, **fields: Any) -> Offload:
        """The one that serves code compiled with ``backend="eager_offload"`` and these options, on this thread.

        That is the innermost of an equal configuration whose ``with`` the thread is in; outside of one, the process's
        own, which lives as long as the process does unless it is closed.
        """
        return active.serving(OffloadConfig.from_fields(fields, config).to_text())

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def around(*arguments: Any, **named: Any) -> Any:
            with self:
                return call(*arguments, **named)

        return around

    # -- what it did ----------------------------------------------------------------------------------------------

    def stats(self, synchronize: bool = False) -> OffloadStats:
        """A snapshot of the counters.

        Args:
            synchronize: first wait until nothing is on its way, so that every figure is final.
        """
        with self._accounts.lock:
            for lane in self._lanes.all():
                if synchronize:
                    lane.synchronize()
                else:
                    lane.settle()
            self._lanes.snapshot_peaks()
            return self._accounts.tally.snapshot(self.config)

    def reset_stats(self) -> None:
        """Starts every counter anew. What was saved before is not counted any more."""
        with self._accounts.lock:
            for lane in self._lanes.all():
                lane.settle()
            self._lanes.new_tally()
            if self._contexts.stack or any(any(lane.census()) for lane in self._lanes.all()):
                self._accounts.tally.begin()  # a step goes on

    def trace(self, path: str | os.PathLike[str]) -> Tracing:
        """A context manager that writes a trace of what runs inside to ``path``, for https://ui.perfetto.dev.

            with offload.trace("step.json"):
                train_one_step()

        It shows forward and backward by module, every offload, reload, prefetch, stall and demotion, and the bytes of
        saved tensors by where they are, beside those that autograd would hold otherwise. For a few steps: a trace takes
        memory for each saved tensor. It begins and ends by waiting for all transfers; in between it does not wait. The
        file appears when it is left, with an exception too. What is compiled for the first time inside is compiled
        again when it is called outside.

        Args:
            path: a file, which is replaced if it exists, in a directory that exists.

        Raises:
            ConfigError: at once, if the file could not be written there.
            OffloadError: when entered, if this object is being traced already; when left, if the file could not be
                written after all.
        """
        return Tracing(self, path)

    def close(self) -> None:
        """Waits for what is on its way, then gives back every tier's memory and files. Idempotent.

        Graphs that are still alive keep what they need until they go. Using the object again opens it again. What is
        not closed is given back when the object is garbage collected, and at the end of the process.
        """
        with self._accounts.lock:
            self._session = self._hooks.session = Session()
        self._lanes.close()

    def transfers_of(self, device: torch.device) -> Transfers:
        """Who carries out what compiled code asks for on ``device``.

        Raises:
            OffloadError: nothing can be moved off such a device here.
        """
        lane = self._lanes.of(device)
        if lane is None:
            raise OffloadError(
                f"a graph was compiled to offload from {device}, which this process cannot: it offloads from the CPU "
                "and from the accelerator that torch.accelerator.current_accelerator() names"
            )
        return lane.transfers

    def _prepare_for_compiled_code(self) -> None:
        """Has compilers put transfers into their graphs, or says that they cannot."""
        self._serves_compiled_code = True
        try:
            from eager_offload.compile.inductor import install

            install()
            asks = compiler_asks_hooks()
        except (ImportError, AttributeError):  # names of torch that are private, and gone
            asks = False
        if not asks:
            # Any other hooks: AOTAutograd leaves these to autograd, which calls them for what a graph saves.
            self._hook_pair = self.pack, unpack
            with self._accounts.lock:
                self._accounts.tally.demote("uncompiled")
            self._tell_once(
                "uncompiled",
                f"torch {torch.__version__} does not let saved-tensor hooks into compiled graphs as this version of "
                "eager_offload knows it: what a graph saves leaves when all of the graph has run. Gradients are the "
                "same; peak memory is not. Upgrade eager_offload, or use a torch that its README lists",
            )

    def _saw_foreign_hooks(self) -> None:
        with self._accounts.lock:
            self._accounts.tally.foreign_hooks += 1
        self._tell_once(
            "foreign",
            "other saved-tensor hooks were entered inside this context and hide from it what is saved there. Enter "
            "this context inside theirs, or leave one of the two out",
        )

    def _tell_once(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"eager_offload: {message}", RuntimeWarning, stacklevel=4)


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Context] = []


class _Context:
    """One ``with``: installs the hooks, and sees to what is left when they go."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._hooks = foreign.ours(*offload._hook_pair)
        self._watch = foreign.watch(offload._saw_foreign_hooks)  # not a method of this: a cycle for each `with`
        #: Whether its hooks have to be put on: an equal configuration has the same ones, and they may be there already.
        #: So they are on top at most once, and whoever finds them there can tell whose they are.
        self._pushes = False
        self._session = offload._hooks.session
        self._nodes_before = 0
        self._packed_before = 0

    def __enter__(self) -> None:
        offload, session = self._offload, self._session
        if not offload._contexts.stack:
            session.begin()
            offload._accounts.tally.begin()
            offload._lanes.trim()
        self._packed_before = session.packed
        self._nodes_before = autograd_sequence()
        self._pushes = top_pack_hook() is not self._hooks.pack_hook
        try:
            if self._pushes:
                self._hooks.__enter__()
        except RuntimeError as error:
            raise _explained(error) from error
        self._watch.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        offload = self._offload
        self._watch.__exit__()
        if self._pushes:
            self._hooks.__exit__(kind, error, trace)  # whatever others have left above them
        session = offload._hooks.session
        with offload._accounts.lock:
            if kind is None:  # else a full window would make whoever interrupts wait; the next pack sees to the rest
                for lane, line in session.lines.items():
                    lane.flush(line)
            seen = session is not self._session or session.packed != self._packed_before  # another: closed meanwhile
            if kind is None and not seen and autograd_sequence() > self._nodes_before and not has_compiled():
                offload._accounts.tally.empty_forwards += 1
                offload._tell_once(
                    "empty",
                    "autograd recorded operators inside the context, but no saved tensor could be seen: other hooks "
                    "inside it hide them, or the forward ran elsewhere. Enter this context inside the others, around "
                    "the forward alone",
                )
        if isinstance(error, RuntimeError) and _is_forbidden(error):
            raise _explained(error) from error

    def leave(self) -> None:
        """Takes the hooks away if an interrupt came before that was done."""
        self._watch.__exit__()
        if self._pushes and top_pack_hook() is self._hooks.pack_hook:
            self._hooks.__exit__(None, None, None)


def _is_forbidden(error: RuntimeError) -> bool:
    """Whether torch refused hooks, as ``torch.func`` transforms do."""
    return "saved tensor hooks" in str(error) and not isinstance(error, OffloadError)


def _explained(error: RuntimeError) -> OffloadError:
    return OffloadError(
        f"torch does not allow saved-tensor hooks here: {error} "
        "Call the transform outside `with offload:`, or leave the context out around it"
    )
