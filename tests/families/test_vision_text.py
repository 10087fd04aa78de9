"""The text part of models that see pictures, against transformers' whole model on texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from causal_oracle import oracle
from hand_batch import HandRunner
from hand_load import load
from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import model_info_from_config
from slipstream.nn.registry import find_shape
from tiny import VOCAB_SIZE
from tiny_saved import save_model

TEXT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
THREE_PARTS = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
}  # fmt: skip
SMALL = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
PIXTRAL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2 vl": ("qwen2_vl", {"rope_parameters": THREE_PARTS}, {"depth": 1, "embed_dim": 32, "hidden_size": 64}),
    "qwen2.5 vl": ("qwen2_5_vl", {"rope_parameters": THREE_PARTS}, SMALL | {"fullatt_block_indexes": [0]}),
    "qwen3 vl": (
        "qwen3_vl",
        {"head_dim": 16, "rope_parameters": THREE_PARTS | {"mrope_interleaved": True}},
        SMALL | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "mistral 3": ("mistral3", {"model_type": "mistral", "head_dim": 24, "sliding_window": None}, PIXTRAL),
    "ministral 3": ("mistral3", {"model_type": "ministral3", "head_dim": 16, "rope_parameters": YARN}, PIXTRAL),
}


def write(folder: Path, name: str, tied: bool = False) -> Path:
    kind, text, vision = FAMILIES[name]
    config = transformers.CONFIG_MAPPING[kind](
        text_config=TEXT | text, vision_config=vision, tie_word_embeddings=tied, dtype="float64"
    )
    config.save_pretrained(folder)
    save_model(folder, torch.float64, 0, "AutoModelForImageTextToText")
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_give_the_logits_of_the_whole_model(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, name, tied=name == "qwen3 vl")
    prompts = {"a": torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()}
    expected = oracle(folder, torch.float64, prompts, transformers.AutoModelForImageTextToText)["a"]
    runner = HandRunner(load(folder, torch.float64), torch.float64)
    found = torch.cat([runner.run({"a": prompts["a"][start:end]})["a"] for start, end in ((0, 39), (39, 40))])
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_config_of_the_first_releases_has_the_text_model_at_the_top() -> None:
    old = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], **TEXT, "vision_config": {}, "rope_theta": 1e6}
    shape = find_shape(model_info_from_config(old | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}))
    assert shape.ropes[0].info.kind == "default" and shape.ropes[0].info.theta == 1e6


def test_other_text_parts_of_mistral_3_are_refused_by_name(tmp_path: Path) -> None:
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": TEXT | {"model_type": "mamba"}}
    with pytest.raises(UnsupportedModel, match="text part of type mamba; we run mistral"):
        find_shape(model_info_from_config(json.loads(json.dumps(config))))
