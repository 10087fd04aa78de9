"""ImageLoader: from what a request has for an image or a video to what a tower and a prompt need of it.

URLs are fetched on the event loop. Files, also of `data:` URLs, are decoded and prepared in child processes, pictures
and arrays of Python in threads. Callers take turns at both, and what nothing waits for any more is not done.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal
from urllib.parse import unquote

import msgspec
import numpy as np

from slipstream.base.errors import InvalidImage
from slipstream.base.host import num_cpus
from slipstream.base.processes import LimitedChild
from slipstream.base.turns import FairThreads
from slipstream.checkpoint.image_info import ImageInfo, PinpointSize
from slipstream.images.fetch import Fetcher, FetchRules
from slipstream.images.pixels import PreparedImage, prepare
from slipstream.images.worker import ImageJob, call_worker, new_worker

MediaKind = Literal["image", "video"]
_MAX_THREADS = 8
_MAX_QUEUED = 256  # images of one caller
_BASE64 = ";base64,"


class MediaRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of a server for images and videos."""

    fetch: FetchRules = FetchRules()
    folder: str = ""  # absolute, whose files may be named by file: URLs; "": none
    max_image_bytes: int = 2**25  # of a file
    max_video_bytes: int = 2**28
    max_pixels: int = 64_000_000  # of an image, and of all frames of a video as they are seen
    background: tuple[int, int, int] = (255, 255, 255)  # of transparent images
    cache_bytes: int = 2**28  # of prepared images that are kept: a conversation sends its images with each turn


