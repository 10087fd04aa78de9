"""Commit: what happens to results, and to requests that end while steps are in flight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from count_calls import count_calls
from scripted_bench import Bench, make_config
from scripted_tokens import alone
from slipstream.config.config import SchedulerConfig
from slipstream.contracts.request import FinishReason, Request, Status
from slipstream.contracts.step import StepResult
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.scheduler import Scheduler

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def third_token(prompt: list[int]) -> int:
    """The third token that this prompt draws."""
    return alone(Request("x", prompt, SamplingParams(), max_length=len(prompt) + 3))[0][2]


@DEPTHS
def test_a_stop_token_ends_the_request_and_drops_later_launched_tokens(depth: int):
    bench = Bench(depth)
    stop = third_token([1, 2, 3])
    (request,) = bench.submit([1, 2, 3], max_tokens=20, stop=[stop])
    (other,) = bench.submit([4, 5], max_tokens=20)
    bench.run()
    bench.check_tokens(request, FinishReason.STOP)
    bench.check_tokens(other, FinishReason.LENGTH)
    last = [output for output in bench.outputs if output.request_id == request.id][-1]
    assert last.stop_token == stop and request.num_output <= 3
    sampled = sum(int(plan.num_drawn[plan.rows == 0].sum()) for plan in bench.plans)
    assert sampled >= request.num_output


@DEPTHS
def test_a_row_reassigned_in_flight_gives_each_request_its_own_tokens(depth: int):
    """One row only: a request that stops has a step in flight in the row that the next request gets."""
    bench = Bench(depth, max_num_seqs=1)
    requests = [bench.submit([k, k + 1], max_tokens=20, stop=[third_token([k, k + 1])])[0] for k in range(5)]
    bench.run()
    for request in requests:
        bench.check_tokens(request, FinishReason.STOP)


def test_a_first_admission_is_reported_once():
    bench = Bench(depth=0, max_num_seqs=1)
    first, second = (bench.submit([k, k + 1], max_tokens=2)[0] for k in (1, 5))
    begun = []
    while bench.scheduler.has_requests():
        bench.plan()
        begun.append(bench.scheduler.take_begun())
        assert bench.scheduler.take_begun() == []
        bench.commit()
    assert begun == [[first.id], [], [second.id], []]


def test_row_and_pages_are_free_at_the_commit_that_ends_a_request():
    bench = Bench(depth=0)
    bench.submit([1, 2], max_tokens=1)
    bench.plan()
    assert bench.cache.num_free < bench.cache.num_usable
    bench.commit()
    assert bench.cache.num_free == bench.cache.num_usable and bench.scheduler.num_running == 0


@DEPTHS
def test_abort_in_every_state(depth: int):
    bench = Bench(depth, max_num_seqs=2, max_num_batched_tokens=8)
    running, prefilling, waiting = (bench.submit([k] * n, max_tokens=9)[0] for k, n in [(1, 2), (2, 30), (3, 2)])
    bench.plan()
    bench.plan()
    states = [request.status for request in (running, prefilling, waiting)]
    assert states == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    for request in (running, prefilling, waiting):
        assert bench.scheduler.abort(request.id) == [request]
        assert bench.scheduler.abort(request.id) == []
        bench.scheduler.check()
    (fresh,) = bench.submit([7, 8], max_tokens=4)
    while bench.num_in_flight > 0:
        bench.commit()
    assert not bench.outputs
    bench.run()
    bench.check_tokens(fresh)


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_of_a_preempted_request_with_tokens_in_flight(depth: int):
    bench = Bench(depth, num_pages=9, prefix_caching=False, max_model_len=32)
    (stays,) = bench.submit([1] * 3, max_tokens=25)
    (victim,) = bench.submit([2] * 3, max_tokens=25)
    bench.run_until_preempted(victim)
    assert victim.pending
    assert bench.scheduler.abort(victim.id) == [victim]
    bench.run()
    bench.check_tokens(stays)
    assert bench.output_of(victim) == alone(victim)[0][: victim.num_output]


def test_abort_of_an_unknown_request_has_no_effect():
    assert Bench().scheduler.abort("unknown") == []


@DEPTHS
def test_a_request_that_fails_fails_alone(depth: int):
    bench = Bench(depth)
    good, bad = (bench.submit([k] * 9, max_tokens=6)[0] for k in (1, 2))
    bench.executor.fail = lambda admission, length: admission.number == 1 and length == 11
    bench.run()
    bench.check_tokens(good)
    last = [output for output in bench.outputs if output.request_id == bad.id][-1]
    assert last.finish_reason is FinishReason.ERROR and last.token_ids == []
    assert last.error is not None and "position 11" in last.error
    bench.executor.fail = lambda admission, length: False
    (again,) = bench.submit([2] * 9, max_tokens=2)
    bench.run()
    assert again.num_cached == 0  # what the failed one left behind is not trusted
    bench.check_tokens(again)


@pytest.mark.parametrize("depth", [1, 2])
def test_pages_of_a_failed_request_are_unpublished_even_after_its_preemption(depth: int):
    bench = Bench(depth, num_pages=9, max_model_len=32)
    bench.submit([1] * 3, max_tokens=25)
    (victim,) = bench.submit([2] * 3, max_tokens=25)
    bench.run_until_preempted(victim)
    assert victim.pending
    bench.executor.fail = lambda admission, length: admission.number == 1
    bench.run()
    assert bench.outputs[-1].finish_reason is FinishReason.LENGTH
    assert [o.finish_reason for o in bench.outputs if o.request_id == victim.id][-1] is FinishReason.ERROR
    (again,) = bench.submit(victim.tokens, max_tokens=1)
    bench.run()
    assert again.num_cached == 0


def test_stop_tokens_are_ignored_before_min_tokens():
    bench = Bench()
    stop = third_token([1, 2, 3])
    (request,) = bench.submit([1, 2, 3], max_tokens=20, min_tokens=4, stop=[stop])
    bench.run()
    assert request.num_output >= 4
    bench.check_tokens(request)


class Tape:
    """A token list that may only be appended to and read at the end; counts the tokens that are accessed."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self.touched = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: list[int]) -> None:
        self.touched += len(tokens)
        self._tokens.extend(tokens)

    def __getitem__(self, key: slice) -> list[int]:
        part = self._tokens[key]
        self.touched += len(part)
        return part


