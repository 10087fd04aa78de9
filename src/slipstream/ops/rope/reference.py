"""RoPE in plain torch. Dimension i is rotated with dimension i + half, as in checkpoints of Hugging Face layout.

A table row holds, for one position, the cosines of all rotary dimensions, then the sines, the first half of the sines
negated. A rotation is then x * cos + (x with its halves swapped) * sin.
"""

from __future__ import annotations

import torch


def rope_table(frequencies: torch.Tensor, num_positions: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """[num_positions, 2, rotary dim] from the frequencies [rotary dim / 2], computed in float32 as in training."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)


def apply_rope(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rotates x [T, heads, dim] by the table rows [T, 2, rotary dim]. Dimensions past the rotary ones do not change."""
    num_tokens, num_heads, dim = x.shape
    rotary = rows.shape[-1]
    rotated = x if rotary == dim else x[..., :rotary]
    halves = rotated.unflatten(-1, (2, rotary // 2))
    cos, sin = rows.view(num_tokens, 2, 1, 2, rotary // 2).unbind(1)
    out = (halves * cos).addcmul_(halves.flip(2), sin).view(num_tokens, num_heads, rotary)
    return out if rotary == dim else torch.cat((out, x[..., rotary:]), -1)
