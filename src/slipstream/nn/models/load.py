"""load_model: a ModelConfig to a model with its weights in place.

It stands among the models because it knows them all; `nn/weights` knows none.
"""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream.config.config import ModelConfig
from slipstream.config.gguf_file import GgufFile
from slipstream.config.model_info import ModelInfo
from slipstream.errors import NotEnoughMemory, UnsupportedModel
from slipstream.nn.models.decoder import Decoder
from slipstream.nn.models.registry import find_family
from slipstream.nn.quant import Plain
from slipstream.nn.weights.dummy import DummySource
from slipstream.nn.weights.gguf import GgufSource
from slipstream.nn.weights.load import fill_places, find_places, match_places
from slipstream.nn.weights.safetensors import SafetensorsSource
from slipstream.nn.weights.source import WeightSource


def load_model(config: ModelConfig, device: torch.device, progress: bool = False) -> Decoder:
    family = find_family(config.info)
    shape = family.shape(config.info)
    dtype = getattr(torch, config.dtype)
    plain = Plain(dtype)
    model = Decoder(shape, config.max_model_len, dtype, lambda name: plain)
    places = find_places(model)
    if config.load_format == "dummy":
        tensors = match_places(DummySource(places, config.seed, device), None, places)
    else:
        tensors = match_places(_open(config), family.rules(shape), places)
    try:
        model.materialize(device)
    except (MemoryError, RuntimeError) as error:
        raise NotEnoughMemory(
            f"{config.name} does not fit the memory of {device} in {config.dtype}; take a smaller dtype or model"
        ) from error
    fill_places(tensors, places, progress)
    return model


def _open(config: ModelConfig) -> WeightSource:
    if config.load_format == "gguf":
        return GgufSource(GgufFile(config.path), config.info.num_heads, config.info.num_kv_heads)
    _refuse_quantised(config.info)
    return SafetensorsSource(Path(config.path))


def _refuse_quantised(info: ModelInfo) -> None:
    method = info.extra.get("quantization_config")
    if method is not None:
        kind = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method
        raise UnsupportedModel(
            f"the checkpoint is quantised by {kind}, which we do not run; give the plain checkpoint or a GGUF file"
        )
