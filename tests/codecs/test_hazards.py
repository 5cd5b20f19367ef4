"""Hazards of order, sharing, versions and lifetime with ``codec="lossless"``, on every backend, in their own process.

Those of steps that follow plans, of peaks and of a steady state are not among them: they count what does not travel.
"""

from __future__ import annotations

import pytest

from tests.processes import printed_by

HAZARDS = [
    f"tests/hazards/test_{name}.py"
    for name in (
        *("streams", "copies", "interrupts", "reentry", "in_between", "short_memory"),
        *("sharing", "views", "overlapping", "weights", "replaced_memory", "neighbours", "gradients_that_are_saved"),
        *("versions", "unseen_writes", "allowed_changes", "subclasses"),
        *("graphs", "lifetime", "copied_objects", "modes", "operators", "kinds"),
    )
]
#: They count bytes, or steps that follow a plan: see ``Backend.offload``.
OTHER_NUMBERS = "step_that_is_followed or every_layer_saves_without_grad"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_hazards_with_what_is_packed_bit_for_bit() -> None:
    chosen = ("-q", "-p", "no:cacheprovider", "-m", "not long", "-k", f"not ({OTHER_NUMBERS})")
    printed_by("-m", "pytest", *chosen, *HAZARDS, seconds=850, TESTS_CODEC="lossless")
