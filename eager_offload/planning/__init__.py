"""Before the first step: what fits, what is to move, and how long a step will take.

trace.py      a model and its inputs -> Program: one step as numbers (program.py); recorder.py, blocks.py
              and calls.py write it down, coded.py chooses codecs; target.py has the device's kernels and autocast, and
              guessed.py the functions whose saves may be others there
real_steps.py as trace.py, of steps that are run
predict.py    Program, a machine, a decision -> the step's time and its peak
solve.py      which storages are to move, which modules to be computed again: a search; recompute.py has the step with
              checkpoints as numbers, and in which order modules are taken
rehearse.py   the library moves what was decided on a simulated device (simulated.py): the peak and the time that are
              given out
decide.py     solve and rehearse, until a budget is kept to; where modules are computed again, trace that before
numbers.py    what planning leaves alone: modes, hooks and random numbers
apply.py      checkpoints around the modules of a plan
planner.py    plan(): all of that; plan.py is what it returns, with figures.py and files.py; command.py the command
              line, drawing.py the figure; ranks.py has several ranks agree
"""

from __future__ import annotations

#: What a plan aims at.
POLICIES = ("least", "free", "max")
