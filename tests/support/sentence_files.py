"""Folders in sentence-transformers' layout, of which only the JSON files matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.checkpoint.model_info import read_model_info
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.config.options import make_options
from slipstream.config.read_pooling import read_pooling

BERT = {
    "architectures": ["BertModel"], "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "type_vocab_size": 2,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
OLD = "sentence_transformers.models."
IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
NEW = "sentence_transformers.sentence_transformer.modules.pooling."


def write(folder: Path, name: str, value: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def read(folder: Path, config: dict[str, Any], options: dict[str, Any] | None = None, **files: Any) -> PoolingInfo:
    write(folder, "config.json", config)
    for name, value in files.items():
        write(folder, name.replace("__", "/") + ".json", value)
    return read_pooling(make_options(**(options or {})), read_model_info(folder), folder)[0]


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"idx": i, "name": str(i), "path": "" if i == 0 else f"{i}_{kind.rsplit('.', 1)[-1]}", "type": OLD + kind}
        for i, kind in enumerate(kinds)
    ]
