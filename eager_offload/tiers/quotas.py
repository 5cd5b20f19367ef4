"""What tiers hold of a pool that they share, and the most that they may.

[Note: quotas]
Several tiers may share a pool, and what is idle in it serves all of them. Each has a budget for the slots that
it has alive. The budgets bound all that the pool holds too: those that are pooled, since each is the same part of
the same machine, as if they were one; those in bytes that a user gave, added up.
"""

from __future__ import annotations

from collections.abc import Iterable

from eager_offload.tiers.base import Shortage
from eager_offload.tiers.guard import NoHeadroomError


class OverBudgetError(MemoryError):
    """What was asked for would go beyond what may be held."""


class Quota:
    """What one tier holds of a pool, and the most that it may hold; the pool's lock guards it. All in bytes.

    Args:
        budget: the most.
        pooled: quotas that are pooled may come to the largest of their budgets together. Those that are not add up.
    """

    __slots__ = ("__weakref__", "budget", "held_bytes", "overdraft", "peak_bytes", "pooled", "refusal", "used_bytes")

    def __init__(self, budget: int, *, pooled: bool) -> None:
        self.budget = budget
        self.pooled = pooled
        #: The most that ``used_bytes`` has been.
        self.peak_bytes = 0
        #: Why the machine should not give all of the budget, once it has given more than it should.
        self.overdraft: Shortage | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets the slots that there are."""
        #: In slots that are alive, as they were asked for; and with rounding.
        self.used_bytes = self.held_bytes = 0
        #: Why it was last given nothing, if it was not for its budget.
        self.refusal: Shortage | None = None

    def refuse(self, error: Exception) -> None:
        """Notes why it is given nothing: for its budget, or what ``error`` says."""
        if isinstance(error, OverBudgetError):
            self.refusal = None
        elif isinstance(error, NoHeadroomError):
            self.refusal = error.shortage
        else:
            text = str(error).partition("\n")[0]
            remedy = "end other programs that take memory, or set a lower host_budget"
            self.refusal = Shortage(f"the system refused it ({text})", remedy)


def bound_of(quotas: Iterable[Quota], limit: int | None = None) -> int | None:
    """Returns the bytes that ``quotas`` allow in all, or ``limit`` if that is less; ``None``: nothing bounds them."""
    budgets = [(quota.pooled, quota.budget) for quota in quotas]
    if not budgets:
        return limit
    pooled = max([budget for pooled, budget in budgets if pooled], default=0)
    bound = pooled + sum([budget for pooled, budget in budgets if not pooled])
    return bound if limit is None else min(bound, limit)
