"""ModelConfigView: the fields of vLLM's model_config that scripts read."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec

from slipstream.config.config import EngineConfig


class ModelConfigView(msgspec.Struct, frozen=True):
    config: EngineConfig

    @property
    def model(self) -> str:
        return self.config.model.path

    @property
    def tokenizer(self) -> str:
        return self.config.model.path

    @property
    def served_model_name(self) -> str:
        return self.config.model.name

    @property
    def max_model_len(self) -> int:
        return self.config.scheduler.max_model_len

    @property
    def seed(self) -> int:
        return self.config.scheduler.seed

    @property
    def enforce_eager(self) -> bool:
        return self.config.device.eager

    @property
    def enable_sleep_mode(self) -> bool:
        return self.config.device.sleep_mode

    @property
    def dtype(self) -> Any:
        """A torch dtype."""
        return getattr(sys.modules["torch"], self.config.model.dtype)

    @property
    def architecture(self) -> str:
        return self.config.model.info.architecture

    @property
    def architectures(self) -> list[str]:
        return [self.architecture]

    @property
    def runner_type(self) -> str:
        return "generate" if self.config.model.generates else "pooling"

    @property
    def is_encoder_decoder(self) -> bool:
        return False

    @property
    def is_multimodal_model(self) -> bool:
        return False

    @property
    def hf_config(self) -> SimpleNamespace:
        """The fields of config.json. A GGUF file has none: see the methods."""
        return SimpleNamespace(**self.config.model.info.extra)

    @property
    def hf_text_config(self) -> SimpleNamespace:
        return self.hf_config

    def get_vocab_size(self) -> int:
        return self.config.model.info.vocab_size

    def get_hidden_size(self) -> int:
        return self.config.model.info.hidden_size

    def get_head_size(self) -> int:
        return self.config.model.info.head_dim

    def get_total_num_kv_heads(self) -> int:
        return self.config.model.info.num_kv_heads

    def get_total_num_hidden_layers(self) -> int:
        return self.config.model.info.num_layers
