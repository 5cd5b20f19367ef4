"""Makes TRL's ``activation_offloading=True`` use this library.

    from eager_offload.integrations import trl

    trl.install()
    trainer = SFTTrainer(model, args=SFTConfig(activation_offloading=True), ...)

Settings come from ``EAGER_OFFLOAD_*``. ``GRPOTrainer`` and ``RLOOTrainer`` do not have the flag: combine them with
:class:`~eager_offload.integrations.transformers.OffloadTrainerMixin`.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from eager_offload import Offload, OffloadConfig
from eager_offload.core.modules import ModuleCall, in_no_offload
from eager_offload.errors import warn
from eager_offload.integrations.calls import missing, put_everywhere
from eager_offload.integrations.transformers import OffloadTrainerCallback

try:
    import trl.models
    from transformers.trainer import DEFAULT_CALLBACKS as _DEFAULT_CALLBACKS
except ImportError as error:
    raise missing("trl", error) from error

__all__ = ["get_act_offloading_ctx_manager", "install", "uninstall"]

#: Each new trainer gets one instance of each class in this list.
_CALLBACKS: list[Any] = _DEFAULT_CALLBACKS
_NAME = "get_act_offloading_ctx_manager"
#: The ``Offload`` that a trainer enters around each training step, by model.
_made: weakref.WeakKeyDictionary[nn.Module, Offload] = weakref.WeakKeyDictionary()
#: TRL's own function while it is replaced.
_replaced: list[Any] = []


def get_act_offloading_ctx_manager(
    model: nn.Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = 5,
    warn_if_no_head: bool = True,
) -> Offload:
    """Returns an ``Offload`` for training steps, in place of TRL's ``OffloadActivations``.

    Tensors saved in the output head stay on the device, because backward needs them first. ``use_streams``,
    ``min_offload_size`` and ``max_fwd_stash_size`` are ignored; set ``EAGER_OFFLOAD_MIN_BYTES`` instead.

    Args:
        model: the model to train.
        use_pin_memory: whether host memory is pinned.
        warn_if_no_head: whether to warn if ``model`` does not have ``get_output_embeddings``.
    """
    if (offload := _made.get(model)) is not None and (offload.config.pin_memory is not False) == use_pin_memory:
        return offload  # of another trainer of this model: a report finds it by the model
    offload = _made[model] = Offload() if use_pin_memory else Offload(pin_memory=False)
    offload.no_effect.note_use()  # training may never begin
    find = getattr(model, "get_output_embeddings", None)
    if find is None and warn_if_no_head:
        warn(f"{type(model).__name__} has no get_output_embeddings, so tensors saved in its output head move too")
    if isinstance(head := find() if find is not None else None, nn.Module) and offload.config.enabled:
        weakref.finalize(offload, ModuleCall.begin(head, in_no_offload).end).atexit = False
    return offload


class _Report(OffloadTrainerCallback):
    """Logs figures of training under the flag, prints a line at the end, and frees memory and files."""

    _is_under_flag, _wraps_calls = True, False  # the trainer enters the context

    def __init__(self) -> None:
        super().__init__(OffloadConfig(enabled=False))  # until training begins under the flag

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        self._begin_with(_made.get(model) if getattr(args, "activation_offloading", False) else None)
        super().on_train_begin(args, state, control, model)


def install() -> None:
    """Makes ``activation_offloading=True`` of new trainers use this library. Idempotent."""
    if not _replaced:
        _replaced.append(getattr(trl.models, _NAME))
        put_everywhere("trl", _NAME, _replaced[0], get_act_offloading_ctx_manager)
        _CALLBACKS.append(_Report)


def uninstall() -> None:
    """Undoes :func:`install` for new trainers; existing trainers keep using this library. Idempotent."""
    if _replaced:
        put_everywhere("trl", _NAME, get_act_offloading_ctx_manager, _replaced.pop())
        _CALLBACKS.remove(_Report)
