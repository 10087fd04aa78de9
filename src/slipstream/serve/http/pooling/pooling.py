"""POST /pooling and /classify in vLLM's format: any pooling task, and classification."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec

from slipstream.front.pooling_calls import encode
from slipstream.front.pooling_results import SparseOutput
from slipstream.front.served import POOLING_TASKS
from slipstream.params.pooling import Task
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.pooling.embeddings import written
from slipstream.serve.http.pooling.fields import (
    Input,
    PoolFields,
    PoolUsage,
    VectorFields,
    pooling_params,
    prompts_of,
)
from slipstream.serve.http.pooling.run import activation, arrays_of, choose, run, usage_of
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, json_response
from slipstream.serve.http.routes import post


class PoolingRequest(VectorFields, kw_only=True, forbid_unknown_fields=True):
    input: Input
    task: Annotated[Task | None, msgspec.Meta(description="a pooling task; default: the model's first")] = None
    activation: Annotated[
        bool | None, msgspec.Meta(description="probabilities instead of raw scores; default true")
    ] = None
    use_activation: Annotated[bool | None, msgspec.Meta(description="another name of activation")] = None
    softmax: Annotated[bool | None, msgspec.Meta(description="another name of activation")] = None
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
        msgspec.Meta(description="a vector, a row per token, sparse weights, or a string with base64"),
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
    arrays = [sparse_weights(one.outputs) for one in found] if task == "sparse" else arrays_of(found)
    data = [
        PoolingObject(index, "pooling", each)
        for index, each in enumerate(arrays if task == "sparse" else written(arrays, body.encoding_format))
    ]
    usage = usage_of(found)
    return json_response(PoolingResponse(f"pool-{request.id}", "list", int(time.time()), chosen.name, data, usage))


def sparse_weights(found: SparseOutput) -> list[SparseWeight]:
    pairs = zip(found.indices.tolist(), found.array.tolist(), strict=True)
    return [SparseWeight(index, value) for index, value in pairs]


class ClassifyRequest(PoolFields, kw_only=True, forbid_unknown_fields=True):
    input: Input
    activation: Annotated[
        bool | None, msgspec.Meta(description="probabilities instead of raw scores; default true")
    ] = None
    use_activation: Annotated[bool | None, msgspec.Meta(description="another name of activation")] = None
    softmax: Annotated[bool | None, msgspec.Meta(description="another name of activation")] = None
    prompt_name: Annotated[str | None, msgspec.Meta(description="name of a prompt of the model")] = None


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
    data = [
        ClassifyObject(index, one.outputs.label, one.outputs.probs, one.outputs.num_classes)
        for index, one in enumerate(found)
    ]
    usage = usage_of(found)
    return json_response(ClassifyResponse(f"classify-{request.id}", "list", int(time.time()), chosen.name, data, usage))


def _activation(body: PoolingRequest | ClassifyRequest, task: Task) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in ("activation", "use_activation", "softmax")}
    return activation(task in ("classify", "token_classify"), f"the task is {task}", **given)


ROUTES = [
    post("/pooling", create_pooling, "Run any pooling task", PoolingRequest, response_model=PoolingResponse),
    post("/classify", create_classification, "Classify texts", ClassifyRequest, response_model=ClassifyResponse),
]
