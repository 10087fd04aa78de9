"""Towers against transformers' own, in float32 and on the same pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from slipstream.checkpoint.image_info import ImageInfo
from slipstream.images.pixels import PreparedImage
from tiny_towers import TOWERS, library_inputs, load_sighted, pictures, run_tower, write_tower

SIZES = [(70, 110), (97, 333), (230, 61)]


def oracle_tower(folder: Path, info: ImageInfo, images: list[PreparedImage]) -> list[torch.Tensor]:
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = model.model.get_image_features(**library_inputs(images, info))
        rows = found.pooler_output
        rows = torch.cat(list(rows)).flatten(0, -2) if isinstance(rows, list | tuple) else rows.flatten(0, -2)
        levels = [rows, *(getattr(found, "deepstack_features", None) or ())]
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
    for sizes in (SIZES[:1], SIZES, [(301, 517)]):
        images = pictures(info, *sizes)
        expected = oracle_tower(folder, info, images)
        assert expected[0].std() > 0.05
        for mine, theirs in zip(run_tower(model, images), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", [family for family in TOWERS if family.startswith("qwen")])
def test_rows_of_a_video_are_those_of_transformers(family: str, checkpoints: Any) -> None:
    folder, info = checkpoints(family)
    grid = (3, 6, 10)  # pairs of frames, each of which sees itself only
    patches = np.random.default_rng(3).integers(0, 256, (180, 6 * info.patch**2), np.uint8)
    video = PreparedImage(
        key=b"", patches=patches, grids=(grid,), height=0, width=0, tiles=(0, 0), num_tokens=45
    )  # fmt: skip
    (mine,) = run_tower(load_sighted(folder, info), [video])
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    mean, std = (np.array(each, np.float32).reshape(3, 1) for each in (info.mean, info.std))
    values = (patches.reshape(180, 3, -1) * np.float32(info.rescale) - mean) / std
    with torch.inference_mode():
        found = model.model.get_video_features(torch.from_numpy(values.reshape(180, -1)), torch.tensor([grid]))
    torch.testing.assert_close(mine[:, 0], torch.cat(list(found.pooler_output)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_the_kernels_of_a_gpu_give_the_same_rows(family: str, checkpoints: Any) -> None:
    """Attention alone runs in Triton's interpreter: two lists of segments, with and without class tokens."""
    triton_attention = pytest.importorskip("slipstream.nn.paged_attention", reason="triton is not installed")
    folder, info = checkpoints(family)
    model = load_sighted(folder, info)
    assert model.tower is not None
    kernels = triton_attention.TritonAttention((), torch.float32, (model.tower.shape.attention.head_dim,))
    images = pictures(info, (70, 64), (97, 33))
    for mine, expected in zip(run_tower(model, images, kernels), run_tower(model, images), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", TOWERS)
def test_a_tower_reads_no_value_of_the_device(family: str, checkpoints: Any) -> None:
    """Tensors of the meta device have none."""
    folder, info = checkpoints(family)
    images = pictures(info, *SIZES)
    rows = run_tower(load_sighted(folder, info, device="meta"), images)
    assert [len(each) for each in rows] == [image.num_tokens for image in images]


@pytest.mark.parametrize("family", TOWERS)
def test_a_picture_gives_the_same_rows_alone_and_packed_with_others(family: str, checkpoints: Any) -> None:
    folder, info = checkpoints(family)
    model = load_sighted(folder, info, torch.float64)
    images = pictures(info, *SIZES, SIZES[0])
    for image, packed in zip(images, run_tower(model, images), strict=True):
        (alone,) = run_tower(model, [image])
        torch.testing.assert_close(alone, packed, rtol=0, atol=1e-12)  # a product's sums depend on its number of rows
