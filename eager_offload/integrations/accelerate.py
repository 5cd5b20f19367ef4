"""Accelerate: a plugin for the scripts that call ``accelerator.prepare``.

[Note: What prepare returned] The plugin takes hold of what ``accelerator.prepare`` returned, and not of the model that
it was given: FSDP2, DeepSpeed and Megatron do not come through ``prepare_model``, compiling is its last step, and
regional compilation makes another module with a copy of the first one's calls.
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
    warn_of_what_hides,
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
    """Offloads what the training forwards of a prepared model save for backward.

        plugin = OffloadPlugin(min_bytes="4MiB")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        model = plugin.prepare(accelerator, model)

    Or, where the loss is computed outside of the model, by hand and without ``prepare``:

        with accelerator.accumulate(model), plugin.offload:
            loss = criterion(model(inputs), targets)

    The fields that are in force can be read from it as attributes.

    Args:
        config: an :class:`~eager_offload.Offload` of your own, which stays yours to close, an
            :class:`~eager_offload.OffloadConfig`, a mapping of its fields, or ``None``.
        log_metrics: what :meth:`metrics` gives: ``True`` for the three that matter, ``"all"``, or ``False`` for none.
        trace_step: the training forward of a prepared model, the first being 1, that is traced until the next begins.
        trace_path: where that trace is written, for https://ui.perfetto.dev.
        recompute: has the first batch of the first model that is prepared planned to ``device_budget``, by
            :func:`eager_offload.plan`, and trains by that plan.
        **fields: fields of :class:`~eager_offload.OffloadConfig`, which come before ``config``, and that before
            ``EAGER_OFFLOAD_<FIELD>``. With ``enabled=False`` nothing is done, and :meth:`metrics` is empty.

    Raises:
        ConfigError: for a value that is not accepted, or fields beside an ``Offload``.
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
        """A context for forwards of your own, and its ``stats()``. Does nothing where not ``enabled``."""
        self._first = FirstBatch.wanted(recompute, config, self.offload, _SWITCH)
        #: What is in force.
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
        """From now on calls of ``model`` offload, whenever it is training and gradients are wanted.

        May be called again, for the same model and for others.

        Args:
            accelerator: whose ``prepare`` returned ``model``.
            model: as it was returned: wrapped, sharded, compiled.
            example: with ``recompute``, what ``model`` will be called with, as ``inputs`` of
                :func:`eager_offload.plan`: it is planned now, and not at its first call. All ranks together.

        Returns:
            ``model`` itself.

        Raises:
            ConfigError: for anything but a module, one that ``accelerator.prepare`` has not returned, or one that
                another plugin has prepared; with ``recompute`` for checkpointing of the framework's own; for an
                ``example`` without ``recompute``, or of a model in eval mode.
            PlanError: the step of ``example`` cannot be planned; an error of the model's own comes as it is.
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
                f"model={kind} is not accepted: it has not been through accelerator.prepare, which may put "
                "another module in its place. Call that first, then plugin.prepare(accelerator, model) on what it "
                "returned"
            )
        # Two around one model would nest, and only the inner one would offload.
        holder, calls = _prepared.get(innermost, (lambda: None, None))
        if calls is not None and (other := holder()) is not self:
            if other is None:  # it is gone, as where a cell of a notebook made it anew
                calls.remove()
            elif calls in other._calls.values():
                raise ConfigError(
                    "a model that another OffloadPlugin has prepared is not accepted, since only one of them could "
                    "offload: call remove() or close() of the other one first, or leave one out"
                )
        if accelerator.is_local_main_process:
            warn_of_what_hides(
                model,
                "take FullyShardedDataParallelPlugin(activation_checkpointing=True) without "
                "activation_checkpointing_offload=True (fsdp_activation_checkpointing_offload in a file)",
            )
        before = self._calls.pop(model, None)
        is_first = not self._calls if before is None else before.is_first
        if before is not None:
            before.remove()  # and not left alone: model.compile() may have put itself in its place meanwhile
        self.offload.skip_in(model)
        first = self._first if is_first else None  # another one goes by the plan of the first
        if first is not None:
            first.refuse_checkpointing(model)
            first.optimizers = getattr(accelerator, "_optimizers", ())  # private, likewise
            first.accumulation = accelerator.gradient_accumulation_steps
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
        """Returns what this process has moved since the last call, for one of ``steps`` steps: ``OffloadMetrics``."""
        return self._metrics.read(steps) if self.enabled else {}

    def remove(self) -> None:
        """Models are called as before :meth:`prepare`. Idempotent."""
        while self._calls:
            _, calls = self._calls.popitem()
            calls.remove()

    def close(self) -> None:
        """:meth:`remove`, a line about what moved, and gives every tier's memory and files back. Idempotent.

        An ``Offload`` of your own stays open: it is yours to close.
        ``accelerator.free_memory()`` and ``end_training()`` know nothing of those.
        """
        for calls in list(self._calls.values()):
            calls.warn_if_unseen()
        if self.offload.stats().saved_tensors:
            self.offload.warn_if_nothing_moved()
        self.remove()
        self._trace.end()
        if not self._summarized:
            self._summarized = True
            summarize(self.offload)
        if self._closes:
            self.offload.close()

    def __reduce__(self) -> tuple[Callable[[], OffloadPlugin], tuple[()]]:
        # A plugin travels to processes that are spawned; what it has opened, and the models that it knows, do not.
        return partial(type(self), self.config, **self._options), ()  # the configuration that was given


def _counting(plugin: OffloadPlugin) -> Callable[[nn.Module], bool]:
    """Returns :func:`is_training`, which counts its calls for the plugin, and does not keep it."""
    alive = weakref.ref(plugin)

    def asked(model: nn.Module) -> bool:
        training = is_training(model)
        if training and (found := alive()) is not None:
            found._forwards += 1
            found._trace.begin(found._forwards)
        return training

    return asked


def _innermost(model: nn.Module) -> nn.Module:
    """What is inside of every wrapper, those of compilers included."""
    inside: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return inside


#: Which plugin, and by which calls, has prepared a model last, by what is inside of its wrappers.
_prepared: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[OffloadPlugin], OffloadedCalls]] = (
    weakref.WeakKeyDictionary()
)
