"""Tensors of a checkpoint that do not change what the model computes: they are skipped, and the log names them.

These are buffers that are computed here, scales of a quantized KV cache, layers beyond the number in config.json, and
heads of other tasks (v_head of a trained policy, qa_outputs). A tensor inside a layer that runs is never skipped:
without a bias or a norm the results would be those of another model, so it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blk|blocks?|h)\.(\d+)\.")
_BUFFER = re.compile(
    r"(?:^|\.)(?:rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|position_ids|masked_bias|(?:q|k|v|kv|prob)_scale"
    r"|[kv]_proj\.output_scale)$"
)


def is_unused(name: str, num_layers: int) -> bool:
    """Whether a tensor that no rule matches may be skipped."""
    return is_buffer(name) or _LAYER.search(name) is None or is_past_layers(name, num_layers)


def is_buffer(name: str) -> bool:
    return _BUFFER.search(name) is not None


def is_past_layers(name: str, num_layers: int) -> bool:
    found = _LAYER.search(name)
    return found is not None and int(found[1]) >= num_layers


def count_layers(targets: Iterable[str]) -> int:
    """The number of layers, from the target names of a model."""
    return max((int(found[1]) + 1 for name in targets if (found := _LAYER.search(name))), default=0)
