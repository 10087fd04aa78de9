"""load_model: a ModelConfig to a model with its weights in place.

It stands among the models because it knows them all; `nn/weights` knows none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from slipstream.config.config import ModelConfig
from slipstream.config.gguf_file import GgufFile
from slipstream.config.model_info import ModelInfo
from slipstream.errors import NotEnoughMemory, UnsupportedModel
from slipstream.nn.low_bit import LowBit
from slipstream.nn.models.decoder import Decoder
from slipstream.nn.models.registry import find_family
from slipstream.nn.quant import Place, Plain, WeightFormat
from slipstream.nn.weights.dummy import DummySource
from slipstream.nn.weights.gguf import GgufSource
from slipstream.nn.weights.load import fill_places, find_places, match_places
from slipstream.nn.weights.safetensors import SafetensorsSource
from slipstream.nn.weights.source import SourceTensor, WeightSource
from slipstream.ops.low_bit import find_kernel


def load_model(config: ModelConfig, device: torch.device, progress: bool = False) -> Decoder:
    model = lay_out(config, device)
    places = find_places(model)
    tensors = find_tensors(config, model, places, device)
    try:
        model.materialize(device)
    except (MemoryError, RuntimeError) as error:
        raise NotEnoughMemory(
            f"{config.name} does not fit the memory of {device} in {config.dtype}; take a smaller dtype or model"
        ) from error
    fill_places(tensors, places, progress)
    return model


def lay_out(config: ModelConfig, device: torch.device) -> Decoder:
    """The model with every tensor's shape and dtype, and no memory yet."""
    dtype = getattr(torch, config.dtype)
    format = _format(config, device)
    return Decoder(find_family(config.info).shape(config.info), config.max_model_len, dtype, lambda name: format)


def find_tensors(
    config: ModelConfig, model: Decoder, places: Mapping[str, Place], device: torch.device
) -> dict[str, SourceTensor]:
    """The checkpoint's tensor for each place; nothing is read."""
    if config.load_format == "dummy":
        return match_places(DummySource(places, config.seed, device), None, places)
    return match_places(_open(config), find_family(config.info).rules(model.shape), places)


def _format(config: ModelConfig, device: torch.device) -> WeightFormat:
    dtype = getattr(torch, config.dtype)
    # the low-bit products are of the CPU, on float32
    if config.load_format == "gguf" and not config.dequantize and device.type == "cpu" and dtype is torch.float32:
        kernel = find_kernel()
        if kernel is not None:
            return LowBit(kernel)
    return Plain(dtype)


def _open(config: ModelConfig) -> WeightSource:
    if config.load_format == "gguf":
        return GgufSource(GgufFile.open(config.path), config.info.num_heads, config.info.num_kv_heads)
    _refuse_quantised(config.info)
    return SafetensorsSource(Path(config.path))


def _refuse_quantised(info: ModelInfo) -> None:
    method = info.extra.get("quantization_config")
    if method is not None:
        kind = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method
        raise UnsupportedModel(
            f"the checkpoint is quantised by {kind}, which we do not run; give the plain checkpoint or a GGUF file"
        )
