"""Computes an engine's memory before anything is loaded.

The formulas are here and in the files named *_size.py: the runner sizes its buffers by them, `resolve` leaves room for
them, `slipstream plan` prints them. Weights and cache are exact. Activations are an upper bound: those of the largest
possible step, run eagerly; most steps need a fraction.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from slipstream.checkpoint.model_info import ModelInfo
from slipstream.checkpoint.pooling_info import reductions_of
from slipstream.config.adapter_config import AdapterConfig
from slipstream.config.buffer_size import (
    PENALTY_BYTES,
    activation_bytes,
    arena_bytes,
    bias_bytes,
    kept_mask_bytes,
    list_bytes,
    mask_bytes,
    pool_head_bytes,
    pooled_bytes,
    pooled_row_bytes,
    query_bytes,
    result_bytes,
    result_growth_bytes,
    score_bytes,
    token_result_bytes,
)
from slipstream.config.config import CacheConfig, EngineConfig, ImageConfig, ModelConfig, StateConfig
from slipstream.contracts.cache_spec import ITEMSIZE, STATE_CHUNK, CacheGroup

SCORED_AT_ONCE = 64
"""Prompt tokens whose logits are computed together."""

LOGITS_AT_ONCE = 5
"""Simultaneous copies of all rows' logits on a GPU, in steps whose sampling features cannot be captured."""

FEW_ADAPTED, ADAPTED_INPUTS = 512, 512
"""Tokens up to which products with adapters split their inputs, and inputs of one part."""

MAX_DEQUANTIZED = 128 << 20
"""Elements of a quantised weight that a GPU dequantises at a time."""

