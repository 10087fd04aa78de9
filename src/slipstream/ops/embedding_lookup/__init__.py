"""Embedding lookup of token ids, and RoPE table lookup of their positions."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.embedding_lookup import reference

lookup_embedding_and_rope = by_device(reference.lookup_embedding_and_rope, "slipstream.ops.embedding_lookup.triton")

__all__ = ["lookup_embedding_and_rope"]
