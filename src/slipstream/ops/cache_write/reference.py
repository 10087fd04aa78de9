"""Cache writes in plain torch."""

from __future__ import annotations

import torch


def write_cache(
    key: torch.Tensor,  # [T, kv heads, head dim]
    value: torch.Tensor,  # [T, kv heads, head dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, head dim]
    values: torch.Tensor,
    slots: torch.Tensor,  # [T] int64, page * page_size + place
) -> None:
    """Put each token's key and value at its slot."""
    keys.flatten(0, 1).index_copy_(0, slots, key)
    values.flatten(0, 1).index_copy_(0, slots, value)
