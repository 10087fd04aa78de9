"""Code that completions and chat share: admission, tokenising and sending of prompts, errors of samples, and usage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from slipstream.contracts.messages import Submit
from slipstream.front.inputs import PreparedPrompt
from slipstream.front.prompts import GenerationPrompts
from slipstream.front.request_state import GenerationRequestState, RequestStream
from slipstream.front.results import Logprob, own_logprobs, read_once
from slipstream.params.sampling import SamplingParams
from slipstream.serve.http.server.errors import HTTPException, aborted, bad_request
from slipstream.serve.http.server.request import Request
from slipstream.serve.http.server.response import JsonList
from slipstream.text.tokenizer import Tokenizer

_LOGPROB_BYTES = 64  # of a logprob in JSON: the token's text, its bytes and the number
_ID_BYTES = 8


async def start(
    request: Request,
    model: str | None,
    num_prompts: int,
    size: int,
    prepare: Callable[[], list[PreparedPrompt]],
    *,
    stream: bool,
    limit: int | None,
    answer: AnswerSize | None = None,
) -> RequestStream[GenerationRequestState]:
    """Checks that the queue has room, tokenises, and sends the prompts to the engine.

    `size`: characters of all prompts. `limit`: max_tokens of the request, if it has one. `answer`: None if only texts
    of the samples are shown.
    """
    state = request.state
    if answer is not None:
        answer.check_params(request, num_prompts)
    submits = await state.encode(num_prompts, size, prepare, request.caller)
    for message, _ in submits:
        check_room(request, model, message, limit)
    if answer is not None:
        submits = answer.fitted(request, submits, state.engine.model(model).description.max_model_len)
    num_tokens = sum(len(message.prompt_token_ids) for message, _ in submits)
    state.admit(num_prompts, num_tokens, request.caller)  # again: the queue may have filled while tokenising
    request_stream = state.engine.read(submits, model, streaming=stream, caller=request.caller)
    request.request_states = request_stream.states
    return request_stream


class AnswerSize(msgspec.Struct, frozen=True):
    """The size of the logprobs and token ids of an answer, which grows with the product of several fields."""

    params: SamplingParams
    copies: int = 1  # of the data of a prompt: a completion has them with each sample
    shows_ids: bool = False
    echoes: bool = False

    def check_params(self, request: Request, num_prompts: int) -> None:
        """Raises if the answer is too large whatever the prompts have."""
        num_new = self.params.max_tokens or max(1, self.params.min_tokens)
        self._check(request, num_prompts * num_new * self._per_new(self.params))

    def fitted(self, request: Request, submits: list[PreparedPrompt], max_model_len: int) -> list[PreparedPrompt]:
        """The prompts, where there is no max_tokens with the largest for which the answer is not too large. Raises if
        there is none."""
        num_bytes = most = 0
        open_ended: list[SamplingParams] = []
        for message, _ in submits:
            params, num_prompt = message.params, len(message.prompt_token_ids)
            assert isinstance(params, SamplingParams)
            num_bytes += num_prompt * self._per_prompt_token(params)
            num_new = max_model_len - num_prompt
            if params.max_tokens is None:
                most += num_new * self._per_new(params)
                open_ended.append(params)
                num_new = max(1, params.min_tokens)
            num_bytes += min(num_new, params.max_tokens or num_new) * self._per_new(params)
        self._check(request, num_bytes)
        limit = request.state.settings.max_answer_bytes
        if not open_ended or num_bytes + most <= limit:
            return submits
        least = max(1, *(params.min_tokens for params in open_ended))
        num_new = least + (limit - num_bytes) // sum(map(self._per_new, open_ended))
        return [(_with_limit(message, num_new), text) for message, text in submits]

    def _per_new(self, params: SamplingParams) -> int:
        """Bytes per generated token, of all samples of a prompt."""
        each = _ID_BYTES * self.shows_ids
        if params.num_logprobs is not None:
            each += _LOGPROB_BYTES * (1 + params.num_logprobs + len(params.requested_ids))
        return params.n * each

    def _per_prompt_token(self, params: SamplingParams) -> int:
        each = _ID_BYTES * (self.shows_ids + self.echoes)
        if params.prompt_logprobs is not None:
            each += _LOGPROB_BYTES * (1 + params.prompt_logprobs)
        return self.copies * each

    def _check(self, request: Request, num_bytes: int) -> None:
        fields = [request.field_names.get(name, name) for name in ("logprobs", "prompt_logprobs", "max_tokens", "n")]
        hint = f"lower {', '.join(dict.fromkeys(fields))} or the number of prompts"
        request.state.check_answer(num_bytes, "logprobs and token ids", hint)


def _with_limit(message: Submit, max_tokens: int) -> Submit:
    assert isinstance(message.params, SamplingParams)
    if message.params.max_tokens is not None:
        return message
    return msgspec.structs.replace(message, params=message.params.with_changes(max_tokens=max_tokens))


def check_room(request: Request, model: str | None, message: Submit, limit: int | None) -> None:
    """Raises if the prompt and max_tokens, or min_tokens, are longer than the model length."""
    description, params = request.state.engine.model(model).description, message.params
    assert isinstance(params, SamplingParams)
    num_prompt, most = len(message.prompt_token_ids), description.max_model_len
    for name, wanted in (("max_tokens", limit), ("min_tokens", params.min_tokens)):
        if wanted is not None and num_prompt + wanted > most:
            name = request.field_names.get(name, name)
            raise bad_request(
                f"the prompt has {num_prompt} tokens and {name} is {wanted}, {num_prompt + wanted} together; "
                f"{description.name} takes {most}: lower {name} to {most - num_prompt}, or shorten the prompt",
                name,
                "context_length_exceeded",
            )


def submits_for(
    request: Request,
    model: str | None,
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    add_special_tokens: bool,
) -> list[PreparedPrompt]:
    """`params`: of all prompts, or of each."""
    engine = request.state.engine
    inputs, each = engine.model(model).inputs, [params] * len(prompts) if isinstance(params, SamplingParams) else params
    return list(GenerationPrompts(inputs, prompts, each, engine.new_id, add_special_tokens=add_special_tokens))


def check_end(request: Request, request_state: GenerationRequestState) -> None:
    """Raises if a sample failed: with status 400 if the parameters exclude tokens, else 500."""
    for sample in request_state.samples:
        if sample.finish_reason == "error":
            params = request_state.message.params
            names = ("structured_outputs", "allowed_token_ids", "bad_words", "logit_bias")
            narrowed = next((name for name in names if getattr(params, name, None)), None)
            if narrowed:
                raise bad_request(
                    str(sample.stop_reason), param=request.field_names.get(narrowed, narrowed), code="no_token_possible"
                )
            raise HTTPException(500, str(sample.stop_reason), code="generation_failed")


def first_logprobs(request: Request, state: GenerationRequestState) -> Entry:
    """The logprobs of the first token of a request that asks for some. Raises if it failed."""
    check_end(request, state)
    entries = state.samples[0].logprobs
    assert entries is not None, "the request asks for logprobs"
    if not entries:
        raise aborted()
    return entries[0]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(request_states: Sequence[GenerationRequestState]) -> Usage:
    prompt = sum(len(request_state.message.prompt_token_ids) for request_state in request_states)
    completion = sum(request_state.num_tokens for request_state in request_states)
    cached = sum(request_state.num_cached for request_state in request_states)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


# Logprobs in OpenAI's two formats: four parallel lists for completions, one object per token for chat.
#
# An answer may have many, so all are JsonLists: a token's logprobs are made when they are encoded.

LOWEST = -9999.0  # JSON has no infinity
_FEW = 512  # tokens with one number or name each


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


Entry = dict[int, Logprob]
"""The logprobs at one token: its own first, then those of the most likely tokens."""


class TokenNames:
    """Names of tokens in logprobs: their text, or bytes if a token ends within a character. Tokens without text,
    as ids that the tokenizer does not have, are named by their id: else all of them would have one name."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def bytes_of(self, token: int) -> bytes | None:
        return None if self._tokenizer is None else self._tokenizer.bytes_of(token)

    def name(self, token: int, prefix: str = "") -> str:
        """`prefix`: put before a name of bytes, such as \\xe6\\x97."""
        data = self.bytes_of(token)
        if self._as_ids or not data:
            return f"token_id:{token}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(
    ids: Sequence[int], entries: Sequence[Sequence[Entry | None]], starts: Iterable[int], names: TokenNames
) -> CompletionLogprobs:
    """`entries`: of the tokens in one or more parts, None for the first token of a prompt. `starts`: the offset of each
    token in the text."""
    lists: tuple[Any, ...] = (
        JsonList((names.name(token, "bytes:") for token in ids), _FEW),
        JsonList((_bounded(own) for part in entries for own in own_logprobs(part)), _FEW),
        JsonList(_completion_logprob(entry, names) for part in entries for entry in read_once(part)),
        JsonList(starts, _FEW),
    )
    return CompletionLogprobs(*lists)


