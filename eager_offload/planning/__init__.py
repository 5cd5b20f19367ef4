"""Before the first step: what fits, what is to move, and how long a step will take.

trace.py      a model and its inputs -> Program: one step as numbers (program.py); recorder.py and
              blocks.py write it down; target.py has the device's kernels and autocast, and stand_ins.py what stands for
              the model's tensors and functions
program.py    the step as numbers: Program; with a machine and windows: Problem
simulate.py   how much of it moves, in which windows: a rule of one number, bisected; and what comes of that: the
              library's schedule, replayed on numbers
levels.py     what a block may keep of itself where it is computed again, by price; and what the step becomes then
apply.py      puts checkpoints around modules that are computed again; verify.py compares what they save with what
              forward saved
states.py     bytes of an optimizer's states; sharding.py: what FSDP2 leaves of parameters and gradients on one
              device, and how several ranks agree
numbers.py    what planning leaves alone: modes, hooks, caches and random numbers
planner.py    plan(): all of that, and the search for the fastest step that fits; plan.py is what it returns, and its
              figure, with figures.py: its fields, text and file; command.py the command line
"""

from __future__ import annotations

from typing import Any

from eager_offload.errors import ConfigError

#: What a plan aims at.
POLICIES = ("least", "free", "max")
#: Why what is of TorchScript is refused.
OF_TORCHSCRIPT = (
    "TorchScript, whose operators cannot be traced: plan with the module that it was made of, or train without a plan: "
    "Offload(device_budget=...) learns from the first steps"
)


def parts_of(made: object, function: str) -> tuple[Any, Any, Any]:
    """Returns the model, the inputs and the loss, or ``None``, of what a user's ``function`` has made."""
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ConfigError(
            f"{function} is not accepted: it must return (model, inputs) or (model, inputs, loss), and "
            f"returned {type(made).__name__}"
        )
    return (*made, None)[:3]
