"""Which attention serves a model on a device."""

from __future__ import annotations

import importlib.util

import torch

from slipstream.config.model_info import ModelInfo
from slipstream.errors import InvalidOption
from slipstream.nn.attention.sdpa import SdpaAttention
from slipstream.nn.context import AttentionBackend


def choose_attention(
    device: torch.device,
    info: ModelInfo,
    page_size: int,
    dtype: torch.dtype,
    windows: tuple[int, ...],
    score_cap: float,
    deterministic: bool = False,
) -> AttentionBackend:
    """Our kernels on CUDA, where Triton is there to compile them; torch's own attention everywhere else."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from slipstream.nn.attention.triton import TritonAttention

        return TritonAttention(
            page_size,
            info.num_heads,
            info.num_kv_heads,
            info.head_dim,
            dtype,
            windows,
            soft_cap=score_cap,
            one_kernel=deterministic,
        )
    if deterministic:
        raise InvalidOption("deterministic needs triton, which is not installed; run: pip install triton")
    return SdpaAttention(page_size, dtype, windows, score_cap)
