"""Files of tiny models that see images, as the library saves them: config.json, tokenizer and processor, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tiny_tokenizer import _byte_characters

_QWEN = (
    ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"]
    + ["<|endoftext|>"],
    {},
)
_GLM = (["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"], {})
_GEMMA3 = (
    ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
)
_GEMMA4 = (
    ["<|image>", "<image|>", "<|image|>", "<|audio>", "<audio|>", "<|audio|>", "<|video|>"],
    {
        "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "boa_token": "<|audio>",
        "eoa_token": "<audio|>", "audio_token": "<|audio|>",
    },
)  # fmt: skip
_PIXTRAL = (["[IMG]", "[IMG_BREAK]", "[IMG_END]"], {})
_GRID = range(1, 11)
_IDEFICS = (
    ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    + [f"<row_{row}_col_{col}>" for row in _GRID for col in _GRID],
    {},
)
_IMAGE = (["<image>", "<video>"], {"image_token": "<image>"})
_INTERNVL = (
    ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
    {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)  # fmt: skip
_LFM2 = (
    ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
    + [f"<|img_row_{row}_col_{col}|>" for row in _GRID for col in _GRID],
    {"image_token": "<image>"},
)
_PADDLE = (["<|IMAGE_PLACEHOLDER|>"], {"image_token": "<|IMAGE_PLACEHOLDER|>"})
_LIGHTON = (
    ["<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"],
    {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
)
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_SIDES = {"height": 56, "width": 56}
_CROP = {"size": {"shortest_edge": 56}, "crop_size": _SIDES}
_SPLIT = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
_P14 = {"vision_config": {"patch_size": 14}}
_VLM = {"vision_config": {"patch_size": 14}, "image_token_index": 260}

# by family: special tokens, the processor's class and its fields, the image processor's, the video processor,
# fields of config.json
VISION: dict[str, tuple[Any, str, dict[str, Any], str, dict[str, Any], str, dict[str, Any]]] = {
    "qwen2_vl": (_QWEN, "Qwen2VL", {}, "Qwen2VL", {}, "Qwen2VL", {"vision_config": {}}),
    "qwen2_5_vl": (
        _QWEN, "Qwen2_5_VL", {}, "Qwen2VL", {}, "Qwen2VL", {"vision_config": {"tokens_per_second": 4}},
    ),
    "qwen3_vl": (
        _QWEN, "Qwen3VL", {}, "Qwen2VL",
        {**_HALF, "patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 262144}}, "Qwen3VL",
        {"vision_config": {"patch_size": 16}},
    ),
    "qwen3_5_moe": (
        _QWEN, "Qwen3VL", {}, "Qwen2VL",
        {**_HALF, "patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}, "Qwen3VL",
        {"vision_config": {}},
    ),
    "glm4v": (_GLM, "Glm4v", {}, "Glm4v", {}, "Glm4v", {"vision_config": {}}),
    "glm46v": (_GLM, "Glm46V", {}, "Glm46V", {}, "Glm46V", {"vision_config": {}}),
    "paddleocr_vl": (_PADDLE, "PaddleOCRVL", {}, "PaddleOCRVL", {}, "", {"vision_config": {}}),
    "gemma3": (
        _GEMMA3, "Gemma3", {"image_seq_length": 4}, "Gemma3", {"size": _SIDES}, "",
        {"vision_config": {"image_size": 56, "patch_size": 14}, "mm_tokens_per_image": 4},
    ),
    "gemma4": (_GEMMA4, "Gemma4", {}, "Gemma4", {"max_soft_tokens": 70}, "Gemma4", {"vision_config": {}}),
    "gemma4_unified": (
        _GEMMA4, "Gemma4Unified", {}, "Gemma4Unified", {"max_soft_tokens": 140}, "Gemma4Unified",
        {"vision_config": {}},
    ),
    "mistral3": (
        _PIXTRAL, "Pixtral", {"patch_size": 14, "spatial_merge_size": 2}, "Pixtral", {"size": {"longest_edge": 140}},
        "", {**_P14, "spatial_merge_size": 2},
    ),
    "pixtral": (
        _PIXTRAL, "Pixtral", {"patch_size": 14}, "Pixtral", {"size": {"longest_edge": 112}}, "",
        {**_P14, "model_type": "llava"},
    ),
    "lighton_ocr": (
        _LIGHTON, "LightOnOcr", {}, "Pixtral", {"patch_size": 28, "size": {"longest_edge": 140}}, "", _P14,
    ),
    "idefics3": (_IDEFICS, "Idefics3", {"image_seq_len": 4}, "Idefics3", _SPLIT, "", {**_P14, "scale_factor": 2}),
    "smolvlm": (
        _IDEFICS, "SmolVLM", {"image_seq_len": 4}, "SmolVLM", _SPLIT, "SmolVLM", {**_P14, "scale_factor": 2},
    ),
    "llava": (
        _IMAGE, "Llava",
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}, "CLIP",
        _CROP, "", _P14,
    ),
    "llava_onevision": (
        _IMAGE, "LlavaOnevision", {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        "LlavaOnevision",
        {
            "size": _SIDES,
            "image_grid_pinpoints": [[high, wide] for high in (56, 112, 224) for wide in (56, 112, 224, 336)],
        },
        "LlavaOnevision", _P14,
    ),
    "internvl": (
        _INTERNVL, "InternVL", {"image_seq_length": 4}, "GotOcr2", {"size": _SIDES, "max_patches": 6}, "InternVL",
        {"vision_config": {"patch_size": [14, 14]}},
    ),
    "lfm2_vl": (
        _LFM2, "Lfm2Vl", {}, "Lfm2Vl",
        {"encoder_patch_size": 8, "tile_size": 64, "min_image_tokens": 4, "max_image_tokens": 16}, "",
        {"vision_config": {"patch_size": 8}},
    ),
    "paligemma": (_IMAGE, "PaliGemma", {}, "Siglip", {"size": _SIDES}, "", _P14),
    "colpali": (_IMAGE, "ColPali", {}, "Siglip", {"size": _SIDES}, "", {"vlm_config": _VLM}),
    "colqwen2": (_QWEN, "ColQwen2", {}, "Qwen2VL", {}, "", {"vlm_config": {**_VLM, "model_type": "qwen2_vl"}}),
    "deepseek_ocr2": (
        _IMAGE, "DeepseekOcr2", {}, "DeepseekOcr2", {"size": {"height": 256, "width": 256}, "tile_size": 128}, "",
        {"vision_config": {"sam_config": {}}},
    ),
    "clip": ((["<image>"], {}), "CLIP", {}, "CLIP", _CROP, "", _P14),
    "siglip": ((["<image>"], {}), "Siglip", {}, "Siglip", {"size": _SIDES}, "", _P14),
    "siglip2": ((["<image>"], {}), "Siglip2", {}, "Siglip2", {}, "", {"vision_config": {}}),
}  # fmt: skip


def vision_tokenizer(special: list[str], named: dict[str, str]) -> Any:
    """One token per byte, and these. `named`: those that are attributes of the library's tokenizer."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={each: byte for byte, each in enumerate(_byte_characters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *special]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        extra_special_tokens=named,
    )  # fmt: skip


