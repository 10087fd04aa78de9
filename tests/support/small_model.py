"""A model folder with only a config: weights are random (load_format dummy), prompts are token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 64,
}


def write_small(folder: Path, **overrides: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | overrides))
    return str(folder)
