"""The routes of text-embeddings-inference: /embed, /embed_all, /embed_sparse, /predict, /similarity and /info."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

import slipstream
from slipstream.frontend.pooling.calls import encode, score
from slipstream.frontend.served import POOLING_TASKS
from slipstream.pooling_params import Task
from slipstream.serve.http.call import Call
from slipstream.serve.http.errors import bad_request, misfit
from slipstream.serve.http.pooling.fields import PoolFields, pooling_params, prompts_of, size_of
from slipstream.serve.http.pooling.pooling import SparseWeight, sparse_weights
from slipstream.serve.http.pooling.rerank import RerankRequest, rerank_as_tei, tei_truncation
from slipstream.serve.http.pooling.run import Chosen, choose, numbers_of, run, run_text, short_text
from slipstream.serve.http.pooling.tei_errors import TeiErrorBody, in_tei_words
from slipstream.serve.http.reply import Reply, json_reply
from slipstream.serve.http.routes import Handler, Route, get, post

Direction = Literal["left", "right", "Left", "Right"]


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class TeiFields(PoolFields, kw_only=True, forbid_unknown_fields=True):
    truncate: Annotated[bool | None, _doc("cut what is too long, or refuse it; default as the model says")] = None
    truncation_direction: Annotated[Direction | None, _doc("which end is cut; default right")] = None


Inputs = Annotated[
    str | list[str | int | list[int]], _doc("a text, a list of texts, or token ids: one list or several")
]


class EmbedRequest(TeiFields, kw_only=True, forbid_unknown_fields=True):
    inputs: Inputs
    normalize: Annotated[bool | None, _doc("vectors of length 1 or not; default yes")] = None
    prompt_name: Annotated[str | None, _doc("one of the model's prompts, to put before each text")] = None
    dimensions: Annotated[int | None, _doc("cut vectors to so many numbers")] = None


class TokensRequest(TeiFields, kw_only=True, forbid_unknown_fields=True):
    inputs: Inputs
    prompt_name: Annotated[str | None, _doc("one of the model's prompts, to put before each text")] = None


async def embed(call: Call, body: EmbedRequest) -> Reply:
    call.reads("inputs")
    own: dict[str, Any] = {"normalize": body.normalize is not False}
    if body.dimensions is not None:
        own["dimensions"] = body.dimensions
    if (text := short_text(body.inputs)) is not None and text:
        chosen = choose(call, body.model, "embed")
        said = tei_truncation(chosen.inputs, body.truncate, body.truncation_direction)
        params = pooling_params(call, body, chosen.inputs.pooling, "embed", cuts=True, **said, **own)
        pooled, _ = await run_text(call, chosen, text, params, body.prompt_name)
        return json_reply([pooled.array().tolist()])
    found = await _encode(call, body, "embed", own)
    return json_reply([array.tolist() for array in numbers_of(found)])


async def embed_all(call: Call, body: TokensRequest) -> Reply:
    """A vector for each token, not normalised."""
    found = await _encode(call, body, "token_embed", {"normalize": False})
    return json_reply([array.tolist() for array in numbers_of(found)])


async def embed_sparse(call: Call, body: TokensRequest) -> Reply:
    found = await _encode(call, body, "sparse", {})
    return json_reply([sparse_weights(one.outputs) for one in found])


async def _encode(call: Call, body: EmbedRequest | TokensRequest, task: Task, own: dict[str, Any]) -> list[Any]:
    call.reads("inputs")
    chosen = choose(call, body.model, task)
    if body.inputs in ("", []):
        raise bad_request("inputs is empty; give a text", "inputs", "empty")
    prompts, size = prompts_of(call, body.inputs, "inputs")
    said = tei_truncation(chosen.inputs, body.truncate, body.truncation_direction)
    params = pooling_params(call, body, chosen.inputs.pooling, cuts=True, **said, **own)
    verb = encode(chosen.inputs, prompts, params, task, prompt_name=body.prompt_name)
    found, _ = await run(call, chosen, verb, size)
    return found


class PredictRequest(TeiFields, kw_only=True, forbid_unknown_fields=True):
    inputs: Annotated[
        str | list[str | list[str]],
        _doc("a text; a pair of texts as a list of two; or a list of lists, each a text or a pair"),
    ]
    raw_scores: Annotated[bool | None, _doc("scores as the model makes them, and not probabilities")] = None


class Prediction(msgspec.Struct):
    score: float
    label: str


async def predict(call: Call, body: PredictRequest) -> Reply:
    call.reads("inputs")
    chosen = choose(call, body.model, "classify")
    sequences, is_batch = _sequences(body.inputs)
    call.check_count(len(sequences), "inputs")
    pooling = chosen.inputs.pooling
    own = tei_truncation(chosen.inputs, body.truncate, body.truncation_direction) | {"activation": not body.raw_scores}
    prompts = [one[0] if len(one) == 1 else chosen.inputs.pair(one[0], one[1], None) for one in sequences]
    size = sum(size_of(one) for one in sequences)
    params = pooling_params(call, body, pooling, cuts=True, **own)
    verb = encode(chosen.inputs, prompts, params, "classify")
    found, _ = await run(call, chosen, verb, size)
    labels = pooling.labels or tuple(f"LABEL_{place}" for place in range(pooling.num_labels))
    answers = []
    for one in found:
        pairs = zip(one.outputs.probs, labels, strict=True)
        answers.append(sorted((Prediction(*pair) for pair in pairs), key=lambda each: -each.score))
    return json_reply(answers if is_batch else answers[0])


def _sequences(inputs: str | list[Any]) -> tuple[list[list[str]], bool]:
    """Texts and pairs, each as a list, and whether they came as a list of lists."""
    if isinstance(inputs, str):
        return [[inputs]], False
    is_batch = bool(inputs) and isinstance(inputs[0], list)
    sequences = inputs if is_batch else [inputs]
    for one in sequences:
        if not isinstance(one, list) or len(one) not in (1, 2) or not all(isinstance(text, str) for text in one):
            raise bad_request("inputs is a text, a pair of texts, or a list of lists of one or two texts", "inputs")
    return sequences, is_batch


class SimilarityInputs(msgspec.Struct, forbid_unknown_fields=True):
    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, forbid_unknown_fields=True):
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None


class SimilarityRequest(PoolFields, kw_only=True, forbid_unknown_fields=True):
    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


async def similarity(call: Call, body: SimilarityRequest) -> Reply:
    """By vectors always, whatever else the model can do."""
    call.reads("inputs")
    chosen = choose(call, body.model, "embed")
    texts = body.inputs
    if not texts.sentences:
        raise bad_request("sentences is empty; give at least one", "inputs", "empty")
    call.check_count(len(texts.sentences), "sentences")
    said = body.parameters or SimilarityParameters()
    cut = tei_truncation(chosen.inputs, said.truncate, said.truncation_direction)
    params = pooling_params(call, body, chosen.inputs.pooling, cuts=True, **cut)
    verb = score(chosen.inputs, texts.source_sentence, texts.sentences, params, prompt_name=said.prompt_name)
    found, _ = await run(call, chosen, verb, len(texts.source_sentence) + size_of(texts.sentences))
    return json_reply([one.outputs.score for one in found])


class Info(msgspec.Struct):
    """TEI's facts about a server. There is one model in it: the first that pools."""

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


