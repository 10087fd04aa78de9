"""Towers against transformers' own, in float32 and on the same pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hand_load import load_model
from slipstream.checkpoint.image_info import ImageInfo
from slipstream.checkpoint.model_info import read_model_info
from slipstream.config.config import ModelConfig
from slipstream.images.pixels import PreparedImage
from slipstream.nn.decoder import Decoder
from slipstream.nn.load import as_stored
from slipstream.nn.sdpa import SdpaAttention
from slipstream.nn.towers.layout import ImageViews, lay_out
from tiny_towers import TOWERS, pictures, write_tower

SIZES = [(70, 110), (97, 333), (230, 61)]


def load_sighted(folder: Path, images: ImageInfo, dtype: torch.dtype = torch.float32) -> Decoder:
    info = as_stored(read_model_info(folder), folder)
    name = str(dtype).removeprefix("torch.")
    config = ModelConfig(info, str(folder), "tiny", "safetensors", name, True, 4096, 0, images=images)
    model = load_model(config, torch.device("cpu"))
    assert isinstance(model, Decoder)
    return model


def run_tower(model: Decoder, images: list[PreparedImage]) -> list[torch.Tensor]:
    """[rows, levels, hidden] of each picture, all in one call."""
    tower = model.tower
    assert tower is not None
    layout = lay_out(tower.shape, [ImageViews(image.grids, image.tiles, image.height, image.width) for image in images])
    assert layout.num_rows == tuple(image.num_tokens for image in images)
    patches = torch.from_numpy(np.concatenate([image.patches for image in images]))
    arrays = {name: torch.from_numpy(array) for name, array in layout.arrays.items()}
    attention = SdpaAttention((), next(tower.layers.parameters()).dtype)
    with torch.inference_mode():
        return list(tower(patches, layout, arrays, attention).split(layout.num_rows))


def values_of(images: list[PreparedImage], info: ImageInfo) -> torch.Tensor:
    """The patches of the Qwen family as its processor makes them."""
    frames = np.concatenate([image.patches for image in images]).astype(np.float32).reshape(-1, 3, 1, info.patch**2)
    mean, std = (np.array(each, np.float32).reshape(3, 1, 1) for each in (info.mean, info.std))
    values = (frames * np.float32(info.rescale) - mean) / std
    return torch.from_numpy(np.repeat(values, info.frames, 2).reshape(len(values), -1))


def oracle_tower(folder: Path, info: ImageInfo, images: list[PreparedImage]) -> list[torch.Tensor]:
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        grids = torch.tensor([grid for image in images for grid in image.grids])
        found = model.model.visual(values_of(images, info), grid_thw=grids)
        levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return list(torch.stack(levels, 1).split([image.num_tokens for image in images]))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Path, ImageInfo]] = {}

    def checkpoint(family: str) -> tuple[Path, ImageInfo]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = folder, write_tower(family, folder)
        return made[family]

    return checkpoint


@pytest.mark.parametrize("family", TOWERS)
def test_rows_of_pictures_are_those_of_transformers(family: str, checkpoints: Any) -> None:
    folder, info = checkpoints(family)
    model = load_sighted(folder, info)
    for sizes in (SIZES[:1], SIZES):
        images = pictures(info, *sizes)
        expected = oracle_tower(folder, info, images)
        assert expected[0].std() > 0.05
        for mine, theirs in zip(run_tower(model, images), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", TOWERS)
def test_a_picture_gives_the_same_rows_alone_and_packed_with_others(family: str, checkpoints: Any) -> None:
    folder, info = checkpoints(family)
    model = load_sighted(folder, info, torch.float64)
    images = pictures(info, *SIZES, SIZES[0])
    for image, packed in zip(images, run_tower(model, images), strict=True):
        (alone,) = run_tower(model, [image])
        torch.testing.assert_close(alone, packed, rtol=0, atol=1e-12)  # a product's sums depend on its number of rows