def count_operations(num_output: int) -> int:
    """Calls made and tokens accessed by 64 decode steps after this much output."""
    cache = CacheManager(make_config(page_size=16, num_pages=4400))
    config = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=70_000, max_model_len=70_000, max_waiting=1, chunked_prefill=True,
        depth=1, seed=0, staged_ints=1 << 20,
    )  # fmt: skip
    scheduler = Scheduler(config, cache)
    request = Request("a", [1] * 16, SamplingParams(), max_length=70_000)
    request.tokens += [2] * num_output  # as after a preemption
    scheduler.submit([request])
    tape: Any = Tape(request.tokens)
    request.tokens = tape
    result = StepResult(np.array([3], np.int32), np.zeros(1, np.bool_))
    scheduler.plan()
    scheduler.plan()
    for _ in range(64):
        scheduler.commit(result)
        scheduler.plan()
    tape.touched = 0
    num_calls = 0
    for _ in range(64):
        with count_calls() as calls:
            scheduler.commit(result)
        num_calls += calls.number
        scheduler.plan()
    assert request.num_output == num_output + 128
    assert num_calls > 64
    return num_calls + int(tape.touched)


def test_committing_costs_the_same_after_sixty_thousand_tokens():
    assert count_operations(60_000) == count_operations(64)


def test_rows_that_began_together_publish_in_different_steps():
    bench = Bench(num_pages=512, max_num_seqs=16, max_model_len=128)
    requests = [bench.submit([k, 1, 2, 3], max_tokens=100)[0] for k in range(16)]
    bench.step()
    published, in_each_step = [1] * 16, []
    for _ in range(90):
        bench.step()
        before, published = published, [request.num_published for request in requests]
        in_each_step.append(sum(old < new for old, new in zip(before, published, strict=True)))
    assert sum(in_each_step) >= 4 * 16 and max(in_each_step) <= 4
    assert min(published) > 90 // 4 - 6  # no request waits for long
    bench.run()
    for request in requests:
        bench.check_tokens(request)
