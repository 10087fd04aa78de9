"""What an engine's memory will be, before anything is loaded.

The one place that knows: the runner sizes its buffers by it, `resolve` leaves room for it, `slipstream plan` shows it.
Weights and cache are exact. Activations are those of the largest step a plan can hold, by the eager path, and an
upper bound: most steps take a fraction.
"""

from __future__ import annotations

import msgspec

from slipstream.config.config import MOST_REPORTED, EngineConfig
from slipstream.config.model_info import ModelInfo
from slipstream.params import LONG_REPORT

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

GATHERED_KEYS = 65_536
"""Key positions of several rows that one attention call on the CPU gathers at most; a longer row goes alone."""

SCORED_AT_ONCE = 64
"""Prompt tokens whose logits are made together."""

MAX_SPLITS, SMALLEST_SPLIT = 32, 256
"""Into how many pieces attention on a GPU cuts a row's keys at most, and the keys of one at least."""

VOCABULARY_CHUNK = 2048
"""Tokens whose weights of all words are made together."""

ALIGNMENT = 256  # of a slot's fields, all together
PENALTY_BYTES = 5  # for each token of the vocabulary: a count and whether the prompt has it
SUM_OF_SIZES = 8  # times the largest size that steps are padded to: all sizes, and rows of each beside its tokens
WORKSPACE = 256 * 2**20  # that libraries and the driver take for graphs
SORTED_BYTES = 8  # an index beside each sorted logit


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. On a GPU what ends with `_host` is pinned memory of the host, all else is the device's."""

    weights: int  # parameters and the rope table
    cache: int
    tables: int  # page tables, lengths, sampling parameters of all rows
    features: int  # penalties' counts and biases, if every row asked for them at once
    staging: int
    staging_host: int
    results: int
    results_host: int
    reports: int  # what results take more when a step reports as many logprobs as it may
    reports_host: int
    hidden: int  # of the largest step, inside one block
    attention: int  # gathered keys and masks, inside one block
    logits: int  # from the head's product to the drawn tokens, every sampling feature in use; or to pooled results
    graphs: int = 0  # activations of captured steps, which have memory of their own, and what they leave in it
    unread: int = 0  # among the activations: of tokens that few steps ask for, hidden states, logits and lines

    @property
    def activations(self) -> int:
        """The body's are gone when the head's are made."""
        return max(self.hidden + self.attention, self.logits)

    @property
    def of_device(self) -> int:
        rings = self.staging + self.results + self.reports
        return self.weights + self.cache + self.tables + self.features + rings + self.activations + self.graphs

    @property
    def later(self) -> int:
        """Of the device: what is not there yet when weights are loaded and the largest usual step has run."""
        return self.features + self.reports + self.graphs + self.unread

    @property
    def total(self) -> int:
        return self.of_device + self.staging_host + self.results_host + self.reports_host


