"""EncoderScheduler: whole prompts in queue order, as many as fit a step, none lost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scripted_source import ScriptedSource
from slipstream.base.errors import InvalidPrompt, PromptTooLong, QueueFull, UserError
from slipstream.config.config import SchedulerConfig
from slipstream.contracts.request import FinishReason
from slipstream.contracts.step import NO_INTS, StepResult
from slipstream.params.pooling import PoolingParams
from slipstream.scheduler.encoder_scheduler import MAX_TAKEN, MIN_HALF_TOKENS, EncoderRequest, EncoderScheduler

EMBED = PoolingParams(task="embed")


def make(tokens=32, rows=4, length=16, waiting=100, depth=2):
    return EncoderScheduler(
        SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=length, max_waiting=waiting,
            chunked_prefill=False, depth=depth, seed=0, staged_ints=0, is_encoder=True,
        )
    )  # fmt: skip


def submit(scheduler, id, length=4, params=EMBED, type_start=None, caller=""):
    scheduler.submit(EncoderRequest(id, list(range(length)), params, type_start, caller=caller))


def with_more(scheduler, lengths, params=EMBED):
    """A caller with more prompts, of these lengths."""

    def make(one):
        return EncoderRequest(f"more{one[0]}", list(range(one[1])), params)

    return ScriptedSource(scheduler.sources, enumerate(lengths), make)


def result(plan, failed=()):
    """Each prompt's result is the sum of its tokens."""
    ends = np.cumsum(plan.num_tokens)
    sums = tuple(
        np.array([plan.tokens[end - n : end].sum()], np.float32) for end, n in zip(ends, plan.num_tokens, strict=True)
    )
    return StepResult(NO_INTS, np.zeros(0, np.bool_), pooled=sums, pool_failed=frozenset(failed))


def test_a_step_takes_as_many_as_fit_in_queue_order():
    scheduler = make()
    for i, length in enumerate((16, 10, 16, 1, 5)):
        submit(scheduler, f"r{i}", length)
    plan = scheduler.plan()
    assert plan.num_tokens.tolist() == plan.lengths.tolist() == plan.num_host_tokens.tolist() == [16, 10]
    assert plan.rows.tolist() == [0, 1] and plan.pooling.ends.all() and not plan.num_drawn.any() and plan.admitted == ()
    assert plan.tokens.tolist() == [*range(16), *range(10)] and plan.pooling.type_starts is None
    second = scheduler.plan()
    assert second.num_tokens.tolist() == [16, 1, 5] and scheduler.plan() is None
    assert (scheduler.num_waiting, scheduler.num_running, len(scheduler._in_flight)) == (0, 5, 2)
    scheduler.check()
    outputs = scheduler.commit(result(plan)) + scheduler.commit(result(second))
    assert [output.request_id for output in outputs] == [f"r{i}" for i in range(5)]
    assert [output.pooled.array().tolist() for output in outputs] == [[120.0], [45.0], [120.0], [0.0], [10.0]]
    assert all(output.finish_reason is FinishReason.STOP for output in outputs) and not scheduler.has_requests()


