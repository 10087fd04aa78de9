"""Cache writes with the C kernel; with the reference for inputs that the kernel does not take."""

from __future__ import annotations

import torch

from slipstream.ops.attention.cache_write import reference
from slipstream.ops.attention.cache_write.reference import FP8, write_fp8_cache
from slipstream.ops.platform import native


def write_cache(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    if keys.dtype is FP8:
        write_fp8_cache(key, value, keys, values, slots)
        return
    num_tokens, num_heads, dim = key.shape
    packed = key.stride()[1:] == value.stride()[1:] == (dim, 1) and keys.is_contiguous() and values.is_contiguous()
    if not packed or keys.dtype is not key.dtype or not native.serves(key):
        reference.write_cache(key, value, keys, values, slots)
        return
    library = native.library()
    assert library is not None
    library.slip_write_cache(
        key.data_ptr(),
        value.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        slots.data_ptr(),
        num_tokens,
        num_heads * dim,
        key.stride(0),
        value.stride(0),
    )
