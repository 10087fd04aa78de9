"""Places and positions of images in a prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from slipstream.base.errors import InvalidPrompt
from slipstream.checkpoint.image_info import ImageInfo, PromptRule, SmartSize, VideoRule
from slipstream.contracts.images import positions_of
from slipstream.images.prompt import PlacedImages, SpelledImage, expand_ids, expand_text

PAD, VIDEO = 7, 8
SIZE = SmartSize(28, 3136, 1_003_520)
INFO = ImageInfo(
    family="qwen2_5_vl", size=SIZE, filter="bicubic", rescale=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3, patch=14,
    merge=2, frames=2, channels_last=False, in_blocks=True, attention="causal", mrope=True,
    prompt=PromptRule(placeholder="<image>", token="<image>", token_id=PAD),
    video=VideoRule(
        placeholders=("<s><video><e>", "<video>"), token="<video>", token_id=VIDEO, size=SIZE, fps=2.0, least=4,
        most=768, by_time=True, start="<s>", end="<e>",
    ),
)  # fmt: skip


def image(rows: int, cols: int, text: str = "<image>") -> SpelledImage:
    return SpelledImage(text, ((1, rows, cols),), PAD)


def library_positions(placed: PlacedImages, kind: str, seconds: list[float]) -> tuple[np.ndarray, int]:
    """What the library computes for the same tokens."""
    import transformers

    model = getattr(transformers, f"{kind}Model")
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=4))
    fake = SimpleNamespace(config=config)
    fake.get_vision_position_ids = lambda *args, **fields: model.get_vision_position_ids(fake, *args, **fields)
    ids = torch.tensor([placed.token_ids])
    types = torch.where(ids == PAD, 1, torch.where(ids == VIDEO, 2, 0))

    def grids(token: int) -> torch.Tensor | None:
        spans = [span for span in placed.spans if placed.token_ids[span.start] == token]
        found = [(span.grid[0], 2 * span.grid[1], 2 * span.grid[2]) for span in spans]
        return torch.tensor(found) if found else None

    fields: dict[str, Any] = {"second_per_grid_ts": seconds} if seconds else {}
    positions, delta = model.get_rope_index(
        fake, ids, types, image_grid_thw=grids(PAD), video_grid_thw=grids(VIDEO), **fields
    )
    return positions[:, 0].numpy(), int(delta[0])


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v", "PaddleOCRVL"])
@pytest.mark.parametrize(
    ("ids", "images"),
    [
        ([1, 2, 3], []),
        ([PAD], [image(3, 5)]),
        ([1, PAD, 2], [image(3, 5)]),
        ([PAD, 1, PAD, 2, 3, PAD], [image(2, 9), image(1, 1), image(7, 4)]),
    ],
    ids=["text", "image", "one", "three"],
)
def test_positions_of_images_are_those_of_the_library(kind: str, ids: list[int], images: list[SpelledImage]) -> None:
    placed = expand_ids(INFO, ids, images)
    positions, delta = library_positions(placed, kind, [])
    assert np.array_equal(positions_of(placed.spans, 0, len(placed.token_ids)), positions) and placed.shift == delta
    for index, span in enumerate(placed.spans):
        assert placed.token_ids[span.start : span.start + span.count] == [PAD] * span.count
        assert span.image == index and span.position == positions[0, span.start]


@pytest.mark.parametrize("seconds", [1.0, 2.0])  # of 0.5 s the library makes 0
def test_positions_inside_of_a_video_are_those_of_the_library(seconds: float) -> None:
    video = SpelledImage("<video>", ((5, 2, 3),), VIDEO, step=4 * seconds)
    placed = expand_ids(INFO, [1, 2, VIDEO, 3, 4], [video])
    expected, _ = library_positions(placed, "Qwen2_5_VL", [seconds])
    assert np.array_equal(positions_of(placed.spans, 0, len(placed.token_ids))[:, :32], expected[:, :32])


def test_text_behind_a_video_has_greater_positions_than_all_of_it() -> None:
    """As the models were trained. The library in the version of these tests counts rows and columns only."""
    video = SpelledImage("<video>", ((5, 2, 3),), VIDEO, step=2.0)
    placed = expand_ids(INFO, [1, 2, VIDEO, 3, 4], [video])
    positions = positions_of(placed.spans, 0, len(placed.token_ids))
    assert positions[0, 2:32:6].tolist() == [2, 4, 6, 8, 10]
    assert positions[:, 32:].tolist() == [[11, 12]] * 3
    assert placed.shift == 13 - 34


def test_images_side_by_side_have_places_of_their_own() -> None:
    placed = expand_ids(INFO, [PAD, PAD, 1], [image(1, 2), image(2, 1)])
    assert placed.token_ids == [PAD] * 4 + [1]
    assert [(span.start, span.count, span.position) for span in placed.spans] == [(0, 2, 0), (2, 2, 2)]
    assert positions_of(placed.spans, 0, 5).tolist() == [[0, 0, 2, 2, 4], [0, 0, 2, 3, 4], [0, 1, 2, 2, 4]]


def test_ids_in_which_image_tokens_are_repeated_already_stay() -> None:
    images = [image(2, 2), SpelledImage("", ((1, 1, 2), (1, 1, 3)), PAD)]
    once = expand_ids(INFO, [1, PAD, 2, PAD, 3, PAD], images)
    assert expand_ids(INFO, once.token_ids, images) == once


def test_positions_of_other_models_are_indices() -> None:
    placed = expand_ids(msgspec.structs.replace(INFO, mrope=False), [1, PAD, 2, PAD, 3], [image(2, 3), image(4, 4)])
    assert [span.position for span in placed.spans] == [span.start for span in placed.spans] == [1, 8]
    assert placed.shift == 0


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([1, 2], "has 0 tokens of images, and its 2 images need 2 to expand, or 5"),
        ([PAD, 1, PAD, PAD], "has 3 tokens"),
        ([PAD, PAD, 1, PAD, PAD, PAD], "has 5 tokens|one behind the other"),
        ([VIDEO, PAD], "token 0 of the prompt is not of image 1"),
    ],
)
def test_other_numbers_of_image_tokens_are_refused(ids: list[int], match: str) -> None:
    images = [image(2, 2), image(1, 1)]
    if VIDEO in ids:
        images = [image(2, 2), SpelledImage("", ((1, 1, 1),), VIDEO)]
    with pytest.raises(InvalidPrompt, match=match):
        expand_ids(INFO, ids, images)


def test_text_is_expanded_in_its_order() -> None:
    text, order = expand_text(
        INFO, "a<image>b<s><video><e>c<image>d<video>",
        [image(1, 1, "[1]"), image(2, 2, "[2]")], [image(3, 3, "[3]"), image(4, 4, "[4]")],
    )  # fmt: skip
    assert text == "a[1]b[3]c[2]d[4]"
    assert [spelled.text for spelled in order] == ["[1]", "[3]", "[2]", "[4]"]


@pytest.mark.parametrize(
    ("text", "num_images", "num_videos", "match"),
    [
        ("no place", 1, 0, "0 times the placeholder <image> for 1 image; "),
        ("<image> <image>", 1, 0, "2 times the placeholder <image> for 1 image; "),
        ("<image>", 2, 0, "1 times the placeholder <image> for 2 images; "),
        ("<image>", 1, 1, "0 times the placeholder <video> for 1 video; "),
    ],
)
def test_other_numbers_of_placeholders_are_refused(text: str, num_images: int, num_videos: int, match: str) -> None:
    with pytest.raises(InvalidPrompt, match=match):
        expand_text(INFO, text, [image(1, 1)] * num_images, [image(1, 1)] * num_videos)


def test_words_of_an_expansion_are_not_expanded_again() -> None:
    text, order = expand_text(INFO, "<image><image>", [image(1, 1, "<image><image>")] * 2, [])
    assert text == "<image>" * 4 and len(order) == 2


def test_a_video_for_a_model_without_is_refused() -> None:
    with pytest.raises(InvalidPrompt, match="no place for 1 video"):
        expand_text(msgspec.structs.replace(INFO, video=None), "<video>", [], [image(1, 1)])


@pytest.mark.parametrize("images", [[], [image(3, 5)], [image(2, 9), image(1, 1), image(7, 4)]])
def test_positions_of_every_part_of_a_prompt_are_those_of_the_whole(images: list[SpelledImage]) -> None:
    video = SpelledImage("", ((3, 2, 2),), PAD, step=5.0)
    placed = expand_ids(INFO, [1, *[PAD, 2] * len(images), 3, PAD, 4, 5], [*images, video])
    length = len(placed.token_ids)
    whole = positions_of(placed.spans, 0, length)
    for start in range(length):
        for stop in range(start, length + 1):
            assert np.array_equal(positions_of(placed.spans, start, stop), whole[:, start:stop])
