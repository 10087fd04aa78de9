"""Late interaction: queries that stay on the device, and documents scored against them there (MaxSim).

The scheduler counts who still needs a query and says when to forget it; nothing here decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from slipstream.config.memory import MOST_SCORES
from slipstream.runner.batch.staging import Upload


class QueryStore:
    """Token vectors of queries by number. Lives on the stream's side; the host only queues."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}  # [tokens, size]

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self, numbers: tuple[int, ...]) -> None:
        """Device. A number that never came is fine: its query may have been given up before it ran."""
        for number in numbers:
            self._kept.pop(number, None)

    def keep(self, lines: torch.Tensor, counts: Sequence[int], numbers: Sequence[int]) -> None:
        """Device: token vectors of some queries, one after another. A copy: the step's own memory is used again."""
        for number, own in zip(numbers, lines.split(list(counts)), strict=True):
            self._kept[number] = own.clone()

    def prepare_scores(
        self, counts: Sequence[int], numbers: Sequence[int], query_sizes: Sequence[int], width: int, upload: Upload
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Host: documents of so many tokens, each with the number and the size of its query. The closure turns their
        token vectors [T, width] into scores [documents, 1]."""
        distinct = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
        starts = np.cumsum([0, *counts])
        # a document without a token that counts is compared with nothing, which makes 0
        sizes = [
            (distinct[number], start, count, size if count else 0)
            for number, start, count, size in zip(numbers, starts[:-1], counts, query_sizes, strict=True)
        ]
        span = upload.put(np.array(sizes, np.int64).T)
        longest, of_query = max(counts), max(query_sizes)
        most = max(1, MOST_SCORES // max(1, longest * of_query, max(longest, of_query) * width))
        parts = [(first, max(1, *counts[first : first + most])) for first in range(0, len(counts), most)]

        def score(lines: torch.Tensor) -> torch.Tensor:
            if not len(lines):
                return lines.new_zeros(len(counts), 1)
            queries = pad_sequence([self._kept[number] for number in distinct], batch_first=True)
            scores = []
            for first, most_tokens in parts:
                which, starts, num_tokens, num_query = upload.tensor(span)[:, first : first + most].unsqueeze(2)
                place = torch.arange(most_tokens, device=lines.device)
                index = (starts + place).clamp_(max=len(lines) - 1)  # past a document's end any line will do
                documents = lines.index_select(0, index.flatten()).unflatten(0, index.shape)
                products = queries.index_select(0, which.flatten()) @ documents.transpose(1, 2)
                # [documents, query tokens, document tokens]
                best = products.masked_fill_((place >= num_tokens).unsqueeze(1), -torch.inf).amax(2)
                unused = torch.arange(best.shape[1], device=lines.device) >= num_query
                scores.append(best.masked_fill_(unused, 0).sum(1, keepdim=True))
            return scores[0] if len(scores) == 1 else torch.cat(scores)

        return score
