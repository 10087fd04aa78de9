"""resolve: computes an EngineConfig from the options, the model and the machine.

One pure function holds every default. All its inputs are arguments.
"""

from __future__ import annotations

import msgspec

from slipstream.cache_spec import CacheGroup, StateSpec
from slipstream.config.activation_size import draw_bytes
from slipstream.config.adapter_config import AdapterConfig
from slipstream.config.buffer_size import max_step_logprobs, staged_ints
from slipstream.config.cache_room import (
    CPU_SHARE,
    DEFAULT_SHARE,
    cache_room,
    choose_num_checkpoints,
    choose_num_pages,
    keep_free,
)
from slipstream.config.cache_size import CacheSize
from slipstream.config.config import (
    CacheConfig,
    DeviceConfig,
    DraftModelConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from slipstream.config.draft_config import DRAFTS_PER_STEP, DRAFTS_SHARE, read_draft_config
from slipstream.config.machine import Machine
from slipstream.config.memory import estimate_memory
from slipstream.config.model_info import ModelInfo
from slipstream.config.model_sizes import ModelSizes
from slipstream.config.option_values import positive
from slipstream.config.options import Options
from slipstream.config.pooling_info import PoolingInfo
from slipstream.config.pooling_size import max_kept
from slipstream.config.quantization import choose_quantization
from slipstream.config.record_config import resolve_record
from slipstream.config.state_size import StateSize
from slipstream.config.transfer_config import TransferConfig, read_transfer_config
from slipstream.errors import InvalidOption, NotEnoughMemory

DEFAULT_MAX_ITL = 50  # milliseconds
DEFAULT_ROWS = {"cpu": 64, "cuda": 256}  # of one step
DEFAULT_TOKENS = {"cpu": 512, "cuda": 8192}
SMALL = 512  # hidden size of encoders that a GPU computes faster than the host prepares steps
LARGE_GPU = 64 * 2**30  # bytes of memory beside which the activations of twice as many tokens are small
TILE_ROWS = 128  # of the tiles of large GEMMs


class Source(msgspec.Struct, frozen=True):
    """The path of the weights, and the memory of the model built from them."""

    path: str
    kind: str  # folder or gguf
    name: str
    num_bytes: int  # of the weights once loaded
    sizes: ModelSizes  # of a step's activations


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
    larger = 2 if is_encoder and not on_cpu and info.hidden_size <= SMALL else 1
    max_num_seqs = positive("max_num_seqs", options.max_num_seqs, larger * DEFAULT_ROWS[machine.kind])
    depth = options.depth if options.depth is not None else (0 if on_cpu else 1)
    if not 0 <= depth <= 8:
        raise InvalidOption(f"depth is {depth}; give 0 to 8, where 0 is synchronous and 1 or 2 hide the host's work")

    if options.deterministic and on_cpu:
        raise InvalidOption('deterministic is for a GPU; on the CPU use dtype="float64", or a low-bit file')
    if options.deterministic and dtype == "float64":
        raise InvalidOption("deterministic is for bfloat16, float16 and float32, not for float64; choose one of them")

    drafts = read_draft_config(options.speculative_config, options.drafts)
    if drafts is not None and (refused := _refuses_drafts(is_encoder, pooling)):
        raise InvalidOption(f"drafts are not supported for {source.name}: {refused}; remove speculative_config")
    if drafts is not None and draft is not None:
        drafts = msgspec.structs.replace(drafts, method=draft.method)  # as the files of the drafter tell

    fit_length = options.max_model_len in ("auto", -1)
    if fit_length or options.max_model_len is None:
        wanted = info.max_positions if draft is None else min(info.max_positions, draft.model.info.max_positions)
    else:
        wanted = positive("max_model_len", options.max_model_len)
        if wanted < 2:
            raise InvalidOption("max_model_len is 1; a prompt and its answer have at least 2 tokens")
        if wanted > info.max_positions:
            raise InvalidOption(
                f"max_model_len is {wanted}, {source.name} was made for {info.max_positions}; give at most that"
            )
        if draft is not None and wanted > draft.model.info.max_positions:
            raise InvalidOption(
                f"max_model_len is {wanted}, the draft model {draft.model.name} was made for "
                f"{draft.model.info.max_positions}; give at most that"
            )

    chunked = options.enable_chunked_prefill and not is_encoder
    given = options.max_num_batched_tokens
    if given is not None:
        positive("max_num_batched_tokens", given)
        if max(given, wanted if is_encoder else 0) < max_num_seqs:  # every running row needs a token per step
            if options.max_num_seqs is not None:
                raise InvalidOption(
                    f"max_num_batched_tokens is {given}, fewer than the {max_num_seqs} requests of max_num_seqs; "
                    "raise the first or lower the second"
                )
            max_num_seqs = given

    max_itl = _max_itl(options, machine)
    # GEMMs, of experts most, are faster with more tokens, and without a bound no request waits for a longer step
    is_unbounded = max_itl is None and (pooling is None or pooling.generates)
    is_large = machine.kind == "cuda" and machine.total_memory >= LARGE_GPU
    usual_tokens = larger * DEFAULT_TOKENS[machine.kind]
    if is_unbounded and is_large and not is_encoder:
        usual_tokens = _in_waves(2 * DEFAULT_TOKENS[machine.kind], machine.num_multiprocessors)

    def step_tokens(length: int) -> int:
        batched = max(usual_tokens, max_num_seqs) if given is None else given
        return max(batched, length) if is_encoder or (given is None and not chunked) else batched

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
                step_tokens=step_tokens(length),
                states=state_size.config(num_checkpoints),
                drops_last_page=draft is not None and draft.needs_next_token,
                tier_bytes=_tier_bytes(options, transfer),
                is_mirrored=transfer is not None and transfer.cuda_ipc,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=step_tokens(length),
                max_model_len=length,
                max_waiting=positive("max_waiting", options.max_waiting),
                chunked_prefill=chunked,
                depth=depth,
                seed=options.seed,
                staged_ints=staged_ints(length, page_size, max_num_seqs, len(groups), info.vocab_size),
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
            transfer=transfer,
        )

    def without_cache(num_checkpoints: int = 0) -> int:
        """Bytes besides pages, at the full length, so that everything else fits at any smaller length."""
        memory = estimate_memory(settled(wanted, size, size.enough, num_checkpoints), source.num_bytes)
        return (memory.total if on_cpu else memory.of_device) - memory.cache

    size = CacheSize(groups, wanted, max_num_seqs, step_tokens(wanted), options.enable_prefix_caching)
    num_checkpoints = 0
    if states:
        if options.max_num_seqs is None:
            stateless = without_cache() - (max_num_seqs + 1) * state_size.num_bytes
            max_num_seqs = state_size.affordable_rows(max_num_seqs, cache_room(options, stateless, machine))
            size = CacheSize(groups, wanted, max_num_seqs, step_tokens(wanted), options.enable_prefix_caching)
        num_checkpoints = choose_num_checkpoints(options, state_size, size, without_cache(), max_num_seqs, machine)
    num_pages = choose_num_pages(options, size, state_size, num_checkpoints, without_cache(num_checkpoints), machine)
    length = size.longest(num_pages)
    if length < 2:
        raise NotEnoughMemory(
            f"the cache holds {length} positions, a request needs at least 2; give more kv_cache_memory or num_pages, "
            "lower max_num_seqs or max_num_batched_tokens, or take a smaller model"
        )
    if length < wanted and not fit_length:
        raise NotEnoughMemory(
            f"the cache holds {length} positions ({num_pages - 1} pages of {page_size}, "
            f"{size.num_bytes(num_pages) / 2**20:.0f} MiB), max_model_len is {wanted}; give {length} or less, "
            'max_model_len="auto", or more kv_cache_memory'
        )
    config = settled(length, size, num_pages, num_checkpoints)
    if not chunked and (batched := config.scheduler.max_num_batched_tokens) < length:
        raise InvalidOption(
            f"max_num_batched_tokens is {batched} and max_model_len {length}: without chunked prefill a "
            "prompt must fit one step; raise the first, lower the second, or leave enable_chunked_prefill on"
        )
    return config


