"""ModelSizes: how much a step's activations take, as the model's shape reports it.

The shape is known on the device half only (`nn/shapes.py`); the host half plans memory from these counts.
"""

from __future__ import annotations

import msgspec


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of elements, not bytes."""

    widest: int = 0  # per token, inside the sublayer that takes the most; hidden states beside it not included
    per_step: int = 0  # however few tokens the step has, in float32 at least: copies of recurrent states
    rotary: int = 0  # per token: rows of the rope tables and their index
    split_sums: int = 0  # per row and split of its keys, over all cache groups: partial sums of attention
    keys: int = 0  # per position: keys of the site that has the most, and as many values
    scored_heads: int = 0  # heads with capped scores or sinks, whose scores torch computes in full; 0: none
    relative_heads: int = 0  # heads whose scores depend on a vector for each distance; 0: none
    relative_terms: int = 0  # of such scores: 1 of the query, 2 of query and key
