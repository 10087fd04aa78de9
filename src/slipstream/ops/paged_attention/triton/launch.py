"""Host code shared by decode and prefill attention: kernel shapes, launch arguments, device properties."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from slipstream.ops.cache_write.fp8 import FP8, scales_of
from slipstream.ops.device_limits import device_limits
from slipstream.ops.hopper import has_hopper_kernels


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Compile-time sizes of a kernel."""

    keys: int  # per block
    warps: int
    stages: int
    programs_per_sm: int
    tile: int = 0  # query rows per tile, in the kernel that splits along queries


def pad_dim(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def check_layout(out: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    assert query.shape[:2] == out.shape[:2] and query.shape[2] == keys.shape[3], f"{query.shape} over {keys.shape}"
    assert out.shape[2] == values.shape[3], f"{out.shape} of {values.shape}"
    assert query.stride(2) == out.stride(2) == keys.stride(3) == 1, "head dims must be contiguous"
    assert keys.stride() == values.stride(), (
        f"keys and values must have equal strides: {keys.stride()}, {values.stride()}"
    )


def launch_strides(out: torch.Tensor, query: torch.Tensor, page_table: torch.Tensor) -> tuple[int, ...]:
    """Strides of the page table by row, of queries and output by token and head, in the order of the kernels."""
    return (page_table.stride(0), *query.stride()[:2], *out.stride()[:2])


def head_shape(out: torch.Tensor, keys: torch.Tensor) -> dict[str, int]:
    """Compile-time head sizes of all kernels."""
    (_, num_heads, dim), (_, page_size, num_kv_heads, _) = out.shape, keys.shape
    return {"KV_HEADS": num_kv_heads, "GROUP": num_heads // num_kv_heads, "DIM": dim, "PAGE": page_size}


def latent_rest(out: torch.Tensor, query: torch.Tensor) -> dict[str, int]:
    """Of latent attention (MLA): how many elements of a key do not belong to its value, and their padded number."""
    rest = query.shape[2] - out.shape[2]
    return {"REST": rest, "BLOCK_REST": pad_dim(rest) if rest else 0}


def scale_arguments(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Scales of keys and values of an FP8 cache, [pages, page_size, kv heads], and the stride of their pages."""
    if keys.dtype is not FP8:
        return None, None, 0
    key_scales = scales_of(keys)
    return key_scales, scales_of(values), key_scales.stride(0)


def num_programs(device: torch.device, shape: KernelShape, most: int) -> int:
    return min(most, shape.programs_per_sm * device_limits(device)[0])


@cache
def hopper_serves(device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int) -> bool:
    """Whether the Hopper kernels take such heads on this device."""
    return (
        has_hopper_kernels(device)
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128, 256)
        and 8 <= page_size <= 256
        and page_size.bit_count() == 1
    )
