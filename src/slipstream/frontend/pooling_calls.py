"""The verbs of pooling, encode, score and rerank: what each asks of the engine and makes of its answers.

A verb is a generator: it yields batches of prompts, is sent their results, and returns its own. So `LLM` and
`AsyncEngine` share them, and neither thread nor event loop is known here.
"""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec
import numpy as np

from slipstream.errors import InvalidParams, InvalidPrompt, SlipstreamError, UserError
from slipstream.frontend.answer_size import num_bytes
from slipstream.frontend.pool_inputs import PoolInputs
from slipstream.frontend.pool_prompts import Batch, PoolPrompt
from slipstream.frontend.pool_results import (
    PoolingRequestOutput,
    RerankResult,
    ScoringOutput,
    ScoringRequestOutput,
    similarities,
)
from slipstream.frontend.request_state import PoolingRequestState
from slipstream.messages import Submit
from slipstream.pooling_params import PoolingParams, Task

PAIRS_TOGETHER = 128
"""The most queries that are sent at once where each has its own document."""

T = TypeVar("T")
_WHOLE = (int, np.integer)
PoolPrompts = PoolPrompt | Sequence[PoolPrompt]
PoolParams = PoolingParams | Sequence[PoolingParams] | None
Texts = str | Sequence[str]


Results = list[Any]  # PoolingRequestOutputs of the kind that the task has
Call = Generator[list[Batch], Results, T]


def encode(
    inputs: PoolInputs,
    prompts: PoolPrompts,
    params: PoolParams = None,
    task: Task | None = None,
    *,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate_prompt_tokens: int | None = None,
) -> Call[Results]:
    batch = as_batch(prompts)
    settled = _settle(inputs, params, task, len(batch), truncate_prompt_tokens)
    return (yield [Batch(batch, settled, inputs.prefix(prompt_name, prompt), inputs.role(prompt_name))])


def score(
    inputs: PoolInputs,
    first: Texts,
    second: Texts,
    params: PoolingParams | None = None,
    *,
    instruction: str | None = None,
    prompt_name: str | None = None,
    truncate_prompt_tokens: int | None = None,
    roles: bool = False,
) -> Call[list[ScoringRequestOutput]]:
    """How well texts go together: one with one, one with each of many, or each with its own.

    By the model's kind: a cross-encoder reads both texts at once, an embedder's vectors are compared, and those of a
    late-interaction model token by token. With `roles` the first are queries and the second documents, and where the
    model has prompts for these they are used.
    """
    left, right = _texts("first", first), _texts("second", second)
    if len(left) not in (1, len(right)):
        raise InvalidParams(
            f"there are {len(left)} first texts and {len(right)} second ones; give one first text, or as many of both"
        )
    if "classify" in inputs.pooling.tasks:
        settled = _settled(inputs, params, "classify", truncate_prompt_tokens)
        prefix, instruction = inputs.pair_words(prompt_name, instruction)
        return (yield from _by_reading_both(inputs, left, right, settled, instruction, prefix))
    if instruction is not None:
        raise InvalidParams(
            f"{inputs.facts.name} compares vectors and takes no instruction; leave it out", param="instruction"
        )
    names = (_role(inputs, "query"), _role(inputs, "document", "passage")) if roles else (None, None)
    before = [inputs.prefix(prompt_name or name) for name in names]
    if "embed" in inputs.pooling.tasks:
        settled = _settled(inputs, params, "embed", truncate_prompt_tokens)
        return (yield from _by_vectors(inputs, left, right, settled, before))
    if "token_embed" in inputs.pooling.tasks:
        settled = _settled(inputs, params, "token_embed", truncate_prompt_tokens)
        if not roles:  # one side has another role than the other in any case
            before = [
                inputs.prefix(prompt_name or _role(inputs, *role)) for role in (("query",), ("document", "passage"))
            ]
        return (yield from _by_tokens(inputs, left, right, settled, before))
    raise InvalidParams(f"{inputs.facts.name} makes nothing that scores: it does {', '.join(inputs.pooling.tasks)}")


