"""Decodes and prepares images and videos of requests in a child process.

Decoders are large C libraries that read files of strangers: their faults end in errors of memory, which would end a
server with all its requests. The child has limits of time and memory, a fault or a limit is an error of one image, and
no Python code of it holds up the event loop.
"""

from __future__ import annotations

import binascii
import os
from typing import Any, Literal

import msgspec
import numpy as np

from slipstream.base.errors import InvalidImage
from slipstream.base.processes import LimitedChild, LimitPassed, answer_calls
from slipstream.checkpoint.image_info import ImageInfo
from slipstream.images.pixels import PreparedImage, prepare

_MAX_SECONDS = {"image": 20.0, "video": 120.0}  # of CPU time
_NICE = 5  # above the priority of the server: pictures use what texts leave
_MAX_MEMORY = 3 * 2**30  # bytes beyond those at the start: four copies of 64 million pixels fill 1 GiB


class ImageJob(msgspec.Struct, frozen=True, array_like=True):
    info: ImageInfo
    kind: Literal["image", "video"]
    is_base64: bool
    num_images: int  # of the prompt
    max_pixels: int
    background: tuple[int, int, int]  # seen through what is transparent


def _encode_array(value: Any) -> Any:
    return [value.shape, value.tobytes()]


def _decode_array(kind: type, value: Any) -> Any:
    shape, data = value
    return np.frombuffer(data, np.uint8).reshape(shape)


_JOBS = msgspec.msgpack.Decoder(ImageJob)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_ANSWERS: msgspec.msgpack.Decoder[str | PreparedImage] = msgspec.msgpack.Decoder(
    str | PreparedImage,
    dec_hook=_decode_array,  # the text is what is wrong with the image
)
_HEADER = 4


def new_worker(kind: Literal["image", "video"]) -> LimitedChild:
    return LimitedChild(__name__, max_seconds=_MAX_SECONDS[kind], max_memory=_MAX_MEMORY)


def call_worker(worker: LimitedChild, job: ImageJob, data: bytes, is_wanted: Any) -> PreparedImage:
    """Raises InvalidImage, also if the limits are passed or the decoder crashes."""
    header = _ENCODER.encode(job)
    try:
        answer = worker.call(b"".join((len(header).to_bytes(_HEADER, "little"), header, data)), is_wanted)
    except LimitPassed:
        raise InvalidImage(
            f"the {job.kind} cannot be decoded within {worker.max_seconds:g} s and {_MAX_MEMORY >> 30} GiB, or breaks "
            "its decoder; make it smaller, or save it again"
        ) from None
    found = _ANSWERS.decode(answer)
    if isinstance(found, str):
        raise InvalidImage(found)
    return found


def _run(message: bytes) -> bytes:
    from slipstream.images.decode import decode
    from slipstream.images.video import prepare_file

    size = int.from_bytes(message[:_HEADER], "little")
    job = _JOBS.decode(message[_HEADER : _HEADER + size])
    data = message[_HEADER + size :]
    try:
        if job.is_base64:
            data = binascii.a2b_base64(data, strict_mode=True)
        if job.kind == "video":
            return _ENCODER.encode(prepare_file(data, job.info, job.max_pixels))
        picture = decode(data, job.max_pixels, job.background)
        return _ENCODER.encode(prepare(picture, job.info, job.num_images, job.max_pixels))
    except InvalidImage as error:
        return _ENCODER.encode(str(error))
    except binascii.Error as error:
        return _ENCODER.encode(f"the {job.kind}'s base64 is broken: {error}; encode it again, without line breaks")
    except MemoryError:
        return _ENCODER.encode(f"the {job.kind} needs too much memory; make it smaller")


def main() -> None:
    from PIL import Image

    os.nice(_NICE)
    Image.MAX_IMAGE_PIXELS = None  # ours is the limit
    answer_calls(_run)


if __name__ == "__main__":
    main()
