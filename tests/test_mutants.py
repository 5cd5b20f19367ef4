"""What counts as a site that orders copies or keeps memory, and what its module becomes without it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.mutants.sites import KINDS, STALE, Site, find, find_in, mutate
from tools.mutants.suites import device_suites_of, suites_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "eager_offload"


def mutants(text: str) -> list[str]:
    """The module ``text`` without each of its sites, in order."""
    return [mutate(text, site) for site in find_in(text, "module.py")]


def only(text: str, kind: str) -> str:
    (mutant,) = mutants(text)
    (site,) = find_in(text, "module.py")
    assert site.kind == kind
    return mutant


def test_a_wait_is_not_called_but_its_arguments_are_worked_out() -> None:
    assert only("runtime.wait(stream, next(events))\n", "wait") == "(lambda *_, **__: None)(stream, next(events))\n"


def test_a_wait_that_is_handed_on_does_nothing_when_it_is_called() -> None:
    assert only("stream.submit(event.wait)\n", "wait") == "stream.submit((lambda *_, **__: None))\n"


def test_a_record_whose_event_is_used_gives_the_first_event_again() -> None:
    class Runtime:
        def __init__(self) -> None:
            self.events = 0

        def record(self, stream: str) -> int:
            self.events += 1
            return self.events

    mutant = only("def events(runtime):\n    return [runtime.record(s) for s in 'aabba']\n", "record")
    assert mutant.endswith(STALE)
    namespace: dict[str, object] = {}
    exec(mutant, namespace)
    events = namespace["events"]
    assert callable(events)
    assert events(Runtime()) == [1, 1, 2, 2, 1]
    assert events(Runtime()) == [1, 1, 2, 2, 1], "each runtime has its own"


def test_a_record_that_is_a_statement_is_left_out() -> None:
    assert only("log.record(stream, event)\n", "record") == "(lambda *_, **__: None)(stream, event)\n"


def test_every_element_of_what_a_copy_waits_for_is_taken_out_singly() -> None:
    found = mutants("event = ground.copy(slot, source, slot, out, (ordering, *earlier))\n")
    assert found == [
        "event = ground.copy(slot, source, slot, out, (ordering, ))\n",
        "event = ground.copy(slot, source, slot, out, (*earlier, ))\n",
    ]
    assert mutants("runtime.copy(a, b, stream, after=events)\n") == ["runtime.copy(a, b, stream, after=())\n"]
    assert mutants("copy.copy(error)\ntarget.copy(source)\nruntime.copy(a, b, stream, ())\n") == []


def test_every_element_of_a_keepalive_is_taken_out_singly() -> None:
    assert mutants("keepalive = None if held else (target, slot)\n") == [
        "keepalive = None if held else (target, )\n",
        "keepalive = None if held else (slot, )\n",
    ]
    assert mutants("ground.copy(target, slot, keepalive=(target, slot), transfer=reload)\n") == [
        "ground.copy(target, slot, keepalive=(target, ), transfer=reload)\n",
        "ground.copy(target, slot, keepalive=(slot, ), transfer=reload)\n",
    ]
    assert mutants("runtime.keep_until(event, (dst, src))\n") == [
        "(lambda *_, **__: None)(event, (dst, src))\n",
        "runtime.keep_until(event, (src, ))\n",
        "runtime.keep_until(event, (dst, ))\n",
    ]


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("if tensor._version != self.version:\n    fail()\n", "if False:\n    fail()\n"),
        ("same = a and copied == tensor._version\n", "same = a and True\n"),
        ("view.check_version()\n", "(lambda *_, **__: None)()\n"),
    ],
)
def test_a_version_is_always_as_expected(text: str, without: str) -> None:
    assert only(text, "version") == without


def test_fences_are_taken_out_wherever_they_are_handed_on() -> None:
    assert mutants("slot.fences = (*earlier, Fence(runtime, event))\n") == [
        "slot.fences = (Fence(runtime, event), )\n",
        "slot.fences = (*earlier, )\n",
    ]
    assert only("slab.fences = remains.fences\n", "fence") == "slab.fences = ()\n"
    assert only("super().__init__(nbytes, extent.fences)\n", "fence") == "super().__init__(nbytes, ())\n"
    assert only("hand_on(start, gone.fences)\n", "fence") == "hand_on(start, ())\n"
    assert mutants("fences = ()\n") == []


def test_what_is_given_back_is_not() -> None:
    assert only("saved.release_source()\n", "release") == "(lambda *_, **__: None)()\n"
    assert only("Record(view, self.finalized.append)\n", "release") == "Record(view, (lambda *_, **__: None))\n"
    assert only("Lease(view, self._returns.leases.append)\n", "release") == "Lease(view, (lambda *_, **__: None))\n"
    assert mutants("self._lock.release()\nself._permits.release()\nslots.append(slot)\nitems.append(1)\n") == []


def test_a_check_of_codecs_and_kernels_is_met_condition_by_condition() -> None:
    text = """
if a or b:
    raise KernelError(c)
if d:
    return None
if e:
    f()
