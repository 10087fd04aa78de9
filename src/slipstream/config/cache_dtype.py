"""The dtype of the KV cache, from the option `kv_cache_dtype`."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.cache_spec import CacheSpec
from slipstream.errors import InvalidOption


def resolve_cache_dtype(option: str, dtype: str) -> str:
    """`dtype`: of the model."""
    return dtype if option == "auto" else "fp8"


def check_cache_dtype(dtype: str, specs: Sequence[CacheSpec]) -> None:
    """Raises InvalidOption if the cache sites of the model cannot have this dtype."""
    if dtype != "fp8":
        return
    if not specs:
        raise InvalidOption("kv_cache_dtype is fp8, and the model has no KV cache; leave it out")
    if any(spec.value_dim for spec in specs):
        raise InvalidOption("kv_cache_dtype is fp8, which latent attention (MLA) does not support; use auto")
    if odd := [spec.head_dim for spec in specs if spec.head_dim % 4]:
        raise InvalidOption(f"kv_cache_dtype is fp8, and heads have {odd[0]} elements, no multiple of 4; use auto")
