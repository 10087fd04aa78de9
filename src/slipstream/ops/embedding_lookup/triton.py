"""Both lookups on CUDA, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.pdl import dependent, release_next, wait_for_previous

_BLOCK = 2048  # elements per program


def lookup_embedding_and_rope(
    embedding: torch.Tensor, ids: torch.Tensor, scale: float, angles: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments and result as the reference."""
    assert embedding.is_contiguous() and angles.is_contiguous() and len(ids) == len(positions)
    (num_tokens,), size, angle_size = ids.shape, embedding.shape[1], angles[0].numel()
    x = torch.empty((num_tokens, size), dtype=embedding.dtype, device=embedding.device)
    rotary = torch.empty((num_tokens, *angles.shape[1:]), dtype=angles.dtype, device=angles.device)
    if num_tokens:
        _look_up_kernel[(num_tokens, triton.cdiv(size, _BLOCK) + triton.cdiv(angle_size, _BLOCK))](
            embedding,
            ids,
            angles,
            positions,
            x,
            rotary,
            scale,
            SIZE=size,
            ANGLE_SIZE=angle_size,
            SCALED=scale != 1.0,
            BLOCK=_BLOCK,
            num_warps=4,
            **dependent(x.device, num_tokens),
        )
    return x, rotary


# grid: (tokens, blocks of the embedding, then of the RoPE row)
@triton.jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=["ids", "positions"])
def _look_up_kernel(
    embedding,
    ids,
    angles,
    positions,
    x,
    rotary,
    scale,
    SIZE: tl.constexpr,
    ANGLE_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    release_next(DEPENDENT)  # after the wait: later kernels read tile lists and page tables early (ops/pdl.py)
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part < BLOCKS:
        column = part * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(embedding + tl.load(ids + token) * SIZE + column, mask=column < SIZE, other=0.0)
        if SCALED:
            value = (value.to(tl.float32) * scale).to(x.dtype.element_ty)
        tl.store(x + token * SIZE + column, value, mask=column < SIZE)
    else:
        column = (part - BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(angles + tl.load(positions + token) * ANGLE_SIZE + column, mask=column < ANGLE_SIZE, other=0.0)
        tl.store(rotary + token * ANGLE_SIZE + column, value, mask=column < ANGLE_SIZE)
