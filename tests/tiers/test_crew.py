"""Threads that help with the pieces of one transfer: all pieces, once each; errors; and none that stays."""

from __future__ import annotations

import threading

import pytest

from eager_offload.tiers.crew import Crew


def alive(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_every_piece_is_done_once_by_several_hands() -> None:
    crew, done, together = Crew("crew-a", 3), [], threading.Barrier(4)

    def call(piece: int) -> None:
        if piece < 4:
            together.wait(60)  # comes to an end only if four are at it at once
        done.append((piece, threading.get_ident()))

    crew.carry_out(call, range(100), 4)
    assert sorted(piece for piece, _ in done) == list(range(100))
    assert len({who for _, who in done}) == 4
    assert len(alive("crew-a")) == 3
    crew.retire()
    assert alive("crew-a") == []
    crew.carry_out(call, range(4, 8), 4)
    assert sorted(piece for piece, _ in done) == sorted([*range(100), *range(4, 8)])
    crew.retire()


def test_one_hand_needs_no_thread() -> None:
    crew, done = Crew("crew-b", 3), list[int]()
    crew.carry_out(done.append, range(5), 1)
    assert done == list(range(5))
    assert alive("crew-b") == []


@pytest.mark.parametrize("where", ["here", "there"])
def test_an_error_leaves_the_rest_out_and_is_raised_when_nobody_is_at_a_piece(where: str) -> None:
    crew, me = Crew("crew-c", 1), threading.get_ident()
    both, failed, done = threading.Barrier(2), threading.Event(), list[int]()

    def call(piece: int) -> None:
        if piece > 1:
            done.append(piece)
            return
        both.wait(60)
        if (threading.get_ident() == me) == (where == "here"):
            failed.set()
            raise OSError(5, "broken")
        assert failed.wait(60)
        done.append(piece)

    with pytest.raises(OSError, match="broken"):
        crew.carry_out(call, range(3), 2)
    assert done[0] < 2, "what was under way has come to its end"
    crew.retire()
    assert alive("crew-c") == []


def test_without_threads_one_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    crew, done = Crew("crew-d", 3), list[int]()
    crew.carry_out(done.append, range(5), 4)
    assert done == list(range(5))


def test_many_callers_share_a_crew() -> None:
    crew, sums = Crew("crew-e", 3), list[int]()

    def caller() -> None:
        for _ in range(20):
            mine: list[int] = []
            crew.carry_out(mine.append, range(50), 4)
            sums.append(sum(mine))

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    assert sums == [1225] * 80
    assert len(alive("crew-e")) <= 3
    crew.retire()
    assert alive("crew-e") == []