async def info(call: Call, body: None) -> Reply:
    call.state.check_ready()
    chosen, settings = choose(call, None, *POOLING_TASKS), call.state.settings
    facts = chosen.served.facts
    return json_reply(
        Info(
            model_id=chosen.name,
            model_sha=None,
            model_dtype=facts.dtype,
            model_type=_model_type(chosen),
            max_concurrent_requests=settings.max_queued_requests,
            max_input_length=chosen.served.max_num_tokens,
            max_batch_tokens=facts.max_batch_tokens,
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
        labels = {str(place): label for place, label in enumerate(pooling.labels)}
        kind = "reranker" if pooling.num_labels == 1 else "classifier"
        return {kind: {"id2label": labels, "label2id": {label: int(place) for place, label in labels.items()}}}
    if pooling.tasks[0] == "sparse":
        return {"embedding": {"pooling": "splade"}}
    return {"embedding": {"pooling": "+".join(_POOL_NAMES.get(method, method) for method in pooling.methods)}}


async def any_of_these(call: Call, body: dict[str, Any]) -> Reply:
    """What the model is made for: one that ranks ranks, one that classifies classifies, others make vectors."""
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise bad_request("model is no text; give a name from /v1/models", "model")
    pooling = choose(call, model, *POOLING_TASKS).inputs.pooling
    kind: type[PoolFields]
    handler: Any
    if "classify" in pooling.tasks:
        kind, handler = (RerankRequest, rerank_as_tei) if pooling.num_labels == 1 else (PredictRequest, predict)
    else:
        kind, handler = (TokensRequest, embed_sparse) if pooling.tasks[0] == "sparse" else (EmbedRequest, embed)
    try:
        asked = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise misfit(error) from None
    reply: Reply = await handler(call, asked)
    return reply


def _tei(path: str, handler: Handler, summary: str, body: Any, answer: Any) -> Route:
    return post(path, handler, summary, body, answer=answer, failed=in_tei_words, failure=TeiErrorBody)


ROUTES = [
    _tei("/", any_of_these, "TEI: what the first model that pools is made for", dict[str, Any], Any),
    _tei("/embed", embed, "TEI: a vector for each text", EmbedRequest, list[list[float]]),
    _tei("/embed_all", embed_all, "TEI: a vector for each token", TokensRequest, list[list[list[float]]]),
    _tei("/embed_sparse", embed_sparse, "TEI: weights of words", TokensRequest, list[list[SparseWeight]]),
    _tei("/predict", predict, "TEI: classes", PredictRequest, list[Prediction | list[Prediction]]),
    _tei("/similarity", similarity, "TEI: how alike texts are", SimilarityRequest, list[float]),
    get("/info", info, "TEI: the first model that pools", answer=Info, failed=in_tei_words, failure=TeiErrorBody),
]
