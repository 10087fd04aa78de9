"""POST /v1/completions."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import msgspec

from slipstream.front.beam_search import BeamSearch
from slipstream.front.inputs import PreparedPrompt
from slipstream.front.prompts import off_loop
from slipstream.front.request_state import GenerationRequestState, RequestStream
from slipstream.front.results import Increment, Logprob, LogprobList
from slipstream.front.sample_state import SampleState
from slipstream.front.served import ServedModel
from slipstream.params.sampling import SamplingParams
from slipstream.serve.http.dialects.completion_types import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    decode_embeds,
    embeds_of,
    prompts_of,
)
from slipstream.serve.http.generation.beam import beam_params, beam_samples, beam_usage, given_with_beams, search_beams
from slipstream.serve.http.generation.fields import given_fields, prompt_limit, sampling_params, structured_outputs
from slipstream.serve.http.generation.generation import (
    AnswerSize,
    CompletionLogprobs,
    TokenNames,
    Usage,
    check_end,
    completion_logprobs,
    prompt_logprobs,
    start,
    submits_for,
    token_ids,
    usage_of,
)
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.request import Request, post
from slipstream.serve.http.server.response import (
    DONE,
    JsonList,
    Parts,
    Response,
    StreamingResponse,
    event,
    join_events,
    large_response,
)
from slipstream.text.detokenizer import PromptStarts, TokenStarts
from slipstream.text.tokenizer import Tokenizer


async def create_completion(request: Request, body: CompletionRequest) -> Response | StreamingResponse:
    if body.use_beam_search:
        return await large_response(request.state.pieces, await beam_completion(request, body))
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
        return await job.answer(await request_stream.wait())


class _Job:
    """One request: its checked parameters, and the construction of its response."""

    def __init__(self, request: Request, body: CompletionRequest) -> None:
        self.request = request
        self.body = body
        self.pieces = request.state.pieces
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
        options = body.stream_options
        self.wants_usage = options is not None and bool(options.include_usage)
        self.each_has_usage = self.wants_usage and options is not None and bool(options.continuous_usage_stats)
        self.shown: dict[str, ShownPrompt] = {}  # with echo: by request, as soon as it has an answer
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

    async def answer(self, request_states: list[GenerationRequestState]) -> Response:
        for request_state in request_states:
            check_end(self.request, request_state)
        prompts = await self.shown_prompts(request_states)
        choices: Any = JsonList(
            self.choice(index, request_state, sample, prompt)
            for index, (request_state, prompt) in enumerate(zip(request_states, prompts, strict=True))
            for sample in request_state.samples
        )
        response = CompletionResponse(*self.envelope, choices, self.usage(request_states))
        return await large_response(self.pieces, response)

    def choice(
        self, index: int, request_state: GenerationRequestState, sample: SampleState, prompt: ShownPrompt
    ) -> CompletionChoice:
        text, ids = ("", []) if self.scores_only else (sample.text, sample.token_ids)
        entries = None if self.scores_only else sample.logprobs
        choice = CompletionChoice(index * len(request_state.samples) + sample.index, prompt.text + text)
        if self.body.logprobs is not None:
            length = len(choice.text)
            starts = (min(start, length) for start in self.starts(len(prompt.text)).push(ids))
            choice.logprobs = self.logprobs(ids, entries, starts, prompt, request_state)
        choice.finish_reason, choice.stop_reason = self.end_of(sample.finish_reason, sample.stop_reason)
        if self.body.return_token_ids:
            choice.token_ids = token_ids(ids)
        self.add_prompt_data(choice, request_state)
        return choice

    def logprobs(
        self,
        ids: list[int],
        entries: LogprobList[dict[int, Logprob]] | None,
        starts: Iterable[int],
        prompt: ShownPrompt,
        request_state: GenerationRequestState,
    ) -> CompletionLogprobs:
        """The logprobs of a sample's tokens, after those of the prompt if it is shown."""
        if prompt.starts is None:
            return completion_logprobs(ids, [entries or []], starts, self.names)
        before = request_state.message.prompt_token_ids
        return completion_logprobs(
            before + ids, [*prompt_entries(request_state), entries or []], chain(prompt.starts, starts), self.names
        )

    def add_prompt_data(self, choice: CompletionChoice, request_state: GenerationRequestState) -> None:
        """Adds the requested logprobs and token ids of the prompt."""
        if self.body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(request_state.prompt_logprobs or [])
        if self.body.return_token_ids:
            choice.prompt_token_ids = token_ids(request_state.message.prompt_token_ids)

    async def events(self, request_stream: RequestStream[GenerationRequestState]) -> AsyncIterator[Parts]:
        body, pieces = self.body, self.pieces
        has_lists = (
            body.logprobs is not None or body.prompt_logprobs is not None or bool(body.return_token_ids or body.echo)
        )
        indices = {request_state.id: index for index, request_state in enumerate(request_stream.states)}
        begun: dict[tuple[int, int], _SentTokens] = {}  # by prompt and sample: those with a chunk so far
        with request_stream:
            async for updated in request_stream:
                chunks: list[CompletionResponse] = []
                for request_state, prompt in zip(updated, await self.shown_prompts(updated), strict=True):
                    check_end(self.request, request_state)
                    index = indices[request_state.id]
                    for new in request_state.increment():
                        chunks.append(await self.chunk(request_state, index, new, prompt, begun))
                if chunks:
                    yield await join_events(pieces, chunks, has_lists=has_lists)
            if self.wants_usage:
                yield event(CompletionResponse(*self.envelope, [], self.usage(request_stream.states)))
            yield DONE

    async def chunk(
        self,
        request_state: GenerationRequestState,
        index: int,
        new: Increment,
        prompt: ShownPrompt,
        begun: dict[tuple[int, int], _SentTokens],
    ) -> CompletionResponse:
        text, new_ids = ("", []) if self.scores_only else (new.text, new.token_ids)
        key, sample = (index, new.index), request_state.samples[new.index]
        is_first = key not in begun
        if is_first:
            begun[key] = _SentTokens(self.starts(len(prompt.text)), len(prompt.text))
        else:
            prompt = _NO_PROMPT
        choice = CompletionChoice(index * len(request_state.samples) + new.index, prompt.text + text)
        if self.body.logprobs is not None:
            await self.pieces.join(begun[key].add(text, new_ids))
            sent, starts = begun[key].take(is_last=new.finish_reason is not None)
            entries = None if self.scores_only or sample.logprobs is None else sample.logprobs[sent]
            choice.logprobs = self.logprobs(sample.token_ids[sent], entries, starts, prompt, request_state)
        choice.finish_reason, choice.stop_reason = self.end_of(new.finish_reason, new.stop_reason)
        if self.body.return_token_ids:
            choice.token_ids = token_ids(new_ids)
        if is_first:
            self.add_prompt_data(choice, request_state)
        usage = self.usage([request_state]) if self.each_has_usage else None if self.wants_usage else msgspec.UNSET
        return CompletionResponse(*self.envelope, [choice], usage)

    async def shown_prompts(self, request_states: Sequence[GenerationRequestState]) -> list[ShownPrompt]:
        """The prompts as they are shown before their samples."""
        if not self.body.echo:
            return [_NO_PROMPT] * len(request_states)
        new = [request_state for request_state in request_states if request_state.id not in self.shown]
        size = sum(len(request_state.message.prompt_token_ids) for request_state in new)
        self.shown |= await off_loop(size, lambda: {each.id: self.shown_prompt(each) for each in new})
        return [self.shown[request_state.id] for request_state in request_states]

    def shown_prompt(self, request_state: GenerationRequestState) -> ShownPrompt:
        text, ids = self.prompt_text(request_state), request_state.message.prompt_token_ids
        if self.body.logprobs is None:
            return ShownPrompt(text)
        if self.tokenizer is None:
            return ShownPrompt(text, [0] * len(ids))
        special = self.body.add_special_tokens is not False
        return ShownPrompt(text, PromptStarts(self.tokenizer, ids, text, add_special_tokens=special))

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

    def prompt_text(self, request_state: GenerationRequestState) -> str:
        if request_state.prompt is not None and self.body.truncate_prompt_tokens is None:
            return request_state.prompt
        return "" if self.tokenizer is None else self.tokenizer.decode(request_state.message.prompt_token_ids)


