"""plan(): its decisions, rule by rule."""

from __future__ import annotations

import numpy as np
import pytest

from scripted_bench import Bench
from scripted_source import ScriptedSource
from slipstream.base.errors import InvalidPrompt, PromptTooLong, QueueFull, RequestTooLarge, UserError
from slipstream.contracts.messages import LOGPROB
from slipstream.contracts.request import Status

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


@DEPTHS
def test_one_request_from_prompt_to_last_token(depth: int):
    bench = Bench(depth)
    (request,) = bench.submit([5, 6, 7], max_tokens=4)
    bench.run()
    bench.check_tokens(request)
    first, *rest = bench.plans
    assert (first.num_tokens.tolist(), first.num_host_tokens.tolist(), first.tokens.tolist()) == ([3], [3], [5, 6, 7])
    assert all(plan.num_host_tokens.tolist() == [0] and not len(plan.tokens) for plan in rest)
    assert [plan.lengths.tolist() for plan in bench.plans] == [[3], [4], [5], [6]]


@DEPTHS
def test_no_step_is_planned_past_the_last_token(depth: int):
    """Once known and pending tokens reach the limit, nothing more is launched for the request."""
    bench = Bench(depth)
    bench.submit([1, 2], max_tokens=3)
    for _ in range(depth + 5):
        bench.plan()
    assert len(bench.plans) == 3
    assert bench.requests[0].pending == 3


@DEPTHS
def test_up_to_depth_plus_one_tokens_are_pending(depth: int):
    bench = Bench(depth)
    (request,) = bench.submit([1, 2], max_tokens=20)
    most = 0
    while bench.scheduler.has_requests():
        bench.step()
        most = max(most, request.pending)
    assert most == depth  # after the commit that follows the last launch
    bench.check_tokens(request)


def test_a_long_prompt_is_computed_in_chunks_and_samples_after_the_last():
    bench = Bench(max_num_batched_tokens=4)
    (request,) = bench.submit(list(range(10)), max_tokens=2)
    bench.run()
    assert [plan.num_tokens.tolist() for plan in bench.plans] == [[4], [4], [2], [1]]
    assert [plan.num_drawn.tolist() for plan in bench.plans] == [[0], [0], [1], [1]]
    bench.check_tokens(request)


@DEPTHS
def test_no_prompt_is_taken_while_no_page_is_free(depth: int):
    """Decoding rows must not wait while a text is tokenized that could not be admitted."""
    bench = Bench(depth, num_pages=14, max_num_seqs=8, prefix_caching=False)

    def make(place):
        assert bench.cache.num_free > bench.scheduler.num_running * (depth + 1)
        return bench.submit([place] * 8, max_tokens=12, later=True)

    source = ScriptedSource(bench.scheduler.sources, range(30), make)
    while bench.scheduler.sources or bench.scheduler.has_requests():
        bench.step()
    for request in bench.requests:
        bench.check_tokens(request)
    assert len(bench.requests) == 30 and source.num_asked > 30


def test_without_chunks_a_prompt_waits_until_it_fits_whole():
    bench = Bench(max_num_batched_tokens=64, chunked_prefill=False, prefix_caching=False)
    bench.submit([1] * 40, max_tokens=1)
    bench.submit([2] * 30, max_tokens=1)
    bench.run()
    assert [plan.num_tokens.tolist() for plan in bench.plans] == [[40], [30]]


def test_rows_of_one_token_come_first():
    bench = Bench(prefix_caching=False)
    bench.submit([1] * 5)
    bench.step()
    bench.submit([2] * 6)
    bench.submit([3])
    bench.submit([4] * 7)
    plan = bench.plan()
    assert plan is not None
    assert plan.num_tokens.tolist() == [1, 1, 6, 7]
    assert plan.num_host_tokens.tolist() == [0, 1, 6, 7]
    assert plan.tokens.tolist() == [3] + [2] * 6 + [4] * 7


