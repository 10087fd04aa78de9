"""Patches, token counts and prompts are those of transformers' own processors.

With Pillow as the library's backend all pixels are equal. Its other backend, torchvision, rounds differently when it
resizes: up to 2 levels of 255 apart, and in few values.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipstream.checkpoint.image_info import ImageInfo, read_image_info
from slipstream.images.pixels import PreparedImage, prepare
from slipstream.images.prompt import SpelledImage, expand_ids, expand_text, spell_image
from tiny_vision import VISION, picture, write_vision

SIZES = [(70, 110), (97, 33), (301, 517), (64, 64), (480, 119), (14, 40)]
LARGE = 10**8
NO_PILLOW = ("lfm2_vl", "gemma4_unified")  # whose class exists for torchvision only


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[ImageInfo, Any, Path]] = {}

    def model(family: str) -> tuple[ImageInfo, Any, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            processor = write_vision(family, folder)
            info = read_image_info(folder)
            assert info is not None
            made[family] = info, processor, folder
        return made[family]

    return model


def pillow_processor(folder: Path, processor: Any) -> Any:
    """The same image processor with the library's other backend."""
    kind = type(processor.image_processor)
    module = importlib.import_module(kind.__module__.replace("image_processing_", "image_processing_pil_"))
    fields = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    del fields["image_processor_type"]
    return getattr(module, f"{kind.__name__}Pil")(**fields)


def process(processor: Any, family: str, images: list[Image.Image]) -> dict[str, np.ndarray]:
    """The output of an image processor, with the fields that the processor of texts and images sets."""
    fields: dict[str, Any] = {"internvl": {"crop_to_patches": True}, "gemma3": {"do_pan_and_scan": False}}.get(
        family, {}
    )
    if family in ("mistral3", "pixtral"):
        fields["patch_size"] = 28 if family == "mistral3" else 14
    found = processor(images, return_tensors="np" if type(processor).__name__.endswith("Pil") else "pt", **fields)
    return {name: np.asarray(value) for name, value in found.items()}


def in_patches(pixels: np.ndarray, side: int) -> np.ndarray:
    """[pictures, 3, height, width] as patches, row by row."""
    count, _, height, width = pixels.shape
    rows, cols = height // side, width // side
    cut = pixels[:, :, : rows * side, : cols * side].reshape(count, 3, rows, side, cols, side)
    return cut.transpose(0, 2, 4, 1, 3, 5).reshape(count * rows * cols, -1)


def expected_patches(family: str, info: ImageInfo, found: dict[str, np.ndarray]) -> np.ndarray:
    """What the library gives a tower, as rows of patches without padding and without repeated frames."""
    pixels = found["pixel_values"].astype(np.float32)
    side = info.patch
    if info.frames == 2:
        frames = pixels.reshape(len(pixels), 3, 2, side * side)
        assert (frames[:, :, 0] == frames[:, :, 1]).all()
        return frames[:, :, 0].reshape(len(pixels), -1)
    if family == "paddleocr_vl":
        return pixels.reshape(len(pixels), -1)
    if family.startswith("gemma4"):
        return pixels[0][found["image_position_ids"][0][:, 0] >= 0]
    if family in ("siglip2", "lfm2_vl"):
        return pixels[found["pixel_attention_mask"].astype(bool)]
    parts = [pixels.reshape(-1, *pixels.shape[-3:])]
    if "pixel_values_local" in found:
        parts.insert(0, found["pixel_values_local"].astype(np.float32))
    return np.concatenate([in_patches(part, side) for part in parts])


def normalized(image: PreparedImage, info: ImageInfo) -> np.ndarray:
    """The first step of a tower, in float32."""
    shape = (-1, 3) if info.channels_last else (3, -1)
    axes = (1, 1, 3) if info.channels_last else (1, 3, 1)
    mean, std = (np.array(each, np.float32).reshape(axes) for each in (info.mean, info.std))
    scaled = (image.patches.astype(np.float64) * info.rescale).astype(np.float32)
    return ((scaled.reshape(len(scaled), *shape) - mean) / std).reshape(len(scaled), -1)


@pytest.mark.parametrize("family", [family for family in VISION if family not in NO_PILLOW])
def test_pixels_are_equal_with_pillow(models: Any, family: str) -> None:
    info, processor, folder = models(family)
    oracle = pillow_processor(folder, processor)
    for height, width in SIZES:
        image = picture(height, width)
        expected = expected_patches(family, info, process(oracle, family, [image]))
        assert np.array_equal(normalized(prepare(image, info, 1, LARGE), info), expected), (height, width)


