"""Checkpoints of recurrent states: where they are taken, and what later requests find."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from scripted_bench import Bench
from scripted_tokens import VOCAB
from slipstream.config.config import StateConfig
from slipstream.contracts.request import FinishReason, Request, Status
from slipstream.contracts.step import StepPlan
from slipstream.scheduler.cache.states import StateCache


def cache(num_checkpoints: int = 64, border: int = 64, spacing: int = 1024) -> StateCache:
    return StateCache(StateConfig((), num_checkpoints, border, spacing), 16)


def bench(**changes: object) -> Bench:
    """Borders at 64 positions, prompts of thousands of tokens."""
    sizes = dict(
        page_size=16, num_pages=2000, max_model_len=8192, max_num_batched_tokens=2048, num_checkpoints=64, border=64,
        spacing=1024, staged_ints=1 << 16,
    )  # fmt: skip
    return Bench(**(sizes | changes))  # type: ignore[arg-type]


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def run(bench: Bench, prompt: Sequence[int], max_tokens: int = 2, **params: object) -> Request:
    """Run a request alone; returns it, with the number of its cached tokens."""
    (request,) = bench.submit(prompt, max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    bench.run()
    bench.check_tokens(request)
    return request


def saved(plans: Sequence[StepPlan]) -> list[int]:
    return [position for plan in plans if plan.states is not None for position in plan.states.saves[:, 1].tolist()]


def test_positions_are_dense_near_the_end_and_spaced_before() -> None:
    assert cache().save_positions(0, 4096, 0) == [1024, 2048, 3072, 3584, 3840, 3968, 4032, 4096]
    assert cache().save_positions(0, 4100, 1000) == [960, 1024, 2048, 3072, 3584, 3840, 3968, 4032, 4096]
    assert cache().save_positions(3000, 4100, 3500) == [3072, 3456, 3584, 3840, 3968, 4032, 4096]
    assert cache().save_positions(0, 63, 0) == [] and cache().save_positions(64, 127, 64) == []
    assert cache().save_positions(0, 64, 0) == [64]


def test_a_prompt_takes_a_share_of_the_checkpoints_the_end_first() -> None:
    assert cache(2).save_positions(0, 4096, 0) == [4032, 4096]
    assert cache(2).save_positions(0, 4096, 2000) == [1984, 4096]
    long = cache(64).save_positions(0, 100_000, 0)
    assert len(long) <= 16 and 100_000 // 64 * 64 in long
    assert max(after - before for before, after in zip([0, *long], long, strict=False)) <= 40_000


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("ending", [9, 40, 63, 64, 100, 190, 400])
def test_a_prompt_with_another_last_sentence_hits_its_prefix_at_the_second_sighting(ending: int, depth: int) -> None:
    """The law: at least 95% of the common prefix of a prompt of 4,000 tokens."""
    for length in (3900, 4096, 4177) if depth == 0 else (4096,):
        day = bench(depth=depth)
        prompt = text(length)
        run(day, prompt)
        common = length - ending
        second = run(day, [*prompt[:common], *text(ending, seed=1)])
        assert second.num_cached >= 0.95 * common
        # the second one has proven where they part: the third one hits all whole chunks before
        third = run(day, [*prompt[:common], *text(ending, seed=2)])
        assert third.num_cached == common // 64 * 64


def test_the_same_prompt_again_computes_less_than_a_chunk_more() -> None:
    day = bench()
    run(day, text(1000))
    assert run(day, text(1000)).num_cached == 960
    assert run(day, [*text(1000), 5]).num_cached == 960
    assert run(day, text(960)).num_cached == 896  # one token is left to compute, and the state after it is not known


def test_the_next_turn_of_a_conversation_continues_at_the_end_of_the_answer() -> None:
    day = bench(depth=1)
    first = run(day, text(500), max_tokens=300)
    second = run(day, [*first.tokens, *text(30, seed=1)])
    assert second.num_cached == 768  # of 800 tokens, the last of which was never computed
    assert len(set(saved(day.plans))) == len(saved(day.plans))


def test_a_decoding_request_keeps_its_newest_border_only() -> None:
    day = bench(num_checkpoints=16)
    (request,) = day.submit(text(10), max_tokens=400)
    day.run()
    assert saved(day.plans) == [64, 128, 192, 256, 320, 384]
    assert run(day, request.tokens[:200]).num_cached == 0  # borders up to 192 are forgotten
    assert run(day, request.tokens).num_cached == 384


def test_a_stop_within_a_chunk_leaves_the_border_before_it() -> None:
    """The last border may have been saved by a step that was launched before the end was known."""
    for max_tokens in range(52, 60):
        day = bench(depth=2)
        (first,) = day.submit(text(10), max_tokens=max_tokens)
        day.run()
        found = run(day, [*first.tokens, 1, 2, 3]).num_cached
        assert found == (64 if len(first.tokens) > 64 else 0)


def test_samples_of_a_prompt_start_from_the_last_checkpoint_of_the_first() -> None:
    day = bench(depth=1)
    requests = day.submit(text(700), n=4, max_tokens=70)
    day.run()
    for request in requests:
        day.check_tokens(request)
    assert [request.num_cached for request in requests] == [0, 640, 640, 640]
    assert sum(len(plan.copies) for plan in day.plans) == 0


def test_requests_of_one_plan_do_not_share_states_and_the_next_plan_does() -> None:
    """A plan restores states before it computes new ones."""
    day = bench()
    requests = [day.submit(text(600), max_tokens=2)[0] for _ in range(8)]
    day.run()
    for request in requests:
        day.check_tokens(request)
    assert [request.num_cached for request in requests] == [0] * 5 + [576] * 3


def test_a_preempted_request_continues_from_a_checkpoint() -> None:
    """Two answers grow until pages run out."""
    day = bench(num_pages=52, depth=1, num_checkpoints=16)
    first, second = (day.submit(text(200, seed), max_tokens=300)[0] for seed in range(2))
    day.run_until_preempted(second)
    day.run()
    day.check_tokens(first)
    day.check_tokens(second)
    returned = [admission for plan in day.plans for admission in plan.admitted][2]
    assert returned.num_known > 200 and returned.num_cached >= 192


def test_a_prompt_preempted_midway_continues_from_a_checkpoint() -> None:
    day = bench(max_num_batched_tokens=256, num_pages=140, num_checkpoints=32)
    (first,) = day.submit(text(700), max_tokens=200)
    while first.computed < 700:
        day.step()
    (second,) = day.submit(text(1400, seed=1), max_tokens=3, priority=1)
    while second.computed < 1050:
        day.step()
    day.scheduler._running.preempt(second)
    day.run()
    day.check_tokens(first)
    day.check_tokens(second)
    returned = [admission for plan in day.plans for admission in plan.admitted][-1]
    assert returned.num_known == 1400 and returned.num_cached == 1088


def test_an_aborted_request_leaves_valid_checkpoints() -> None:
    day = bench(depth=2)
    (request,) = day.submit(text(2000), max_tokens=500)
    for _ in range(100):
        day.step()
    day.scheduler.abort(request.id)
    day.run()
    assert run(day, request.tokens).num_cached >= 2048
    assert run(day, text(2000)).num_cached == 1984


def test_a_failed_request_leaves_no_checkpoint() -> None:
    day = bench()
    day.executor.fail = lambda admission, length: admission.number == 0 and length == 205
    (request,) = day.submit(text(200), max_tokens=30)
    day.run()
    assert [output.finish_reason for output in day.outputs][-1] is FinishReason.ERROR
    day.executor.fail = lambda admission, length: False
    assert run(day, text(200)).num_cached == 0
    assert run(day, text(200)).num_cached == 192


def test_salts_share_nothing() -> None:
    day = bench()
    run(day, text(200), salt="a")
    assert run(day, text(200), salt="b").num_cached == 0 and run(day, text(200), salt="a").num_cached == 192


def test_pooled_prompts_use_and_leave_checkpoints() -> None:
    day = bench()
    first = day.pool(text(400))
    day.run()
    second = day.pool([*text(400), 1])
    day.run()
    assert (first.num_cached, second.num_cached) == (0, 384)
    for request in (first, second):
        day.check_tokens(request)
    whole = day.pool(text(400), task="token_embed")
    day.run()
    assert whole.num_cached == 0


def test_a_model_without_pages_has_checkpoints_too() -> None:
    day = bench(num_groups=0, depth=1)
    first = run(day, text(3000), max_tokens=200)
    assert run(day, text(3000)).num_cached == 2944
    assert run(day, [*first.tokens, 1]).num_cached == 3136


def test_a_chunk_that_is_not_the_last_ends_at_a_border() -> None:
    day = bench(max_num_batched_tokens=1000)
    run(day, text(2100), max_tokens=3)
    assert [plan.num_tokens.tolist() for plan in day.plans[:3]] == [[960], [960], [180]]
    small = bench(max_num_batched_tokens=40, max_num_seqs=1)
    run(small, text(100), max_tokens=1)
    assert [plan.num_tokens.tolist() for plan in small.plans] == [[40], [24], [36]]


def test_without_prefix_caching_nothing_is_saved_and_nothing_forked() -> None:
    for changes in (dict(prefix_caching=False), dict(num_checkpoints=0)):
        day = bench(**changes)
        requests = day.submit(text(300), n=2, max_tokens=80)
        day.run()
        for request in requests:
            day.check_tokens(request)
        assert all(plan.states is None and not len(plan.copies) for plan in day.plans)
        assert day.cache.num_hits == day.cache.num_queries == 0


def test_a_request_that_waits_follows_the_checkpoints() -> None:
    """Its match is kept while it waits for a row, and others overwrite and add checkpoints meanwhile."""
    day = bench(max_num_seqs=1, num_checkpoints=2)
    run(day, text(300))
    (long,) = day.submit(text(100, seed=1), max_tokens=200)
    day.step()
    (waiting,) = day.submit(text(300), max_tokens=2)
    while long.status is not Status.FINISHED:
        day.step()
        day.scheduler.check()
    day.run()
    for request in (long, waiting):
        day.check_tokens(request)


@pytest.mark.parametrize("num_groups", [1, 0])
def test_forced_tokens_may_pass_borders(num_groups: int) -> None:
    """Tokens that a grammar forces are a chunk of a decoding request: the newest border of it is kept."""
    day = bench(num_groups=num_groups)
    (request,) = day.submit(text(60), max_tokens=150)
    while request.num_output < 2:
        day.step()
    day.executor.rows[request.row].has_grammar = True  # the device expects tokens of the host
    request.know_more(text(140, seed=1))
    while request.status is not Status.FINISHED:
        day.step()
        day.scheduler.check()
    day.run()
    assert len(request.tokens) == 210 and run(day, [*request.tokens, 1]).num_cached == 192
