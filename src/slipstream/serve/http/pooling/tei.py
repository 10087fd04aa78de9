"""The routes of text-embeddings-inference: /embed, /embed_all, /embed_sparse, /predict, /similarity and /info."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

import slipstream
from slipstream.base.typed import Fields, doc
from slipstream.front.pooling_calls import encode, score
from slipstream.front.served import POOLING_TASKS
from slipstream.params.pooling import Task
from slipstream.serve.http.pooling.embeddings import SparseWeight, sparse_weights
from slipstream.serve.http.pooling.rerank import Direction, RerankRequest, rerank_as_tei, tei_truncation
from slipstream.serve.http.pooling.run import (
    Chosen,
    PoolFields,
    arrays_of,
    choose,
    pooling_params,
    prompts_of,
    run,
    run_text,
    short_text,
    size_of,
)
from slipstream.serve.http.server.error_formats import TeiErrorBody, as_tei_error
from slipstream.serve.http.server.errors import as_type, bad_request
from slipstream.serve.http.server.request import Endpoint, Request, Route, get, post
from slipstream.serve.http.server.response import JsonList, Response, json_array, json_response, large_response


class TeiFields(PoolFields, kw_only=True):
    truncate: Annotated[bool | None, doc("truncate long texts, or refuse them; default: as the model's files say")] = (
        None
    )
    truncation_direction: Annotated[
        Direction | None, doc("the end at which long texts are truncated; default right")
    ] = None


Inputs = Annotated[str | list[str | int | list[int]], doc("a text, a list of texts, or token ids: one list or several")]


class EmbedRequest(TeiFields, kw_only=True):
    inputs: Inputs
    normalize: Annotated[bool | None, doc("scale vectors to length 1; default true")] = None
    prompt_name: Annotated[str | None, doc("name of a prompt of the model, put before each text")] = None
    dimensions: Annotated[int | None, doc("truncate vectors to this size (Matryoshka)")] = None


class TokensRequest(TeiFields, kw_only=True):
    inputs: Inputs
    prompt_name: Annotated[str | None, doc("name of a prompt of the model, put before each text")] = None


async def embed(request: Request, body: EmbedRequest) -> Response:
    request.set_input_field("inputs")
    own: dict[str, Any] = {"normalize": body.normalize is not False}
    if body.dimensions is not None:
        own["dimensions"] = body.dimensions
    if (text := short_text(body.inputs)) is not None and text:
        chosen = choose(request, body.model, "embed")
        truncation = tei_truncation(chosen.inputs, body.truncate, body.truncation_direction)
        params = pooling_params(request, body, chosen.inputs.pooling, "embed", truncates=True, **truncation, **own)
        pooled, _ = await run_text(request, chosen, text, params, body.prompt_name)
        return json_response([pooled.array().tolist()])
    return await _vectors(request, await _encode(request, body, "embed", own))


async def embed_all(request: Request, body: TokensRequest) -> Response:
    """Embeds each token, without normalising."""
    found = await _encode(request, body, "token_embed", {"normalize": False})
    return await _vectors(request, found)


async def _vectors(request: Request, found: list[Any]) -> Response:
    return await large_response(request.state.pieces, JsonList(map(json_array, arrays_of(found))))


async def embed_sparse(request: Request, body: TokensRequest) -> Response:
    found = await _encode(request, body, "sparse", {})
    return await large_response(request.state.pieces, JsonList(sparse_weights(one.outputs) for one in found))


async def _encode(request: Request, body: EmbedRequest | TokensRequest, task: Task, own: dict[str, Any]) -> list[Any]:
    request.set_input_field("inputs")
    chosen = choose(request, body.model, task)
    if body.inputs in ("", []):
        raise bad_request("inputs is empty; give a text", "inputs", "empty")
    prompts, size = prompts_of(request, body.inputs, "inputs")
    truncation = tei_truncation(chosen.inputs, body.truncate, body.truncation_direction)
    params = pooling_params(request, body, chosen.inputs.pooling, truncates=True, **truncation, **own)
    pooling_call = encode(chosen.inputs, prompts, params, task, prompt_name=body.prompt_name)
    found, _ = await run(request, chosen, pooling_call, size)
    return found


class PredictRequest(TeiFields, kw_only=True):
    inputs: Annotated[
        str | list[str | list[str]],
        doc("a text; a pair of texts as a list of two; or a list of lists, each a text or a pair"),
    ]
    raw_scores: Annotated[bool | None, doc("raw scores instead of probabilities")] = None


class Prediction(msgspec.Struct):
    score: float
    label: str


async def predict(request: Request, body: PredictRequest) -> Response:
    request.set_input_field("inputs")
    chosen = choose(request, body.model, "classify")
    sequences, is_batch = _sequences(body.inputs)
    request.check_count(len(sequences), "inputs")
    pooling = chosen.inputs.pooling
    own = tei_truncation(chosen.inputs, body.truncate, body.truncation_direction) | {"activation": not body.raw_scores}
    prompts = [one[0] if len(one) == 1 else chosen.inputs.pair(one[0], one[1], None) for one in sequences]
    size = sum(size_of(one) for one in sequences)
    params = pooling_params(request, body, pooling, truncates=True, **own)
    pooling_call = encode(chosen.inputs, prompts, params, "classify")
    found, _ = await run(request, chosen, pooling_call, size)
    labels = pooling.labels or tuple(f"LABEL_{index}" for index in range(pooling.num_labels))
    answers = []
    for one in found:
        pairs = zip(one.outputs.probs, labels, strict=True)
        answers.append(sorted((Prediction(*pair) for pair in pairs), key=lambda each: -each.score))
    return json_response(answers if is_batch else answers[0])


def _sequences(inputs: str | list[Any]) -> tuple[list[list[str]], bool]:
    """Returns texts and pairs, each as a list, and whether the input is a list of lists."""
    if isinstance(inputs, str):
        return [[inputs]], False
    is_batch = bool(inputs) and isinstance(inputs[0], list)
    sequences = inputs if is_batch else [inputs]
    for one in sequences:
        if not isinstance(one, list) or len(one) not in (1, 2) or not all(isinstance(text, str) for text in one):
            raise bad_request(
                "inputs must be a text, a pair of texts, or a list of lists of one or two texts", "inputs"
            )
    return sequences, is_batch


class SimilarityInputs(Fields):
    source_sentence: str
    sentences: list[str]


class SimilarityParameters(Fields):
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None


class SimilarityRequest(PoolFields, kw_only=True):
    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


async def similarity(request: Request, body: SimilarityRequest) -> Response:
    """Compares vectors, also where the model has a better way to score."""
    request.set_input_field("inputs")
    chosen = choose(request, body.model, "embed")
    texts = body.inputs
    if not texts.sentences:
        raise bad_request("sentences is empty; give at least one", "inputs", "empty")
    request.check_count(len(texts.sentences), "sentences")
    parameters = body.parameters or SimilarityParameters()
    truncation = tei_truncation(chosen.inputs, parameters.truncate, parameters.truncation_direction)
    params = pooling_params(request, body, chosen.inputs.pooling, truncates=True, **truncation)
    pooling_call = score(
        chosen.inputs, texts.source_sentence, texts.sentences, params, prompt_name=parameters.prompt_name
    )
    found, _ = await run(request, chosen, pooling_call, len(texts.source_sentence) + size_of(texts.sentences))
    return json_response([one.outputs.score for one in found])


class Info(msgspec.Struct):
    """TEI's description of a server with one model: here the first that pools."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None