fits = g
return (h == 0) & (i == 0)
return j and k
"""
    sites = find_in(text, "eager_offload/codecs/exact.py")
    assert {site.kind for site in sites} == {"check"}
    assert [text.encode()[site.start : site.stop].decode() for site in sites] == [
        *("a", "b", "d", "g", "h == 0", "i == 0", "j", "k")
    ]
    assert find_in(text, "module.py") == []


def test_text_before_a_site_may_hold_any_characters() -> None:
    text = 'message = "größer — ∞"; runtime.wait(stream, event)\n'
    assert mutants(text) == ['message = "größer — ∞"; (lambda *_, **__: None)(stream, event)\n']


def test_a_site_inside_another_is_one_of_its_own() -> None:
    assert len(mutants("self._events.record(compute).wait_on(stream)\n")) == 2


@pytest.mark.long
def test_every_mutant_of_the_library_is_another_program_that_compiles() -> None:
    sites = find(PACKAGE)
    texts = {path: (ROOT / path).read_text() for path in {site.path for site in sites}}
    assert {site.kind for site in sites} == set(KINDS)
    for site in sites:
        mutant = mutate(texts[site.path], site)
        assert ast.dump(ast.parse(mutant)) != ast.dump(ast.parse(texts[site.path])), site


@pytest.mark.parametrize(
    ("path", "kind", "source"),
    [
        ("eager_offload/engine/offloader.py", "record", "self.runtime.record(stream)"),
        ("eager_offload/eager/reloading.py", "wait", 'offloader.wait(reload.transfer, stream, "reload")'),
        ("eager_offload/eager/saving.py", "version", "view.check_version()"),
        ("eager_offload/eager/saving.py", "release", "ViewRecord(view, self.offloader.finalized.append)"),
        (
            "eager_offload/tiers/space.py",
            "fence",
            "self.extents.release(record.extent.start, record.extent.nbytes, record.fences)",
        ),
    ],
)
def test_the_sites_that_matter_most_are_among_them(path: str, kind: str, source: str) -> None:
    found: list[Site] = [site for site in find(PACKAGE) if (site.path, site.kind) == (path, kind)]
    assert source in [site.source for site in found]


def test_every_module_with_a_site_has_tests_and_those_of_its_own_come_first() -> None:
    for site in find(PACKAGE):
        assert suites_of(site.path), site.path
    assert suites_of("eager_offload/tiers/arena.py")[0] == "tests/tiers/test_arena.py"
    assert suites_of("eager_offload/runtime/accelerator.py")[0] == "tests/runtime/test_accelerator.py"
    listed = suites_of("eager_offload/eager/saving.py")
    assert len(set(listed)) == len(listed)


def test_the_virtual_device_is_asked_about_what_runs_on_an_accelerator() -> None:
    suites = device_suites_of("eager_offload/runtime/accelerator_events.py")
    assert suites == device_suites_of("eager_offload/engine/offloader.py")
    assert suites
    for suite in suites:
        path, _, name = suite.partition("::")
        assert f"def {name}" in (ROOT / path).read_text()
    assert device_suites_of("eager_offload/tiers/arena.py") == []


def test_a_guard_is_each_condition_under_which_a_step_is_not_as_its_plan_has_it() -> None:
    text = (
        "def check(self, a, b):\n"
        "    if a or b:\n"
        "        return 'size'\n"
        "    if b:\n"
        "        self.miss('order')\n"
        "        return None\n"
        "    if self.is_early and a:\n"
        "        return False\n"
        "    if a:\n"
        "        return None\n"
        "    return None\n"
    )
    sites = [site for site in find_in(text, "eager_offload/eager/following.py") if site.kind == "guard"]
    assert [site.line for site in sites] == [2, 2, 4, 7]
    assert "if False or b:" in mutate(text, sites[0])
    assert "if False:\n        return False" in mutate(text, sites[3])


def test_a_guard_is_each_part_of_a_condition_each_verdict_and_each_way_past_the_others() -> None:
    text = (
        "def pack(self, tensor):\n"
        "    if a and not (b or c):\n"
        "        if d:\n"
        "            return handle\n"
        "    if (e or f) and not (g == (h, i) and j):\n"
        "        return 'share'\n"
        "    if k:\n"
        "        return None\n"
        "def _is_like(tensor):\n"
        "    try:\n"
        "        return l and (m or n)\n"
        "    except RuntimeError:\n"
        "        return False\n"
        "def _contradicts(self):\n"
        "    if o:\n"
        "        return True\n"
        "    return p and q\n"
        "def _start(self):\n"
        "    if r:\n"
        "        self.stay()\n"
        "        return\n"
    )
    sites = [site for site in find_in(text, "eager_offload/eager/following.py") if site.kind == "guard"]
    assert [(text[site.start : site.stop], site.replacement) for site in sites] == [
        *(("a", "True"), ("b", "False"), ("c", "False"), ("d", "True")),
        *(("(e or f) and not (g == (h, i) and j)", "False"), ("e", "False"), ("f", "False"), ("g == (h, i)", "True")),
        *(("h", "(g or [None] * 2)[0]"), ("i", "(g or [None] * 2)[1]"), ("j", "True"), ("k", "False")),
        *(("l", "True"), ("m or n", "True"), ("False", "True")),
        *(("o", "False"), ("p and q", "False"), ("r", "False")),
    ]
