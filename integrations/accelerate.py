"""Accelerate: a plugin for the scripts that call ``accelerator.prepare``.

[Note: What prepare returned] The plugin takes hold of what ``accelerator.prepare`` returned, and not of the model that
it was given: FSDP2, DeepSpeed and Megatron do not come through ``prepare_model``, compiling is its last step, and
regional compilation makes another module with a copy of the first one's calls.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

from accelerate import Accelerator  # type: ignore[import-untyped]  # has no types
from accelerate.utils import extract_model_from_parallel  # type: ignore[import-untyped]  # likewise
from torch import nn

from eager_offload import ConfigError, Offload, OffloadConfig

from .calls import OffloadedCalls
from .hiding import tell_what_hides
from .metrics import OffloadMetrics
from .settings import Given, config_from, switch

__all__ = ["OffloadPlugin"]


@dataclass
class OffloadPlugin:
    """Offloads what the training forwards of a prepared model save for backward.

        plugin = OffloadPlugin(min_bytes="4MiB")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        model = plugin.prepare(accelerator, model)

    Or, where the loss is computed outside of the model, by hand and without ``prepare``:

        with accelerator.accumulate(model), plugin.offload:
            loss = criterion(model(inputs), targets)

    ``None`` in a field means: ask the environment, then the defaults. Afterwards the fields hold what is in force.

    Args:
        config: an :class:`~eager_offload.OffloadConfig`, a mapping of its fields, or an
            :class:`~eager_offload.Offload` of your own, which stays yours to close. With a configuration or an
            ``Offload`` the variables of its fields are not asked.
        enabled: ``False`` moves nothing: :meth:`prepare` hands the model back, :attr:`offload` does nothing and
            :meth:`metrics` is empty. ``EAGER_OFFLOAD=0`` or ``=1`` in the environment comes before it.
        tier, min_bytes, max_inflight_bytes, prefetch_bytes, keep_last_bytes, pin_memory, host_budget, disk_budget,
            disk_path, verify: the fields of :class:`~eager_offload.OffloadConfig`; each comes before ``config``, and
            that before ``EAGER_OFFLOAD_<FIELD>``.

    Raises:
        ConfigError: for a value that is not accepted, or fields beside an ``Offload``.
    """

    config: Given = field(default=None, metadata={"help": "An OffloadConfig, a mapping of its fields, or an Offload."})
    enabled: bool | None = field(
        default=None, metadata={"help": "Whether anything is moved. The environment's EAGER_OFFLOAD comes before it."}
    )
    tier: str | None = field(default=None, metadata={"help": "Where saved tensors rest: 'auto', 'host' or 'disk'."})
    min_bytes: int | str | None = field(default=None, metadata={"help": "A smaller saved tensor stays where it is."})
    max_inflight_bytes: int | str | None = field(
        default=None, metadata={"help": "Bytes on their way out whose source is still held."}
    )
    prefetch_bytes: int | str | None = field(
        default=None, metadata={"help": "Bytes brought back before they are asked for."}
    )
    keep_last_bytes: int | str | None = field(
        default=None, metadata={"help": "The newest saved bytes, which stay, or 'auto'."}
    )
    pin_memory: bool | str | None = field(
        default=None, metadata={"help": "Whether host buffers are pinned, or 'auto'."}
    )
    host_budget: int | str | None = field(default=None, metadata={"help": "Most bytes held in host memory, or 'auto'."})
    disk_budget: int | str | None = field(default=None, metadata={"help": "Most bytes held on disk, or 'auto'."})
    disk_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = field(
        default=None, metadata={"help": "A directory for the spill file, or several."}
    )
    verify: bool | None = field(default=None, metadata={"help": "Whether what rests on disk is checksummed."})

    offload: Offload = field(init=False, repr=False, compare=False)
    """What offloads: a context for forwards of your own, and its ``stats()``. Does nothing where not ``enabled``."""

    def __post_init__(self) -> None:
        if not (self.enabled is None or isinstance(self.enabled, bool)):
            raise ConfigError(f"enabled={self.enabled!r} is not accepted: enabled takes True, False or None")
        self.enabled = switch(default=self.enabled is not False)
        given = {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}
        config = config_from(self.config, given)
        if not self.enabled:
            self.offload = _Idle()
        else:
            self.offload = self.config if isinstance(self.config, Offload) else Offload(config)
        self._closes = self.offload is not self.config
        self.config = config
        for name in _FIELDS:
            setattr(self, name, getattr(config, name))
        self._metrics = OffloadMetrics(self.offload)
        self._calls: weakref.WeakKeyDictionary[nn.Module, OffloadedCalls] = weakref.WeakKeyDictionary()

    def prepare(self, accelerator: Accelerator, model: nn.Module) -> nn.Module:
        """From now on calls of ``model`` offload, whenever it is training and gradients are wanted.

        May be called again, for the same model and for others.

        Args:
            accelerator: whose ``prepare`` returned ``model``.
            model: as it was returned: wrapped, sharded, compiled.

        Returns:
            ``model`` itself.

        Raises:
            ConfigError: for anything but a module, one that ``accelerator.prepare`` has not returned, or one that
                another plugin has prepared.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model={_kind(model)} is not accepted: prepare takes the accelerator, then the module that "
                "accelerator.prepare returned"
            )
        if not self.enabled:
            return model
        if not _is_prepared(accelerator, model):
            raise ConfigError(
                f"model={_kind(model)} is not accepted: it has not been through accelerator.prepare, which may put "
                "another module in its place. Call that first, then plugin.prepare(accelerator, model) on what it "
                "returned"
            )
        self._be_the_one(innermost := _innermost(model))
        if accelerator.is_local_main_process:
            tell_what_hides(
                model,
                "take FullyShardedDataParallelPlugin(activation_checkpointing=True) without "
                "activation_checkpointing_offload=True (fsdp_activation_checkpointing_offload in a file)",
            )
        if (before := self._calls.pop(model, None)) is not None:
            before.remove()  # and not left alone: model.compile() may have put itself in its place meanwhile
        calls = self._calls[model] = OffloadedCalls(model, self.offload)
        _prepared[innermost] = weakref.ref(self), calls
        return model

    def _be_the_one(self, innermost: nn.Module) -> None:
        """Two around one model would nest, and only the inner one would offload."""
        holder, calls = _prepared.get(innermost, (lambda: None, None))
        other = holder()
        if calls is None or other is self:
            return
        if other is None:  # nobody can have it let go any more, as where a cell of a notebook made it anew
            calls.remove()
        elif calls in other._calls.values():
            raise ConfigError(
                "a model that another OffloadPlugin has prepared is not accepted, since only one of them could "
                "offload: call remove() or close() of the other one first, or leave one out"
            )

    def metrics(self, steps: int = 1) -> dict[str, float]:
        """What this process has moved since the last call, for ``accelerator.log``.

        Args:
            steps: how many steps that were; amounts are for one. See :class:`OffloadMetrics` for names and units.
        """
        return self._metrics.read(steps) if self.enabled else {}

    def remove(self) -> None:
        """Models are called as before :meth:`prepare`. Idempotent."""
        while self._calls:
            _, calls = self._calls.popitem()
            calls.remove()

    def close(self) -> None:
        """:meth:`remove`, and gives every tier's memory and files back. Idempotent.

        An ``Offload`` of your own stays open: it is yours to close.
        ``accelerator.free_memory()`` and ``end_training()`` know nothing of those.
        """
        self.remove()
        if self._closes:
            self.offload.close()

    def __reduce__(self) -> tuple[Callable[[], OffloadPlugin], tuple[()]]:
        # A plugin travels to processes that are spawned; what it has opened, and the models that it knows, do not.
        return partial(type(self), self.config, self.enabled), ()


_FIELDS = [one.name for one in dataclasses.fields(OffloadConfig)]


class _Idle(Offload):
    """Stands where an ``Offload`` would, and moves nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def _is_prepared(accelerator: Accelerator, model: nn.Module) -> bool:
    """Whether ``accelerator.prepare`` has returned ``model``; ``True`` where Accelerate does not say what it has."""
    prepared = getattr(accelerator, "_models", None)  # private: 1.10 to 1.15
    if not isinstance(prepared, list):
        return True
    return any(_innermost(one) is _innermost(model) for one in prepared)


def _innermost(model: nn.Module) -> nn.Module:
    """What is inside of every wrapper, those of compilers included."""
    inside: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return inside


#: Which plugin, and by which calls, has prepared a model last, by what is inside of its wrappers.
_prepared: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[OffloadPlugin], OffloadedCalls]] = (
    weakref.WeakKeyDictionary()
)


def _kind(given: object) -> str:
    return f"<{type(given).__name__}>"
