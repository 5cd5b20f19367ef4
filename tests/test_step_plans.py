"""A step plan is numbers: what the recorder makes of what it is told, what a file holds, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eager_offload as eo
from eager_offload.stats import KeepReason
from eager_offload.step_plan import Ask, Coded, Fate, Save, StepPlan, Totals
from eager_offload.step_recorder import StepRecorder

KIB = 1 << 10


def recorded() -> StepRecorder:
    """Five saves: one that leaves and is saved again, a parameter, one that stays as the newest, and one of no kind."""
    recorder = StepRecorder()
    recorder.take(0, 0, KIB, True, 2 * KIB, 2 * KIB)
    recorder.keep(512, True, KeepReason.PARAMETER)
    recorder.take(1, 0, KIB, True, 2 * KIB, 0)
    recorder.started(0)
    recorder.keep(64, False, None)
    recorder.released(0)
    recorder.take(2, 2, 4 * KIB, False, 4 * KIB, 4 * KIB)
    return recorder


def plan() -> StepPlan:
    recorder = recorded()
    recorder.asked(2, 2, bring=[0], drop=[2], keep=False, kept=KeepReason.NEWEST)
    recorder.asked(1, 0, bring=[], drop=[], keep=True, kept=None)
    recorder.asked(0, 0, bring=[], drop=[0], keep=False, kept=None)
    return recorder.plan()


def test_a_plan_says_what_was_written_down() -> None:
    assert plan() == StepPlan(
        saves=(
            Save(Fate.OFFLOAD, None, KIB, 2 * KIB, 2 * KIB, True, owner=0, slot=0, start=3, release=4),
            Save(Fate.KEEP, KeepReason.PARAMETER, 512, requires_grad=True),
            Save(Fate.SHARE, None, KIB, requires_grad=True, owner=0),
            Save(Fate.DECIDE, None, 64),
            Save(Fate.KEEP, KeepReason.NEWEST, 4 * KIB, 4 * KIB, 4 * KIB, owner=4),
        ),
        asks=(Ask(4, bring=(0,)), Ask(2, keep=True, last=False), Ask(0)),
        end=(),
        slots=(2 * KIB,),
    )
    assert plan().totals == Totals(saved=6 * KIB + 576, offloaded=KIB, shared=KIB, kept=4 * KIB + 512, slots=2 * KIB)
    assert plan().newest_bytes == 4 * KIB
    assert plan().starts() == ((), (), (), (0,), ())


def test_what_starts_when_the_context_is_left_is_at_the_end() -> None:
    recorder = recorded()
    recorder.started(2)
    recorder.asked(2, 2, bring=[], drop=[], keep=False, kept=None)
    made = recorder.plan()
    assert (made.end, made.saves[4].start, made.saves[4].slot) == ((4,), 5, 0)
    assert made.slots == (4 * KIB,), "none for what backward does not ask for"
    assert made.saves[0].fate is made.saves[2].fate is Fate.DECIDE


def test_a_copy_that_backward_has_overtaken_is_one_of_the_plan_all_the_same() -> None:
    recorder = recorded()
    recorder.started(2)
    recorder.asked(2, 2, bring=[], drop=[], keep=False, kept=KeepReason.NEWEST)
    made = recorder.plan()
    assert made.saves[4].fate is Fate.OFFLOAD


@pytest.mark.parametrize("kept", [KeepReason.FAILED, KeepReason.BUDGET, KeepReason.LAYOUT, KeepReason.MARKED])
def test_what_stayed_for_a_reason_that_may_pass_is_decided_anew_with_all_that_share_it(kept: KeepReason) -> None:
    recorder = recorded()
    recorder.asked(1, 0, bring=[2], drop=[], keep=True, kept=kept)
    recorder.asked(2, 2, bring=[], drop=[], keep=False, kept=KeepReason.NEWEST)
    made = recorder.plan()
    assert [save.fate for save in made.saves] == [Fate.DECIDE, Fate.KEEP, Fate.DECIDE, Fate.DECIDE, Fate.KEEP]
    assert made.asks == (Ask(4, bring=(4,)),), "what its unpack has set off, the next one does"


@pytest.mark.parametrize("what", ["nothing was asked for", "backward over and over", "something that no plan can say"])
def test_there_is_no_plan_where(what: str) -> None:
    recorder = recorded()
    if what != "nothing was asked for":
        recorder.asked(2, 2, bring=[], drop=[], keep=False, kept=None)
    for _ in range(4 if what == "backward over and over" else 0):
        recorder.asked(2, 2, bring=[], drop=[], keep=False, kept=None)
    recorder.is_void |= what == "something that no plan can say"
    assert recorder.plan() is None


def test_what_is_asked_for_twice_is_asked_for_the_last_time_once() -> None:
    recorder = recorded()
    recorder.asked(1, 0, bring=[], drop=[], keep=True, kept=None)
    for _ in range(4):
        recorder.asked(0, 0, bring=[0], drop=[0, 2], keep=False, kept=None)
    recorder.asked(2, 2, bring=[], drop=[], keep=False, kept=KeepReason.NEWEST)
    made = recorder.plan()
    again = Ask(0, bring=(0,), drop=(4,), last=False)
    assert made.asks == (Ask(2, keep=True, last=False), *[again] * 3, dataclasses.replace(again, last=True), Ask(4))
    assert made.asks_again
    assert not plan().asks_again
    assert not recorder.is_asked_over
    made.check()


def test_a_file_holds_a_plan_and_what_it_prints_is_a_table(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    loaded = StepPlan.load(path)
    assert loaded == plan()
    assert (type(loaded.saves[0].fate), type(loaded.saves[1].reason)) == (Fate, KeepReason)
    path.write_text(path.read_text().replace('"format":2', '"format":3'))
    with pytest.raises(eo.ConfigError, match="format 3 instead of 2"):
        StepPlan.load(path)
    assert str(plan()).splitlines() == [
        "5 saves: 6.6 KiB, of which 1.0 KiB leave, 1.0 KiB share and 4.5 KiB stay; unpacks 3; slots 1, of 2.0 KiB",
        "        saves  what                      each    start after    source goes",
        "            0  offload                1.0 KiB        3 later        4 later",
        "            1  keep (parameter)         512 B",
        "            2  share 2 back           1.0 KiB",
        "            3  decide                    64 B",
        "            4  keep (newest)          4.0 KiB",
    ]


def test_the_source_of_what_is_packed_goes_then() -> None:
    first, *others = plan().saves
    coded = dataclasses.replace(first, coded=Coded("bf16", "torch.float32", KIB))
    made = dataclasses.replace(plan(), saves=(coded, *others), slots=(KIB,))
    made.check()
    assert str(made).splitlines()[2] == ("            0  offload as bf16        1.0 KiB        3 later    when packed")


def broken() -> list[Any]:
    good = plan()
    saves = good.saves

    def but(at: int, **fields: Any) -> StepPlan:
        """The good one, but for fields of one of its saves."""
        changed = dataclasses.replace(saves[at], **fields)
        return dataclasses.replace(good, saves=(*saves[:at], changed, *saves[at + 1 :]))

    return [
        pytest.param(dataclasses.replace(good, slots=(KIB,)), id="a slot that is too small"),
        pytest.param(dataclasses.replace(good, slots=()), id="no slot"),
        pytest.param(dataclasses.replace(good, slots=(2 * KIB, KIB)), id="a slot too many"),
        pytest.param(dataclasses.replace(good, end=(0,)), id="an end that is none"),
        pytest.param(dataclasses.replace(good, asks=()), id="no unpack"),
        *(
            pytest.param(but(at, **{name: 0}), id=f"a {name} of save {at}, which does not leave")
            for at in range(1, 5)
            for name in ("slot", "start")
        ),
        pytest.param(dataclasses.replace(good, asks=(Ask(1),)), id="an unpack of what is not followed"),
        pytest.param(dataclasses.replace(good, asks=(Ask(0, bring=(9,)),)), id="a reload of what is not there"),
        pytest.param(
            dataclasses.replace(good, saves=(saves[2], *saves[1:])), id="a share of a storage that comes later"
        ),
        pytest.param(but(0, start=9), id="a late start"),
        pytest.param(but(0, nbytes=-1), id="no size"),
        pytest.param(but(0, autograd_bytes=10**9), id="more than the storage has"),
        # What is equal to a number, and none: 0.0 is no place in a list, and 1 no answer.
        pytest.param(dataclasses.replace(but(0, start=len(saves)), end=(0.0,)), id="an end of floats"),
        pytest.param(dataclasses.replace(good, slots=(2.0 * KIB,)), id="slots of floats"),
        pytest.param(dataclasses.replace(good, asks=(Ask(2, bring=(0.0,)),)), id="a reload by a float"),
        pytest.param(dataclasses.replace(good, asks=(Ask(2, drop=(False,)),)), id="a drop by a bool"),
        pytest.param(dataclasses.replace(good, asks=(Ask(0.0),)), id="an unpack by a float"),
        pytest.param(dataclasses.replace(good, asks=(Ask(0, keep=1),)), id="a keep that is a number"),
        pytest.param(but(0, slot=0.0), id="a slot by a float"),
    ]


@pytest.mark.parametrize("bad", broken())
def test_a_file_whose_numbers_do_not_fit_together_is_refused(bad: StepPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    bad.save(path)
    with pytest.raises(eo.ConfigError, match=r"plan\.json' holds no step plan that this version can read"):
        StepPlan.load(path)
    with pytest.raises(eo.ConfigError):
        eo.Offload(plan=bad)


@pytest.mark.parametrize(
    "fields",
    [{"saves": None}, {"saves": (1, 2)}, {"saves": []}, {"asks": (1,)}, {"asks": None}, {"slots": None}, {"end": []}],
    ids=str,
)
def test_a_plan_that_was_put_together_by_hand_is_refused_as_a_file_is(fields: dict[str, Any]) -> None:
    with pytest.raises(eo.ConfigError):
        eo.Offload(plan=dataclasses.replace(plan(), **fields))


def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nested.json"
    path.write_text("[" * 100_000)
    with pytest.raises(eo.ConfigError, match="holds no step plan"):
        StepPlan.load(path)


@settings(max_examples=30)
@given(st.recursive(st.none() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)))
def test_any_other_file_is_refused(tmp_path_factory: pytest.TempPathFactory, content: object) -> None:
    path = tmp_path_factory.getbasetemp() / "other.json"
    path.write_text(json.dumps(content))
    with pytest.raises(eo.ConfigError, match="holds no step plan"):
        StepPlan.load(path)
