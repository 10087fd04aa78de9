"""OutputProcessor: what the core sends becomes text, logprobs and finish reasons.

Text that nobody watches is made once, at the end. Text that is streamed is made when its reader looks, text that is
searched for stop strings as it comes; neither is ever taken back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from slipstream.config.pooling_info import PoolingInfo
from slipstream.frontend.logprobs import Logprobs, LogprobStore, texts_of
from slipstream.frontend.pool_results import PoolingRequestOutput, wrap
from slipstream.frontend.results import Increment, Logprob, RequestMetrics, RequestOutput
from slipstream.frontend.sample_state import Sample
from slipstream.messages import Abort, Output, Submit
from slipstream.metrics.stats import ModelStats
from slipstream.params import SamplingParams
from slipstream.pooling_params import PoolingParams
from slipstream.text.tokenizer import Tokenizer

_FIRST = 2**30  # more tokens than anybody collects: the first is never kept back


class OutputProcessor:
    """Keeps one entry for each request under way."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.tracks: dict[str, RequestState] = {}

    def open(
        self, message: Submit, prompt: str | None, *, stream: bool, tokenizer: Tokenizer | None = None
    ) -> RequestState:
        """`stream`: its text is wanted as it grows. `tokenizer`: where it is not the processor's own."""
        track: RequestState
        if isinstance(message.params, PoolingParams):
            track = PoolingRequestState(message, prompt)
        else:
            track = RequestState(message, prompt, tokenizer or self.tokenizer, stream=stream)
        assert message.request_id not in self.tracks, f"request id {message.request_id} is taken"
        self.tracks[message.request_id] = track
        return track

    def drop(self, request_id: str) -> None:
        self.tracks.pop(request_id, None)

    def begin(self, request_ids: Sequence[str]) -> None:
        """These wait no more."""
        now = time.monotonic()
        for name in request_ids:
            if (track := self.tracks.get(name)) is not None:
                track.begun = now

    def process(
        self, outputs: list[Output], failed: list[tuple[RequestState, Exception]] | None = None
    ) -> tuple[list[RequestState], list[Abort]]:
        """Take in a step's outputs. Returns the requests that moved, and what the core need not go on with.

        With `failed`, a request whose output raises an exception is dropped and noted there, and the others go on.
        """
        moved: dict[str, RequestState] = {}
        aborts: list[Abort] = []
        now = time.monotonic()
        for output in outputs:
            track = self.tracks.get(output.request_id)
            if track is None:
                continue  # dropped while its last step was in flight
            try:
                stopped = track.take(output, now)
            except Exception as error:
                if failed is None:
                    raise
                failed.append((track, error))
                moved.pop(output.request_id, None)
                del self.tracks[output.request_id]
                continue
            if stopped:
                aborts.append(Abort(output.request_id, output.sample))
            if output.token_ids or output.finish_reason is not None:
                moved[output.request_id] = track
            if track.finished:
                del self.tracks[output.request_id]
        return list(moved.values()), aborts


