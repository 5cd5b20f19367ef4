"""For Transformers' ``Trainer`` and those that are made of it, such as TRL's.

[Note: Two ways in] No event surrounds forward, and none follows an exception. :class:`OffloadTrainerMixin` overrides
``compute_loss_context_manager``, which stands around all that makes the loss and outside of every compiled module.
:class:`OffloadTrainerCallback` is given the innermost model and nothing else: it runs the calls of that in the context,
and what it leaves on the model when training fails is taken off when the next one begins.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accelerate.state import AcceleratorState  # type: ignore[import-untyped]  # has no types
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from eager_offload import ConfigError, Offload

from .calls import OffloadedCalls, is_training
from .metrics import OffloadMetrics
from .settings import Given, offload_from, switch

__all__ = ["OffloadTrainerCallback", "OffloadTrainerMixin"]

if TYPE_CHECKING:
    _Base = Trainer  # what a mixin is mixed into
else:
    _Base = object


class OffloadTrainerCallback(TrainerCallback):
    """``Trainer(..., callbacks=[OffloadTrainerCallback(min_bytes="4MiB")])``: the model offloads while it trains.

    Nothing moves in evaluation and prediction. At each logging step the figures of
    :class:`~eager_offload.integrations.metrics.OffloadMetrics` go into ``state.log_history`` and to all callbacks that
    come after this one: see :meth:`add_to`.

    Args:
        config: an ``Offload`` (which stays yours to close), an ``OffloadConfig``, a mapping of its fields, or ``None``:
            what is not given is read from ``EAGER_OFFLOAD_*``. ``EAGER_OFFLOAD=0`` switches all of this off.
        **fields: fields of ``OffloadConfig``.

    A copy or a pickle has an ``Offload`` of its own with the same configuration.

    Raises:
        ConfigError: for what is not accepted; when training begins, for ``torch.nn.DataParallel``, for models that
            Accelerate compiles with ``fullgraph``, and if another callback of this class or the mixin is there too.
    """

    def __init__(self, config: Given = None, **fields: Any) -> None:
        self._run = _Run(config, fields) if switch(True) else None
        #: Takes what is on the model off again; by itself where this object goes before.
        self._removal: weakref.finalize[Any, OffloadTrainerCallback] | None = None
        self._model: weakref.ref[nn.Module] | None = None

    @property
    def offload(self) -> Offload | None:
        """What moves the bytes, with its ``stats()``; ``None`` if it is switched off."""
        return self._run.offload if self._run else None

    def add_to(self, trainer: Trainer) -> None:
        """Makes this the first callback of ``trainer``, so that the trackers of ``report_to`` get its figures too.

        They come before all that a user gives in ``callbacks`` or to ``add_callback``.
        """
        trainer.callback_handler.callbacks.insert(0, self)

    def remove(self) -> None:
        """Calls the model as before, and gives memory and files back. Idempotent.

        Needed only after training that failed: what it leaves stays until the next training of the same model, of this
        callback, or until this object goes. An ``Offload`` of your own is not closed.
        """
        _installed.discard(self)
        removal, self._removal = self._removal, None
        if removal is not None:
            removal()
        if self._run is not None:
            self._run.close()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        # Called again for each batch size that is tried, and after training that has failed.
        if self._run is None or model is None:
            return
        _refuse_others(self._run, state)
        self.remove()
        _remove_from(model)
        _refuse_compiled_around(args)
        self._run.begin(args, model, state)
        self._model = weakref.ref(model)
        self._removal = weakref.finalize(self, OffloadedCalls(model, self._run.offload).remove)
        self._removal.atexit = False
        _installed.add(self)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if self._run is not None and logs is not None and self._removal is not None and "loss" in logs:
            figures = self._run.figures(state.global_step)
            logs.update(figures)
            if state.log_history:
                state.log_history[-1].update(figures)  # a copy of the logs, made before anybody is told

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._run is not None and self._removal is not None:
            try:
                self._run.end(state.global_step)
            finally:
                self.remove()

    def __getstate__(self) -> dict[str, Any]:
        config = self._run.offload.config if self._run else None
        return {**vars(self), "_run": config, "_removal": None, "_model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        config = state["_run"]
        self.__dict__.update(state, _run=None if config is None else _Run(config, {}))


#: Those whose calls are on a model; what failed training left there would hide what comes inside of it.
_installed: weakref.WeakSet[OffloadTrainerCallback] = weakref.WeakSet()


def _remove_from(model: nn.Module | None) -> None:
    for left in list(_installed):
        if left._model is None or left._model() is model:
            left.remove()


class OffloadTrainerMixin(_Base):
    """``class MyTrainer(OffloadTrainerMixin, Trainer)``: whatever makes the loss in training offloads.

    With a loss outside of the model (label smoothing, ``compute_loss_func``, a ``compute_loss`` of your own), around
    every wrapper and compiled module, and never in evaluation. The figures of
    :class:`~eager_offload.integrations.metrics.OffloadMetrics` are in what :meth:`log` is given at each logging step.

    Args:
        offload: what :class:`OffloadTrainerCallback` takes as ``config``, or ``False`` for none. The default is
            :attr:`offload_config`. ``EAGER_OFFLOAD=0`` and ``=1`` overrule both.
        *arguments, **named: the trainer's.

    Raises:
        ConfigError: for what is not accepted; when training begins, for ``torch.nn.DataParallel``, and if an
            :class:`OffloadTrainerCallback` is among the callbacks.
    """

    offload_config: Given | bool = None
    """The class's own configuration."""

    def __init__(self, *arguments: Any, offload: Given | bool = None, **named: Any) -> None:
        given = self.offload_config if offload is None else offload
        self._offload_run: _Run | None = None
        if switch(given is not False):
            self._offload_run = _Run(None if isinstance(given, bool) else given, {})
        super().__init__(*arguments, **named)
        if self._offload_run is not None:
            self.add_callback(_Begins(self._offload_run))

    @property
    def offload(self) -> Offload | None:
        """What moves the bytes, with its ``stats()``; ``None`` if it is switched off."""
        return self._offload_run.offload if self._offload_run else None

    def train(self, *arguments: Any, **named: Any) -> Any:
        try:
            result = super().train(*arguments, **named)
            if self._offload_run is not None:
                self._offload_run.end(self.state.global_step)
            return result
        finally:
            if self._offload_run is not None:
                self._offload_run.close()

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        run, model = self._offload_run, self.model
        with contextlib.ExitStack() as stack:
            # Trainer returns a stack that has entered all that is in it, for which entering it again does nothing.
            # What a class between the two returns may be any context.
            stack.enter_context(super().compute_loss_context_manager())
            # Evaluation and prediction come through here too.
            if run is not None and isinstance(model, nn.Module) and is_training(model):
                stack.enter_context(run.offload)
            return stack.pop_all()

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        if self._offload_run is not None and "loss" in logs:
            logs.update(self._offload_run.figures(self.state.global_step))
        super().log(logs, *arguments, **named)


