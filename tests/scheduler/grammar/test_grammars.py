"""Grammars with a scripted compiler: callers take turns, what no request waits for is not compiled, and errors have a
cache of their own."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from llguidance import LLMatcher

from letter_tokenizer import TOKENIZER, VOCAB
from patience import PATIENCE
from slipstream.base.errors import EngineClosed, InvalidParams, QueueFull
from slipstream.base.processes import LimitedChild, LimitPassed
from slipstream.params.structured import StructuredOutputsParams
from slipstream.scheduler.grammar import check_child, grammars, native_matcher
from slipstream.scheduler.grammar.check_child import new_checker
from slipstream.scheduler.grammar.grammars import NUM_THREADS, Compilation, Grammars
from slipstream.scheduler.grammar.session import CompiledGrammar

SLOW = LLMatcher.grammar_from_json_schema(
    {"type": "integer", "multipleOf": 123_456_789}
).encode()  # its matcher takes minutes


class _Matcher:
    def compute_ff_tokens(self) -> list[int]:
        return []


class Bench:
    """Compilations begin and end one by one. A specification is a regular expression, wrong if it has a `!`."""

    threads = None

    def __init__(self, max_queued: int = 100) -> None:
        self.grammars = Grammars(lambda: TOKENIZER, VOCAB, max_queued)  # type: ignore[arg-type,return-value]
        self.begun: queue.Queue[str] = queue.Queue()
        self.niceness: set[int] = set()
        self._may_end: dict[str, threading.Event] = {}

    def hold(self) -> None:
        """Occupy all threads."""
        for number in range(NUM_THREADS):
            self.ask(f"held{number}", "holder")
            assert self.next() == f"held{number}"

    def ask(self, name: str, caller: str) -> Compilation:
        self._may_end.setdefault(name, threading.Event())
        return self.grammars.compile(_spec(name), caller)

    def next(self) -> str:
        """The compilation that begins next."""
        return self.begun.get(timeout=PATIENCE)

    def end(self, name: str) -> None:
        self._may_end[name].set()

    def compile(
        self, params: StructuredOutputsParams, checker: LimitedChild, is_wanted: Callable[[], bool]
    ) -> CompiledGrammar:
        name = params.regex or ""
        self.niceness.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        self.begun.put(name)
        assert self._may_end[name].wait(PATIENCE)
        if "!" in name:
            raise InvalidParams("wrong", param="structured_outputs")
        return CompiledGrammar(_Matcher())  # type: ignore[arg-type]

    def run_all(self, *names: str, caller: str = "") -> list[Compilation]:
        """Compile one after another, to the end."""
        found = []
        for name in names:
            compilation = self.ask(name, caller)
            if not compilation.done():
                assert self.next() == name
                self.end(name)
                compilation.exception(PATIENCE)
            found.append(compilation)
        return found

    def close(self) -> None:
        for event in self._may_end.values():
            event.set()
        self.grammars.close()


def _spec(name: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=name)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench()
    monkeypatch.setattr(native_matcher, "GrammarCompiler", lambda *_: bench)
    yield bench
    bench.close()


def test_a_caller_with_one_grammar_waits_for_one_compilation_of_a_flood(bench):
    flood = [f"a{number}" for number in range(9)]
    for name in flood:
        bench.ask(name, "flood")
    assert {bench.next() for _ in range(NUM_THREADS)} == set(flood[:NUM_THREADS])
    bench.ask("b", "other")
    bench.end("a0")
    assert bench.next() == "b"


def test_callers_take_turns(bench):
    bench.hold()
    for name in ("a0", "a1", "a2", "b0", "b1", "c0"):
        bench.ask(name, name[0])
    bench.end("held0")
    order = [bench.next()]
    for _ in range(5):
        bench.end(order[-1])
        order.append(bench.next())
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2"]


def test_newcomers_do_not_overtake_for_ever(bench):
    bench.hold()
    bench.ask("a0", "a")
    bench.ask("a1", "a")
    bench.end("held0")
    order = [bench.next()]
    for number in range(4):
        bench.ask(f"n{number}", f"newcomer {number}")
        bench.end(order[-1])
        order.append(bench.next())
    assert "a1" in order[:3], order


def test_a_known_grammar_waits_for_no_compilation_and_neither_do_masks(bench):
    (known,) = bench.run_all("known", caller="b")
    bench.hold()
    bench.ask("a0", "a")
    assert bench.grammars.compile(_spec("known"), "b") is known and known.done()
    assert bench.grammars.run(lambda: 3).result(PATIENCE) == 3


def test_what_no_request_waits_for_is_not_compiled(bench):
    bench.hold()
    left = bench.ask("a0", "a")
    shared = [bench.ask("shared", caller) for caller in ("a", "b", "b")]
    assert len({id(each) for each in shared}) == 1
    bench.grammars.leave(left, "a")
    bench.grammars.leave(shared[0], "a")
    bench.grammars.leave(shared[0], "b")
    bench.ask("c0", "c")
    bench.end("held0")
    assert bench.next() == "shared"
    bench.end("shared")
    assert bench.next() == "c0" and shared[0].result(PATIENCE)
    bench.end("c0")
    again = bench.ask("a0", "a")
    assert bench.next() == "a0" and again is not left


def test_leaving_stops_a_running_check_that_no_request_waits_for(bench, monkeypatch):
    stopped: list[LimitedChild] = []
    monkeypatch.setattr(LimitedChild, "stop", lambda checker: stopped.append(checker))
    first, second = bench.ask("a", "a"), bench.ask("a", "b")
    assert bench.next() == "a" and first is second
    bench.grammars.leave(first, "a")
    assert not stopped
    checker = first.checker
    bench.grammars.leave(first, "b")
    assert stopped == [checker] and not first.is_wanted()
    bench.ask("a", "c")
    assert bench.next() == "a"  # the new request does not wait for a check that is stopped


def test_a_caller_has_a_limited_number_of_queued_grammars(bench):
    bench.grammars.max_queued = 2
    bench.hold()
    queued = [bench.ask(name, "a") for name in ("a0", "a1")]
    with pytest.raises(QueueFull, match="2 different structured_outputs of this client wait.* limit"):
        bench.ask("a2", "a")
    assert bench.ask("a1", "a") is queued[1]  # no further one
    for name in ("b0", "b1"):
        bench.ask(name, "b")
    with pytest.raises(QueueFull):
        bench.ask("a0", "b")
    for number in range(4):
        bench.ask(f"own{number}", "")  # the program itself: `LLM.generate` with any number of prompts
    bench.grammars.leave(queued[0], "a")
    bench.ask("a2", "a")


def test_errors_displace_no_grammar_and_a_caller_displaces_its_own(bench, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_CACHED", 4)
    monkeypatch.setattr(grammars, "MAX_FAILED", 2)
    good = bench.run_all("b0", "b1", caller="b")
    wrong = bench.run_all(*(f"!{number}" for number in range(9)), caller="a")
    assert all(isinstance(each.exception(), InvalidParams) for each in wrong)
    assert bench.ask("!8", "a").done() and not bench.ask("!0", "a").done()
    assert bench.next() == "!0"
    bench.end("!0")
    bench.run_all(*(f"a{number}" for number in range(9)), caller="a")
    assert [bench.ask(name, "b") for name in ("b0", "b1")] == good


def test_a_known_error_keeps_no_request_alive(bench):
    """Each raise of one exception adds to its traceback, whose frames hold what called."""
    bench.run_all("!", caller="a")
    depths = []
    for _ in range(3):
        error = bench.ask("!", "a").exception()
        try:
            raise error
        except InvalidParams:
            depths.append(_num_frames(error))
    assert depths[0] == depths[2]


def _num_frames(error: BaseException) -> int:
    num, traceback = 0, error.__traceback__
    while traceback is not None:
        num, traceback = num + 1, traceback.tb_next
    return num


def test_closing_ends_waits(bench):
    waiting = [bench.ask(name, "a") for name in ("a0", "a1", "a2")]
    bench.next()
    closing = threading.Thread(target=bench.grammars.close)
    closing.start()
    for each in waiting:
        assert isinstance(each.exception(PATIENCE), EngineClosed)
    bench.end("a0")
    bench.end("a1")
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_threads_that_compile_have_a_low_priority(bench):
    bench.run_all("a")
    assert min(bench.niceness) == min(os.getpriority(os.PRIO_PROCESS, 0) + grammars._NICE, 19)


def test_a_check_can_be_stopped_and_the_next_one_works(monkeypatch):
    monkeypatch.setattr(check_child, "MAX_SECONDS", 2 * PATIENCE)
    checker = new_checker()
    ended: Future[bytes] = Future()
    wanted = threading.Event()
    wanted.set()

    def check() -> None:
        try:
            ended.set_result(checker.call(SLOW, wanted.is_set))
        except LimitPassed as error:
            ended.set_exception(error)

    thread = threading.Thread(target=check)
    thread.start()
    try:
        while not ended.done():
            checker.stop()  # no effect before the check begins
        with pytest.raises(LimitPassed):
            ended.result()
        thread.join(PATIENCE)
        assert checker.call(LLMatcher.grammar_from_regex("[0-9]+").encode()) == b""
        wanted.clear()
        with pytest.raises(LimitPassed, match="nothing waits"):
            checker.call(SLOW, wanted.is_set)
    finally:
        checker.close()
