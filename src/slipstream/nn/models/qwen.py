"""The Qwen family: Qwen3 dense."""

from __future__ import annotations

import dataclasses

from slipstream.config.model_info import ModelInfo
from slipstream.errors import UnsupportedModel
from slipstream.nn.models.decoder import DecoderShape
from slipstream.nn.models.llama import llama_shape


def qwen3_shape(info: ModelInfo) -> DecoderShape:
    """Llama's, with norms on queries and keys. Tensor names are Llama's as well."""
    if info.extra.get("use_sliding_window"):
        raise UnsupportedModel("this Qwen3 attends within a sliding window; we run Qwen3 with use_sliding_window false")
    return dataclasses.replace(llama_shape(info), qk_norm=True)