class RequestState:
    """One request under way: its samples and its times."""

    stats: ModelStats | None = None  # where its tokens and times are counted
    begun = 0.0  # monotonic seconds: its prompt is being computed; 0 before
    is_query = False  # late interaction: the core may keep something of it past its end, until it is aborted

    def __init__(self, message: Submit, prompt: str | None, tokenizer: Tokenizer | None, *, stream: bool) -> None:
        self.id = message.request_id
        self.message = message
        self.stream = stream
        self.queued = True  # until the core is heard of it
        self.prompt = prompt
        params = message.params
        assert isinstance(params, SamplingParams)
        self.samples = [Sample(i, params, tokenizer, stream=stream) for i in range(params.n)]
        self.finished = False
        self.unread = _FIRST  # tokens since the last increment, if there was one
        self.num_cached = 0
        self._prompt_logprobs: LogprobStore | None = None  # from the second token on
        if params.prompt_logprobs is not None:
            texts = texts_of(tokenizer if params.detokenize else None)
            self._prompt_logprobs = LogprobStore(1 + params.prompt_logprobs, texts)
        self.metrics = RequestMetrics(message.arrival_time)
        self.submitted = time.monotonic()

    def take(self, output: Output, now: float) -> bool:
        """Returns whether a stop string ended a sample that the core still runs."""
        metrics = self.metrics
        if output.prompt_logprobs is not None and self._prompt_logprobs is not None:
            self._prompt_logprobs.take(output.prompt_logprobs)
        if output.token_ids:
            if (stats := self.stats) is not None:
                stats.generated_tokens += len(output.token_ids)
                if not metrics.first_token_ts:
                    stats.ttft.observe(now - self.submitted)
                    if self.begun:
                        stats.queue.observe(self.begun - self.submitted)
                        stats.prefill.observe(now - self.begun)
                elif output.sample == 0:  # the others move in the same steps
                    stats.itl.observe(now - metrics.last_token_ts)
            if not metrics.first_token_ts:
                metrics.first_token_ts = now
                metrics.first_token_latency = now - self.submitted
                self.num_cached = output.num_cached_tokens
            metrics.last_token_ts = now
            self.unread += len(output.token_ids)
        sample = self.samples[output.sample]
        stopped = sample.take(output)
        if sample.finish_reason is not None:
            self._look_finished()
        return stopped

    def _look_finished(self) -> None:
        self.finished = all(sample.finish_reason is not None for sample in self.samples)

    @property
    def prompt_logprobs(self) -> Logprobs[dict[int, Logprob] | None] | None:
        """Of the prompt's tokens so far: None for the first, which has nothing before it. None where nobody asked."""
        store = self._prompt_logprobs
        return None if store is None else Logprobs(store, range(-1, len(store)))

    @property
    def num_tokens(self) -> int:
        """Of all samples so far."""
        return sum(len(sample.token_ids) for sample in self.samples)

    def count_end(self) -> None:
        """It has ended, or its reader has left."""
        stats = self.stats
        if stats is None:
            return
        stats.e2e.observe(time.monotonic() - self.submitted)
        if first := self.metrics.first_token_ts:
            stats.decode.observe(self.metrics.last_token_ts - first)
            if self.begun:
                stats.inference.observe(self.metrics.last_token_ts - self.begun)
        stats.cached_tokens += self.num_cached
        stats.output_length.observe(self.num_tokens)
        for sample in self.samples:
            reason = str(sample.finish_reason or "abort")
            stats.finished[reason] = stats.finished.get(reason, 0) + 1

    def abort(self) -> None:
        """The caller gave up: what has come so far is all there will be."""
        for sample in self.samples:
            sample.abort()
        self.finished = True

    def increment(self) -> list[Increment]:
        """What is new in each sample since the last call; only for those that are streamed. Costs what is new."""
        self.unread = 0
        return [new for sample in self.samples if (new := sample.increment()) is not None]

    def result(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.message.prompt_token_ids,
            outputs=[sample.result() for sample in self.samples],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached,
            metrics=self.metrics,
        )


class PoolingRequestState(RequestState):
    """A pooling request under way. It waits for one output, which is its last."""

    samples: list[Sample] = []
    stream = False

    def __init__(self, message: Submit, prompt: str | None) -> None:
        self.id = message.request_id
        self.message = message
        self.is_query = message.params.is_query  # type: ignore[union-attr]  # of pooling
        self.queued = True
        self.prompt = prompt
        self.finished = False
        self.output: Output | None = None  # None as well when it was aborted
        self.submitted = time.monotonic()

    def take(self, output: Output, now: float) -> bool:
        self.output = output
        self.finished = True
        return False

    def count_end(self) -> None:
        stats, output = self.stats, self.output
        if stats is None:
            return
        stats.e2e.observe(time.monotonic() - self.submitted)
        stats.cached_tokens += 0 if output is None else output.num_cached_tokens
        reason = "abort" if output is None else "error" if output.pooled is None else "pooled"
        stats.finished[reason] = stats.finished.get(reason, 0) + 1

    @property
    def num_tokens(self) -> int:
        """That were read: it writes none."""
        return len(self.message.prompt_token_ids)

    def pooled(self, pooling: PoolingInfo) -> PoolingRequestOutput[Any]:
        """In the shape of its task."""
        message, output = self.message, self.output
        params = message.params
        assert isinstance(params, PoolingParams) and params.task is not None
        if output is None or output.pooled is None:
            error = None if output is None else output.error
            return PoolingRequestOutput(self.id, None, message.prompt_token_ids, self.prompt, error=error)
        kind, numbers = wrap(params.task, output.pooled.array(), message.prompt_token_ids, pooling)
        return kind(self.id, numbers, message.prompt_token_ids, self.prompt, num_cached_tokens=output.num_cached_tokens)