def rerank(
    inputs: PoolInputs,
    query: str,
    documents: Sequence[str],
    params: PoolingParams | None = None,
    *,
    top_n: int | None = None,
    instruction: str | None = None,
    prompt_name: str | None = None,
    truncate_prompt_tokens: int | None = None,
) -> Call[list[RerankResult]]:
    """The documents, the best answer to the query first; of equal ones the earlier."""
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidParams(f"top_n is {top_n!r}; give a whole number from 1 up, or leave it out", param="top_n")
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
        roles=True,
    )
    for place, one in enumerate(scored):
        if one.found is None and one.error:
            raise SlipstreamError(f"document {place + 1} of {len(scored)}: {one.error}")
    numbers = [one.outputs.score for one in scored]
    order = sorted(range(len(numbers)), key=lambda place: (-numbers[place], place))[:top_n]
    return [RerankResult(place, numbers[place], documents[place]) for place in order]


def _by_reading_both(
    inputs: PoolInputs,
    left: Sequence[str],
    right: Sequence[str],
    params: PoolingParams,
    instruction: str | None,
    prefix: str,
) -> Call[list[ScoringRequestOutput]]:
    if inputs.pooling.num_labels != 1:
        raise InvalidParams(
            f"{inputs.facts.name} tells {inputs.pooling.num_labels} classes apart, and a score is one number; "
            "use classify",
            param="model",
        )
    pairs: list[PoolPrompt] = []
    for place, document in enumerate(right):
        try:
            pairs.append(inputs.pair(left[place if len(left) > 1 else 0], document, instruction))
        except UserError as error:
            if len(right) == 1:
                raise
            raise type(error)(f"pair {place + 1} of {len(right)}: {error}", param=error.param) from None
    found = yield [Batch(pairs, params, prefix)]
    return [_scored(one, None if one.found is None else float(one.outputs.data[0]), one.error) for one in found]


def _by_vectors(
    inputs: PoolInputs, left: Sequence[str], right: Sequence[str], params: PoolingParams, before: Sequence[str]
) -> Call[list[ScoringRequestOutput]]:
    found = yield [Batch(left, params, before[0]), Batch(right, params, before[1])]
    queries, documents = found[: len(left)], found[len(left) :]
    alone = len(left) == 1
    pairs = [(queries[0 if alone else place], one) for place, one in enumerate(documents)]
    # what could not be computed spoils its own pairs and no others
    good = [(query, one) for query, one in pairs if query.found is not None and one.found is not None]
    numbers: Iterator[float] = iter(())
    if good:
        a = good[0][0].outputs.data[None] if alone else np.stack([query.outputs.data for query, _ in good])
        b = np.stack([one.outputs.data for _, one in good])
        numbers = iter(similarities(inputs.pooling.similarity, a, b))
    return [
        _scored(one, next(numbers), None)
        if query.found is not None and one.found is not None
        else _scored(one, None, query.error or one.error)
        for query, one in pairs
    ]


def _by_tokens(
    inputs: PoolInputs, left: Sequence[str], right: Sequence[str], params: PoolingParams, before: Sequence[str]
) -> Call[list[ScoringRequestOutput]]:
    """The device keeps the queries and compares: only numbers leave it."""
    call = uuid.uuid4().hex
    alone, roles = len(left) == 1, (inputs.pooling.query, inputs.pooling.document)
    scored: list[ScoringRequestOutput] = []
    for part in [slice(0, len(right))] if alone else _together(inputs, left, params, before[0]):
        queries, documents = left[part], right[part]
        keys = [f"{call}-{part.start + place}" for place in range(len(queries))]
        asking = [params.with_changes(query_key=key, query_uses=len(right) if alone else 1) for key in keys]
        answering = [params.with_changes(query_key=key) for key in keys]
        found = yield [
            Batch(queries, asking, before[0], roles[0], part.start, len(left)),
            Batch(documents, answering[0] if alone else answering, before[1], roles[1], part.start, len(right)),
        ]
        scored += [
            _scored(one, None if one.found is None else float(one.outputs.data.flat[0]), one.error)
            for one in found[len(queries) :]
        ]
    return scored


def _together(inputs: PoolInputs, queries: Sequence[str], params: PoolingParams, before: str) -> Iterator[slice]:
    """Places of queries that the device may keep at once, and of their documents. Other calls find room too."""
    most = None if inputs.facts.max_kept is None else inputs.facts.max_kept // 4
    start = size = 0
    for place, text in enumerate(queries):
        own = inputs.max_num_tokens(before + text, params, inputs.pooling.query)
        if place > start and (place - start == PAIRS_TOGETHER or (most is not None and size + own > most)):
            yield slice(start, place)
            start, size = place, 0
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


