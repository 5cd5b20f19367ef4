"""What no decision goes below: a linear program over parts of storages, solved by scipy's HiGHS."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from eager_offload.plan.predict import Problem


class _Rows:
    """Rows of a sparse matrix, each at most a number."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.limits: list[float] = []

    def at_most(self, limit: float, *terms: tuple[int, float]) -> None:
        self.entries += [(len(self.limits), column, factor) for column, factor in terms]
        self.limits.append(limit)

    def matrix(self, columns: int) -> coo_array:
        rows, places, factors = zip(*self.entries, strict=True)
        return coo_array((factors, (rows, places)), shape=(len(self.limits), columns))


def least_seconds(problem: Problem, budget: int) -> float:
    """A step takes at least as long, whatever part of each storage moves and whenever it does within the budget.

    At each operator the bytes that have left are at most those that were saved before it, and those that are back at
    least those that it or an earlier one asks for; from one operator to the next each of them grows by what the link
    carries in that time, which waits make longer. What lives, less what has left, and what is back, are within the
    budget. Windows are not looked at: they could only make it longer.
    """
    program = problem.program
    storages, count, half = program.storages, len(program.ops), program.forward_ops
    # Columns: of each storage the part that moves; of each operator how long compute waits for it, what has left, what
    # is back, and what was saved and asked for until then of all that moves.
    moves, waits, left, back, saved, asked = (sum([len(storages), *[count + 1] * 5][:place]) for place in range(6))
    columns = asked + count + 1
    rows, sums = _Rows(), _Rows()
    saves: dict[int, list[int]] = {}
    asks: dict[int, list[int]] = {}
    lives = [*program.other_bytes, 0]
    for number, one in enumerate(storages):
        saves.setdefault(one.saved + 1, []).append(number)
        asks.setdefault(one.asked, []).append(number)
        for op in range(one.made, one.dropped):
            lives[op] += one.nbytes
    for op in range(count + 1):
        for total, found in ((saved, saves), (asked, asks)):
            before = [(total + op - 1, 1.0)] if op else []
            new = [(moves + number, float(storages[number].moved_bytes)) for number in found.get(op, ())]
            sums.at_most(0.0, (total + op, -1.0), *before, *new)
        rows.at_most(0.0, (left + op, 1.0), (saved + op, -1.0))
        rows.at_most(0.0, (asked + op, 1.0), (back + op, -1.0))
        rows.at_most(0.0, (back + op, 1.0), (left + op, -1.0))
        rows.at_most(budget - lives[op], (left + op, -1.0), (back + op, 1.0))
        if op:
            for one, rate in ((left, problem.out), (back, problem.back)):
                carried = rate * problem.op_seconds[op - 1]
                rows.at_most(carried, (one + op, 1.0), (one + op - 1, -1.0), (waits + op, -rate))
    bounds = [(0.0, 1.0)] * len(storages) + [(0.0, None)] * (columns - len(storages))
    bounds[left] = (0.0, 0.0)
    for op in range(half + 1):
        bounds[back + op] = (0.0, 0.0)
    cost = np.zeros(columns)
    cost[waits : waits + count + 1] = 1.0
    found = linprog(
        cost,
        A_ub=rows.matrix(columns).tocsr(),
        b_ub=rows.limits,
        A_eq=sums.matrix(columns).tocsr(),
        b_eq=sums.limits,
        bounds=bounds,
        method="highs",
    )
    assert found.status == 0, found.message
    return problem.compute_seconds + float(found.fun)
