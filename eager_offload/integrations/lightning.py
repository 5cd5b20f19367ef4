"""A callback for Lightning that runs training steps in ``with offload``.

    trainer = Trainer(callbacks=[OffloadCallback(min_bytes="4MiB")])

[Note: patching the strategy] The callback puts the context around ``strategy.training_step``, which a Trainer calls for
each training forward and nothing else (each accumulated batch, each closure of the optimizer; under manual optimization
it includes backward). It is outside of the wrappers of DDP, FSDP and compilers. The alternatives fail: batch hooks do
not close after a loss of ``None`` or an exception, and forward hooks of the module also run in validation. Under
automatic optimization ``strategy.backward`` follows; forwards that a loss runs again in it (e.g. GradCache) offload as
part of the same step.

[Note: restoring the strategy] Lightning calls ``teardown`` after success and ``on_exception`` after a failure, but an
earlier callback can prevent either call. ``setup`` therefore first removes patches left by a previous fit.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Unpack

from eager_offload import ConfigError, Offload
from eager_offload.config import OffloadFields
from eager_offload.errors import tell
from eager_offload.integrations.calls import (
    Given,
    InContext,
    around_step,
    missing,
    offload_from,
    warn_of_hiding_wrappers,
)
from eager_offload.integrations.first_batch import FirstBatch
from eager_offload.integrations.metrics import LogMetrics, OffloadMetrics, StepTrace, summarize
from eager_offload.tiers import limits
from eager_offload.torch_private import Patch

__all__ = ["OffloadCallback"]

#: Lightning's two packages. Their classes are unrelated, and installing ``lightning`` installs both.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_SWITCH = "gradient_checkpointing_disable() of the model, no activation_checkpointing_policy of FSDPStrategy"


def _callback_classes() -> tuple[type, ...]:
    """Returns ``Callback`` of each installed package, so that a Trainer of either accepts :class:`OffloadCallback`."""
    found: list[type] = []
    failed: list[Exception] = []
    for package in _PACKAGES:
        try:
            found.append(importlib.import_module(package).Callback)
        except Exception as error:  # a broken package; the other may import
            failed.append(error)
    if not found:
        raise missing("lightning", failed[0])
    return tuple(found)


class OffloadCallback(*_callback_classes()):  # type: ignore[misc]  # the bases are known at run time only
    """Offloads tensors that training steps of a ``Trainer`` save for backward, and none in validation, test or predict.

    Works with ``lightning.pytorch`` and ``pytorch_lightning``, every strategy, automatic and manual optimization. Every
    ``trainer.log_every_n_steps`` steps it logs the figures of
    :class:`~eager_offload.integrations.metrics.OffloadMetrics`, per batch and for this rank, with ``log_dict`` to the
    loggers and to ``trainer.callback_metrics``.

    Args:
        config: an ``Offload``, an ``OffloadConfig``, or a mapping of its fields. ``EAGER_OFFLOAD_*`` sets fields that
            are absent.
        log_metrics: ``True`` logs the three main figures, ``"all"`` every figure, ``False`` none.
        trace_step: the batch of a fit to trace, counted from 1.
        trace_path: the file to write the trace to, for https://ui.perfetto.dev.
        recompute: whether to plan the first call of the module with most of the trained parameters to
            ``device_budget`` with :func:`eager_offload.plan`, and to train by that plan.
        **fields: fields of :class:`~eager_offload.OffloadConfig`, which override all of the above.

    ``EAGER_OFFLOAD=0`` in the environment disables the callback. Files and memory are freed when a fit ends, except for
    an ``Offload`` that you passed in: close that yourself. A copy or a pickle (e.g. for the processes of ``ddp_spawn``)
    has a new ``Offload`` with the same configuration.

    Raises:
        ConfigError: for a value that :class:`~eager_offload.OffloadConfig` does not accept; when a fit begins, if the
            Trainer has another ``OffloadCallback``, or with ``recompute`` if modules are checkpointed.
        PlanError: in the first training step, if ``recompute`` is set and the step cannot be planned. Errors of the
            model itself are not wrapped.
    """

    #: The context of training steps; ``offload.stats()`` has all counters.
    offload: Offload

    def __init__(
        self,
        config: Given = None,
        *,
        log_metrics: LogMetrics = True,
        trace_step: int | None = None,
        trace_path: str = "offload_trace.json",
        recompute: bool = False,
        **fields: Unpack[OffloadFields],
    ) -> None:
        super().__init__()
        self.offload = offload_from(config, fields)
        self._first = FirstBatch.wanted(recompute, config, self.offload, _SWITCH)
        self._closes = not isinstance(config, Offload)
        self._log_metrics = log_metrics
        self._metrics = OffloadMetrics(self.offload, log_metrics)
        self._trace = StepTrace(self.offload, trace_step, trace_path)
        self._patches: list[Patch] = []
        self._batches = 0  # since metrics were last read
        self._batches_of_fit = self._moved_before = 0

    # -- while a Trainer fits -------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave()
        if stage != "fit" or not self.offload.config.enabled or not self._is_the_one(trainer):
            return
        limits.ranks_of_adapter = trainer.num_devices if trainer.world_size > 1 else 0
        self.offload.skip_in(pl_module)
        offload, first = self.offload, self._first

        def step(with_plan: bool) -> AbstractContextManager[object]:
            has_plan = first is None or first.is_planned
            return around_step(offload, first) if has_plan == with_plan else nullcontext()

        self._patches = [
            Patch(trainer.strategy, "training_step", partial(InContext, context=partial(step, True))),
            Patch(trainer.strategy, "backward", partial(InContext, context=offload.rest_of_step)),
        ]
        if first is not None:  # plan a call inside of the module's own step: its wrappers are called with a batch
            self._patches.append(Patch(pl_module, "training_step", partial(InContext, context=partial(step, False))))
        for patch in self._patches:
            patch.put_on()
        self._metrics.read()  # figures begin here
        self._batches = self._batches_of_fit = 0
        self._moved_before = self.offload.stats().offloaded_bytes

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._patches:
            warn_of_hiding_wrappers(pl_module, "`activation_checkpointing_policy` of FSDPStrategy does without it")
            if self._first is not None:
                self._first.prepare(pl_module, trainer.optimizers, trainer.accumulate_grad_batches)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._patches:
            self._trace.begin(self._batches_of_fit + 1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._trace.end()
        self._batches += 1
        self._batches_of_fit += 1
        if self._log_metrics and not trainer.barebones and self._patches and _logs_now(trainer, batch_idx):
            pl_module.log_dict(self._metrics.read(self._batches), batch_size=1)
            self._batches = 0

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        try:
            if self._patches and self._batches_of_fit:
                self.offload.no_effect.warn_if_nothing_moved(self._moved_before)
                summarize(self.offload)
        finally:
            self._leave()
        tell()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        patches, self._patches = self._patches, []
        for patch in patches:
            if isinstance(ours := patch.active, InContext):
                ours.context = nullcontext  # a later patch of others may keep ours from being removed
            patch.take_off()
        if self._first is not None:
            self._first.end()
        if patches:
            self._trace.end()
            if self._closes:
                self.offload.close()
        limits.ranks_of_adapter = 0

    def _is_the_one(self, trainer: Any) -> bool:
        """Returns whether this callback is the one of the Trainer that offloads."""
        if len(_given_callbacks(trainer)) > 1:
            raise ConfigError(
                "more than one OffloadCallback among the callbacks of a Trainer is not accepted, since only one of "
                "them could offload: leave the others out"
            )
        return True

    # -- copies ---------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        config = self.offload.config if self._first is None else self._first.config
        own = {"_first": self._first is not None, "_trace": (self._trace.step, self._trace.path), "_metrics": None}
        return {**vars(self), "offload": config, **own, "_patches": [], "_closes": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, offload=(offload := offload_from(state["offload"])))
        self._first = FirstBatch.wanted(state["_first"], None, offload, _SWITCH)
        self._metrics, self._trace = OffloadMetrics(offload, self._log_metrics), StepTrace(offload, *state["_trace"])


class CallbackFromEnvironment(OffloadCallback):
    """The callback that ``EAGER_OFFLOAD=1`` adds to every Trainer. Inactive if the user passed an ``OffloadCallback``.

    A Trainer built with the callbacks of another Trainer has two of these; only the first offloads.
    """

    def _is_the_one(self, trainer: Any) -> bool:
        first = next((one for one in trainer.callbacks if isinstance(one, CallbackFromEnvironment)), self)
        return first is self and not _given_callbacks(trainer)


def _given_callbacks(trainer: Any) -> list[OffloadCallback]:
    """Returns the ``OffloadCallback`` objects that the user passed to ``trainer``."""
    ours = [one for one in trainer.callbacks if isinstance(one, OffloadCallback)]
    return [one for one in ours if not isinstance(one, CallbackFromEnvironment)]


def _logs_now(trainer: Any, batch_idx: int) -> bool:
    """Returns whether Lightning forwards the figures of this batch to its loggers."""
    if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
        return False  # only the last accumulated batch is logged
    connector = getattr(trainer, "_logger_connector", None)
    # A private attribute. Without it we log too often, and Lightning drops the surplus.
    return bool(getattr(connector, "should_update_logs", True) or trainer.fast_dev_run)
