"""Tensors of a checkpoint that change nothing the model computes: they are left out, and the log names them.

Buffers that are computed here, scales for a quantised KV cache, layers past the last one that config.json counts, and
heads of other tasks (v_head of a trained policy, qa_outputs). A tensor inside a layer that is computed is none of
these: leaving out a bias or a norm would give another model's results, so it stays an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blk|blocks?|h)\.(\d+)\.")
_BUFFER = re.compile(
    r"(?:^|\.)(?:rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|position_ids|masked_bias|(?:q|k|v|kv|prob)_scale)$"
)


def is_unused(name: str, num_layers: int) -> bool:
    """Whether a tensor that no rule knows may be left out."""
    return is_buffer(name) or _LAYER.search(name) is None or is_past_layers(name, num_layers)


def is_buffer(name: str) -> bool:
    return _BUFFER.search(name) is not None


def is_past_layers(name: str, num_layers: int) -> bool:
    found = _LAYER.search(name)
    return found is not None and int(found[1]) >= num_layers


def count_layers(places: Iterable[str]) -> int:
    """From the places of a model."""
    return max((int(found[1]) + 1 for name in places if (found := _LAYER.search(name))), default=0)