class Feed:
    """The requests of some batches, as they are sent, and their results in the batches' order.

    A prompt that came before with the same parameters is not sent again.
    """

    def __init__(
        self, inputs: PoolInputs, batches: list[Batch], new_id: Callable[[], str], *, plain: bool = False
    ) -> None:
        self.inputs = inputs
        self.batches = batches
        self.total = sum(len(batch.prompts) for batch in batches)
        self.is_level = len({own.priority for batch in batches for own in batch.each_params()}) < 2  # nobody goes first
        self._new_id = new_id
        self._plain = plain  # token ids as lists, for a core in another process
        self._sent: list[int] = [0] * self.total  # which of those sent is a place's
        self._twins: dict[int, str | None] = {}  # texts of places whose prompt was sent for another
        self._prepared = inputs.prepare(batches)

    def is_ready(self) -> bool:
        """Whether the next one need not be waited for."""
        return self._prepared.is_ready()

    def __iter__(self) -> Iterator[tuple[Submit, str | None]]:
        start = num_sent = 0
        sent, new_id = self._sent, self._new_id
        for batch in self.batches:
            seen: dict[Any, int] = {}
            for one in islice(self._prepared, len(batch.prompts)):
                params, ids = one.params, one.ids
                if not params.query_key:  # those are counted
                    key: Any = ids.tobytes()
                    if params is not batch.params or one.type_start is not None or one.num_seen is not None:
                        key = key, one.type_start, one.num_seen, id(params)
                    twin = seen.setdefault(key, num_sent)
                    if twin != num_sent:
                        sent[start + one.place] = twin
                        self._twins[start + one.place] = one.text
                        continue
                sent[start + one.place] = num_sent
                num_sent += 1
                yield (
                    Submit(
                        new_id(),
                        ids.tolist() if self._plain else ids,  # type: ignore[arg-type]  # whole numbers in a row
                        params,
                        time.time(),
                        params.priority,
                        params.cache_salt,
                        type_start=one.type_start,
                        num_seen=one.num_seen,
                    ),
                    one.text,
                )
            start += len(batch.prompts)

    def num_bytes(self, submits: Sequence[tuple[Submit, str | None]]) -> int:
        """Of all results, once all prompts were read; equal prompts as often as they came. `submits`: what was sent."""
        each = [num_bytes(self.inputs.facts, message) for message, _ in submits]
        return sum(each[sent] for sent in self._sent)

    def results(self, tracks: Sequence[PoolingRequestState]) -> Results:
        """`tracks`: of what was sent, in that order."""
        made = [track.pooled(self.inputs.pooling) for track in tracks]
        results = [made[sent] for sent in self._sent]
        for place, text in self._twins.items():
            if text != results[place].prompt:  # other words, the same tokens
                results[place] = msgspec.structs.replace(results[place], prompt=text)
        return results


def as_batch(prompts: PoolPrompts) -> Sequence[PoolPrompt]:
    """One prompt, or a list of them: a list of whole numbers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping | array):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim < 2 else list(prompts)
    if not isinstance(prompts, Sequence):
        raise InvalidPrompt(f"prompts is {type(prompts).__name__}; give a text, token ids, or a list of prompts")
    if prompts and isinstance(prompts[0], _WHOLE) and all(isinstance(item, _WHOLE) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _texts(name: str, value: Texts) -> Sequence[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not len(texts):
        raise InvalidPrompt(f"the {name} texts are {value!r}; give a text or a list of them")
    for text in texts:
        if not isinstance(text, str):
            raise InvalidPrompt(f"the {name} texts hold a {type(text).__name__}; score compares texts")
    return texts


def _role(inputs: PoolInputs, *names: str) -> str | None:
    """The model's prompt for a role, if it has one."""
    return next((name for name in names if name in inputs.pooling.prompts), None)


def _settled(
    inputs: PoolInputs, params: PoolingParams | None, task: Task | None, truncate: int | None
) -> PoolingParams:
    if truncate is not None:
        params = (params or PoolingParams()).with_changes(truncate_prompt_tokens=truncate)
    return inputs.settle(params, task)


def _settle(
    inputs: PoolInputs, params: PoolParams, task: Task | None, count: int, truncate: int | None
) -> PoolingParams | list[PoolingParams]:
    if not isinstance(params, list | tuple):
        return _settled(inputs, params, task, truncate)  # type: ignore[arg-type]
    if len(params) != count:
        raise InvalidParams(f"there are {count} prompts and {len(params)} pooling_params; give one for all or one each")
    return [_settled(inputs, one, task, truncate) for one in params]
