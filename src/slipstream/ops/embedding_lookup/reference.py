"""Both lookups in plain torch."""

from __future__ import annotations

import torch


def lookup_embedding_and_rope(
    embedding: torch.Tensor,  # [vocabulary, size]
    ids: torch.Tensor,  # [T] int64
    scale: float,
    angles: torch.Tensor,  # [positions, 2, rotary dim]
    positions: torch.Tensor,  # [T] int64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings times scale [T, size], and rows of the RoPE table [T, 2, rotary dim]."""
    x = embedding.index_select(0, ids)
    return x if scale == 1.0 else x * scale, angles.index_select(0, positions)
