"""Loads a checkpoint without an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.gguf_info import gguf_model_info
from slipstream.checkpoint.model_info import read_model_info
from slipstream.checkpoint.quantization import Quantization
from slipstream.config.config import ModelConfig
from slipstream.nn.decoder import Decoder
from slipstream.nn.encoder import Encoder
from slipstream.nn.load import as_stored, open_model


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    load_format: str = "",
    seed: int = 0,
    device: str = "cpu",
    num_positions: int = 256,
    dequantize: bool = True,
    shard: tuple[int, int] = (0, 1),
    quantization: Quantization | None = None,
    by_expert: bool = False,
    keeps_bfloat16: bool = False,
) -> Decoder:
    """Loads a folder or a .gguf file, for contexts of up to `num_positions` tokens. `shard`: rank, number of ranks;
    `by_expert`: ranks have whole experts."""
    is_file = path.suffix == ".gguf"
    info = gguf_model_info(GgufFile(path)) if is_file else read_model_info(path)
    load_format = load_format or ("gguf" if is_file else "safetensors")
    if load_format == "safetensors":
        info = as_stored(info, path)
    name = str(dtype).removeprefix("torch.")
    config = ModelConfig(
        info,
        str(path),
        "tiny",
        load_format,
        name,
        dequantize,
        num_positions,
        seed,
        rank=shard[0],
        num_ranks=shard[1],
        quantization=quantization or info.quantization,
        by_expert=by_expert,
        keeps_bfloat16=keeps_bfloat16,
    )
    return load_model(config, torch.device(device))


def load_model(config: ModelConfig, device: torch.device) -> Decoder | Encoder:
    model, fill = open_model(config, device)
    fill(False)
    return model
