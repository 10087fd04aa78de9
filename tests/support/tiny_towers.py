"""Whole tiny checkpoints of models that see pictures: random weights saved by the library, tokenizer and processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.image_info import ImageInfo, read_image_info
from slipstream.images.pixels import PreparedImage, prepare
from tiny_saved import save_model
from tiny_vision import picture, vision_processor, write_vision

_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _rope(sections: list[int], **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": sections, **others}}


_QWEN3_VISION = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 16, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
_QWEN3_TEXT = {"head_dim": 16, **_rope([4, 2, 2], mrope_interleaved=True)}
_QWEN3_5_TEXT = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    **_rope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25),
}  # fmt: skip
# by family: fields of text_config and of vision_config
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (_rope([1, 1, 2]), {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}),
    "qwen2_5_vl": (
        _rope([1, 1, 2]),
        {
            "depth": 3, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 40, "num_heads": 2,
            "window_size": 56, "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_vl": (_QWEN3_TEXT, _QWEN3_VISION | {"deepstack_visual_indexes": [0, 1]}),
    "qwen3_5": (_QWEN3_5_TEXT, _QWEN3_VISION),
    "qwen3_5_moe": (_QWEN3_5_TEXT | _EXPERTS | {"shared_expert_intermediate_size": 16}, _QWEN3_VISION),
}  # fmt: skip
_FILES_OF = {"qwen3_5": "qwen3_5_moe"}  # families with the same processor


def write_tower(family: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> ImageInfo:
    """Writes all files of a checkpoint. Returns what they say about pictures."""
    import transformers

    text, vision = TOWERS[family]
    files = _FILES_OF.get(family, family)
    processor = write_vision(files, folder)
    ids = {
        name: number
        for name, number in json.loads((folder / "config.json").read_text()).items()
        if name.endswith("token_id")
    }
    for side in ("start", "end"):
        ids[f"vision_{side}_token_id"] = processor.tokenizer.convert_tokens_to_ids(f"<|vision_{side}|>")
    config = transformers.CONFIG_MAPPING[family](
        text_config=_TEXT | text | {"vocab_size": len(processor.tokenizer)},
        vision_config=vision,
        tie_word_embeddings=False,
        dtype=str(dtype).removeprefix("torch."),
        **ids,
    )
    config.save_pretrained(folder)
    save_model(folder, dtype, seed, "AutoModelForImageTextToText")
    info = read_image_info(folder)
    assert info is not None
    return info


def pictures(info: ImageInfo, *sizes: tuple[int, int]) -> list[PreparedImage]:
    """Height and width of each."""
    return [prepare(picture(*size, number), info, len(sizes), 10**8) for number, size in enumerate(sizes)]


__all__ = ["TOWERS", "pictures", "vision_processor", "write_tower"]
