"""ModelDescription: what a front end must know about a model, as plain data that needs no torch."""

from __future__ import annotations

import msgspec

from slipstream.base.errors import InvalidAdapter
from slipstream.checkpoint.generation import GenerationDefaults, ReasoningConfig, read_reasoning_config
from slipstream.checkpoint.locate import locate_tokenizer
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.config.adapter_config import read_lora_modules
from slipstream.config.config import EngineConfig
from slipstream.config.options import Options
from slipstream.config.stored_weights import StoredWeights
from slipstream.params.lora import LoRARequest
from slipstream.text.chat_template import load_chat_template
from slipstream.text.tokenizer import Tokenizer


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
    def of(cls, options: Options, config: EngineConfig, defaults: GenerationDefaults) -> ModelDescription:
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
