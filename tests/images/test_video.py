"""Videos of the Qwen family: frames that are sampled, their patches, times and places in the prompt."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipstream.base.errors import InvalidImage
from slipstream.checkpoint.image_info import ImageInfo, VideoRule, read_image_info
from slipstream.images.loader import ImageLoader, MediaRules
from slipstream.images.pixels import PreparedImage
from slipstream.images.prompt import spell_video
from slipstream.images.video import prepare_file, prepare_frames, sample_frames
from tiny_vision import picture, write_vision

av = pytest.importorskip("av")
LARGE = 64_000_000
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Any] = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        processor = write_vision(family, folder)
        made[family] = read_image_info(folder), processor, folder
    return made


def movie(num_frames: int, fps: int = 10, size: tuple[int, int] = (96, 128)) -> bytes:
    """A video file of still pictures that follow one another."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.asarray(picture(*size, seed=number)), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def decoded(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def library_video(processor: Any, frames: np.ndarray, fps: float, **fields: Any) -> dict[str, Any]:
    metadata = {"total_num_frames": len(frames), "fps": fps, "duration": len(frames) / fps}
    found = processor.video_processor(
        [frames], video_metadata=[metadata], return_tensors="pt", return_metadata=True, **fields
    )
    return dict(found)


def same_pixels(made: PreparedImage, info: ImageInfo, expected: np.ndarray) -> None:
    """Within the 2 levels that torchvision's resize differs from Pillow's."""
    axes = (3, 1)
    mean, std = (np.array(each, np.float32).reshape(axes) for each in (info.mean, info.std))
    values = made.patches.astype(np.float32).reshape(len(made.patches), 3, -1) / 255
    levels = np.abs(((values - mean) / std).reshape(len(made.patches), -1) - expected) * 255 * max(info.std)
    assert levels.max() < 2.2 and (levels > 0.5).mean() < 0.02


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_frames", "fps"), [(60, 10), (31, 5), (4, 10), (7, 24)])
def test_a_file_is_what_the_library_makes_of_its_frames(models: Any, family: str, num_frames: int, fps: int) -> None:
    info, processor, _ = models[family]
    data = movie(num_frames, fps)
    frames = decoded(data).transpose(0, 3, 1, 2)
    made = prepare_file(data, info, LARGE)
    found = library_video(processor, frames, fps, do_sample_frames=family == "qwen3_vl")
    assert [list(grid) for grid in made.grids] == found["video_grid_thw"].tolist()
    same_pixels(made, info, found["pixel_values_videos"].numpy())
    if family == "qwen3_vl":
        text = processor.replace_video_token(found, 0)
        spelled = spell_video(info, made)
        _, rows, cols = spelled.runs[0]
        assert spelled.text.replace("<|video_pad|>", rows * cols * "<|video_pad|>") == text
        assert sum(frames * rows * cols for frames, rows, cols in spelled.runs) == made.num_tokens
    else:
        metadata = found["video_metadata"][0]
        seconds = processor.video_processor.temporal_patch_size / metadata.sampled_fps
        assert made.seconds == pytest.approx(seconds)
        step = 4 * seconds if family == "qwen2_5_vl" else 1.0
        assert spell_video(info, made).step == pytest.approx(step)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 47, 100, 1001, 90_000])
@pytest.mark.parametrize("fps", [1.0, 10.0, 23.976, 60.0])
def test_sampled_frames_are_those_of_the_library(models: Any, count: int, fps: float) -> None:
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=count, fps=fps)
    info, processor, _ = models["qwen3_vl"]
    expected = processor.video_processor.sample_frames(metadata)
    assert sample_frames(info.video, count, fps, 2) == [int(index) for index in expected]
    info, processor, _ = models["qwen2_vl"]
    rule = VideoRule(**{**{name: getattr(info.video, name) for name in info.video.__struct_fields__}, "fps": 2.0})
    if count > 1:  # of one frame the library makes none
        expected = processor.video_processor.sample_frames(metadata, fps=2.0)
        assert sample_frames(rule, count, fps, 2) == expected.tolist()[: len(expected)]


