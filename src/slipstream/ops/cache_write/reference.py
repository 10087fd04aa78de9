"""Cache writes in plain torch."""

from __future__ import annotations

import torch


def write_cache(
    key: torch.Tensor,  # [T, kv heads, head dim]
    value: torch.Tensor,  # [T, kv heads, head dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, head dim]
    values: torch.Tensor,
    slots: torch.Tensor,  # [T] int64, page * page_size + position in the page
) -> None:
    """Copies the key and value of each token to its slot."""
    keys.flatten(0, 1).index_copy_(0, slots, key)
    values.flatten(0, 1).index_copy_(0, slots, value)
