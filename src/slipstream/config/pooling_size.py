"""Computes the memory of pooling: stored queries, results, and temporaries from hidden states to results."""

from __future__ import annotations

from slipstream.cache_spec import ITEMSIZE
from slipstream.config.config import EngineConfig
from slipstream.config.pooling_info import PoolingInfo

VOCABULARY_CHUNK = 2048
"""Tokens whose vocabulary-sized weights are computed together."""

TOKENS_AT_ONCE = 2048
"""Tokens whose results are computed together, for results of one vector per token."""

MAX_SCORES = 2**24
"""Scores of token vectors, and elements of token vectors on each side, that late interaction computes together."""
KEPT, KEPT_OF_LATE = 2**24, 2**26
"""Elements in stored queries; and for a late-interaction model."""


def max_kept(pooling: PoolingInfo | None) -> int:
    """Maximum number of tokens of stored queries."""
    if pooling is None or "token_embed" not in pooling.tasks:
        return 0
    return (KEPT_OF_LATE if pooling.late else KEPT) // pooling.token_size


def query_bytes(config: EngineConfig) -> int:
    """Bytes of stored queries."""
    pooling = config.model.pooling
    size = 0 if pooling is None else pooling.token_size
    return config.scheduler.max_kept * size * max(ITEMSIZE[config.model.dtype], 4)


def pooled_bytes(config: EngineConfig) -> int:
    """Bytes of one result buffer for a vector per row. A model that generates gets them when it pools."""
    return 0 if config.model.generates else pooled_row_bytes(config)


def pooled_row_bytes(config: EngineConfig) -> int:
    pooling, size = config.model.pooling, max(ITEMSIZE[config.model.dtype], 4)
    if pooling is None:
        return 0
    return config.scheduler.max_num_seqs * max(pooling.embed_size, pooling.num_labels) * size


def pool_head_bytes(config: EngineConfig) -> int:
    """Bytes from hidden states to one vector per row, for a model that only pools."""
    scheduler, info, pooling = config.scheduler, config.model.info, config.model.pooling
    assert pooling is not None, "a model generates or pools"
    size, real = ITEMSIZE[config.model.dtype], max(ITEMSIZE[config.model.dtype], 4)
    hidden, tokens, rows = info.hidden_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    if _only_sparse(config):
        chunk = min(tokens, VOCABULARY_CHUNK) * info.vocab_size * (size + real)
        return 4 * tokens * hidden * size + chunk + 4 * (rows + 1) * info.vocab_size * real
    widest = max(hidden * len(pooling.methods), pooling.embed_size, pooling.num_labels, *pooling.module_sizes)
    # vectors in float32, before and after a GEMM and a norm
    return tokens * hidden * size + rows * (hidden + 3 * widest) * real


def token_result_bytes(config: EngineConfig) -> int:
    """Additional bytes of a step with results per token, for a model that only pools."""
    vectors, width = token_vectors(config)
    if not vectors or _only_sparse(config):
        return 0
    scheduler, info, pooling = config.scheduler, config.model.info, config.model.pooling
    assert pooling is not None, "a model generates or pools"
    size, real = ITEMSIZE[config.model.dtype], max(ITEMSIZE[config.model.dtype], 4)
    all_hidden = scheduler.max_num_batched_tokens * config.hidden_width * size
    # a prompt in several steps keeps its hidden states until it ends, and another may begin in that step
    kept = 0 if scheduler.is_encoder else 2 * scheduler.max_model_len * info.hidden_size * size
    # vectors in float32, before and after a GEMM and a norm
    widest = max(info.hidden_size, width, *pooling.module_sizes)
    made = min(vectors, TOKENS_AT_ONCE) * (info.hidden_size + 3 * widest) * real
    compared = 0
    if scheduler.max_kept:
        # documents exist in parts and as a whole; groups of them and their queries exist twice, and their products
        queries = max(MAX_SCORES, min(scheduler.max_kept, scheduler.max_model_len) * pooling.token_size)
        compared = (2 * vectors * width + 2 * queries + 2 * max(MAX_SCORES, scheduler.max_model_len)) * real
    return all_hidden + kept + made + compared


def _only_sparse(config: EngineConfig) -> bool:
    """Whether the model only computes vocabulary weights."""
    return config.model.pooling is not None and config.model.pooling.tasks == ("sparse",)


def token_vectors(config: EngineConfig) -> tuple[int, int]:
    """Maximum number of vectors per token in the results of a step, and their width; for vocabulary weights, vectors
    per row."""
    scheduler, pooling = config.scheduler, config.model.pooling
    assert pooling is not None, "a model generates or pools"
    if _only_sparse(config):
        return scheduler.max_num_seqs, config.model.info.vocab_size
    widths = {"token_embed": pooling.token_size, "token_classify": pooling.num_labels, "sparse": 1}
    width = max((widths.get(task, 0) for task in pooling.tasks), default=0)
    # a prompt's vectors of earlier steps are part of the result of its last step
    before = 0 if scheduler.is_encoder else scheduler.max_model_len
    return (scheduler.max_num_batched_tokens + before, width) if width else (0, 0)
