"""Rows that draw several tokens in a step: plans assume that all drafts are accepted, and commits correct that."""

from __future__ import annotations

import itertools
import random

import pytest

from scripted_bench import Bench
from slipstream.contracts.request import Status


class Always(random.Random):
    """A drafter whose drafts are all right, or all wrong."""

    def __init__(self, choice: int) -> None:
        super().__init__(0)
        self.kind = choice

    def choice(self, options):
        return options[self.kind]


RIGHT, WRONG, NOTHING = 0, 3, 4


def bench_with(drafter: int, num_drafts: int, **options: object) -> Bench:
    bench = Bench(num_drafts=num_drafts, **options)  # type: ignore[arg-type]
    bench.executor.drafter = Always(drafter)
    return bench


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_right_drafts_save_steps_and_change_no_token(depth: int) -> None:
    bench = bench_with(RIGHT, 3, depth=depth)
    (request,) = bench.submit([1, 2, 3], max_tokens=17)
    bench.run()
    bench.check_tokens(request)
    drawn = [plan.num_drawn.tolist() for plan in bench.plans]
    assert drawn == [[1], [4], [4], [4], [4]], "a prompt, then four tokens a step"
    assert bench.executor.num_rejected == 0


@pytest.mark.parametrize("drafter", [WRONG, NOTHING])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_wrong_drafts_cost_positions_and_change_no_token(depth: int, drafter: int) -> None:
    bench = bench_with(drafter, 3, depth=depth)
    (request,) = bench.submit([1, 2, 3], max_tokens=17)
    bench.run()
    bench.check_tokens(request)
    assert bench.executor.num_accepted == 0 < bench.executor.num_rejected


def test_lengths_in_flight_are_upper_bounds_that_commits_lower() -> None:
    bench = bench_with(WRONG, 3, depth=2)
    (request,) = bench.submit([1, 2, 3], max_tokens=40)
    for _ in range(3):
        bench.plan()
    assert [plan.lengths.tolist() for plan in bench.plans] == [[3], [7], [11]]
    assert (request.computed, request.pending) == (11, 9)
    bench.commit()
    assert (request.computed, request.pending, len(request.tokens)) == (11, 8, 4)
    bench.commit()
    assert (request.computed, request.pending, len(request.tokens)) == (8, 4, 5), "one of four was kept"
    bench.commit()
    assert (request.computed, request.pending, len(request.tokens)) == (5, 0, 6)
    assert bench.plan().lengths.tolist() == [9]


def test_plans_of_the_same_rows_and_numbers_of_drafts_share_their_arrays() -> None:
    """Rejected drafts change lengths only; another row, and another number of drafts, make new arrays."""
    bench = bench_with(WRONG, 3, depth=1)
    first, second = bench.submit([1, 2, 3], max_tokens=40), bench.submit([4, 5], max_tokens=12)
    bench.run()
    bench.check_tokens(*first)
    bench.check_tokens(*second)
    plans = [plan for plan in bench.plans if plan.has_drafts]
    num_shared = 0
    for before, after in itertools.pairwise(plans):
        is_same = before.rows.tolist() == after.rows.tolist() and before.num_drawn.tolist() == after.num_drawn.tolist()
        assert (before.rows is after.rows) == is_same and not len(after.tokens)
        num_shared += is_same
    assert 10 < num_shared < len(plans) - 1, "the second request ends before the first"


def test_steps_with_and_without_drafts_in_turns_share_the_arrays_of_their_kind() -> None:
    bench = bench_with(WRONG, 3, depth=1)
    (request,) = bench.submit([1, 2, 3], max_tokens=30)
    planner, number = bench.scheduler.drafts, 0
    while bench.scheduler.has_requests():
        planner.num_drafts = 3 * (number % 2)
        number += 1
        bench.step()
    bench.check_tokens(request)
    plans = [plan for plan in bench.plans if not len(plan.tokens)]
    for numbers in ([1], [4]):
        same = [plan for plan in plans if plan.num_drawn.tolist() == numbers]
        assert len(same) > 5 and all(plan.rows is same[0].rows for plan in same)


def test_a_request_that_comes_back_to_another_row_has_its_drafts_there() -> None:
    bench = bench_with(RIGHT, 3, depth=0)
    one, two = (bench.submit(prompt, max_tokens=40)[0] for prompt in ([1, 2, 3], [4, 5]))
    for _ in range(3):
        bench.step()
    row = two.row
    bench.scheduler.preempt_all()
    bench.scheduler.abort(one.id)
    bench.run()
    bench.check_tokens(two)
    assert bench.plans[-1].has_drafts and bench.plans[-1].rows.tolist() == [0] != [row]


