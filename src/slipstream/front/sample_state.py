"""SampleState: one sample of a request: its tokens, detokenised text, stop strings, logprobs and finish reason."""

from __future__ import annotations

from slipstream.contracts.messages import Output
from slipstream.contracts.request import FinishReason
from slipstream.front.results import CompletionOutput, Increment, Logprob, LogprobList, LogprobStore, new_store
from slipstream.params.sampling import SamplingParams
from slipstream.text.detokenizer import Detokenizer, StopMatcher
from slipstream.text.tokenizer import Tokenizer


class SampleState:
    """`take` adds tokens. Text is detokenised when `text` or `increment` is read, several tokens at a time, or once at
    the end. Only stop strings need detokenising token by token."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None, *, streaming: bool) -> None:
        if not params.detokenize:
            tokenizer = None
        self.index = index
        self.tokenizer = tokenizer
        self.params = params
        self.token_ids: list[int] = []
        self._text = ""
        self._parts: list[str] = []  # text that is not yet joined to `_text`
        self._num_detokenized = 0
        self._new: list[str] | None = [] if streaming else None  # text since the last increment
        self._num_sent = 0  # tokens in increments so far
        self._sent_end = False  # whether an increment had the finish reason
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._logprobs: LogprobStore | None = None
        if params.num_logprobs is not None:
            self._logprobs = new_store(1 + params.num_logprobs + len(params.requested_ids), tokenizer)
        self._own_stops = frozenset(params.stop_ids)
        # needed where text is read before the end, or differs from what `Tokenizer.decode` gives
        incremental = streaming or bool(params.stop_strings) or not params.spaces_between_special_tokens
        self._detokenizer = (
            Detokenizer(tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens)
            if incremental and tokenizer is not None
            else None
        )
        self._min_tokens = params.min_tokens
        self._matcher = (
            StopMatcher(params.stop_strings, params.include_stop_str_in_output) if params.stop_strings else None
        )

    def take(self, output: Output) -> bool:
        """Adds an output's tokens. Returns whether a stop string ended a sample that the core still computes."""
        if self.finish_reason is not None:
            return False  # sampled before the core received the abort
        if self._matcher is not None:
            if self._take_matched(output):
                return output.finish_reason is None
        else:
            self.token_ids += output.token_ids
            if output.logprobs is not None and self._logprobs is not None:
                self._logprobs.take(output.logprobs)
        if output.finish_reason is not None:
            self._finish(output)
        return False

    def _take_matched(self, output: Output) -> bool:
        """Adds tokens one by one and looks for stop strings. Returns whether one was found."""
        for index, token in enumerate(output.token_ids):
            self.token_ids.append(token)
            if output.logprobs is not None and self._logprobs is not None:
                size = self._logprobs.size
                self._logprobs.take(output.logprobs[index * size : (index + 1) * size])
            is_end = self._hides_last(output) and index == len(output.token_ids) - 1
            if self._detokenizer is None or is_end:
                continue
            text = self._detokenizer.push([token])
            if len(self.token_ids) <= self._min_tokens:
                self._add(text)  # min_tokens: stop strings do not count yet
            elif self._match(text):
                return True
        return False

    def _detokenize(self, stop: int) -> None:
        """Detokenises the tokens before index `stop` that have no text yet."""
        if self._detokenizer is not None and self._matcher is None and stop > self._num_detokenized:
            self._add(self._detokenizer.push(self.token_ids[self._num_detokenized : stop]))
            self._num_detokenized = stop

    def _match(self, text: str) -> bool:
        """Adds new text. Returns whether it completes a stop string."""
        if self._matcher is None:
            self._add(text)
            return False
        self._add(self._matcher.push(text))
        if self._matcher.matched is None:
            return False
        self.finish_reason = FinishReason.STOP.value
        self.stop_reason = self._matcher.matched
        return True

    def _finish(self, output: Output) -> None:
        assert output.finish_reason is not None
        if self._end_text(len(self.token_ids) - self._hides_last(output)):
            return
        self.finish_reason = output.finish_reason.value
        if output.stop_token in self._own_stops:
            self.stop_reason = output.stop_token
        if output.finish_reason is FinishReason.REPETITION:
            self.stop_reason = "repetition_detected"  # as in vLLM
        if output.error is not None:
            self.stop_reason = output.error

    def abort(self) -> None:
        """Finishes the sample with the tokens it has."""
        if self.finish_reason is None and not self._end_text(len(self.token_ids)):
            self.finish_reason = FinishReason.ABORT.value

    def _end_text(self, num_shown: int) -> bool:
        """Detokenises the rest, of which the first `num_shown` tokens are text. Returns whether a stop string was
        found in it."""
        if self._detokenizer is not None:
            self._detokenize(num_shown)
            if self._match(self._detokenizer.finish()):
                return True
            if self._matcher is not None:
                self._add(self._matcher.finish())
        elif self.tokenizer is not None:
            self._add(self.tokenizer.decode(self.token_ids[:num_shown], self.params.skip_special_tokens))
        return False

    @property
    def text(self) -> str:
        if self.finish_reason is None:
            self._detokenize(len(self.token_ids))
        if self._parts:
            self._text += "".join(self._parts)
            self._parts.clear()
        return self._text

    def _add(self, text: str) -> None:
        if text:
            self._parts.append(text)
            if self._new is not None:
                self._new.append(text)

    def increment(self) -> Increment | None:
        """Returns what is new since the last increment, or None."""
        assert self._new is not None, "increments are for streaming"
        start, ended = self._num_sent, self.finish_reason is not None
        if start == len(self.token_ids) and ended == self._sent_end:
            return None
        if not ended:
            self._detokenize(len(self.token_ids))
        text = "".join(self._new)
        self._new.clear()
        self._num_sent, self._sent_end = len(self.token_ids), ended
        logprobs = None if (entries := self.logprobs) is None else entries[start:]
        return Increment(self.index, text, self.token_ids[start:], logprobs, self.finish_reason, self.stop_reason)

    @property
    def logprobs(self) -> LogprobList[dict[int, Logprob]] | None:
        """One entry per token so far; None if the request has no logprobs."""
        store = self._logprobs
        return None if store is None else LogprobList(store, range(len(store)))

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self._logprobs is None else self._logprobs.cumulative()

    def _hides_last(self, output: Output) -> bool:
        """Whether the last token is a stop token that is not part of the text."""
        return output.stop_token is not None and not self.params.include_stop_str_in_output

    def result(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
