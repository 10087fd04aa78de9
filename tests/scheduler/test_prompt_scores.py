"""Prompt logprobs: each token is scored once, whether the prompt is chunked, preempted or shared."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scripted_bench import Bench
from slipstream.contracts.messages import LOGPROB


def scores_of(bench: Bench, request) -> list[float]:
    """All prompt logprobs in the outputs of this sample."""
    mine = [o for o in bench.outputs if (o.request_id, o.sample) == (request.id, request.sample)]
    each = 1 + (request.params.prompt_logprobs or 0)
    told = np.frombuffer(b"".join(output.prompt_logprobs or b"" for output in mine), LOGPROB)[::each]
    assert told["token"].tolist() == request.tokens[1 : 1 + len(told)]
    assert told["rank"].tolist() == list(range(1, 1 + len(told)))
    return told["logprob"].tolist()


def check(bench: Bench, request) -> None:
    prompt = request.tokens[: request.num_prompt]
    assert scores_of(bench, request) == [-float(token) for token in prompt[1:]]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [2, 5, 64])
def test_each_prompt_token_but_the_first_is_scored_once(depth, budget):
    bench = Bench(depth=depth, max_num_batched_tokens=budget)
    asked = [bench.submit([k + 1, 3, 5, 7, 9, 11, k + 2], prompt_logprobs=2)[0] for k in range(3)]
    (silent,) = bench.submit([1, 2, 3])
    bench.run()
    for request in asked:
        check(bench, request)
        bench.check_tokens(request)
    assert scores_of(bench, silent) == []
    told = np.frombuffer(next(o.prompt_logprobs for o in bench.outputs if o.prompt_logprobs), LOGPROB)
    assert told["rank"][1:3].tolist() == [1, 2] and (told["logprob"][1:3] == -told["token"][1:3] - 0.5).all()


def test_a_chunk_scores_the_first_token_of_the_next_one():
    bench = Bench(max_num_batched_tokens=3)
    bench.submit([10, 11, 12, 13, 14, 15], max_tokens=1, prompt_logprobs=0)
    first, second = bench.plan(), bench.plan()
    assert first.scores.indices.tolist() == [0, 1, 2] and first.scores.tokens.tolist() == [11, 12, 13]
    assert second.scores.indices.tolist() == [0, 1] and second.scores.tokens.tolist() == [14, 15]


def test_indices_count_over_all_rows_of_the_step():
    bench = Bench()
    bench.submit([1], max_tokens=8)
    bench.step()
    bench.submit([20, 21, 22])
    bench.submit([30, 31, 32], prompt_logprobs=1)
    plan = bench.plan()
    assert plan.num_tokens.tolist() == [1, 3, 3]
    assert plan.scores.indices.tolist() == [4, 5] and plan.scores.tokens.tolist() == [31, 32]


def test_scored_prompts_use_no_cached_prefix():
    bench = Bench(page_size=4)
    prompt = list(range(1, 14))
    bench.submit(prompt, max_tokens=1)
    bench.run()
    (asks,) = bench.submit(prompt, max_tokens=1, prompt_logprobs=0)
    (other,) = bench.submit(prompt, max_tokens=1)
    bench.run()
    assert asks.num_cached == 0 and other.num_cached == 12
    check(bench, asks)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prompt_logprobs_are_reported_for_one_sample_only(depth):
    bench = Bench(depth=depth, max_num_batched_tokens=4)
    samples = bench.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], n=3, prompt_logprobs=1)
    bench.run()
    check(bench, samples[0])
    assert not scores_of(bench, samples[1]) and not scores_of(bench, samples[2])


def test_a_prompt_of_one_token_has_nothing_to_score():
    bench = Bench()
    (request,) = bench.submit([5], prompt_logprobs=4)
    bench.run()
    check(bench, request)


def test_a_wide_report_limits_the_chunk_length():
    bench = Bench(max_num_batched_tokens=64, max_model_len=64)
    (request,) = bench.submit(list(range(40)), max_tokens=1, prompt_logprobs=2**18)
    plan = bench.plan()
    assert plan.num_tokens.tolist() == [3] and plan.scores.num_logprobs == 2**18
    bench.scheduler.abort(request.id)


@pytest.mark.parametrize("seed", range(6))
def test_preemption_neither_loses_nor_repeats_a_score(seed):
    rng = random.Random(seed)
    bench = Bench(
        depth=seed % 3, num_pages=11, max_num_batched_tokens=rng.choice([3, 7, 20]), max_num_seqs=5, max_model_len=40
    )
    requests = []
    for _ in range(25):
        prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 14))]
        asked = rng.choice([None, 0, 3])
        length, rank = rng.randrange(5, 26), rng.randrange(3)
        requests += bench.submit(prompt, max_tokens=length, prompt_logprobs=asked, priority=rank)
        for _ in range(rng.randrange(3)):
            if bench.scheduler.has_requests():
                bench.step()
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    for request in requests:
        bench.check_tokens(request)
        if request.params.prompt_logprobs is not None:
            check(bench, request)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_preemption_between_two_chunks_continues_with_the_next_score(depth):
    bench = Bench(depth=depth, max_num_batched_tokens=5)
    others = [bench.submit([k] * 4, max_tokens=20)[0] for k in range(4)]
    (slow,) = bench.submit(list(range(30, 50)), max_tokens=4, prompt_logprobs=0, priority=1)
    while not 3 < slow.next_scored < slow.num_prompt:
        bench.step()
    bench.scheduler._running.preempt(slow)
    bench.run()
    check(bench, slow)
    for request in [*others, slow]:
        bench.check_tokens(request)
