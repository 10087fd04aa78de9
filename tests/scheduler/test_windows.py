"""Window groups in the scheduler: pages are given back as steps are committed, and a long request needs few."""

from __future__ import annotations

import pytest

from scripted_bench import Bench
from slipstream.base.errors import RequestTooLarge
from slipstream.contracts.step import NULL_PAGE

# a window of two pages and steps of two: five pages are enough for any length
SMALL = dict(windows=(8,), window_pages=6, max_num_batched_tokens=8, max_model_len=64)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_much_longer_than_the_cache_runs_without_preemption(depth: int, caching: bool) -> None:
    """At depth 1 and 2 the request must wait for steps in flight, whose pages it will give back."""
    bench = Bench(depth, prefix_caching=caching, **SMALL)  # type: ignore[arg-type]
    request = bench.submit(range(45), max_tokens=12)[0]
    bench.run()
    bench.check_tokens(request)
    assert request.num_preemptions == 0
    assert bench.executor.pages.num_given_back >= 10


def test_a_cache_smaller_than_a_window_and_a_step_refuses_long_requests() -> None:
    bench = Bench(**{**SMALL, "window_pages": 5})  # type: ignore[arg-type]
    with pytest.raises(RequestTooLarge, match="need 5 cache pages, there are 4"):
        bench.submit(range(45), max_tokens=12)
    bench.submit(range(9), max_tokens=7)
    bench.run()


def test_window_pages_are_freed_only_after_commit() -> None:
    bench = Bench(depth=2, windows=(4, 0), max_num_batched_tokens=8)
    request = bench.submit(range(30), max_tokens=4)[0]
    for _ in range(3):
        assert bench.plan() is not None
    assert request.computed == 24 and NULL_PAGE not in request.pages[0]
    bench.commit()
    assert bench.plan() is not None
    assert request.num_committed == 8 and request.pages[0].count(NULL_PAGE) == 1  # position 8 sees 5 to 7
    bench.run()
    bench.check_tokens(request)
    assert NULL_PAGE not in [page for plan in bench.plans for page in plan.new_pages[1].pages]


def test_samples_run_without_a_leader_that_freed_the_prompt() -> None:
    """One row at a time: the second sample is admitted when the first is far beyond the prompt's last window."""
    bench = Bench(windows=(4, 0), max_num_seqs=1, prefix_caching=False)
    requests = bench.submit(range(14), n=3, max_tokens=20)
    bench.run()
    for request in requests:
        bench.check_tokens(request)
