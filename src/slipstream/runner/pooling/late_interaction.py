"""Late interaction (MaxSim): stores query token vectors on the device and scores documents against them there.

The scheduler counts the documents that still need a query and decides when it is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from slipstream.config.buffer_size import MAX_SCORES
from slipstream.runner.batch.staging import Upload


class QueryStore:
    """Token vectors of queries by number. Only device work accesses them."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}  # [tokens, size]

    def __len__(self) -> int:
        return len(self._kept)

    def free(self, numbers: tuple[int, ...]) -> None:
        """Device: free queries. A query that was aborted before it ran is not stored, and is ignored."""
        for number in numbers:
            self._kept.pop(number, None)

    def keep(self, vectors: torch.Tensor, counts: Sequence[int], numbers: Sequence[int]) -> None:
        """Device: store the token vectors of some queries. A copy, because the step's memory is reused."""
        for number, own in zip(numbers, vectors.split(list(counts)), strict=True):
            self._kept[number] = own.clone()

    def prepare_scores(
        self, counts: Sequence[int], numbers: Sequence[int], query_sizes: Sequence[int], width: int, upload: Upload
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Host: for documents with these token counts, and the numbers and token counts of their queries. The returned
        work computes scores [documents, 1] from token vectors [T, width]."""
        starts = np.cumsum([0, *counts])
        longest, of_query = max(counts), max(query_sizes)
        max_documents = max(1, MAX_SCORES // max(1, longest * of_query, max(longest, of_query) * width))
        parts, indices = [], []
        for first in range(0, len(counts), max_documents):
            index_of = {number: i for i, number in enumerate(dict.fromkeys(numbers[first : first + max_documents]))}
            indices += [index_of[number] for number in numbers[first : first + max_documents]]
            parts.append((first, list(index_of), max(1, *counts[first : first + max_documents])))
        # a document without pooled tokens scores 0
        of_queries = [size if count else 0 for size, count in zip(query_sizes, counts, strict=True)]
        span = upload.put(np.array([indices, starts[:-1], counts, of_queries], np.int64))

        def score(vectors: torch.Tensor) -> torch.Tensor:
            if not len(vectors):
                return vectors.new_zeros(len(counts), 1)
            scores = []
            for first, own, max_num_tokens in parts:
                which, begins, num_tokens, num_query = upload.tensor(span)[:, first : first + max_documents].unsqueeze(
                    2
                )
                offset = torch.arange(max_num_tokens, device=vectors.device)
                if max_documents == 1:  # a single pair may exceed the limit
                    documents = vectors[min(starts[first], len(vectors) - 1) :][:max_num_tokens].unsqueeze(0)
                else:
                    index = (begins + offset).clamp_(max=len(vectors) - 1)  # vectors past a document's end are masked
                    documents = vectors.index_select(0, index.flatten()).unflatten(0, index.shape)
                queries = pad_sequence([self._kept[number] for number in own], batch_first=True)
                queries, none = queries.index_select(0, which.flatten()), (offset >= num_tokens).unsqueeze(1)
                # [documents, query tokens, document tokens]; split by query tokens if a single pair is too large
                products = (
                    (some @ documents.transpose(1, 2)).masked_fill_(none, -torch.inf).amax(2)
                    for some in queries.split(max(1, MAX_SCORES // (len(which) * max_num_tokens)), dim=1)
                )
                best = torch.cat(list(products), 1)
                unused = torch.arange(best.shape[1], device=vectors.device) >= num_query
                scores.append(best.masked_fill_(unused, 0).sum(1, keepdim=True))
            return scores[0] if len(scores) == 1 else torch.cat(scores)

        return score