WORKSPACE = 256 * 2**20  # bytes that libraries and the driver allocate for graphs


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. On a GPU, fields that end with `_host` are pinned host memory, all others device memory."""

    weights: int  # parameters and the rope table
    adapters: int  # slots of LoRA adapters
    adapters_host: int  # LoRA adapters in host memory
    cache: int  # pages
    tier: int  # buffers for pages on their way to and from the second tier
    mirror: int  # the copy of the second tier on the device, which takes the place of these buffers
    tier_host: int  # pages of the second tier, and their numbers
    states: int  # recurrent states of all rows and of the padding row
    checkpoints: int  # recurrent states kept for prefix caching
    tables: int  # page tables, lengths and sampling parameters of all rows; outputs of captured steps for their heads
    images: int  # rows that the tower made of images
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
        kept = self.cache + self.tier + self.mirror + self.states + self.checkpoints + self.images
        return (
            self.weights + self.adapters + kept + self.tables + self.features + rings + self.activations + self.graphs
        )

    @property
    def later(self) -> int:
        """Device memory that is not allocated yet when weights are loaded and the largest usual step has run."""
        return self.features + self.result_growth + self.graphs + self.unread + self.mirror

    @property
    def parts(self) -> dict[str, int]:
        """The total in a few parts, for a picture; `host` is pinned memory."""
        parts = {
            "weights": self.weights,
            "adapters": self.adapters,
            "cache": self.cache + self.tier + self.mirror + self.states + self.checkpoints,
            "activations": self.activations + self.graphs,
        }
        parts["buffers"] = self.of_device - sum(parts.values())
        rings = self.staging_host + self.masks_host + self.results_host + self.result_growth_host
        return parts | {"host": self.adapters_host + self.tier_host + rings}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


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
    if not on_cpu:
        models = [config.model] if config.draft is None else [config.model, config.draft.model]
        hidden += max(map(dequantized_bytes, models))
    images = 0
    if config.images is not None:
        rows_of_images = config.images.num_slots * config.images.slot_rows
        images = rows_of_images * config.images.row_size * size
        hidden = max(hidden, tower_bytes(config.images, size))
    captures = not on_cpu and not config.device.eager
    num_drafts = 0 if scheduler.drafts is None else scheduler.drafts.num_drafts
    masks = kept_masks = 0
    if generates:
        kept_masks = kept_mask_bytes(info.vocab_size)
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
        tier=NUM_REGIONS * region_bytes(cache.groups, cache.states)
        if cache.tier_bytes and not cache.is_mirrored
        else 0,
        mirror=mirror_bytes(cache) if cache.is_mirrored else 0,
        tier_host=cache.tier_bytes,
        states=0 if cache.states is None else rows * cache.states.num_bytes,
        checkpoints=0 if cache.states is None else cache.states.num_checkpoints * cache.states.checkpoint_bytes,
        tables=tables + (sum(graph_output_bytes(config)) if captures else 0),
        images=images,
        features=query_bytes(config)
        + (feature_bytes(info, config.model.dtype, scheduler.max_num_seqs) if generates else 0),
        staging=staging,
        staging_host=num_buffers * staging,
        masks=masks + kept_masks,
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


def tower_bytes(images: ImageConfig, itemsize: int) -> int:
    """Upper bound of the activations of a tower. They are freed before the forward begins."""
    patches = max(images.step_patches, images.max_patches)
    sizes = images.sizes
    per_patch = (4 * images.hidden_size + sizes.widest + sizes.rotary) * itemsize
    pixels = images.patch_values * (4 + 2 * itemsize)  # normalised, in the model's dtype, with all frames
    rows = patches // images.patches_per_token * images.row_size * itemsize
    return patches * (per_patch + pixels + 128) + 2 * rows


def dequantized_bytes(model: ModelConfig) -> int:
    """Upper bound of the part of a weight that steps of many tokens on a GPU dequantise at once
    (`ops/gemm/quantized/`). The projection to tokens may be quantised too."""
    quantization = model.quantization
    stays = model.dequantize is False if quantization is None else not quantization.quantizes_inputs
    # no product of a layer has more outputs than a token has elements inside a sublayer
    largest = model.info.hidden_size * max(model.sizes.widest, model.info.vocab_size)
    return min(largest, MAX_DEQUANTIZED) * ITEMSIZE[model.dtype] if stays else 0


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
    return hidden, max(result_bytes(config), pooled_row_bytes(config))


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


def unread_bytes(config: EngineConfig) -> int:
    """Additional bytes of a step with results per token. Other steps only keep hidden states of last tokens, logits of
    rows, or vectors."""
    if not config.model.generates:
        return token_result_bytes(config)
    scheduler, info, size = config.scheduler, config.model.info, ITEMSIZE[config.model.dtype]
    tokens = scheduler.max_num_batched_tokens
    # prompt tokens are scored in groups of this size, however few rows there are: the product, its float32 copy, and
    # the temporaries of logprobs
    num_scored = max(0, min(SCORED_AT_ONCE, tokens) - scheduler.max_num_seqs)
    return tokens * config.hidden_width * size + num_scored * info.vocab_size * (size + 2 * max(size, 4))


# Sizes of the second cache tier and of the device buffers through which its pages are copied.

NUM_REGIONS = 2
"""Device buffers for pages on their way: one is filled while the other is emptied."""

REGION_BYTES = 2**26
"""Bytes of one of them; at least a page."""

HISTORY_BYTES = 4
"""Bytes per position of token ids, which drafts are found in and which travel with the pages of a group."""


def tier_slots(config: CacheConfig) -> tuple[int, ...]:
    """Slots of each group, and last those of checkpoints of recurrent states, if there are any: the tier is divided as
    the device's cache is."""
    sizes = [(group.bytes_per_page, num) for group, num in zip(config.groups, config.group_pages, strict=True)]
    if config.states is not None:
        sizes.append((config.states.checkpoint_bytes, config.states.num_checkpoints))
    device_bytes = sum(size * num for size, num in sizes)
    return tuple(config.tier_bytes * num // device_bytes for _, num in sizes)


def region_pages(group: CacheGroup) -> int:
    """Pages of a group that are copied at once."""
    return max(1, REGION_BYTES // group.bytes_per_page)


def region_checkpoints(states: StateConfig) -> int:
    """Checkpoints that are copied at once."""
    return max(1, REGION_BYTES // states.checkpoint_bytes)


def mirror_bytes(config: CacheConfig) -> int:
    """Upper bound of the device bytes of all slots, with the token ids of their positions."""
    num_pages = max((config.tier_bytes // group.bytes_per_page for group in config.groups), default=0)
    return config.tier_bytes + num_pages * HISTORY_BYTES * config.page_size


def region_bytes(groups: Sequence[CacheGroup], states: StateConfig | None = None) -> int:
    """Device bytes of one region: it takes pages of any group, with their token ids, or checkpoints."""
    pages = [region_pages(group) * (group.bytes_per_page + HISTORY_BYTES * group.spec.page_size) for group in groups]
    checkpoints = [] if states is None else [region_checkpoints(states) * states.checkpoint_bytes]
    return max([*pages, *checkpoints], default=0)


# Machine: properties of the device and of its host that defaults depend on.


class Machine(msgspec.Struct, frozen=True):
    """Properties of the device that `resolve` reads; filled by `detect_machine`."""

    kind: str
    free_memory: int
    total_memory: int
    num_threads: int
    fast_dtypes: tuple[str, ...]
    num_multiprocessors: int = 0  # 0: not a GPU, or not known


# The GPUs of this process, and which of them a rank takes, without loading torch.

SHARE_VARIABLE = "SLIPSTREAM_RANKS_SHARE_GPU"
"""Set to 1, ranks may share a GPU, for tests on a machine with one: NCCL passes data through sockets of the host."""


def visible_gpus(devices: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs of this process as entries of CUDA_VISIBLE_DEVICES. `devices`: the folder of the device files."""
    if (listed := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [entry.strip() for entry in listed.split(",") if entry.strip() not in ("", "-1")]
    numbers = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia*"))
    return [str(index) for index in range(sum(number.isdecimal() for number in numbers))]  # CUDA counts from 0


def ranks_share_gpu(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(SHARE_VARIABLE) == "1"


def rank_environment(rank: int, gpus: list[str]) -> dict[str, str]:
    """The variables of the process of one rank: it sees its own GPU only."""
    return {"CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]}
