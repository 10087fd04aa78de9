"""The constructor arguments of vLLM's LLM and EngineArgs (0.24): what each does here.

An argument is an option of ours under the same name, or is translated to one (`TRANSLATED`), or changes nothing with
one device and text models (`NO_EFFECT`: any value is accepted), or asks for what the engine does not have (`REFUSED`:
accepted with the values that change nothing). `docs/vllm.md` has the same table for people; tests compare both with the
list of vLLM's wheel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream.base.errors import InvalidOption

_PARALLEL = (
    "tensor_parallel_size divides a model among ranks, data_parallel_size runs copies, and there is no other division"
)
_MEDIA = "models read texts and images"
_OFFLOAD = "cpu_offload_gb chooses whole layers, the last ones, and prefetches one"
_COMPILE = "there is no compiler, and graphs are captured by step size; enforce_eager=True turns them off"
_KERNELS = "kernels are chosen by shape and device"
_TRANSFER = "kv_transfer_config exchanges KV cache pages, and nothing else is exchanged between engines"
_MAMBA = "recurrent states have the dtype and kernels that their model needs"
_TRACES = "use slipstream serve --otlp-traces-endpoint, its /metrics, or slipstream bench"
_SCHEDULER = "the scheduler has no such setting"

NO_EFFECT: dict[str, str] = {
    **dict.fromkeys(("aggregate_engine_logging", "enable_log_requests"),
                    "LLM logs no statistics; the server has --status-interval"),
    "trust_remote_code": "code of a checkpoint is never run; an architecture that needs it is refused by name",
    "code_revision": "code of a checkpoint is never run",
    "swap_space": "preempted requests are computed again, as in vLLM",
    "disable_custom_all_reduce": _PARALLEL,
    **dict.fromkeys(
        ("master_addr", "master_port", "distributed_timeout_seconds", "cpu_distributed_timeout_seconds",
         "dcp_comm_backend", "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size", "data_parallel_size_local",
         "data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend", "all2all_backend",
         "disable_nccl_for_dp_synchronization", "eplb_config", "expert_placement_strategy",
         "enable_ep_weight_filter", "ray_workers_use_nsight", "dbo_decode_token_threshold",
         "dbo_prefill_token_threshold"), f"it is for several devices; {_PARALLEL}"),
    "max_parallel_loading_workers": "one process loads the weights",
    **dict.fromkeys(("safetensors_load_strategy", "safetensors_prefetch_num_threads",
                     "safetensors_prefetch_block_size", "pt_load_map_location"),
                    "weights are mapped and read in the order of the file"),
    "fully_sharded_loras": f"it is for several devices; {_PARALLEL}",
    **dict.fromkeys(("specialize_active_lora", "enable_mixed_moe_lora_format", "enable_tower_connector_lora"),
                    "steps with adapters have graphs of their own; adapters of experts and images are refused by name"),
    **dict.fromkeys(
        ("enable_mm_embeds", "interleave_mm_strings",
         "media_io_kwargs", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb",
         "mm_encoder_tp_mode", "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
         "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin", "skip_mm_profiling",
         "video_pruning_rate", "mm_tensor_ipc", "disable_chunked_mm_input", "enable_mm_processor_stats",
         "language_model_only"), f"it is for images, audio and video; {_MEDIA}"),
    **dict.fromkeys(("compilation_config", "optimization_level", "cudagraph_capture_sizes",
                     "max_cudagraph_capture_size"), _COMPILE),
    **dict.fromkeys(("attention_backend", "attention_config", "enable_flashinfer_autotune"), _KERNELS),
    "disable_cascade_attn": "there is no cascade attention",
    "prefix_caching_hash_algo": "page hashes are BLAKE2b digests",
    "disable_hybrid_kv_cache_manager": "each kind of layer has its own pages",
    "scheduler_reserve_full_isl": "a prompt is admitted when its pages fit",
    "fail_on_environ_validation": "vLLM's environment variables are not read",
    "shutdown_timeout": "close waits for the current call",
    "allow_deprecated_quantization": "the checkpoint says how it is quantised",
    "enable_cumem_allocator": "enable_sleep_mode decides",
    "jit_monitor_verbose": _TRACES,
    "renderer_num_workers": "prompts are tokenised by the threads of the tokenizer",
    "offload_num_in_group": "it is for offload_group_size",
    "offload_prefetch_step": "it is for offload_group_size",
    "show_hidden_metrics_for_version": "no metrics are hidden",
    "use_fp64_gumbel": "noise is drawn in float32 from (seed, sample, position), whatever the batch",
    "kv_cache_metrics_sample": "it is for kv_cache_metrics",
    "mamba_cache_philox_rounds": "it is for enable_mamba_cache_stochastic_rounding",
    "hf_token": "downloads use the login of huggingface_hub (hf auth login) or HF_TOKEN",
}  # fmt: skip

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("pipeline_parallel_size", "prefill_context_parallel_size",
                     "decode_context_parallel_size", "nnodes"), ((1,), f"{_PARALLEL}; use 1")),
    **dict.fromkeys(("node_rank", "data_parallel_rank", "data_parallel_start_rank"), ((0,), _PARALLEL)),
    **dict.fromkeys(("data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb",
                     "enable_elastic_ep", "enable_dbo", "enable_eplb"),
                    ((False,), _PARALLEL)),
    "ubatch_size": ((0,), _PARALLEL),
    "device_ids": (([0],), "CUDA_VISIBLE_DEVICES in the environment chooses the GPU"),
    **dict.fromkeys(("worker_cls",), (("auto",), "there are no workers to replace")),
    "worker_extension_cls": (("",), "there are no workers to extend; apply_model calls a function on the model"),
    "scheduler_cls": ((), "the scheduler cannot be replaced"),
    **dict.fromkeys(("numa_bind",), ((False,), "start the process with numactl")),
    **dict.fromkeys(("numa_bind_nodes", "numa_bind_cpus"), ((), "start the process with numactl")),
    "quantization_config": (({},), "the checkpoint itself says how it is quantised"),
    "kv_cache_dtype_skip_layers": (([],), "all layers have the same kv_cache_dtype"),
    "calculate_kv_scales": ((False,), "scales of an FP8 cache are computed when a position is written"),
    "override_attention_dtype": ((), "attention has the model's dtype"),
    "tokenizer_mode": (("auto", "hf", "mistral"), "the tokenizer is that of tokenizer.json or of the GGUF file"),
    "config_format": (("auto", "hf", "mistral"), "a folder is read in Hugging Face layout, also one of Mistral's"),
    "hf_config_path": ((), "the model's folder has its config.json; use hf_overrides for changes"),
    "model_weights": (("",), "give the folder of the weights as model"),
    "model_loader_extra_config": (({},), "weights are read as they are"),
    "ignore_patterns": (("original/**/*", ["original/**/*"], []), "only the files that are read are downloaded"),
    "disable_sliding_window": ((False,), "the window is part of the model; lower max_model_len instead"),
    "enable_return_routed_experts": ((False,), "the experts of a token are not reported"),
    "default_mm_loras": (({},), _MEDIA),
    "mm_encoder_only": ((False,), _MEDIA),
    "lora_dtype": (("auto",), "adapters have the model's dtype"),
    "lora_target_modules": ((), "every linear layer, the embedding and lm_head can have an adapter"),
    "offload_group_size": ((0,), _OFFLOAD),
    "offload_backend": (("auto",), _OFFLOAD),
    **dict.fromkeys(("cpu_offload_params", "offload_params"), ((set(), []), _OFFLOAD)),
    "kv_offloading_backend": (("native",), "the engine copies the pages of kv_offloading_size itself; use native"),
    "performance_mode": (("balanced",), "max_itl sets the balance of latency and throughput"),
    **dict.fromkeys(("moe_backend", "linear_backend"), (("auto",), _KERNELS)),
    "gdn_prefill_backend": ((), _KERNELS),
    **dict.fromkeys(("kernel_config", "ir_op_priority"), (({},), _KERNELS)),
    "mamba_config": (({},), _MAMBA),
    **dict.fromkeys(("mamba_cache_dtype", "mamba_ssm_cache_dtype"), (("auto",), _MAMBA)),
    "mamba_block_size": ((), "states are kept at multiples of 64 tokens; num_checkpoints sets how many"),
    "mamba_cache_mode": (("none", "align", "auto"), "enable_prefix_caching and num_checkpoints decide"),
    "mamba_backend": (("triton", "TRITON"), _MAMBA),
    "enable_mamba_cache_stochastic_rounding": ((False,), _MAMBA),
    **dict.fromkeys(("kv_events_config", "ec_transfer_config", "weight_transfer_config"),
                    (({},), _TRANSFER)),
    "kv_sharing_fast_prefill": ((False,), _SCHEDULER),
    **dict.fromkeys(("max_num_partial_prefills", "max_long_partial_prefills", "prefill_schedule_interval"),
                    ((1,), f"{_SCHEDULER}; max_itl limits prefill beside decode")),
    "long_prefill_token_threshold": ((0,), f"{_SCHEDULER}; max_itl limits prefill beside decode"),
    "watermark": ((0, 0.0), _SCHEDULER),
    "stream_interval": ((1,), "use slipstream serve --stream-interval"),
    "reasoning_parser_plugin": (("",), "parsers are named; see docs/tools-and-reasoning.md"),
    "io_processor_plugin": ((), "prompts are texts or token ids"),
    "spec_model": ((), 'drafts come from the text: spec_method "ngram" or "suffix"'),
    "diffusion_config": (({},), "text is generated token by token"),
    "otlp_traces_endpoint": ((), _TRACES),
    "collect_detailed_traces": (([],), _TRACES),
    **dict.fromkeys(("kv_cache_metrics", "cudagraph_metrics", "enable_layerwise_nvtx_tracing", "enable_mfu_metrics",
                     "enable_logging_iteration_details"), ((False,), _TRACES)),
    "additional_config": (({},), "there is no platform plugin"),
    "tokens_only": ((False,), "use skip_tokenizer_init and detokenize=False"),
}  # fmt: skip

_DTYPES = {"half": "float16", "float": "float32", "double": "float64"}


def from_vllm(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments under the names of our options, `known`. Raises for what they cannot do.

    None means the default, of any argument. A name that neither has stays as it is.
    """
    found: dict[str, Any] = {}
    if given.get("spec_method") is not None or given.get("spec_tokens") is not None:
        found["speculative_config"] = _speculative_config(given)
    for name, value in given.items():
        if value is None or name in ("spec_method", "spec_tokens") or (name not in known and name in NO_EFFECT):
            continue
        if name in TRANSLATED:
            for ours, translated in TRANSLATED[name](value).items():
                if given.get(ours) is not None and ours != name and given[ours] != translated:
                    raise InvalidOption(f"{name} and {ours} are names of one option and differ; remove one")
                found[ours] = translated
        elif name not in known and name in REFUSED:
            accepted, hint = REFUSED[name]
            if not any(value is one or (value == one and type(value) is not bool) for one in accepted):
                raise InvalidOption(f"{name}={value!r:.100} is not supported: {hint}")
        else:
            found[name] = str(value) if isinstance(value, Path) else value
    return found


