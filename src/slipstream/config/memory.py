"""Computes an engine's memory before anything is loaded.

The only file with these formulas: the runner sizes its buffers by them, `resolve` leaves room for them, `slipstream
plan` prints them. Weights and cache are exact. Activations are an upper bound: those of the largest possible step, run
eagerly; most steps need a fraction.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slipstream.cache_spec import ITEMSIZE, STATE_CHUNK
from slipstream.config.activation_size import PENALTY_BYTES, activation_bytes
from slipstream.config.adapter_config import AdapterConfig
from slipstream.config.config import MAX_STEP_LOGPROBS, EngineConfig
from slipstream.config.model_info import ModelInfo
from slipstream.config.pooling_info import PoolingInfo, reductions_of
from slipstream.config.tier_size import NUM_REGIONS, region_bytes
from slipstream.params import MAX_PACKED_LOGPROBS

SCORED_AT_ONCE = 64
"""Prompt tokens whose logits are computed together."""

LOGITS_AT_ONCE = 5
"""Simultaneous copies of all rows' logits on a GPU, in steps whose sampling features cannot be captured."""

VOCABULARY_CHUNK = 2048
"""Tokens whose vocabulary-sized weights are computed together."""

TOKENS_AT_ONCE = 2048
"""Tokens whose results are computed together, for results of one vector per token."""

MAX_SCORES = 2**24
"""Scores of token vectors, and elements of token vectors on each side, that late interaction computes together."""
KEPT, KEPT_OF_LATE = 2**24, 2**26
"""Elements in stored queries; and for a late-interaction model."""

ALIGNMENT = 256  # bytes for the alignment of all fields of a result buffer
FEW_ADAPTED, ADAPTED_INPUTS = 512, 512
"""Tokens up to which products with adapters split their inputs, and inputs of one part."""

