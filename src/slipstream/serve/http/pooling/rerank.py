"""POST /rerank, /v1/rerank and /v2/rerank: documents in the order in which they answer a query.

Nobody agrees on the words. Documents under `documents` are asked for as by Cohere, Jina and vLLM, whose answers differ
only in what they leave out, so all get one that has everything; documents under `texts` are asked for as by TEI, whose
answer is a bare list.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from slipstream.frontend.pooling.calls import rerank
from slipstream.frontend.pooling.inputs import PoolingInputs
from slipstream.frontend.pooling.results import RerankResult
from slipstream.frontend.served import SCORING
from slipstream.serve.http.call import Call
from slipstream.serve.http.errors import as_http_error, bad_request
from slipstream.serve.http.openai.fields import Refused, refuse
from slipstream.serve.http.pooling.fields import PoolFields, pooling_params, size_of
from slipstream.serve.http.pooling.run import Chosen, activation, choose, run
from slipstream.serve.http.pooling.tei_errors import in_tei_words
from slipstream.serve.http.reply import Reply, json_reply
from slipstream.serve.http.routes import Handler, Route, post


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class RerankRequest(PoolFields, kw_only=True, forbid_unknown_fields=True):
    query: str
    documents: Annotated[
        list[str | dict[str, Any]] | None, _doc("texts, or objects with a text each; for an answer as Cohere's")
    ] = None
    top_n: Annotated[int | None, _doc("only so many, the best")] = None
    return_documents: Annotated[bool | None, _doc("with their texts; default yes, and no under /v2")] = None
    instruction: Annotated[str | None, _doc("for models that take one")] = None
    max_tokens_per_doc: Annotated[int | None, _doc("of a longer document only the beginning is read")] = None
    activation: Annotated[bool | None, _doc("probabilities or raw scores")] = None
    use_activation: Annotated[bool | None, _doc("the same")] = None
    rank_fields: Refused = None
    max_chunks_per_doc: Refused = None

    texts: Annotated[list[str] | None, _doc("instead of documents; for an answer as TEI's")] = None
    raw_scores: Annotated[bool | None, _doc("TEI: scores as the model makes them")] = None
    return_text: Annotated[bool | None, _doc("TEI: with their texts; default no")] = None
    truncate: Annotated[bool | None, _doc("TEI: cut what is too long, or refuse it; default as the model says")] = None
    truncation_direction: Annotated[Literal["left", "right", "Left", "Right"] | None, _doc("TEI: which end")] = None


class RerankUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


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
    usage: RerankUsage
    results: list[RankedDocument]
    meta: RerankMeta


class Rank(msgspec.Struct, omit_defaults=True):
    """TEI's."""

    index: int
    score: float
    text: str | None = None


_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "rank_fields": ((["text"],), "the field text of a document is read; put what counts into it"),
    "max_chunks_per_doc": ((), "documents are read as one; use max_tokens_per_doc"),
}
_TEIS = ("return_text", "truncate", "truncation_direction")
"""Fields that only go with `texts`, and those that only go with `documents`."""
_COHERES = (
    "top_n", "return_documents", "max_tokens_per_doc", "activation", "use_activation", *_REFUSED,
)  # fmt: skip


def _reranker(version: str) -> Handler:
    async def create_rerank(call: Call, body: RerankRequest) -> Reply:
        if body.texts is not None:
            call.reads("texts")
            try:
                return await rerank_as_tei(call, body)
            except Exception as error:
                raise in_tei_words(as_http_error(error, call.id, call.names)) from error
        if body.documents is None:
            raise bad_request("there are no documents; give a list of texts", "documents")
        call.reads("documents")
        return await _as_cohere(call, body, body.documents, version)

    return create_rerank


