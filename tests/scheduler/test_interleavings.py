"""Any order of plans, commits, arrivals, aborts and failures, over any small cache: each request gets its own result.

`test_fuzz.py` has long random runs; these are short, and hypothesis shrinks a failure to a few actions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripted_bench import Bench
from scripted_tokens import alone
from slipstream.base.errors import RequestTooLarge, UserError
from slipstream.contracts.messages import LOGPROB
from slipstream.contracts.request import FinishReason, Request, Status

ROOT = list(range(40, 60))  # prompts begin alike, so that pages are shared
BAD_SEED = 1  # whose draws fail at their third token

submits = st.tuples(
    st.just("submit"),
    st.integers(1, 14),  # tokens of the prompt
    st.integers(1, 3),  # samples
    st.sampled_from([1, 3, 18]),  # tokens of output
    st.sampled_from([0, 0, 0, BAD_SEED]),
    st.sampled_from([0, 0, 1]),  # priority
    st.sampled_from([None, None, 0, 2]),  # logprobs of the prompt
)
pools = st.tuples(st.just("pool"), st.integers(1, 14), st.sampled_from(["embed", "token_embed"]))
queries = st.tuples(st.just("query"), st.integers(1, 14), st.integers(0, 1), st.integers(1, 2))
documents = st.tuples(st.just("document"), st.integers(1, 14), st.integers(0, 1))
aborts = st.tuples(st.just("abort"), st.integers(0, 12), st.sampled_from([None, None, 0, 1]))
plans, commits = st.just(("plan",)), st.just(("commit",))
paces = st.tuples(st.just("pace"), st.sampled_from([None, 1, 3]))
drafts = st.tuples(st.just("drafts"), st.sampled_from([0, 1, 3]))
actions = st.one_of(submits, submits, pools, queries, documents, aborts, plans, plans, plans, commits, paces, drafts)
caches = st.fixed_dictionaries(
    dict(
        page_size=st.sampled_from([1, 2, 4]),
        num_positions=st.integers(16, 40),  # of all requests together: a few
        prefix_caching=st.booleans(),
        windows=st.sampled_from([(0,), (0,), (0, 5), (3,)]),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.sampled_from([2, 5, 40]),
        num_drafts=st.sampled_from([0, 0, 1, 4]),
    )
)


class Story:
    def __init__(self, depth: int, cache: dict[str, Any]) -> None:
        num_pages = 1 + cache.pop("num_positions") // cache["page_size"]
        self.bench = Bench(depth, max_model_len=24, num_pages=num_pages, **cache)
        self.bench.executor.fail = lambda admission, length: (
            getattr(admission, "seed", 0) == BAD_SEED and length == admission.num_prompt_tokens + 2
        )
        self.aborted: set[Request] = set()

    def submit(self, size: int, n: int, max_tokens: int, seed: int, priority: int, scores: int | None) -> None:
        prompt = ROOT[: size - 1] + [size]
        self._try(
            self.bench.submit, prompt, n=n, max_tokens=max_tokens, seed=seed, priority=priority, prompt_logprobs=scores
        )

    def pool(self, size: int, task: str, **params: Any) -> None:
        self._try(self.bench.pool, ROOT[: size - 1] + [size], task=task, **params)

    def query(self, size: int, key: int, uses: int) -> None:
        self.pool(size, "token_embed", query_key=f"q{key}", query_uses=uses)

    def document(self, size: int, key: int) -> None:
        self.pool(size, "token_embed", query_key=f"q{key}")

    def _try(self, submit: Any, *prompt: Any, **params: Any) -> None:
        try:
            submit(*prompt, **params)
        except (RequestTooLarge, UserError):  # too large for this cache, or of a query that there is not
            pass

    def abort(self, number: int, sample: int | None) -> None:
        self.aborted.update(self.bench.scheduler.abort(f"r{number}", sample))

    def plan(self) -> None:
        if self.bench.num_in_flight <= self.bench.depth:
            self.bench.plan()

    def commit(self) -> None:
        if self.bench.num_in_flight:
            self.bench.commit()

    def pace(self, most: int | None) -> None:
        self.bench.scheduler.max_num_tokens = most

    def drafts(self, num: int) -> None:
        """The number of drafts may change with every step."""
        if self.bench.executor.drafter is not None:
            self.bench.scheduler.drafts.num_drafts = num

    def tell(self, story: list[Any]) -> None:
        for name, *arguments in story:
            getattr(self, name)(*arguments)
            self.bench.scheduler.check()

    def end(self) -> None:
        """Run as the core would until nothing is left."""
        bench, scheduler = self.bench, self.bench.scheduler
        for _ in range(3000):
            bench.outputs += scheduler.take_failures()
            if not scheduler.has_requests():
                break
            bench.step()
            scheduler.check()
        for request in bench.requests:  # queries without further documents
            scheduler.abort(request.id)
        bench.outputs += scheduler.take_failures()
        bench.check_empty()
        bench.executor.queries -= set(scheduler.take_freed_queries())
        assert not bench.executor.queries and not scheduler._lifecycle.live

    def check(self) -> None:
        for request in self.bench.requests:
            assert request.status is Status.FINISHED
            if request in self.aborted:
                continue
            outputs = [o for o in self.bench.outputs if (o.request_id, o.sample) == (request.id, request.sample)]
            ends = [output.finish_reason for output in outputs if output.finish_reason is not None]
            assert len(ends) == 1 and outputs[-1].finish_reason is not None
            if request.pooling is not None:
                if ends != [FinishReason.ERROR]:
                    self.bench.check_tokens(request)
                else:
                    assert "its query was aborted" in outputs[-1].error
            elif request.seed == BAD_SEED and request.max_length >= request.num_prompt + 3:
                wanted = alone(request, self.bench.horizon)[0][:2]
                assert self.bench.output_of(request) == wanted and ends == [FinishReason.ERROR]
            else:
                self.bench.check_tokens(request)
            if request.params.prompt_logprobs is not None and not request.sample:
                told = b"".join(output.prompt_logprobs or b"" for output in outputs)
                scores = np.frombuffer(told, LOGPROB)["logprob"][:: 1 + request.params.prompt_logprobs].tolist()
                assert scores == [-token for token in request.tokens[1 : request.num_prompt]]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_each_request_gets_the_result_it_gets_alone(depth: int) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(caches, st.lists(actions, min_size=10, max_size=60))
    def a_story(cache: dict[str, Any], told: list[Any]) -> None:
        story = Story(depth, dict(cache))
        story.tell(told)
        story.end()
        story.check()

    a_story()