async def info(request: Request, body: None) -> Response:
    request.state.check_ready()
    chosen, settings = choose(request, None, *POOLING_TASKS), request.state.settings
    description = chosen.served.description
    return json_response(
        Info(
            model_id=chosen.name,
            model_sha=None,
            model_dtype=description.dtype,
            model_type=_model_type(chosen),
            max_concurrent_requests=settings.max_queued_requests,
            max_input_length=chosen.served.max_num_tokens,
            max_batch_tokens=description.max_batch_tokens,
            max_batch_requests=None,
            max_client_batch_size=settings.max_inputs,
            auto_truncate=chosen.inputs.pooling.max_seq_length is not None,
            tokenization_workers=settings.workers,
            version=slipstream.__version__,
            sha=None,
            docker_label=None,
        )
    )


_POOL_NAMES = {"first": "cls", "last": "last_token"}


def _model_type(chosen: Chosen) -> dict[str, Any]:
    pooling = chosen.inputs.pooling
    if "classify" in pooling.tasks:
        labels = {str(index): label for index, label in enumerate(pooling.labels)}
        kind = "reranker" if pooling.num_labels == 1 else "classifier"
        return {kind: {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}}
    if pooling.tasks[0] == "sparse":
        return {"embedding": {"pooling": "splade"}}
    return {"embedding": {"pooling": "+".join(_POOL_NAMES.get(method, method) for method in pooling.methods)}}


async def run_default_task(request: Request, body: dict[str, Any]) -> Response:
    """Runs the task of the model: reranking, classification, or embedding."""
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise bad_request("model must be a string; give a name from /v1/models", "model")
    pooling = choose(request, model, *POOLING_TASKS).inputs.pooling
    kind: type[PoolFields]
    handler: Any
    if "classify" in pooling.tasks:
        kind, handler = (RerankRequest, rerank_as_tei) if pooling.num_labels == 1 else (PredictRequest, predict)
    else:
        kind, handler = (TokensRequest, embed_sparse) if pooling.tasks[0] == "sparse" else (EmbedRequest, embed)
    response: Response = await handler(request, as_type(kind, body))
    return response


def _tei(path: str, handler: Endpoint, summary: str, body: Any, answer: Any) -> Route:
    return post(
        path, handler, summary, body, response_model=answer, convert_error=as_tei_error, error_model=TeiErrorBody
    )


ROUTES = [
    _tei("/", run_default_task, "TEI: run the task of the first model that pools", dict[str, Any], Any),
    _tei("/embed", embed, "TEI: embed texts", EmbedRequest, list[list[float]]),
    _tei("/embed_all", embed_all, "TEI: embed tokens", TokensRequest, list[list[list[float]]]),
    _tei("/embed_sparse", embed_sparse, "TEI: sparse embeddings", TokensRequest, list[list[SparseWeight]]),
    _tei("/predict", predict, "TEI: classify texts", PredictRequest, list[Prediction | list[Prediction]]),
    _tei("/similarity", similarity, "TEI: similarities of texts", SimilarityRequest, list[float]),
    get(
        "/info",
        info,
        "TEI: describe the first model that pools",
        response_model=Info,
        convert_error=as_tei_error,
        error_model=TeiErrorBody,
    ),
]