def vision_processor(family: str) -> Any:
    """The library's processor of texts and images."""
    import transformers
    import transformers.models.smolvlm.processing_smolvlm as smolvlm

    smolvlm.num2words = str  # spells numbers, of the frames of a video
    tokens, name, fields, image_name, image_fields, video_name, _ = VISION[family]
    image_processor = getattr(transformers, f"{image_name}ImageProcessor")(**image_fields)
    if image_name == "Siglip":
        image_processor.image_seq_length = 16
    parts = {"image_processor": image_processor, "tokenizer": vision_tokenizer(*tokens)}
    if video_name:
        parts["video_processor"] = getattr(transformers, f"{video_name}VideoProcessor")()
    if name.startswith("Gemma4"):
        parts["feature_extractor"] = getattr(transformers, f"{name}AudioFeatureExtractor")()
    return getattr(transformers, f"{name}Processor")(**parts, **fields)


def write_vision(family: str, folder: Path) -> Any:
    """Writes the files into the folder. Returns the library's processor."""
    processor = vision_processor(family)
    processor.save_pretrained(folder)
    token = getattr(processor, "image_token", "<image>")
    if family == "gemma3":
        token = "<image_soft_token>"
    ids = {"image_token_id": processor.tokenizer.convert_tokens_to_ids(token)}
    if family.startswith("qwen"):
        ids["video_token_id"] = processor.tokenizer.convert_tokens_to_ids("<|video_pad|>")
    config = {"model_type": family, **ids, **VISION[family][-1]}
    (folder / "config.json").write_text(json.dumps(config))
    return processor


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Coarse shapes and fine noise, with values up to both bounds."""
    rng = np.random.default_rng([seed, height, width])
    coarse = rng.integers(0, 256, (max(2, height // 7), max(2, width // 7), 3), dtype=np.uint8)
    shapes = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    return Image.fromarray(np.clip(shapes + rng.integers(-30, 31, shapes.shape), 0, 255).astype(np.uint8))
