"""POST /v1/completions."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from slipstream.frontend.inputs import PreparedPrompt
from slipstream.frontend.request_state import GenerationRequestState
from slipstream.frontend.request_stream import RequestStream
from slipstream.frontend.results import Increment, Logprob
from slipstream.frontend.served import ServedModel
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.openai.completion_beams import beam_completion
from slipstream.serve.http.openai.completion_types import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    prompts_of,
)
from slipstream.serve.http.openai.fields import given_fields, sampling_params
from slipstream.serve.http.openai.generation import AnswerSize, Usage, check_end, start, submits_for, usage_of
from slipstream.serve.http.openai.logprobs import (
    TokenNames,
    completion_logprobs,
    prompt_logprobs,
)
from slipstream.serve.http.openai.prompt_embeds import decode_embeds, embeds_of
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import DONE, Response, StreamingResponse, event, json_response
from slipstream.serve.http.routes import post
from slipstream.text.infill import can_infill, infill_ids, infill_stops
from slipstream.text.token_starts import TokenStarts, prompt_starts


async def create_completion(request: Request, body: CompletionRequest) -> Response | StreamingResponse:
    if body.use_beam_search:
        return json_response(await beam_completion(request, body))
    job = _Job(request, body)
    limit = None if job.scores_only else body.max_tokens
    request_stream = await start(
        request,
        job.model,
        job.count,
        job.size,
        job.submits,
        stream=bool(body.stream),
        limit=limit,
        answer=job.answer_size,
    )
    if body.stream:
        return StreamingResponse(job.events(request_stream))
    with request_stream:
        return json_response(job.answer(await request_stream.wait()))


class _Job:
    """One request: its checked parameters, and the construction of its response."""

    def __init__(self, request: Request, body: CompletionRequest) -> None:
        self.request = request
        self.body = body
        given = given_fields(body)
        request.set_input_field("prompt")
        settings, served = request.state.settings, request.choose_model(body.model, "generate")
        self.model = served.description.name
        self.description = served.description
        self.embeds = embeds_of(body, served.description)
        self.prompts = [] if self.embeds and body.prompt is None else prompts_of(body.prompt)
        self.count = len(self.embeds) + len(self.prompts)
        request.check_count(self.count, "prompt")
        self.inputs = served.inputs
        if body.suffix:
            self.check_suffix(served)
        texts = [prompt for prompt in self.prompts if isinstance(prompt, str)]
        self.size = sum(map(len, texts)) + len(texts) * len(body.suffix or "") + sum(map(len, self.embeds))
        self.scores_only = body.max_tokens == 0 and bool(body.echo)  # only the prompt's logprobs
        own: dict[str, Any] = {"logprobs": body.logprobs}
        if body.max_tokens is not None:
            own["max_tokens"] = 1 if self.scores_only else body.max_tokens
        if body.echo and body.logprobs is not None:
            if body.prompt_logprobs not in (None, body.logprobs):
                raise bad_request(
                    f"with echo, logprobs ({body.logprobs}) is also the number of the prompt's logprobs; remove "
                    "prompt_logprobs",
                    "prompt_logprobs",
                )
            own["prompt_logprobs"] = body.logprobs
            request.field_names["prompt_logprobs"] = "logprobs"
        if body.suffix and served.tokenizer is not None:
            own["stop_token_ids"] = [*(body.stop_token_ids or ()), *infill_stops(served.tokenizer)]
        self.params = sampling_params(given, served.inputs, settings, own, request.field_names)
        request.check_samples(self.count, self.params.n)
        copies = self.params.n * (1 + (body.prompt_logprobs is not None and "prompt_logprobs" in own))
        self.answer_size = AnswerSize(self.params, copies, bool(body.return_token_ids), bool(body.echo))
        self.tokenizer = served.tokenizer
        self.names = TokenNames(served.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self.envelope = (f"cmpl-{request.id}", "text_completion", int(time.time()), self.model)

    def check_suffix(self, served: ServedModel) -> None:
        if self.body.echo:
            raise bad_request("echo and suffix cannot be combined; remove one", "echo")
        if self.body.truncate_prompt_tokens is not None:
            name = "truncate_prompt_tokens"
            raise bad_request(f"{name} would cut the tokens around the suffix; remove one", name)
        if served.tokenizer is None or not all(isinstance(prompt, str) for prompt in self.prompts):
            raise bad_request("suffix needs prompts that are texts; give texts", "suffix")
        if not can_infill(served.tokenizer):
            fact = f"suffix is not supported by {served.description.name}, which has no tokens to fill in the middle"
            raise bad_request(f"{fact}; remove it, or use another model", "suffix", "unsupported_parameter")

    def submits(self) -> list[PreparedPrompt]:
        special = self.body.add_special_tokens is not False
        prompts: list[Any] = self.prompts
        if suffix := self.body.suffix:
            prompts = [self.infill(prompt, suffix) for prompt in prompts]
        prompts = [{"prompt_embeds": decode_embeds(text, self.description)} for text in self.embeds] + prompts
        return submits_for(self.request, self.model, prompts, self.params, add_special_tokens=special)

    def infill(self, prompt: str, suffix: str) -> list[int]:
        """The token ids of a prompt with the suffix."""
        for text in (prompt, suffix):
            self.inputs.check_length(text)
        assert self.tokenizer is not None, "checked by check_suffix"
        return infill_ids(self.tokenizer, prompt, suffix)

    def answer(self, request_states: list[GenerationRequestState]) -> CompletionResponse:
        choices = []
        for index, request_state in enumerate(request_states):
            check_end(self.request, request_state)
            prompt = request_state.message.prompt_token_ids
            for sample in request_state.samples:
                text, ids, text_entries = sample.text, sample.token_ids, list(sample.logprobs or [])
                if self.scores_only:
                    text, ids, text_entries = "", [], []
                text_ids = list(ids)
                all_entries: list[dict[int, Logprob] | None] = list(text_entries)
                before = self.prompt_text(request_state) if self.body.echo else ""
                text = before + text
                choice = CompletionChoice(index * len(request_state.samples) + sample.index, text)
                if self.body.logprobs is not None:
                    starts = [min(start, len(text)) for start in self.starts(len(before)).push(text_ids)]
                    if self.body.echo:
                        text_ids, all_entries = prompt + text_ids, prompt_entries(request_state) + all_entries
                        starts = self.prompt_starts(request_state, before) + starts
                    choice.logprobs = completion_logprobs(text_ids, all_entries, starts, self.names)
                if self.body.prompt_logprobs is not None:
                    choice.prompt_logprobs = prompt_logprobs(request_state.prompt_logprobs or [])
                choice.finish_reason, choice.stop_reason = self.end_of(sample.finish_reason, sample.stop_reason)
                if self.body.return_token_ids:
                    choice.token_ids, choice.prompt_token_ids = ids, prompt
                choices.append(choice)
        return CompletionResponse(*self.envelope, choices, self.usage(request_states))

    async def events(self, request_stream: RequestStream[GenerationRequestState]) -> AsyncIterator[bytes]:
        options = self.body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        each = wants_usage and options is not None and bool(options.continuous_usage_stats)
        indices = {request_state.id: index for index, request_state in enumerate(request_stream.states)}
        begun: dict[tuple[int, int], _SentTokens] = {}  # by prompt and sample: those with a chunk so far
        with request_stream:
            async for updated in request_stream:
                parts = []
                for request_state in updated:
                    check_end(self.request, request_state)
                    for new in request_state.increment():
                        choice = self.chunk(request_state, indices[request_state.id], new, begun)
                        usage = self.usage([request_state]) if each else None if wants_usage else msgspec.UNSET
                        parts.append(event(CompletionResponse(*self.envelope, [choice], usage)))
                if parts:
                    yield b"".join(parts)
            if wants_usage:
                yield event(CompletionResponse(*self.envelope, [], self.usage(request_stream.states)))
            yield DONE

    def chunk(
        self,
        request_state: GenerationRequestState,
        index: int,
        new: Increment,
        begun: dict[tuple[int, int], _SentTokens],
    ) -> CompletionChoice:
        text, new_ids = new.text, new.token_ids
        entries: list[dict[int, Logprob] | None] = list(new.logprobs or [])
        if self.scores_only:
            text, new_ids, entries = "", [], []
        ids = new_ids
        key = index, new.index
        before, is_first = "", key not in begun
        if is_first:
            before = self.prompt_text(request_state) if self.body.echo else ""
            begun[key] = _SentTokens(self.starts(len(before)), len(before))
        choice = CompletionChoice(index * len(request_state.samples) + new.index, before + text)
        if self.body.logprobs is not None:
            ids, entries, starts = begun[key].push(text, ids, entries, is_last=new.finish_reason is not None)
            if is_first and self.body.echo:
                ids = request_state.message.prompt_token_ids + ids
                entries = prompt_entries(request_state) + entries
                starts = self.prompt_starts(request_state, before) + starts
            choice.logprobs = completion_logprobs(ids, entries, starts, self.names)
        choice.finish_reason, choice.stop_reason = self.end_of(new.finish_reason, new.stop_reason)
        if self.body.return_token_ids:
            choice.token_ids = new_ids
        if is_first:
            if self.body.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs(request_state.prompt_logprobs or [])
            if self.body.return_token_ids:
                choice.prompt_token_ids = request_state.message.prompt_token_ids
        return choice

    def end_of(self, finish_reason: str | None, stop_reason: int | str | None) -> tuple[str | None, int | str | None]:
        """finish_reason and stop_reason of a choice; the token of a request for scores is no part of its answer."""
        return ("length" if finish_reason else None, None) if self.scores_only else (finish_reason, stop_reason)

    def usage(self, request_states: Sequence[GenerationRequestState]) -> Usage:
        usage = usage_of(request_states)
        if self.scores_only:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def starts(self, length: int) -> Starts:
        """Computes the text offsets of tokens that follow `length` characters."""
        if self.tokenizer is None:
            return _NoText()
        return TokenStarts(
            self.tokenizer,
            start=length,
            skip_special_tokens=self.params.skip_special_tokens,
            spaces_between_special_tokens=self.params.spaces_between_special_tokens,
        )

    def prompt_starts(self, request_state: GenerationRequestState, text: str) -> list[int]:
        ids, special = request_state.message.prompt_token_ids, self.body.add_special_tokens is not False
        if self.tokenizer is None:
            return [0] * len(ids)
        return prompt_starts(self.tokenizer, ids, text, add_special_tokens=special)

    def prompt_text(self, request_state: GenerationRequestState) -> str:
        if request_state.prompt is not None and self.body.truncate_prompt_tokens is None:
            return request_state.prompt
        return "" if self.tokenizer is None else self.tokenizer.decode(request_state.message.prompt_token_ids)


def prompt_entries(request_state: GenerationRequestState) -> Entries:
    """The logprobs of each prompt token: None for the first, and for tokens that an aborted request did not compute."""
    entries: Entries = list(request_state.prompt_logprobs or [])
    return entries + [None] * (len(request_state.message.prompt_token_ids) - len(entries))


class _NoText:
    """The text offsets without a tokenizer: there is no text."""

    def push(self, ids: Sequence[int]) -> list[int]:
        return [0] * len(ids)


Starts = TokenStarts | _NoText
Entries = list[dict[int, Logprob] | None]


class _SentTokens:
    """The logprobs of a stream: a token is sent when the text up to its offset has been sent. Text that may be the
    beginning of a stop string is held back, and so are the tokens after its first: no offset is beyond the text."""

    def __init__(self, starts: Starts, length: int) -> None:
        self._starts = starts
        self._length = length  # of the text sent
        self._ids: list[int] = []
        self._entries: Entries = []
        self._offsets: list[int] = []

    def push(
        self, text: str, ids: list[int], entries: Entries, *, is_last: bool
    ) -> tuple[list[int], Entries, list[int]]:
        """Adds what is new. Returns the tokens to send, their entries and their offsets."""
        self._length += len(text)
        self._ids += ids
        self._entries += entries
        self._offsets += self._starts.push(ids)
        count = len(self._ids) if is_last else bisect_right(self._offsets, self._length)
        offsets = [min(offset, self._length) for offset in self._offsets[:count]]
        sent = self._ids[:count], self._entries[:count], offsets
        del self._ids[:count], self._entries[:count], self._offsets[:count]
        return sent


ROUTES = [
    post(
        "/v1/completions", create_completion, "Continue prompts", CompletionRequest, response_model=CompletionResponse
    ),
]
