"""check_info: rejects a model with impossible sizes, before memory is allocated and before a step would fail."""

from __future__ import annotations

import math

import msgspec

from slipstream.config.model_info import ModelInfo
from slipstream.errors import BadCheckpoint

# maxima far beyond any model: a wrong number must not make the start take hours
_MAX = {
    "vocab_size": 2**27, "hidden_size": 2**24, "num_layers": 2**12, "num_heads": 2**16, "num_kv_heads": 2**16,
    "head_dim": 2**16, "ffn_size": 2**27, "max_positions": 2**31 - 1,
}  # fmt: skip


def check_info(info: ModelInfo) -> ModelInfo:
    """Returns `info` without end tokens outside the vocabulary, which are never drawn. Raises for impossible sizes."""
    for name, limit in _MAX.items():
        count = getattr(info, name)
        least = 0 if name == "ffn_size" else 1  # Mamba has no feed-forward
        if not least <= count <= limit:
            raise BadCheckpoint(f"{info.architecture} has a {name} of {count}; it must be {least} to {limit:,}")
    if info.num_types < 0 or info.position_offset < 0:
        raise BadCheckpoint(
            f"{info.architecture} has {info.num_types} token types and {info.position_offset} unused positions; they "
            "must be 0 or more"
        )
    if info.num_heads % info.num_kv_heads:
        raise BadCheckpoint(
            f"{info.architecture} has {info.num_heads} heads for {info.num_kv_heads} heads of keys and values; "
            "the first must be a multiple of the second"
        )
    if not (math.isfinite(info.norm_eps) and info.norm_eps >= 0):
        raise BadCheckpoint(f"{info.architecture} has a norm epsilon of {info.norm_eps}; it must be 0 or more")
    if not (math.isfinite(info.rope.theta) and info.rope.theta > 0):
        raise BadCheckpoint(f"{info.architecture} has a rope_theta of {info.rope.theta}; it must be over 0")
    ends = tuple(token for token in info.eos_token_ids if 0 <= token < info.vocab_size)
    return msgspec.structs.replace(info, eos_token_ids=ends)