WORKSPACE = 256 * 2**20  # bytes that libraries and the driver allocate for graphs
MAX_BIASED_IDS = 1024  # tokens whose logits the logits processors of one row may add to, if they see tokens only


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. On a GPU, fields that end with `_host` are pinned host memory, all others device memory."""

    weights: int  # parameters and the rope table
    adapters: int  # slots of LoRA adapters
    adapters_host: int  # LoRA adapters in host memory
    cache: int  # pages
    tier: int  # buffers for pages on their way to and from the second tier
    tier_host: int  # pages of the second tier, and their numbers
    states: int  # recurrent states of all rows and of the padding row
    checkpoints: int  # recurrent states kept for prefix caching
    tables: int  # page tables, lengths and sampling parameters of all rows; outputs of captured steps for their heads
    features: int  # penalty counts and biases, if every row uses them; stored queries
    staging: int
    staging_host: int
    masks: int  # of structured output and logits processors, if every row has some
    masks_host: int
    results: int
    results_host: int
    result_growth: int  # growth of the result buffers if a step returns the maximum number of logprobs
    result_growth_host: int
    hidden: int  # of the largest step, inside one block
    attention: int  # gathered keys and masks, inside one block
    logits: int  # from the LM head's GEMM to the drawn tokens, with every sampling feature; or to pooled results
    unread: int  # in addition, in steps with results per token: hidden states of all tokens, their logits or vectors
    graphs: int = 0  # activations of captured steps, which have memory of their own

    @property
    def activations(self) -> int:
        """The forward's are freed before the head's are allocated. `unread` is not part of the measured steps."""
        return max(self.hidden + self.attention, self.logits) + self.unread

    @property
    def of_device(self) -> int:
        rings = self.staging + self.masks + self.results + self.result_growth
        kept = self.cache + self.tier + self.states + self.checkpoints
        return (
            self.weights + self.adapters + kept + self.tables + self.features + rings + self.activations + self.graphs
        )

    @property
    def later(self) -> int:
        """Device memory that is not allocated yet when weights are loaded and the largest usual step has run."""
        return self.features + self.result_growth + self.graphs + self.unread

    @property
    def total(self) -> int:
        return (
            self.of_device
            + self.adapters_host
            + self.tier_host
            + self.staging_host
            + self.masks_host
            + self.results_host
            + self.result_growth_host
        )


def estimate_memory(config: EngineConfig, weights: int) -> MemoryEstimate:
    """`weights`: bytes of the model's parameters, from its layout on the meta device."""
    scheduler, cache, info = config.scheduler, config.cache, config.model.info
    rows = scheduler.max_num_seqs + 1
    num_buffers = scheduler.depth + 2
    staging, results = arena_bytes(config), result_bytes(config) + pooled_bytes(config)
    generates = config.model.generates
    # for prompts in several steps, a vector per row is kept for each kind of sum that the model pools by
    pooling = config.model.pooling
    keeps = 0 if pooling is None or scheduler.is_encoder else len(reductions_of(pooling.methods))
    kept = keeps * info.hidden_size * max(ITEMSIZE[config.model.dtype], 4)
    on_cpu = config.device.kind == "cpu"
    hidden, attention, logits = activation_bytes(
        info,
        config.model.sizes,
        config.model.dtype,
        on_cpu=on_cpu,
        rows=scheduler.max_drawn,
        tokens=scheduler.max_num_batched_tokens,
        length=scheduler.max_model_len,
        groups=len(cache.groups),
    )
    draft_hidden, draft_head = draft_bytes(config)
    hidden, logits = max(hidden, draft_hidden), logits + draft_head
    if not generates:
        logits = pool_head_bytes(config)
    if cache.states is not None:
        hidden += recurrent_bytes(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    size, adapters = ITEMSIZE[config.model.dtype], config.adapters
    if adapters is not None:
        hidden += adapted_bytes(config, adapters)
    captures = not on_cpu and not config.device.eager
    num_drafts = 0 if scheduler.drafts is None else scheduler.drafts.num_drafts
    masks = 0
    if generates:
        masks = mask_bytes(rows, info.vocab_size, num_drafts, scheduler.max_step_drafts) + bias_bytes(rows)
    tables = rows * (len(cache.groups) * 8 * -(-scheduler.max_model_len // cache.page_size) + 256 + kept)
    if scheduler.drafts is not None:  # token ids of all positions, and drafts of each row
        tables += id_bytes(cache.group_pages, cache.page_size) + rows * 8 * scheduler.drafts.num_drafts
        if config.draft is not None:
            pages = config.draft.scratch_pages(scheduler.drafts.num_drafts, cache.page_size)
            tables += rows * pages * config.draft.page_bytes
        if not cache.groups:  # a table of its own
            own = rows * -(-scheduler.max_model_len // cache.page_size)
            tables += id_bytes((1 + own,), cache.page_size) + 8 * own
    return MemoryEstimate(
        weights=weights,
        adapters=0 if adapters is None else adapters.max_loras * adapters.num_elements * size,
        adapters_host=0 if adapters is None else adapters.max_cpu_loras * adapters.num_elements * size,
        cache=cache.num_bytes,
        tier=NUM_REGIONS * region_bytes(cache.groups, cache.states) if cache.tier_bytes else 0,
        tier_host=cache.tier_bytes,
        states=0 if cache.states is None else rows * cache.states.num_bytes,
        checkpoints=0 if cache.states is None else cache.states.num_checkpoints * cache.states.checkpoint_bytes,
        tables=tables + (sum(graph_output_bytes(config)) if captures else 0),
        features=query_bytes(config)
        + (feature_bytes(info, config.model.dtype, scheduler.max_num_seqs) if generates else 0),
        staging=staging,
        staging_host=num_buffers * staging,
        masks=masks,
        masks_host=masks,  # one buffer
        results=num_buffers * results,
        results_host=num_buffers * results,
        result_growth=num_buffers * result_growth_bytes(config) + score_bytes(config) + list_bytes(config),
        result_growth_host=num_buffers * result_growth_bytes(config),
        hidden=hidden,
        attention=attention,
        logits=logits,
        unread=unread_bytes(config),
        graphs=graph_bytes(config, hidden + attention) + WORKSPACE if captures else 0,
    )


def adapted_bytes(config: EngineConfig, adapters: AdapterConfig) -> int:
    """Bytes that adapters add to a product: inputs and outputs of B, and on the CPU copies of the tokens of an adapter.
    In steps of few tokens there are several partial sums of the inputs of B."""
    tokens, info, size = config.scheduler.max_num_batched_tokens, config.model.info, ITEMSIZE[config.model.dtype]
    largest = max(info.hidden_size, config.model.sizes.widest)
    inner = max(tokens, min(tokens, FEW_ADAPTED) * -(-largest // ADAPTED_INPUTS)) * adapters.widest * 4
    return inner + tokens * (info.hidden_size + 2 * largest) * size


def id_bytes(group_pages: Sequence[int], page_size: int) -> int:
    """Bytes of the token ids of all positions, which drafts are found in: those of one group, at most the largest."""
    return max(group_pages, default=0) * page_size * 4


def draft_bytes(config: EngineConfig) -> tuple[int, int]:
    """Bytes of a drafter's model: in a step's forward, beside the hidden states of the target; and in its head, which
    runs it over all draws and one more token of each row, or over the blocks of all rows, while the target's logits
    exist."""
    if config.draft is None or config.scheduler.drafts is None:
        return 0, 0
    scheduler, model = config.scheduler, config.draft.model
    tokens, rows, drafts = scheduler.max_num_batched_tokens, scheduler.max_drawn + scheduler.max_num_seqs, 1
    if config.draft.drafts_in_blocks:
        drafts = config.scheduler.drafts.num_drafts
        rows = scheduler.max_num_seqs * config.draft.positions_of(drafts)

    def of(num_rows: int, num_tokens: int) -> int:
        hidden, attention, _ = activation_bytes(
            model.info,
            model.sizes,
            model.dtype,
            on_cpu=config.device.kind == "cpu",
            rows=num_rows,
            tokens=num_tokens,
            length=scheduler.max_model_len,
            groups=len(config.cache.groups),
        )
        return hidden + attention

    size = ITEMSIZE[model.dtype]
    target_hidden = 2 * tokens * config.hidden_width * size
    table = 4 * rows * len(config.cache.groups) * 8 * -(-scheduler.max_model_len // config.cache.page_size)
    logits = scheduler.max_num_seqs * drafts * model.info.vocab_size * size
    return of(scheduler.max_drawn, tokens) + target_hidden, of(rows, rows) + table + logits


def feature_bytes(info: ModelInfo, dtype: str, rows: int) -> int:
    """Bytes of penalty counts and biases, if every row uses them."""
    # a table grows by doubling, and the old one exists during the copy
    return 3 * (rows + 1) * info.vocab_size * (PENALTY_BYTES + max(ITEMSIZE[dtype], 4)) // 2


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


def graph_bytes(config: EngineConfig, forward: int) -> int:
    """Bytes of captured steps: they share the memory of their temporaries; decode steps also keep their hidden states
    and lengths there."""
    rows, info, size = config.scheduler.max_drawn, config.model.info, ITEMSIZE[config.model.dtype]
    # on a GPU the head holds the product, its float32 copy, and a copy for logprobs
    head = rows * info.vocab_size * (size + 2 * max(size, 4)) if config.model.generates else pool_head_bytes(config)
    head += draft_bytes(config)[1]
    kept = sum(sizes_up_to(rows, first_steps=8))
    return max(forward, head) + kept * (config.hidden_width * size + 8)


def graph_output_bytes(config: EngineConfig) -> tuple[int, int]:
    """Bytes of the shared outputs of captured steps: hidden states for their heads, and results."""
    hidden = config.scheduler.max_num_batched_tokens * config.hidden_width * ITEMSIZE[config.model.dtype]
    return hidden, max(result_bytes(config), _pooled_row_bytes(config))


def sizes_up_to(limit: int, first_steps: int) -> list[int]:
    """1, 2, 4 and so on, then in steps that waste at most a fifth and are at least `first_steps`.

    But 208 instead of 224, for which cuBLAS takes as long as for 256 (H200, docs/log/).
    """
    sizes, size = [], 1
    while size < limit:
        sizes.append(208 if size == 224 else size)
        size += size if size < 2 * first_steps else max(first_steps, 1 << (size.bit_length() - 3))
    return [*sizes, limit]


def recurrent_bytes(tokens: int, rows: int) -> int:
    """Bytes of the list of chunks that recurrent layers share in a step, and of the temporaries that make it."""
    return (tokens // STATE_CHUNK + 2 * rows + 1) * 160 + (rows + 1) * 64


def max_saves(tokens: int, rows: int) -> int:
    """Maximum number of checkpoints that a step of so many tokens and rows saves: a row that begins anywhere crosses at
    most one border more than its tokens fill chunks."""
    return min(tokens, tokens // STATE_CHUNK + rows)


def unread_bytes(config: EngineConfig) -> int:
    """Additional bytes of a step with results per token. Other steps only keep hidden states of last tokens, logits of
    rows, or vectors."""
    scheduler, info, size = config.scheduler, config.model.info, ITEMSIZE[config.model.dtype]
    tokens, real = scheduler.max_num_batched_tokens, max(size, 4)
    all_hidden = tokens * config.hidden_width * size
    if config.model.generates:
        # prompt tokens are scored in groups of this size, however few rows there are: the product, its float32 copy,
        # and the temporaries of logprobs
        num_scored = max(0, min(SCORED_AT_ONCE, tokens) - scheduler.max_num_seqs)
        return all_hidden + num_scored * info.vocab_size * (size + 2 * real)
    vectors, width = _token_vectors(config)
    if not vectors or _only_sparse(config):
        return 0
    pooling = config.model.pooling
    assert pooling is not None
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
    per_row = 2048  # counts, picked rows, sampling parameters, copies
    wanted = tokens * per_token + new_pages + (scheduler.max_drawn + 1) * per_row + scheduler.staged_ints * 8 + 65536
    return -(-wanted // 16) * 16


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits of a mask: a bit per token, and one for the end of the grammar."""
    return (vocab_size + 32) // 32


def mask_bytes(rows: int, vocab_size: int, max_drafts: int = 0, max_step_drafts: int = 0) -> int:
    """Bytes of the masks of one step: the entry of each draw, and a mask for each row but the padding row and for each
    draft. `max_drafts`: of a row; `max_step_drafts`: of all rows."""
    entries = -(-rows * (1 + max_drafts) * 4 // 16) * 16
    return -(-(entries + (rows - 1 + max_step_drafts) * mask_words(vocab_size) * 4) // 16) * 16


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
        vectors, width = _token_vectors(config)
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


def _step_logprobs(config: EngineConfig) -> int:
    """Maximum number of logprobs of one kind that a step returns for its rows."""
    scheduler = config.scheduler
    return min(scheduler.max_step_logprobs, scheduler.max_num_seqs * (1 + config.model.info.vocab_size))


def score_bytes(config: EngineConfig) -> int:
    """Bytes of the logprobs of prompt tokens, in parts and as a whole, before they are in the result buffer."""
    if not config.model.generates:
        return 0
    scheduler, real = config.scheduler, max(ITEMSIZE[config.model.dtype], 4)
    num = min(scheduler.max_step_logprobs, scheduler.max_num_batched_tokens * (1 + config.model.info.vocab_size))
    return 2 * num * (8 + real)


def pooled_bytes(config: EngineConfig) -> int:
    """Bytes of one result buffer for a vector per row. A model that generates gets them when it pools."""
    return 0 if config.model.generates else _pooled_row_bytes(config)


def _pooled_row_bytes(config: EngineConfig) -> int:
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


def _only_sparse(config: EngineConfig) -> bool:
    """Whether the model only computes vocabulary weights."""
    return config.model.pooling is not None and config.model.pooling.tasks == ("sparse",)


def _token_vectors(config: EngineConfig) -> tuple[int, int]:
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
