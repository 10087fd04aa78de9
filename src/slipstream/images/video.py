"""Videos: which frames a model sees, at which size, and when.

A file is read to the end of its last sampled frame, and each sampled frame is resized at once, so memory is bounded by
what the model sees. Frames of a list are taken as they are.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from slipstream.base.errors import InvalidImage
from slipstream.checkpoint.image_info import ImageInfo, VideoRule
from slipstream.images.decode import check_size
from slipstream.images.pixels import PreparedImage, patchify, resize, with_key
from slipstream.images.sizes import ImageLayout, Sides, smart_size

_MAX_FRAMES = 2**17  # of a file: an hour at 30 a second
_USUAL_FPS = 2.0  # of a list of frames: the rate at which models sample files


def sample_frames(rule: VideoRule, count: int, fps: float, frames_per_patch: int) -> list[int]:
    """Indices of the frames of a file that the model sees. `fps`: of the file."""
    if rule.fps is None:
        return list(range(count))
    if rule.by_time:
        wanted = min(max(int(count / fps * rule.fps), rule.least), rule.most, count)
        return [int(index) for index in np.linspace(0, count - 1, wanted).round()]
    most = min(rule.most, count) // frames_per_patch * frames_per_patch
    sampled = min(max(count / fps * rule.fps, rule.least), most, count)
    wanted = max(int(sampled // frames_per_patch) * frames_per_patch, 1)
    return [int(index * (count / wanted)) for index in range(wanted)]


def prepare_frames(frames: Sequence[Image.Image], info: ImageInfo, fps: float | None, max_pixels: int) -> PreparedImage:
    """`frames`: RGB, of one size. `fps`: of the list."""
    if not frames or any(frame.size != frames[0].size for frame in frames):
        raise InvalidImage("a video has no frames, or frames of different sizes; give frames of one size")
    indices = list(range(len(frames)))
    return _prepare(frames, frames[0].size[::-1], indices, fps or _USUAL_FPS, fps or _USUAL_FPS, info, max_pixels)


def prepare_file(data: bytes, info: ImageInfo, max_pixels: int) -> PreparedImage:
    """From the bytes of a video file. Raises InvalidImage."""
    import av  # the extra `video`

    rule = _rule(info)
    try:
        with warnings.catch_warnings(action="ignore"), av.open(io.BytesIO(data), "r", metadata_errors="ignore") as file:
            stream = next(iter(file.streams.video), None)
            if stream is None or not stream.codec_context.width:
                raise InvalidImage("the file has no video that can be read")
            size = (stream.codec_context.height, stream.codec_context.width)
            check_size(size[1], size[0], max_pixels)
            fps = float(stream.average_rate or stream.guessed_rate or 24)
            count = stream.frames or _count_packets(data)
            if not 0 < count <= _MAX_FRAMES:
                raise InvalidImage(f"the video has {count} frames, and 1 to {_MAX_FRAMES} are accepted; cut it")
            indices = sample_frames(rule, count, fps, info.frames)
            stream.thread_type = "NONE"
            frames = _decoded(file.decode(stream), indices)
            return _prepare(frames, size, indices, fps, len(indices) / count * fps, info, max_pixels)
    except InvalidImage:
        raise
    except Exception as error:  # as decoders of images
        text = str(error) or type(error).__name__
        raise InvalidImage(f"the video cannot be decoded: {text[:200]}; repair it, or send it as MP4") from None


def _rule(info: ImageInfo) -> VideoRule:
    if info.video is None:
        raise InvalidImage(f"a model of the family {info.family} does not take videos; send single frames as images")
    return info.video


def _count_packets(data: bytes) -> int:
    import av

    with av.open(io.BytesIO(data), "r", metadata_errors="ignore") as file:
        return sum(packet.size > 0 for packet in file.demux(file.streams.video[0]))


def _decoded(frames: Iterable[Any], indices: Sequence[int]) -> Iterable[Image.Image]:
    """Of a file, the frames with these indices. The last one is repeated if there are fewer than the file says."""
    wanted = iter(indices)
    index = next(wanted, None)
    last: Image.Image | None = None
    for number, frame in enumerate(frames):
        while index == number:
            last = Image.fromarray(frame.to_ndarray(format="rgb24"))
            yield last
            index = next(wanted, None)
        if index is None:
            return
    if last is None:
        raise InvalidImage("the video has no frame that can be decoded; repair it")
    while index is not None:
        yield last
        index = next(wanted, None)


def _prepare(
    frames: Iterable[Image.Image],
    size: Sides,
    indices: Sequence[int],
    fps: float,
    sampled_fps: float,
    info: ImageInfo,
    max_pixels: int,
) -> PreparedImage:
    """`fps`: of the indices. `sampled_fps`: of the frames."""
    rule, group = _rule(info), info.frames
    count = -(-len(indices) // group) * group
    target = smart_size(rule.size, *size, max(len(indices), group) if rule.by_time else 0)
    if target[0] * target[1] * count > max_pixels:
        raise InvalidImage(
            f"{count} frames of {target[1]} x {target[0]} pixels are more than {max_pixels}; send fewer frames"
        )
    parts: list[np.ndarray] = []
    pair: list[Image.Image] = []
    for frame in frames:
        if frame.size != size[::-1]:
            raise InvalidImage("the frames of the video have different sizes; send it in one size")
        pair.append(resize(frame, target, info))
        if len(pair) == group:
            parts.append(patchify(pair, info))
            pair = []
    if pair:  # an incomplete group repeats its last frame
        parts.append(patchify(pair + [pair[-1]] * (group - len(pair)), info))
    rows, cols = target[0] // info.patch, target[1] // info.patch
    padded = [*indices, *[indices[-1]] * (count - len(indices))]
    times = tuple(
        (padded[first] / fps + padded[first + group - 1] / fps) / 2 if rule.by_time else padded[first] / fps
        for first in range(0, count, group)
    )
    num_tokens = len(parts) * (rows // info.merge) * (cols // info.merge)
    grids = ((len(parts), rows, cols),)
    layout = ImageLayout((), (0, 0), num_tokens)
    return with_key(np.concatenate(parts), grids, size, layout, times, group / sampled_fps)
