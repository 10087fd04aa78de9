"""Chooses the attention backend for a model and a device."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from slipstream.base.errors import InvalidOption
from slipstream.contracts.cache_spec import CacheGroup
from slipstream.nn.attention.sdpa import SdpaAttention
from slipstream.nn.context import AttentionBackend


def choose_attention(
    device: torch.device,
    groups: Sequence[CacheGroup],
    dtype: torch.dtype,
    head_dims: Sequence[int] = (),
    deterministic: bool = False,
) -> AttentionBackend:
    """Our kernels on CUDA if Triton is installed, torch's attention otherwise. `dtype` is that of queries; `head_dims`
    are those of bidirectional attention."""
    if device.type == "cuda" and any(group.spec.dtype == "fp8" for group in groups):
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise InvalidOption(
                f"kv_cache_dtype is fp8, which needs a GPU of compute capability 8.9 or more, and this one has "
                f"{capability[0]}.{capability[1]}; use auto"
            )
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from slipstream.nn.attention.triton import TritonAttention

        return TritonAttention(groups, dtype, head_dims, one_kernel=deterministic)
    if deterministic:
        raise InvalidOption("deterministic needs triton, which is not installed; run: pip install triton")
    return SdpaAttention(groups, dtype)
