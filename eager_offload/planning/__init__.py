"""Plans: the peak memory and the time of a training step, and the tensors to offload, before the first step runs.

trace.py      traces a model into a Recording; recorder.py and blocks.py log the step, target.py selects the device's
              kernels and autocast, stand_ins.py replaces the model's tensors and functions
program.py    the traced step (Program), and a Program on a device behind a link (Problem)
simulate.py   simulates a step, and searches for the fraction to offload and the windows
levels.py     the results that a recomputed block may keep, by price; rewrites a Program for recomputed blocks
apply.py      puts checkpoints around recomputed modules; selective.py keeps results in them; verify.py compares
              their saves with those of forward
states.py     bytes of optimizer states; sharding.py: FSDP2 and tensor parallelism, and agreement among ranks
numbers.py    isolates a trace from the process: modes, hooks, caches and random numbers
machine.py    rates of devices; measuring.py measures them, and links
planner.py    plan(), and the search for the fastest step that fits; plan.py and figures.py: its result, with text,
              figure and file; command.py: the command line
"""

from __future__ import annotations

from typing import Any

from eager_offload.errors import ConfigError

POLICIES = ("least", "free", "max")
OF_TORCHSCRIPT = (
    "TorchScript, whose operators cannot be traced: plan with the module that it was made of, or train without a plan: "
    "Offload(device_budget=...) learns from the first steps"
)


def parts_of(made: object, function: str) -> tuple[Any, Any, Any]:
    """Returns model, inputs and loss (``None`` if absent) of ``made``, the result of a user's ``function``."""
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ConfigError(
            f"{function} is not accepted: it must return (model, inputs) or (model, inputs, loss), and "
            f"returned {type(made).__name__}"
        )
    return (*made, None)[:3]
