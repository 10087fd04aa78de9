"""Cache writes in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.contracts.cache_spec import SCALE_BYTES


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


# KV cache pages in FP8: e4m3 numbers with a float32 scale for each slot and head, computed when a slot is written.
#
# A page is one run of bytes: the numbers of all its slots, head after head, then their scales in the same order. So a
# program of attention, which has one head, reads two runs of a page. The cache tensor that layers see, [pages,
# page_size, kv heads, head dim], is a view of the numbers; `scales_of` finds the scales of such a view. So scales are
# copied, shared and freed with their pages.

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0  # the largest number of float8_e4m3fn


def page_bytes(page_size: int, num_heads: int, dim: int) -> int:
    return page_size * num_heads * (dim + SCALE_BYTES)


Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def new_fp8_cache(num_pages: int, page_size: int, num_heads: int, dim: int, zeros: Zeros) -> torch.Tensor:
    """The numbers of new pages, [pages, page_size, heads, dim]."""
    raw = zeros((num_pages, page_bytes(page_size, num_heads, dim)), torch.uint8)
    numbers = raw[:, : page_size * num_heads * dim].view(FP8)
    return numbers.unflatten(1, (num_heads, page_size, dim)).transpose(1, 2)


def raw_pages(cache: torch.Tensor) -> torch.Tensor:
    """All bytes of the pages, [pages, bytes] uint8; a cache of another dtype as it is."""
    if cache.dtype is not FP8:
        return cache
    size = (len(cache), cache.stride(0))
    return cache.view(torch.uint8).as_strided(size, (cache.stride(0), 1), cache.storage_offset())


def scales_of(cache: torch.Tensor) -> torch.Tensor:
    """The scales of a cache, [pages, page_size, heads] float32; a view."""
    num_pages, page_size, num_heads, dim = cache.shape
    size = (num_pages, num_heads * page_size * SCALE_BYTES)
    first = cache.storage_offset() + page_size * num_heads * dim
    raw = cache.view(torch.uint8).as_strided(size, (cache.stride(0), 1), first)
    return raw.view(torch.float32).unflatten(1, (num_heads, page_size)).transpose(1, 2)


def write_fp8_cache(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """As `reference.write_cache`, for caches in FP8."""
    page, offset = slots // keys.shape[1], slots % keys.shape[1]
    for new, cache in ((key, keys), (value, values)):
        wide = new.float()
        scale = (wide.abs().amax(-1) / MAX_FP8).clamp_min(1e-12)
        # a multiplication by the reciprocal, as in the kernel
        numbers = (wide * (1 / scale).unsqueeze(-1)).clamp(-MAX_FP8, MAX_FP8).to(FP8)
        cache.view(torch.uint8)[page, offset] = numbers.view(torch.uint8)
        scales_of(cache)[page, offset] = scale


def read_slots(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[slots, heads, dim] in `dtype`, of a cache in FP8."""
    page, offset = slots // cache.shape[1], slots % cache.shape[1]
    numbers = cache.view(torch.uint8)[page, offset].view(FP8)
    return numbers.to(dtype) * scales_of(cache)[page, offset].to(dtype).unsqueeze(-1)
