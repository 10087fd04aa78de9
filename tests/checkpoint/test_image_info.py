"""What a model's files say about images: old and new files, options, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.base.errors import BadCheckpoint, InvalidOption, UnsupportedModel
from slipstream.checkpoint.image_families import FAMILIES
from slipstream.checkpoint.image_info import (
    BudgetSize,
    ImageInfo,
    PanAndScan,
    PinpointSize,
    SmartSize,
    SplitSize,
    StretchedSize,
    TiledSize,
    read_image_info,
)

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)


def read(folder: Path, config: dict[str, Any], options: dict[str, Any] | None = None, **files: Any) -> ImageInfo:
    for name, content in {"config": {"image_token_id": 9, **config}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    found = read_image_info(folder, options)
    assert found is not None
    return found


PLAIN = {"vision_config": {}}
QWEN = {"model_type": "qwen2_vl", "vision_config": {"embed_dim": 1280}}
OLD_QWEN = {  # as Qwen2-VL's files of 2024 have it
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": list(CLIP_MEAN), "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor",
}  # fmt: skip


def test_older_files_of_qwen_are_read(tmp_path: Path) -> None:
    info = read(tmp_path, QWEN, preprocessor_config=OLD_QWEN)
    assert info.size == SmartSize(28, 3136, 12845056)
    assert (info.filter, info.mean, info.frames, info.in_blocks) == ("bicubic", CLIP_MEAN, 2, True)
    assert info.video is not None and (info.video.fps, info.video.by_time) == (None, False)


def test_names_of_fast_processors_are_the_same(tmp_path: Path) -> None:
    fast = OLD_QWEN | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    assert read(tmp_path, QWEN, preprocessor_config=fast).size == SmartSize(28, 3136, 12845056)


def test_the_processor_inside_of_the_newer_file_is_preferred(tmp_path: Path) -> None:
    """A checkpoint that was saved again may have both files, and the older one is not written then."""
    newer = {
        "image_processor": {
            **OLD_QWEN,
            "min_pixels": None,
            "max_pixels": None,
            "size": {"shortest_edge": 784, "longest_edge": 7840},
        }
    }
    info = read(tmp_path, QWEN, preprocessor_config=OLD_QWEN, processor_config=newer)
    assert info.size == SmartSize(28, 784, 7840)


def test_a_newer_file_without_an_image_processor_leaves_the_older_one(tmp_path: Path) -> None:
    info = read(tmp_path, QWEN, preprocessor_config=OLD_QWEN, processor_config={"processor_class": "Qwen2VLProcessor"})
    assert info.size == SmartSize(28, 3136, 12845056)


def test_qwen_3_5_is_read(tmp_path: Path) -> None:
    file = {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
    }  # fmt: skip
    video = {"size": {"longest_edge": 25165824, "shortest_edge": 4096}, "fps": 2, "max_frames": 768, "min_frames": 4}
    config = {
        "model_type": "qwen3_5",
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_config": {"patch_size": 16},
    }
    info = read(tmp_path, config, preprocessor_config=file, video_preprocessor_config=video)
    assert info.size == SmartSize(32, 65536, 16777216) and info.prompt is not None and info.video is not None
    assert (info.prompt.token_id, info.video.token_id, info.mrope) == (248056, 248057, True)
    assert info.video.size == SmartSize(32, 4096, 25165824, frames=2, small="scale")
    assert info.video.placeholders == ("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")


def test_gemma_3_has_tokens_by_its_config_and_crops_by_option(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3", "mm_tokens_per_image": 256, "image_token_index": 262144,
        "vision_config": {"image_size": 896, "patch_size": 14},
    }  # fmt: skip
    file = {
        "image_processor_type": "Gemma3ImageProcessor",
        "resample": 2,
        "size": {"height": 896, "width": 896},
        "do_pan_and_scan": None,
    }
    words = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>"}
    info = read(tmp_path, config, preprocessor_config=file, tokenizer_config=words)
    assert (info.size, info.filter, info.merge, info.attention) == (StretchedSize(896, 896), "bilinear", 4, "images")
    assert info.prompt is not None and info.prompt.placeholder == "<start_of_image>"
    options = {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 2}
    info = read(tmp_path, config, options)
    assert info.size == StretchedSize(896, 896, PanAndScan(256, 2, 1.2))


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"min_pixels": 784}, SmartSize(28, 784, 12845056)),
        ({"max_pixels": 7840}, SmartSize(28, 3136, 7840)),
        ({"size": {"shortest_edge": 100, "longest_edge": 200}}, SmartSize(28, 100, 200)),
    ],
)
def test_options_replace_fields_of_the_file(tmp_path: Path, options: dict[str, Any], size: SmartSize) -> None:
    assert read(tmp_path, QWEN, options, preprocessor_config=OLD_QWEN).size == size


@pytest.mark.parametrize("options", [{"max_soft_tokens": 70}, {"min_pixel": 1}, {"do_sample_frames": True}])
def test_options_that_a_model_does_not_have_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=f"mm_processor_kwargs has {next(iter(options))}, which Qwen2VLImagePro"):
        read(tmp_path, QWEN, options, preprocessor_config=OLD_QWEN)


@pytest.mark.parametrize("options", [{"min_pixels": -1}, {"min_pixels": 99999999}, {"size": {}, "min_pixels": "a"}])
def test_options_with_wrong_values_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match="mm_processor_kwargs .* cannot be used"):
        read(tmp_path, QWEN, options, preprocessor_config=OLD_QWEN)


def test_the_number_of_soft_tokens_is_one_of_those_of_the_model(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma4",
        "vision_config": {"pooling_kernel_size": 3},
        "text_config": {"use_bidirectional_attention": "vision"},
    }
    file = {"image_processor_type": "Gemma4ImageProcessor"}
    info = read(tmp_path, config, {"max_soft_tokens": 560}, preprocessor_config=file)
    assert (info.size, info.mean, info.std, info.attention) == (BudgetSize(48, 560), (0,) * 3, (1,) * 3, "images")
    with pytest.raises(InvalidOption, match="max_soft_tokens is 100"):
        read(tmp_path, config, {"max_soft_tokens": 100})


def test_settings_of_smolvlm_and_internvl(tmp_path: Path) -> None:
    config = {"model_type": "smolvlm", "scale_factor": 4, "vision_config": {"patch_size": 16}}
    file = {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 2048},
        "max_image_size": {"longest_edge": 512},
    }
    info = read(tmp_path, config, preprocessor_config=file)
    assert (info.size, info.filter, info.merge) == (SplitSize(2048, 512, True), "lanczos", 4)
    assert read(tmp_path, config, {"do_image_splitting": False}).size == SplitSize(2048, 512, False)
    config = {"model_type": "internvl", "vision_config": {"patch_size": [14, 14]}}
    file = {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "size": {"height": 448, "width": 448},
        "crop_to_patches": False,
    }
    info = read(tmp_path, config, preprocessor_config=file)
    assert (info.size, info.merge) == (TiledSize(448, 448, 1, 12), 2)  # the processor of texts cuts, whatever it says
    assert read(tmp_path, config, {"max_patches": 4}).size == TiledSize(448, 448, 1, 4)


def test_pinpoints_of_onevision(tmp_path: Path) -> None:
    config = {
        "model_type": "llava_onevision",
        "vision_config": {"patch_size": 14},
        "vision_aspect_ratio": "anyres_max_4",
    }
    file = {"image_processor_type": "LlavaOnevisionImageProcessor", "image_mean": [0.5] * 3}
    size = read(tmp_path, config, preprocessor_config=file).size
    assert isinstance(size, PinpointSize) and (len(size.sizes), size.most, size.fill) == (36, 4, (127,) * 3)


def test_an_old_clip_has_a_feature_extractor(tmp_path: Path) -> None:
    file = {
        "feature_extractor_type": "CLIPFeatureExtractor",
        "size": 224,
        "crop_size": 224,
        "do_center_crop": True,
        "resample": 3,
    }
    info = read(tmp_path, {"model_type": "clip", "vision_config": {}}, preprocessor_config=file)
    assert (info.patch, info.prompt, info.filter) == (32, None, "bicubic")


def test_tokens_may_have_other_texts(tmp_path: Path) -> None:
    words = {"extra_special_tokens": {"image_token": "<pic>"}}
    info = read(tmp_path, QWEN, preprocessor_config=OLD_QWEN, tokenizer_config=words)
    assert info.prompt is not None and info.prompt.placeholder == info.prompt.token == "<pic>"


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "gemma4", "vision_config": None}])
def test_models_of_texts_have_none(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_image_info(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "file", "match"),
    [
        ({"model_type": "blip"}, {}, "images of the family blip are not supported; these are: qwen2_vl, "),
        ({}, {"image_processor_type": "BlipImageProcessor"}, "BlipImageProcessor is not supported; these are: Qwen2VL"),
        ({}, {"do_resize": False}, "with do_resize: false is not supported"),
        ({}, {"do_rescale": False}, "with do_rescale: false is not supported"),
        ({}, {"resample": 0}, "by filter 0"),
        ({"model_type": "llava", **PLAIN}, {"do_pad": True}, "do_pad: true"),
        ({"model_type": "clip", **PLAIN}, {"do_center_crop": False}, "crop"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(tmp_path: Path, config: Any, file: Any, match: str) -> None:
    with pytest.raises(UnsupportedModel, match=match):
        read(tmp_path, QWEN | config, preprocessor_config=(OLD_QWEN if "vision_config" not in config else {}) | file)


@pytest.mark.parametrize(
    "file",
    [
        {"merge_size": 4}, {"temporal_patch_size": 1}, {"patch_size": 16}, {"image_mean": "none"},
        {"image_mean": [0.5, 0.5]}, {"rescale_factor": "x"}, {"min_pixels": "small"}, {"max_pixels": 0},
        {"min_pixels": 9**9}, {"size": 7, "min_pixels": None},
    ],
)  # fmt: skip
def test_files_that_contradict_the_config_or_are_broken_are_refused(tmp_path: Path, file: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint):
        read(tmp_path, QWEN, preprocessor_config=OLD_QWEN | file)


def test_a_model_without_the_file_of_its_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="neither processor_config.json nor preprocessor_config.json"):
        read(tmp_path, QWEN)
    (tmp_path / "preprocessor_config.json").write_text("[1]")
    with pytest.raises(BadCheckpoint, match="does not hold an object"):
        read(tmp_path, QWEN)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        read(tmp_path, QWEN)


def test_every_family_has_a_processor_that_is_known(tmp_path: Path) -> None:
    from tiny_vision import VISION

    assert set(FAMILIES) - set(VISION) == {"qwen3_vl_moe", "qwen3_5", "glm4v_moe"}  # as others of the table