def prompt_entries(request_state: GenerationRequestState) -> list[Sequence[dict[int, Logprob] | None]]:
    """The logprobs of each prompt token: None for the first, and for tokens that an aborted request did not compute."""
    entries = request_state.prompt_logprobs
    missing = len(request_state.message.prompt_token_ids) - (0 if entries is None else len(entries))
    return [*([] if entries is None else [entries]), [None] * missing]


class ShownPrompt(NamedTuple):
    text: str = ""
    starts: Iterable[int] | None = None  # of its tokens in the text, if their logprobs are shown


_NO_PROMPT = ShownPrompt()


class _NoText:
    """The text offsets without a tokenizer: there is no text."""

    def push(self, ids: Sequence[int]) -> Iterator[int]:
        return repeat(0, len(ids))


Starts = TokenStarts | _NoText
_FEW = 1024  # tokens whose offsets are computed in one turn of the event loop


class _SentTokens:
    """The logprobs of a stream: a token is sent when the text up to its offset has been sent. Text that may be the
    beginning of a stop string is held back, and so are the tokens after its first: no offset is beyond the text."""

    def __init__(self, starts: Starts, length: int) -> None:
        self._starts = starts
        self._length = length  # of the text sent
        self._num_sent = 0
        self._offsets: list[int] = []  # of the tokens after them

    def add(self, text: str, ids: list[int]) -> Iterator[bytes]:
        """Adds what is new. Yields an empty piece after the work of a turn."""
        self._length += len(text)
        for first in range(0, len(ids), _FEW):
            if first:
                yield b""
            self._offsets += self._starts.push(ids[first : first + _FEW])

    def take(self, *, is_last: bool) -> tuple[slice, list[int]]:
        """The tokens to send and their offsets."""
        start, count = self._num_sent, len(self._offsets)
        if not is_last:
            count = bisect_right(self._offsets, self._length)
        offsets = [min(offset, self._length) for offset in self._offsets[:count]]
        del self._offsets[:count]
        self._num_sent += count
        return slice(start, start + count), offsets


