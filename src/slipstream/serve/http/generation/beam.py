"""Beam search of /v1/completions and /v1/chat/completions: `use_beam_search`, with `n` as the number of beams.

Both have the search of `LLM.beam_search`. A beam is a prompt of token ids, and each step is a request of one
token per beam.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from slipstream.contracts.messages import Output
from slipstream.contracts.request import FinishReason
from slipstream.front.beam_search import BeamSearch, BeamSearchParams, BeamStep, Entries, search_to_the_end
from slipstream.front.sample_state import SampleState
from slipstream.front.served import ServedModel
from slipstream.params.sampling import SamplingParams
from slipstream.params.structured import StructuredOutputsParams
from slipstream.serve.http.generation import fields
from slipstream.serve.http.generation.fields import GenerationFields, given_fields
from slipstream.serve.http.generation.generation import (
    PromptTokensDetails,
    Usage,
    first_logprobs,
    start,
    submits_for,
)
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.request import Request

_FIELDS = {
    "model", "n", "max_tokens", "use_beam_search", "length_penalty", "ignore_eos", "priority", "cache_salt",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "temperature",
    "add_special_tokens", "return_token_ids", "truncate_prompt_tokens", *fields.FIELDS, "guided_whitespace_pattern",
    "user", "metadata", "safety_identifier", "prompt_cache_key",
}  # fmt: skip


def given_with_beams(body: GenerationFields, own: Collection[str]) -> dict[str, Any]:
    """The fields that are not null, without those of beam search alone. Raises for a field that beam search does not
    have. `own`: fields of the route that it has."""
    given = given_fields(body)
    for name, value in given.items():
        if value is not False and name not in _FIELDS and name not in own:
            fact = f"{name} is not supported with use_beam_search"
            raise bad_request(f"{fact}; remove one", name, "unsupported_parameter")
    return {name: value for name, value in given.items() if name not in ("n", "use_beam_search", "length_penalty")}


def beam_params(
    request: Request, body: GenerationFields, max_tokens: int, shape: StructuredOutputsParams | None
) -> BeamSearchParams:
    request.field_names["beam_width"] = "n"
    return BeamSearchParams(
        beam_width=1 if body.n is None else body.n,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        temperature=body.temperature or 0.0,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        structured_outputs=shape,
    )


async def search_beams(
    request: Request,
    body: GenerationFields,
    served: ServedModel,
    prompts: Sequence[object],
    params: BeamSearchParams,
    *,
    truncate: int | None = None,
) -> list[BeamSearch]:
    """The finished search of each prompt. `truncate`: the last tokens of a prompt that are used, default all."""
    request.check_samples(len(prompts), params.beam_width)
    name, step = served.description.name, params.of_step(served.description)
    first = {"priority": body.priority, "cache_salt": body.cache_salt, "truncate_prompt_tokens": truncate}
    step = step.with_changes(**{field: value for field, value in first.items() if value is not None})
    special = body.add_special_tokens is not False

    async def generate(beams: Sequence[list[int]], each: Sequence[SamplingParams]) -> list[Entries]:
        prepare = partial(submits_for, request, name, beams, each, add_special_tokens=False)
        with await start(request, name, len(beams), 0, prepare, stream=False, limit=None) as stream:
            return [first_logprobs(request, state) for state in await stream.wait()]

    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    prepare = partial(submits_for, request, name, prompts, step, add_special_tokens=special)
    submits = await request.state.encode(len(prompts), size, prepare, request.caller)
    searches = [BeamSearch(message.prompt_token_ids, params, served.description) for message, _ in submits]
    step = step.with_changes(truncate_prompt_tokens=None)
    if params.structured_outputs is None:
        await search_to_the_end(searches, step, None, generate)
        return searches
    # in threads of their own: a grammar takes up to seconds to compile, and the tokens of many beams milliseconds
    grammars = request.state.beam_grammars
    grammar = await grammars.open(served, params, request.caller)

    async def run(function: Callable[[], list[BeamStep]]) -> list[BeamStep]:
        return await asyncio.wrap_future(grammars.of(served).run(function))

    await search_to_the_end(searches, step, grammar, generate, run=run)
    return searches


def beam_samples(search: BeamSearch, text: SamplingParams, served: ServedModel) -> list[SampleState]:
    """The sequences of a search, the best first, as finished samples. `text`: parameters of detokenising."""
    params = SamplingParams(
        skip_special_tokens=text.skip_special_tokens, spaces_between_special_tokens=text.spaces_between_special_tokens
    )
    samples = []
    for index, sequence in enumerate(search.result()):
        assert sequence.finish_reason is not None, "the search is finished"
        sample = SampleState(index, params, served.tokenizer, streaming=False)
        ids, reason = sequence.tokens[search.num_prompt :], FinishReason(sequence.finish_reason)
        sample.take(Output("", index, ids, finish_reason=reason))
        samples.append(sample)
    return samples


def beam_usage(searches: Sequence[BeamSearch]) -> Usage:
    """Counts the tokens of the returned sequences, with end tokens that are not shown."""
    num_prompt = sum(search.num_prompt for search in searches)
    num_out = sum(sequence.num_generated for search in searches for sequence in search.result())
    return Usage(num_prompt, num_out, num_prompt + num_out, PromptTokensDetails(0))
