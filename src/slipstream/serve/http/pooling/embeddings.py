"""POST /v1/embeddings: a vector for each text."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

from slipstream.engine.front.pooling_calls import encode
from slipstream.serve.http.call import Call
from slipstream.serve.http.pooling.fields import PoolUsage, VectorFields, pooling_params, prompts_of
from slipstream.serve.http.pooling.run import choose, numbers_of, run, run_text, short_text, usage_of
from slipstream.serve.http.reply import Reply, json_reply
from slipstream.serve.http.routes import post


class EmbeddingRequest(VectorFields, kw_only=True, forbid_unknown_fields=True):
    pass


class EmbeddingObject(msgspec.Struct):
    object: str
    index: int
    embedding: Annotated[list[float] | str, msgspec.Meta(description="a text where base64 was asked for")]


class EmbeddingResponse(msgspec.Struct):
    object: str
    data: list[EmbeddingObject]
    model: str
    usage: PoolUsage


async def create_embeddings(call: Call, body: EmbeddingRequest) -> Reply:
    chosen = choose(call, body.model, "embed")
    own: dict[str, Any] = {}
    if body.dimensions is not None:
        own["dimensions"] = body.dimensions
    if body.normalize is not None:
        own["normalize"] = body.normalize
    params = pooling_params(call, body, "embed", **own)
    if (text := short_text(body.input)) is not None:
        pooled, num_tokens = await run_text(call, chosen, text, params, body.prompt_name)
        (numbers,) = written([pooled.array()], body.encoding_format)
        data = [EmbeddingObject("embedding", 0, numbers)]
        return json_reply(EmbeddingResponse("list", data, chosen.name, PoolUsage(num_tokens, num_tokens)))
    prompts, size = prompts_of(call, body.input)
    verb = encode(chosen.inputs, prompts, params, "embed", prompt_name=body.prompt_name)
    found, _ = await run(call, chosen, verb, size)
    data = [
        EmbeddingObject("embedding", index, numbers)
        for index, numbers in enumerate(written(numbers_of(found), body.encoding_format))
    ]
    return json_reply(EmbeddingResponse("list", data, chosen.name, usage_of(found)))


def written(arrays: list[Any], encoding: str | None) -> list[Any]:
    """Numbers as JSON has them: lists, or the bytes of little-endian 32-bit numbers, which msgspec writes as base64."""
    if encoding == "base64":
        return [np.ascontiguousarray(array, "<f4").data.cast("B") for array in arrays]
    return [array.tolist() for array in arrays]


ROUTES = [
    post("/v1/embeddings", create_embeddings, "A vector for each text", EmbeddingRequest, answer=EmbeddingResponse),
]
