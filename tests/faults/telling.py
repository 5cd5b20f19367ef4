"""What a run tells of the faults that it has injected."""

from __future__ import annotations


def sentence(faults: int, *, well: bool) -> str:
    """How many there were; that nothing came of them only where the whole run went well."""
    count = f"{faults:,} faults injected"
    return f"{count}: 0 wrong gradients, 0 leaks, 0 hangs" if well else f"{count} in what passed"
