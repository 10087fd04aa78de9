"""Result classes of pooling calls (vLLM's names), and the size of a result, known before the request runs.

Results hold numpy arrays (`array`). Lists of Python numbers and torch tensors are built when a property is read: most
callers use the arrays. `dataclasses.asdict` works on the outputs, with the fields of vLLM's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.base.errors import RequestTooLarge, SlipstreamError
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.contracts.messages import Submit
from slipstream.engine.model_description import ModelDescription
from slipstream.front.results import as_dataclass
from slipstream.params.pooling import TOKEN_TASKS, PoolingParams, Task

Array = NDArray[Any]


@as_dataclass("data")
class PoolingOutput(msgspec.Struct, frozen=True, gc=False):
    """The result of one prompt: a vector, or a matrix with one row per token."""

    array: Array

    @property
    def data(self) -> Any:
        """A torch tensor, as in vLLM; the array itself in a process without torch, such as a front end of a server."""
        return as_tensor(self.array)


@as_dataclass("embedding")
class EmbeddingOutput(msgspec.Struct, frozen=True, gc=False):
    data: Array

    @property
    def array(self) -> Array:
        return self.data

    @property
    def embedding(self) -> list[float]:
        values: list[float] = self.data.tolist()
        return values

    @property
    def hidden_size(self) -> int:
        return int(self.data.shape[-1])


@as_dataclass("probs")
class ClassificationOutput(msgspec.Struct, frozen=True, gc=False):
    data: Array
    labels: tuple[str, ...] = ()  # class names, by class index

    @property
    def array(self) -> Array:
        return self.data

    @property
    def probs(self) -> list[float]:
        values: list[float] = self.data.tolist()
        return values

    @property
    def num_classes(self) -> int:
        return int(self.data.shape[-1])

    @property
    def label(self) -> str | None:
        """The name of the most likely class, or None where classes have no names."""
        best = int(self.data.argmax())
        return self.labels[best] if best < len(self.labels) else None


class SparseOutput(msgspec.Struct, frozen=True, gc=False):
    """The non-zero weights of a sparse vector over the vocabulary."""

    indices: Array  # [n] token ids, ascending
    data: Array  # [n] weights

    @property
    def array(self) -> Array:
        return self.data

    @property
    def weights(self) -> dict[int, float]:
        return dict(zip(self.indices.tolist(), self.data.tolist(), strict=True))


@as_dataclass("score")
class ScoringOutput(msgspec.Struct, frozen=True, gc=False):
    score: float


Result = TypeVar("Result")


class PoolingRequestOutput(msgspec.Struct, Generic[Result], gc=False):
    """The result of one prompt. `outputs` raises if there is none: the request was aborted or the result has NaN."""

    request_id: str
    found: Result | None  # see `outputs`
    ids: Sequence[int]  # the prompt's token ids
    prompt: str | None = None  # the prompt's text, if it was given as text
    num_cached_tokens: int = 0
    error: str | None = None
    finished: bool = True

    @property
    def outputs(self) -> Result:
        if self.found is None:
            raise SlipstreamError(self.error or f"request {self.request_id} was aborted, so there is no result")
        return self.found

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self.ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.ids)


def as_plain(found: PoolingRequestOutput[Any]) -> PoolingRequestOutput[Any]:
    """The result as `LLM.encode` returns it for vectors and classes: a PoolingOutput."""
    if not isinstance(found.found, EmbeddingOutput | ClassificationOutput):
        return found
    outputs = PoolingOutput(found.found.data)
    return PoolingRequestOutput(
        found.request_id, outputs, found.ids, found.prompt, found.num_cached_tokens, found.error, found.finished
    )


def as_tensor(array: Array) -> Any:
    """A torch tensor over the array, or over a copy where it may not be written. Without torch, the array."""
    torch = sys.modules.get("torch")  # the front end never imports it
    return array if torch is None else torch.from_numpy(array if array.flags.writeable else array.copy())


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput], gc=False):
    pass


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput], gc=False):
    pass


class SparseRequestOutput(PoolingRequestOutput[SparseOutput], gc=False):
    pass


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput], gc=False):
    """`prompt_token_ids` are those of the pair, or of the second text where the two texts are separate requests."""


class RerankResult(msgspec.Struct, frozen=True):
    """A document and its relevance to the query."""

    index: int  # in the list of documents of the call
    score: float
    document: str


def wrap(
    task: Task, data: Array, ids: Sequence[int], pooling: PoolingInfo
) -> tuple[type[PoolingRequestOutput[Any]], Any]:
    """Returns the result class of the task, and its `outputs`. `ids`: the prompt's token ids."""
    if task == "embed":
        return EmbeddingRequestOutput, EmbeddingOutput(data)
    if task == "classify":
        return ClassificationRequestOutput, ClassificationOutput(data, pooling.labels)
    if task == "sparse":
        return SparseRequestOutput, _sparse(data, ids, pooling.sparse_skip_ids, pooling.max_active_dims)
    return PoolingRequestOutput, PoolingOutput(data)


