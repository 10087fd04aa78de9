"""Sizes, tiles and token counts are those of the library's formulas, for many sizes of pictures."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from slipstream.base.errors import InvalidImage
from slipstream.checkpoint.image_info import (
    BudgetSize,
    CroppedSize,
    FittedSize,
    ImageInfo,
    ImageSize,
    PaddedSize,
    PatchesSize,
    PinpointSize,
    SmartSize,
    SmartTiledSize,
    SplitSize,
    StretchedSize,
    TiledSize,
)
from slipstream.images.sizes import lay_out, smart_size

RNG = np.random.default_rng(5)
SIZES = [
    (int(height), int(min(max(height * ratio, 1), 8000)))
    for height, ratio in zip(RNG.integers(1, 4000, 400), np.exp(RNG.uniform(-2.5, 2.5, 400)), strict=True)
] + [(1, 1), (1, 190), (199, 1), (28, 28), (27, 5000), (448, 448), (896, 448), (4096, 4096), (768, 768), (769, 700)]


def info_of(size: ImageSize, patch: int, merge: int = 1) -> ImageInfo:
    return ImageInfo(
        family="test", size=size, filter="bicubic", rescale=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3, patch=patch,
        merge=merge, frames=1, channels_last=False, in_blocks=False, attention="causal", mrope=False, prompt=None,
    )  # fmt: skip


def library(module: str) -> Any:
    return importlib.import_module(f"transformers.models.{module}")


def narrow(size: tuple[int, int]) -> bool:
    return max(size) > 200 * min(size)


@pytest.mark.parametrize(
    ("module", "size"),
    [
        ("qwen2_vl.image_processing_pil_qwen2_vl", SmartSize(28, 3136, 1_003_520)),
        ("qwen2_vl.image_processing_pil_qwen2_vl", SmartSize(32, 65_536, 16_777_216)),
        ("paddleocr_vl.image_processing_pil_paddleocr_vl", SmartSize(28, 147_456, 2_359_296, small="round")),
    ],
)
def test_smart_sizes(module: str, size: SmartSize) -> None:
    smart_resize = library(module).smart_resize
    for height, width in filter(lambda each: not narrow(each), SIZES):
        try:
            expected = smart_resize(height, width, size.factor, size.least, size.most)
        except ValueError:
            with pytest.raises(InvalidImage):
                smart_size(size, height, width)
            continue
        assert smart_size(size, height, width) == expected, (height, width)


@pytest.mark.parametrize("num_frames", [2, 4, 18, 768])
def test_smart_sizes_of_frames_that_share_an_area(num_frames: int) -> None:
    size = SmartSize(28, 12_544, 11_760_000, frames=2, small="scale")
    smart_resize = library("glm4v.image_processing_pil_glm4v").smart_resize
    for height, width in filter(lambda each: not narrow(each), SIZES):
        scale = max(28 / height, 28 / width, 1) if min(height, width) < 28 else 1
        if narrow((max(int(height * scale), 1), max(int(width * scale), 1))):
            continue
        expected = smart_resize(num_frames, height, width, 2, 28, size.least, size.most)
        assert smart_size(size, height, width, num_frames) == expected, (height, width)


def test_sizes_of_a_budget_of_tokens() -> None:
    formula = library("gemma4.image_processing_pil_gemma4").get_aspect_ratio_preserving_size
    for tokens in (70, 280, 1120):
        for height, width in SIZES:
            expected = formula(height, width, 16, 9 * tokens, 3)
            layout = lay_out(info_of(BudgetSize(48, tokens), 16, 3), height, width)
            assert layout.views[0].final == expected, (height, width)
            assert layout.num_tokens == expected[0] * expected[1] // 48**2 <= tokens


def test_sizes_that_fit_a_longest_side() -> None:
    formula = library("pixtral.image_processing_pil_pixtral").get_resize_output_image_size
    for height, width in filter(lambda each: not narrow(each), SIZES):
        expected = formula(np.zeros((3, height, width), np.bool_), 1540, 28, "channels_first")
        assert lay_out(info_of(FittedSize(1540, 28), 14, 2), height, width).views[0].final == expected


def test_sizes_of_a_number_of_patches() -> None:
    formula = library("siglip2.image_processing_pil_siglip2").get_image_size_for_max_num_patches
    for height, width in SIZES:
        expected = formula(height, width, 16, 256)
        assert lay_out(info_of(PatchesSize(16, 256), 16), height, width).views[0].final == expected, (height, width)


def test_grids_of_tiles() -> None:
    formula = library("got_ocr2.image_processing_pil_got_ocr2").get_optimal_tiled_canvas
    for height, width in SIZES:
        cols, rows = formula((height, width), (448, 448), 1, 12)
        layout = lay_out(info_of(TiledSize(448, 448, 1, 12), 14, 2), height, width)
        assert layout.tiles == ((rows, cols) if rows * cols > 1 else (0, 0)), (height, width)
        assert layout.num_tokens == 256 * (rows * cols + (rows * cols > 1))
        cols, rows = formula((height, width), (768, 768), 2, 6)
        padded = lay_out(info_of(PaddedSize(1024, 768, 2, 6, (127,) * 3), 16, 4), height, width)
        assert padded.num_tokens == 257 + 144 * rows * cols * (max(height, width) > 768)


def test_split_sizes() -> None:
    module = library("idefics3.image_processing_pil_idefics3")
    backend = module.Idefics3ImageProcessorPil()
    for longest, tile in ((1456, 364), (2048, 512), (5000, 500)):
        for height, width in SIZES:
            first = module.get_resize_output_image_size(np.zeros((3, height, width), np.bool_), longest)
            made = lay_out(info_of(SplitSize(longest, tile, True), 14, 2), height, width)
            assert made.views[0].sizes[0] == first, (height, width)
            sides: list[tuple[int, int]] = []
            backend.resize = lambda image, size, resample, sides=sides: sides.append((size.height, size.width))
            backend.resize_for_vision_encoder(np.zeros((3, *first), np.bool_), tile)
            if min(sides[0]) > 0:  # of a side of 0 pixels the library makes none
                assert made.views[0].sizes[1] == sides[0], (height, width)


def test_tokens_of_pinpoints() -> None:
    processing = library("llava_onevision.processing_llava_onevision")
    processor = processing.LlavaOnevisionProcessor.__new__(processing.LlavaOnevisionProcessor)
    processor.num_image_tokens, processor.vision_aspect_ratio = 729, "anyres_max_9"
    sides = range(384, 2305, 384)
    pinpoints = tuple((high, wide) for high in sides for wide in sides)
    processor.image_processor = type("Fields", (), {"image_grid_pinpoints": pinpoints})
    info = info_of(PinpointSize(384, pinpoints, 9, (0, 0, 0)), 14)
    for height, width in filter(lambda each: not narrow(each), SIZES):
        expected = processor._get_number_of_features(height, width, 384, 384)
        assert lay_out(info, height, width).num_tokens == expected, (height, width)
    assert lay_out(info, 70, 110, num_images=2).num_tokens == 730


def test_smart_tiles() -> None:
    processor = library("lfm2_vl.image_processing_lfm2_vl").Lfm2VlImageProcessor()
    unit = 32 * 32
    size = SmartTiledSize(512, 2, 10, True, 2.0 * 256 * unit, SmartSize(32, 64 * unit, 256 * unit, small="clamp"))
    fields = {"downsample_factor": 2, "max_image_tokens": 256, "encoder_patch_size": 16}
    for height, width in filter(lambda each: not narrow(each), SIZES):
        whole = processor.smart_resize(height, width, min_image_tokens=64, **fields)[::-1]
        layout = lay_out(info_of(size, 16, 2), height, width)
        assert layout.views[-1].final == whole, (height, width)
        if processor._is_image_too_large(height, width, max_pixels_tolerance=2.0, **fields):
            cols, rows, *_ = processor._get_grid_layout(height, width, 2, 10, 512)
            assert layout.tiles == (rows, cols)
        else:
            assert layout.tiles == (0, 0)


@pytest.mark.parametrize("size", [SmartSize(28, 3136, 1_003_520), SmartSize(32, 1024, 65536, small="clamp")])
def test_a_narrow_picture_is_refused_where_the_model_has_no_size_for_it(size: SmartSize) -> None:
    for height, width in ((1, 100_000), (3, 601), (100_000, 1)):
        with pytest.raises(InvalidImage, match=f"{width} x {height} pixels is longer than"):
            lay_out(info_of(size, size.factor), height, width)


def test_every_other_kind_has_a_size_for_narrow_pictures() -> None:
    kinds: list[ImageSize] = [
        StretchedSize(224, 224), CroppedSize(224, 224, 224), BudgetSize(48, 280), FittedSize(1540, 28),
        SplitSize(1456, 364, True), TiledSize(448, 448, 1, 12),
        PinpointSize(384, ((384, 384), (768, 384)), 9, (0,) * 3),
        PaddedSize(1024, 768, 2, 6, (127,) * 3), PatchesSize(16, 256),
    ]  # fmt: skip
    for kind in kinds:
        for height, width in ((1, 100_000), (100_000, 1), (1, 1)):
            layout = lay_out(info_of(kind, 14), height, width)
            assert layout.num_tokens > 0 and all(min(sides) > 0 for view in layout.views for sides in view.sizes)