def test_chunks_leave_a_token_for_every_decode():
    """A request of high priority with a long prompt does not stop other requests."""
    bench = Bench(max_num_batched_tokens=6, prefix_caching=False)
    bench.submit([1], max_tokens=20)
    bench.submit([2], max_tokens=20)
    bench.step()
    bench.submit([3] * 20, priority=-1)
    bench.step()
    for _ in range(3):
        plan = bench.plan()
        assert plan is not None and plan.num_tokens.tolist() == [1, 1, 4]
        bench.commit()


def test_progress_with_fewer_tokens_than_rows():
    bench = Bench(max_num_batched_tokens=1, prefix_caching=False)
    requests = [bench.submit([k, k, k], max_tokens=3)[0] for k in range(3)]
    bench.run()
    for request in requests:
        bench.check_tokens(request)


def test_no_request_overtakes_the_first():
    bench = Bench(num_pages=9, prefix_caching=False)  # eight pages of four
    bench.submit([1] * 20, max_tokens=4)
    bench.step()
    large, small = bench.submit([2] * 16, max_tokens=1)[0], bench.submit([3], max_tokens=1)[0]
    bench.step()
    assert large.status is small.status is Status.WAITING
    bench.run()


def test_higher_priorities_are_admitted_first():
    bench = Bench(max_num_seqs=1)
    late = bench.submit([1], max_tokens=1, priority=5)[0]
    soon = bench.submit([2], max_tokens=1)[0]
    bench.run()
    assert [output.request_id for output in bench.outputs] == [soon.id, late.id]


@DEPTHS
def test_a_row_can_be_released_and_reassigned_in_the_same_plan(depth: int):
    bench = Bench(depth, max_num_seqs=1)
    bench.submit([1], max_tokens=2)
    bench.submit([2], max_tokens=2)
    bench.run()
    released = [(plan.released.tolist(), [a.row for a in plan.admitted]) for plan in bench.plans]
    assert ([0], [0]) in released


def test_releases_are_part_of_the_next_plan():
    bench = Bench()
    bench.submit([1], max_tokens=1)
    bench.run()
    assert bench.plan() is None
    bench.submit([2], max_tokens=1)
    plan = bench.plan()
    assert plan is not None and plan.released.tolist() == [0]


@DEPTHS
def test_the_same_prompt_in_the_same_plan_is_computed_once(depth: int):
    bench = Bench(depth, prefix_caching=True)
    one, two = (bench.submit(list(range(10)), max_tokens=3)[0] for _ in range(2))
    plan = bench.plan()
    assert plan is not None and sorted(plan.num_tokens.tolist()) == [2, 10]
    assert (one.num_cached, two.num_cached) == (0, 8)
    bench.run()
    bench.check_tokens(one)
    bench.check_tokens(two)
    assert [o.num_cached_tokens for o in bench.outputs if o.request_id == two.id] == [8, 8, 8]


def test_a_follow_up_finds_the_generated_pages():
    bench = Bench()
    (first,) = bench.submit([1, 2, 3], max_tokens=10)
    bench.run()
    (second,) = bench.submit([*first.tokens, 9], max_tokens=2)
    bench.run()
    assert second.num_cached == 12  # the thirteenth was drawn and never computed
    bench.check_tokens(second)


def test_generated_pages_are_found_while_their_request_runs_on():
    bench = Bench()
    (first,) = bench.submit([1, 2, 3], max_tokens=40)
    for _ in range(20):
        bench.step()
    (second,) = bench.submit(first.tokens[:18], max_tokens=2)
    bench.step()
    assert second.num_cached == 16
    bench.run()
    bench.check_tokens(second)


def test_salts_share_nothing():
    bench = Bench()
    bench.submit(list(range(10)), max_tokens=1, salt="x")
    bench.run()
    assert bench.submit(list(range(10)), max_tokens=1)[0] is bench.requests[-1]
    bench.run()
    (third,) = bench.submit(list(range(10)), max_tokens=1, salt="x")
    bench.run()
    assert [request.num_cached for request in bench.requests] == [0, 0, 8]
    bench.check_tokens(third)


