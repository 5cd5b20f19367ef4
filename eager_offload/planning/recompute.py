"""Which modules are worth computing again in backward: one knob, of a few positions.

[Note: the positions]
A model is mostly blocks that repeat. Computing every, every second or every fourth of them again, or in each block all
that attends to nothing, comes within a few percent of what a search among all modules finds; so these are traced and
replayed, and the fastest one that fits is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from eager_offload.planning.program import Program, kind_of, modules_around

#: Of so many blocks one is computed again.
_EVERY = (1, 2, 4)
#: Parts of the names of operators that attend: a product of products, and what is between them.
_ATTENDS = ("attention", "softmax")


def positions(program: Program) -> Iterator[tuple[str, ...]]:
    """Yields names of modules that may be computed again together, the most bytes first."""
    blocks = _blocks(program)
    for every in _EVERY:
        if every < len(blocks):
            yield blocks[::every]
    if inner := _inner(program, blocks):
        yield inner


def _blocks(program: Program) -> tuple[str, ...]:
    """Returns the modules of the kind that repeats and saves most, of which none is inside of another of them."""
    saved = _saved_bytes(program)
    kinds: dict[str, list[str]] = defaultdict(list)
    for number in program.repeatable:
        name = program.modules[number]
        if (kind := kind_of(name)) != name and saved[name]:
            kinds[kind].append(name)
    repeated = [names for names in kinds.values() if len(names) > 1]
    if not repeated:
        return ()
    # Of one that is all of another, the outer one, whose name is shorter.
    most: list[str] = max(repeated, key=lambda names: (sum(saved[name] for name in names), -len(names[0])))
    return tuple(most)


def _inner(program: Program, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """Returns in each of ``blocks`` the module right below that saves most of those that attend to nothing."""
    saved, attend = _saved_bytes(program), set[str]()
    for op in program.ops:
        if any(part in op.name for part in _ATTENDS):
            attend.update(modules_around(program.modules[op.module]))
    found = []
    repeatable = [program.modules[number] for number in program.repeatable]
    for block in blocks:
        below = [one for one in repeatable if one.startswith(f"{block}.") and "." not in one[len(block) + 1 :]]
        found += sorted((one for one in below if one not in attend and saved[one]), key=saved.__getitem__)[-1:]
    return tuple(found)


def _saved_bytes(program: Program) -> dict[str, int]:
    """Returns by module the bytes that may move and that it has made, inside of it too."""
    found: dict[str, int] = defaultdict(int)
    for storage in program.storages:
        for name in modules_around(program.modules[storage.module]):
            found[name] += storage.nbytes
    return found
