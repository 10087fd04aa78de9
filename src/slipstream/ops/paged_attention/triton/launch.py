"""How attention kernels are compiled and launched: what decode and prefill share on the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True, slots=True)
class KernelShape:
    """How a kernel is compiled and launched."""

    keys: int  # in one block
    warps: int
    stages: int
    programs_per_sm: int
    tile: int = 0  # rows of queries, in the kernel that cuts along queries


def pad_dim(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def check_layout(out: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    assert query.shape == out.shape and query.shape[2] == keys.shape[3], f"{query.shape} over {keys.shape}"
    assert query.stride(2) == out.stride(2) == keys.stride(3) == 1, "head dims must be contiguous"
    assert keys.stride() == values.stride(), f"{keys.stride()} is not {values.stride()}"


def launch_strides(out: torch.Tensor, query: torch.Tensor, page_table: torch.Tensor) -> tuple[int, ...]:
    """Of the page table by row, of queries and output by token and head: as all kernels take them."""
    return (page_table.stride(0), *query.stride()[:2], *out.stride()[:2])


def head_shape(query: torch.Tensor, keys: torch.Tensor) -> dict[str, int]:
    """What all kernels are compiled for."""
    (_, num_heads, dim), (_, page_size, num_kv_heads, _) = query.shape, keys.shape
    return {"KV_HEADS": num_kv_heads, "GROUP": num_heads // num_kv_heads, "DIM": dim, "PAGE": page_size}


def num_programs(device: torch.device, shape: KernelShape, most: int) -> int:
    return min(most, shape.programs_per_sm * device_facts(device)[0])


@cache
def hopper_serves(device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int) -> bool:
    """Whether the kernels made for Hopper can take such heads here. The language they are written in is young: only the
    version it was tested with will do."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and triton.__version__.startswith("3.6.")
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128)
        and 8 <= page_size <= 256
        and page_size.bit_count() == 1
    )


@cache
def device_facts(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory a program may have."""
    if device.type != "cuda":  # the interpreter
        return 2, 232448
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count, facts.shared_memory_per_block_optin