@pytest.mark.parametrize(("depth", "sizes"), [(0, [8]), (1, [4, 4]), (2, [4, 4])])
def test_a_burst_is_split_in_two_steps_when_steps_are_launched_ahead(depth, sizes):
    """So that the device always computes one half while the host prepares the other."""
    scheduler = make(tokens=4096, rows=64, length=4096, depth=depth)
    for i in range(8):
        submit(scheduler, f"r{i}", MIN_HALF_TOKENS // 4)
    plans = [scheduler.plan() for _ in sizes]
    assert [len(plan.rows) for plan in plans] == sizes and scheduler.plan() is None
    for turn in range(3):  # a caller that is answered sends another request
        for place, size in enumerate(sizes):
            outputs = scheduler.commit(result(plans[place]))
            for output in outputs:
                submit(scheduler, f"{output.request_id}-{turn}", MIN_HALF_TOKENS // 4)
            plans[place] = scheduler.plan()
            assert len(plans[place].rows) == size
            scheduler.check()


def test_a_small_burst_or_one_behind_another_step_is_not_split():
    scheduler = make(tokens=4096, rows=64, length=4096, depth=1)
    for i in range(7):
        submit(scheduler, f"r{i}", MIN_HALF_TOKENS // 4)
    first = scheduler.plan()
    assert len(first.rows) == 7
    for i in range(20):
        submit(scheduler, f"s{i}", MIN_HALF_TOKENS // 4)
    assert len(scheduler.plan().rows) == 20


def test_one_long_prompt_is_computed_in_one_step():
    scheduler = make(tokens=4096, rows=64, length=4096, depth=1)
    submit(scheduler, "a", 4 * MIN_HALF_TOKENS)
    assert scheduler.plan().num_tokens.tolist() == [4 * MIN_HALF_TOKENS]


def test_rows_bound_a_step_too():
    scheduler = make()
    for i in range(9):
        submit(scheduler, f"r{i}", 1)
    assert [len(scheduler.plan().rows) for _ in range(3)] == [4, 4, 1]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_takes_as_many_prompts_as_fit(depth):
    scheduler = make(tokens=4096, rows=64, length=4096, depth=depth)
    submit(scheduler, "first", 8)
    source = with_more(scheduler, [MIN_HALF_TOKENS // 4] * 99)
    first = scheduler.plan()
    assert first.num_tokens.tolist() == [8] + [MIN_HALF_TOKENS // 4] * 31  # full, and not parted: there are more
    assert len(source.waiting) == 99 - 2 * MAX_TAKEN
    scheduler.check()
    sizes = [len(first.rows)]
    plans = [first]
    while (plan := scheduler.plan()) is not None:
        sizes.append(len(plan.rows))
        plans.append(plan)
    assert sizes == [32, 32, 32, 4] and not source.waiting
    outputs = [output for plan in plans for output in scheduler.commit(result(plan))]
    assert len({output.request_id for output in outputs}) == 100
    scheduler.check()


def test_a_full_step_takes_no_prompts():
    scheduler = make()
    for length in (16, 16):
        submit(scheduler, f"r{scheduler.num_waiting}", length)
    source = with_more(scheduler, [1] * 9)
    assert scheduler.plan().num_tokens.tolist() == [16, 16] and len(source.waiting) == 9
    for place in range(4):
        submit(scheduler, f"s{place}", 1)
    assert scheduler.plan().num_tokens.tolist() == [1] * 4 and len(source.waiting) == 9


def test_a_step_takes_no_more_prompts_if_documents_must_wait():
    query = PoolingParams(task="token_embed", query_key="q", query_uses=90)
    scheduler = make(rows=64)
    submit(scheduler, "query", 4, query)
    source = with_more(scheduler, [1] * 90, query.with_changes(query_uses=0))
    assert scheduler.plan().num_tokens.tolist() == [4] and len(source.waiting) == 90 - MAX_TAKEN
    assert len(scheduler.plan().rows) == 32
    scheduler.check()


def test_lower_priorities_go_first_and_leave_no_queue_behind():
    scheduler = make(rows=1)
    for i, priority in enumerate((5, 0, -3, 5)):
        submit(scheduler, f"r{i}", i + 1, PoolingParams(task="embed", priority=priority))
    assert [len(scheduler.plan().tokens) for _ in range(4)] == [3, 2, 1, 4]
    assert scheduler.plan() is None and list(scheduler._levels) == [0]


def test_queues_are_empty_when_all_waiting_requests_are_aborted():
    scheduler = make()
    for place in range(3):
        submit(scheduler, str(place))
    for place in range(3):
        scheduler.abort(str(place))
    assert not scheduler.has_requests() and not scheduler._levels


def test_a_caller_with_many_prompts_shares_every_step_with_others():
    scheduler = make(rows=4)
    for i in range(20):
        submit(scheduler, f"a{i}", caller="a")
    assert len(scheduler.plan().rows) == 4
    for i in range(3):
        submit(scheduler, f"b{i}", 5, caller="b")
    plan = scheduler.plan()
    assert sorted(plan.num_tokens.tolist()) == [4, 4, 5, 5]
    scheduler.abort("b2")
    scheduler.check()
    assert scheduler.plan().num_tokens.tolist() == [4, 4, 4, 4]


def test_token_types_are_one_number_per_prompt():
    scheduler = make()
    submit(scheduler, "a", 4, type_start=2)
    submit(scheduler, "b", 6)
    assert scheduler.plan().pooling.type_starts.tolist() == [2, 6]


def test_what_cannot_run_is_refused():
    scheduler = make(waiting=2)
    with pytest.raises(InvalidPrompt, match="no tokens"):
        submit(scheduler, "a", 0)
    with pytest.raises(PromptTooLong, match="has 17 tokens, the model length is 16"):
        submit(scheduler, "a", 17)
    submit(scheduler, "a", 16)
    with pytest.raises(UserError, match="'a' is being served already"):
        submit(scheduler, "a")
    submit(scheduler, "b")
    with pytest.raises(QueueFull, match="2 requests are waiting, the limit is 2"):
        submit(scheduler, "c")
    scheduler.check()


def test_a_failed_result_fails_its_own_request_only():
    scheduler = make()
    for id in "abc":
        submit(scheduler, id)
    outputs = scheduler.commit(result(scheduler.plan(), failed=[1]))
    assert [output.finish_reason for output in outputs] == ["stop", "error", "stop"]
    assert "not finite" in outputs[1].error


@pytest.mark.parametrize("seed", range(5))
def test_random_runs_lose_no_request(seed):
    rng = random.Random(seed)
    scheduler, plans, sent, aborted, answered = make(), [], {}, set(), {}
    for _ in range(300):
        for _ in range(rng.choice([0, 1, 3])):
            id = f"r{len(sent)}"
            sent[id] = rng.randint(1, 16)
            params = PoolingParams(task="embed", priority=rng.choice([0, 0, 1]))
            submit(scheduler, id, sent[id], params, caller=rng.choice(["", "a", "b"]))
        if sent and rng.random() < 0.2:
            id = rng.choice(list(sent)[-20:])
            if scheduler.abort(id):
                aborted.add(id)
        if (plan := scheduler.plan()) is not None:
            assert plan.num_tokens.sum() <= 32 and len(plan.rows) <= 4
            plans.append(plan)
        if len(plans) > rng.choice([0, 1, 2]):
            for output in scheduler.commit(result(plans.pop(0))):
                assert output.request_id not in answered
                answered[output.request_id] = output.pooled.array()[0]
        scheduler.check()
        while len(sent) - len(answered) > 60:
            if (plan := scheduler.plan()) is not None:
                plans.append(plan)
            answered |= {o.request_id: o.pooled.array()[0] for o in scheduler.commit(result(plans.pop(0)))}
    while scheduler.has_requests():
        if (plan := scheduler.plan()) is not None:
            plans.append(plan)
        answered |= {o.request_id: o.pooled.array()[0] for o in scheduler.commit(result(plans.pop(0)))}
    assert answered.keys() == sent.keys() - aborted and aborted
    assert all(answered[id] == sum(range(sent[id])) for id in answered)