class _Prepared:
    """Images that were prepared from the same file for the same caller, the least recently used first.

    Callers do not share them: the time that an image takes would show that another caller has sent it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._images: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._size = 0

    def get(self, key: bytes) -> PreparedImage | None:
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
            return self._images.get(key)

    def put(self, key: bytes, image: PreparedImage) -> None:
        with self._lock:
            if key in self._images or image.patches.nbytes > self._max_bytes:
                return
            self._images[key] = image
            self._size += image.patches.nbytes
            while self._size > self._max_bytes:
                self._size -= self._images.popitem(last=False)[1].patches.nbytes


class _Call:
    """One image that a thread prepares in a child process."""

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self._lock = threading.Lock()
        self._worker: LimitedChild | None = None
        self._is_wanted = True

    def run(self, worker: LimitedChild, job: ImageJob, data: bytes) -> PreparedImage:
        with self._lock:
            self._worker = worker
        try:
            return call_worker(worker, job, data, lambda: self._is_wanted)
        finally:
            with self._lock:
                self._worker = None

    def stop(self) -> None:
        with self._lock:
            self._is_wanted = False
            if self._worker is not None:
                self._worker.stop()


class ImageLoader:
    def __init__(self, info: ImageInfo, rules: MediaRules, threads: int | None = None) -> None:
        self.info = info
        self.rules = rules
        self._fetcher = Fetcher(rules.fetch)
        count = min(num_cpus(), _MAX_THREADS) if threads is None else threads
        self._threads = FairThreads(count, "slipstream-images", _MAX_QUEUED, "images")
        self._local = threading.local()  # each thread has a child for each kind
        self._workers: list[LimitedChild] = []
        self._prepared = _Prepared(rules.cache_bytes)

    async def load(self, sources: Sequence[Any], caller: str, kind: MediaKind) -> list[PreparedImage]:
        """The images, or videos, of one prompt: URLs, bytes of files, pictures, arrays; a video may be a list of these.

        If one fails, the others end too. Raises InvalidImage with the number of the one that failed.
        """
        if kind == "video" and self.info.video is None:
            raise InvalidImage(f"this model ({self.info.family}) does not take videos; send single frames as images")
        # only in these models an image depends on their number: others find those of earlier turns again
        num_images = len(sources) if isinstance(self.info.size, PinpointSize) else 1
        tasks = [asyncio.ensure_future(self._load(source, caller, kind, num_images)) for source in sources]
        try:
            return await asyncio.gather(*tasks)
        except InvalidImage as error:
            ended = (task.done() and not task.cancelled() and task.exception() for task in tasks)
            failed = next(index for index, found in enumerate(ended) if found is error)
            where = f"{kind} {failed + 1} of {len(tasks)}: " if len(tasks) > 1 else ""
            raise InvalidImage(f"{where}{error}", param=kind) from None
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        self._fetcher.close()
        for worker in self._workers:
            worker.stop()
        self._threads.close(wait=True)
        for worker in self._workers:
            worker.close()

    async def _load(self, source: Any, caller: str, kind: MediaKind, num_images: int) -> PreparedImage:
        call = _Call(caller)
        future = await self._start(call, source, caller, kind, num_images)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            call.stop()
            raise

    async def _start(
        self, call: _Call, source: Any, caller: str, kind: MediaKind, num_images: int
    ) -> Future[PreparedImage]:
        job = ImageJob(self.info, kind, False, num_images, self.rules.max_pixels, self.rules.background)
        run: Callable[[], PreparedImage]
        most = self.rules.max_image_bytes if kind == "image" else self.rules.max_video_bytes
        match source:
            case str() if source.startswith("data:"):
                encoded = _encoded_part(source, most)
                run = partial(self._run, call, msgspec.structs.replace(job, is_base64=True), encoded)
            case str() if source.startswith("file:"):
                run = partial(self._run_file, call, job, source, most)
            case str():
                run = partial(self._run, call, job, await self._fetcher.fetch(source, caller, most))
            case bytes() | bytearray() | memoryview():
                _check_bytes(len(source), most)
                run = partial(self._run, call, job, bytes(source))
            case _:
                run = partial(self._prepare, source, kind, num_images)
        return self._threads.submit(caller, run)

    # In the threads

    def _run(self, call: _Call, job: ImageJob, data: bytes) -> PreparedImage:
        digest = hashlib.sha256(repr((call.caller, job.kind, job.is_base64, job.num_images)).encode())
        digest.update(data)
        if (known := self._prepared.get(digest.digest())) is not None:
            return known
        workers: dict[str, LimitedChild] | None = getattr(self._local, "workers", None)
        if workers is None:
            workers = self._local.workers = {}
        if job.kind not in workers:
            workers[job.kind] = new_worker(job.kind)
            self._workers.append(workers[job.kind])
        made = call.run(workers[job.kind], job, data)
        self._prepared.put(digest.digest(), made)
        return made

    def _run_file(self, call: _Call, job: ImageJob, url: str, max_bytes: int) -> PreparedImage:
        return self._run(call, job, read_allowed(url, self.rules.folder, max_bytes))

    def _prepare(self, source: Any, kind: MediaKind, num_images: int) -> PreparedImage:
        """From objects of Python, which a program has made itself."""
        max_pixels = self.rules.max_pixels
        if kind == "image":
            return prepare(self._picture(source), self.info, num_images, max_pixels)
        from slipstream.images.video import prepare_frames

        frames, fps = source if isinstance(source, tuple) else (source, None)
        if isinstance(fps, dict):  # vLLM's metadata
            fps = fps.get("fps")
        return prepare_frames([self._picture(frame) for frame in frames], self.info, fps, max_pixels)

    def _picture(self, source: Any) -> Any:
        from PIL import Image

        from slipstream.images.decode import to_rgb

        if isinstance(source, np.ndarray):
            if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] not in (3, 4):
                raise InvalidImage(
                    f"an array of {source.dtype} {list(source.shape)} is no image; give uint8 [height, width, 3 or 4]"
                )
            source = Image.fromarray(source)
        if not isinstance(source, Image.Image):
            raise InvalidImage(
                f"an image is {type(source).__name__}; give a URL, bytes of a file, a picture of Pillow or an array"
            )
        return to_rgb(source.copy(), self.rules.max_pixels, self.rules.background)


def _encoded_part(url: str, max_bytes: int) -> bytes:
    """The base64 of a data URL, whose type is not used."""
    start = url.find(_BASE64, 0, 200)
    if start < 0:
        raise InvalidImage("a data URL has no base64; write data:image/png;base64, and the encoded file")
    start += len(_BASE64)
    _check_bytes((len(url) - start) // 4 * 3, max_bytes)
    try:
        return url[start:].encode("ascii")
    except UnicodeEncodeError:
        raise InvalidImage("a data URL has characters that are no base64; encode the file again") from None


def _check_bytes(count: int, max_bytes: int) -> None:
    if count > max_bytes:
        raise InvalidImage(f"the file has {count} bytes, and at most {max_bytes} are accepted; make it smaller")


def read_allowed(url: str, folder: str, max_bytes: int) -> bytes:
    """The content of a file: URL. Raises InvalidImage unless it is a file below the folder, reached without links."""
    if not folder:
        raise InvalidImage(
            "files of the server are not read: no folder is allowed (--allowed-local-media-path); send the image itself"
        )
    path = unquote(url.removeprefix("file://").removeprefix("localhost"))
    inside = os.path.relpath(path, folder).split(os.sep) if path.startswith("/") else [os.pardir]
    refused = f"{path[:200]} cannot be read: images are read from files below {folder}, and not through links"
    if os.pardir in inside or "\0" in path:
        raise InvalidImage(refused)
    opened: list[int] = []
    try:
        # part by part, so that a link that is made meanwhile leads nowhere
        opened.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for index, part in enumerate(inside):
            kind = os.O_DIRECTORY if index + 1 < len(inside) else os.O_NONBLOCK
            opened.append(os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=opened[-1]))
        found = os.fstat(opened[-1])
        if not stat.S_ISREG(found.st_mode):
            raise InvalidImage(refused)
        if found.st_size > max_bytes:
            raise InvalidImage(
                f"{path[:200]} has {found.st_size} bytes, and at most {max_bytes} are accepted; shrink it"
            )
        with os.fdopen(opened.pop(), "rb") as file:
            return file.read(max_bytes)
    except OSError:
        raise InvalidImage(refused) from None
    finally:
        for each in opened:
            os.close(each)