async def _as_cohere(call: Call, body: RerankRequest, documents: list[str | dict[str, Any]], version: str) -> Reply:
    for name in _TEIS:
        if getattr(body, name) is not None:
            raise bad_request(f"{name} goes with texts; give texts, or leave it out", name)
    for name in _REFUSED:
        if (value := getattr(body, name)) is not None:
            refuse({name: value}, _REFUSED)
    chosen = choose(call, body.model, *SCORING, "classify")
    texts = [_text(place, document) for place, document in enumerate(documents)]
    raw = None if body.raw_scores is None else not body.raw_scores
    said = {"activation": body.activation, "use_activation": body.use_activation, "raw_scores": raw}
    own = activation(chosen.reads_pairs, f"{chosen.name} compares vectors", **said)
    ranked, num_tokens = await _rank(call, body, chosen, texts, own)
    shows = body.return_documents if body.return_documents is not None else version == "1"
    results = []
    for one in ranked:
        given = documents[one.index]
        shown = given if isinstance(given, dict) else {"text": given}
        results.append(RankedDocument(one.index, one.score, shown if shows else None))
    meta = RerankMeta(ApiVersion(version), BilledUnits(1))
    usage = RerankUsage(num_tokens, num_tokens)
    return json_reply(RerankResponse(f"rerank-{call.id}", chosen.name, usage, results, meta))


async def rerank_as_tei(call: Call, body: RerankRequest) -> Reply:
    if (texts := body.texts) is None:
        raise bad_request("there are no texts; give a list of them", "texts", "empty")
    if body.documents is not None:
        raise bad_request("there are texts and documents; give one of them", "documents")
    for name in _COHERES:
        if getattr(body, name) is not None:
            raise bad_request(f"{name} goes with documents; give documents, or leave it out", name)
    chosen = choose(call, body.model, *SCORING, "classify")
    own = tei_truncation(chosen.inputs, body.truncate, body.truncation_direction)
    raw = None if body.raw_scores is None else not body.raw_scores
    own |= activation(chosen.reads_pairs, f"{chosen.name} compares vectors", raw_scores=raw)
    ranked, _ = await _rank(call, body, chosen, texts, own)
    return json_reply([Rank(one.index, one.score, one.document if body.return_text else None) for one in ranked])


async def _rank(
    call: Call, body: RerankRequest, chosen: Chosen, texts: list[str], own: dict[str, Any]
) -> tuple[list[RerankResult], int]:
    call.check_count(len(texts), "documents" if body.texts is None else "texts")
    if not texts:
        raise bad_request("there are no documents; give a list of texts", "documents", "empty")
    params = pooling_params(call, body, chosen.inputs.pooling, cuts=body.texts is not None, **own)
    read = texts
    if (limit := body.max_tokens_per_doc) is not None:
        if limit < 1:
            raise bad_request(f"max_tokens_per_doc is {limit}; give 1 or more", "max_tokens_per_doc")
        read = await call.state.off_loop(size_of(texts), lambda: chosen.inputs.beginnings(texts, limit))
    # more than there are documents means all of them
    top_n = body.top_n if body.top_n is None else min(body.top_n, max(1, len(texts)))
    verb = rerank(chosen.inputs, body.query, read, params, top_n=top_n, instruction=body.instruction)
    return await run(call, chosen, verb, len(body.query) + size_of(read))


def tei_truncation(inputs: PoolingInputs, truncate: bool | None, direction: str | None) -> dict[str, Any]:
    """TEI's words in ours. Left to itself the model's files say whether texts are cut, and to what length."""
    if truncate is False:
        if direction is not None:
            name = "truncation_direction"
            raise bad_request(f"{name} is given and truncate is false; leave one out", name)
        return {"truncation_side": "never"}
    own: dict[str, Any] = {} if direction is None else {"truncation_side": direction.lower()}
    if truncate and inputs.pooling.max_seq_length is None:
        own["truncate_prompt_tokens"] = -1
    return own


def _text(place: int, document: str | dict[str, Any]) -> str:
    if isinstance(document, str):
        return document
    text = document.get("text")
    if not isinstance(text, str):
        raise bad_request(f"document {place} is an object without a text; give it one", f"documents[{place}]")
    return text


ROUTES: list[Route] = [
    post(path, _reranker(version), "Documents by how well they answer", RerankRequest, answer=RerankResponse)
    for path, version in (("/rerank", "1"), ("/v1/rerank", "1"), ("/v2/rerank", "2"))
]
