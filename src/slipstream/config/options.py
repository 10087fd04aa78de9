"""Options: every option of an engine, with its description.

The command line, `LLM(...)` and the API reference are made from this list. None means automatic: see `resolve.py`.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from slipstream.base.errors import InvalidOption
from slipstream.base.typed import doc
from slipstream.config.vllm_args import from_vllm

DEVICES = ("auto", "cpu", "cuda")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[
        str | None,
        doc("a folder in Hugging Face layout, a .gguf file or a hub name; default: the embedded model for the task"),
    ] = None
    task: Annotated[
        Literal["auto", "generate", "embed", "classify", "score", "rerank", "token_embed", "token_classify", "sparse"],
        doc("the model's task; auto: what it was trained for. Without a model, embed, score and rerank run MiniLM"),
    ] = "auto"
    pooling_type: Annotated[
        str | None,
        doc(
            "pooling method: first (or cls), last, mean, max, mean_sqrt_len, weightedmean, or several concatenated, "
            "as mean+max; all or step for token results; default: the model's"
        ),
    ] = None
    normalize: Annotated[bool | None, doc("scale vectors to length 1; default: the model's setting")] = None
    use_activation: Annotated[
        bool | None,
        doc("no: raw scores and vectors that are not normalised; yes: as normalize; default: the model's setting"),
    ] = None
    classify_activation: Annotated[
        Literal["softmax", "sigmoid", "identity"] | None,
        doc("activation of a classifier's scores; default: the model's setting"),
    ] = None
    tokenizer: Annotated[str | None, doc("folder, tokenizer.json or hub name, instead of the model's own")] = None
    tokenizer_revision: Annotated[str | None, doc("branch, tag or commit of the tokenizer on the hub")] = None
    skip_tokenizer_init: Annotated[bool, doc("load no tokenizer; prompts must be lists of token ids")] = False
    chat_template: Annotated[str | None, doc("a Jinja chat template or its path, instead of the model's")] = None
    allow_control_tokens: Annotated[
        bool,
        doc("encode control tokens in chat messages, <|im_end|> for example, as tokens instead of text"),
    ] = False
    model_impl: Annotated[
        Literal["auto", "slipstream", "vllm", "transformers"],
        doc(
            "code of the model: slipstream (or vllm), its family here; transformers, the module of that library with "
            "our attention, eagerly; auto: the second for architectures without a family"
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"], doc("format of the weights; dummy: seeded random weights")
    ] = "auto"
    quantization: Annotated[
        str | None,
        doc(
            "fp8: quantise the weights of an unquantised checkpoint to FP8 at load; a method of a quantised checkpoint "
            "(awq, gptq, compressed-tensors, fp8) only checks that it is the checkpoint's; see docs/formats.md"
        ),
    ] = None
    dequantize: Annotated[
        bool | None, doc("dequantise a low-bit file to dtype at load; default: only GGUF files on a GPU")
    ] = None
    revision: Annotated[str | None, doc("branch, tag or commit of a hub name")] = None
    download_dir: Annotated[str | None, doc("folder for models of the hub; default: that of huggingface_hub")] = None
    hf_overrides: Annotated[
        dict[str, Any] | str | None, doc("fields that replace those of the model's config.json, as JSON")
    ] = None
    generation_config: Annotated[
        str,
        doc(
            "source of the sampling defaults: auto (the model's generation_config.json), vllm (none of the model's), "
            "or a folder with that file"
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | str | None,
        doc('fields that replace those of generation_config.json, as JSON: {"temperature": 0.5}'),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "float64", "bfloat16", "float16"],
        doc("dtype of weights and activations; auto: the checkpoint's, or one that this machine computes fast"),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], doc("device that runs the model")] = "auto"
    max_model_len: Annotated[
        int | Literal["auto"] | None,
        doc(
            "maximum tokens of prompt and output together; default: the model's limit; auto or -1: what fits the memory"
        ),
    ] = None
    max_num_seqs: Annotated[int | None, doc("maximum requests running at the same time")] = None
    max_num_batched_tokens: Annotated[
        int | None,
        doc("maximum tokens per step; 512 on a CPU, 8192 on a GPU, twice that with 64 GiB and no max_itl"),
    ] = None
    max_waiting: Annotated[int, doc("maximum waiting requests; more are refused")] = 100_000
    kv_cache_memory: Annotated[int | str | None, doc("size of the KV cache in bytes, as a number or like 2GiB")] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "fp8_e4m3"],
        doc("dtype of the KV cache; auto: the model's; fp8: half of bfloat16, with a scale per position and head"),
    ] = "auto"
    kv_offloading_size: Annotated[
        float | None,
        doc("GiB of host memory for KV cache pages that the device has no room for: a second tier of the prefix cache"),
    ] = None
    role: Annotated[
        Literal["prefill", "decode", "both"] | None,
        doc(
            "hand-off of KV cache pages: prefill serves pages of prompts to other engines, decode fetches them; "
            "kv_transfer_config has the addresses"
        ),
    ] = None
    kv_transfer_config: Annotated[
        dict[str, Any] | str | None,
        doc(
            'hand-off of KV cache pages between engines, as JSON: {"kv_role": "kv_producer", "kv_consumer" or '
            '"kv_both", "kv_ip": HOST, "kv_port": PORT, "kv_peers": ["HOST:PORT"], "kv_buffer_size": BYTES, '
            '"kv_timeout": SECONDS, "kv_connector_extra_config": {"cuda_ipc": true}}; see docs/scale.md'
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None, doc("fraction of the device's memory for the engine, if kv_cache_memory is not given")
    ] = None
    num_pages: Annotated[int | None, doc("size of the KV cache in pages")] = None
    page_size: Annotated[int, doc("positions per page of the KV cache")] = 16
    num_checkpoints: Annotated[
        int | None,
        doc(
            "recurrent states kept for prefix caching, for models that have such states; default: a quarter of the "
            "memory of the cache"
        ),
    ] = None
    enable_prefix_caching: Annotated[bool, doc("reuse KV cache pages of equal prompt prefixes")] = True
    enable_chunked_prefill: Annotated[bool, doc("split long prompts over several steps")] = True
    depth: Annotated[
        int | None, doc("steps launched ahead of the oldest one whose result was not read; 0: synchronous")
    ] = None
    max_itl: Annotated[
        float | None,
        doc(
            "target inter-token latency in milliseconds: limits the prefill tokens of steps in which others decode; "
            "0: no limit. Default: 50 on a GPU, no limit for LLM"
        ),
    ] = None
    cpu_offload_gb: Annotated[
        float, doc("GiB of a GPU's memory to save by weights in host memory, which every step copies to the GPU")
    ] = 0
    enforce_eager: Annotated[bool, doc("launch kernels eagerly instead of replaying CUDA graphs")] = False
    enable_sleep_mode: Annotated[
        bool, doc("allow sleep and wake_up, which release the device memory of weights and KV cache and take it back")
    ] = False
    enable_prompt_embeds: Annotated[
        bool, doc("accept prompt_embeds, the embeddings of a prompt's tokens, in place of a text or token ids")
    ] = False
    deterministic: Annotated[
        bool,
        doc("batch-invariant results on a GPU: the same bits alone or batched; slower, see docs/async.md"),
    ] = False
    limit_mm_per_prompt: Annotated[
        dict[str, Any] | str | None,
        doc('images per prompt, not in servers yet, as JSON: {"image": 4}; 0 loads the text part only. Default: 16'),
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | str | None,
        doc('fields of the image processor, as JSON: {"max_pixels": 1003520}'),
    ] = None
    allowed_media_domains: Annotated[list[str] | None, doc('domains from which images are fetched, "*": all')] = None
    allowed_local_media_path: Annotated[str, doc("folder whose files may be images")] = ""
    speculative_config: Annotated[
        dict[str, Any] | str | None,
        doc(
            'speculative decoding, as JSON: {"method": "ngram", "suffix", "mtp", "draft_model", "eagle", "eagle3" or '
            '"dflash", "model": FOLDER of the last four, "num_speculative_tokens": K, "prompt_lookup_max": N, '
            '"prompt_lookup_min": N}; tokens do not change'
        ),
    ] = None
    drafts: Annotated[
        str | None, doc("short form of speculative_config: a method, or a method and K, as ngram or suffix:8")
    ] = None
    tensor_parallel_size: Annotated[
        int,
        doc("processes that share one model, each with a part of its heads and MLPs, and a GPU; see docs/scale.md"),
    ] = 1
    data_parallel_size: Annotated[
        int,
        doc("replicas of the whole engine, each with its own GPU or share of the CPU threads; see docs/scale.md"),
    ] = 1
    distributed_executor_backend: Annotated[
        Literal["uni", "mp", "ray"] | None,
        doc(
            "what starts ranks and replicas: ray places them on the nodes of a Ray cluster (needs slipstream[ray]); "
            "uni, mp and None start processes of this machine as needed"
        ),
    ] = None
    enable_expert_parallel: Annotated[
        bool,
        doc(
            "divide the experts of a model among the engines of data_parallel_size, or whole experts among the ranks "
            "of tensor_parallel_size; see docs/scale.md"
        ),
    ] = False
    seed: Annotated[int, doc("seed of requests without their own, and of dummy weights")] = 0
    num_threads: Annotated[
        int | None,
        doc(
            "CPU threads of the model; default: the physical cores that this process may use; engines that "
            "run on the same cores divide them"
        ),
    ] = None
    reasoning_config: Annotated[
        dict[str, Any] | str | None,
        doc(
            'how the model marks its reasoning, for thinking_token_budget: {"reasoning_start_str": "<think>", '
            '"reasoning_end_str": "</think>"}; default: by the chat template'
        ),
    ] = None
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"],
        doc(
            "values of logprobs of generated tokens: log-softmax or logits, of the model (raw) or after penalties, "
            "masks, temperature and truncation (processed); prompt logprobs are always raw_logprobs"
        ),
    ] = "raw_logprobs"
    logits_processors: Annotated[
        list[Any] | None,
        doc("classes of logits processors, in Python as classes or by name as package.module:Class; repeatable"),
    ] = None
    enable_lora: Annotated[bool, doc("take requests with LoRA adapters")] = False
    max_loras: Annotated[int | None, doc("maximum number of distinct adapters in one step; default 1")] = None
    max_lora_rank: Annotated[int | None, doc("maximum rank of adapters, up to 256; default 16")] = None
    max_cpu_loras: Annotated[int | None, doc("maximum number of adapters in host memory; default: max_loras")] = None
    lora_modules: Annotated[
        list[str] | None, doc("adapters that requests name as their model, as name=folder; repeatable")
    ] = None
    record_steps: Annotated[
        int, doc("last steps that the flight recorder keeps in memory, for slipstream replay; 0: none")
    ] = 256
    record_dir: Annotated[
        str | None, doc("folder for recordings of failed engines; default: a folder of this user for temporary files")
    ] = None
    record_redact: Annotated[bool, doc("leave token ids and texts out of the recordings in record_dir")] = False
    record_every_mb: Annotated[
        int, doc("also write the last steps to a file each time this many MB were recorded; 0: only after a failure")
    ] = 0
    served_model_name: Annotated[str | None, doc("name of the model in requests and responses")] = None


def make_options(**given: Any) -> Options:
    """Options from keyword arguments, ours and vLLM's, with every mistake named."""
    known = _hints()
    given = from_vllm(given, known)
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "the options are " + ", ".join(known)
        raise InvalidOption(f"there is no option {name}; {hint}")
    for name, value in given.items():
        if name == "device" and isinstance(value, str) and value not in DEVICES:
            raise unknown_device(value, name)
        _check_type(name, value, known[name])
    return Options(**given)


