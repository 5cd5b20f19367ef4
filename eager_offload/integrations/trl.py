"""TRL: ``activation_offloading=True`` with this library underneath.

    from eager_offload.integrations import trl

    trl.install()
    trainer = SFTTrainer(model, args=SFTConfig(activation_offloading=True), ...)

Settings come from ``EAGER_OFFLOAD_*``. ``GRPOTrainer`` and ``RLOOTrainer`` have no such flag: put
:class:`~eager_offload.integrations.transformers.OffloadTrainerMixin` in front of them.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn

from eager_offload import Offload
from eager_offload.core.modules import ModuleCall, in_no_offload
from eager_offload.errors import tell, warn
from eager_offload.integrations.calls import missing
from eager_offload.integrations.metrics import OffloadMetrics, summarize

try:
    import trl.models
    from transformers import TrainerCallback
    from transformers.trainer import DEFAULT_CALLBACKS as _DEFAULT_CALLBACKS
except ImportError as error:
    raise missing("trl", error) from error

__all__ = ["get_act_offloading_ctx_manager", "install", "uninstall"]

#: Of which each trainer has one, and to which anything that is a callback may be added.
_CALLBACKS: list[Any] = _DEFAULT_CALLBACKS
_NAME = "get_act_offloading_ctx_manager"
#: By model, what a trainer enters around each of its training steps.
_made: weakref.WeakKeyDictionary[nn.Module, Offload] = weakref.WeakKeyDictionary()
#: TRL's own function, while this module's stands in its place.
_replaced: list[Any] = []


def get_act_offloading_ctx_manager(
    model: nn.Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = 5,
    warn_if_no_head: bool = True,
) -> Offload:
    """Returns what stands in for TRL's ``OffloadActivations``: an ``Offload``, to be entered around training steps.

    What the output head saves stays, since backward begins with it. ``use_streams``, ``min_offload_size`` and
    ``max_fwd_stash_size`` are of another design and change nothing; ``EAGER_OFFLOAD_MIN_BYTES`` says what is small.

    Args:
        model: the model that is trained.
        use_pin_memory: ``False`` takes host memory that is not pinned.
        warn_if_no_head: warns of a model that cannot tell its output head.
    """
    offload = _made[model] = Offload() if use_pin_memory else Offload(pin_memory=False)
    offload.expect_no_use()  # training may never begin
    find = getattr(model, "get_output_embeddings", None)
    if find is None and warn_if_no_head:
        warn(f"{type(model).__name__} has no get_output_embeddings, so what its output head saves moves too")
    if isinstance(head := find() if find is not None else None, nn.Module) and offload.config.enabled:
        weakref.finalize(offload, ModuleCall.begin(head, in_no_offload).end).atexit = False
    return offload


class _Report(TrainerCallback):
    """Logs the figures of training under the flag, says a line at its end, and gives memory and files back."""

    def __init__(self) -> None:
        self._offload: Offload | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        flagged = getattr(args, "activation_offloading", False) and model in _made
        self._offload = _made[model] if flagged and _made[model].config.enabled else None
        if self._offload is not None:
            self._step, self._metrics = state.global_step, OffloadMetrics(self._offload)
            self._moved_before = self._offload.stats().offloaded_bytes

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._offload is not None and logs and "loss" in logs:
            figures = self._metrics.read(state.global_step - self._step)
            self._step = state.global_step
            logs.update(figures)
            state.log_history[-1].update(figures)  # a copy of the logs, made before any callback is called

    def on_train_end(self, *_: Any, **__: Any) -> None:
        offload, self._offload = self._offload, None
        if offload is not None:
            offload.warn_if_nothing_moved(self._moved_before)
            summarize(offload)
            offload.close()
        tell()


def install() -> None:
    """Puts this library under ``activation_offloading=True`` of trainers that are made from now on. Idempotent."""
    if not _replaced:
        _replaced.append(getattr(trl.models, _NAME))
        _put(_replaced[0], get_act_offloading_ctx_manager)
        _CALLBACKS.append(_Report)


def uninstall() -> None:
    """Restores what :func:`install` has replaced; trainers that were made in between keep what they have."""
    if _replaced:
        _put(get_act_offloading_ctx_manager, _replaced.pop())
        _CALLBACKS.remove(_Report)


def _put(old: Any, new: Any) -> None:
    """Replaces TRL's name wherever it was imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("trl.") and vars(module).get(_NAME) is old:
            setattr(module, _NAME, new)
