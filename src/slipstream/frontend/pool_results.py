"""What a caller of pooling gets back: the shapes people already use, over numpy arrays.

Lists of Python numbers are made only when they are asked for: most callers want the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.config.pooling_info import PoolingInfo
from slipstream.errors import SlipstreamError
from slipstream.pooling_params import Task

Array = NDArray[Any]


class PoolingOutput(msgspec.Struct, frozen=True, gc=False):
    """The numbers of one prompt: a vector, or a matrix with a line for each token."""

    data: Array


class EmbeddingOutput(msgspec.Struct, frozen=True, gc=False):
    data: Array

    @property
    def embedding(self) -> list[float]:
        numbers: list[float] = self.data.tolist()
        return numbers

    @property
    def hidden_size(self) -> int:
        return int(self.data.shape[-1])


class ClassificationOutput(msgspec.Struct, frozen=True, gc=False):
    data: Array
    labels: tuple[str, ...] = ()  # of the classes, in their order

    @property
    def probs(self) -> list[float]:
        numbers: list[float] = self.data.tolist()
        return numbers

    @property
    def num_classes(self) -> int:
        return int(self.data.shape[-1])

    @property
    def label(self) -> str | None:
        """Of the likeliest class, where classes have names."""
        best = int(self.data.argmax())
        return self.labels[best] if best < len(self.labels) else None


class SparseOutput(msgspec.Struct, frozen=True, gc=False):
    """Weights of the words that have one."""

    indices: Array  # [n] their token ids, ascending
    data: Array  # [n] their weights

    @property
    def weights(self) -> dict[int, float]:
        return dict(zip(self.indices.tolist(), self.data.tolist(), strict=True))


class ScoringOutput(msgspec.Struct, frozen=True, gc=False):
    score: float


Result = TypeVar("Result")


class PoolingRequestOutput(msgspec.Struct, Generic[Result], gc=False):
    """One prompt's result. Where there is none, because the model's numbers were no numbers, `outputs` says so."""

    request_id: str
    found: Result | None  # see `outputs`
    ids: Sequence[int]  # of the prompt's tokens
    prompt: str | None = None  # its text, where it came as one
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


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput], gc=False):
    pass


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput], gc=False):
    pass


class SparseRequestOutput(PoolingRequestOutput[SparseOutput], gc=False):
    pass


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput], gc=False):
    """`prompt_token_ids` are of the pair, or of the second text where both were computed apart."""


class RerankResult(msgspec.Struct, frozen=True):
    """A document and how well it answers the query."""

    index: int  # among the documents that were given
    score: float
    document: str


def wrap(
    task: Task, data: Array, ids: Sequence[int], pooling: PoolingInfo
) -> tuple[type[PoolingRequestOutput[Any]], Any]:
    """A task's numbers in its shape; `ids` are the prompt's."""
    if task == "embed":
        return EmbeddingRequestOutput, EmbeddingOutput(data)
    if task == "classify":
        return ClassificationRequestOutput, ClassificationOutput(data, pooling.labels)
    if task == "sparse":
        return SparseRequestOutput, _sparse(data, ids, pooling.sparse_skip_ids, pooling.max_active_dims)
    return PoolingRequestOutput, PoolingOutput(data)


def _sparse(data: Array, ids: Sequence[int], skipped: tuple[int, ...], most: int | None) -> SparseOutput:
    """From a weight for each word of the vocabulary [V], or for each token of the prompt [T, 1]: the largest counts.
    `most`: so many words are kept, those with the largest weights."""
    if data.ndim == 1:
        (found,) = data.nonzero()
        return _largest(found, data[found], most)
    words, places = np.unique(np.asarray(ids), return_inverse=True)
    weights = np.zeros(len(words), data.dtype)
    np.maximum.at(weights, places, data[:, 0])
    counts = (weights > 0) & ~np.isin(words, skipped)
    return _largest(words[counts], weights[counts], most)


def _largest(words: Array, weights: Array, most: int | None) -> SparseOutput:
    if most is not None and len(words) > most:
        kept = np.sort(np.argsort(-weights, kind="stable")[:most])
        words, weights = words[kept], weights[kept]
    return SparseOutput(words, weights)


def similarities(kind: str, first: Array, second: Array) -> list[float]:
    """Of lines of two matrices, in float32 at least; one line may stand for many."""
    a, b = (np.asarray(m, np.result_type(m.dtype, np.float32)) for m in (first, second))
    if kind == "euclidean":
        found = -np.sqrt(((a - b) ** 2).sum(-1))
    elif kind == "manhattan":
        found = -np.abs(a - b).sum(-1)
    else:
        found = (a * b).sum(-1)
        if kind == "cosine":
            found = found / np.maximum(np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1), 1e-12)
    numbers: list[float] = found.tolist()
    return numbers
