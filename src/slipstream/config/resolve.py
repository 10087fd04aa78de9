"""resolve: computes an EngineConfig from the options, the model and the machine.

A pure function: all its inputs are arguments. The size of the cache is chosen in `cache_size.py`;
no default is set elsewhere.
"""

from __future__ import annotations

import msgspec

from slipstream.base.errors import InvalidOption, NotEnoughMemory
from slipstream.checkpoint.image_info import ImageInfo
from slipstream.checkpoint.model_info import ModelInfo, ModelSizes
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.checkpoint.quantization import choose_quantization
from slipstream.config.adapter_config import AdapterConfig
from slipstream.config.buffer_size import draw_bytes, max_kept, max_step_logprobs, staged_ints
from slipstream.config.cache_size import (
    CPU_SHARE,
    DEFAULT_SHARE,
    CacheSize,
    StateSize,
    cache_room,
    choose_num_checkpoints,
    choose_num_pages,
    keep_free,
)
from slipstream.config.config import (
    DRAFTS_PER_STEP,
    DRAFTS_SHARE,
    CacheConfig,
    DeviceConfig,
    DraftConfig,
    DraftModelConfig,
    EngineConfig,
    ImageConfig,
    ModelConfig,
    SchedulerConfig,
    TransferConfig,
    read_draft_config,
    read_transfer_config,
    resolve_record,
)
from slipstream.config.memory import Machine, estimate_memory
from slipstream.config.options import Options, positive
from slipstream.contracts.cache_spec import CacheGroup, StateSpec


class Source(msgspec.Struct, frozen=True):
    """The path of the weights, and the memory of the model built from them."""

    path: str
    kind: str  # folder or gguf
    name: str
    num_bytes: int  # of the weights once loaded
    sizes: ModelSizes  # of a step's activations
    images: ImageInfo | None = None  # how the model sees images; None: only its text part runs
    tower: ImageConfig | None = None  # at any length


def resolve_dtype(options: Options, info: ModelInfo, machine: Machine) -> str:
    if options.dtype != "auto":
        if options.dtype == "float64" and machine.kind == "cuda":
            raise InvalidOption("dtype float64 is for the CPU; use float32, bfloat16 or float16 on a GPU")
        return options.dtype
    if machine.kind == "cuda" and not info.is_causal and info.dtype in (None, "float32"):
        # ten times as fast; encoder activations fit its range, and it has more mantissa bits than bfloat16
        return "float16"
    # the checkpoint's own dtype, if matrix products in it are fast on this device
    return info.dtype if info.dtype in machine.fast_dtypes else machine.fast_dtypes[0]


