"""A plugin for scripts that call ``accelerator.prepare``.

[Note: the prepared model] The plugin wraps the calls of the module that ``accelerator.prepare`` returned, not those of
the user's model: ``prepare`` compiles last, regional compilation returns a new module with a copy of the old module's
calls, and FSDP2, DeepSpeed and Megatron bypass ``prepare_model``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

from torch import nn

from eager_offload import ConfigError, Offload
from eager_offload.config import FIELDS, OffloadFields
from eager_offload.integrations.calls import (
    Given,
    OffloadedCalls,
    is_training,
    missing,
    offload_from,
    warn_of_hiding_wrappers,
)
from eager_offload.integrations.first_batch import FirstBatch
from eager_offload.integrations.metrics import LogMetrics, OffloadMetrics, StepTrace, summarize

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]  # has no types
    from accelerate.utils import extract_model_from_parallel  # type: ignore[import-untyped]  # likewise
except ImportError as error:
    raise missing("accelerate", error) from error

__all__ = ["OffloadPlugin"]

_INSTEAD = "write `with plugin.offload:` around the forward"
_SWITCH = "activation_checkpointing=False of the FSDP plugin, or model.gradient_checkpointing_disable()"


class OffloadPlugin:
    """Offloads the tensors that training forwards of a prepared model save for backward.

        plugin = OffloadPlugin(min_bytes="4MiB")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        model = plugin.prepare(accelerator, model)

    If the loss is computed outside of the model, enter the context yourself instead of calling ``prepare``:

        with accelerator.accumulate(model), plugin.offload:
            loss = criterion(model(inputs), targets)

    The plugin has each field of the configuration in force as an attribute.

    Args:
        config: an :class:`~eager_offload.Offload` (closed by you, not by the plugin), an
            :class:`~eager_offload.OffloadConfig`, a mapping of its fields, or ``None``.
        log_metrics: the contents of :meth:`metrics`: ``True`` for the three main figures, ``"all"``, or ``False`` for
            none.
        trace_step: the training forward of a prepared model to trace, counted from 1; the trace ends when the next
            begins.
        trace_path: the file to write the trace to, for https://ui.perfetto.dev.
        recompute: whether to plan the first batch of the first prepared model to ``device_budget`` with
            :func:`eager_offload.plan`, and to train by that plan.
        **fields: fields of :class:`~eager_offload.OffloadConfig`. They override ``config``, which overrides
            ``EAGER_OFFLOAD_<FIELD>``. With ``enabled=False`` the plugin does nothing, and :meth:`metrics` is empty.

    Raises:
        ConfigError: for a value that is not accepted, or for fields given together with an ``Offload``.
    """

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
        self._closes = not isinstance(config, Offload)
        self.offload = offload_from(config, fields)
        """The context, for forwards that you surround yourself, and its ``stats()``. Inactive if not ``enabled``."""
        self._first = FirstBatch.wanted(recompute, config, self.offload, _SWITCH)
        self.config = self.offload.config
        self._options: dict[str, Any] = {"log_metrics": log_metrics, "trace_step": trace_step, "trace_path": trace_path}
        self._options["recompute"] = recompute
        self._metrics = OffloadMetrics(self.offload, log_metrics)
        self._trace = StepTrace(self.offload, trace_step, trace_path)
        self._forwards = 0
        self._summarized = False
        self._calls: weakref.WeakKeyDictionary[nn.Module, OffloadedCalls] = weakref.WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        if name in FIELDS:
            return getattr(self.config, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def prepare(self, accelerator: Accelerator, model: nn.Module, example: object = None) -> nn.Module:
        """Makes calls of ``model`` offload from now on, if they train and gradients are enabled.

        May be called again, for the same model or for another.

        Args:
            accelerator: the accelerator whose ``prepare`` returned ``model``.
            model: the module as ``prepare`` returned it: wrapped, sharded, compiled.
            example: with ``recompute``, the arguments of a call of ``model``, as ``inputs`` of
                :func:`eager_offload.plan`. The model is then planned now instead of at its first call, by all ranks
                together.

        Returns:
            ``model`` itself.

        Raises:
            ConfigError: if ``model`` is not a module, did not come from ``accelerator.prepare``, or was prepared by
                another plugin; with ``recompute``, if a framework checkpoints modules of the model; if ``example`` is
                given without ``recompute`` or for a model in eval mode.
            PlanError: if the step of ``example`` cannot be planned. Errors of the model itself are not wrapped.
        """
        kind = f"<{type(model).__name__}>"
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model={kind} is not accepted: prepare takes the accelerator, then the module that "
                "accelerator.prepare returned"
            )
        if not self.enabled:
            return model
        innermost, prepared = _innermost(model), getattr(accelerator, "_models", None)  # private: 1.10 to 1.15
        if isinstance(prepared, list) and not any(_innermost(one) is innermost for one in prepared):
            raise ConfigError(
                f"model={kind} is not accepted: accelerator.prepare has not returned it. Call that first, and then "
                "plugin.prepare(accelerator, model) with the module that it returned"
            )
        # Two plugins on one model would nest, and only the inner one would offload.
        holder, calls = _prepared.get(innermost, (lambda: None, None))
        if calls is not None and (other := holder()) is not self:
            if other is None:  # that plugin is gone (e.g. a notebook cell was run again)
                calls.remove()
            elif calls in other._calls.values():
                raise ConfigError(
                    "a model that another OffloadPlugin has prepared is not accepted, since only one of them could "
                    "offload: call remove() or close() of the other one first, or leave one out"
                )
        if accelerator.is_local_main_process:
            warn_of_hiding_wrappers(
                model,
                "take FullyShardedDataParallelPlugin(activation_checkpointing=True) without "
                "activation_checkpointing_offload=True (fsdp_activation_checkpointing_offload in a file)",
            )
        before = self._calls.pop(model, None)
        is_first = not self._calls if before is None else before.is_first
        if before is not None:
            before.remove()  # model.compile() may have replaced the calls since, so wrap them again
        self.offload.skip_in(model)
        first = self._first if is_first else None  # further models follow the plan of the first
        if first is not None:
            optimizers = getattr(accelerator, "_optimizers", ())  # private: 1.10 to 1.15
            first.prepare(model, optimizers, accelerator.gradient_accumulation_steps)
        if example is not None:
            if first is None or not model.training:
                raise ConfigError(
                    "example=... is not accepted here: it takes OffloadPlugin(recompute=True), the first model that it "
                    "prepares, and model.train() before"
                )
            first.plan(model, example)
        calls = self._calls[model] = OffloadedCalls(model, self.offload, _counting(self), _INSTEAD, first)
        _prepared[innermost] = weakref.ref(self), calls
        return model

    def metrics(self, steps: int = 1) -> dict[str, float]:
        """Returns the figures of ``OffloadMetrics`` since the last call, divided by ``steps``, for this process."""
        return self._metrics.read(steps) if self.enabled else {}

    def remove(self) -> None:
        """Restores the calls of every prepared model. Idempotent."""
        while self._calls:
            _, calls = self._calls.popitem()
            calls.remove()

    def close(self) -> None:
        """Calls :meth:`remove`, prints a line of totals, and frees the memory and files of every tier. Idempotent.

        An ``Offload`` that you passed in stays open. ``accelerator.free_memory()`` and ``end_training()`` do not free
        tiers.
        """
        for calls in list(self._calls.values()):
            calls.warn_if_unseen()
        if self.offload.stats().saved_tensors:
            self.offload.no_effect.warn_if_nothing_moved()
        self.remove()
        self._trace.end()
        if not self._summarized:
            self._summarized = True
            summarize(self.offload)
        if self._closes:
            self.offload.close()

    def __reduce__(self) -> tuple[Callable[[], OffloadPlugin], tuple[()]]:
        # Spawned processes get the configuration, and not the open tiers or the prepared models.
        return partial(type(self), self.config, **self._options), ()


def _counting(plugin: OffloadPlugin) -> Callable[[nn.Module], bool]:
    """Returns :func:`is_training` with a counter of training forwards for ``plugin``."""
    alive = weakref.ref(plugin)  # prepared models hold the result, and must not keep the plugin alive

    def counted(model: nn.Module) -> bool:
        training = is_training(model)
        if training and (found := alive()) is not None:
            found._forwards += 1
            found._trace.begin(found._forwards)
        return training

    return counted


def _innermost(model: nn.Module) -> nn.Module:
    """Returns the module inside of every wrapper, including those of compilers."""
    inside: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return inside


#: The plugin that prepared a model last and its calls, by the model's innermost module.
_prepared: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[OffloadPlugin], OffloadedCalls]] = (
    weakref.WeakKeyDictionary()
)
