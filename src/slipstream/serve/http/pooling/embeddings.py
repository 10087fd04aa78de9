"""POST /v1/embeddings: embeddings of texts, or of a conversation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
import numpy as np

from slipstream.base.typed import doc, unsupported
from slipstream.front.pooling_calls import encode
from slipstream.front.pooling_results import SparseOutput
from slipstream.front.served import POOLING_TASKS
from slipstream.params.pooling import PoolingParams, Task
from slipstream.serve.http.generation.conversation import (
    OF_MESSAGES,
    AllowControlTokens,
    prompt_chars,
    read_messages,
    render_fields,
)
from slipstream.serve.http.pooling.run import (
    Chosen,
    Input,
    PoolFields,
    PoolUsage,
    VectorFields,
    activation,
    arrays_of,
    choose,
    pooling_params,
    prompts_of,
    run,
    run_text,
    short_text,
    usage_of,
)
from slipstream.serve.http.server.errors import bad_request, check_needed
from slipstream.serve.http.server.request import Request, post
from slipstream.serve.http.server.response import JsonList, Response, json_array, large_response


class EmbeddingRequest(VectorFields, kw_only=True):
    """`input`, or messages, which the model's chat template renders as one text."""

    input: Input | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: Annotated[bool | None, doc("for messages; default false")] = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    allow_control_tokens: AllowControlTokens = None
    chat_template: Annotated[
        Any, unsupported("a request cannot have a template; start the server with --chat-template")
    ] = None


class EmbeddingObject(msgspec.Struct):
    object: str
    index: int
    embedding: Annotated[list[float] | str, doc("a string with encoding_format base64")]


class EmbeddingResponse(msgspec.Struct):
    object: str
    data: list[EmbeddingObject]
    model: str
    usage: PoolUsage


async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    chosen = choose(request, body.model, "embed")
    own: dict[str, Any] = {}
    if body.dimensions is not None:
        own["dimensions"] = body.dimensions
    if body.normalize is not None:
        own["normalize"] = body.normalize
    params = pooling_params(request, body, chosen.inputs.pooling, "embed", **own)
    if body.messages is not None:
        given: Any = [await _message_ids(request, body, chosen, body.messages, params)]
    elif body.input is not None:
        check_needed(body, OF_MESSAGES, "messages")
        request.set_input_field("input")
        given = body.input
    else:
        raise bad_request("there is no input; give a text, or messages", "input")
    if (text := short_text(given)) is not None:
        pooled, num_tokens = await run_text(request, chosen, text, params, body.prompt_name)
        (vector,) = written([pooled.array()], body.encoding_format)
        data: Any = [EmbeddingObject("embedding", 0, vector)]
        answer = EmbeddingResponse("list", data, chosen.name, PoolUsage(num_tokens, num_tokens))
        return await large_response(request.state.pieces, answer)
    prompts, size = prompts_of(request, given)
    pooling_call = encode(chosen.inputs, prompts, params, "embed", prompt_name=body.prompt_name)
    found, _ = await run(request, chosen, pooling_call, size)
    vectors = written(arrays_of(found), body.encoding_format)
    data = JsonList(EmbeddingObject("embedding", index, vector) for index, vector in enumerate(vectors))
    return await large_response(request.state.pieces, EmbeddingResponse("list", data, chosen.name, usage_of(found)))


async def _message_ids(
    request: Request, body: EmbeddingRequest, chosen: Chosen, messages: list[dict[str, Any]], params: PoolingParams
) -> list[int]:
    """Returns the token ids of a conversation, without adding special tokens: the template adds them."""
    if body.input is not None:
        raise bad_request("input and messages are both given; remove one of them", "input")
    if body.prompt_name is not None:
        raise bad_request("prompt_name is for texts; put the prompt into the messages", "prompt_name")
    inputs, tokenizer = chosen.served.inputs, chosen.served.tokenizer
    checked = read_messages(request, messages, tokenizer)

    def tokenise() -> list[int]:
        text = inputs.render_messages(checked, **render_fields(body, generates=False))
        assert tokenizer is not None  # else rendering would have raised
        return tokenizer.encode(chosen.inputs.text_to_read(text, params), add_special_tokens=False)

    return await request.state.off_loop(prompt_chars(checked, body.chat_template_kwargs), tokenise)


def written(arrays: Iterable[Any], encoding: str | None) -> Iterator[Any]:
    """Numbers, or the bytes of little-endian float32, which msgspec encodes as base64."""
    if encoding == "base64":
        return (np.ascontiguousarray(array, "<f4").data.cast("B") for array in arrays)
    return map(json_array, arrays)


