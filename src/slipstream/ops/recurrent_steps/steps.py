"""RecurrentSteps: what recurrent ops need to know of a step's rows. Made once per step; all layers reuse it.

The row of a step computes positions [p, p + n). Kernels cut them into chunks at multiples of STATE_CHUNK, counted from
position 0, so that chunks hardly depend on how the scheduler cuts a prompt. B rows, T tokens, packed row after row.

Slots index the first dimension of the state tensors [num_slots, *shape]. A slot may hold NaN before its first use: a
row whose first position is 0 starts from zeros and must select, not multiply.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.cache_spec import STATE_CHUNK


@dataclass(frozen=True, slots=True)
class RecurrentSteps:
    slots: torch.Tensor  # [B] int32: the row's state slot, which is its row number; of padding rows the padding row
    starts: torch.Tensor  # [B + 1] int32: first token of each row; padding rows have no tokens unless `is_single`
    first_positions: torch.Tensor  # [B] int32: position of the row's first token; 0: the row starts from zeros
    num_tokens: NDArray[np.int32]  # host [B]: tokens of each row; of no meaning if the step is padded for a graph
    is_single: bool  # host: every row has one token

    # The following two are None if `is_single`.
    # [N, 4] int32: (row index, first token, number of tokens, slot to store the state after the chunk to, or -1), the
    # chunks of a row in order, row after row. N is `max_chunks`; unused entries are at the end, with row index -1.
    chunks: torch.Tensor | None = None
    chunk_starts: torch.Tensor | None = None  # [B + 1] int32: first entry of each row in `chunks`

    save_slots: torch.Tensor | None = None  # [B] int32, only if `is_single`: slot to store the new state to too, or -1

    def covers(self, num_tokens: int) -> bool:
        """Host: whether each of the step's tokens belongs to a row, and the counts are exact. False if the step is
        padded with tokens of no row."""
        return self.is_single or int(self.num_tokens.sum()) == num_tokens


def max_chunks(num_tokens: int, num_rows: int) -> int:
    """Upper bound of the chunks of a step. A row of n >= 2 tokens has at most (n - 2) // STATE_CHUNK + 2 chunks."""
    return min(num_tokens, (num_tokens + num_rows * (2 * STATE_CHUNK - 2)) // STATE_CHUNK)
