"""What completions and chat do alike: prompts to the engine, and their ends to counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slipstream.frontend.inputs import PreparedPrompt
from slipstream.frontend.prompts import GenerationPrompts
from slipstream.frontend.request_state import GenerationRequestState
from slipstream.frontend.request_stream import RequestStream
from slipstream.messages import Submit
from slipstream.params import SamplingParams
from slipstream.serve.http.call import Call
from slipstream.serve.http.errors import HttpError, bad_request


async def start(
    call: Call,
    model: str | None,
    num_prompts: int,
    size: int,
    prepare: Callable[[], list[PreparedPrompt]],
    *,
    stream: bool,
    limit: int | None,
) -> RequestStream[GenerationRequestState]:
    """Checks that there is room, tokenises, and sends.

    `size`: characters of all prompts. `limit`: tokens that the request itself asked for.
    """
    state = call.state
    submits = await state.encode(num_prompts, size, prepare, call.caller)
    for message, _ in submits:
        _check_room(call, model, message, limit)
    num_tokens = sum(len(message.prompt_token_ids) for message, _ in submits)
    state.admit(num_prompts, num_tokens, call.caller)  # others came while we tokenised
    request_stream = state.engine.read(submits, model, streaming=stream, caller=call.caller)
    call.request_states = request_stream.states
    return request_stream


def _check_room(call: Call, model: str | None, message: Submit, limit: int | None) -> None:
    """Refuses an answer that could not be as long as the request says."""
    facts, params = call.state.engine.model(model).facts, message.params
    assert isinstance(params, SamplingParams)
    num_prompt, most = len(message.prompt_token_ids), facts.max_model_len
    for name, wanted in (("max_tokens", limit), ("min_tokens", params.min_tokens)):
        if wanted is not None and num_prompt + wanted > most:
            name = call.names.get(name, name)
            raise bad_request(
                f"the prompt has {num_prompt} tokens and {name} is {wanted}, {num_prompt + wanted} together; "
                f"{facts.name} takes {most}: lower {name} to {most - num_prompt}, or shorten the prompt",
                name,
                "context_length_exceeded",
            )


def submits_for(
    call: Call, model: str | None, prompts: Sequence[Any], params: SamplingParams, *, add_special_tokens: bool
) -> list[PreparedPrompt]:
    engine = call.state.engine
    inputs, each = engine.model(model).inputs, [params] * len(prompts)
    return list(GenerationPrompts(inputs, prompts, each, engine.new_id, add_special_tokens=add_special_tokens))


def check_end(request_state: GenerationRequestState) -> None:
    """A sample that could not be drawn ends its request: as the caller's fault where parameters narrow the choice."""
    for sample in request_state.samples:
        if sample.finish_reason == "error":
            params = request_state.message.params
            names = ("allowed_token_ids", "bad_words", "logit_bias")
            narrowed = next((name for name in names if getattr(params, name, None)), None)
            if narrowed:
                raise bad_request(str(sample.stop_reason), param=narrowed, code="no_token_possible")
            raise HttpError(500, str(sample.stop_reason), code="generation_failed")
