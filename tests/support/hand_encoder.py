"""Loads an encoder and runs texts without an engine: packed rows, no padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hand_load import load_model
from slipstream.checkpoint.model_info import read_model_info
from slipstream.config.config import ModelConfig
from slipstream.config.options import Options
from slipstream.config.read_pooling import read_pooling
from slipstream.nn.context import AttentionBackend, BatchView, ForwardContext
from slipstream.nn.decoder import Decoder
from slipstream.nn.encoder import Encoder
from slipstream.nn.load import as_stored
from slipstream.nn.sdpa import SdpaAttention


def load_pooling(
    folder: Path, dtype: torch.dtype = torch.float32, task: str = "auto", device: str = "cpu", load_format: str = ""
) -> Encoder | Decoder:
    info = read_model_info(folder)
    info = info if load_format == "dummy" else as_stored(info, folder)
    name = str(dtype).removeprefix("torch.")
    pooling, info = read_pooling(Options(model=str(folder), task=task), info, folder)
    config = ModelConfig(
        info, str(folder), "tiny", load_format or "safetensors", name, True, min(info.max_positions, 256), 0, pooling
    )
    return load_model(config, torch.device(device))


def pack(texts: list[list[int]], types: list[int] | None = None, device: str = "cpu") -> BatchView:
    """`types`: per text, the index from which tokens have type 1."""
    counts = np.array([len(ids) for ids in texts], np.int32)
    token_types = None
    if types is not None:
        token_types = torch.cat([torch.arange(n) >= first for n, first in zip(counts.tolist(), types, strict=True)])
        token_types = token_types.long().to(device)
    return BatchView(
        ids=torch.tensor([token for ids in texts for token in ids]).to(device),
        positions=torch.cat([torch.arange(n) for n in counts.tolist()]).to(device),
        lengths=torch.from_numpy(counts).long().to(device),
        slots=(),
        page_tables=(),
        num_tokens=counts,
        max_lengths=counts,
        num_single=0,
        query_starts=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)).to(device),
        token_types=token_types,
    )


def run_texts(
    model: Encoder | Decoder,
    texts: list[list[int]],
    types: list[int] | None = None,
    attention: AttentionBackend | None = None,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """Hidden states of each text."""
    batch = pack(texts, types, device)
    if attention is None:
        attention = SdpaAttention((), next(model.parameters()).dtype)
    with torch.inference_mode():
        hidden = model(ForwardContext(batch, attention, attention.make_metadata(batch), [], ()))
    return list(hidden.split([len(ids) for ids in texts]))