@DEPTHS
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_get_the_same_tokens(depth: int, caching: bool):
    bench = Bench(depth, num_pages=13, prefix_caching=caching, max_model_len=40)
    requests = [bench.submit([k, k + 1, k + 2], max_tokens=30)[0] for k in range(3)]
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert requests[0].num_preemptions == 0  # the oldest is never the victim
    for request in requests:
        bench.check_tokens(request)


@DEPTHS
def test_the_lowest_priority_is_preempted_then_the_youngest(depth: int):
    bench = Bench(depth, num_pages=13, prefix_caching=False, max_model_len=40)
    low = bench.submit([1, 1, 1], max_tokens=30, priority=1)[0]
    old = bench.submit([2, 2, 2], max_tokens=30)[0]
    young = bench.submit([3, 3, 3], max_tokens=30)[0]
    order = []
    while bench.scheduler.has_requests():
        before = [r.num_preemptions for r in (low, old, young)]
        bench.step()
        bench.scheduler.check()
        order += [r for r, count in zip((low, old, young), before, strict=True) if r.num_preemptions > count]
    assert order[0] is low and old not in order
    for request in (low, old, young):
        bench.check_tokens(request)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_is_admitted_again_only_when_its_tokens_are_known(depth: int):
    bench = Bench(depth, num_pages=9, prefix_caching=False, max_model_len=32)
    bench.submit([1] * 3, max_tokens=25)
    (victim,) = bench.submit([2] * 3, max_tokens=25)
    bench.run_until_preempted(victim)
    assert victim.pending > 0 and victim.status is Status.WAITING
    known = len(victim.tokens) + victim.pending
    bench.run()
    admission = [a for plan in bench.plans for a in plan.admitted][-1]
    assert admission.num_known == known
    bench.check_tokens(victim)


def test_admission_leaves_running_rows_their_next_pages():
    """Two rows at depth 2 may need six pages before a result is committed; no admission takes them."""
    bench = Bench(depth=2, num_pages=11, prefix_caching=False)
    bench.submit([1] * 4)
    bench.submit([2] * 4)
    bench.plan()
    (third,) = bench.submit([3] * 9, max_tokens=1)  # three pages; eight are free
    bench.plan()
    assert third.status is Status.WAITING
    bench.run()


def test_a_request_as_large_as_the_cache_runs_alone():
    bench = Bench(depth=2, num_pages=17, max_model_len=64)
    small = bench.submit([7], max_tokens=5)[0]
    (whole,) = bench.submit([1] * 40, max_tokens=24)
    bench.run()
    bench.check_tokens(whole)
    bench.check_tokens(small)


def test_admissions_stop_when_the_staging_area_is_full():
    bench = Bench(staged_ints=3 * 4, prefix_caching=False)
    for k in range(3):
        bench.submit([k] * 8, max_tokens=2)
    plan = bench.plan()
    assert plan is not None and len(plan.admitted) == 2
    one_at_a_time = Bench(staged_ints=1, prefix_caching=False)
    for k in range(3):
        one_at_a_time.submit([k] * 8, max_tokens=2)
    plan = one_at_a_time.plan()
    assert plan is not None and len(plan.admitted) == 1
    one_at_a_time.run()


def test_history_and_stop_ids_are_sent_only_for_requests_that_need_them():
    bench = Bench()
    bench.submit([1, 2, 3], stop=[90])
    bench.submit([1, 2, 3], stop=[90], presence_penalty=1.0, min_tokens=2)
    plan = bench.plan()
    assert plan is not None
    plain, picky = plan.admitted
    assert plain.history is None and plain.stop_ids == ()
    assert picky.history is not None and picky.history.tolist() == [1, 2, 3] and picky.stop_ids == (90,)


