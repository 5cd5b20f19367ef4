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

from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
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

    Raises:
        ConfigError: for what is not accepted; when training begins, for ``torch.nn.DataParallel`` and for models that
            Accelerate compiles with ``fullgraph``.
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
        """Calls the model as before. Needed only after training that failed, and there if the model lives on."""
        _installed.discard(self)
        removal, self._removal = self._removal, None
        if removal is not None:
            removal()

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
        for left in list(_installed):
            if left is self or left._model is None or left._model() is model:
                left.remove()
        _refuse_compiled_around(args)
        self._run.begin(args, model, state.global_step)
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
            self.remove()
            self._run.end(state.global_step)
            self._run.close()


#: Those whose calls are on a model; what failed training left there would hide what comes inside of it.
_installed: weakref.WeakSet[OffloadTrainerCallback] = weakref.WeakSet()


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
        ConfigError: for what is not accepted; when training begins, for ``torch.nn.DataParallel``.
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
        stack = super().compute_loss_context_manager()
        run, model = self._offload_run, self.model
        # Evaluation and prediction come through here too.
        if run is not None and isinstance(model, nn.Module) and is_training(model):
            stack.enter_context(run.offload)
        return stack

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
        self._run.begin(args, model, state.global_step)


class _Run:
    """One ``Offload`` in the trainings of one trainer: what is refused, told and counted."""

    def __init__(self, given: Given, fields: Mapping[str, Any]) -> None:
        self.offload = offload_from(given, fields)
        self._is_the_users = isinstance(given, Offload)
        self._metrics = OffloadMetrics(self.offload)
        self._began_with = self.offload.stats()
        self._first_step = self._read_step = 0

    def begin(self, args: TrainingArguments, model: nn.Module | None, step: int) -> None:
        """Training begins, or begins again.

        Args:
            step: the optimizer steps that lie before it; not 0 where a checkpoint is resumed from.
        """
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
        self._first_step = self._read_step = step

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
        if not self._is_the_users:
            self.offload.close()


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
