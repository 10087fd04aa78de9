"""Several samples of one prompt."""

from __future__ import annotations

import pytest

from scripted_bench import Bench
from slipstream.base.errors import QueueFull
from slipstream.contracts.request import Status

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
CACHING = pytest.mark.parametrize("caching", [True, False])


@DEPTHS
@CACHING
@pytest.mark.parametrize("num_prompt", [1, 4, 5, 6, 8, 9])
def test_samples_share_the_prompt_and_differ_after(depth: int, caching: bool, num_prompt: int):
    bench = Bench(depth, prefix_caching=caching, num_groups=2)
    samples = bench.submit(list(range(num_prompt)), n=3, max_tokens=9)
    bench.run()
    for sample in samples:
        bench.check_tokens(sample)
    assert len({tuple(sample.tokens) for sample in samples}) == 3
    assert [sample.num_cached for sample in samples] == [0, num_prompt - 1, num_prompt - 1]
    copies = [copy for plan in bench.plans for copy in plan.copies.tolist()]
    assert len(copies) == (4 if (num_prompt - 1) % 4 else 0)  # two siblings, two groups


@CACHING
def test_the_prompt_is_computed_once(caching: bool):
    bench = Bench(prefix_caching=caching)
    bench.submit(list(range(30)), n=4, max_tokens=5)
    bench.run()
    assert bench.executor.num_computed == 30 + 3 + 4 * 4


def test_siblings_wait_for_the_whole_prompt():
    bench = Bench(max_num_batched_tokens=4, prefix_caching=False)
    leader, sibling = bench.submit(list(range(10)), n=2, max_tokens=3)
    bench.step()
    bench.step()
    assert leader.computed == 8 and sibling.status is Status.WAITING
    bench.step()
    assert sibling.status is Status.WAITING  # in the plan that ends the prompt there is nothing to copy yet
    bench.step()
    assert sibling.status is Status.RUNNING and sibling.num_cached == 9
    bench.run()
    bench.check_tokens(sibling)


def test_samples_are_admitted_before_later_requests():
    bench = Bench(max_num_seqs=1)
    samples = bench.submit([1, 2], n=2, max_tokens=2, id="a")
    bench.submit([3], max_tokens=2, id="b")
    bench.run()
    assert [output.request_id for output in bench.outputs] == ["a", "a", "a", "a", "b", "b"]
    for sample in samples:
        bench.check_tokens(sample)


@DEPTHS
@CACHING
def test_siblings_run_when_their_leader_ends_at_once(depth: int, caching: bool):
    bench = Bench(depth, prefix_caching=caching)
    samples = bench.submit(list(range(10)), n=3, max_tokens=1)
    bench.run()
    for sample in samples:
        bench.check_tokens(sample)


@DEPTHS
@CACHING
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_abort_of_one_sample_does_not_block_the_others(depth: int, caching: bool, steps: int, which: int):
    bench = Bench(depth, prefix_caching=caching, max_num_batched_tokens=4)
    samples = bench.submit(list(range(10)), n=3, max_tokens=6)
    for _ in range(steps):
        bench.plan()
    gone = bench.scheduler.abort(samples[0].id, which)
    assert gone == [samples[which]]
    bench.run()
    for sample in samples:
        if sample is not samples[which]:
            bench.check_tokens(sample)


def test_abort_of_the_request_ends_all_its_samples():
    bench = Bench(max_num_batched_tokens=4)
    samples = bench.submit(list(range(10)), n=3, max_tokens=6)
    bench.step()
    assert bench.scheduler.abort(samples[0].id) == samples
    bench.run()
    assert not bench.outputs


@DEPTHS
@CACHING
def test_a_preempted_leader_releases_its_siblings(depth: int, caching: bool):
    """A request of higher priority preempts the leader in the middle of its prompt."""
    bench = Bench(depth, page_size=1, num_pages=45, prefix_caching=caching, max_num_batched_tokens=2, max_model_len=44)
    (first,) = bench.submit([7] * 3, max_tokens=40, priority=-1)
    for _ in range(10):
        bench.step()
    leader, sibling = bench.submit(list(range(20)), n=2, max_tokens=4)
    bench.run_until_preempted(leader)
    assert leader.num_output + leader.pending == 0 and not leader.siblings
    bench.run()
    for request in (first, leader, sibling):
        bench.check_tokens(request)


def test_all_samples_count_as_waiting():
    bench = Bench(max_waiting=4)
    bench.submit([1], n=3)
    assert bench.scheduler.num_waiting == 3
    with pytest.raises(QueueFull, match="3 requests are waiting and 2 samples do not fit under the limit of 4"):
        bench.submit([1], n=2)
    bench.submit([1], n=1)
    bench.run()