def test_num_logprobs_is_the_maximum_of_the_sampling_rows():
    bench = Bench(max_num_batched_tokens=6)
    bench.submit([1, 2], max_tokens=1)
    bench.submit([3, 3], max_tokens=2, logprobs=1)
    bench.submit([5] * 8, max_tokens=1, logprobs=4)  # samples only in a later step
    bench.run()
    assert [plan.num_logprobs for plan in bench.plans] == [1, 1, 4]
    wanted = {request.id: request.params.logprobs for request in bench.requests}
    for output in bench.outputs:
        count = wanted[output.request_id]
        if count is None:
            assert output.logprobs is None
        else:
            assert output.logprobs is not None
            own, *top = np.frombuffer(output.logprobs, LOGPROB).tolist()
            assert own[:2] == (-output.token_ids[0] - 1, output.token_ids[0])
            assert [rank for _, _, rank in top] == list(range(1, count + 1))


def test_plans_are_not_changed_after_they_are_returned():
    bench = Bench(depth=2)
    bench.submit([1, 2, 3], max_tokens=12)
    bench.submit([4], max_tokens=12)
    copies = []
    for _ in range(8):
        plan = bench.plan()
        assert plan is not None
        copies.append((plan, plan.rows.copy(), plan.lengths.copy(), plan.num_tokens.copy()))
    for plan, rows, lengths, num_tokens in copies:
        assert np.array_equal(plan.rows, rows)
        assert np.array_equal(plan.lengths, lengths)
        assert np.array_equal(plan.num_tokens, num_tokens)


def test_impossible_requests_are_refused_with_the_numbers():
    bench = Bench(num_pages=9, max_model_len=64, max_waiting=2)
    with pytest.raises(InvalidPrompt, match="no tokens"):
        bench.submit([])
    with pytest.raises(PromptTooLong, match="prompt has 64 tokens.*model length of 64"):
        bench.submit([1] * 64)
    with pytest.raises(RequestTooLarge, match="30 tokens and up to 4 of output need 9 cache pages, there are 8"):
        bench.submit([1] * 30, max_tokens=4)
    bench.submit([1] * 30, max_tokens=3, id="a")
    with pytest.raises(UserError, match="'a' is being served already"):
        bench.submit([1], id="a")
    bench.submit([1], max_tokens=1)
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        bench.submit([1])
    bench.run()
    assert len(bench.outputs) == 4


def test_prefill_chunks_are_shorter_while_rows_decode():
    bench = Bench(max_num_batched_tokens=64)
    bench.scheduler.max_num_tokens = 10
    first = bench.submit(range(1, 30), max_tokens=20)[0]
    assert bench.plan().total_tokens == 29  # no output was read yet
    bench.commit()
    bench.submit(range(40, 75), max_tokens=2)
    assert [bench.plan().num_tokens.tolist() for _ in range(3)] == [[1, 9], [1, 9], [1, 9]]
    bench.scheduler.max_num_tokens = None
    assert bench.plan().num_tokens.tolist() == [1, 8]
    bench.run()
    bench.check_tokens(first)


def test_every_row_decodes_whatever_the_prefill_limit():
    bench = Bench(max_num_batched_tokens=64)
    for i in range(5):
        bench.submit([1 + i, 2], max_tokens=12)
    bench.step()
    bench.submit(range(20, 60), max_tokens=2)
    bench.scheduler.max_num_tokens = 1
    assert bench.plan().num_tokens.tolist() == [1, 1, 1, 1, 1, 1]  # five decodes, and the prompt moves too
    bench.run()


@DEPTHS
def test_a_caller_with_many_requests_does_not_block_another(depth: int):
    """The second caller comes last and gets the next free row, and then every other one."""
    bench = Bench(depth, max_num_seqs=2, max_waiting=1000)
    for _ in range(10):
        bench.submit([1, 2], n=10, max_tokens=2, caller="a")
    for _ in range(4):
        bench.step()
    small = [bench.submit([3, 4, number], max_tokens=2, caller="b")[0] for number in range(3)]
    bench.run()
    ended = [output.request_id for output in bench.outputs if output.finish_reason]
    places = [ended.index(request.id) for request in small]
    assert places[0] < 8 and places[2] < 14 and len(ended) == 103
    for request in bench.requests:
        bench.check_tokens(request)
