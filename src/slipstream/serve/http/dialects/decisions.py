"""OpenAI's /v1/decisions: questions about one input, answered by the probabilities of their options."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from slipstream.base.typed import Fields, doc, unsupported
from slipstream.front.decisions import Answer, Decisions, Question
from slipstream.front.inputs import PreparedPrompt
from slipstream.front.request_state import GenerationRequestState
from slipstream.serve.http.dialects.responses import ResponsesUsage
from slipstream.serve.http.dialects.responses_types import InputItem, input_messages
from slipstream.serve.http.generation.conversation import prompt_chars, read_messages
from slipstream.serve.http.generation.fields import Label
from slipstream.serve.http.generation.generation import first_logprobs, start, submits_for
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.request import Request, post
from slipstream.serve.http.server.response import Response, json_response


class DecisionsRequest(Fields, kw_only=True):
    input: Annotated[str | list[InputItem], doc("what the questions are about: a text, or items as of /v1/responses")]
    questions: Annotated[list[Question], msgspec.Meta(min_length=1)]
    model: Annotated[str | None, doc("a name from /v1/models; default: the first model that generates")] = None
    priority: Annotated[int | None, doc("lower values are scheduled first")] = None
    cache_salt: Annotated[str | None, doc("prompts share cached prefixes only with the same salt")] = None

    safety_identifier: Label = None
    prompt_cache_key: Label = None

    prompt_cache_options: Annotated[Any, unsupported("cached prompts stay until their memory is needed", {})] = None


class DecisionsResponse(msgspec.Struct):
    model: str
    answers: list[Answer]
    usage: ResponsesUsage


async def create_decisions(request: Request, body: DecisionsRequest) -> Response:
    served = request.choose_model(body.model, "generate")
    request.check_count(len(body.questions), "questions")
    if not body.input:
        raise bad_request("input is empty; give a text or items", "input")
    messages = read_messages(request, input_messages(served, body.input), served.tokenizer)
    request.set_input_field("input")
    more = {"priority": body.priority or 0, "cache_salt": body.cache_salt or ""}
    made: list[Decisions] = []

    def prepare() -> list[PreparedPrompt]:
        made.append(found := Decisions(served.inputs, messages, body.questions))
        params = found.params(**more)
        return submits_for(request, served.description.name, found.prompts, params, add_special_tokens=False)

    size = prompt_chars(messages, msgspec.to_builtins(body.questions))
    name, count = served.description.name, len(body.questions)
    with await start(request, name, count, size, prepare, stream=False, limit=None) as stream:
        states = await stream.wait()
    answers = made[0].answers([first_logprobs(request, state) for state in states])
    return json_response(DecisionsResponse(served.description.name, answers, _usage(states)))


def _usage(states: list[GenerationRequestState]) -> ResponsesUsage:
    """Of all prompts, each of which has the input."""
    num_prompt = sum(len(state.message.prompt_token_ids) for state in states)
    num_cached, num_output = sum(state.num_cached for state in states), sum(state.num_tokens for state in states)
    cached = {"cached_tokens": num_cached, "cache_write_tokens": num_prompt - num_cached}
    return ResponsesUsage(num_prompt, cached, num_output, {"reasoning_tokens": 0}, num_prompt + num_output)


ROUTES = [
    post(
        "/v1/decisions",
        create_decisions,
        "OpenAI: answers to questions, with probabilities",
        DecisionsRequest,
        response_model=DecisionsResponse,
    ),
]
