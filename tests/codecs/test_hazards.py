"""The matrix and hazards of order, sharing, versions and lifetime with ``codec="lossless"``, in their own process.

Those of steps that follow plans, of peaks and of a steady state are not among them: they count what does not travel.
"""

from __future__ import annotations

import pytest

from tests.processes import printed_by

HAZARDS = (
    *("copies", "interrupts", "reentry", "in_between", "short_memory", "overlapping", "replaced_memory"),
    *("versions", "subclasses", "lifetime", "copied_objects", "modes"),
)
#: Scripts have the bytes that travel, a list what is looked up without a codec; compiled programs have own settings.
LEFT_OUT = "script or aot_eager or inductor or with_a_table-simulated"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_hazards_with_what_is_packed_bit_for_bit() -> None:
    files = ["tests/test_matrix.py", *(f"tests/hazards/test_{name}.py" for name in HAZARDS)]
    chosen = ("-q", "-p", "no:cacheprovider", "-m", "not long", "-k", f"not ({LEFT_OUT})")
    assert " passed" in printed_by("-m", "pytest", *chosen, *files, seconds=850, TESTS_CODEC="lossless")
