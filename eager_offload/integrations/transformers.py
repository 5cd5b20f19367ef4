"""A callback and a mixin for Transformers' ``Trainer`` and its subclasses (e.g. TRL's).

[Note: reach of a callback] No ``Trainer`` event surrounds forward, and none follows an exception. A callback gets only
the innermost model, so it wraps that model's calls, and unwraps a model whose training failed when the next training
begins. The mixin instead patches ``training_step``, which contains the loss, its backward and every compiled module.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from eager_offload import ConfigError, Offload
from eager_offload.config import OffloadFields, switched_on
from eager_offload.errors import tell
from eager_offload.integrations.calls import Given, InContext, OffloadedCalls, around_step, missing, offload_from
from eager_offload.integrations.first_batch import FirstBatch
from eager_offload.integrations.metrics import LogMetrics, OffloadMetrics, StepTrace, summarize
from eager_offload.torch_private import Patch

try:
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]  # has no types
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise missing("transformers", error) from error

__all__ = ["OffloadTrainerCallback", "OffloadTrainerMixin"]

_INSTEAD = "use OffloadTrainerMixin, which surrounds the whole training step"
_SWITCH = "gradient_checkpointing=False of TrainingArguments, and model.gradient_checkpointing_disable()"

if TYPE_CHECKING:
    _Base = Trainer  # what a mixin is mixed into
else:
    _Base = object


class OffloadTrainerCallback(TrainerCallback):
    """Offloads tensors that the model saves in training: ``Trainer(..., callbacks=[OffloadTrainerCallback()])``.

    Nothing moves in evaluation and prediction. At each logging step the callback adds the figures of
    :class:`~eager_offload.integrations.metrics.OffloadMetrics` to ``state.log_history`` and to the logs of later
    callbacks. The trackers of ``report_to`` run before any callback that a user passes, so they get the figures only
    with :class:`OffloadTrainerMixin`.

    Args:
        config: an ``Offload`` (closed by you), an ``OffloadConfig``, a mapping of its fields, or ``None``.
            ``EAGER_OFFLOAD_*`` sets fields that are absent. ``EAGER_OFFLOAD=0`` disables the callback.
        log_metrics: ``True`` logs the three main figures, ``"all"`` every figure, ``False`` none.
        trace_step: the optimizer step of a training to trace, counted from 1.
        trace_path: the file to write the trace to, for https://ui.perfetto.dev.
        recompute: whether to plan the first batch to ``device_budget`` with :func:`eager_offload.plan`, and to train by
            that plan.
        **fields: fields of ``OffloadConfig``.

    A copy or a pickle has a new ``Offload`` with the same configuration.

    Raises:
        ConfigError: for a value that is not accepted; when training begins, for ``torch.nn.DataParallel``, for models
            that Accelerate compiles with ``fullgraph``, for a second callback of this class or the mixin, and with
            ``recompute`` for gradient checkpointing.
        PlanError: in the first training step, if ``recompute`` is set and the step cannot be planned. Errors of the
            model itself are not wrapped.
    """

    #: Whether TRL's trainer enters the context because of ``activation_offloading=True``.
    _is_under_flag = False
    #: Whether the callback runs the model's calls in the context. Otherwise the trainer enters it.
    _wraps_calls = True

    def __init__(
        self,
        config: Given = None,
        *,
        log_metrics: LogMetrics = True,
        trace_step: int | None = None,
        trace_path: str | os.PathLike[str] = "offload_trace.json",
        recompute: bool = False,
        **fields: Unpack[OffloadFields],
    ) -> None:
        self._options: dict[str, Any] = {"log_metrics": log_metrics, "trace_step": trace_step, "trace_path": trace_path}
        self._options["recompute"] = recompute
        self._begin_with(offload_from(config, fields), config)
        self._closes = not isinstance(config, Offload)

    def _begin_with(self, offload: Offload | None, given: object = None) -> None:
        offload = offload if offload is not None and offload.config.enabled else None
        self.offload = offload
        """The ``Offload`` in use, with its ``stats()``; ``None`` if disabled."""
        self._metrics = self._trace = self._first = None
        if offload is not None:
            self._first = FirstBatch.wanted(self._options["recompute"], given, offload, _SWITCH)
            self._metrics = OffloadMetrics(offload, self._options["log_metrics"])
            self._trace = StepTrace(offload, self._options["trace_step"], self._options["trace_path"])
        self._saved_before = self._first_step = self._read_step = 0
        #: Identifies the running training: a trainer passes one state to all callbacks, a new one in each training.
        self._state: weakref.ref[TrainerState] | None = None
        self._model: weakref.ref[nn.Module] | None = None
        #: Restores the model's calls; runs by itself if this object is freed first.
        self._removal: weakref.finalize[Any, OffloadTrainerCallback] | None = None
        self._calls: OffloadedCalls | None = None

    def remove(self) -> None:
        """Restores the model's calls and frees memory and files. Idempotent.

        Needed only after a failed training, which otherwise leaves the calls wrapped until the next training of this
        model or with this callback, or until the callback is freed. Does not close an ``Offload`` that you passed in.
        """
        self._state = self._model = self._calls = None
        removal, self._removal = self._removal, None
        if removal is not None:
            removal()
        if self._first is not None:
            self._first.end()
        if self._trace is not None:
            self._trace.end()
        if self.offload is not None and self._closes:
            self.offload.close()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        # May be called again (auto_find_batch_size, after a failure), and with a step other than 0 (resumed training).
        if self.offload is None or self._metrics is None or model is None:
            return
        self._be_the_only_one(state, model)
        quantized = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
        if args.n_gpu > 1 and not quantized:  # as Trainer decides it
            raise ConfigError(
                f"{args.n_gpu} devices in one process are not accepted: Trainer wraps the model in "
                "torch.nn.DataParallel, which runs forward in its own threads, in which nothing can be offloaded. "
                "Start one process per device (`torchrun --nproc-per-node`, `accelerate launch`), or show this process "
                "only one device (CUDA_VISIBLE_DEVICES)"
            )
        if hiding := " and ".join(self._hiding_options(args)):
            self.offload.no_effect.expect_hidden(
                f"{hiding} hides from us the tensors that it moves itself: leave that option out, and they move on "
                "side streams and within the budget"
            )
        if self._first is not None:
            self._first.prepare(model, [] if optimizer is None else [optimizer], args.gradient_accumulation_steps)
        self.offload.skip_in(model)
        if self._wraps_calls:
            self._wrap_calls(model, self.offload, args)
        self._metrics.read()
        self._saved_before = self.offload.stats().offloaded_bytes
        self._first_step = self._read_step = state.global_step
        self._state, self._model = weakref.ref(state), weakref.ref(model)
        _begun.add(self)

    def _wrap_calls(self, model: nn.Module, offload: Offload, args: TrainingArguments) -> None:
        """Makes calls of ``model`` run in ``with offload``."""
        # The module that Accelerate compiles contains the model that a callback gets, or is a copy of it.
        plugin = AcceleratorState().dynamo_plugin if args.torch_compile else None
        for option in ("fullgraph", "use_regional_compilation"):
            if getattr(plugin, option, False):
                raise ConfigError(
                    f"{option}=True for torch_compile=True is not accepted by OffloadTrainerCallback, which reaches "
                    "only modules inside of the compiled one. Use OffloadTrainerMixin, or leave that option out "
                    f"(the environment's ACCELERATE_DYNAMO_USE_{option.removeprefix('use_').upper()})"
                )
        self._calls = OffloadedCalls(model, offload, instead=_INSTEAD, first=self._first)
        self._removal = weakref.finalize(self, self._calls.remove)
        self._removal.atexit = False

    def _hiding_options(self, args: TrainingArguments) -> Iterator[str]:
        """Yields options of frameworks that offload tensors themselves and so hide them from this library."""
        if getattr(args, "activation_offloading", False) and not self._is_under_flag:
            yield "activation_offloading=True (TRL)"
        for name in ("activation_checkpointing", "gradient_checkpointing"):  # new name, old name
            options = getattr(args, f"{name}_kwargs", None)
            if getattr(args, name, False) and isinstance(options, Mapping) and options.get("offload"):
                yield f"{name}_kwargs={{'offload': True}}"
                break
        plugin = getattr(AcceleratorState(), "fsdp_plugin", None)
        if getattr(plugin, "activation_checkpointing_offload", False):
            yield "activation_checkpointing_offload=True (Accelerate, FSDP2)"

    def _be_the_only_one(self, state: TrainerState, model: nn.Module) -> None:
        """Removes callbacks that failed trainings left on the model; raises if another callback is active.

        Contexts would nest, and only the innermost one sees saved tensors.
        """
        others = [one for one in _begun if one is not self and one._state is not None and one._state() is state]
        left = [one for one in _begun if one._model is not None and one._model() in (model, None)]
        for one in {self, *others, *left}:
            one.remove()
        for one in others:
            if one._is_under_flag and one.offload is not None:
                one.offload.no_effect.expect_hidden()  # `self` warns of the flag
        if any(not one._is_under_flag for one in others):
            raise ConfigError(
                "more than one OffloadTrainerCallback, or one beside OffloadTrainerMixin, is not accepted for a "
                "trainer, since only one of them could offload: leave the others out"
            )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._trace is not None and self._state is not None:
            self._trace.begin(state.global_step - self._first_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._trace is not None:
            self._trace.end()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None:
            figures = self._figures(state, logs)
            logs.update(figures)
            if state.log_history:
                state.log_history[-1].update(figures)  # a copy of the logs, made before any callback is called

    def _figures(self, state: TrainerState, logs: Mapping[str, float]) -> dict[str, float]:
        """Returns the figures since the last call, per step, if ``logs`` are of training steps; otherwise nothing."""
        if self._metrics is None or self._state is None or "loss" not in logs:
            return {}
        steps, self._read_step = state.global_step - self._read_step, state.global_step
        return self._metrics.read(steps)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.offload is None or self._state is None:
            return
        try:
            if state.global_step > self._first_step:
                if self._calls is not None:
                    self._calls.warn_if_unseen()
                self.offload.no_effect.warn_if_nothing_moved(self._saved_before)
                summarize(self.offload)
        finally:
            self.remove()
        tell()

    def __getstate__(self) -> dict[str, Any]:
        config = None if self.offload is None else self.offload.config
        if self._first is not None:
            config = self._first.config
        own = dict.fromkeys(("_metrics", "_trace", "_first", "_state", "_model", "_removal", "_calls"))
        return {**vars(self), "offload": config, **own, "_closes": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_with(None if state["offload"] is None else offload_from(state["offload"]))


#: Callbacks whose training is running or has failed.
_begun: weakref.WeakSet[OffloadTrainerCallback] = weakref.WeakSet()


class OffloadTrainerMixin(_Base):
    """Offloads tensors saved in a whole training step: ``class MyTrainer(OffloadTrainerMixin, Trainer)``.

    Unlike :class:`OffloadTrainerCallback` it covers a loss computed outside of the model (label smoothing,
    ``compute_loss_func``, your own ``compute_loss``), forwards that the loss runs again in backward (cached losses),
    and every wrapper and compiled module. All trackers get its figures. Nothing moves in evaluation.

    Args:
        offload: a ``config`` of :class:`OffloadTrainerCallback`, or ``False`` to disable. Defaults to
            :attr:`offload_config`. ``EAGER_OFFLOAD=0`` and ``=1`` override both.
        offload_options: ``log_metrics``, ``trace_step``, ``trace_path`` and ``recompute`` of
            :class:`OffloadTrainerCallback`. Defaults to :attr:`offload_options`.
        *arguments, **named: arguments of the trainer.

    Raises:
        ConfigError: as :class:`OffloadTrainerCallback`, but ``fullgraph`` is accepted.
    """

    offload_config: Given | bool = None
    """The default of ``offload``, to override in a subclass."""
    offload_options: Mapping[str, Any] = MappingProxyType({})
    """The default of ``offload_options``, to override in a subclass."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(OffloadTrainerMixin):
            bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not OffloadTrainerMixin)
            raise ConfigError(
                f"class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)}) is not accepted: after "
                "Trainer the mixin has no effect, and nothing would move. Write "
                f"class {cls.__name__}(OffloadTrainerMixin, {bases})"
            )

    def __init__(
        self,
        *arguments: Any,
        offload: Given | bool = None,
        offload_options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        given = self.offload_config if offload is None else offload
        config = None if isinstance(given, bool) else given
        options = self.offload_options if offload_options is None else offload_options
        self._offload_callback = _AroundLoss(config, **options) if switched_on(given is not False) else None
        super().__init__(*arguments, **named)
        if self._offload_callback is not None:
            self.add_callback(self._offload_callback)

    @property
    def offload(self) -> Offload | None:
        """The ``Offload`` in use, with its ``stats()``; ``None`` if disabled."""
        return self._offload_callback.offload if self._offload_callback else None

    def train(self, *arguments: Any, **named: Any) -> Any:
        if self._offload_callback is None or self.offload is None:
            return super().train(*arguments, **named)
        # Patch the instance, so that the outermost override runs in the context. Backward is inside of it.
        context = partial(around_step, self.offload, self._offload_callback._first)
        step = Patch(self, "training_step", partial(InContext, context=context))
        step.put_on()
        try:
            return super().train(*arguments, **named)
        finally:
            step.take_off()
            self._offload_callback.remove()

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        figures = {} if self._offload_callback is None else self._offload_callback._figures(self.state, logs)
        super().log({**logs, **figures}, *arguments, **named)


class _AroundLoss(OffloadTrainerCallback):
    _wraps_calls = False  # training_step runs in the context

    def on_log(self, *_: Any, **__: Any) -> None:
        pass  # OffloadTrainerMixin.log adds the figures
