"""H54, H68: a table only hints: steps that fit it follow it, and one that is wrong in any way changes no bit."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from eager_offload import Offload
from eager_offload.core.step_table import Fate, KnownTable, Row, StepTable
from eager_offload.stats import KeepReason
from tests.hazards.backends import Backend, SimulatedBackend, assert_settled, offloader_of
from tests.hazards.programs import REGIMES, Around, Regime, Settled, assert_identical, assert_moved
from tests.programs import Run, corpus, leaf
from tests.programs.parts.functions import custom
from tests.programs.tables import FIRST, LAYERS, branches
from tests.sampling import search
from tests.threads import collect

SIDE = 16
SIZE = SIDE * SIDE * 4


def chain(x: Tensor, count: int = 3) -> Tensor:
    y = x
    for _ in range(count):
        y = (y * 0.5).exp()
    return y.sum()


# -- one that fits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "followed"), [("auto", 3), (True, 5), (False, 0)])
def test_h54_how_soon_a_step_is_looked_up(policy: bool | str, followed: int, backend: Backend) -> None:
    offload = backend.offload(step_tables=policy)
    for seed in range(6):
        assert_identical(branches(Run(), FIRST, seed), branches(Run(Settled(offload)), FIRST, seed))
    stats = assert_settled(offload)
    assert (stats.table_forwards, stats.table_misses) == (followed, {})
    assert (offload.step_table() is not None) == (followed > 0)
    assert_moved(stats)


def test_h54_what_is_expected_next_comes_back_early_and_once_within_the_window(backend: Backend) -> None:
    offload = backend.offload(step_tables=True, max_inflight_bytes=2 * SIZE)
    for _ in range(3):
        offload.reset_stats()
        with Settled(offload):
            first, second = chain(leaf(SIDE, SIDE)), chain(leaf(SIDE, SIDE, seed=2))
        second.backward()
        early = offload.stats(synchronize=True).bytes_in
        first.backward()
        del first, second
    stats = assert_settled(offload)
    assert (stats.bytes_out, stats.bytes_in) == (6 * SIZE, 6 * SIZE)
    assert early >= 3 * SIZE
    assert 0 < stats.inflight_bytes_peak <= 2 * SIZE


def test_h54_what_a_node_holds_and_the_next_one_needs_is_not_brought_twice(backend: Backend) -> None:
    """A product asks for both of its factors, and each of these for itself once more; the window has room for one."""
    offload = backend.offload(step_tables=True, prefetch_bytes=SIZE)
    for _ in range(3):
        offload.reset_stats()
        with Settled(offload):
            x = leaf(SIDE, SIDE)
            for _ in range(4):
                x = x.sigmoid() * x.tanh()
        x.sum().backward()
        del x
    stats = assert_settled(offload)
    assert stats.bytes_out == 8 * SIZE
    assert stats.bytes_in <= 12 * SIZE


# -- one that a step differs from -------------------------------------------------------------------------------------

#: How many steps of a program follow, and what differs in the others.
FOLLOWED: dict[str, tuple[int, dict[str, int]]] = {
    "H54-a-step-of-another-size": (3, {"size": 1}),
    "H54-a-step-with-one-layer-more": (3, {"more": 1}),
    "H54-a-step-with-one-layer-less": (3, {"fewer": 1}),
    "H54-a-step-differentiated-in-another-order": (3, {"order": 2}),
    "H54-a-storage-that-is-shared-no-more": (2, {"share": 1}),
    "H54-a-tensor-that-needs-no-gradient-now": (1, {}),
    "H54-a-layer-that-trains-after-it-was-frozen": (4, {}),
    "H54-keep-in-one-step-of-some": (3, {}),
    "H54-prefer-in-one-step-of-some": (3, {}),
    "H54-prefer-in-all-steps-but-one": (3, {}),
    "H54-region-in-one-step-of-some": (3, {"share": 1}),
    "H54-a-function-that-looks-twice": (2, {}),
    "H54-a-graph-of-gradients": (2, {}),
    "H54-backwards-1-1-2-1": (3, {}),
    "H54-backwards-2-2-3-2": (3, {}),
    "H54-half-a-storage-in-the-place-of-a-tensor": (2, {"size": 1}),
    "H54-a-part-of-a-larger-storage-in-the-place-of-a-tensor": (2, {"size": 1}),
    "H54-an-odd-address-in-the-place-of-a-tensor": (2, {"requires_grad": 1}),
    "H54-zeros-that-are-nowhere-in-the-place-of-a-tensor": (2, {"requires_grad": 1}),
    "H54-another-class-in-the-place-of-a-tensor": (2, {"requires_grad": 1}),
    "H54-a-view-of-a-weight-in-the-place-of-a-tensor": (2, {"fewer": 1}),
    "H14-steps-alike-but-for-the-stream": (6, {}),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_h54_what_differs_is_counted_and_each_save_as_without(name: str) -> None:
    (program,) = (one for one in corpus() if one.name == name)
    found = []
    with SimulatedBackend() as backend:
        for step_tables in (True, False):
            offload = backend.offload(step_tables=step_tables)
            program(Run(Settled(offload)))
            stats = assert_settled(offload)
            assert (stats.table_forwards, stats.table_misses) == (FOLLOWED[name] if step_tables else (0, {}))
            kept = {reason: nbytes for reason, nbytes in stats.kept_bytes.items() if nbytes}
            found.append([stats.saved_bytes, stats.offloaded_bytes, stats.shared_bytes, kept, stats.bytes_out])
        backend.assert_nothing_is_held()
    whole = "in-the-place-of" in name  # a part of a storage leaves, or shares, by how the steps before were
    assert found[0][: None if whole else 1] == found[1][: None if whole else 1]


@pytest.mark.parametrize(
    ("begin", "kept"),
    [
        (lambda offload, _: offloader_of(offload).crash(), {"failed": 6}),
        (lambda offload, ends: ends.enter_context(offload.trace(os.devnull)), {}),
    ],
)
def test_h54_what_begins_in_the_middle_of_a_step_changes_no_bit(
    begin: Callable[..., object], kept: dict[str, int], backend: Backend
) -> None:
    def step(around: Around, begin: Callable[[], object] = lambda: None) -> list[Tensor | None]:
        leaves = [leaf(SIDE, SIDE, seed=seed) for seed in range(3)]
        with around:
            losses = [chain(leaves[0])]
            begin()
            losses += [chain(x) for x in leaves[1:]]
        while losses:
            losses.pop(0).backward()
        return [x.grad for x in leaves]

    offload, expected = backend.offload(step_tables=True), step(nullcontext())
    for _ in range(2):
        step(Settled(offload))
    with ExitStack() as ends:
        assert_identical(expected, step(Settled(offload), lambda: begin(offload, ends)))
    stats = offload.stats(synchronize=True)
    assert (stats.table_forwards, stats.table_misses) == (2, {})
    assert {reason: stats.kept_bytes[reason] for reason in kept} == {why: count * SIZE for why, count in kept.items()}
    assert_identical(expected, step(Settled(offload)))
    assert stats.bytes_out > 0


# -- one that is wrong ------------------------------------------------------------------------------------------------


def resized(row: Row) -> Row:
    return dataclasses.replace(row, nbytes=row.nbytes // 2, storage_nbytes=row.storage_nbytes // 2)


def begun_at_once(rows: list[Row], number: int = 0) -> None:
    """Each copy is as early as a table can say, also of what is not filled by then."""
    rows[:] = [dataclasses.replace(row, fate=Fate.MOVE, reason=None, last_save=-1) for row in rows]


def shared_late(rows: list[Row], number: int) -> None:
    """What has begun to leave may have been written since, in a way that no version counts."""
    begun_at_once(rows)
    rows[number] = dataclasses.replace(rows[number], fate=Fate.SHARE, owner=0)


def swapped(rows: list[Row], number: int) -> None:
    other = (number + 3) % len(rows)
    rows[number], rows[other] = rows[other], rows[number]


def changed(**fields: Any) -> Callable[[list[Row], int], None]:
    def change(rows: list[Row], number: int) -> None:
        rows[number] = dataclasses.replace(rows[number], **fields)

    return change


#: What may be wrong with a row, by its number.
EDITS: dict[str, Callable[[list[Row], int], object]] = {
    "dropped": lambda rows, number: rows.pop(number),
    "doubled": lambda rows, number: rows.insert(number, rows[number]),
    "swapped": swapped,
    "resized": lambda rows, number: rows.__setitem__(number, resized(rows[number])),
    "begun at once": begun_at_once,
    "shared late": shared_late,
    "with gradients the other way": lambda rows, number: rows.__setitem__(
        number, dataclasses.replace(rows[number], requires_grad=not rows[number].requires_grad)
    ),
    "of an earlier step": changed(fate=Fate.SHARE, owner=-1, last_save=-1),
    "kept": changed(fate=Fate.KEEP, reason=KeepReason.ALIVE),
    "left": changed(fate=Fate.STAY, reason=None),
    "saved again for ever": changed(last_save=1 << 30),
}


def table_with(rows: list[Row], order: list[int]) -> StepTable:
    """A table whose numbers fit together, whatever they say of a step."""
    found: list[Row] = []
    for number, row in enumerate(rows):
        if row.fate is Fate.SHARE:
            owner = row.owner if row.owner < number and (row.owner < 0 or found[row.owner].owner == row.owner) else -1
            found.append(dataclasses.replace(row, owner=owner, last_save=-1))
        else:
            last = min(row.last_save, len(rows) - 1)
            found.append(dataclasses.replace(row, owner=number, last_save=last if last > number else -1))
    return StepTable(tuple(found), tuple(number for number in order if number < len(found)))


def taught(backend: Backend, step: Callable[[Around], object]) -> StepTable:
    """What two steps have taught."""
    offload = backend.offload(step_tables=True)
    for _ in range(2):
        step(Settled(offload))
    table = offload.step_table()
    assert table is not None
    return table


def misled(backend: Backend, table: StepTable, **fields: Any) -> Offload:
    """An ``Offload`` that looks its first step up in ``table``, and starts each copy as early as that allows."""
    facts = [(row.nbytes, row.storage_nbytes, row.requires_grad, row.owner) for row in table.rows]
    offload, known = backend.offload(step_tables=True, **fields), KnownTable(table, facts)
    known.times = 1
    saves = offload._hooks.saved_tensors(leaf(1, 1).device)
    saves.tables._known.append(known)
    saves.keeping.leaves_early = True
    return offload


def test_h68_a_table_that_is_wrong_in_any_way_changes_no_bit(backend: Backend) -> None:
    """Rows dropped, doubled, swapped, resized, too early, or of another model; asked for in another order."""
    backend.sources_change = True

    def check(layers: list[str], model: list[str], edits: list[tuple[str, int]], turned: int, regime: Regime) -> None:
        table = taught(backend, lambda around: branches(Run(around), layers))
        rows, order = [*table.rows], [*table.order]
        for edit, number in edits:
            if rows:
                EDITS[edit](rows, number % len(rows))
        if not rows or not any(number < len(rows) for number in order):
            return
        wrong = table_with(rows, [*order[turned:], *order[:turned]])
        offload = misled(backend, wrong, **regime.fields)
        for seed in range(3):
            run = Run(regime.around(offload))
            assert_identical(branches(Run(), model or layers, seed), branches(run, model or layers, seed))
        assert assert_settled(offload).bytes_out > 0
        while backend.offloads:
            backend.offloads.pop().close()

    # Where parts of storages leave by themselves, too little is left for a table.
    layers = st.lists(st.sampled_from(sorted(LAYERS.keys() - {"halves", "small"})), min_size=2, max_size=5)
    another = st.one_of(st.just([]), st.just([]), st.lists(st.sampled_from(sorted(LAYERS)), min_size=2, max_size=5))
    edits = st.lists(st.tuples(st.sampled_from(sorted(EDITS)), st.integers(0, 30)), max_size=3)
    search(check, layers, another, edits, st.integers(0, 3), st.sampled_from(REGIMES), fixed=40)


def unread(ctx: Any, gradient: Tensor) -> Tensor:
    assert len(ctx.saved_tensors) == 1
    return gradient


def written_meanwhile(x: Tensor, arrive: Callable[[], object]) -> Tensor:
    h = x * 2
    y = h.sin().exp().cos()
    arrive()
    h.data.mul_(3)
    return y + h.cos()


def filled_later(x: Tensor, arrive: Callable[[], object]) -> Tensor:
    """The second operator may fill it yet, as ``rrelu`` does with its noise."""

    def scale(ctx: Any, gradient: Tensor) -> Tensor:
        return math.prod(ctx.saved_tensors, start=gradient)

    mask = torch.full((SIDE, SIDE), 2.0)
    return custom(custom(x * 2, scale, mask), scale, x * 3, mask)


def of_another_version_counter(x: Tensor, arrive: Callable[[], object]) -> Tensor:
    """``hypot_`` saves what it reads, computes, and saves what is there then, in a version of the same number."""
    h = (x * 2).add_(1)
    y, alias = custom(x * 3, unread, h), custom(h, lambda ctx, gradient: gradient, forward=lambda h: h.data)
    return y + alias.hypot_(leaf(SIDE, SIDE, seed=5, grad=False))


def of_a_later_version(x: Tensor, arrive: Callable[[], object]) -> Tensor:
    """The same in two versions of one counter: the first save has a handle for as long, and nothing asks for it."""
    h = (x * 2).add_(1)
    y = custom(x * 3, unread, h)
    result = h.hypot_(leaf(SIDE, SIDE, seed=5, grad=False))
    result.register_hook(lambda gradient: (gradient, y)[0])
    return result


@pytest.mark.parametrize(
    ("program", "number", "recorded"),
    [
        (written_meanwhile, 3, written_meanwhile),
        (filled_later, 2, filled_later),
        (of_another_version_counter, 2, of_another_version_counter),
        (of_a_later_version, 2, of_another_version_counter),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_h68_a_storage_that_has_begun_to_leave_is_not_shared_whatever_a_table_says(
    program: Any, number: int, recorded: Any, backend: Backend
) -> None:
    """Save ``number`` is of the storage that the first save has begun to copy; ``recorded`` has the same saves."""

    def step(around: Settled, program: Any) -> list[Tensor | None]:
        x = leaf(SIDE, SIDE)
        with around:
            loss = program(x, lambda: around.offload.stats(synchronize=True)).sum()
        loss.backward()
        return [loss.detach(), x.grad]

    backend.sources_change = True
    table, alone = taught(backend, lambda around: step(around, recorded)), backend.offload(step_tables=False)
    rows = [*table.rows]
    shared_late(rows, number)
    offload = misled(backend, table_with(rows, [*table.order]))
    assert_identical(step(Settled(alone), program), step(Settled(offload), program))
    stats = assert_settled(offload)
    assert stats.table_forwards == 1
    assert stats.table_misses in ({}, {"share": 1}), "it is shared where its copy has not begun after all"
    assert_moved(stats)


def test_h54_a_forward_without_a_backward_teaches_nothing(backend: Backend) -> None:
    kept: list[Tensor] = []

    def forward(w: Tensor) -> Tensor:
        h = leaf(32, 32, grad=False)
        for number in range(4):
            h = (h @ w).tanh()
            if number == 1:
                kept[:] = [h]
        return h.sum()

    offload, expected = backend.offload(step_tables=True), None
    for goes_backward in (True, True, True, False, True, True):
        w = leaf(32, 32, seed=2)
        with offload:
            loss = forward(w)
        if goes_backward:
            loss.backward()
            assert expected is None or torch.equal(expected, w.grad)
            expected = w.grad
        del loss
        collect()
    kept.clear()
    stats = offload.stats(synchronize=True)
    assert (stats.table_misses, stats.table_forwards) == ({}, 5)
    assert stats.bytes_out > 0
    table = offload.step_table()
    assert table is not None
    assert table.order