def _drafts_per_step(vocab_size: int, dtype: str, machine: Machine) -> int:
    """Maximum number of drafts of one step. On a GPU more if their logits are a small part of its memory: drafts that
    are accepted pay off at any number of rows. A CPU computes many positions no faster than few."""
    if machine.kind == "cpu":
        return DRAFTS_PER_STEP
    return max(DRAFTS_PER_STEP, int(machine.total_memory * DRAFTS_SHARE) // draw_bytes(vocab_size, dtype))


def _refuses_drafts(is_encoder: bool, pooling: PoolingInfo | None) -> str:
    """The reason why a model cannot have drafts; empty if it can."""
    return "it generates no text" if is_encoder or (pooling is not None and not pooling.generates) else ""


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
    )


def _offload_bytes(options: Options) -> int:
    if not 0 <= options.cpu_offload_gb < 2**20:
        raise InvalidOption(
            f"cpu_offload_gb is {options.cpu_offload_gb}; give the GiB of weights to keep in host memory"
        )
    return int(options.cpu_offload_gb * 2**30)


def _tier_bytes(options: Options, transfer: TransferConfig | None) -> int:
    """Of one rank."""
    size = options.kv_offloading_size or 0
    if not size and transfer is not None:
        return transfer.buffer_bytes
    if not 0 <= size < 2**20:
        raise InvalidOption(f"kv_offloading_size is {size}; give the GiB of host memory for KV cache pages")
    return int(size * 2**30) // max(options.tensor_parallel_size, 1)


def _in_waves(num_tokens: int, num_multiprocessors: int) -> int:
    """About `num_tokens`: a multiple of a tile of rows for each multiprocessor, so that in GEMMs, which compute tiles
    in waves, the last wave is full."""
    wave = TILE_ROWS * num_multiprocessors
    return max(1, round(num_tokens / wave)) * wave if wave else num_tokens


def _max_itl(options: Options, machine: Machine) -> float | None:
    """In seconds. No bound on a CPU, where prefill is hardly faster per token than decode: small chunks would be
    slow."""
    given = options.max_itl
    if given is None:
        return None if machine.kind == "cpu" else DEFAULT_MAX_ITL / 1000
    if given < 0:
        raise InvalidOption(f"max_itl is {given}; give milliseconds, or 0 for no bound")
    return given / 1000 if given else None


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
