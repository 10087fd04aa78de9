"""Code that completions and chat share: admission, tokenising and sending of prompts, errors of samples, and usage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from slipstream.contracts.messages import Submit
from slipstream.front.inputs import PreparedPrompt
from slipstream.front.prompts import GenerationPrompts
from slipstream.front.request_state import GenerationRequestState, RequestStream
from slipstream.params.sampling import SamplingParams
from slipstream.serve.http.errors import HTTPException, bad_request
from slipstream.serve.http.request import Request

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
