"""Code that all pooling routes share: choice of a model, admission, running a pooling call, and errors of results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from slipstream.base.errors import SlipstreamError
from slipstream.base.typed import Fields, doc, unsupported
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.contracts.messages import Pooled, Submit
from slipstream.front.inputs import PreparedPrompt
from slipstream.front.pooling_calls import PoolingCall, Results, drive
from slipstream.front.pooling_inputs import PoolingInputs, PoolingPrompts
from slipstream.front.pooling_prompts import PoolingBatch
from slipstream.front.pooling_results import PoolingRequestOutput
from slipstream.front.prompts import LONG, PROMPT_COST
from slipstream.front.request_state import PoolingRequestState
from slipstream.front.served import ServedModel
from slipstream.params.pooling import TASKS, PoolingParams, Task
from slipstream.serve.http.generation.fields import Label
from slipstream.serve.http.server.errors import HTTPException, aborted, bad_request
from slipstream.serve.http.server.request import Request

T = TypeVar("T")


class Chosen:
    """A model that pools, and its input processing."""

    __slots__ = ("name", "served", "inputs")

    def __init__(self, served: ServedModel, inputs: PoolingInputs) -> None:
        self.name = served.description.name
        self.served = served
        self.inputs = inputs

    @property
    def reads_pairs(self) -> bool:
        """Whether it has a classifier, as cross-encoders have, so that both texts of a pair are one prompt."""
        return "classify" in self.inputs.pooling.tasks


def choose(request: Request, name: str | None, *tasks: str) -> Chosen:
    """Returns the model of that name, or the best one for the first of the tasks that any model can do."""
    served = request.choose_model(name, *tasks)
    assert served.pooling_inputs is not None, f"{served.description.name} can do one of {tasks}"
    return Chosen(served, served.pooling_inputs)


def activation(scores: bool, what: str, **given: bool | None) -> dict[str, Any]:
    """Merges the fields that are names of `activation`. Raises if they differ.

    `scores`: whether the task has scores of classes; else `what` describes it for the error.
    """
    values = {name: value for name, value in given.items() if value is not None}
    if not values:
        return {}
    first, *others = values
    for other in others:
        if values[other] != values[first]:
            raise bad_request(f"{first} and {other} are names of one parameter and differ; remove one", other)
    if not scores:
        raise bad_request(f"{first} is for scores, and {what}; remove it", first)
    return {"activation": values[first]}


async def run(request: Request, chosen: Chosen, pooling_call: PoolingCall[T], size: int) -> tuple[T, int]:
    """Runs a pooling request. Returns its result and the number of prompt tokens. `size`: characters of all prompts."""
    state, engine = request.state, request.state.engine
    num_tokens = 0

    async def run_batches(batches: list[PoolingBatch]) -> Results:
        nonlocal num_tokens
        prompts = PoolingPrompts(chosen.inputs, batches, engine.new_id, as_lists=True)
        read = partial(list[PreparedPrompt], prompts)
        submits = await state.encode(prompts.total, size + PROMPT_COST * prompts.total, read, request.caller)
        hint = "send fewer or shorter prompts, ask for fewer dimensions"
        state.check_answer(prompts.num_bytes(submits), "arrays", hint)
        count = sum(len(message.prompt_token_ids) for message, _ in submits)
        num_tokens += count
        request_states = await _run(request, chosen, submits, count)
        return prompts.in_order([request_state.result() for request_state in request_states])

    return await drive(pooling_call, run_batches), num_tokens


def short_text(given: Any) -> str | None:
    """Returns the text where the input is a single short one, else None."""
    text = given[0] if isinstance(given, list) and len(given) == 1 else given
    return text if isinstance(text, str) and len(text) < LONG else None


async def run_text(
    request: Request, chosen: Chosen, text: str, params: PoolingParams, prompt_name: str | None
) -> tuple[Pooled, int]:
    """Runs one short text, by a faster path than `run`: most embedding requests are one short text."""
    state, engine, inputs = request.state, request.state.engine, chosen.inputs
    state.admit(1, caller=request.caller)
    params, prefix = inputs.resolve(params), inputs.prefix(prompt_name)
    ids = inputs.text_ids(text, params, prefix)
    params = inputs.after_prefix(params, prefix)
    submit = Submit(engine.new_id(), ids, params, time.time(), params.priority, params.cache_salt)
    (request_state,) = await _run(request, chosen, ((submit, text),), len(ids))
    assert request_state.output is not None and request_state.output.pooled is not None
    return request_state.output.pooled, len(ids)


async def _run(
    request: Request, chosen: Chosen, submits: Sequence[PreparedPrompt], num_tokens: int
) -> Sequence[PoolingRequestState]:
    """Runs prompts, if the queue has room: it may have filled while they were tokenised. Raises if one has no result,
    since a response has all results or an error."""
    engine = request.state.engine
    request.state.admit(len(submits), num_tokens, request.caller)
    with engine.read(submits, chosen.name, streaming=False, caller=request.caller) as request_stream:
        request.request_states = request_stream.states
        request_states = await request_stream.wait()
    for request_state in request_states:
        output = request_state.output
        if output is None:
            raise aborted()
        if output.pooled is None:
            raise HTTPException(500, output.error or "the model gave no result", code="pooling_failed")
    return request_states


def usage_of(found: Sequence[PoolingRequestOutput[Any]]) -> PoolUsage:
    """The usage of all prompts, duplicates included."""
    num_tokens = sum(one.num_prompt_tokens for one in found)
    return PoolUsage(num_tokens, num_tokens)


def arrays_of(found: Sequence[PoolingRequestOutput[Any]]) -> list[Any]:
    """Returns the arrays of results. Raises if one is missing."""
    try:
        return [one.outputs.array for one in found]
    except SlipstreamError as error:
        raise HTTPException(500, str(error), code="pooling_failed") from None


# The request fields that pooling routes share, and their conversion to PoolingParams.


class PoolFields(Fields, kw_only=True):
    """Fields that are null or absent have the defaults of the model's files."""

    model: Annotated[str | None, doc("a name from /v1/models; default: the best model for the task")] = None
    truncate_prompt_tokens: Annotated[
        int | None, doc("keep this many tokens, special ones included; -1: the model's limit")
    ] = None
    truncation_side: Annotated[Literal["left", "right"] | None, doc("the end at which a long text is truncated")] = None
    priority: Annotated[int | None, doc("lower values are scheduled first")] = None
    cache_salt: Annotated[str | None, doc("prompts share cached prefixes only with the same salt")] = None

    user: Label = None
    metadata: Label = None
    request_id: Annotated[Any, unsupported("send the header X-Request-Id instead")] = None
    add_special_tokens: Annotated[
        Any, unsupported("pooling models need special tokens; give token ids to omit them", True)
    ] = None
    mm_processor_kwargs: Annotated[Any, unsupported("models read text only", {})] = None


