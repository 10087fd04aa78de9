"""OutputProcessor: what the core sends becomes text, logprobs and finish reasons.

Text that nobody watches is made once, at the end. Text that is streamed or searched for stop strings is made as it
comes and never taken back.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slipstream.engine.results import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from slipstream.messages import Abort, Output, Submit, TokenLogprobs
from slipstream.request import FinishReason
from slipstream.text.detokenizer import Detokenizer
from slipstream.text.stop import StopMatcher
from slipstream.text.tokenizer import Tokenizer


class OutputProcessor:
    """Keeps one entry for each request under way."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.tracks: dict[str, Track] = {}

    def open(self, message: Submit, prompt: str | None, *, stream: bool) -> Track:
        track = Track(message, prompt, self.tokenizer, stream=stream)
        assert message.request_id not in self.tracks, f"request id {message.request_id} is taken"
        self.tracks[message.request_id] = track
        return track

    def drop(self, request_id: str) -> None:
        self.tracks.pop(request_id, None)

    def process(self, outputs: list[Output]) -> tuple[list[Track], list[Abort]]:
        """Take in a step's outputs. Returns the requests that moved, and what the core need not go on with."""
        moved: dict[str, Track] = {}
        aborts: list[Abort] = []
        now = time.monotonic()
        for output in outputs:
            track = self.tracks.get(output.request_id)
            if track is None:
                continue  # dropped while its last step was in flight
            if track.take(output, now):
                aborts.append(Abort(output.request_id, output.sample))
            if output.token_ids or output.finish_reason is not None:
                moved[output.request_id] = track
            if track.finished:
                del self.tracks[output.request_id]
        return list(moved.values()), aborts


class Track:
    """One request under way: its samples and its times."""

    def __init__(self, message: Submit, prompt: str | None, tokenizer: Tokenizer | None, *, stream: bool) -> None:
        self.id = message.request_id
        self.message = message
        self.prompt = prompt
        self.samples = [_Sample(i, message, tokenizer, stream=stream) for i in range(message.params.n)]
        self.finished = False
        self.num_cached = 0
        self.decoded = _decoded(tokenizer if message.params.detokenize else None)
        # the first has nothing before it
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if message.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self.metrics = RequestMetrics(message.arrival_time)
        self._submitted = time.monotonic()

    def take(self, output: Output, now: float) -> bool:
        """Returns whether a stop string ended a sample that the core still runs."""
        metrics = self.metrics
        if output.prompt_logprobs is not None and self.prompt_logprobs is not None:
            for of_token in output.prompt_logprobs:
                token = self.message.prompt_token_ids[len(self.prompt_logprobs)]
                self.prompt_logprobs.append(_entry(token, of_token, (), self.decoded))
        if output.token_ids:
            if not metrics.first_token_ts:
                metrics.first_token_ts = now
                metrics.first_token_latency = now - self._submitted
                self.num_cached = output.num_cached_tokens
            metrics.last_token_ts = now
        sample = self.samples[output.sample]
        stopped = sample.take(output)
        if sample.finish_reason is not None:
            self._look_finished()
        return stopped

    def _look_finished(self) -> None:
        self.finished = all(sample.finish_reason is not None for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """Of all samples so far."""
        return sum(len(sample.token_ids) for sample in self.samples)

    def abort(self) -> None:
        """The caller gave up: what has come so far is all there will be."""
        for sample in self.samples:
            if sample.finish_reason is None:
                sample.finish_reason = FinishReason.ABORT.value
        self.finished = True

    def result(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.message.prompt_token_ids,
            outputs=[sample.result() for sample in self.samples],
            finished=self.finished,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            num_cached_tokens=self.num_cached,
            metrics=self.metrics,
        )


class _Sample:
    def __init__(self, index: int, message: Submit, tokenizer: Tokenizer | None, *, stream: bool) -> None:
        params = message.params
        if not params.detokenize:
            tokenizer = None
        self.index = index
        self.tokenizer = tokenizer
        self.params = params
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[dict[int, Logprob]] | None = [] if params.num_logprobs is not None else None
        self.cumulative = 0.0
        self._own_stops = frozenset(params.stop_ids)
        self._decoded = _decoded(tokenizer)
        # only when text is looked at before the end, or is not what the tokenizer itself makes
        watched = stream or bool(params.stop_strings) or not params.spaces_between_special_tokens
        self._detokenizer = (
            Detokenizer(tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens)
            if watched and tokenizer is not None
            else None
        )
        self._min_tokens = params.min_tokens
        self._matcher = (
            StopMatcher(params.stop_strings, params.include_stop_str_in_output) if params.stop_strings else None
        )

    def take(self, output: Output) -> bool:
        if self.finish_reason is not None:
            return False  # drawn before the core heard of the stop string
        stopped = False
        for place, token in enumerate(output.token_ids):
            self.token_ids.append(token)
            if self.logprobs is not None and output.logprobs is not None:
                self._take_logprobs(token, output.logprobs[place])
            is_end = self._hides_last(output) and place == len(output.token_ids) - 1
            if self._detokenizer is None or is_end:
                continue
            text = self._detokenizer.push([token])
            if len(self.token_ids) <= self._min_tokens:
                self.text += text  # too early for a stop string
            elif self._watch(text):
                stopped = True
                break
        if stopped:
            return output.finish_reason is None
        if output.finish_reason is not None:
            self._finish(output)
        return False

    def _watch(self, text: str) -> bool:
        """Add new text. Returns whether a stop string ended it."""
        if self._matcher is None:
            self.text += text
            return False
        self.text += self._matcher.push(text)
        if self._matcher.matched is None:
            return False
        self.finish_reason = FinishReason.STOP.value
        self.stop_reason = self._matcher.matched
        return True

    def _finish(self, output: Output) -> None:
        assert output.finish_reason is not None
        if self._detokenizer is not None:
            if self._watch(self._detokenizer.finish()):
                return
            if self._matcher is not None:
                self.text += self._matcher.finish()
        elif self.tokenizer is not None:
            shown = self.token_ids[:-1] if self._hides_last(output) else self.token_ids
            self.text = self.tokenizer.decode(shown, self.params.skip_special_tokens)
        self.finish_reason = output.finish_reason.value
        if output.stop_token in self._own_stops:
            self.stop_reason = output.stop_token
        if output.error is not None:
            self.stop_reason = output.error

    def _take_logprobs(self, token: int, of_token: TokenLogprobs) -> None:
        assert self.logprobs is not None
        self.logprobs.append(_entry(token, of_token, self.params.given_ids, self._decoded))
        self.cumulative += of_token.chosen

    def _hides_last(self, output: Output) -> bool:
        """The token that ended it is no text, unless it is asked for."""
        return output.stop_token is not None and not self.params.include_stop_str_in_output

    def result(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative if self.logprobs is not None else None,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


def _decoded(tokenizer: Tokenizer | None) -> Callable[[int], str | None]:
    return (lambda token: None) if tokenizer is None else tokenizer.text_of


def _entry(
    token: int, of_token: TokenLogprobs, given_ids: tuple[int, ...], decoded: Callable[[int], str | None]
) -> dict[int, Logprob]:
    """The token itself first, then the likeliest, then the given ones, whose rank nobody counted."""
    entry = {token: Logprob(of_token.chosen, of_token.rank, decoded(token))}
    for rank, (other, value) in enumerate(zip(of_token.top_ids, of_token.top, strict=True), 1):
        if other != token:
            entry[other] = Logprob(value, rank, decoded(other))
    for other, value in zip(given_ids, of_token.given, strict=True):
        if other not in entry:
            entry[other] = Logprob(value, None, decoded(other))
    return entry
