"""The pooling calls encode, score and rerank, as generators that `AsyncEngine` and the server share.

A call yields batches of prompts, receives their results by `send`, and returns its own result. `drive` runs it. embed
and classify are encode with a fixed task.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from slipstream.base.errors import InvalidParams, InvalidPrompt, SlipstreamError, UserError
from slipstream.front.pooling_inputs import PoolingInputs
from slipstream.front.pooling_prompts import PoolingBatch, PoolingPrompt
from slipstream.front.pooling_results import (
    PoolingRequestOutput,
    RerankResult,
    ScoringOutput,
    ScoringRequestOutput,
    similarities,
)
from slipstream.front.prompts import as_batch, per_prompt
from slipstream.params.pooling import TEXT_LIMITS, PoolingParams, Task

PAIRS_TOGETHER = 128
"""Upper bound of the late-interaction queries sent together, where each query has its own document."""

T = TypeVar("T")
OneOrMorePrompts = PoolingPrompt | Sequence[PoolingPrompt]
OneOrMoreParams = PoolingParams | Sequence[PoolingParams] | None
Texts = str | Sequence[str]


Results = list[Any]  # PoolingRequestOutputs of the task's class
PoolingCall = Generator[list[PoolingBatch], Results, T]


async def drive(call: PoolingCall[T], run: Callable[[list[PoolingBatch]], Awaitable[Results]]) -> T:
    """Returns the result of a call. `run` returns the results of batches."""
    try:
        batches = next(call)
        while True:
            batches = call.send(await run(batches))
    except StopIteration as end:
        result: T = end.value
        return result


def encode(
    inputs: PoolingInputs,
    prompts: OneOrMorePrompts,
    params: OneOrMoreParams = None,
    task: Task | None = None,
    *,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate_prompt_tokens: int | None = None,
    tokenization_kwargs: Mapping[str, Any] | None = None,
) -> PoolingCall[Results]:
    batch = as_batch(prompts)
    truncation = _truncation(inputs, truncate_prompt_tokens, tokenization_kwargs)
    resolved = _resolve_each(inputs, params, task, len(batch), truncation)
    return (yield [PoolingBatch(batch, resolved, inputs.prefix(prompt_name, prompt), inputs.role(prompt_name))])


def score(
    inputs: PoolingInputs,
    first: Texts,
    second: Texts,
    params: PoolingParams | None = None,
    *,
    instruction: str | None = None,
    prompt_name: str | None = None,
    truncate_prompt_tokens: int | None = None,
    tokenization_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    roles: bool = False,
) -> PoolingCall[list[ScoringRequestOutput]]:
    """Scores pairs of texts: one with one, one with each of many, or the i-th with the i-th.

    A cross-encoder reads both texts in one prompt; the vectors of an embedder are compared by its similarity function,
    those of a late-interaction model token by token. With `roles` the first texts are queries and the second documents,
    and the model's prompts for these are used. `chat_template`: a Jinja template for the prompt of a cross-encoder,
    with the texts as messages of the roles query and document.
    """
    truncation = _truncation(inputs, truncate_prompt_tokens, tokenization_kwargs)
    left, right = _texts("first", first), _texts("second", second)
    if isinstance(params, PoolingParams) and params.extra_kwargs is not None:
        limits = [params.extra_kwargs.get(name) for name in TEXT_LIMITS]
        left, right = (
            texts if limit is None else inputs.beginnings(list(texts), limit)
            for texts, limit in zip((left, right), limits, strict=True)
        )
        params = params.with_changes(extra_kwargs=None)
    if len(left) not in (1, len(right)):
        raise InvalidParams(
            f"there are {len(left)} first texts and {len(right)} second ones; give one first text, or as many of both"
        )
    if "classify" in inputs.pooling.tasks:
        resolved = _resolve(inputs, params, "classify", truncation)
        prefix, instruction = inputs.pair_prompt(prompt_name, instruction)
        make_pair = partial(inputs.pair, instruction=instruction, chat_template=chat_template)
        return (yield from _score_by_cross_encoder(inputs, left, right, resolved, make_pair, prefix))
    if chat_template is not None:
        raise InvalidParams(
            f"{inputs.description.name} compares vectors, and chat_template is for cross-encoders; remove it",
            param="chat_template",
        )
    if instruction is not None:
        raise InvalidParams(
            f"{inputs.description.name} compares vectors and takes no instruction; remove it", param="instruction"
        )
    names = (_prompt_name(inputs, "query"), _prompt_name(inputs, "document", "passage")) if roles else (None, None)
    prefixes = [inputs.prefix(prompt_name or name) for name in names]
    if "embed" in inputs.pooling.tasks:
        resolved = _resolve(inputs, params, "embed", truncation)
        return (yield from _score_by_vectors(inputs, left, right, resolved, prefixes))
    if "token_embed" in inputs.pooling.tasks:
        resolved = _resolve(inputs, params, "token_embed", truncation)
        if not roles:  # late interaction always has a query and a document
            prefixes = [
                inputs.prefix(prompt_name or _prompt_name(inputs, *role))
                for role in (("query",), ("document", "passage"))
            ]
        return (yield from _score_by_late_interaction(inputs, left, right, resolved, prefixes))
    raise InvalidParams(
        f"This model does not support the Scoring API. {inputs.description.name} does "
        f"{', '.join(inputs.pooling.tasks)}, and score needs classify, embed or token_embed; use encode, or another "
        "model"
    )


def rerank(
    inputs: PoolingInputs,
    query: str,
    documents: Sequence[str],
    params: PoolingParams | None = None,
    *,
    top_n: int | None = None,
    instruction: str | None = None,
    prompt_name: str | None = None,
    truncate_prompt_tokens: int | None = None,
    tokenization_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
) -> PoolingCall[list[RerankResult]]:
    """Returns the documents by descending score, equal scores in the order of the documents."""
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidParams(f"top_n is {top_n!r}; give an integer from 1 up, or remove it", param="top_n")
    if not isinstance(query, str):
        raise InvalidPrompt(f"the query is {type(query).__name__}; give one text")
    if isinstance(documents, str):
        raise InvalidPrompt("documents is one text; give a list of them")
    if not isinstance(documents, Sequence):
        raise InvalidPrompt(f"documents is {type(documents).__name__}; give a list of texts")
    if not len(documents):
        return []
    scored = yield from score(
        inputs,
        query,
        documents,
        params,
        instruction=instruction,
        prompt_name=prompt_name,
        truncate_prompt_tokens=truncate_prompt_tokens,
        tokenization_kwargs=tokenization_kwargs,
        chat_template=chat_template,
        roles=True,
    )
    for index, one in enumerate(scored):
        if one.found is None and one.error:
            raise SlipstreamError(f"document {index + 1} of {len(scored)}: {one.error}")
    scores = [one.outputs.score for one in scored]
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:top_n]
    return [RerankResult(index, scores[index], documents[index]) for index in order]


def _score_by_cross_encoder(
    inputs: PoolingInputs,
    left: Sequence[str],
    right: Sequence[str],
    params: PoolingParams,
    make_pair: Callable[[str, str], PoolingPrompt],
    prefix: str,
) -> PoolingCall[list[ScoringRequestOutput]]:
    if inputs.pooling.num_labels != 1:
        raise InvalidParams(
            f"Scoring API is only enabled for num_labels == 1. {inputs.description.name} has "
            f"{inputs.pooling.num_labels} classes; use classify",
            param="model",
        )
    pairs: list[PoolingPrompt] = []
    for index, document in enumerate(right):
        try:
            pairs.append(make_pair(left[index if len(left) > 1 else 0], document))
        except UserError as error:
            if len(right) == 1:
                raise
            raise type(error)(f"pair {index + 1} of {len(right)}: {error}", param=error.param) from None
    found = yield [PoolingBatch(pairs, params, prefix)]
    return [_scored(one, None if one.found is None else float(one.outputs.array[0]), one.error) for one in found]


def _score_by_vectors(
    inputs: PoolingInputs, left: Sequence[str], right: Sequence[str], params: PoolingParams, prefixes: Sequence[str]
) -> PoolingCall[list[ScoringRequestOutput]]:
    found = yield [PoolingBatch(left, params, prefixes[0]), PoolingBatch(right, params, prefixes[1])]
    queries, documents = found[: len(left)], found[len(left) :]
    alone = len(left) == 1
    pairs = [(queries[0 if alone else index], one) for index, one in enumerate(documents)]
    # a text without a result fails its own pairs only
    good = [(query, one) for query, one in pairs if query.found is not None and one.found is not None]
    scores: Iterator[float] = iter(())
    if good:
        a = good[0][0].outputs.array[None] if alone else np.stack([query.outputs.array for query, _ in good])
        b = np.stack([one.outputs.array for _, one in good])
        scores = iter(similarities(inputs.pooling.similarity, a, b))
    return [
        _scored(one, next(scores), None)
        if query.found is not None and one.found is not None
        else _scored(one, None, query.error or one.error)
        for query, one in pairs
    ]


def _score_by_late_interaction(
    inputs: PoolingInputs, left: Sequence[str], right: Sequence[str], params: PoolingParams, prefixes: Sequence[str]
) -> PoolingCall[list[ScoringRequestOutput]]:
    """The device keeps the token vectors of the queries and computes the scores, so only scores are copied out."""
    call = uuid.uuid4().hex
    alone, roles = len(left) == 1, (inputs.pooling.query, inputs.pooling.document)
    scored: list[ScoringRequestOutput] = []
    for part in [slice(0, len(right))] if alone else _query_parts(inputs, left, params, prefixes[0]):
        queries, documents = left[part], right[part]
        keys = [f"{call}-{part.start + index}" for index in range(len(queries))]
        asking = [params.with_changes(query_key=key, query_uses=len(right) if alone else 1) for key in keys]
        answering = [params.with_changes(query_key=key) for key in keys]
        found = yield [
            PoolingBatch(queries, asking, prefixes[0], roles[0], part.start, len(left)),
            PoolingBatch(
                documents, answering[0] if alone else answering, prefixes[1], roles[1], part.start, len(right)
            ),
        ]
        scored += [
            _scored(one, None if one.found is None else float(one.outputs.array.flat[0]), one.error)
            for one in found[len(queries) :]
        ]
    return scored


def _query_parts(inputs: PoolingInputs, queries: Sequence[str], params: PoolingParams, prefix: str) -> Iterator[slice]:
    """Slices of queries that the device keeps at the same time. One call uses at most a quarter of that memory."""
    limit = None if inputs.description.max_kept is None else inputs.description.max_kept // 4
    start = size = 0
    for index, text in enumerate(queries):
        own = inputs.max_num_tokens(prefix + text, params, inputs.pooling.query)
        if index > start and (index - start == PAIRS_TOGETHER or (limit is not None and size + own > limit)):
            yield slice(start, index)
            start, size = index, 0
        size += own
    yield slice(start, len(queries))


def _scored(found: PoolingRequestOutput[Any], number: float | None, error: str | None) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        found.request_id,
        None if number is None else ScoringOutput(number),
        found.ids,
        found.prompt,
        num_cached_tokens=found.num_cached_tokens,
        error=error,
    )


def _texts(name: str, value: Texts) -> Sequence[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not len(texts):
        raise InvalidPrompt(f"the {name} texts are {value!r}; give a text or a list of them")
    for text in texts:
        if not isinstance(text, str):
            raise InvalidPrompt(f"the {name} texts have a {type(text).__name__}; score compares texts")
    return texts


def _prompt_name(inputs: PoolingInputs, *names: str) -> str | None:
    """The first of these names for which the model has a prompt."""
    return next((name for name in names if name in inputs.pooling.prompts), None)


Truncation = Mapping[str, Any]
"""The fields truncate_prompt_tokens and truncation_side of PoolingParams that a call sets for all its prompts."""


def _truncation(inputs: PoolingInputs, tokens: int | None, tokenization_kwargs: Mapping[str, Any] | None) -> Truncation:
    """From the arguments of a call. `tokenization_kwargs` are vLLM's; of these only truncation is supported."""
    found = {} if tokens is None else {"truncate_prompt_tokens": tokens}
    for name, value in (tokenization_kwargs or {}).items():
        if value is None:
            continue
        if name not in ("truncate_prompt_tokens", "truncation_side"):
            raise InvalidParams(
                f"tokenization_kwargs has {name}; it takes truncate_prompt_tokens and truncation_side",
                param="tokenization_kwargs",
            )
        limit = inputs.description.max_model_len
        if name == "truncate_prompt_tokens" and isinstance(value, int) and value > limit:
            raise InvalidParams(
                f"truncate_prompt_tokens of tokenization_kwargs is {value}, and {inputs.description.name} takes "
                f"{limit} tokens; give at most that, or -1 for it",
                param="tokenization_kwargs",
            )
        found[name] = value
    return found


def _resolve(
    inputs: PoolingInputs, params: PoolingParams | None, task: Task | None, truncation: Truncation
) -> PoolingParams:
    if truncation:
        params = (params or PoolingParams()).with_changes(**truncation)
    return inputs.resolve(params, task)


def _resolve_each(
    inputs: PoolingInputs, params: OneOrMoreParams, task: Task | None, count: int, truncation: Truncation
) -> PoolingParams | list[PoolingParams]:
    if not isinstance(params, list | tuple):
        return _resolve(inputs, params, task, truncation)  # type: ignore[arg-type]
    return [_resolve(inputs, one, task, truncation) for one in per_prompt("pooling_params", params, count)]
