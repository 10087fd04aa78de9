"""POST /rerank, /v1/rerank and /v2/rerank: documents by relevance to a query.

With `documents` the request is in the format of Cohere, Jina and vLLM, and the response has the fields of all three.
With `texts` it is in TEI's format, whose response is a list.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec

from slipstream.base.typed import doc, unsupported
from slipstream.front.pooling_calls import rerank, score
from slipstream.front.pooling_inputs import PoolingInputs
from slipstream.front.pooling_results import RerankResult
from slipstream.front.served import SCORING
from slipstream.serve.http.pooling.run import (
    Chosen,
    PoolFields,
    PoolUsage,
    activation,
    choose,
    pooling_params,
    run,
    size_of,
)
from slipstream.serve.http.server.error_formats import as_tei_error
from slipstream.serve.http.server.errors import as_http_error, bad_request, check_needed
from slipstream.serve.http.server.request import Endpoint, Request, Route, post
from slipstream.serve.http.server.response import Response, json_response

Direction = Literal["left", "right", "Left", "Right"]


class RerankRequest(PoolFields, kw_only=True):
    query: str
    documents: Annotated[
        list[str | dict[str, Any]] | None, doc("texts, or objects with a field text; the response has Cohere's format")
    ] = None
    top_n: Annotated[int | None, doc("return only the best top_n documents")] = None
    return_documents: Annotated[bool | None, doc("include the texts; default true, and false under /v2")] = None
    instruction: Annotated[str | None, doc("for models that take one")] = None
    max_tokens_per_doc: Annotated[int | None, doc("truncate longer documents")] = None
    activation: Annotated[bool | None, doc("probabilities instead of raw scores; default true")] = None
    use_activation: Annotated[bool | None, doc("another name of activation")] = None
    rank_fields: Annotated[Any, unsupported("only the field text of a document is read", ["text"])] = None
    max_chunks_per_doc: Annotated[Any, unsupported("documents are not split; use max_tokens_per_doc")] = None

    texts: Annotated[list[str] | None, doc("instead of documents; the response has TEI's format")] = None
    raw_scores: Annotated[bool | None, doc("TEI: raw scores instead of probabilities")] = None
    return_text: Annotated[bool | None, doc("TEI: include the texts; default false")] = None
    truncate: Annotated[
        bool | None, doc("TEI: truncate long texts, or refuse them; default: as the model's files say")
    ] = None
    truncation_direction: Annotated[Direction | None, doc("TEI: the end at which long texts are truncated")] = None


class RankedDocument(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class ApiVersion(msgspec.Struct):
    version: str


class BilledUnits(msgspec.Struct):
    search_units: int


class RerankMeta(msgspec.Struct):
    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(msgspec.Struct):
    id: str
    model: str
    usage: PoolUsage
    results: list[RankedDocument]
    meta: RerankMeta


class Rank(msgspec.Struct, omit_defaults=True):
    """TEI's format."""

    index: int
    score: float
    text: str | None = None


_TEI_FIELDS = ("return_text", "truncate", "truncation_direction")
"""Fields that need `texts`; the next are those that need `documents`."""
_COHERE_FIELDS = (
    "top_n", "return_documents", "max_tokens_per_doc", "activation", "use_activation", "rank_fields",
)  # fmt: skip


def _reranker(version: str) -> Endpoint:
    async def create_rerank(request: Request, body: RerankRequest) -> Response:
        if body.texts is not None:
            request.set_input_field("texts")
            try:
                return await rerank_as_tei(request, body)
            except Exception as error:
                raise as_tei_error(as_http_error(error, request.id, request.field_names)) from error
        if body.documents is None:
            raise bad_request("there are no documents; give a list of texts", "documents")
        request.set_input_field("documents")
        return await _as_cohere(request, body, body.documents, version)

    return create_rerank


async def _as_cohere(
    request: Request, body: RerankRequest, documents: list[str | dict[str, Any]], version: str
) -> Response:
    check_needed(body, _TEI_FIELDS, "texts")
    chosen = choose(request, body.model, *SCORING, "classify")
    texts = [_text(index, document) for index, document in enumerate(documents)]
    raw = None if body.raw_scores is None else not body.raw_scores
    given = {"activation": body.activation, "use_activation": body.use_activation, "raw_scores": raw}
    own = activation(chosen.reads_pairs, f"{chosen.name} compares vectors", **given)
    ranked, num_tokens = await _rank(request, body, chosen, texts, own)
    shows = body.return_documents if body.return_documents is not None else version == "1"
    results = []
    for one in ranked:
        document = documents[one.index]
        shown = document if isinstance(document, dict) else {"text": document}
        results.append(RankedDocument(one.index, one.score, shown if shows else None))
    meta = RerankMeta(ApiVersion(version), BilledUnits(1))
    usage = PoolUsage(num_tokens, num_tokens)
    return json_response(RerankResponse(f"rerank-{request.id}", chosen.name, usage, results, meta))


async def rerank_as_tei(request: Request, body: RerankRequest) -> Response:
    if (texts := body.texts) is None:
        raise bad_request("there are no texts; give a list of them", "texts", "empty")
    if body.documents is not None:
        raise bad_request("texts and documents are both given; remove one of them", "documents")
    check_needed(body, _COHERE_FIELDS, "documents")
    chosen = choose(request, body.model, *SCORING, "classify")
    own = tei_truncation(chosen.inputs, body.truncate, body.truncation_direction)
    raw = None if body.raw_scores is None else not body.raw_scores
    own |= activation(chosen.reads_pairs, f"{chosen.name} compares vectors", raw_scores=raw)
    ranked, _ = await _rank(request, body, chosen, texts, own)
    return json_response([Rank(one.index, one.score, one.document if body.return_text else None) for one in ranked])


