"""Cohere's POST /v2/embed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from slipstream.front.pooling_calls import encode
from slipstream.params.pooling import PoolingParams
from slipstream.serve.http.generation.fields import Refused, given_fields, refuse
from slipstream.serve.http.pooling.run import Chosen, arrays_of, choose, run, size_of, usage_of
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.request import Request, post
from slipstream.serve.http.server.response import Response, json_response


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


EmbeddingType = Literal["float", "base64", "binary", "ubinary", "int8", "uint8"]


class CohereEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    texts: list[str] | None = None
    input_type: Annotated[
        Literal["search_document", "search_query", "classification", "clustering"] | None,
        _doc("selects the model's prompt of that kind, where it has one"),
    ] = None
    embedding_types: Annotated[
        list[EmbeddingType] | None, _doc("float (the default), base64, binary or ubinary; int8 and uint8 are refused")
    ] = None
    output_dimension: Annotated[int | None, _doc("truncate vectors to this size (Matryoshka)")] = None
    max_tokens: Annotated[int | None, _doc("truncate longer texts")] = None
    truncate: Annotated[Literal["NONE", "START", "END"] | None, _doc("the end at which long texts are cut")] = None
    priority: Annotated[int | None, _doc("lower values are scheduled first")] = None
    images: Refused = None
    inputs: Refused = None


_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "images": (([],), "models read text only"),
    "inputs": (([],), "give texts"),
}
_PROMPTS = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "search_document"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}  # names of prompts, by the kind of input


class CohereVectors(msgspec.Struct, rename={"float_": "float"}, omit_defaults=True):
    float_: list[list[float]] | None = None
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereApiVersion(msgspec.Struct):
    version: str


class CohereEmbedMeta(msgspec.Struct):
    api_version: CohereApiVersion
    billed_units: dict[str, int]


class CohereEmbedResponse(msgspec.Struct):
    id: str
    embeddings: CohereVectors
    texts: list[str]
    meta: CohereEmbedMeta
    response_type: str = "embeddings_by_type"


async def create_cohere_embed(request: Request, body: CohereEmbedRequest) -> Response:
    refuse(given_fields(body), _REFUSED)
    request.set_input_field("texts")
    request.field_names["dimensions"] = "output_dimension"
    if not body.texts:
        raise bad_request("there are no texts; give a list of them", "texts", "empty")
    request.check_count(len(body.texts), "texts")
    kinds = list(dict.fromkeys(body.embedding_types or ["float"]))
    for kind in kinds:
        if kind in ("int8", "uint8"):
            fact = f"embedding_types has {kind}, whose scale depends on Cohere's own models"
            raise bad_request(f"{fact}; give float, base64, binary or ubinary", "embedding_types")
    chosen = choose(request, body.model, "embed")
    params = PoolingParams(task="embed", **_own(body, chosen))
    name = _prompt_name(chosen, body.input_type)
    found, _ = await run(
        request, chosen, encode(chosen.inputs, list(body.texts), params, "embed", prompt_name=name), size_of(body.texts)
    )
    vectors = CohereVectors()
    arrays = arrays_of(found)
    for kind in kinds:
        setattr(vectors, "float_" if kind == "float" else kind, _written(arrays, kind))
    meta = CohereEmbedMeta(CohereApiVersion("2"), {"input_tokens": usage_of(found).prompt_tokens})
    return json_response(CohereEmbedResponse(f"embed-{request.id}", vectors, body.texts, meta))


def _own(body: CohereEmbedRequest, chosen: Chosen) -> dict[str, Any]:
    own: dict[str, Any] = {} if body.output_dimension is None else {"dimensions": body.output_dimension}
    if body.priority is not None:
        own["priority"] = body.priority
    if body.truncate == "NONE":
        if body.max_tokens is not None:
            raise bad_request("max_tokens truncates and truncate is NONE; remove one of them", "max_tokens")
        return own | {"truncation_side": "never"}
    own["truncation_side"] = "left" if body.truncate == "START" else "right"
    if body.max_tokens is not None and body.max_tokens < 1:
        raise bad_request(f"max_tokens is {body.max_tokens}; give 1 or more", "max_tokens")
    limit = chosen.served.max_num_tokens
    own["truncate_prompt_tokens"] = limit if body.max_tokens is None else min(body.max_tokens, limit)
    return own


def _prompt_name(chosen: Chosen, kind: str | None) -> str | None:
    prompts = chosen.inputs.pooling.prompts or {}
    return next((name for name in _PROMPTS.get(kind or "", ()) if name in prompts), None)


def _written(arrays: list[Any], kind: str) -> list[Any]:
    if kind == "float":
        return [array.tolist() for array in arrays]
    if kind == "base64":
        return [np.ascontiguousarray(array, "<f4").data.cast("B") for array in arrays]
    bits = [np.packbits(np.asarray(array) > 0) for array in arrays]  # one bit per dimension, eight to a number
    return [(each.astype(np.int16) - 128).tolist() if kind == "binary" else each.tolist() for each in bits]


ROUTES = [
    post("/v2/embed", create_cohere_embed, "Cohere: embed texts", CohereEmbedRequest,
         response_model=CohereEmbedResponse),
]  # fmt: skip