@pytest.mark.parametrize("family", list(VISION))
def test_pixels_are_within_two_levels_of_torchvision(models: Any, family: str) -> None:
    info, processor, _ = models(family)
    num_values = num_different = 0
    for height, width in SIZES:
        image = picture(height, width)
        expected = expected_patches(family, info, process(processor.image_processor, family, [image]))
        made = normalized(prepare(image, info, 1, LARGE), info)
        assert made.shape == expected.shape, (height, width)
        levels = np.abs(made - expected) * 255 * max(info.std)
        assert levels.max() < 2.2  # 2, times the ratio of two channels' deviations
        num_values, num_different = num_values + levels.size, num_different + int((levels > 0.5).sum())
    assert num_different < 0.02 * num_values


def spelled(info: ImageInfo, images: list[Image.Image]) -> list[SpelledImage]:
    return [spell_image(info, prepare(image, info, len(images), LARGE)) for image in images]


def library_ids(family: str, processor: Any, text: str, images: list[Image.Image]) -> list[int]:
    """Token ids of the processor of texts and images."""
    if not images:
        return processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    given: Any = images if family in ("clip", "siglip") else [images]
    if family in ("deepseek_ocr2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_moe", "glm4v", "glm46v"):
        given = images
    fields = {"text_kwargs": {"add_special_tokens": False}}
    return [int(token) for token in np.asarray(processor(images=given, text=[text], **fields)["input_ids"]).ravel()]


@pytest.mark.parametrize("family", [each for each in VISION if each not in ("clip", "siglip", "siglip2")])
@pytest.mark.parametrize("sizes", [[], [(97, 333)], [(70, 110), (301, 40), (56, 56)]], ids=["0", "1", "3"])
def test_prompts_with_images_have_the_same_tokens(models: Any, family: str, sizes: list[tuple[int, int]]) -> None:
    info, processor, _ = models(family)
    images = [picture(*size) for size in sizes]
    rule = info.prompt
    assert rule is not None
    if family.startswith("col"):  # each image is a prompt of its own
        made = [expand_ids(info, *ids_of(info, processor, rule.document, [image])).token_ids for image in images]
        assert made == [processor(images=[image])["input_ids"][0].tolist() for image in images]
        return
    text = "Look:\n" + "".join(f"{rule.placeholder} é {number}\n" for number in range(len(sizes))) + "\n\nThen tell."
    if family == "paligemma":  # the processor adds these
        text = rule.placeholder * len(sizes) + "Then tell."
        expected = library_ids(family, processor, text, images)
        text = rule.placeholder * len(sizes) + "<bos>Then tell.\n" if sizes else text
    else:
        expected = library_ids(family, processor, text, images)
    assert expand_ids(info, *ids_of(info, processor, text, images)).token_ids == expected


def ids_of(
    info: ImageInfo, processor: Any, text: str, images: list[Image.Image]
) -> tuple[list[int], list[SpelledImage]]:
    expanded, order = expand_text(info, text, spelled(info, images), [])
    return processor.tokenizer(expanded, add_special_tokens=False)["input_ids"], order


def test_crops_of_pan_and_scan_are_those_of_the_library(models: Any) -> None:
    _, processor, folder = models("gemma3")
    options = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 30, "pan_and_scan_max_num_crops": 3}
    info = read_image_info(folder, options)
    assert info is not None
    oracle = pillow_processor(folder, processor)
    ratio = {"pan_and_scan_min_ratio_to_activate": 1.2}
    for size in [(70, 110), (97, 333), (333, 97), (400, 100), (64, 64), (29, 90)]:
        image = picture(*size)
        made = prepare(image, info, 1, LARGE)
        found = oracle([image], return_tensors="np", **options, **ratio)
        assert np.array_equal(normalized(made, info), in_patches(found["pixel_values"].astype(np.float32), 14))
        text = "Look at <start_of_image> now"
        fields = {"images_kwargs": {**options, **ratio}, "text_kwargs": {"add_special_tokens": False}}
        expected = processor(images=[[image]], text=[text], **fields)["input_ids"][0]
        assert expand_ids(info, *ids_of(info, processor, text, [image])).token_ids == list(expected)


@pytest.mark.parametrize("family", ["llava_onevision", "deepseek_ocr2", "idefics3", "internvl", "lfm2_vl"])
def test_several_images_have_the_pixels_of_the_library(models: Any, family: str) -> None:
    """LLaVA-OneVision has no tiles then; the others are as alone."""
    info, processor, folder = models(family)
    images = [picture(70, 110), picture(301, 40)]
    oracle = processor.image_processor if family == "lfm2_vl" else pillow_processor(folder, processor)
    made = np.concatenate([normalized(prepare(image, info, 2, LARGE), info) for image in images])
    if family == "llava_onevision":
        found = oracle([images], return_tensors="np")
        assert np.array_equal(made, in_patches(found["pixel_values"].reshape(-1, 3, 56, 56), info.patch))
        return
    alone = [expected_patches(family, info, process(oracle, family, [image])) for image in images]
    assert np.abs(made - np.concatenate(alone)).max() < (0.02 if family == "lfm2_vl" else 1e-9)
