"""What all pooling routes do: choose a model, check that there is room, run a verb, and notice what has no result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from slipstream.errors import SlipstreamError
from slipstream.frontend.inputs import PreparedPrompt
from slipstream.frontend.offload import LONG, PROMPT_COST
from slipstream.frontend.pooling.calls import PoolingCall, Results
from slipstream.frontend.pooling.inputs import PoolingInputs, PoolingPrompts
from slipstream.frontend.pooling.results import PoolingRequestOutput
from slipstream.frontend.request_state import PoolingRequestState
from slipstream.frontend.served import ServedModel
from slipstream.messages import Pooled, Submit
from slipstream.pooling_params import PoolingParams
from slipstream.serve.http.call import Call
from slipstream.serve.http.choose import served_for
from slipstream.serve.http.errors import HttpError, bad_request
from slipstream.serve.http.pooling.fields import PoolUsage

T = TypeVar("T")


class Chosen:
    """A model and how prompts become its requests."""

    __slots__ = ("name", "served", "inputs")

    def __init__(self, served: ServedModel, inputs: PoolingInputs) -> None:
        self.name = served.facts.name
        self.served = served
        self.inputs = inputs

    @property
    def reads_pairs(self) -> bool:
        """Whether it scores two texts by reading both, and not by their vectors."""
        return "classify" in self.inputs.pooling.tasks


def choose(call: Call, name: str | None, *tasks: str) -> Chosen:
    """The model of that name, or the best one here for the first of these tasks that any can do."""
    served = served_for(call, name, *tasks)
    assert served.pooling_inputs is not None, f"{served.facts.name} can do one of {tasks}"
    return Chosen(served, served.pooling_inputs)


def activation(scores: bool, what: str, **given: bool | None) -> dict[str, Any]:
    """Whether scores become probabilities, under whichever names it was said.

    `scores`: whether there are such scores; if not, `what` says what there is.
    """
    said = {name: value for name, value in given.items() if value is not None}
    if not said:
        return {}
    first, *others = said
    for other in others:
        if said[other] != said[first]:
            raise bad_request(f"{first} and {other} say different things; leave one out", other)
    if not scores:
        raise bad_request(f"{first} is for scores, and {what}; leave it out", first)
    return {"activation": said[first]}


async def run(call: Call, chosen: Chosen, verb: PoolingCall[T], size: int) -> tuple[T, int]:
    """What the verb makes of its prompts, and how many tokens they had. `size`: characters of all of them."""
    state, engine = call.state, call.state.engine
    found: Results | None = None
    num_tokens = 0
    try:
        while True:
            batches = next(verb) if found is None else verb.send(found)
            prompts = PoolingPrompts(chosen.inputs, batches, engine.new_id, as_lists=True)
            read = partial(list[PreparedPrompt], prompts)
            submits = await state.encode(prompts.total, size + PROMPT_COST * prompts.total, read, call.caller)
            state.check_answer(prompts.num_bytes(submits))
            count = sum(len(message.prompt_token_ids) for message, _ in submits)
            state.admit(len(submits), count, call.caller)  # others came while we tokenised
            num_tokens += count
            with engine.read(submits, chosen.name, streaming=False, caller=call.caller) as request_stream:
                call.request_states = request_stream.states
                request_states = await request_stream.wait()
            check_ends(request_states)
            found = prompts.in_order([request_state.result() for request_state in request_states])
    except StopIteration as end:
        result: T = end.value
        return result, num_tokens


def short_text(given: Any) -> str | None:
    """The text, where there is one and it is short."""
    text = given[0] if isinstance(given, list) and len(given) == 1 else given
    return text if isinstance(text, str) and len(text) < LONG else None


async def run_text(
    call: Call, chosen: Chosen, text: str, params: PoolingParams, prompt_name: str | None
) -> tuple[Pooled, int]:
    """One short text, without the ways of many: most requests for a vector are just that."""
    state, engine, inputs = call.state, call.state.engine, chosen.inputs
    state.admit(1, caller=call.caller)
    params, prefix = inputs.resolve(params), inputs.prefix(prompt_name)
    ids = inputs.text_ids(text, params, prefix)
    params = inputs.after_prefix(params, prefix)
    state.admit(1, len(ids), call.caller)
    submit = Submit(engine.new_id(), ids, params, time.time(), params.priority, params.cache_salt)
    with engine.read(((submit, text),), chosen.name, streaming=False, caller=call.caller) as request_stream:
        call.request_states = request_stream.states
        request_states = await request_stream.wait()
    check_ends(request_states)
    return request_states[0].output.pooled, len(ids)


def check_ends(request_states: Sequence[PoolingRequestState]) -> None:
    """Nobody gets a part of what was asked for: one prompt without a result ends the request."""
    for request_state in request_states:
        output = request_state.output
        if output is None:
            raise HttpError(503, "the request was aborted; send it again", code="aborted", retry_after=1)
        if output.pooled is None:
            raise HttpError(500, output.error or "the model gave no result", code="pooling_failed")


def usage_of(found: Sequence[PoolingRequestOutput[Any]]) -> PoolUsage:
    """Of all prompts, equal ones as often as they came."""
    num_tokens = sum(one.num_prompt_tokens for one in found)
    return PoolUsage(num_tokens, num_tokens)


def numbers_of(found: Sequence[PoolingRequestOutput[Any]]) -> list[Any]:
    """The arrays of results."""
    try:
        return [one.outputs.data for one in found]
    except SlipstreamError as error:
        raise HttpError(500, str(error), code="pooling_failed") from None