class VectorFields(PoolFields, kw_only=True):
    """Fields of routes that return vectors or scores."""

    encoding_format: Annotated[
        Literal["float", "base64"] | None, doc("base64: of little-endian float32; default float")
    ] = None
    dimensions: Annotated[int | None, doc("truncate vectors to this size (Matryoshka)")] = None
    normalize: Annotated[bool | None, doc("scale vectors to length 1")] = None
    prompt_name: Annotated[str | None, doc("name of a prompt of the model, put before each text")] = None
    embed_dtype: Annotated[Any, unsupported("values are float32", "float32")] = None
    endianness: Annotated[Any, unsupported("values are little-endian", "little", "native")] = None


Input = Annotated[str | list[str | int | list[int]], doc("a text, a list of token ids, or a list of either")]


class PoolUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


def pooling_params(
    request: Request,
    body: PoolFields,
    pooling: PoolingInfo,
    task: Task | None = None,
    *,
    truncates: bool = False,
    **own: Any,
) -> PoolingParams:
    """Builds PoolingParams. `own`: values of the route beside the shared fields.

    A text that is longer than the model reads is refused, unless the request has a truncation field, the route
    truncates (`truncates`), or the model is a late-interaction model, which truncates by design.
    """
    if body.truncate_prompt_tokens is not None:
        keep = body.truncate_prompt_tokens
        own["truncate_prompt_tokens"] = pooling.max_seq_length or -1 if keep == -1 else keep
    if body.priority is not None:
        own["priority"] = body.priority
    if body.cache_salt is not None:
        limit = request.state.settings.max_salt_chars
        if len(body.cache_salt) > limit:
            fact = f"cache_salt has {len(body.cache_salt)} characters, the limit is {limit}"
            raise bad_request(f"{fact}; shorten it or raise --max-salt-chars", "cache_salt")
        own["cache_salt"] = body.cache_salt
    if body.truncation_side is not None:
        if "truncation_side" in own:
            raise bad_request(
                "truncation_side is given with truncation_direction or truncate; remove one of them",
                "truncation_side",
            )
        own["truncation_side"] = body.truncation_side
    elif body.truncate_prompt_tokens is None and not truncates and not pooling.late_interaction:
        if not own:
            return _NEVER_TRUNCATED[task]
        own.setdefault("truncation_side", "never")
    return PoolingParams(task=task, **own) if own else _DEFAULT[task]


_NEVER_TRUNCATED: dict[Task | None, PoolingParams] = {
    task: PoolingParams(task=task, truncation_side="never") for task in (None, *TASKS)
}
_DEFAULT: dict[Task | None, PoolingParams] = {task: PoolingParams(task=task) for task in (None, *TASKS)}


def prompts_of(request: Request, given: str | list[Any], name: str = "input") -> tuple[list[Any], int]:
    """Returns a list of prompts and their characters, where one prompt or a list is given. A list of integers is one
    prompt."""
    if isinstance(given, str):
        return [given], len(given)
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given], 0
    if kinds not in ({str}, {list}):
        raise bad_request(
            f"{name} mixes texts and token ids; give a list of one kind" if given else f"{name} is empty; give a text",
            name,
        )
    request.check_count(len(given), name)
    return given, sum(map(len, given))


def size_of(texts: Sequence[str]) -> int:
    return sum(map(len, texts))
