"""Beam search of POST /v1/completions: `use_beam_search`, with `n` as the number of beams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial

from slipstream.frontend.beam_grammar import BeamStep
from slipstream.frontend.beam_search import BeamSearch, BeamSearchParams
from slipstream.frontend.request_state import GenerationRequestState
from slipstream.frontend.results import Logprob
from slipstream.frontend.served import ServedModel
from slipstream.params import SamplingParams
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.openai import structured
from slipstream.serve.http.openai.completion_types import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    prompts_of,
)
from slipstream.serve.http.openai.fields import REFUSED, given_fields, refuse
from slipstream.serve.http.openai.generation import (
    PromptTokensDetails,
    Usage,
    check_end,
    start,
    submits_for,
)
from slipstream.serve.http.request import Request

_MAX_TOKENS = 16  # of a request without max_tokens, as in OpenAI's API
_FIELDS = {
    "model", "prompt", "n", "max_tokens", "use_beam_search", "length_penalty", "ignore_eos", "priority", "cache_salt",
    "include_stop_str_in_output", "temperature", "add_special_tokens", "return_token_ids", "truncate_prompt_tokens",
    "user", "metadata", "safety_identifier", "prompt_cache_key", *structured.FIELDS, "guided_whitespace_pattern",
    *REFUSED,
}  # fmt: skip
_STEP_FIELDS = ("priority", "cache_salt", "truncate_prompt_tokens")


async def beam_completion(request: Request, body: CompletionRequest) -> CompletionResponse:
    given = {name: value for name, value in given_fields(body).items() if value is not False}
    for name in given:
        if name not in _FIELDS:
            fact = f"{name} is not supported with use_beam_search"
            raise bad_request(f"{fact}; remove one", name, "unsupported_parameter")
    refuse({name: value for name, value in given.items() if name not in ("use_beam_search", "length_penalty")}, REFUSED)
    request.set_input_field("prompt")
    request.field_names["beam_width"] = "n"
    served = request.choose_model(body.model, "generate")
    params = BeamSearchParams(
        beam_width=1 if body.n is None else body.n,
        max_tokens=_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        ignore_eos=bool(body.ignore_eos),
        temperature=body.temperature or 0.0,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        structured_outputs=structured.structured_outputs(given, request.field_names),
    )
    prompts = prompts_of(body.prompt)
    request.check_count(len(prompts), "prompt")
    request.check_samples(len(prompts), params.beam_width)
    searches = await _search(request, body, served, prompts, params)
    return _answer(request, body, served, searches)


async def _search(
    request: Request, body: CompletionRequest, served: ServedModel, prompts: list[object], params: BeamSearchParams
) -> list[BeamSearch]:
    name, step = served.description.name, params.of_step(served.description)
    first = {each: getattr(body, each) for each in _STEP_FIELDS if getattr(body, each) is not None}
    step = step.with_changes(**first)
    special = body.add_special_tokens is not False

    async def run(inputs: list[object], each: list[SamplingParams]) -> list[GenerationRequestState]:
        size = sum(len(prompt) for prompt in inputs if isinstance(prompt, str))
        prepare = partial(submits_for, request, name, inputs, each, add_special_tokens=special)
        with await start(request, name, len(inputs), size, prepare, stream=False, limit=None) as stream:
            return await stream.wait()

    grammar, steps = None, [BeamStep(step)] * len(prompts)
    if params.structured_outputs is not None:
        # in threads: a grammar takes up to seconds to compile, and the allowed tokens of many beams milliseconds
        grammar = await asyncio.to_thread(request.state.beam_grammars.compile, served, params)
        assert grammar is not None, "the search has one"
        steps = [await asyncio.to_thread(grammar.step, step, ())] * len(prompts)
    inputs: list[object] = prompts
    searches: list[BeamSearch] = []
    while inputs:
        states = await run(inputs, [own.params for own in steps])
        for index, own in enumerate(steps):
            if not own.kept(_entries(states[index])):
                (states[index],) = await run([inputs[index]], [own.again()])
        if not searches:
            searches = [BeamSearch(state.message.prompt_token_ids, params, served.description) for state in states]
            step = step.with_changes(truncate_prompt_tokens=None)
        outputs = zip(steps, states, strict=True)
        for search in searches:
            likeliest = []
            for _ in search.beams:
                own, state = next(outputs)
                likeliest.append(own.kept(_entries(state)))
            search.take(likeliest)
            await asyncio.sleep(0)  # with many beams a step takes milliseconds: other requests come first
        beams = [beam.tokens for search in searches for beam in search.beams]
        inputs, steps = list[object](beams), [BeamStep(step)] * len(beams)
        if grammar is not None:
            starts = [search.num_prompt for search in searches for _ in search.beams]
            steps = await asyncio.to_thread(grammar.steps, step, beams, starts)
    return searches


def _entries(state: GenerationRequestState) -> Mapping[int, Logprob]:
    check_end(state)
    assert state.samples[0].logprobs is not None, "the step asks for logprobs"
    return state.samples[0].logprobs[0]


def _answer(
    request: Request, body: CompletionRequest, served: ServedModel, searches: list[BeamSearch]
) -> CompletionResponse:
    choices: list[CompletionChoice] = []
    for search in searches:
        for sequence in search.result():
            ids = sequence.tokens[search.num_prompt :]
            text = "" if served.tokenizer is None else served.tokenizer.decode(ids)
            choice = CompletionChoice(len(choices), text, finish_reason=sequence.finish_reason)
            if body.return_token_ids:
                choice.token_ids, choice.prompt_token_ids = ids, sequence.tokens[: search.num_prompt]
            choices.append(choice)
    num_prompt = sum(search.num_prompt for search in searches)
    num_out = sum(sequence.num_generated for search in searches for sequence in search.result())
    usage = Usage(num_prompt, num_out, num_prompt + num_out, PromptTokensDetails(0))
    return CompletionResponse(
        f"cmpl-{request.id}", "text_completion", int(time.time()), served.description.name, choices, usage
    )