def _speculative_config(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("speculative_config") is not None:
        raise InvalidOption("spec_method and spec_tokens are short forms of speculative_config; remove one of them")
    names = {"method": given.get("spec_method"), "num_speculative_tokens": given.get("spec_tokens")}
    return {name: value for name, value in names.items() if value is not None}


def _renamed(ours: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {ours: value}


def _dtype(value: Any) -> dict[str, Any]:
    value = _dtype_name(value)
    return {"dtype": _DTYPES.get(value, value) if isinstance(value, str) else value}


def _dtype_name(value: Any) -> Any:
    """A torch dtype as text; other values as they are."""
    is_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    return str(value).removeprefix("torch.") if is_dtype else value


def _hf_overrides(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        value = {name: _dtype_name(one) for name, one in value.items()}
    return {"hf_overrides": value}


def _runner(value: Any) -> dict[str, Any]:
    if value not in ("auto", "generate", "pooling", "draft"):
        raise InvalidOption(f"runner is {value!r:.50}; give auto, generate or pooling")
    if value == "draft":
        raise InvalidOption("runner='draft' is not supported: drafts come from the text, see speculative_config")
    return {"task": "generate"} if value == "generate" else {}  # every model can pool


def _convert(value: Any) -> dict[str, Any]:
    if value not in ("auto", "none", "embed", "classify"):
        raise InvalidOption(f"convert is {value!r:.50}; give auto, none, embed or classify")
    return {"task": value} if value in ("embed", "classify") else {}


def _async_scheduling(value: Any) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise InvalidOption(f"async_scheduling is {value!r:.50}; give True or False")
    return {"depth": 1 if value else 0}


def _scheduling_policy(value: Any) -> dict[str, Any]:
    if value not in ("fcfs", "priority"):
        raise InvalidOption(f"scheduling_policy is {value!r:.50}; give fcfs or priority")
    return {}  # requests of one priority run in order of arrival, and all have the same unless they say otherwise


def _served_model_name(value: Any) -> dict[str, Any]:
    if isinstance(value, list | tuple):
        if len(value) > 1:
            raise InvalidOption(f"served_model_name has {len(value)} names; give one")
        value = value[0] if value else None
    return {} if value is None else {"served_model_name": value}


def _pooler_config(value: Any) -> dict[str, Any]:
    return as_pooler_config(value).options()


RENAMED = {
    "block_size": "page_size",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_pages",
}

TRANSLATED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "load_format": lambda value: {"load_format": "auto" if value in ("hf", "mistral") else value},
    "hf_overrides": _hf_overrides,
    "dtype": _dtype,
    **{name: _renamed(ours) for name, ours in RENAMED.items()},
    "runner": _runner,
    "convert": _convert,
    "async_scheduling": _async_scheduling,
    "scheduling_policy": _scheduling_policy,
    "served_model_name": _served_model_name,
    "pooler_config": _pooler_config,
}


# PoolerConfig: vLLM's settings of pooling, as options of ours.


class PoolerConfig(msgspec.Struct):
    """`LLM(pooler_config=PoolerConfig(pooling_type="MEAN"))`. The fields are vLLM's; None is the model's setting."""

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def options(self) -> dict[str, Any]:
        """The options with the same meaning. Raises for a field that none has."""
        for name, hint in _REFUSED.items():
            if getattr(self, name) not in (None, False):
                raise InvalidOption(f"PoolerConfig.{name} is not supported: {hint}")
        kinds = {self.pooling_type, self.seq_pooling_type, self.tok_pooling_type} - {None}
        if len(kinds) > 1:
            raise InvalidOption(f"PoolerConfig has several pooling types, {sorted(map(str, kinds))}; give one")
        found = {"task": self.task, "use_activation": self.use_activation}
        found["pooling_type"] = str(kinds.pop()).lower() if kinds else None
        return {name: value for name, value in found.items() if value is not None}


_BY_REQUEST = "give it in PoolingParams"
_REFUSED = {
    "dimensions": _BY_REQUEST,
    "step_tag_id": _BY_REQUEST,
    "returned_token_ids": _BY_REQUEST,
    "enable_chunked_processing": "a text beyond the model's length is truncated or refused",
    "max_embed_len": "use max_model_len, or truncate_prompt_tokens in PoolingParams",
    "logit_mean": "scores are those of the model",
    "logit_sigma": "scores are those of the model",
}


def as_pooler_config(given: object) -> PoolerConfig:
    """From an object of this class, or from its fields. Raises for an unknown field."""
    if isinstance(given, PoolerConfig):
        return given
    if not isinstance(given, Mapping):
        raise InvalidOption(f"pooler_config is {type(given).__name__}; give a PoolerConfig or its fields")
    if unknown := [name for name in given if name not in PoolerConfig.__struct_fields__]:
        raise InvalidOption(f"PoolerConfig has no {unknown[0]}; it has {', '.join(PoolerConfig.__struct_fields__)}")
    return PoolerConfig(**given)
