"""Before the first step: what fits, what is to move, and how long a step will take.

trace.py      a model and its inputs -> Program: one step as numbers (program.py); recorder.py, blocks.py
              and calls.py write it down; target.py has the device's kernels
              and autocast, and guessed.py the functions whose saves may be others there
problem.py    Program, a machine, windows -> Problem
choose.py     how much of it moves, in which windows: a rule of one number, bisected
replay.py     what comes of that: the library's schedule, replayed on numbers
recompute.py  which modules are worth computing again; apply.py puts checkpoints around them, and verify.py compares
              what they save with what forward saved
states.py     bytes of an optimizer's states; sharding.py: what FSDP2 leaves of parameters and gradients on one device
numbers.py    what planning leaves alone: modes, hooks, caches and random numbers
held.py       what holds a tensor of a trace afterwards; rebound.py has functions reach the copies
planner.py    plan(): all of that; plan.py is what it returns, with figures.py and files.py; command.py the command
              line, drawing.py the figure; ranks.py has several ranks agree
"""

from __future__ import annotations

#: What a plan aims at.
POLICIES = ("least", "free", "max")
#: Why what is of TorchScript is refused.
OF_TORCHSCRIPT = (
    "TorchScript, whose operators cannot be traced: plan with the module that it was made of, or train without a plan: "
    "Offload(device_budget=...) learns from the first steps"
)