ROUTES = [
    post(
        "/v1/completions", create_completion, "Continue prompts", CompletionRequest, response_model=CompletionResponse
    ),
]


# Beam search of POST /v1/completions.

_MAX_TOKENS = 16  # of a request without max_tokens, as in OpenAI's API


async def beam_completion(request: Request, body: CompletionRequest) -> CompletionResponse:
    given = given_with_beams(body, ("prompt",))
    request.set_input_field("prompt")
    served = request.choose_model(body.model, "generate")
    limit = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = beam_params(request, body, limit, structured_outputs(given, request.field_names))
    prompts = prompts_of(body.prompt)
    request.check_count(len(prompts), "prompt")
    truncate = body.truncate_prompt_tokens
    if truncate is not None:
        truncate = prompt_limit(truncate, limit, served.description)
    searches = await search_beams(request, body, served, prompts, params, truncate=truncate)
    return _answer(request, body, served, searches)


def _answer(
    request: Request, body: CompletionRequest, served: ServedModel, searches: list[BeamSearch]
) -> CompletionResponse:
    choices: list[CompletionChoice] = []
    text = SamplingParams(
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
    )
    for search in searches:
        for sample in beam_samples(search, text, served):
            choice = CompletionChoice(len(choices), sample.text, finish_reason=sample.finish_reason)
            if body.return_token_ids:
                prompt = search.result()[sample.index].tokens[: search.num_prompt]
                choice.token_ids, choice.prompt_token_ids = token_ids(sample.token_ids), token_ids(prompt)
            choices.append(choice)
    name = served.description.name
    return CompletionResponse(
        f"cmpl-{request.id}", "text_completion", int(time.time()), name, choices, beam_usage(searches)
    )


# Prompts of models that fill in the middle: a text before and a text after the output, between tokens of the model.

# tokens before the prefix, before the suffix, and before the output
_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral: the suffix, then the prefix, which the output continues
# tokens that such models write after the output
_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<file_sep>", "<fim_pad>",
    "▁<EOT>", "<|EOT|>",
)  # fmt: skip


def can_infill(tokenizer: Tokenizer) -> bool:
    """Whether the model has tokens for it."""
    return _ids(tokenizer, _SUFFIX_FIRST) is not None or _marks(tokenizer) is not None


def infill_ids(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Returns the token ids of the prompt, for a model that can fill in the middle."""
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix)]
    if (marks := _ids(tokenizer, _SUFFIX_FIRST)) is not None:
        ids = [marks[0], *parts[1], marks[1], *parts[0]]
    else:
        marks = _marks(tokenizer)
        assert marks is not None, "can_infill says whether there are such tokens"
        ids = [marks[0], *parts[0], marks[1], *parts[1], marks[2]]
    bos = tokenizer.bos_token_id
    return [bos, *ids] if bos is not None and tokenizer.encode("a")[:1] == [bos] else ids


def infill_stops(tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids that end an output in the middle."""
    known = (tokenizer.backend.token_to_id(text) for text in _ENDS)
    return [*(_marks(tokenizer) or ()), *(token for token in known if token is not None)]


def _marks(tokenizer: Tokenizer) -> list[int] | None:
    return next((ids for texts in _TOKENS if (ids := _ids(tokenizer, texts)) is not None), None)


def _ids(tokenizer: Tokenizer, texts: tuple[str, ...]) -> list[int] | None:
    ids = [token for text in texts if (token := tokenizer.backend.token_to_id(text)) is not None]
    return ids if len(ids) == len(texts) else None
