"""Pooling requests of a causal model: they compute a prompt, draw no token, and free their row at once."""

from __future__ import annotations

import pytest

from scripted_bench import Bench
from scripted_source import ScriptedSource
from slipstream.base.errors import PromptTooLong, RequestTooLarge
from slipstream.contracts.request import FinishReason, Status


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_a_prompt_of_exactly_the_model_length_ends(depth, budget):
    bench = Bench(depth=depth, max_num_batched_tokens=budget, max_num_seqs=1)
    requests = [bench.pool(range(64)), bench.pool([5] * 64)]
    bench.run()
    for request in requests:
        bench.check_tokens(request)


def test_one_token_more_is_refused():
    with pytest.raises(PromptTooLong, match="has 65 tokens, the model length is 64; shorten it, set truncate_prompt"):
        Bench().pool(range(65))
    with pytest.raises(RequestTooLarge, match="40 tokens need 10 cache pages, there are 5 in all; shorten it"):
        Bench(num_pages=6).pool(range(40))


def test_rows_are_free_with_the_plan_that_computes_the_last_position():
    """At depth 2 three steps of all rows are in flight before the first result is committed."""
    bench = Bench(depth=2, max_num_seqs=2, max_num_batched_tokens=64)
    requests = [bench.pool([i] * 4) for i in range(6)]
    for _ in range(3):
        assert len(bench.plan().rows) == 2
    assert all(request.status is Status.DRAINING and not request.pages for request in requests)
    assert bench.scheduler.num_running == 0 and bench.scheduler.has_requests()
    bench.run()
    for request in requests:
        bench.check_tokens(request)


def test_generation_continues_beside_pooling():
    bench = Bench(depth=1, max_num_batched_tokens=6)
    texts = [bench.submit([1, 2, 3])[0], bench.submit([4] * 9, max_tokens=20)[0]]
    vectors = [bench.pool([7] * 20), bench.pool([8])]
    bench.run()
    for request in texts + vectors:
        bench.check_tokens(request)


@pytest.mark.parametrize(("task", "hits"), [("embed", True), ("token_embed", False)])
def test_cached_prefixes_are_used_only_by_tasks_that_need_the_last_position(task, hits):
    bench = Bench()
    for _ in range(2):
        bench.pool(range(20), task=task)
        bench.run()
    first, second = bench.requests
    assert first.num_cached == 0 and (second.num_cached > 0) is hits
    assert bench.outputs[-1].num_cached_tokens == second.num_cached


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_a_preempted_pooling_request_starts_again(task, depth):
    """Generation requests of higher priority take the pages that its later chunks would need."""
    bench = Bench(num_pages=15, max_num_batched_tokens=4, prefix_caching=False)
    bench.depth = depth  # but the pages kept free are those of depth 0
    texts = [bench.submit([i] * 4, max_tokens=22)[0] for i in range(2)]
    request = bench.pool(range(30), task=task)
    bench.run()
    assert request.num_preemptions > 0
    for each in (*texts, request):
        bench.check_tokens(each)


def test_a_draining_request_can_be_aborted():
    bench = Bench(depth=2)
    request, other = bench.pool(range(8)), bench.pool(range(9))
    bench.plan()
    assert bench.scheduler.abort(request.id) == [request] and bench.scheduler.abort(request.id) == []
    bench.run()
    assert {output.request_id for output in bench.outputs} == {other.id}


def test_a_failed_result_is_reported_and_its_pages_are_unpublished():
    bench = Bench()
    bench.executor.fail = lambda admission, length: admission.number == 0
    bench.pool(range(20))
    bench.run()
    assert bench.outputs[0].finish_reason is FinishReason.ERROR and "not finite" in bench.outputs[0].error
    again = bench.pool(range(20))
    bench.run()
    assert again.num_cached == 0
    bench.check_tokens(again)


def test_a_step_takes_one_prompt_if_it_has_to_wait():
    """Such as the document of a query."""
    bench = Bench(depth=1, max_num_seqs=8, max_num_batched_tokens=64)
    query = bench.pool([1] * 4, task="token_embed", query_key="q", query_uses=20)

    def document(place):
        return [bench.pool([2, place], task="token_embed", query_key="q", later=True)]

    source = ScriptedSource(bench.scheduler.sources, range(20), document)
    assert len(bench.plan().rows) == 1 and len(source.waiting) == 19
    assert len(bench.plan().rows) == 8 and len(source.waiting) == 12
    bench.run()
    assert not source.waiting and len(bench.outputs) == 21 and bench.outputs[0].request_id == query.id