def plan_memory(config: EngineConfig, weights: int) -> MemoryPlan:
    """`weights` as the model laid out without memory says."""
    scheduler, cache, info = config.scheduler, config.cache, config.model.info
    rows = scheduler.max_num_seqs + 1
    slots = scheduler.depth + 2
    staging, results = arena_bytes(config), result_bytes(config) + pooled_bytes(config)
    generates = config.model.generates
    # of prompts that take several steps a model that pools by first or mean keeps a line
    pooling = config.model.pooling
    keeps = pooling is not None and pooling.method in ("first", "mean") and not scheduler.whole
    kept = info.hidden_size * max(ITEMSIZE[config.model.dtype], 4) if keeps else 0
    on_cpu = config.device.kind == "cpu"
    hidden, attention, logits = activation_bytes(
        info,
        config.model.dtype,
        on_cpu=on_cpu,
        rows=scheduler.max_num_seqs,
        tokens=scheduler.max_num_batched_tokens,
        length=scheduler.max_model_len,
        groups=len(cache.groups),
    )
    if not generates:
        logits = pool_head_bytes(config)
    return MemoryPlan(
        weights=weights,
        cache=cache.num_bytes,
        tables=rows * (len(cache.groups) * 8 * -(-scheduler.max_model_len // cache.page_size) + 256 + kept),
        features=feature_bytes(info, config.model.dtype, scheduler.max_num_seqs) if generates else 0,
        staging=staging,
        staging_host=slots * staging,
        results=slots * results,
        results_host=slots * results,
        reports=slots * report_bytes(config) + score_bytes(config) + given_bytes(config),
        reports_host=slots * report_bytes(config),
        hidden=hidden,
        attention=attention,
        logits=logits,
        graphs=0
        if on_cpu or config.device.eager
        else graph_bytes(
            info,
            config.model.dtype,
            max(hidden + attention, logits if generates else 0),  # results of tokens are never captured
            rows=scheduler.max_num_seqs,
            tokens=scheduler.max_num_batched_tokens,
            pages=len(cache.groups) * -(-scheduler.max_model_len // cache.page_size),
            # a model that generates is seldom asked to pool
            twice=not generates and not scheduler.whole,
        ),
        unread=unread_bytes(config),
    )


def feature_bytes(info: ModelInfo, dtype: str, rows: int) -> int:
    """Of penalties' counts and biases, if every row asked for them at once."""
    # a table grows by doubling, and while it does the old one is there too
    return 3 * (rows + 1) * info.vocab_size * (PENALTY_BYTES + max(ITEMSIZE[dtype], 4)) // 2


def graph_bytes(
    info: ModelInfo, dtype: str, activations: int, *, rows: int, tokens: int, pages: int, twice: bool
) -> int:
    """Of captured steps: they share the memory that one of them works in, and each keeps its hidden states and page
    tables, in which a row has so many `pages`, those of all groups together. Mixed steps that pool come `twice`: with
    rows of one token, and without."""
    times = 2 if twice else 1
    # between a size and its double there are four, so that all sum up to about this, and with them the rows of mixed
    # steps that keep one hidden state a row
    kept = times * SUM_OF_SIZES * (rows + tokens)
    # mixed steps keep hidden states of all tokens or of the last ones, and have tables for all rows
    mixed = sum(size > rows for size in sizes_up_to(tokens, first_steps=64))
    tabled = times * 2 * mixed * rows + sum(sizes_up_to(rows, first_steps=8))
    return activations + kept * info.hidden_size * ITEMSIZE[dtype] + tabled * pages * 8 + WORKSPACE


def sizes_up_to(most: int, first_steps: int) -> list[int]:
    """1, 2, 4 and so on, then in steps that waste at most a fifth and are no smaller than `first_steps`."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < 2 * first_steps else max(first_steps, 1 << (size.bit_length() - 3))
    return [*sizes, most]


def activation_bytes(
    info: ModelInfo, dtype: str, *, on_cpu: bool, rows: int, tokens: int, length: int, groups: int
) -> tuple[int, int, int]:
    """Hidden states, attention's own and logits of the largest step: (hidden, attention, logits)."""
    size, real = ITEMSIZE[dtype], max(ITEMSIZE[dtype], 4)  # logits are float32 at least
    queries, keys = info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
    stream = 4 * info.hidden_size  # x, its norm, the residual before and after
    # projections, their normed and turned copies, the output; or gate and up, and their product
    widest = max(4 * queries + 5 * keys, 3 * info.ffn_size)
    rotary = 3 * info.head_dim  # table rows and their index
    hidden = tokens * (stream + widest + rotary) * size + tokens * 64
    # partial sums of rows cut along their keys, where those of each group have a window of their own
    attention = groups * rows * min(MAX_SPLITS, -(-length // SMALLEST_SPLIT)) * (queries + 2 * info.num_heads) * 4
    if on_cpu:
        gathered = min(max(GATHERED_KEYS, length), rows * length)
        masked = groups * (rows + tokens) * length  # a mask for each single row and for each token of chunks
        slots = groups * rows * length  # int64, where each of those keys lies, with and without what is not seen
        attention = 2 * gathered * keys * size + masked * (size + 1) + 2 * slots * 8
        if info.extra.get("attn_logit_softcapping"):  # bounded scores are made in full
            attention += 3 * info.num_heads * max(tokens * length, gathered) * size
    # the product, its copy in the logits' dtype, one kept for logprobs, one edited, noise, two sorted or masked
    per_logit = size + 6 * real + SORTED_BYTES + PENALTY_BYTES
    # prompt tokens are scored by so many at once, however few rows there are
    drawn = min(max(rows, SCORED_AT_ONCE), tokens)
    logits = drawn * info.vocab_size * per_logit + tokens * info.hidden_size * size
    return hidden, attention, logits


def unread_bytes(config: EngineConfig) -> int:
    """What a step takes more that tells of prompt tokens. Others give hidden states of last tokens, logits of rows, or
    vectors."""
    if not config.model.generates and _token_lines(config)[0]:
        return pool_head_bytes(config)
    scheduler, info, size = config.scheduler, config.model.info, ITEMSIZE[config.model.dtype]
    tokens, rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    num_scored = max(0, min(SCORED_AT_ONCE, tokens) - rows) if config.model.generates else 0
    # the product, its copy in float32, and what the report makes of it
    return tokens * info.hidden_size * size + num_scored * info.vocab_size * (size + 2 * max(size, 4))


def arena_bytes(config: EngineConfig) -> int:
    """An upper bound of what one step may stage, so that nothing is allocated while serving."""
    scheduler = config.scheduler
    tokens = scheduler.max_num_batched_tokens
    per_token = 5 * 8  # row, offset, given id; place and token of a scored prompt
    cache = config.cache
    new_pages = (tokens // cache.page_size + scheduler.max_num_seqs) * len(cache.groups) * 2 * 8
    # pages that windows give back, all of them at once at worst
    new_pages += sum(num * 2 * 8 for group, num in zip(cache.groups, cache.group_pages, strict=True) if group.window)
    per_row = 2048  # counts, picked rows, sampling parameters, copies
    wanted = tokens * per_token + new_pages + (scheduler.max_num_seqs + 1) * per_row + scheduler.staged_ints * 8 + 65536
    return -(-wanted // 16) * 16


def result_bytes(config: EngineConfig) -> int:
    """Of one slot: token, flag, logprob, rank and as many alternatives for each row as no long report has."""
    if not config.model.generates:
        return 0
    return (config.scheduler.max_num_seqs + 1) * 24 * (LONG_REPORT + 2)


def most_reported(info: ModelInfo) -> int:
    """Numbers of one kind in one step's reports: a few whole vocabularies, or one that is larger than usual."""
    return max(MOST_REPORTED, 1 + info.vocab_size)


def report_bytes(config: EngineConfig) -> int:
    """What one slot grows by, at most: long reports, given ids and scored prompts; lines of all tokens."""
    real = max(ITEMSIZE[config.model.dtype], 4)
    if not config.model.generates:
        lines, width = _token_lines(config)
        return lines * (width + 1) * real + ALIGNMENT if lines else 0  # a sum beside each
    # a logprob and an id of each; of given ids the logprob
    return _reported(config) * (8 + real + real) + score_bytes(config) // 2 + ALIGNMENT


def given_bytes(config: EngineConfig) -> int:
    """Of the ids of rows that gave some: twice as many lines and columns as may be, and the table before it."""
    return 2 * 4 * _reported(config) * 4 if config.model.generates else 0


def _reported(config: EngineConfig) -> int:
    """Numbers of one kind that a step's rows report at most."""
    scheduler = config.scheduler
    return min(scheduler.most_reported, scheduler.max_num_seqs * (1 + config.model.info.vocab_size))


def score_bytes(config: EngineConfig) -> int:
    """Of what a step reports of prompt tokens, in parts and as a whole, before it is in the slot."""
    if not config.model.generates:
        return 0
    scheduler, real = config.scheduler, max(ITEMSIZE[config.model.dtype], 4)
    num = min(scheduler.most_reported, scheduler.max_num_batched_tokens * (1 + config.model.info.vocab_size))
    return 2 * num * (8 + real)


def pooled_bytes(config: EngineConfig) -> int:
    """Of one slot: a line for each row. A model that is mostly asked for text gets it when it is asked for more."""
    pooling, size = config.model.pooling, max(ITEMSIZE[config.model.dtype], 4)
    if pooling is None or config.model.generates:
        return 0
    return config.scheduler.max_num_seqs * max(pooling.embed_size, pooling.num_labels) * size


def pool_head_bytes(config: EngineConfig) -> int:
    """From a step's hidden states to results, of a model that only pools."""
    scheduler, info, pooling = config.scheduler, config.model.info, config.model.pooling
    assert pooling is not None, "a model generates or pools"
    size, real = ITEMSIZE[config.model.dtype], max(ITEMSIZE[config.model.dtype], 4)
    hidden, tokens, rows = info.hidden_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    lines, width = _token_lines(config)
    if pooling.tasks == ("sparse",):
        chunk = min(tokens, VOCABULARY_CHUNK) * info.vocab_size * (size + real)
        return 4 * tokens * hidden * size + chunk + 4 * (rows + 1) * info.vocab_size * real
    widest = max(
        hidden, pooling.embed_size, width, pooling.num_labels, *(dense.out_features for dense in pooling.dense)
    )
    # lines in float32, before and after a product and a norm; of prompts that take several steps, what they keep
    kept = 0 if scheduler.whole else 2 * scheduler.max_model_len * hidden * size
    return tokens * hidden * size + max(lines, rows) * (hidden + 3 * widest) * real + kept


def _token_lines(config: EngineConfig) -> tuple[int, int]:
    """The most lines that a step reports of tokens, and their width; of rows where each gives all words a weight."""
    scheduler, pooling = config.scheduler, config.model.pooling
    assert pooling is not None, "a model generates or pools"
    if pooling.tasks == ("sparse",):
        return scheduler.max_num_seqs, config.model.info.vocab_size
    widths = {"token_embed": pooling.token_size, "token_classify": pooling.num_labels, "sparse": 1}
    width = max((widths.get(task, 0) for task in pooling.tasks), default=0)
    # what earlier steps have computed of a prompt comes with its end
    before = 0 if scheduler.whole else scheduler.max_model_len
    return (scheduler.max_num_batched_tokens + before, width) if width else (0, 0)
