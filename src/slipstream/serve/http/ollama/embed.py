"""Ollama's POST /api/embed, and its older form /api/embeddings."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec

from slipstream.front.pooling_calls import encode
from slipstream.params.pooling import PoolingParams
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.ollama.errors import OllamaErrorBody, as_ollama_error
from slipstream.serve.http.ollama.options import check_keep_alive, check_options, find_model, num_ctx
from slipstream.serve.http.pooling.fields import size_of
from slipstream.serve.http.pooling.run import Chosen, arrays_of, run, usage_of
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, json_response
from slipstream.serve.http.routes import post


class OllamaEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: Annotated[str | list[str], msgspec.Meta(description="a text, or a list of texts")]
    truncate: Annotated[bool | None, msgspec.Meta(description="truncate long texts; default: true")] = None
    dimensions: Annotated[int | None, msgspec.Meta(description="truncate vectors to this size (Matryoshka)")] = None
    options: Annotated[dict[str, Any] | None, msgspec.Meta(description="num_ctx: truncate to this many tokens")] = None
    keep_alive: Annotated[Any, msgspec.Meta(description="models stay loaded; 0 is refused")] = None


class OllamaEmbedResponse(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int  # nanoseconds
    load_duration: int
    prompt_eval_count: int


class OldEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    prompt: str
    options: Annotated[dict[str, Any] | None, msgspec.Meta(description="num_ctx: truncate to this many tokens")] = None
    keep_alive: Annotated[Any, msgspec.Meta(description="models stay loaded; 0 is refused")] = None


class OldEmbedResponse(msgspec.Struct):
    embedding: list[float]


async def create_embed(request: Request, body: OllamaEmbedRequest) -> Response:
    began = time.perf_counter_ns()
    request.set_input_field("input")
    texts = [body.input] if isinstance(body.input, str) else body.input
    request.check_count(len(texts), "input")
    own = {} if body.dimensions is None else {"dimensions": body.dimensions}
    found = await _embed(request, body, texts, body.truncate is not False, own) if texts else []
    vectors = [array.tolist() for array in arrays_of(found)]
    total = time.perf_counter_ns() - began
    return json_response(OllamaEmbedResponse(body.model, vectors, total, 0, usage_of(found).prompt_tokens))


async def create_old_embedding(request: Request, body: OldEmbedRequest) -> Response:
    request.set_input_field("prompt")
    if not body.prompt:
        return json_response(OldEmbedResponse([]))
    (found,) = await _embed(request, body, [body.prompt], True, {"normalize": False})
    return json_response(OldEmbedResponse(found.outputs.array.tolist()))


async def _embed(
    request: Request, body: OllamaEmbedRequest | OldEmbedRequest, texts: list[str], truncates: bool, own: dict[str, Any]
) -> list[Any]:
    check_keep_alive(body.keep_alive)
    served = find_model(request, body.model, "embed")
    given = check_options(body.options)
    if unused := given.keys() - {"num_ctx"}:
        raise bad_request(f"options.{min(unused)} is for generation; remove it", "options")
    assert served.pooling_inputs is not None, "a model that embeds"
    chosen = Chosen(served, served.pooling_inputs)
    limit = num_ctx(given, served.max_num_tokens)
    side = {"truncation_side": "right", "truncate_prompt_tokens": limit or served.max_num_tokens}
    own |= side if truncates else {"truncation_side": "never"}
    pooling_call = encode(chosen.inputs, list(texts), PoolingParams(task="embed", **own), "embed")
    found, _ = await run(request, chosen, pooling_call, size_of(texts))
    for index, one in enumerate(found):
        if limit is not None and one.num_prompt_tokens > limit:
            fact = f"text {index} has {one.num_prompt_tokens} tokens, options.num_ctx is {limit}"
            raise bad_request(f"{fact}; raise it, or set truncate", "options", "context_length_exceeded")
    return found


_OLLAMA: dict[str, Any] = dict(convert_error=as_ollama_error, error_model=OllamaErrorBody, any_content_type=True)

ROUTES = [
    post("/api/embed", create_embed, "Ollama: embed texts", OllamaEmbedRequest, response_model=OllamaEmbedResponse,
         **_OLLAMA),
    post("/api/embeddings", create_old_embedding, "Ollama: embed one text (older form)", OldEmbedRequest,
         response_model=OldEmbedResponse, **_OLLAMA),
]  # fmt: skip
