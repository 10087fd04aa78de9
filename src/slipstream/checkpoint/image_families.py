"""Tables of image processors and of families that see images: what their files leave out, and what no file says.

A processor's row has the defaults of its fields. A family's row has the words of its prompt around an image, and the
order in which its tower takes patches and their values.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_LANCZOS, _BILINEAR, _BICUBIC = ({"resample": number} for number in (1, 2, 3))
SHARED: dict[str, Any] = {
    "do_resize": True, "do_rescale": True, "do_convert_rgb": True, "do_normalize": True, "rescale_factor": 1 / 255,
}  # fmt: skip
"""Defaults of all processors."""

_CROPPED = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True}
_GEMMA4 = {
    **_BICUBIC, "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "do_normalize": False, "max_soft_tokens": 280,
}  # fmt: skip
_SPLIT = {
    **_LANCZOS, **_HALF, "size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
}  # fmt: skip
_SIDES = (384, 768, 1152, 1536, 1920, 2304)
PROCESSORS: dict[str, dict[str, Any]] = {
    "Qwen2VLImageProcessor": {
        **_BICUBIC, **_CLIP, "size": {"shortest_edge": 3136, "longest_edge": 1_003_520},
    },
    "Glm4vImageProcessor": {
        **_BICUBIC, **_CLIP, "temporal_patch_size": 2, "size": {"shortest_edge": 12_544, "longest_edge": 11_760_000},
    },
    "Glm46VImageProcessor": {
        **_BICUBIC, **_CLIP, "temporal_patch_size": 2, "size": {"shortest_edge": 12_544, "longest_edge": 11_760_000},
    },
    "PaddleOCRVLImageProcessor": {
        **_BICUBIC, **_CLIP, "size": {"shortest_edge": 147_456, "longest_edge": 2_359_296},
    },
    "Gemma3ImageProcessor": {
        **_BILINEAR, **_HALF, "size": {"height": 224, "width": 224},
    },
    "Gemma4ImageProcessor": _GEMMA4,
    "Gemma4UnifiedImageProcessor": _GEMMA4,
    "PixtralImageProcessor": {**_BICUBIC, **_CLIP, "size": {"longest_edge": 1024}},
    "Idefics3ImageProcessor": _SPLIT,
    "SmolVLMImageProcessor": _SPLIT,
    "GotOcr2ImageProcessor": {
        **_BICUBIC, **_CLIP, "size": {"height": 384, "width": 384}, "crop_to_patches": False, "min_patches": 1,
        "max_patches": 12,
    },
    "LlavaOnevisionImageProcessor": {
        **_BICUBIC, **_CLIP, "size": {"height": 384, "width": 384},
        "image_grid_pinpoints": [[height, width] for height in _SIDES for width in _SIDES],
    },
    "Lfm2VlImageProcessor": {
        **_BILINEAR, **_HALF, "do_image_splitting": True, "min_tiles": 2, "max_tiles": 10, "use_thumbnail": True,
        "min_image_tokens": 64, "max_image_tokens": 256, "tile_size": 512, "max_pixels_tolerance": 2.0,
    },
    "DeepseekOcr2ImageProcessor": {
        **_BICUBIC, **_HALF, "size": {"height": 1024, "width": 1024}, "tile_size": 768,
        "background_color": [127, 127, 127],
    },
    "Siglip2ImageProcessor": {**_BILINEAR, **_HALF},
    "SiglipImageProcessor": {**_BICUBIC, **_HALF, "size": {"height": 224, "width": 224}},
    "CLIPImageProcessor": {**_BICUBIC, **_CLIP, **_CROPPED},
    "LlavaImageProcessor": {**_BICUBIC, **_CLIP, **_CROPPED},
}  # fmt: skip


class FamilyOfImages(msgspec.Struct, frozen=True, kw_only=True):
    processor: str  # if its file does not name one
    patch: int  # side, if vision_config has none
    # patches to each side that become one token, or the field of config.json that has the number
    merge: int | str = 1
    usual_merge: int = 1  # if config.json does not have the field
    is_merged_early: bool = False  # the patches are merged before the tower
    has_frames: bool = False  # a patch has several frames
    channels_last: bool = False
    in_blocks: bool = False
    attention: Literal["causal", "images", "prompt", "vision"] = "causal"  # vision: the text's config decides
    mrope: bool = False
    forced: dict[str, Any] = {}  # fields that the processor of texts and images sets, whatever the file says
    has_prompt: bool = True  # prompts have images
    tokens: dict[str, str] = {}  # special tokens, unless tokenizer_config.json has others; image_token is <image>
    prompt: dict[str, str] = {}  # fields of PromptRule; its token is that image_token
    crops: tuple[str, str] | None = None  # words before a picture that has crops, and between it and them
    video: dict[str, Any] | None = None  # defaults of the video processor


_QWEN_TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "processor": "Qwen2VLImageProcessor", "merge": "spatial_merge_size", "usual_merge": 2, "has_frames": True,
    "in_blocks": True, "mrope": True, "tokens": _QWEN_TOKENS,
}  # fmt: skip
_QWEN2_VIDEO = {
    "by_time": False, "do_sample_frames": False, "min_frames": 4, "max_frames": 768, "tokens_per_second": 0.0,
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
}  # fmt: skip
_QWEN3_VIDEO = {
    "by_time": True, "fps": 2, "min_frames": 4, "max_frames": 768, "tokens_per_second": 0.0,
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
}  # fmt: skip
_QWEN2 = FamilyOfImages(**_QWEN, patch=14, video=_QWEN2_VIDEO)
_QWEN2_5 = FamilyOfImages(**_QWEN, patch=14, video={**_QWEN2_VIDEO, "tokens_per_second": 4.0})
_QWEN3 = FamilyOfImages(**_QWEN, patch=16, video=_QWEN3_VIDEO)
_GLM = {**_QWEN, "tokens": {"image_token": "<|image|>"}, "patch": 14}
_BOI = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_GEMMA4_FAMILY: dict[str, Any] = {
    "patch": 16, "merge": "pooling_kernel_size", "usual_merge": 3, "channels_last": True, "attention": "vision",
    "tokens": {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
    "prompt": {"start": "{boi_token}", "end": "{eoi_token}"},
}  # fmt: skip
_PIXTRAL: dict[str, Any] = {
    "processor": "PixtralImageProcessor", "patch": 14,
    "tokens": {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    "prompt": {"row_break": "{image_break_token}", "last_break": "{image_end_token}"},
}  # fmt: skip
_IDEFICS: dict[str, Any] = {
    "patch": 32, "merge": "scale_factor", "usual_merge": 2,
    "tokens": {
        "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
    },
    "prompt": {
        "tile": "{fake_image_token}<row_{{row}}_col_{{col}}>", "row_end": "\n",
        "whole": "\n{fake_image_token}{global_image_token}", "single": "{fake_image_token}{global_image_token}",
        "end": "{fake_image_token}",
    },
}  # fmt: skip
_PALIGEMMA: dict[str, Any] = {"processor": "SiglipImageProcessor", "patch": 16, "attention": "prompt"}
_AROUND = {"bos_token": "<bos>", "pad_token": "<pad>"}

FAMILIES: dict[str, FamilyOfImages] = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2_5,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "glm4v": FamilyOfImages(**{**_GLM, "processor": "Glm4vImageProcessor"}),
    "glm4v_moe": FamilyOfImages(**{**_GLM, "processor": "Glm4vImageProcessor"}),
    "glm46v": FamilyOfImages(**{**_GLM, "processor": "Glm46VImageProcessor"}),
    "paddleocr_vl": FamilyOfImages(
        processor="PaddleOCRVLImageProcessor", patch=14, merge="spatial_merge_size", usual_merge=2, mrope=True,
        tokens={"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    "gemma3": FamilyOfImages(
        processor="Gemma3ImageProcessor", patch=16, merge="mm_tokens_per_image", attention="images", tokens=_BOI,
        forced={
            "do_pan_and_scan": False, "pan_and_scan_min_crop_size": 256, "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
        prompt={"placeholder": "{boi_token}", "start": "\n\n{boi_token}", "end": "{eoi_token}\n\n"},
        crops=("Here is the original image ", " and here are some crops to help you see better "),
    ),
    "gemma4": FamilyOfImages(processor="Gemma4ImageProcessor", **_GEMMA4_FAMILY),
    "gemma4_unified": FamilyOfImages(
        processor="Gemma4UnifiedImageProcessor", is_merged_early=True, **_GEMMA4_FAMILY
    ),
    "mistral3": FamilyOfImages(merge="spatial_merge_size", usual_merge=2, **_PIXTRAL),
    "pixtral": FamilyOfImages(**_PIXTRAL),
    "lighton_ocr": FamilyOfImages(
        processor="PixtralImageProcessor", patch=14, merge="spatial_merge_size", usual_merge=2,
        tokens={"image_token": "<|image_pad|>"},
    ),
    "idefics3": FamilyOfImages(processor="Idefics3ImageProcessor", **_IDEFICS),
    "smolvlm": FamilyOfImages(processor="SmolVLMImageProcessor", **_IDEFICS),
    "llava": FamilyOfImages(processor="CLIPImageProcessor", patch=32),
    "llava_onevision": FamilyOfImages(processor="LlavaOnevisionImageProcessor", patch=16),
    "internvl": FamilyOfImages(
        processor="GotOcr2ImageProcessor", patch=14, merge="downsample_ratio", forced={"crop_to_patches": True},
        tokens={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        },
        prompt={"token": "{context_image_token}", "start": "{start_image_token}", "end": "{end_image_token}"},
    ),
    "lfm2_vl": FamilyOfImages(
        processor="Lfm2VlImageProcessor", patch=16, merge="downsample_factor", usual_merge=2, channels_last=True,
        tokens={
            "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        prompt={
            "start": "{image_start_token}", "tile": "<|img_row_{{row}}_col_{{col}}|>",
            "whole": "{image_thumbnail_token}", "end": "{image_end_token}",
        },
    ),
    "paligemma": FamilyOfImages(**_PALIGEMMA),
    "colpali": FamilyOfImages(
        **_PALIGEMMA,
        tokens=_AROUND,
        prompt={
            "document": "{image_token}{bos_token}Describe the image.\n",
            "query": "{bos_token}Question: {{text}}" + 10 * "{pad_token}" + "\n",
        },
    ),
    "colqwen2": FamilyOfImages(**{
        **_QWEN, "patch": 14, "tokens": {**_QWEN_TOKENS, **_AROUND},
        "prompt": {
            "document": "<|im_start|>user\n{vision_start_token}{image_token}{vision_end_token}Describe the image."
            "<|im_end|><|endoftext|>",
            "query": "Query: {{text}}" + 10 * "{pad_token}" + "\n",
        },
    }),
    "deepseek_ocr2": FamilyOfImages(
        processor="DeepseekOcr2ImageProcessor", patch=16, merge=4,
        forced={"crop_to_patches": True, "min_patches": 2, "max_patches": 6},
    ),
    "clip": FamilyOfImages(processor="CLIPImageProcessor", patch=32, has_prompt=False),
    "siglip": FamilyOfImages(processor="SiglipImageProcessor", patch=16, has_prompt=False),
    "siglip2": FamilyOfImages(
        processor="Siglip2ImageProcessor", patch=16, channels_last=True, has_prompt=False,
        forced={"patch_size": 16, "max_num_patches": 256},
    ),
}  # fmt: skip
"""By model_type of config.json. `pixtral`: a LLaVA model with Pixtral's processor."""