def test_frames_of_a_list_are_all_used(models: Any) -> None:
    info, processor, _ = models["qwen3_vl"]
    frames = [picture(80, 110, seed=number) for number in range(5)]
    made = prepare_frames(frames, info, 4.0, LARGE)
    stacked = np.stack([np.asarray(frame) for frame in frames]).transpose(0, 3, 1, 2)
    found = library_video(processor, stacked, 4.0, do_sample_frames=False)
    assert [list(grid) for grid in made.grids] == found["video_grid_thw"].tolist() == [[3, *made.grids[0][1:]]]
    same_pixels(made, info, found["pixel_values_videos"].numpy())
    assert made.times == (0.125, 0.625, 1.0)  # the last frame is repeated


def test_one_frame_is_a_video_of_two_equal_ones(models: Any) -> None:
    info, _, _ = models["qwen3_vl"]
    (one,) = prepare_frames([picture(80, 110)], info, None, LARGE).grids
    assert one[0] == 1


def test_the_loader_takes_files_lists_and_arrays(models: Any) -> None:
    info, _, _ = models["qwen3_vl"]
    data = movie(12)
    frames = [picture(80, 110, seed=number) for number in range(4)]
    array = np.stack([np.asarray(frame) for frame in frames])
    images = ImageLoader(info, MediaRules(), 1)
    try:
        file, by_list, by_array, by_rate = asyncio.run(
            images.load([data, frames, array, (frames, {"fps": 8.0})], "", "video")
        )
        assert file.key == prepare_file(data, info, LARGE).key
        assert by_list.key == by_array.key != by_rate.key
        assert (by_list.times, by_rate.times) == ((0.25, 1.25), (0.0625, 0.3125))
        with pytest.raises(InvalidImage, match="the video cannot be decoded"):
            asyncio.run(images.load([b"no video"], "", "video"))
    finally:
        images.close()


def test_a_video_for_a_model_without_is_refused(tmp_path: Path) -> None:
    write_vision("gemma3", tmp_path)
    info = read_image_info(tmp_path)
    assert info is not None
    images = ImageLoader(info, MediaRules(), 1)
    with pytest.raises(InvalidImage, match="gemma3. does not take videos"):
        asyncio.run(images.load([movie(4)], "", "video"))
    images.close()


@pytest.mark.parametrize("data", [b"", b"hello", b"\0" * 1000, movie(4)[:300]])
def test_broken_files_are_refused(models: Any, data: bytes) -> None:
    with pytest.raises(InvalidImage, match="video"):
        prepare_file(data, models["qwen3_vl"][0], LARGE)


def test_a_truncated_video_repeats_its_last_frame_or_is_refused(models: Any) -> None:
    info = models["qwen2_vl"][0]
    data = movie(20)
    whole = prepare_file(data, info, LARGE)
    for size in range(0, len(data), len(data) // 12):
        try:
            assert prepare_file(data[:size], info, LARGE).grids == whole.grids
        except InvalidImage as error:
            assert str(error)


def test_a_sound_file_and_a_large_frame_are_refused(models: Any) -> None:
    info = models["qwen3_vl"][0]
    file = io.BytesIO()
    with av.open(file, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(InvalidImage, match="no video that can be read"):
        prepare_file(file.getvalue(), info, LARGE)
    with pytest.raises(InvalidImage, match="128 x 96 pixels, and at most 10000"):
        prepare_file(movie(4), info, 10_000)
    with pytest.raises(InvalidImage, match="send fewer frames"):
        prepare_file(movie(8), models["qwen2_vl"][0], 100_000)


def test_frames_of_different_sizes_are_refused(models: Any) -> None:
    for frames in ([], [Image.new("RGB", (40, 40)), Image.new("RGB", (40, 41))]):
        with pytest.raises(InvalidImage, match="no frames, or frames of different sizes"):
            prepare_frames(frames, models["qwen3_vl"][0], None, LARGE)
