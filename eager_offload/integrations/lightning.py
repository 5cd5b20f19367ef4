"""For Lightning: a callback under which training steps run in ``with offload``.

    trainer = Trainer(callbacks=[OffloadCallback(min_bytes="4MiB")])

[Note: The strategy's step] A Trainer calls ``strategy.training_step`` for each forward of training, and for nothing
else: once for each batch that is accumulated and for each closure of an optimizer that wants several, under manual
optimization with backward inside. It stands outside of the wrappers of DDP, FSDP and a compiler. Of the other places,
hooks around a batch are left open by a loss of ``None`` or an exception, and forward hooks of the module run under
validation as well. Under automatic optimization backward comes later, by ``strategy.backward``: a loss that runs its
forwards again in there (GradCache) has them offloaded as a part of the same step.

[Note: Left again] Lightning calls ``teardown`` of a callback where all went well, and ``on_exception`` where not. A
callback before this one can keep either from being called, so ``setup`` begins by putting back what is left over.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, update_wrapper
from typing import Any, Unpack

from eager_offload import ConfigError, Offload
from eager_offload.config import OffloadFields
from eager_offload.errors import tell
from eager_offload.integrations.calls import Given, around_step, missing, offload_from, warn_of_hiding_wrappers
from eager_offload.integrations.first_batch import FirstBatch
from eager_offload.integrations.metrics import LogMetrics, OffloadMetrics, StepTrace, summarize
from eager_offload.tiers import limits
from eager_offload.torch_private import Patch

__all__ = ["OffloadCallback"]

#: The packages that Lightning is installed as. Their classes are not related; ``lightning`` brings the other one along.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_SWITCH = "gradient_checkpointing_disable() of the model, no activation_checkpointing_policy of FSDPStrategy"


def _callback_classes() -> tuple[type, ...]:
    """Returns ``Callback`` of every package that is installed: whichever a Trainer is from knows ours as its own."""
    found: list[type] = []
    failed: list[Exception] = []
    for package in _PACKAGES:
        try:
            found.append(importlib.import_module(package).Callback)
        except Exception as error:  # one is broken; the other one may be fine
            failed.append(error)
    if not found:
        raise missing("lightning", failed[0])
    return tuple(found)


class OffloadCallback(*_callback_classes()):  # type: ignore[misc]  # the bases are known when it runs
    """Offloads what training steps of a ``Trainer`` save for backward; never in validation, test or predict.

    For ``lightning.pytorch`` and for ``pytorch_lightning``, every strategy, automatic and manual optimization. The
    figures of :class:`~eager_offload.integrations.metrics.OffloadMetrics` are logged with ``log_dict`` every
    ``trainer.log_every_n_steps`` steps, those of one batch on this rank, to the loggers and to
    ``trainer.callback_metrics``.

    Args:
        config: an ``Offload`` of your own, an ``OffloadConfig``, or a mapping of its fields; what is not given is read
            from ``EAGER_OFFLOAD_*``.
        log_metrics: ``True`` logs the three figures that matter, ``"all"`` every one, ``False`` none.
        trace_step: the batch of a fit, the first being 1, that is traced.
        trace_path: where that trace is written, for https://ui.perfetto.dev.
        recompute: has the first call of the module that has most of what is trained planned to ``device_budget``, by
            :func:`eager_offload.plan`, and trains by that plan.
        **fields: fields of :class:`~eager_offload.OffloadConfig`, which come before all of that.

    ``EAGER_OFFLOAD=0`` in the environment switches it off. Files and memory are given back when a fit ends, those of an
    ``Offload`` of your own when you close it. A copy or a pickle, such as the one that ``ddp_spawn`` sends to its
    processes, has an ``Offload`` of its own with the same configuration.

    Raises:
        ConfigError: for what :class:`~eager_offload.OffloadConfig` does not accept; when a fit begins, if another
            ``OffloadCallback`` is among the callbacks, and with ``recompute`` for modules that are checkpointed.
        PlanError: from the first training step, if ``recompute`` is wanted and that cannot be planned; an error of the
            model's own comes as it is.
    """

    #: What offloads; ``offload.stats()`` also has what was not logged, and what became of everything.
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
        OffloadMetrics(self.offload, log_metrics)  # which refuses what is not accepted
        self._trace = StepTrace(self.offload, trace_step, trace_path)
        #: What is around the strategy's methods while a Trainer fits.
        self._patches: list[Patch] = []
        self._metrics: OffloadMetrics | None = None
        self._batches = 0  # since they were last read
        self._batches_of_fit = self._moved_before = 0

    # -- while a Trainer fits -------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave()
        if stage != "fit" or not self.offload.config.enabled or not self._is_the_one(trainer):
            return
        limits.ranks_of_adapter = trainer.num_devices if trainer.world_size > 1 else 0
        self.offload.skip_in(pl_module)
        offload, first = self.offload, self._first

        def around() -> AbstractContextManager[object]:
            return around_step(offload, first) if first is None or first.is_planned else nullcontext()

        def inside() -> AbstractContextManager[object]:
            return nullcontext() if first is None or first.is_planned else around_step(offload, first)

        self._patches = [
            Patch(trainer.strategy, "training_step", partial(_Offloaded, context=around)),
            Patch(trainer.strategy, "backward", partial(_Offloaded, context=offload.rest_of_step)),
        ]
        if first is not None:  # of the module's own step: wrappers around it are called with a batch for that
            self._patches.append(Patch(pl_module, "training_step", partial(_Offloaded, context=inside)))
        for patch in self._patches:
            patch.put_on()
        self._metrics = (
            OffloadMetrics(self.offload, self._log_metrics) if self._log_metrics and not trainer.barebones else None
        )
        self._batches = self._batches_of_fit = 0
        self._moved_before = self.offload.stats().offloaded_bytes

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._patches:
            warn_of_hiding_wrappers(pl_module, "`activation_checkpointing_policy` of FSDPStrategy does without it")
            if self._first is not None:
                self._first.refuse_checkpointing(pl_module)
                self._first.optimizers = trainer.optimizers
                self._first.accumulation = trainer.accumulate_grad_batches

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._patches:
            self._trace.begin(self._batches_of_fit + 1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._trace.end()
        self._batches += 1
        self._batches_of_fit += 1
        if self._metrics is not None and _logs_now(trainer, batch_idx):
            pl_module.log_dict(self._metrics.read(self._batches), batch_size=1)
            self._batches = 0

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        try:
            if self._patches and self._batches_of_fit:
                self.offload.warn_if_nothing_moved(self._moved_before)
                summarize(self.offload)
        finally:
            self._leave()
        tell()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        patches, self._patches = self._patches, []
        for patch in patches:
            if isinstance(ours := patch.active, _Offloaded):
                ours.context = nullcontext  # where another's around it keeps it from going
            patch.take_off()
        if self._first is not None:
            self._first.end()
        if patches:
            self._trace.end()
            if self._closes:
                self.offload.close()
            limits.ranks_of_adapter = 0

    def _is_the_one(self, trainer: Any) -> bool:
        """Whether it is this one, of all that a Trainer has, that offloads."""
        if len(_given_callbacks(trainer)) > 1:
            raise ConfigError(
                "more than one OffloadCallback among the callbacks of a Trainer is not accepted, since only one of "
                "them could offload: leave the others out"
            )
        return True

    # -- copies ---------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "offload": self.offload.config if self._first is None else self._first.config,
            "_first": self._first is not None,
            "_patches": [],
            "_metrics": None,
            "_closes": True,
            "_trace": (self._trace.step, self._trace.path),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        offload = offload_from(state["offload"])
        first = FirstBatch.wanted(state["_first"], None, offload, _SWITCH)
        self.__dict__.update(state, offload=offload, _trace=StepTrace(offload, *state["_trace"]), _first=first)


class CallbackFromEnvironment(OffloadCallback):
    """What ``EAGER_OFFLOAD=1`` adds to every Trainer. Beside a callback that was given to one it does nothing.

    A Trainer that is made with the callbacks of another one has two of them, of which the first offloads.
    """

    def _is_the_one(self, trainer: Any) -> bool:
        first = next((one for one in trainer.callbacks if isinstance(one, CallbackFromEnvironment)), self)
        return first is self and not _given_callbacks(trainer)


def _given_callbacks(trainer: Any) -> list[OffloadCallback]:
    """The callbacks that were given to ``trainer``, by its user."""
    ours = [one for one in trainer.callbacks if isinstance(one, OffloadCallback)]
    return [one for one in ours if not isinstance(one, CallbackFromEnvironment)]


class _Offloaded:
    """A strategy's method in a context. A copy or a pickle is that of the method alone: the copy's own."""

    def __init__(self, method: Callable[..., Any], context: Callable[[], AbstractContextManager[object]]) -> None:
        self._method = method
        self.context = context
        update_wrapper(self, method)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with self.context():
            return self._method(*arguments, **named)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        return _same, (self._method,)  # a method, which is copied as the method of its copied object


def _same(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


def _logs_now(trainer: Any, batch_idx: int) -> bool:
    """Whether Lightning passes on to its loggers what is logged for this batch."""
    if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
        return False  # it logs the last batch of those that are accumulated
    connector = getattr(trainer, "_logger_connector", None)
    # A private name; without it, what is logged too often is left out by Lightning.
    return bool(getattr(connector, "should_update_logs", True) or trainer.fast_dev_run)
