"""Before the first step: what fits, what is to move, and how long a step will take.

trace.py      a model and its inputs -> Program: one step as numbers (program.py); recorder.py and blocks.py write it
              down, stand_ins.py has what stands for the model's tensors
real_steps.py as trace.py, of steps that are run
predict.py    Program, a machine, a decision -> the step's time and its peak
solve.py      which storages are to move
planner.py    plan(): all of that; plan.py is what it returns, command.py the command line
"""
