"""Any order of arrivals, aborts, steps and front ends that go: everyone gets their own tokens, once, and nothing stays.

A core process over scripted devices, found by hypothesis, which shrinks what fails to a few actions.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from scripted_engine import scripted_core, submit, tokens_alone
from slipstream.base.errors import EngineDead
from slipstream.contracts.messages import Abort, Output, Submit, SubmitAll
from slipstream.contracts.request import FinishReason
from slipstream.engine.lanes import Lanes
from slipstream.transport.core_process import CoreProcess
from slipstream.transport.frames import Refused

PROMPTS = [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [7], [1, 2, 3, 4, 5, 11]]
FRONT_ENDS = 2

submits = st.tuples(
    st.just("submit"),
    st.integers(0, FRONT_ENDS - 1),
    st.sampled_from(["one", "two"]),
    st.sampled_from(PROMPTS),
    st.integers(1, 3),  # samples
    st.sampled_from([1, 4, 12]),  # tokens
    st.sampled_from([0, 0, 1]),  # priority
)
aborts = st.tuples(st.just("abort"), st.integers(0, 9), st.sampled_from([None, 0, 1, 2]))
late_aborts = st.tuples(st.just("abort_ended"))
steps = st.tuples(st.just("step"), st.integers(1, 6))
goings = st.tuples(st.just("go"), st.integers(0, FRONT_ENDS - 1))
days = st.lists(st.one_of(submits, submits, aborts, late_aborts, steps, steps, steps, goings), max_size=40)


class SocketServer:
    """Keeps what each front end is sent."""

    def __init__(self) -> None:
        self.connections: list[Any] = list(range(FRONT_ENDS))
        self.sent: dict[Any, list[Any]] = {connection: [] for connection in self.connections}

    def send(self, connection: Any, messages: Any) -> None:
        self.sent[connection] += messages

    def broadcast(self, message: Any) -> None:
        pass


class Day:
    def __init__(self, depth: int) -> None:
        # few pages and rows: samples are preempted and wait for each other
        cores = {name: scripted_core(depth, num_pages=12, max_num_seqs=3, max_model_len=40) for name in ("one", "two")}
        self.hub: Any = SocketServer()
        self.process = CoreProcess(Lanes(cores), self.hub)
        self.submitted: dict[str, tuple[int, Submit]] = {}
        self.aborted: set[tuple[str, int]] = set()

    def submit(self, front: int, lane: str, prompt: list[int], n: int, max_tokens: int, priority: int) -> None:
        if front in self.hub.connections:
            name = f"r{len(self.submitted)}"
            message = replace(submit(name, prompt, lane, n=n, max_tokens=max_tokens), priority=priority)
            self.submitted[name] = front, message
            self.process._handle(front, message)

    def abort(self, number: int, sample: int | None) -> None:
        """Perhaps of one that has ended, or of a sample that never was: a front end does not know yet."""
        if (name := f"r{number}") in self.submitted:
            front, message = self.submitted[name]
            if front in self.hub.connections:
                self.process._handle(front, Abort(name, sample))
                self.aborted |= {(name, k) for k in range(message.params.n) if sample in (None, k)}

    def abort_ended(self) -> None:
        """The sample whose last token went out last: its reader had found a stop string in the text before."""
        ends = [
            (front, output.request_id, output.sample)
            for front in self.hub.connections
            for output in self.hub.sent[front]
            if output.finish_reason is not None
        ]
        if ends:
            front, name, sample = ends[-1]
            self.process._handle(front, Abort(name, sample))

    def go(self, front: int) -> None:
        if front in self.hub.connections:
            self.hub.connections.remove(front)
            self.process._abort_all_of(front)

    def step(self, times: int) -> None:
        for _ in range(times):
            if self.process.lanes.has_requests():
                self.process._deliver(self.process.lanes.step())
                self.process.lanes.check()

    def run(self, actions: list[Any]) -> None:
        for name, *arguments in actions:
            getattr(self, name)(*arguments)

    def check(self) -> None:
        """After all is done."""
        assert not self.process._owners and not self.process.lanes.has_requests()
        for core in self.process.lanes.cores.values():
            assert core.scheduler.cache.num_free == core.scheduler.cache.num_usable
        got: dict[tuple[Any, str, int], list[Output]] = defaultdict(list)
        for connection, messages in self.hub.sent.items():
            for output in messages:
                assert isinstance(output, Output), output
                got[connection, output.request_id, output.sample].append(output)
        for name, (front, message) in self.submitted.items():
            for sample in range(message.params.n):
                outputs = got.pop((front, name, sample), [])
                tokens = [token for output in outputs for token in output.token_ids]
                wanted, reason = tokens_alone(message, sample, 40)
                ends = [output.finish_reason for output in outputs if output.finish_reason is not None]
                if front in self.hub.connections and (name, sample) not in self.aborted:
                    assert (tokens, ends) == (wanted, [reason])
                assert tokens == wanted[: len(tokens)] and len(ends) <= 1
        assert not got, "a request got the output of another one"


@pytest.mark.parametrize("depth", [0, 2])
def test_everyone_gets_their_own_tokens(depth: int) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(days)
    def a_day(actions: list[Any]) -> None:
        day = Day(depth)
        day.run(actions)
        day.step(10_000)
        day.check()

    a_day()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_end_in_the_middle_leaves_nothing_behind(depth: int) -> None:
    """`close` drains what is in flight and asserts every invariant itself."""

    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(days)
    def a_day(actions: list[Any]) -> None:
        day = Day(depth)
        day.run(actions)
        day.process.close()
        assert all(core.executor.closed for core in day.process.lanes.cores.values())

    a_day()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("where", ["launch", "finish", "wait"])
def test_one_lane_that_breaks_ends_all_and_says_which(depth: int, where: str) -> None:
    day = Day(depth)
    day.run([("submit", 0, "one", [1, 2], 1, 12, 0), ("submit", 1, "two", [3], 2, 12, 0), ("step", 3)])
    day.process.lanes.cores["two"].executor.breaks_at = where
    with pytest.raises(EngineDead, match="device-side assert"):
        day.step(20)
    with pytest.raises(EngineDead, match="two has failed: .*device-side assert"):
        day.process.lanes.step()
    with pytest.raises(EngineDead, match="two has failed"):
        day.process._handle(0, submit("late", [1], "one"))
    day.process.lanes.close()
    assert all(core.executor.closed for core in day.process.lanes.cores.values())


def test_a_sample_that_ended_before_its_abort_came_costs_the_others_nothing() -> None:
    """Its reader saw a stop string; meanwhile its last token had been drawn."""
    day = Day(depth=2)
    day.process._handle(0, submit("a", [1, 2, 3], "one", n=2, max_tokens=12))
    ended: set[int] = set()
    while not ended:
        day.step(1)
        ended = {output.sample for output in day.hub.sent[0] if output.finish_reason is not None}
    (first,) = ended
    day.process._handle(0, Abort("a", first))
    day.step(100)
    ends = [output.finish_reason for output in day.hub.sent[0] if output.finish_reason is not None]
    assert ends == [FinishReason.LENGTH] * 2


def test_a_request_that_cannot_run_is_refused_without_effect_on_others() -> None:
    day = Day(depth=1)
    day.process._handle(0, submit("a", [1] * 60, "one"))
    day.process._handle(0, submit("b", [1], "three"))
    day.process._handle(1, submit("c", [1], "two", max_tokens=4))
    day.process._handle(1, submit("c", [1], "one", max_tokens=4))
    day.step(100)
    assert [type(message) for message in day.hub.sent[0]] == [Refused, Refused]
    refusals = [message for message in day.hub.sent[1] if isinstance(message, Refused)]
    assert len(refusals) == 1 and "being served already" in refusals[0].message


def test_a_refusal_of_several_names_each_of_them() -> None:
    day = Day(depth=1)
    day.process._handle(0, SubmitAll([submit("a", [1], "one"), submit("b", [1] * 60, "one")]))
    refusals = day.hub.sent[0]
    assert [message.request_id for message in refusals] == ["a", "b"]
    assert all(message.message.startswith("prompt 2 of 2: ") for message in refusals)