@functools.cache
def _hints() -> dict[str, Any]:
    """The types of all options, with their descriptions; reading the annotations takes 4 ms."""
    return get_type_hints(Options, include_extras=True)


def unknown_device(text: str, source: str) -> InvalidOption:
    """The error for a device that is neither the CPU nor CUDA. `source`: what asked for it."""
    kind, _, index = text.partition(":")
    if kind == "cuda" and index.isdecimal():
        hint = f"it takes cuda, and CUDA_VISIBLE_DEVICES={index} in the environment chooses the GPU"
    else:
        hint = "models run on cpu, and on NVIDIA GPUs as cuda; use one of these, or auto"
    return InvalidOption(f"{source} is {text!r}, which is not supported: {hint}")


def _check_type(name: str, value: Any, hint: Any) -> None:
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    try:
        msgspec.convert(value, kind, strict=True)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter for half of a surrogate pair
        raise InvalidOption(f"{name} is {value!r}; it takes {describe_type(kind)}") from None
    if name == "logits_processors" and not all(isinstance(each, str | type) for each in value or ()):
        raise InvalidOption(f"{name} is {value!r}; it takes classes, or their names as package.module:Class")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidOption(f"{name} is {value}; give a finite number")


def describe_type(kind: Any) -> str:
    """An annotation in a user's words."""
    if get_origin(kind) is Literal:
        return " or ".join(repr(value) for value in get_args(kind))
    if get_origin(kind) in (list, dict):
        return "a list of strings" if get_origin(kind) is list else "names with a value each"
    if args := get_args(kind):
        return " or ".join(describe_type(arg) for arg in args)
    return {int: "a whole number", float: "a number", str: "a string", bool: "True or False", type(None): "None"}.get(
        kind, str(kind)
    )


