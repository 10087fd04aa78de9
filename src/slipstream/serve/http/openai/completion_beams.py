"""Beam search of POST /v1/completions."""

from __future__ import annotations

import time

from slipstream.front.beam_search import BeamSearch
from slipstream.front.served import ServedModel
from slipstream.params.sampling import SamplingParams
from slipstream.serve.http.openai.beam import beam_params, beam_samples, beam_usage, given_with_beams, search_beams
from slipstream.serve.http.openai.completion_types import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    prompts_of,
)
from slipstream.serve.http.openai.fields import REFUSED, prompt_limit, refuse
from slipstream.serve.http.openai.logprobs import token_ids
from slipstream.serve.http.openai.structured import structured_outputs
from slipstream.serve.http.request import Request

_MAX_TOKENS = 16  # of a request without max_tokens, as in OpenAI's API


async def beam_completion(request: Request, body: CompletionRequest) -> CompletionResponse:
    given = given_with_beams(body, ("prompt",))
    refuse(given, REFUSED)
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