class _Begins(TrainerCallback):
    """Tells of each beginning: with `auto_find_batch_size` there is one for every size that is tried."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        _refuse_others(self._run, state)
        _remove_from(model)
        self._run.begin(args, model, state)


class _Run:
    """One ``Offload`` in the trainings of one trainer: what is refused, told and counted."""

    def __init__(self, given: Given, fields: Mapping[str, Any]) -> None:
        self.offload = offload_from(given, fields)
        self._is_the_users = isinstance(given, Offload)
        self._metrics = OffloadMetrics(self.offload)
        self._began_with = self.offload.stats()
        self._first_step = self._read_step = 0
        self._state: weakref.ref[TrainerState] | None = None

    def begin(self, args: TrainingArguments, model: nn.Module | None, state: TrainerState) -> None:
        """Training begins, or begins again; not with step 0 where a checkpoint is resumed from."""
        _refuse_data_parallel(args, model)
        for option in _hiding_options(args):
            warnings.warn(
                f"eager_offload: {option} offloads by saved-tensor hooks too, and only one can have a tensor: leave "
                "that option out",
                RuntimeWarning,
                stacklevel=2,
            )
        self._metrics.read()
        self._began_with = self.offload.stats()
        self._first_step = self._read_step = state.global_step
        self._state = weakref.ref(state)
        _begun.add(self)

    def is_in(self, state: TrainerState) -> bool:
        """Whether the training that it began is the one of ``state``."""
        return self._state is not None and self._state() is state

    def figures(self, step: int) -> dict[str, float]:
        """What an optimizer step moved, of those since the last time."""
        steps, self._read_step = step - self._read_step, step
        return self._metrics.read(steps)

    def end(self, step: int) -> None:
        """Training has ended well, after optimizer step ``step``: says so if it was all for nothing."""
        stats = self.offload.stats()
        if step > self._first_step and stats.offloaded_bytes == self._began_with.offloaded_bytes:
            warnings.warn(
                f"eager_offload: {step - self._first_step} steps of training moved nothing. {' '.join(stats.advice)}",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Gives memory and files back, where nobody else uses them; the next training takes them again."""
        self._state = None
        if not self._is_the_users:
            self.offload.close()