def resolve(
    options: Options,
    info: ModelInfo,
    source: Source,
    groups: tuple[CacheGroup, ...],
    dtype: str,
    machine: Machine,
    pooling: PoolingInfo | None = None,
    states: tuple[StateSpec, ...] = (),
    draft: DraftModelConfig | None = None,
    adapters: AdapterConfig | None = None,
) -> EngineConfig:
    """`groups`: of cache sites; `states`: by state site; `draft`: the model of a drafter, at any length."""
    on_cpu = machine.kind == "cpu"
    page_size = positive("page_size", options.page_size)
    is_encoder = not groups and not states  # nothing is kept between steps, so a prompt is computed in one step
    depth = _choose_depth(options, machine)
    _check_deterministic(options, dtype, machine, source, states)
    drafts = _choose_drafts(options, source, draft, is_encoder, pooling)
    wanted = _wanted_length(options, info, source, draft)
    max_itl = choose_max_itl(options, machine)
    limits = choose_step_limits(
        options, info, machine, wanted, pooling, is_encoder=is_encoder, has_max_itl=max_itl is not None
    )
    state_size = StateSize(states, groups, page_size, options.num_checkpoints, options.enable_prefix_caching)
    transfer = read_transfer_config(options.kv_transfer_config, options.role)

    def settled(length: int, size: CacheSize, num_pages: int, num_checkpoints: int = 0) -> EngineConfig:
        return EngineConfig(
            model=model_config(options, info, source, dtype, length, pooling),
            cache=CacheConfig(
                page_size=page_size,
                num_pages=num_pages,
                prefix_caching=options.enable_prefix_caching,
                groups=groups,
                group_pages=size.group_pages(num_pages),
                step_tokens=limits.tokens(length),
                states=state_size.config(num_checkpoints),
                drops_last_page=draft is not None and draft.needs_next_token,
                tier_bytes=_tier_bytes(options, transfer),
                is_mirrored=transfer is not None and transfer.cuda_ipc,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.tokens(length),
                max_model_len=length,
                max_waiting=positive("max_waiting", options.max_waiting),
                chunked_prefill=limits.chunked_prefill,
                depth=depth,
                seed=options.seed,
                staged_ints=staged_ints(length, page_size, limits.max_num_seqs, len(groups), info.vocab_size),
                max_step_logprobs=max_step_logprobs(info),
                max_kept=max_kept(pooling),
                is_encoder=is_encoder,
                max_itl=max_itl,
                cached_tasks=("embed", "classify") if pooling is not None and pooling.methods == ("last",) else (),
                short_rope=info.rope.short_length(length),
                drafts=drafts,
                prompt_embeds=options.enable_prompt_embeds,
                drafts_per_step=_drafts_per_step(info.vocab_size, dtype, machine),
            ),
            device=DeviceConfig(
                kind=machine.kind,
                num_threads=positive(
                    "num_threads", options.num_threads, max(1, machine.num_threads // options.tensor_parallel_size)
                ),
                eager=options.enforce_eager,
                keep_free=keep_free(options, machine),
                gpu_memory_utilization=options.gpu_memory_utilization or (CPU_SHARE if on_cpu else DEFAULT_SHARE),
                sleep_mode=options.enable_sleep_mode,
            ),
            record=resolve_record(options),
            draft=None if draft is None else draft.of_length(length),
            adapters=adapters,
            images=None if source.tower is None else source.tower.fitted(length, limits.tokens(length)),
            transfer=transfer,
        )

    def without_cache(num_checkpoints: int = 0) -> int:
        """Bytes besides pages, at the full length, so that everything else fits at any smaller length."""
        memory = estimate_memory(settled(wanted, size, size.enough, num_checkpoints), source.num_bytes)
        return (memory.total if on_cpu else memory.of_device) - memory.cache

    size = _cache_size(options, groups, wanted, limits)
    num_checkpoints = 0
    if states:
        if options.max_num_seqs is None:
            stateless = without_cache() - (limits.max_num_seqs + 1) * state_size.num_bytes
            rows = state_size.affordable_rows(limits.max_num_seqs, cache_room(options, stateless, machine))
            limits = msgspec.structs.replace(limits, max_num_seqs=rows)
            size = _cache_size(options, groups, wanted, limits)
        num_checkpoints = choose_num_checkpoints(
            options, state_size, size, without_cache(), limits.max_num_seqs, machine
        )
    other_bytes = without_cache(num_checkpoints)
    num_pages = choose_num_pages(options, size, state_size, num_checkpoints, other_bytes, machine)
    length = size.longest(num_pages)
    _check_length(options, length, wanted, size, num_pages, other_bytes, machine)
    config = settled(length, size, num_pages, num_checkpoints)
    if not limits.chunked_prefill and (batched := config.scheduler.max_num_batched_tokens) < length:
        raise InvalidOption(
            f"max_num_batched_tokens is {batched} and max_model_len {length}: without chunked prefill a "
            "prompt must fit one step; raise the first, lower the second, or leave enable_chunked_prefill on"
        )
    return config


def _choose_depth(options: Options, machine: Machine) -> int:
    depth = options.depth if options.depth is not None else (0 if machine.kind == "cpu" else 1)
    if not 0 <= depth <= 8:
        raise InvalidOption(f"depth is {depth}; give 0 to 8, where 0 is synchronous and 1 or 2 hide the host's work")
    return depth


def _check_deterministic(
    options: Options, dtype: str, machine: Machine, source: Source, states: tuple[StateSpec, ...]
) -> None:
    if options.deterministic and machine.kind == "cpu":
        raise InvalidOption('deterministic is for a GPU; on the CPU use dtype="float64", or a low-bit file')
    if options.deterministic and dtype == "float64":
        raise InvalidOption("deterministic is for bfloat16, float16 and float32, not for float64; choose one of them")
    layers = next((spec.chunk_rounding for spec in states if spec.chunk_rounding), "")
    if options.deterministic and layers:
        raise InvalidOption(
            f"deterministic is not supported for {source.name}: its {layers} round a chunk otherwise than single "
            'tokens; remove deterministic, and choose dtype="float32" if differences of 1e-5 are small enough'
        )


def _choose_drafts(
    options: Options, source: Source, draft: DraftModelConfig | None, is_encoder: bool, pooling: PoolingInfo | None
) -> DraftConfig | None:
    drafts = read_draft_config(options.speculative_config, options.drafts)
    if drafts is None:
        return None
    if is_encoder or (pooling is not None and not pooling.generates):
        raise InvalidOption(
            f"drafts are not supported for {source.name}: it generates no text; remove speculative_config"
        )
    # the files of the drafter say which method it is
    return drafts if draft is None else msgspec.structs.replace(drafts, method=draft.method)


def _fits_length(options: Options) -> bool:
    """Whether the length follows from the memory."""
    return options.max_model_len in ("auto", -1)


def _wanted_length(options: Options, info: ModelInfo, source: Source, draft: DraftModelConfig | None) -> int:
    """Tokens of the longest request, if the cache has room for it."""
    limit = info.max_positions
    if _fits_length(options) or options.max_model_len is None:
        return limit if draft is None else min(limit, draft.model.info.max_positions)
    wanted = positive("max_model_len", options.max_model_len)
    if wanted < 2:
        raise InvalidOption("max_model_len is 1; a prompt and its answer have at least 2 tokens")
    if wanted > limit:
        raise InvalidOption(f"max_model_len is {wanted}, {source.name} was made for {limit}; give at most that")
    if draft is not None and wanted > draft.model.info.max_positions:
        raise InvalidOption(
            f"max_model_len is {wanted}, the draft model {draft.model.name} was made for "
            f"{draft.model.info.max_positions}; give at most that"
        )
    return wanted


def _cache_size(options: Options, groups: tuple[CacheGroup, ...], length: int, limits: StepLimits) -> CacheSize:
    return CacheSize(groups, length, limits.max_num_seqs, limits.tokens(length), options.enable_prefix_caching)


def _check_length(
    options: Options, length: int, wanted: int, size: CacheSize, num_pages: int, other_bytes: int, machine: Machine
) -> None:
    """Raise an error if a cache of `num_pages`, which holds `length` positions, is too small."""
    if length < 2:
        free, needed = f"{machine.free_memory / 2**20:.0f} MiB", f"{other_bytes / 2**20:.0f} MiB"
        raise NotEnoughMemory(
            f"the cache holds {length} positions, a request needs at least 2: the {machine.kind} has {free} free, and "
            f"{needed} are for weights and steps; give more memory, kv_cache_memory or num_pages, lower max_num_seqs "
            "or max_num_batched_tokens, or take a smaller model"
        )
    if length < wanted and not _fits_length(options):
        raise NotEnoughMemory(
            f"the cache holds {length} positions ({num_pages - 1} pages of {options.page_size}, "
            f"{size.num_bytes(num_pages) / 2**20:.0f} MiB), max_model_len is {wanted}; give {length} or less, "
            'max_model_len="auto", or more kv_cache_memory'
        )


def _drafts_per_step(vocab_size: int, dtype: str, machine: Machine) -> int:
    """Maximum number of drafts of one step. On a GPU more if their logits are a small part of its memory: drafts that
    are accepted pay off at any number of rows. A CPU computes many positions no faster than few."""
    if machine.kind == "cpu":
        return DRAFTS_PER_STEP
    return max(DRAFTS_PER_STEP, int(machine.total_memory * DRAFTS_SHARE) // draw_bytes(vocab_size, dtype))


def model_config(
    options: Options,
    info: ModelInfo,
    source: Source,
    dtype: str,
    max_model_len: int,
    pooling: PoolingInfo | None = None,
) -> ModelConfig:
    return ModelConfig(
        info=info,
        path=source.path,
        name=options.served_model_name or source.name,
        load_format=_load_format(options, source),
        dtype=dtype,
        dequantize=options.dequantize,
        max_model_len=max_model_len,
        seed=options.seed,
        pooling=pooling,
        keeps_bfloat16=options.dtype == "auto",
        deterministic=options.deterministic,
        logprobs_mode=options.logprobs_mode,
        sizes=source.sizes,
        quantization=choose_quantization(options.quantization, info.quantization, source.kind == "gguf"),
        offload_bytes=_offload_bytes(options),
        sleep_mode=options.enable_sleep_mode,
        num_ranks=options.tensor_parallel_size,
        by_expert=options.enable_expert_parallel,
        num_engines=options.data_parallel_size if options.enable_expert_parallel else 1,
        images=source.images,
    )


def _offload_bytes(options: Options) -> int:
    if not 0 <= options.cpu_offload_gb < 2**20:
        raise InvalidOption(
            f"cpu_offload_gb is {options.cpu_offload_gb}; give the GiB of weights to keep in host memory"
        )
    return int(options.cpu_offload_gb * 2**30)


def _tier_bytes(options: Options, transfer: TransferConfig | None) -> int:
    """Bytes of the second cache tier of one rank."""
    size = options.kv_offloading_size or 0
    if not size and transfer is not None:
        return transfer.buffer_bytes
    if not 0 <= size < 2**20:
        raise InvalidOption(f"kv_offloading_size is {size}; give the GiB of host memory for KV cache pages")
    return int(size * 2**30) // max(options.tensor_parallel_size, 1)


def fewer_rows(config: EngineConfig) -> str:
    """A notice for the user if recurrent states are the reason for fewer rows than usual; else an empty text."""
    rows, usual, states = config.scheduler.max_num_seqs, DEFAULT_ROWS[config.device.kind], config.cache.states
    if states is None or rows >= min(usual, config.scheduler.max_num_batched_tokens):
        return ""
    return (
        f"max_num_seqs is {rows}, not {usual}: the recurrent state of a request takes {states.num_bytes / 2**20:.1f} "
        "MiB, and the states of all rows together get half of the memory that is left for states and cache; set "
        "max_num_seqs for another number"
    )


def _load_format(options: Options, source: Source) -> str:
    if options.load_format == "auto":
        return "gguf" if source.kind == "gguf" else "safetensors"
    if options.load_format == "gguf" and source.kind != "gguf":
        raise InvalidOption(f"load_format is gguf and {source.path} is a folder; give the .gguf file")
    if options.load_format == "safetensors" and source.kind == "gguf":
        raise InvalidOption(f"load_format is safetensors and {source.path} is a .gguf file; give the folder")
    return options.load_format


# StepLimits: how many requests and tokens a step has at most, by the options, the model and the machine.

DEFAULT_MAX_ITL = 50  # milliseconds
DEFAULT_ROWS = {"cpu": 64, "cuda": 256}  # of one step
DEFAULT_TOKENS = {"cpu": 512, "cuda": 8192}
SMALL = 512  # hidden size of encoders that a GPU computes faster than the host prepares steps
LARGE_GPU = 64 * 2**30  # bytes of memory beside which the activations of twice as many tokens are small
TILE_ROWS = 128  # of the tiles of large GEMMs


class StepLimits(msgspec.Struct, frozen=True):
    max_num_seqs: int
    given_tokens: int | None  # max_num_batched_tokens, as the user gave it
    usual_tokens: int  # the default
    chunked_prefill: bool  # a prompt may be computed in several steps
    is_encoder: bool  # a prompt is always computed in one step

    def tokens(self, length: int) -> int:
        """Maximum tokens of a step, for requests of up to `length` tokens."""
        given = self.given_tokens
        tokens = max(self.usual_tokens, self.max_num_seqs) if given is None else given
        return max(tokens, length) if self.is_encoder or (given is None and not self.chunked_prefill) else tokens


def choose_step_limits(
    options: Options,
    info: ModelInfo,
    machine: Machine,
    length: int,
    pooling: PoolingInfo | None,
    *,
    is_encoder: bool,
    has_max_itl: bool,
) -> StepLimits:
    """`length`: of the longest request; `has_max_itl`: whether the time between two tokens is bounded."""
    on_cpu = machine.kind == "cpu"
    larger = 2 if is_encoder and not on_cpu and info.hidden_size <= SMALL else 1
    max_num_seqs = positive("max_num_seqs", options.max_num_seqs, larger * DEFAULT_ROWS[machine.kind])
    given = options.max_num_batched_tokens
    if given is not None:
        positive("max_num_batched_tokens", given)
        if max(given, length if is_encoder else 0) < max_num_seqs:  # every running row needs a token per step
            if options.max_num_seqs is not None:
                raise InvalidOption(
                    f"max_num_batched_tokens is {given}, fewer than the {max_num_seqs} requests of max_num_seqs; "
                    "raise the first or lower the second"
                )
            max_num_seqs = given
    # GEMMs, of experts most, are faster with more tokens, and without a bound no request waits for a longer step
    is_unbounded = not has_max_itl and (pooling is None or pooling.generates)
    is_large = machine.kind == "cuda" and machine.total_memory >= LARGE_GPU
    usual_tokens = larger * DEFAULT_TOKENS[machine.kind]
    if is_unbounded and is_large and not is_encoder:
        usual_tokens = _in_waves(2 * DEFAULT_TOKENS[machine.kind], machine.num_multiprocessors)
    return StepLimits(
        max_num_seqs,
        given,
        usual_tokens,
        chunked_prefill=options.enable_chunked_prefill and not is_encoder,
        is_encoder=is_encoder,
    )


def choose_max_itl(options: Options, machine: Machine) -> float | None:
    """In seconds. No bound on a CPU, where prefill is hardly faster per token than decode: small chunks would be
    slow."""
    given = options.max_itl
    if given is None:
        return None if machine.kind == "cpu" else DEFAULT_MAX_ITL / 1000
    if given < 0:
        raise InvalidOption(f"max_itl is {given}; give milliseconds, or 0 for no bound")
    return given / 1000 if given else None


def _in_waves(num_tokens: int, num_multiprocessors: int) -> int:
    """About `num_tokens`: a multiple of a tile of rows for each multiprocessor, so that in GEMMs, which compute tiles
    in waves, the last wave is full."""
    wave = TILE_ROWS * num_multiprocessors
    return max(1, round(num_tokens / wave)) * wave if wave else num_tokens