def _completion_logprob(entry: Entry | None, names: TokenNames) -> dict[str, float] | None:
    if entry is None:
        return None
    top: dict[str, float] = {}
    for token, logprob in entry.items():
        top.setdefault(names.name(token, "bytes:"), _finite(logprob))
    return top


def chat_logprobs(
    ids: Sequence[int], entries: Sequence[Entry], num_top: int, names: TokenNames, given: Sequence[int] = ()
) -> ChatLogprobs:
    """`given`: logprob_token_ids, which follow the `num_top` most likely tokens."""
    content: Any = JsonList(_chat_logprobs(ids, entries, num_top, names, given))
    return ChatLogprobs(content)


def _chat_logprobs(
    ids: Sequence[int], entries: Sequence[Entry], num_top: int, names: TokenNames, given: Sequence[int]
) -> Iterator[ChatLogprob]:
    for token, entry in zip(ids, read_once(entries), strict=True):
        likeliest = sorted(
            (item for item in entry.items() if item[1].rank is not None and item[1].rank <= num_top),
            key=lambda item: item[1].rank or 0,
        )
        shown = dict(likeliest) | {other: entry[other] for other in given if other in entry}
        top = [TopLogprob(*_named(other, logprob, names)) for other, logprob in shown.items()]
        yield ChatLogprob(*_named(token, entry[token], names), top)


def prompt_logprobs(entries: Sequence[Entry | None]) -> Any:
    """vLLM's format: one object per prompt token, keyed by token id. A JsonList of dict[str, PromptLogprob] | None."""
    return JsonList(None if entry is None else _prompt_logprob(entry) for entry in read_once(entries))


def _prompt_logprob(entry: Entry) -> dict[str, PromptLogprob]:
    return {str(token): PromptLogprob(_finite(p), p.rank, p.decoded_token) for token, p in entry.items()}


def token_ids(ids: Sequence[int]) -> Any:
    """A JsonList of token ids."""
    return JsonList(ids, _FEW)


def _named(token: int, logprob: Logprob, names: TokenNames) -> tuple[str, float, list[int] | None]:
    data = names.bytes_of(token)
    return names.name(token), _finite(logprob), None if data is None else list(data)


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)


def _bounded(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST)
