"""A step never reports more logprobs, and never keeps longer lists, than it has room for."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scripted_bench import Bench
from slipstream.base.errors import RequestTooLarge
from slipstream.contracts.messages import LOGPROB
from slipstream.contracts.step import StepPlan
from slipstream.params.sampling import MAX_PACKED_LOGPROBS, SamplingParams

MOST = 400
SAMPLED = [None, 0, 3, MAX_PACKED_LOGPROBS, MAX_PACKED_LOGPROBS + 1, 90, 399]
OF_PROMPT = [None, None, 0, 7, 60, 399]
GIVEN = [(), (), (5,), tuple(range(90))]
STOPS = [(), (200,), tuple(range(200, 270))]
WORDS = [(), (), [[1]], [[1, 2]] * 19, [[3] * 30], [[4] * 10] * 19]  # many or long: 20 x 30 is too much for two


class Counted(Bench):
    """Records how many numbers each step reports."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.seated: dict[int, SamplingParams] = {}
        self.words: dict[int, tuple[tuple[int, ...], ...]] = {}  # of those seated who have some
        self.max_lines = self.max_words = 0

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            for row in plan.released.tolist():
                self.seated.pop(row, None)
                self.words.pop(row, None)
            self.seated |= {admission.row: admission.params for admission in plan.admitted}
            self.words |= {admission.row: admission.bad_words for admission in plan.admitted if admission.bad_words}
            self.check_words()
            params = [self.seated[row] for row in plan.rows[plan.num_drawn > 0].tolist()]
            self.check_lines([1 + k for own in params if (k := own.num_logprobs or 0) > MAX_PACKED_LOGPROBS])
            self.check_lines([len(own.requested_ids) for own in params if own.requested_ids])
            seated = self.seated.values()
            self.check_lines([len(own.stop_token_ids) for own in seated if own.min_tokens and own.stop_token_ids])
            if plan.scores is not None:
                self.check_lines([1 + plan.scores.num_logprobs] * len(plan.scores.indices))
            wanted = [k if k <= MAX_PACKED_LOGPROBS else 0 for own in params if (k := own.num_logprobs) is not None]
            assert plan.num_logprobs == max(wanted, default=None)
        return plan

    def check_words(self) -> None:
        """Each row has a line per bad word and one for its last tokens, all as long as the longest."""
        words = self.words.values()
        most, longest = max(map(len, words), default=0), max((len(one) for own in words for one in own), default=0)
        self.max_words = max(self.max_words, len(words))
        assert len(words) < 2 or len(words) * (1 + most) * longest <= MOST, f"{len(words)} x {most} words of {longest}"

    def check_lines(self, lengths: list[int]) -> None:
        assert len(lengths) * max(lengths, default=0) <= MOST, f"{lengths}"
        self.max_lines = max(self.max_lines, len(lengths))


@pytest.mark.parametrize("seed", range(8))
def test_no_step_reports_more_than_it_may(seed):
    rng = random.Random(seed)
    bench = Counted(
        depth=seed % 3,
        num_pages=20,
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        max_num_seqs=6,
        max_step_logprobs=MOST,
    )
    for _ in range(25):
        bench.submit(
            [rng.randrange(90) for _ in range(rng.randrange(1, 14))],
            n=rng.choice([1, 1, 3]),
            max_tokens=rng.randrange(1, 12),
            priority=rng.randrange(3),
            logprobs=rng.choice(SAMPLED),
            prompt_logprobs=rng.choice(OF_PROMPT),
            logprob_token_ids=rng.choice(GIVEN),
            min_tokens=1 if seed % 2 else 0,
            stop_token_ids=rng.choice(STOPS),
            words=rng.choice(WORDS),
        )
        for _ in range(rng.randrange(3)):
            if bench.scheduler.has_requests():
                bench.step()
    bench.run()
    assert bench.max_lines > 1 and bench.max_words > 1
    for request in bench.requests:
        bench.check_tokens(request)
        mine = [o for o in bench.outputs if (o.request_id, o.sample) == (request.id, request.sample)]
        params = request.params
        if params.num_logprobs is not None:
            each = 1 + params.num_logprobs + len(params.requested_ids)
            assert all(len(np.frombuffer(o.logprobs, LOGPROB)) == each for o in mine if o.token_ids)
        if params.prompt_logprobs is not None and not request.sample:
            told = sum(len(np.frombuffer(o.prompt_logprobs, LOGPROB)) for o in mine if o.prompt_logprobs)
            assert told == (request.num_prompt - 1) * (1 + params.prompt_logprobs)


def test_narrow_reports_are_admitted_at_once():
    bench = Counted(max_step_logprobs=MOST, max_num_seqs=4)
    bench.submit([1], logprobs=399)
    for _ in range(3):
        bench.submit([2], logprobs=MAX_PACKED_LOGPROBS)
    assert len(bench.plan().rows) == 4


def test_a_prompt_whose_report_never_fits_one_step_is_refused():
    bench = Bench(chunked_prefill=False, max_step_logprobs=MOST)
    bench.submit([1] * 5, prompt_logprobs=99)
    with pytest.raises(RequestTooLarge, match="500 values for 5 tokens.*enable_chunked_prefill"):
        bench.submit([1] * 6, prompt_logprobs=99)
    bench.submit([1] * 5, prompt_logprobs=99)
    bench.run()
    assert len(bench.plans[0].rows) == 1  # the second would have been too much for the same step
