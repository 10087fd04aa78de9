"""LongRoPE: when a request changes from the short to the long factors, and what it costs."""

from __future__ import annotations

import pytest

from scripted_bench import Bench
from slipstream.contracts.request import Status


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_is_admitted_again_when_it_exceeds_the_short_rope_length(depth: int) -> None:
    bench = Bench(depth=depth, short_rope=8)
    bench.submit(list(range(5)), max_tokens=10)
    bench.run()
    assert [(a.num_known, a.num_cached, a.long_rope) for plan in bench.plans for a in plan.admitted] == [
        (5, 0, False),
        (9, 0, True),
    ]
    assert bench.executor.num_computed == 8 + 14  # all is computed again but the token that nothing follows
    assert bench.scheduler.num_preemptions == 0  # no other request took its pages
    bench.check_tokens(bench.requests[0])


@pytest.mark.parametrize(("max_tokens", "num_admissions"), [(3, 1), (4, 1), (5, 2)])
def test_a_request_within_the_short_rope_length_keeps_its_row(max_tokens: int, num_admissions: int) -> None:
    """The last token of an answer is never computed, so it may be beyond the short length."""
    bench = Bench(short_rope=8)
    bench.submit(list(range(5)), max_tokens=max_tokens)
    bench.run()
    assert bench.executor.num_admissions == num_admissions


def test_long_requests_share_the_pages_of_long_requests() -> None:
    bench = Bench(short_rope=16)
    prompt = list(range(20))
    for prompts in ([prompt[:16]], [prompt], [prompt[:16], prompt]):
        for ids in prompts:
            bench.submit(ids, max_tokens=1)
        bench.run()
    assert [request.num_cached for request in bench.requests] == [0, 0, 12, 16]


def test_abort_between_two_admissions_frees_everything() -> None:
    bench = Bench(depth=1, short_rope=8)
    bench.submit(list(range(8)), max_tokens=10)
    while len(bench.requests[0].tokens) < 9:
        bench.step()
    bench.scheduler.check()
    assert bench.requests[0].status is Status.WAITING
    bench.scheduler.abort(bench.requests[0].id)
    bench.run()
    bench.scheduler.check()
    assert bench.cache.num_free == bench.cache.num_usable
