"""Cache specs and groups for tests, with the sizes that matter to each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.contracts.cache_spec import CacheGroup, CacheSpec, PagedSpec, WindowSpec

if TYPE_CHECKING:
    import torch  # not needed by scripted cores, which start in a process of their own


def make_spec(
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 16,
    *,
    num_heads: int = 4,
    dtype: str | torch.dtype = "float32",
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    value_dim: int = 0,
) -> CacheSpec:
    facts = dict(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=str(dtype).removeprefix("torch."),
        page_size=page_size, soft_cap=soft_cap, sinks=sinks, value_dim=value_dim,
    )  # fmt: skip
    return WindowSpec(**facts, window=window) if window else PagedSpec(**facts)


def one_group(num_kv_heads: int, head_dim: int, *, num_sites: int = 1, **facts) -> tuple[CacheGroup, ...]:
    return (CacheGroup(make_spec(num_kv_heads, head_dim, **facts), tuple(range(num_sites))),)
