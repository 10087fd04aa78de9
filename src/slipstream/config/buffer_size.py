"""Computes the sizes of the buffers between host and device: what a step uploads, and what its results take.

Host buffers are pinned and allocated once, at the start, so each size is an upper bound.
"""

from __future__ import annotations

from slipstream.checkpoint.model_info import ModelInfo, ModelSizes
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.config.config import MAX_STEP_LOGPROBS, EngineConfig
from slipstream.contracts.cache_spec import ITEMSIZE, STATE_CHUNK
from slipstream.params.sampling import MAX_BAD_WORDS, MAX_PACKED_LOGPROBS

MAX_BIASED_IDS = 1024  # tokens whose logits the logits processors of one row may add to, if they see tokens only
MAX_KEPT_MASKS = 16384
MAX_KEPT_MASK_BYTES = 32 << 20
_MASKS_PER_SET = 4  # NUM_WAYS in scheduler/grammar/masks.c
PATCH_INDICES = 160  # bytes of a patch's indices: its place before and after sorting, row, column, 4 taps of a table
ALIGNMENT = 256  # bytes for the alignment of all fields of a result buffer


def arena_bytes(config: EngineConfig) -> int:
    """Upper bound of the bytes that one step uploads, so that nothing is allocated while serving."""
    scheduler = config.scheduler
    tokens = scheduler.max_num_batched_tokens
    per_token = 5 * 8  # row, offset, host token id; index and token of a scored prompt
    cache = config.cache
    new_pages = (tokens // cache.page_size + scheduler.max_num_seqs) * len(cache.groups) * 2 * 8
    # pages that windows give back, in the worst case all of them in one step
    new_pages += sum(num * 2 * 8 for group, num in zip(cache.groups, cache.group_pages, strict=True) if group.window)
    if cache.states is not None:  # row, position and checkpoint of each save, or a checkpoint for each row
        new_pages += max_saves(tokens, scheduler.max_num_seqs) * 3 * 4 + scheduler.max_num_seqs * 4
        new_pages += scheduler.max_drawn * 2 * 4 if scheduler.drafts is not None else 0
    if config.adapters is not None:  # tokens in the order of their adapters, and tiles of them; also of last tokens
        per_token += 2 * (4 + 3 * 4)
        new_pages += 2 * 3 * 4 * config.adapters.max_loras
    if scheduler.prompt_embeds:  # an index and an embedding
        per_token += 8 + config.model.info.hidden_size * (8 if config.model.dtype == "float64" else 4)
    if config.images is not None:  # of a token of an image a row of the arena, and a position of three parts
        per_token += 8 * (1 + 1 + 1 + 3)
        patches = max(config.images.step_patches, config.images.max_patches)
        new_pages += patches * (config.images.patch_bytes + PATCH_INDICES)
    per_row = 2048  # counts, picked rows, sampling parameters, copies
    wanted = tokens * per_token + new_pages + (scheduler.max_drawn + 1) * per_row + scheduler.staged_ints * 8 + 65536
    return -(-wanted // 16) * 16


def max_saves(tokens: int, rows: int) -> int:
    """Maximum number of checkpoints that a step of so many tokens and rows saves: a row that begins anywhere crosses at
    most one border more than its tokens fill chunks."""
    return min(tokens, tokens // STATE_CHUNK + rows)


def staged_ints(max_length: int, page_size: int, max_num_seqs: int, num_groups: int, vocab_size: int) -> int:
    """Integers that the admissions of one step may upload: at least those of the largest single request."""
    alone = max_length + 3 * num_groups * -(-max_length // page_size)
    # a list of ids is never longer than the vocabulary; see Request.num_staged_ids
    ids = (1 + 1 + 3 + 1) * vocab_size + 2 * MAX_BAD_WORDS
    return 2 * alone + 16 * max_num_seqs + ids


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits of a mask: a bit per token, and one for the end of the grammar."""
    return (vocab_size + 32) // 32


def mask_bytes(rows: int, vocab_size: int, max_drafts: int = 0, max_step_drafts: int = 0) -> int:
    """Bytes of the masks of one step: the entry of each draw, and a mask with its target for each row but the padding
    row and for each draft. `max_drafts`: of a row; `max_step_drafts`: of all rows."""
    num_masks = rows - 1 + max_step_drafts
    small = _aligned(rows * (1 + max_drafts) * 4) + _aligned(num_masks * 4)
    return _aligned(small + num_masks * mask_words(vocab_size) * 4)


def num_kept_masks(vocab_size: int) -> int:
    """Masks of grammars that host and device keep, because states of texts repeat."""
    most = min(MAX_KEPT_MASKS, MAX_KEPT_MASK_BYTES // (mask_words(vocab_size) * 4))
    return max(most // _MASKS_PER_SET, 1) * _MASKS_PER_SET


def kept_mask_bytes(vocab_size: int) -> int:
    """Bytes of the masks that the device keeps."""
    return _aligned(num_kept_masks(vocab_size) * mask_words(vocab_size) * 4)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def bias_bytes(rows: int) -> int:
    """Bytes of the biases of one step: the entry of each row, and ids and values for each row but the padding row."""
    return -(-rows * 4 // 16) * 16 + (rows - 1) * 2 * MAX_BIASED_IDS * 4


def result_bytes(config: EngineConfig) -> int:
    """Bytes of one result buffer: token, flags, logprob, rank and MAX_PACKED_LOGPROBS likeliest tokens per drawn
    token."""
    if not config.model.generates:
        return 0
    return (config.scheduler.max_drawn + 1) * 24 * (MAX_PACKED_LOGPROBS + 2)


def max_step_logprobs(info: ModelInfo) -> int:
    """Logprobs of one kind in the results of one step: a few whole vocabularies, or one large vocabulary."""
    return max(MAX_STEP_LOGPROBS, 1 + info.vocab_size)


def result_growth_bytes(config: EngineConfig) -> int:
    """Maximum growth of one result buffer: wide logprobs, requested ids and scored prompts; vectors of all tokens."""
    real = max(ITEMSIZE[config.model.dtype], 4)
    if not config.model.generates:
        vectors, width = token_vectors(config)
        return vectors * (width + 1) * real + ALIGNMENT if vectors else 0  # and a sum per vector
    # a logprob and an id each; of requested ids only the logprob
    return _step_logprobs(config) * (8 + real + real) + score_bytes(config) // 2 + ALIGNMENT


def list_bytes(config: EngineConfig) -> int:
    """Bytes of requested ids, stop ids and bad words: their tables, two of each while one is replaced, and temporaries
    of one table."""
    if not config.model.generates:
        return 0
    drafts = config.scheduler.drafts
    tables = _step_logprobs(config) * 2 * (4 + 8) + config.scheduler.max_step_logprobs * 2 * 4
    return tables + config.scheduler.max_step_logprobs * 40 * (1 if drafts is None else 1 + drafts.num_drafts)


def score_bytes(config: EngineConfig) -> int:
    """Bytes of the logprobs of prompt tokens, in parts and as a whole, before they are in the result buffer."""
    if not config.model.generates:
        return 0
    scheduler, real = config.scheduler, max(ITEMSIZE[config.model.dtype], 4)
    num = min(scheduler.max_step_logprobs, scheduler.max_num_batched_tokens * (1 + config.model.info.vocab_size))
    return 2 * num * (8 + real)


def _step_logprobs(config: EngineConfig) -> int:
    """Maximum number of logprobs of one kind that a step returns for its rows."""
    scheduler = config.scheduler
    return min(scheduler.max_step_logprobs, scheduler.max_num_seqs * (1 + config.model.info.vocab_size))


# Computes an upper bound of the activations of one step of a model, by its shape and by the size of the step.

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


# Computes the memory of pooling: stored queries, results, and temporaries from hidden states to results.

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
    return (KEPT_OF_LATE if pooling.late_interaction else KEPT) // pooling.token_size


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