def _sparse(data: Array, ids: Sequence[int], skipped: tuple[int, ...], max_kept: int | None) -> SparseOutput:
    """`data`: one weight per vocabulary entry [V], or per token of the prompt [T, 1], where the maximum over equal
    tokens counts. `max_kept`: only this many of the largest weights are kept."""
    if data.ndim == 1:
        (found,) = data.nonzero()
        return _largest(found, data[found], max_kept)
    tokens, indices = np.unique(np.asarray(ids), return_inverse=True)
    weights = np.zeros(len(tokens), data.dtype)
    np.maximum.at(weights, indices, data[:, 0])
    kept = (weights > 0) & ~np.isin(tokens, skipped)
    return _largest(tokens[kept], weights[kept], max_kept)


def _largest(tokens: Array, weights: Array, max_kept: int | None) -> SparseOutput:
    if max_kept is not None and len(tokens) > max_kept:
        kept = np.sort(np.argsort(-weights, kind="stable")[:max_kept])
        tokens, weights = tokens[kept], weights[kept]
    return SparseOutput(tokens, weights)


def similarities(kind: str, first: Array, second: Array) -> list[float]:
    """Similarities of the rows of two matrices [n, d], computed in float32 or wider. Either may have a single row."""
    a, b = (np.asarray(m, np.result_type(m.dtype, np.float32)) for m in (first, second))
    if kind == "euclidean":
        found = -np.sqrt(((a - b) ** 2).sum(-1))
    elif kind == "manhattan":
        found = -np.abs(a - b).sum(-1)
    else:
        found = (a * b).sum(-1)
        if kind == "cosine":
            found = found / np.maximum(np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1), 1e-12)
    values: list[float] = found.tolist()
    return values


def num_result_values(pooling: PoolingInfo, vocab_size: int, params: PoolingParams, num_tokens: int) -> int:
    """An upper bound of the values in one result: a model that scores steps returns fewer rows than tokens."""
    if params.query_key:
        return 1  # the vectors of late interaction stay on the device; only a score is returned
    size = {
        "embed": params.dimensions or pooling.embed_size,
        "token_embed": params.dimensions or pooling.token_size,
        "classify": pooling.num_labels,
        "token_classify": len(params.columns) or pooling.num_labels,
        "sparse": vocab_size,
    }[params.task or pooling.tasks[0]]
    return size * num_tokens if params.task in TOKEN_TASKS else size


def num_result_bytes(description: ModelDescription, message: Submit) -> int:
    """The size of the result of a pooling request as the core sends it."""
    assert description.pooling is not None and isinstance(message.params, PoolingParams), (
        f"{message.request_id} generates"
    )
    each = 8 if description.dtype == "float64" else 4
    return each * num_result_values(
        description.pooling, description.vocab_size, message.params, len(message.prompt_token_ids)
    )


def check_result_size(description: ModelDescription, message: Submit, limit: int) -> None:
    """Raises if the result of one request has more than `limit` bytes. Only token tasks can reach such sizes."""
    if not isinstance(message.params, PoolingParams) or message.params.task not in TOKEN_TASKS:
        return
    if (size := num_result_bytes(description, message)) > limit:
        fact = f"the result of a prompt of {len(message.prompt_token_ids)} tokens would have {size} bytes"
        raise RequestTooLarge(
            f"{fact}, and the engine core can send {limit}; send a shorter prompt, or ask for fewer dimensions"
        )
