"""Committer: turns the result of a step into outputs. Tokens become known, and requests end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat

import numpy as np

from slipstream.contracts.messages import Output
from slipstream.contracts.request import Request, Status, WaitFor
from slipstream.contracts.step import StepResult
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.decode_arrays import DecodeArrays
from slipstream.scheduler.drafting import DraftCounts
from slipstream.scheduler.in_flight import Launched
from slipstream.scheduler.lifecycle import RequestLifecycle
from slipstream.scheduler.step_outputs import (
    accepted_tokens,
    draw_failure,
    logprob_bytes,
    packed_logprobs,
    pool_failure,
    pooled_output,
    prompt_outputs,
)
from slipstream.scheduler.stopping import check_stop
from slipstream.scheduler.waiting import WaitingQueue


class Committer:
    def __init__(
        self,
        cache: CacheManager,
        waiting: WaitingQueue,
        lifecycle: RequestLifecycle,
        arrays: DecodeArrays,
        drafts: DraftCounts,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._lifecycle = lifecycle
        self._arrays = arrays
        self._drafts = drafts

    def commit(self, launched: Launched, result: StepResult) -> list[Output]:
        """Process the result of a plan. Costs O(sampling rows), whatever their lengths."""
        for request, admission, length in launched.chunks:
            if request.admission == admission:
                request.committed = length
        requests = launched.requests
        count = len(requests)
        num_drawn, result = launched.without_sitting(result)
        drawn = num_drawn or repeat(1, count)
        accepted = accepted_tokens(result, num_drawn, count)
        if num_drawn is not None and result.counts is not None:
            self._drafts.add(requests, num_drawn, result.counts)
        self._drafts.see(requests, accepted, result.drafts, num_drawn is not None)
        failed = result.failed.tolist() if np.count_nonzero(result.failed) else repeat(False, count)
        tops: Iterable[bytes | None] = repeat(None, count)
        if result.logprobs is not None:
            tops = packed_logprobs(requests, result, num_drawn)
        outputs: list[Output] = []
        if result.prompt_logprobs is not None:
            outputs += prompt_outputs(launched.scored, result.prompt_logprobs)
        if launched.pooled:
            outputs += self._commit_pooled(launched.pooled, result)
        drafts: Iterable[list[int]] = repeat([]) if result.drafts is None else result.drafts.tolist()
        for request, admission, num, new, bad, top, proposed in zip(
            requests, launched.admissions, drawn, accepted, failed, tops, drafts, strict=False
        ):
            request.pending -= num
            if num > len(new) and request.admission == admission:
                request.computed -= num - len(new)
                self._arrays.is_stale = True
                if not new:
                    self._cache.take_back(request)
            if request.admission != admission and request.status is Status.FINISHED:
                continue  # this step was launched before the end of the request was known
            if request.session is not None:
                request.session.drafts = proposed if new else []  # a row that sits out has none
                if len(new) > 1:
                    request.session.take_accepted(new, request.stop_ids)
                    top = None if top is None else top[: logprob_bytes(request) * len(new)]
            tokens = request.tokens
            tokens.extend(new)
            if new and (len(tokens) >= request.max_length or not request.stop_ids.isdisjoint(new)):
                num_kept, reason, stop = check_stop(request, len(new))
                if reason is not None:
                    if num_kept < len(new):
                        del tokens[num_kept - len(new) :], new[num_kept:]
                        top = None if top is None else top[: logprob_bytes(request) * num_kept]
                    outputs.append(Output(request.id, request.sample, new, top, reason, stop, request.num_cached))
                    self._lifecycle.finish(request)
                    continue
            if new:
                outputs.append(Output(request.id, request.sample, new, top, None, None, request.num_cached))
            if bad:
                outputs.append(draw_failure(request))
                self._lifecycle.finish(request)
                self._cache.unpublish(request)
                continue
            if len(tokens) > request.publish_after:
                self._cache.publish(request)
            elif request.admission != admission and not request.pending:
                self._waiting.ready(request, WaitFor.TOKENS)  # preempted, and all its tokens are known now
            if len(tokens) > request.short_limit and request.status is Status.RUNNING:
                self._lifecycle.requeue(request)  # all its keys must be computed again, with the long rope factors
        return outputs

    def _commit_pooled(self, requests: list[Request], result: StepResult) -> Iterator[Output]:
        assert len(requests) == len(result.pooled), f"{len(requests)} requests, {len(result.pooled)} results"
        for index, (request, pooled) in enumerate(zip(requests, result.pooled, strict=True)):
            if request.status is Status.FINISHED:
                continue  # aborted
            self._lifecycle.finish(request)
            if index in result.pool_failed:
                self._cache.unpublish(request)
                yield pool_failure(request.id)
            else:
                yield pooled_output(request.id, pooled, request.num_cached)
