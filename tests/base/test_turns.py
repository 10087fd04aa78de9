"""Callers take turns at a few threads."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future

import pytest

from patience import PATIENCE
from slipstream.base.errors import QueueFull
from slipstream.base.turns import CallerTurns, FairThreads


def test_callers_take_turns_whatever_they_have_queued() -> None:
    turns: CallerTurns[str] = CallerTurns(9)
    for number in range(4):
        turns.add("many", number, f"many {number}")
    turns.add("one", 0, "one 0")
    order = []
    while (taken := turns.take()) is not None:
        order.append(taken[1])
        turns.end(taken[0])
    assert order == ["many 0", "one 0", "many 1", "many 2", "many 3"]


def test_a_caller_with_fewer_running_pieces_comes_first() -> None:
    turns: CallerTurns[int] = CallerTurns(9)
    for number in range(3):
        turns.add("many", number, number)
    assert turns.take() == ("many", 0) and turns.take() == ("many", 1)
    turns.add("late", 0, 7)
    assert turns.take() == ("late", 7)


def test_pieces_of_one_caller_that_run_are_limited() -> None:
    turns: CallerTurns[int] = CallerTurns(2)
    for number in range(3):
        turns.add("many", number, number)
    assert turns.take() == ("many", 0) and turns.take() == ("many", 1)
    assert turns.take() is None
    turns.end("many")
    assert turns.take() == ("many", 2)


def test_a_piece_that_is_discarded_is_not_taken() -> None:
    turns: CallerTurns[int] = CallerTurns(2)
    turns.add("one", "key", 1)
    turns.discard("one", "key")
    turns.discard("one", "key")
    turns.discard("other", "key")
    assert turns.take() is None and turns.num_queued("one") == 0


class _Gate:
    """Threads that wait until a test lets them go on."""

    def __init__(self) -> None:
        self.threads = FairThreads(1, "gated", 2, "images")
        self.open = threading.Event()
        self.started = threading.Event()
        self.order: list[str] = []
        self.threads.submit("", self._wait)
        assert self.started.wait(PATIENCE)

    def _wait(self) -> None:
        self.started.set()
        assert self.open.wait(PATIENCE)

    def submit(self, caller: str) -> Future[None]:
        return self.threads.submit(caller, lambda: self.order.append(caller))


def test_one_caller_does_not_wait_for_all_calls_of_another() -> None:
    gate = _Gate()
    calls = [gate.submit("a"), gate.submit("a"), gate.submit("b")]
    gate.open.set()
    for call in calls:
        call.result(PATIENCE)
    assert gate.order == ["a", "b", "a"]
    gate.threads.close(wait=True)


def test_a_call_that_is_cancelled_leaves_the_queue_at_once() -> None:
    gate = _Gate()
    first, second = gate.submit("a"), gate.submit("a")
    with pytest.raises(QueueFull, match="2 images of this client wait"):
        gate.submit("a")
    assert first.cancel()
    third = gate.submit("a")
    gate.open.set()
    second.result(PATIENCE)
    third.result(PATIENCE)
    assert gate.order == ["a", "a"]
    gate.threads.close(wait=True)


def test_the_program_itself_has_no_limit_and_errors_go_to_the_caller() -> None:
    gate = _Gate()
    calls = [gate.threads.submit("", lambda: 1 // 0) for _ in range(5)]
    gate.open.set()
    for call in calls:
        with pytest.raises(ZeroDivisionError):
            call.result(PATIENCE)
    gate.threads.close(wait=True)


def test_calls_that_wait_are_cancelled_at_the_end() -> None:
    gate = _Gate()
    waiting = gate.submit("a")
    closing = threading.Thread(target=gate.threads.close, kwargs={"wait": True})
    closing.start()
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)
    gate.open.set()
    closing.join(PATIENCE)
    assert gate.order == []


def test_a_call_that_hangs_holds_up_no_end() -> None:
    gate = _Gate()
    gate.threads.close(wait=False)
    gate.open.set()


def test_as_many_calls_run_at_once_as_there_are_threads() -> None:
    threads = FairThreads(3, "several", 9, "images")
    together = threading.Barrier(3)
    for _ in range(3):  # also when the threads are idle
        for call in [threads.submit("a", lambda: together.wait(PATIENCE)) for _ in range(3)]:
            call.result(PATIENCE)
    assert len(threads._threads) == 3
    threads.close(wait=True)
    assert not any(thread.is_alive() for thread in threads._threads)
