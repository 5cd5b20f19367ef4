"""``recompute=True`` of the integrations: plans the first batch and trains by that plan."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from eager_offload import ConfigError, Offload, OffloadConfig, PlanError, contexts, plan
from eager_offload.config import size_text
from eager_offload.core.modules import modules_by_name, own_loss
from eager_offload.errors import warn
from eager_offload.integrations.metrics import say
from eager_offload.torch_private import Patch
from eager_offload.torch_private.fsdp import wrapped_modules
from eager_offload.torch_private.memory import tree_iter

#: The states of these optimizers are unknown before a step with real gradients; AdamW's are assumed.
_UNTRIED = (torch.optim.LBFGS, torch.optim.SparseAdam)
_NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
#: Calls until measurements are printed beside the plan's figures, and steps without a plan until a warning.
_TOLD, _LOOKED_AT = 5, 3


class FirstBatch:
    """Plans the first training call of a model and applies the plan to the model and ``offload`` until :meth:`end`.

    Args:
        offload: the ``Offload`` whose configuration the plan is made for.
        switch: for errors: how to switch off the framework's own checkpointing.

    Raises:
        ConfigError: if ``offload`` has ``policy="free"``.
    """

    def __init__(self, offload: Offload, switch: str) -> None:
        self._offload, self._switch = offload, switch
        #: The user's configuration. ``offload.config`` becomes the plan's.
        self.config = offload.config
        #: Optimizers that train the model. The plan counts the states of a torch optimizer, or assumes AdamW's.
        self.optimizers: Collection[Any] = ()
        self.accumulation = 1
        #: Trainable elements of each module called in the first step, and the number of backwards begun before it.
        self._met = weakref.WeakKeyDictionary[nn.Module, int]()
        self._backwards = 0
        self._applied: ExitStack | None = None
        self._planned: weakref.ref[nn.Module] | None = None
        self._calls = 0
        if self.config.is_free:
            raise ConfigError('recompute=True does not go with policy="free": leave one of them out')

    @classmethod
    def wanted(cls, recompute: bool, given: object, offload: Offload, switch: str) -> FirstBatch | None:
        """Returns a ``FirstBatch`` if ``recompute`` is true and ``offload`` enabled, otherwise ``None``.

        Raises:
            ConfigError: if ``given`` is an ``Offload``, or ``recompute`` is not a ``bool``.
        """
        if type(recompute) is not bool:
            raise ConfigError(f"recompute={recompute!r} is not accepted: recompute takes True or False")
        if recompute and isinstance(given, Offload):
            raise ConfigError(
                "recompute=True beside an Offload is not accepted, since a plan makes its settings: give the fields "
                "here, or plan yourself: plan.apply(model), and Offload(plan=plan)"
            )
        return cls(offload, switch) if recompute and offload.config.enabled else None

    @property
    def is_planned(self) -> bool:
        return self._applied is not None

    @contextmanager
    def noting_optimizers(self) -> Iterator[None]:
        """While entered, adds each new optimizer to ``optimizers``."""

        def noting(add: Callable[..., Any]) -> Callable[..., Any]:
            def noted(optimizer: Any, *arguments: Any, **named: Any) -> Any:
                made.add(optimizer)
                return add(optimizer, *arguments, **named)

            return noted

        self.optimizers = made = weakref.WeakSet[Any]()
        patch = Patch(torch.optim.Optimizer, "add_param_group", noting)
        patch.put_on()
        try:
            yield
        finally:
            patch.take_off()

    def count_step(self) -> None:
        """Counts a training step. Warns once if no call of the first three was planned."""
        self._count()
        if self._calls > _LOOKED_AT and not self.is_planned:
            self._applied = ExitStack()
            warn(
                "recompute=True has no effect: in the first steps no module with parameters to train was called as "
                "module(x) before backward, so nothing was planned. device_budget alone decides which tensors move"
            )

    def is_the_model(self, module: nn.Module) -> bool:
        """Returns whether to plan ``module``, one of several that a step calls.

        1. If ``module`` has at least half of the elements that the optimizers train, it is the model.
        2. Otherwise, or if no optimizer is known, the model is the module of the first step with the most trainable
           elements. It is planned in the second step, because smaller modules may be called before it.
        """
        if self.is_planned:
            return True
        own, groups = _trained(module.parameters()), [group for one in self.optimizers for group in one.param_groups]
        everything = _trained(one for group in groups for one in group["params"])
        if 2 * sum(everything[one] for one in everything.keys() & own) >= sum(everything.values()) > 0:
            return True
        backwards = contexts.process.backwards
        if not self._met:
            self._backwards = backwards
        if own and self._backwards == backwards:
            self._met[module] = sum(own.values())
        return self._backwards != backwards and self._met.get(module) == max(self._met.values())

    def begin(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Counts a training call of the model, which is not inside of a ``with offload``, and plans the first one."""
        if self.is_planned:
            if self._planned is None or self._planned() is modules_by_name(module)[""]:
                self._count()
        elif any(one.requires_grad for one in module.parameters()):
            if contexts.entered(self._offload) is not None:
                raise ConfigError(
                    "recompute=True plans the first call and configures the Offload by the plan, so this call must not "
                    "be inside of a `with` of the Offload. Call the model outside, or plan before that: "
                    "prepare(..., example=...)"
                )
            if not named:
                self.plan(module, arguments)
                return
            parameters = [*inspect.signature(modules_by_name(module)[""].forward).parameters.values()]
            if any(one.kind not in _NAMED for one in parameters[: len(arguments)]):
                raise PlanError(
                    f"{type(module).__name__} was called with positional and keyword arguments, but a plan takes only "
                    "one kind: give all in one way, or leave recompute=True out"
                )
            self.plan(module, {**{one.name: given for one, given in zip(parameters, arguments, strict=False)}, **named})

    def plan(self, module: nn.Module, inputs: object) -> None:
        """Plans a step of ``module`` with ``inputs`` and checkpoints the modules that the plan selects.

        All ranks must call it together.

        Raises:
            ConfigError: if ``module`` is checkpointed already.
            PlanError: if the step cannot be planned.
        """
        self._refuse_checkpointing(module)
        model = modules_by_name(module)[""]
        names, own = [*modules_by_name(model)], {id(one) for one in model.parameters()}
        patterns = {
            field: [one for one in own if any(fnmatchcase(name, one) for name in names)]
            for field, own in self.config.patterns.items()
        }
        optimizers = [getattr(one, "optimizer", one) for one in self.optimizers]  # Accelerate wraps them
        optimizers = [
            one for one in optimizers if own & {id(each) for group in one.param_groups for each in group["params"]}
        ]
        known = [one for one in optimizers if type(one).__module__.startswith("torch.optim.")]
        is_told = len(optimizers) == len(known) == 1 and not isinstance(known[0], _UNTRIED)
        try:
            found = plan(
                model,
                inputs,
                loss=_loss_of,
                optimizer=known[0] if is_told else torch.optim.AdamW,
                accumulation=self.accumulation,
                recompute=True,
                config=OffloadConfig.from_dict(patterns, self.config),
            )
        except PlanError as error:
            raise PlanError(
                f"{error}. With recompute=True the first batch is planned: leave it out, and device_budget alone "
                "learns from the first steps"
            ) from error
        self._offload.follow(found, self.config)
        self._offload.no_effect.note_use()
        self._applied, self._calls, self.optimizers = ExitStack(), 0, ()
        self._applied.enter_context(found.apply(model))
        self._planned = weakref.ref(model)
        say(str(found).splitlines()[0])
        if not found.fits:
            warn(
                f"device_budget={size_text(found.device_budget)} is too little for this model and batch by the plan, "
                f"whose least is {size_text(found.least_budget)}: training goes on by the nearest plan, with a peak of "
                f"{size_text(found.peak_bytes)}"
            )

    def prepare(self, model: nn.Module, optimizers: Collection[Any], accumulation: int) -> None:
        """Notes how ``model`` is trained. Raises ``ConfigError`` if a framework checkpoints modules of it."""
        self._refuse_checkpointing(model)
        self.optimizers, self.accumulation = optimizers, accumulation

    def _refuse_checkpointing(self, model: nn.Module) -> None:
        names = wrapped_modules(model, "CheckpointWrapper")
        names += [name for name, one in model.named_modules() if vars(one).get("gradient_checkpointing") is True]
        if names:
            raise ConfigError(
                f"recompute=True together with the framework's checkpointing ({names[0] or type(model).__name__!r}) is "
                f"not accepted, because that recomputes all of its blocks. Switch it off ({self._switch}), and the "
                "plan chooses the blocks to recompute, or leave recompute=True out"
            )

    def end(self) -> None:
        """Removes the plan's checkpoints. The next call is planned again. Idempotent."""
        applied, calls = self._applied, self._calls
        self._applied, self._planned, self._calls = None, None, 0
        self._met.clear()
        if applied is not None:
            if 0 < calls < _TOLD:
                self._tell()
            applied.close()

    def _count(self) -> None:
        self._calls += 1
        if self._calls == _TOLD:
            self._tell()

    def _tell(self) -> None:
        if (said := self._offload.stats().plan) is not None:
            say(f"the plan said {said}")


def _trained(parameters: Iterable[Tensor]) -> dict[int, int]:
    return {id(one): one.numel() for one in parameters if one.requires_grad and not is_lazy(one)}


def _loss_of(returned: Any) -> Any:
    """Returns the model's own loss, or else the sum of all returned tensors that require gradients."""
    found = own_loss(returned)
    if isinstance(found, Tensor) and found.requires_grad:
        return found
    return sum(one.sum() for one in tree_iter(returned) if isinstance(one, Tensor) and one.requires_grad)