async def _rank(
    request: Request, body: RerankRequest, chosen: Chosen, texts: list[str], own: dict[str, Any]
) -> tuple[list[RerankResult], int]:
    request.check_count(len(texts), "documents" if body.texts is None else "texts")
    if not texts:
        raise bad_request("there are no documents; give a list of texts", "documents", "empty")
    params = pooling_params(request, body, chosen.inputs.pooling, truncates=body.texts is not None, **own)
    read = texts
    if (limit := body.max_tokens_per_doc) is not None:
        if limit < 1:
            raise bad_request(f"max_tokens_per_doc is {limit}; give 1 or more", "max_tokens_per_doc")
        read = await request.state.off_loop(size_of(texts), lambda: chosen.inputs.beginnings(texts, limit))
    # top_n may exceed the number of documents
    top_n = body.top_n if body.top_n is None else min(body.top_n, max(1, len(texts)))
    pooling_call = rerank(chosen.inputs, body.query, read, params, top_n=top_n, instruction=body.instruction)
    return await run(request, chosen, pooling_call, len(body.query) + size_of(read))


def tei_truncation(inputs: PoolingInputs, truncate: bool | None, direction: str | None) -> dict[str, Any]:
    """Converts TEI's truncation fields to PoolingParams. The default is that of the model's files."""
    if truncate is False:
        if direction is not None:
            name = "truncation_direction"
            raise bad_request(f"{name} is given and truncate is false; remove one of them", name)
        return {"truncation_side": "never"}
    own: dict[str, Any] = {} if direction is None else {"truncation_side": direction.lower()}
    if truncate and inputs.pooling.max_seq_length is None:
        own["truncate_prompt_tokens"] = -1
    return own


def _text(index: int, document: str | dict[str, Any]) -> str:
    if isinstance(document, str):
        return document
    text = document.get("text")
    if not isinstance(text, str):
        raise bad_request(f"document {index} is an object without a field text; add it", f"documents[{index}]")
    return text


ROUTES: list[Route] = [
    post(path, _reranker(version), "Rank documents by relevance", RerankRequest, response_model=RerankResponse)
    for path, version in (("/rerank", "1"), ("/v1/rerank", "1"), ("/v2/rerank", "2"))
]


# POST /score and /v1/score in vLLM's format: scores of pairs of texts.

Texts = str | list[str]
_ONE = doc("one text, or as many as text_2 has")
_OTHER = doc("another name of text_1 or text_2")


class ScoreRequest(PoolFields, kw_only=True):
    """Two lists of texts, under one of three pairs of names."""

    text_1: Annotated[Texts | None, _ONE] = None
    text_2: Texts | None = None
    data_1: Annotated[Texts | None, _OTHER] = None
    data_2: Annotated[Texts | None, _OTHER] = None
    queries: Annotated[Texts | None, _OTHER] = None
    documents: Annotated[Texts | None, _OTHER] = None
    instruction: Annotated[str | None, doc("for models that take one")] = None
    activation: Annotated[bool | None, doc("probabilities instead of raw scores; default true")] = None
    use_activation: Annotated[bool | None, doc("another name of activation")] = None


class ScoreObject(msgspec.Struct):
    index: int
    object: str
    score: float


class ScoreResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[ScoreObject]
    usage: PoolUsage


_NAMES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))


async def create_score(request: Request, body: ScoreRequest) -> Response:
    chosen = choose(request, body.model, *SCORING, "classify")
    first, second = _sides(request, body)
    request.check_count(max(len(first), len(second)), "texts")
    given = {"activation": body.activation, "use_activation": body.use_activation}
    own = activation(chosen.reads_pairs, f"{chosen.name} compares vectors", **given)
    params = pooling_params(request, body, chosen.inputs.pooling, **own)
    pooling_call = score(chosen.inputs, first, second, params, instruction=body.instruction)
    found, num_tokens = await run(request, chosen, pooling_call, size_of(first) + size_of(second))
    data = [ScoreObject(index, "score", one.outputs.score) for index, one in enumerate(found)]
    usage = PoolUsage(num_tokens, num_tokens)
    return json_response(ScoreResponse(f"score-{request.id}", "list", int(time.time()), chosen.name, data, usage))


def _sides(request: Request, body: ScoreRequest) -> tuple[list[str], list[str]]:
    given = [pair for pair in _NAMES if getattr(body, pair[0]) is not None or getattr(body, pair[1]) is not None]
    if len(given) != 1:
        raise bad_request("give text_1 and text_2, and no other pair of texts", "text_1")
    sides = []
    request.set_input_field(given[0][0])
    for name in given[0]:
        texts = getattr(body, name)
        texts = [texts] if isinstance(texts, str) else texts
        if not texts:
            raise bad_request(f"{name} is empty; give a text or a list of them", name)
        sides.append(texts)
    return sides[0], sides[1]


SCORE_ROUTES = [
    post(path, create_score, "Score pairs of texts", ScoreRequest, response_model=ScoreResponse)
    for path in ("/score", "/v1/score")
]