def test_drafts_take_no_pages_from_other_requests() -> None:
    bench = bench_with(RIGHT, 4, page_size=2, num_pages=1 + 6, max_num_seqs=2, prefix_caching=False)
    first, second = (bench.submit([9, token], max_tokens=4)[0] for token in (1, 2))
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    bench.check_tokens(first)
    bench.check_tokens(second)


@pytest.mark.parametrize("num_drafts", [0, 8])
def test_drafts_leave_a_page_for_each_request(num_drafts: int) -> None:
    """Two requests that may become long, end early and have just enough pages until then."""
    free = bench_with(WRONG, 0)
    ends = [free.submit([9, token], max_tokens=4)[0] for token in (1, 2)]
    free.run()
    bench = bench_with(WRONG, num_drafts, page_size=2, num_pages=1 + 6, max_num_seqs=2, prefix_caching=False)
    both = [bench.submit([9, token], max_tokens=8, stop=[ends[token - 1].tokens[-1]])[0] for token in (1, 2)]
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    for request in both:
        bench.check_tokens(request)


def test_every_row_gets_a_token_before_any_gets_drafts() -> None:
    bench = bench_with(RIGHT, 4, max_num_batched_tokens=6)
    for token in range(4):
        bench.submit([token], max_tokens=9)
    while not all(request.status is Status.RUNNING and request.num_output for request in bench.requests):
        bench.step()
    plan = bench.plan()
    assert sorted(plan.num_tokens.tolist()) == [1, 1, 1, 3]
    assert plan.num_tokens.tolist() == plan.num_drawn.tolist() and plan.num_host_tokens.tolist() == [0] * 4


def test_drafted_rows_come_before_longer_chunks() -> None:
    """They become rows of one token on the device. The chunk is planned first here, as its request has priority."""
    bench = bench_with(RIGHT, 2, max_num_batched_tokens=16)
    (drafted,) = bench.submit([1], max_tokens=30, priority=1)
    while drafted.num_output < 4:
        bench.step()
    (long,) = bench.submit([2] * 20, max_tokens=1)
    bench.step()
    plan = bench.plan()
    assert plan is not None and plan.rows.tolist() == [drafted.row, long.row]
    assert plan.num_drawn.tolist() == [3, 1] and plan.num_host_tokens.tolist() == [0, 7] == [0, plan.num_tokens[1]]
    bench.run()
    bench.check_tokens(drafted)
    bench.check_tokens(long)


def test_drafts_end_where_the_request_ends() -> None:
    """The last token needs no position: more drafts could never be used."""
    bench = bench_with(RIGHT, 8)
    (request,) = bench.submit([1, 2, 3], max_tokens=6)
    bench.run()
    bench.check_tokens(request)
    assert [plan.num_drawn.tolist() for plan in bench.plans] == [[1], [5]]


def test_tokens_behind_a_stop_token_are_dropped() -> None:
    free = bench_with(RIGHT, 4)
    (request,) = free.submit([1, 2, 3], max_tokens=9)
    free.run()
    stop = request.tokens[request.num_prompt + 2]
    bench = bench_with(RIGHT, 4)
    (request,) = bench.submit([1, 2, 3], max_tokens=9, stop=[stop], logprobs=1)
    bench.run()
    bench.check_tokens(request)
    last = bench.outputs[-1]
    assert last.stop_token == stop and len(last.token_ids) == 2
    assert last.logprobs is not None and len(last.logprobs) == 2 * 2 * 16


def test_a_failed_draw_ends_the_request_after_the_tokens_before_it() -> None:
    bench = bench_with(RIGHT, 4)
    bench.executor.fail = lambda admission, length: length == 6
    (request,) = bench.submit([1, 2, 3], max_tokens=9)
    bench.run()
    assert len(bench.output_of(request)) == 3 and bench.outputs[-1].error is not None


@pytest.mark.parametrize("drafter", [RIGHT, WRONG])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_checkpoints_are_found_only_once_the_state_has_passed_them(depth: int, drafter: int) -> None:
    """After every step another request begins with all tokens that are known by then."""
    bench = bench_with(drafter, 3, depth=depth, num_checkpoints=8, border=4, max_num_seqs=4)
    (request,) = bench.submit([1, 2, 3], max_tokens=30)
    others = []
    while request.status is not Status.FINISHED:
        bench.step()
        bench.scheduler.check()
        others += bench.submit(list(request.tokens), max_tokens=1)
    bench.run()
    for each in (request, *others):
        bench.check_tokens(each)
    assert sum(each.num_cached > 3 for each in others) > 5, "too few continued after generated tokens"
