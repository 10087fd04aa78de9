"""Checks of `tensor_parallel_size` and `enable_expert_parallel` against the other options: what several ranks cannot
run yet is refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.base.errors import InvalidOption
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.config.config import WITH_MODEL, EngineConfig, check_draft_ranks, read_draft_config
from slipstream.config.memory import SHARE_VARIABLE, ranks_share_gpu, visible_gpus
from slipstream.config.options import Options
from slipstream.contracts.cache_spec import CacheSpec

MAX_RANKS = 64


def check_rank_options(options: Options, device_kind: str) -> None:
    """Before anything of the model is read."""
    _check_expert_parallel(options, device_kind)
    count = options.tensor_parallel_size
    if not 1 <= count <= MAX_RANKS:
        raise InvalidOption(f"tensor_parallel_size is {count}; give 1 to {MAX_RANKS}")
    check_draft_ranks(options.speculative_config, count)
    if count == 1:
        return
    if options.deterministic:
        raise InvalidOption(
            f"tensor_parallel_size is {count}, and deterministic is set; the order of sums over ranks depends on the "
            "step: leave it out, or use tensor_parallel_size 1"
        )
    if device_kind == "cuda":
        _check_gpus(options, len(visible_gpus()))


def _check_gpus(options: Options, num_gpus: int) -> None:
    count = options.tensor_parallel_size
    if not ranks_share_gpu():
        if num_gpus < count and options.distributed_executor_backend != "ray":  # which gives each rank its GPU
            raise InvalidOption(
                f"tensor_parallel_size is {count}, and {num_gpus} GPUs are visible; each rank needs its own: lower "
                "tensor_parallel_size, or run on the CPU with device cpu"
            )
    else:
        _check_cache_size(options)


def _check_cache_size(options: Options) -> None:
    if options.num_pages is None and options.kv_cache_memory is None:
        raise InvalidOption(f"{SHARE_VARIABLE} is set, and ranks do not share the memory that is left; give num_pages")


def _check_expert_parallel(options: Options, device_kind: str) -> None:
    """The number of GPUs is checked by ReplicaProcesses."""
    count = options.data_parallel_size
    if not options.enable_expert_parallel or count == 1:
        return
    drafts = read_draft_config(options.speculative_config, options.drafts)
    by_model = drafts is not None and drafts.method in WITH_MODEL
    for is_there, what in (
        (options.tensor_parallel_size > 1, "tensor_parallel_size divides the engine as well: use 1"),
        (options.deterministic, "deterministic is set; experts of other engines are not batch-invariant: leave it out"),
        (by_model, "its engines draft without a model: use drafts by ngram or suffix"),
        (options.enable_lora, "adapters run in whole copies only: leave enable_lora out"),
    ):
        if is_there:
            raise InvalidOption(
                f"enable_expert_parallel is set with data_parallel_size {count}, and {what}, or leave "
                "enable_expert_parallel out to run whole copies"
            )
    if device_kind == "cuda" and ranks_share_gpu():
        _check_cache_size(options)


def check_rank_config(config: EngineConfig) -> None:
    """Checks the options of ranks once the model is known."""
    model = config.model
    if model.num_engines > 1 and not model.generates:
        raise InvalidOption(
            f"enable_expert_parallel is set with data_parallel_size {model.num_engines}, and {model.name} only pools; "
            "leave enable_expert_parallel out to run whole copies"
        )


def check_one_model(options: Sequence[Options]) -> None:
    """Several models of one engine run on one rank."""
    if len(options) > 1 and any(each.tensor_parallel_size > 1 for each in options):
        raise InvalidOption("tensor_parallel_size is given for one of several models; serve it alone, or use 1")
    if len(options) > 1 and any(each.enable_expert_parallel and each.data_parallel_size > 1 for each in options):
        raise InvalidOption(
            "enable_expert_parallel is given for one of several models; serve it alone, or leave it out"
        )


# Checks that the weights of a model can be offloaded to host memory.


def check_offload(options: Options, info: ModelInfo, device_kind: str, *, is_encoder: bool) -> None:
    """Raises InvalidOption if cpu_offload_gb is set and cannot have an effect."""
    if not options.cpu_offload_gb:
        return
    if device_kind == "cpu":
        raise InvalidOption("cpu_offload_gb is for GPUs: on a CPU the weights are in host memory anyway; remove it")
    if is_encoder:
        raise InvalidOption("cpu_offload_gb is for decoders, and the model is an encoder; remove it")
    if info.backend_folder:
        raise InvalidOption("cpu_offload_gb: transformers places the weights of its modules; remove it")
    if options.tensor_parallel_size > 1:
        raise InvalidOption("cpu_offload_gb is for one rank; set tensor_parallel_size to 1, or remove it")
    if options.enable_sleep_mode:
        raise InvalidOption("cpu_offload_gb and enable_sleep_mode exclude each other; remove one of them")


# Checks that the models of an engine with sleep mode can sleep.


def check_sleep_mode(configs: Sequence[EngineConfig]) -> None:
    """Raises InvalidOption if some model cannot sleep, or if some have sleep mode and others do not."""
    if not any(config.device.sleep_mode for config in configs):
        return
    for config in configs:
        name = config.model.name
        if not config.device.sleep_mode:
            raise InvalidOption(f"models of one engine sleep together; set enable_sleep_mode for {name} too")
        if config.model.num_ranks > 1:
            raise InvalidOption("enable_sleep_mode is for one rank; set tensor_parallel_size to 1")
        if config.model.info.backend_folder:
            raise InvalidOption(f"enable_sleep_mode: {name} is a module of transformers, whose memory stays; unset it")
        if config.draft is not None:
            raise InvalidOption(
                "enable_sleep_mode: the weights of a draft model stay on the device; use drafts by ngram or suffix"
            )


# Checks that a model can have a second tier of its prefix cache.


def check_tier(config: EngineConfig, num_replicas: int = 1) -> None:
    """Raises InvalidOption if kv_offloading_size or kv_transfer_config is set and the engine cannot use it."""
    cache, name = config.cache, config.model.name
    if not cache.tier_bytes:
        return
    option = "kv_offloading_size" if config.transfer is None else "kv_transfer_config"
    if config.transfer is not None and config.scheduler.short_rope is not None:
        raise InvalidOption(
            f"kv_transfer_config: {name} has two sets of rope factors, whose pages differ; remove it, or lower "
            "max_model_len to the original length"
        )
    if config.transfer is not None and config.transfer.cuda_ipc and config.device.kind != "cuda":
        raise InvalidOption(
            "kv_transfer_config: cuda_ipc is for engines on GPUs; leave it out: engines of one host share host memory"
        )
    if config.transfer is not None and config.transfer.listen is not None and num_replicas > 1:
        raise InvalidOption(
            f"kv_transfer_config: {num_replicas} replicas would serve pages at one port; start a server for each"
        )
    if not cache.groups and cache.states is None:
        raise InvalidOption(f"{option} is for models with a cache, and {name} has none; remove it")
    if cache.states is not None and not cache.states.num_checkpoints:
        raise InvalidOption(
            f"{option}: {name} has recurrent states, and pages are of no use without checkpoints; raise "
            "num_checkpoints, or remove it"
        )
    if not cache.prefix_caching:
        raise InvalidOption(f"{option} needs the prefix cache; leave enable_prefix_caching on, or remove it")
    if config.model.num_engines > 1:
        raise InvalidOption(
            f"{option} is for engines that share no experts; set enable_expert_parallel to False, or remove it"
        )


# The dtype of the KV cache, from the option `kv_cache_dtype`.


def resolve_cache_dtype(option: str, dtype: str) -> str:
    """`dtype`: of the model."""
    return dtype if option == "auto" else "fp8"


def check_cache_dtype(dtype: str, specs: Sequence[CacheSpec]) -> None:
    """Raises InvalidOption if the cache sites of the model cannot have this dtype."""
    if dtype != "fp8":
        return
    if not specs:
        raise InvalidOption("kv_cache_dtype is fp8, and the model has no KV cache; leave it out")
    if any(spec.value_dim for spec in specs):
        raise InvalidOption("kv_cache_dtype is fp8, which latent attention (MLA) does not support; use auto")
    if odd := [spec.head_dim for spec in specs if spec.head_dim % 4]:
        raise InvalidOption(f"kv_cache_dtype is fp8, and heads have {odd[0]} elements, no multiple of 4; use auto")


# The dtype of a model's head, which vLLM's `hf_overrides={"head_dtype": ...}` names.

_NAMES = {"half": "float16", "float": "float32", "double": "float64"}


def check_head_dtype(info: ModelInfo, pooling: PoolingInfo, dtype: str) -> None:
    """Raises InvalidOption if the config asks for another dtype than the head has: the model's `dtype` for the
    projection to tokens, at least float32 for what follows a pooling."""
    asked = info.extra.get("head_dtype")
    if asked is None:
        return
    of_tokens = pooling.generates and not pooling.num_labels
    found = dtype if of_tokens or dtype == "float64" else "float32"
    if (dtype if asked == "model" else _NAMES.get(asked, asked)) != found:
        why = (
            "projections to tokens have the model's dtype"
            if of_tokens
            else "what follows a pooling is at least float32"
        )
        raise InvalidOption(f"hf_overrides: head_dtype is {asked!r:.50}, and the head is computed in {found}: {why}")