#: Those whose training may be going on.
_begun: weakref.WeakSet[_Run] = weakref.WeakSet()


def _refuse_others(run: _Run, state: TrainerState) -> None:
    """Nobody is told what other callbacks a trainer has, but all of them get the same state, a new one each time."""
    others = [other for other in _begun if other is not run and other.is_in(state)]
    if not others:
        return
    for callback in list(_installed):
        if callback._run in others:
            callback.remove()
    run.close()
    raise ConfigError(
        "more than one OffloadTrainerCallback, or one beside OffloadTrainerMixin, is not accepted for a trainer, since "
        "only one of them could offload: leave the others out"
    )


def _refuse_data_parallel(args: TrainingArguments, model: nn.Module | None) -> None:
    quantized = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
    if args.n_gpu > 1 and not quantized:  # as Trainer decides it
        raise ConfigError(
            f"{args.n_gpu} devices in one process are not accepted: Trainer wraps the model in "
            "torch.nn.DataParallel, which runs forward in threads of its own, where nothing can be offloaded. Start "
            "one process for each device (`torchrun --nproc-per-node`, `accelerate launch`), or show this one device "
            "alone (CUDA_VISIBLE_DEVICES)"
        )


def _refuse_compiled_around(args: TrainingArguments) -> None:
    """Accelerate's compiled module is around the model that a callback gets, or is a copy of it."""
    if not args.torch_compile:
        return
    plugin = AcceleratorState().dynamo_plugin
    for option in ("fullgraph", "use_regional_compilation"):
        if getattr(plugin, option, False):
            raise ConfigError(
                f"{option}=True for torch_compile=True is not accepted by OffloadTrainerCallback, which reaches only "
                "what is inside of the compiled module. Take OffloadTrainerMixin, or leave that option out (the "
                f"environment's ACCELERATE_DYNAMO_USE_{option.removeprefix('use_').upper()})"
            )


def _hiding_options(args: TrainingArguments) -> Iterator[str]:
    """Options of the frameworks whose own offloading hides tensors from ours, or ours from theirs."""
    if getattr(args, "activation_offloading", False):
        yield "activation_offloading=True (TRL)"
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # the second is what it was called before
        options = getattr(args, f"{name}_kwargs", None)
        if getattr(args, name, False) and isinstance(options, Mapping) and options.get("offload"):
            yield f"{name}_kwargs={{'offload': True}}"
            break
    plugin = getattr(AcceleratorState(), "fsdp_plugin", None)
    if getattr(plugin, "activation_checkpointing_offload", False):
        yield "activation_checkpointing_offload=True (Accelerate, FSDP2)"