ROUTES = [
    post("/v1/embeddings", create_embeddings, "Embed texts", EmbeddingRequest, response_model=EmbeddingResponse),
]


# POST /pooling and /classify in vLLM's format: any pooling task, and classification.


class PoolingRequest(VectorFields, kw_only=True):
    input: Input
    task: Annotated[Task | None, doc("a pooling task; default: the model's first")] = None
    activation: Annotated[bool | None, doc("probabilities instead of raw scores; default true")] = None
    use_activation: Annotated[bool | None, doc("another name of activation")] = None
    softmax: Annotated[bool | None, doc("another name of activation")] = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None


class SparseWeight(msgspec.Struct):
    index: int
    value: float


class PoolingObject(msgspec.Struct):
    index: int
    object: str
    data: Annotated[
        list[float | list[float] | SparseWeight] | str,
        doc("a vector, a row per token, sparse weights, or a string with base64"),
    ]


class PoolingResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[PoolingObject]
    usage: PoolUsage


async def create_pooling(request: Request, body: PoolingRequest) -> Response:
    request.set_input_field("input")
    chosen = choose(request, body.model, *((body.task,) if body.task else POOLING_TASKS))
    prompts, size = prompts_of(request, body.input)
    own: dict[str, Any] = {}
    for name in ("dimensions", "normalize", "step_tag_id", "returned_token_ids"):
        if (value := getattr(body, name)) is not None:
            own[name] = value
    task = body.task or chosen.inputs.pooling.tasks[0]
    own |= _activation(body, task)
    if task == "sparse" and body.encoding_format == "base64":
        raise bad_request("sparse results have no base64 format; remove encoding_format", "encoding_format")
    params = pooling_params(request, body, chosen.inputs.pooling, **own)
    pooling_call = encode(chosen.inputs, prompts, params, task, prompt_name=body.prompt_name)
    found, _ = await run(request, chosen, pooling_call, size)
    if task == "sparse":
        values: Iterator[Any] = (sparse_weights(one.outputs) for one in found)
    else:
        values = written(arrays_of(found), body.encoding_format)
    data: Any = JsonList(PoolingObject(index, "pooling", each) for index, each in enumerate(values))
    pooled = PoolingResponse(f"pool-{request.id}", "list", int(time.time()), chosen.name, data, usage_of(found))
    return await large_response(request.state.pieces, pooled)


def sparse_weights(found: SparseOutput) -> JsonList:
    pairs = zip(found.indices.tolist(), found.array.tolist(), strict=True)
    return JsonList((SparseWeight(index, value) for index, value in pairs), 256)


class ClassifyRequest(PoolFields, kw_only=True):
    input: Input
    activation: Annotated[bool | None, doc("probabilities instead of raw scores; default true")] = None
    use_activation: Annotated[bool | None, doc("another name of activation")] = None
    softmax: Annotated[bool | None, doc("another name of activation")] = None
    prompt_name: Annotated[str | None, doc("name of a prompt of the model")] = None


class ClassifyObject(msgspec.Struct):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[ClassifyObject]
    usage: PoolUsage


async def create_classification(request: Request, body: ClassifyRequest) -> Response:
    request.set_input_field("input")
    chosen = choose(request, body.model, "classify")
    prompts, size = prompts_of(request, body.input)
    params = pooling_params(request, body, chosen.inputs.pooling, **_activation(body, "classify"))
    pooling_call = encode(chosen.inputs, prompts, params, "classify", prompt_name=body.prompt_name)
    found, _ = await run(request, chosen, pooling_call, size)
    data: Any = JsonList(
        ClassifyObject(index, one.outputs.label, one.outputs.probs, one.outputs.num_classes)
        for index, one in enumerate(found)
    )
    classified = ClassifyResponse(
        f"classify-{request.id}", "list", int(time.time()), chosen.name, data, usage_of(found)
    )
    return await large_response(request.state.pieces, classified)


def _activation(body: PoolingRequest | ClassifyRequest, task: Task) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in ("activation", "use_activation", "softmax")}
    return activation(task in ("classify", "token_classify"), f"the task is {task}", **given)


POOLING_ROUTES = [
    post("/pooling", create_pooling, "Run any pooling task", PoolingRequest, response_model=PoolingResponse),
    post("/classify", create_classification, "Classify texts", ClassifyRequest, response_model=ClassifyResponse),
]
