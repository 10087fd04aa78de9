"""Computes an upper bound of the activations of one step of a model, by its shape and by the size of the step."""

from __future__ import annotations

from slipstream.cache_spec import ITEMSIZE
from slipstream.config.model_info import ModelInfo
from slipstream.config.model_sizes import ModelSizes

GATHERED_KEYS = 65_536
"""Maximum number of key positions of several rows that one attention call on the CPU gathers; a longer row is computed
alone. The C kernels for float32 gather nothing, but are used only once they are compiled."""

MAX_SPLITS, SMALLEST_SPLIT = 32, 256
"""Maximum number of splits of a row's keys by attention on a GPU, and minimum number of keys per split."""

PENALTY_BYTES = 5  # per token of the vocabulary: a count, and a flag for the prompt
SORTED_BYTES = 8  # an index per sorted logit


def activation_bytes(
    info: ModelInfo, sizes: ModelSizes, dtype: str, *, on_cpu: bool, rows: int, tokens: int, length: int, groups: int
) -> tuple[int, int, int]:
    """Bytes of the largest step: hidden states, workspace of attention, and logits."""
    size, real = ITEMSIZE[dtype], max(ITEMSIZE[dtype], 4)
    stream = 4 * info.hidden_size  # x, its norm, the residual before and after
    hidden = tokens * (stream + sizes.widest + sizes.rotary) * size + tokens * 64 + sizes.per_step * real
    attention = rows * min(MAX_SPLITS, -(-length // SMALLEST_SPLIT)) * sizes.split_sums * 4
    if sizes.relative_heads:  # a score per token, head and distance; on the CPU also per pair of tokens
        distances = tokens * sizes.relative_heads * (2 * length - 1) * size
        hidden += sizes.relative_terms * distances
        hidden += 3 * tokens * sizes.relative_heads * length * size if on_cpu else 0
    if on_cpu:
        gathered = min(max(GATHERED_KEYS, length), rows * length)
        masked = groups * (rows + tokens) * length  # a mask for each single row and for each token of chunks
        slots = groups * rows * length  # int64 slots of those keys, with and without the unseen ones
        attention = 2 * gathered * sizes.keys * size + masked * (size + 1) + 2 * slots * 8
        attention += 3 * sizes.scored_heads * max(tokens * length, gathered) * size
    logits = min(rows, tokens) * (draw_bytes(info.vocab_size, dtype) + info.hidden_size * size)
    return hidden, attention, logits


def draw_bytes(vocab_size: int, dtype: str) -> int:
    """Bytes of the logits of one draw, with every sampling feature."""
    size = ITEMSIZE[dtype]
    # the product, its copy in the logits' dtype, one kept for logprobs, one edited, noise, two sorted or masked
    return vocab_size * (size + 6 * max(size, 4) + SORTED_BYTES + PENALTY_BYTES)
