"""ModelDescription: what a front end must know about a model, as plain data that needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import msgspec

from slipstream.base.errors import InvalidAdapter, ModelError
from slipstream.checkpoint.generation import GenerationDefaults, ReasoningConfig, read_reasoning_config
from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.image_info import ImageInfo
from slipstream.checkpoint.locate import locate_tokenizer, part_paths, stored_shapes, weight_paths
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.config.adapter_config import read_lora_modules
from slipstream.config.config import EngineConfig, ModelConfig
from slipstream.config.options import Options
from slipstream.params.lora import LoRARequest
from slipstream.text.chat_template import load_chat_template
from slipstream.text.tokenizer import Tokenizer

# StoredWeights: what a model's files say about its weights, for answers to clients. No file is read whole.

# mixtures of tensor types, by general.file_type; other files are named by the type of most of their weights
_MIXTURES = {
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 21: "Q2_K_S",
    22: "IQ3_XS", 27: "IQ3_M", 29: "IQ2_M",
}  # fmt: skip
_SHORT = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


class StoredWeights(msgspec.Struct, frozen=True):
    format: str = ""  # gguf, safetensors or pytorch; empty: there are no files
    num_bytes: int = 0  # of the files
    num_params: int = 0  # 0: not known
    quantization: str = ""  # Q4_1, BF16, fp8 ...

    @classmethod
    def of(cls, config: ModelConfig) -> StoredWeights:
        try:
            path = Path(config.path)
            return _of_gguf(path) if path.is_file() else _of_folder(path, config)
        except (OSError, ModelError):
            return cls()  # the loader reports what is wrong, if it reads them at all


def _of_gguf(path: Path) -> StoredWeights:
    file = GgufFile.open(path)
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.kind] += math.prod(tensor.shape)
    mixture = _MIXTURES.get(file.fields.get("general.file_type", -1))
    kind = mixture or max(counts, key=counts.__getitem__, default="")
    return StoredWeights("gguf", _sum_of_sizes(part_paths(path)), counts.total(), kind)


def _of_folder(folder: Path, config: ModelConfig) -> StoredWeights:
    format, files = weight_paths(folder)
    stored = config.info.quantization
    kind = _SHORT.get(config.info.dtype or "", "") if stored is None else stored.method
    # packed weights hold several parameters in a number
    is_plain = format == "safetensors" and stored is None
    shapes = [shape for path in files for shape in stored_shapes(path).values()] if is_plain else []
    return StoredWeights(format, _sum_of_sizes(files), sum(map(math.prod, shapes)), kind)


def _sum_of_sizes(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Made where the model is opened; sent before its weights are loaded."""

    name: str
    tokenizer: str | None  # a folder or a file; None where prompts are token ids
    chat_template: str | None  # in place of the tokenizer's own
    allow_control_tokens: bool = False  # in the text of chat messages
    defaults: GenerationDefaults
    max_model_len: int
    max_positions: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()  # tokens that end an answer
    pooling: PoolingInfo | None = None  # None: it only generates
    dtype: str = "float32"
    architecture: str = ""
    weights: StoredWeights = StoredWeights()
    gpu_bytes: int = 0  # of the weights' files that are in the memory of a GPU
    max_batch_tokens: int = 0  # of a step
    max_waiting: int | None = None  # prompts that may wait in the core; None: unknown
    reasoning_config: ReasoningConfig | None = None  # None: by the chat template
    max_lora_rank: int = 0  # of LoRA adapters that requests may have; 0: they have none
    adapters: tuple[LoRARequest, ...] = ()  # adapters that requests may name as their model, at start
    embed_size: int = 0  # values of an embedding in prompt_embeds; 0: prompts are texts or token ids
    logprobs_mode: str = "raw_logprobs"  # the values that logprobs of generated tokens have
    max_kept: int | None = None  # tokens of queries that the core stores; None: unknown
    images: ImageInfo | None = None  # how the model sees images; None: prompts have none
    why_no_images: str = "the model reads text only"
    max_images: int = 0  # of a prompt
    media_domains: tuple[str, ...] = ()  # from which images are fetched; "*": all
    media_folder: str = ""  # whose files may be images; "": none

    @property
    def generates(self) -> bool:
        return self.pooling is None or self.pooling.generates

    @property
    def takes_adapters(self) -> bool:
        return self.max_lora_rank > 0

    @property
    def known_ids(self) -> str:
        """The token ids of the model, for error messages about other ids."""
        return f"{self.name} has 0 to {self.vocab_size - 1}"

    @property
    def too_long_hint(self) -> str:
        """For error messages about prompts that are too long."""
        raise_it = ", or raise max_model_len" if self.max_model_len < self.max_positions else ""
        return f"Please reduce the length of the prompt or set truncate_prompt_tokens{raise_it}"

    @classmethod
    def of(
        cls, options: Options, config: EngineConfig, defaults: GenerationDefaults, image_limit: int | str
    ) -> ModelDescription:
        """`image_limit`: images of a prompt, or why it has none."""
        info = config.model.info
        tokenizer = config.model.path
        if options.tokenizer is not None or options.tokenizer_revision is not None:
            given = options.tokenizer or options.model or tokenizer
            tokenizer = locate_tokenizer(given, options.download_dir, options.tokenizer_revision)
        weights = StoredWeights.of(config.model)
        on_gpu = config.device.kind != "cpu"
        return cls(
            name=config.model.name,
            tokenizer=None if options.skip_tokenizer_init else tokenizer,
            chat_template=options.chat_template,
            allow_control_tokens=options.allow_control_tokens,
            defaults=defaults,
            max_model_len=config.scheduler.max_model_len,
            max_positions=info.max_positions,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            pooling=config.model.pooling,
            dtype=config.model.dtype,
            architecture=info.architecture,
            weights=weights,
            gpu_bytes=max(0, weights.num_bytes - config.model.offload_bytes) if on_gpu else 0,
            max_batch_tokens=config.scheduler.max_num_batched_tokens,
            max_waiting=config.scheduler.max_waiting,
            embed_size=info.hidden_size if config.scheduler.prompt_embeds else 0,
            max_kept=config.scheduler.max_kept,
            logprobs_mode=config.model.logprobs_mode,
            max_lora_rank=0 if config.adapters is None else config.adapters.max_lora_rank,
            adapters=read_lora_modules(options.lora_modules),
            images=config.model.images,
            why_no_images=image_limit if isinstance(image_limit, str) else "",
            max_images=0 if isinstance(image_limit, str) else image_limit,
            media_domains=tuple(options.allowed_media_domains or ()),
            media_folder=options.allowed_local_media_path,
            reasoning_config=read_reasoning_config(options.reasoning_config),
        )

    def check_adapter(self, lora_request: object) -> LoRARequest | None:
        """Returns the adapter of a request. Raises if the model takes none."""
        if lora_request is None:
            return None
        if not isinstance(lora_request, LoRARequest):
            kind = type(lora_request).__name__
            raise InvalidAdapter(f"lora_request is {kind}; give a LoRARequest", param="lora_request")
        if not self.takes_adapters:
            raise InvalidAdapter(
                f"{self.name} takes no adapters; start the engine with enable_lora, or remove lora_request",
                param="lora_request",
            )
        return lora_request

    def load_tokenizer(self) -> Tokenizer | None:
        if self.tokenizer is None:
            return None
        tokenizer = Tokenizer.load(self.tokenizer)
        if self.chat_template is not None:
            tokenizer.chat_templates = {"default": load_chat_template(self.chat_template)}
        return tokenizer