def options_of(model: str | None, models: Mapping[str, Any] | None, common: Mapping[str, Any]) -> list[Options]:
    """The options of one model, or of several by name: each a model, or an object with its own options."""
    if models is None:
        return [make_options(model=None if model is None else str(model), **common)]
    if model is not None:
        raise InvalidOption("model and models are both given; give one model, or several by name")
    if not isinstance(models, Mapping) or not models:
        said = "holds nothing" if isinstance(models, Mapping) else f"is {type(models).__name__}"
        raise InvalidOption(f'models {said}; give names and models, as {{"chat": MODEL, "embed": {{"task": "embed"}}}}')
    found = []
    for name, given in models.items():
        own = dict(given) if isinstance(given, Mapping) else {"model": None if given is None else str(given)}
        found.append(make_options(**{**common, "served_model_name": str(name), **own}))
    return found


# Reads values of options that several options share: positive numbers, and sizes in bytes.

_MAX = {"num_threads": 1024, "max_num_seqs": 65_536}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def positive(name: str, value: int | str | None, default: int | None = None) -> int:
    if value is None and default is not None:
        return default
    limit = _MAX.get(name)
    if limit is not None and isinstance(value, int) and value > limit:
        raise InvalidOption(f"{name} is {value}; give at most {limit}")
    if not isinstance(value, int) or value < 1:
        raise InvalidOption(f"{name} is {value!r}; give a whole number from 1 up")
    return value


def parse_bytes(value: int | str) -> int:
    """A number of bytes, or a text such as 512MiB or 2GB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?)B?\s*", str(value).upper())
    if match is None or match[2] == "I" or (size := int(float(match[1]) * _UNITS[match[2]])) < 1:
        raise InvalidOption(f"{value!r} is not a size; give bytes, or a text like 512MiB or 2GiB")
    return size
