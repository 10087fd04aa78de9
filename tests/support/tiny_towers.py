"""Whole tiny checkpoints of models that see pictures: random weights saved by the library, tokenizer and processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hand_load import load_model
from slipstream.checkpoint.image_info import ImageInfo, read_image_info
from slipstream.checkpoint.model_info import read_model_info
from slipstream.config.config import ModelConfig
from slipstream.images.pixels import PreparedImage, prepare
from slipstream.nn.context import AttentionBackend
from slipstream.nn.decoder import Decoder
from slipstream.nn.load import as_stored
from slipstream.nn.load import lay_out as lay_out_model
from slipstream.nn.sdpa import SdpaAttention
from slipstream.nn.towers.layout import ImageViews, lay_out
from tiny_saved import save_model
from tiny_vision import picture, write_vision

_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


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
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
_PIXTRAL = {**_SIGLIP, "image_size": 112, "head_dim": 16, "hidden_act": "silu"}
_IDEFICS = ({"model_type": "llama"}, _SIGLIP, {"scale_factor": 2})
_PROJECTED = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
# by family: fields of text_config, of vision_config and of both together
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (_rope([1, 1, 2]), {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}, {}),
    "qwen2_5_vl": (
        _rope([1, 1, 2]),
        {
            "depth": 3, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 40, "num_heads": 2,
            "window_size": 56, "fullatt_block_indexes": [1],
        },
        {},
    ),
    "qwen3_vl": (_QWEN3_TEXT, _QWEN3_VISION | {"deepstack_visual_indexes": [0, 1]}, {}),
    "qwen3_vl_moe": (_QWEN3_TEXT | _EXPERTS, _QWEN3_VISION | {"deepstack_visual_indexes": [0, 1]}, {}),
    "qwen3_5": (_QWEN3_5_TEXT, _QWEN3_VISION, {}),
    "qwen3_5_moe": (_QWEN3_5_TEXT | _EXPERTS | {"shared_expert_intermediate_size": 16}, _QWEN3_VISION, {}),
    "gemma3": (
        {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
        _SIGLIP | {"vision_use_head": False}, {"mm_tokens_per_image": 4},
    ),
    "mistral3": ({"model_type": "mistral", "head_dim": 16}, _PIXTRAL, {"spatial_merge_size": 2}),
    "pixtral": ({"model_type": "mistral", "head_dim": 16}, _PIXTRAL | {"model_type": "pixtral"}, _PROJECTED),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "llava": (
        {"model_type": "llama"}, _SIGLIP | {"model_type": "clip_vision_model", "num_hidden_layers": 3},
        {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
    ),
    "llava_onevision": (
        {"model_type": "qwen2"}, _SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
        _PROJECTED
        | {"image_grid_pinpoints": [[high, wide] for high in (56, 112, 224) for wide in (56, 112, 224, 336)]},
    ),
    "internvl": (
        {"model_type": "qwen2"}, _SIGLIP | {"image_size": [56, 56], "patch_size": [14, 14]}, {"downsample_ratio": 0.5},
    ),
    "lfm2_vl": (
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5},
        _SIGLIP
        | {"model_type": "siglip2_vision_model", "patch_size": 8, "num_patches": 16, "vision_use_head": False},
        {"downsample_factor": 2, "projector_hidden_size": 40},
    ),
}  # fmt: skip
_FILES_OF = {"qwen3_vl_moe": "qwen3_vl", "qwen3_5": "qwen3_5_moe"}  # families with the same processor


def write_tower(family: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> ImageInfo:
    """Writes all files of a checkpoint. Returns what they say about pictures."""
    import transformers

    text, vision, both = TOWERS[family]
    files = _FILES_OF.get(family, family)
    processor = write_vision(files, folder)
    ids = {
        name: number
        for name, number in json.loads((folder / "config.json").read_text()).items()
        if name.endswith("token_id")
    }
    if family.startswith("qwen"):
        for side in ("start", "end"):
            ids[f"vision_{side}_token_id"] = processor.tokenizer.convert_tokens_to_ids(f"<|vision_{side}|>")
    else:
        ids["image_token_index"] = ids["image_token_id"]
    config = transformers.CONFIG_MAPPING["llava" if family == "pixtral" else family](
        text_config=_TEXT | text | {"vocab_size": len(processor.tokenizer)},
        vision_config=vision,
        tie_word_embeddings=False,
        dtype=str(dtype).removeprefix("torch."),
        **ids,
        **both,
    )
    config.save_pretrained(folder)
    save_model(folder, dtype, seed, "AutoModelForImageTextToText")
    info = read_image_info(folder)
    assert info is not None
    return info


def pictures(info: ImageInfo, *sizes: tuple[int, int]) -> list[PreparedImage]:
    """Height and width of each."""
    return [prepare(picture(*size, number), info, len(sizes), 10**8) for number, size in enumerate(sizes)]


def load_sighted(folder: Path, images: ImageInfo, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """On the meta device it has no values."""
    info = as_stored(read_model_info(folder), folder)
    name = str(dtype).removeprefix("torch.")
    config = ModelConfig(info, str(folder), "tiny", "safetensors", name, True, 4096, 0, images=images)
    model = (lay_out_model if device == "meta" else load_model)(config, torch.device(device))
    assert isinstance(model, Decoder)
    return model


def run_tower(
    model: Decoder, images: list[PreparedImage], attention: AttentionBackend | None = None
) -> list[torch.Tensor]:
    """[rows, levels, hidden] of each picture, all in one call."""
    tower = model.tower
    assert tower is not None
    layout = lay_out(tower.shape, [ImageViews(image.grids, image.tiles, image.height, image.width) for image in images])
    assert layout.num_rows == tuple(image.num_tokens for image in images)
    device = tower.patch.scale.device
    patches = torch.from_numpy(np.concatenate([image.patches for image in images])).to(device)
    arrays = {name: torch.from_numpy(array).to(device) for name, array in layout.arrays.items()}
    attention = attention or SdpaAttention((), next(tower.layers.parameters()).dtype)
    with torch.inference_mode():
        return list(tower(patches, layout, arrays, attention).split(layout.num_rows))


def library_inputs(images: list[PreparedImage], info: ImageInfo) -> dict[str, torch.Tensor]:
    """Pictures as the library's processor gives them to its model, from our patches."""
    mean, std = (np.array(each, np.float32).reshape(3, 1, 1) for each in (info.mean, info.std))
    if info.frames == 2:
        grids = torch.tensor([grid for image in images for grid in image.grids])
        patches = np.concatenate([image.patches for image in images]).astype(np.float32)
        values = (patches.reshape(-1, 3, 1, info.patch**2) * np.float32(info.rescale) - mean) / std
        both = torch.from_numpy(np.repeat(values, 2, 2).reshape(len(values), -1))
        return {"pixel_values": both, "image_grid_thw": grids}
    if info.family == "lfm2_vl":  # padded rows of patches
        grids = [grid for image in images for grid in image.grids]
        values = np.concatenate([image.patches for image in images]).astype(np.float32).reshape(-1, info.patch**2, 3)
        values = (values * np.float32(info.rescale) - mean.reshape(3)) / std.reshape(3)
        counts = [rows * cols for _, rows, cols in grids]
        parts = torch.from_numpy(values.reshape(len(values), -1)).split(counts)
        return {
            "pixel_values": torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True),
            "spatial_shapes": torch.tensor([grid[1:] for grid in grids]),
            "pixel_attention_mask": (torch.arange(max(counts)) < torch.tensor(counts)[:, None]).long(),
        }
    views = []
    for image in images:
        sizes = [rows * cols for _, rows, cols in image.grids]
        parts = np.split(image.patches, np.cumsum(sizes)[:-1])
        for (_, rows, cols), part in zip(image.grids, parts, strict=True):
            cut = part.reshape(rows, cols, 3, info.patch, info.patch).transpose(2, 0, 3, 1, 4)
            pixels = cut.reshape(3, rows * info.patch, cols * info.patch).astype(np.float32)
            views.append((pixels * np.float32(info.rescale) - mean) / std)
    if info.family == "llava_onevision":
        pixels = torch.from_numpy(np.stack(views))
        pixels = pixels[None] if len(images) == 1 else pixels[:, None]
        sizes = torch.tensor([[image.height, image.width] for image in images])
        return {"pixel_values": pixels, "image_sizes": sizes, "batch_num_images": torch.tensor([len(images)])}
    if info.family in ("idefics3", "smolvlm"):
        return {"pixel_values": torch.from_numpy(np.stack(views))[None]}
    high, wide = (max(view.shape[axis] for view in views) for axis in (1, 2))
    padded = [np.pad(view, ((0, 0), (0, high - view.shape[1]), (0, wide - view.shape[2]))) for view in views]
    found = {"pixel_values": torch.from_numpy(np.stack(padded))}
    if info.prompt is not None and info.prompt.row_break:
        found["image_sizes"] = torch.tensor([view.shape[1:] for view in views])
    return found
