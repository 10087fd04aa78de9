"""Sources of images: data URLs, files, bytes, objects; what is cancelled, and what ends alone."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from patience import PATIENCE
from slipstream.base.errors import InvalidImage, QueueFull
from slipstream.base.processes import LimitedChild
from slipstream.checkpoint.image_info import ImageInfo, read_image_info
from slipstream.images import fetch, loader, worker
from slipstream.images.fetch import FetchRules
from slipstream.images.loader import ImageLoader, MediaRules, read_allowed
from slipstream.images.pixels import PreparedImage
from tiny_vision import picture, write_vision


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ImageInfo:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    write_vision("qwen3_vl", folder)
    found = read_image_info(folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def images(info: ImageInfo) -> Iterator[ImageLoader]:
    made = ImageLoader(info, MediaRules(max_pixels=10**6, max_image_bytes=10**6), 2)
    yield made
    made.close()


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


PICTURE = picture(70, 110)
FILE = png(PICTURE)
URL = "data:image/png;base64," + base64.b64encode(FILE).decode()


def load(images: ImageLoader, *sources: Any, kind: Any = "image", caller: str = "") -> list[PreparedImage]:
    return asyncio.run(images.load(sources, caller, kind))


def test_all_sources_of_a_picture_give_the_same(images: ImageLoader) -> None:
    array = np.asarray(PICTURE)
    found = load(
        images, FILE, URL, PICTURE, array, bytearray(FILE), np.dstack([array, np.full((70, 110), 255)]).astype("u1")
    )
    assert {each.key for each in found} == {found[0].key}
    assert all(np.array_equal(each.patches, found[0].patches) for each in found)
    assert found[0].grids == ((1, 4, 6),) and found[0].num_tokens == 6


def test_a_type_that_a_data_url_names_is_not_used(images: ImageLoader) -> None:
    encoded = URL.partition(",")[2]
    for start in (
        "data:image/jpeg;base64,",
        "data:text/html;base64,",
        "data:;base64,",
        "data:image/svg+xml;a=b;base64,",
    ):
        assert load(images, start + encoded)[0].num_tokens == 6


def test_keys_differ_by_pixels_and_by_sizes(images: ImageLoader, info: ImageInfo) -> None:
    other = np.asarray(PICTURE).copy()
    other[60, 100, 2] ^= 0x80
    turned = Image.fromarray(np.asarray(PICTURE).transpose(1, 0, 2))
    keys = {each.key for each in load(images, PICTURE, other, turned)}
    smaller = msgspec.structs.replace(info, size=msgspec.structs.replace(info.size, least=32 * 32, most=64 * 64))
    second = ImageLoader(smaller, MediaRules(), 1)
    keys.add(load(second, PICTURE)[0].key)
    second.close()
    assert len(keys) == 4 and all(len(key) == 32 for key in keys)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("data:image/png,abc", "has no base64"),
        ("data:image/png;base64,####", "base64 is broken"),
        (URL[:-3] + "\n" + URL[-3:], "base64 is broken"),
        (URL + "A", "base64 is broken"),
        (URL + "é", "no base64"),
        ("data:image/png;base64,", "no accepted format .empty"),
        (b"GIF89a", "GIF data cannot be read"),
        (b"0" * (10**6 + 1), "1000001 bytes, and at most 1000000 are accepted"),
        ("data:image/png;base64," + "A" * 1_400_000, "1050000 bytes, and at most"),
        ("https://a.test/b.png", "are not fetched: the server allows no domain"),
        ("file:///etc/passwd", "no folder is allowed"),
        ("/etc/passwd", "is no http or https URL"),
        (7, "an image is int"),
        (np.zeros((4, 4), np.uint8), r"uint8 \[4, 4\] is no image"),
        (np.zeros((4, 4, 3), np.float32), "float32"),
        (Image.new("RGB", (2000, 2000)), "2000 x 2000 pixels, and at most 1000000"),
        (png(Image.new("RGB", (2000, 2000))), "2000 x 2000 pixels, and at most 1000000"),
    ],
    ids=range(17),
)
def test_a_source_that_cannot_be_used_is_an_error_that_names_it(images: ImageLoader, source: Any, match: str) -> None:
    with pytest.raises(InvalidImage, match=match):
        load(images, source)
    with pytest.raises(InvalidImage, match=f"image 2 of 3: .*{match}") as caught:
        load(images, FILE, source, FILE)
    assert caught.value.param == "image"
    assert load(images, FILE)[0].num_tokens == 6  # nothing else is affected


def test_a_picture_of_python_is_turned_by_exif_and_not_changed(images: ImageLoader) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    PICTURE.save(file, "PNG", exif=exif)
    opened = Image.open(file)
    (found,) = load(images, opened)
    assert (found.height, found.width) == (110, 70)
    assert opened.size == (110, 70) and opened.getexif()[0x0112] == 6
    assert load(images, file.getvalue())[0].key == found.key


class TestFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        inside = tmp_path / "media" / "deep"
        inside.mkdir(parents=True)
        (tmp_path / "secret").write_bytes(b"secret")
        (inside / "a b.png").write_bytes(FILE)
        return tmp_path / "media"

    def test_a_file_below_the_folder_is_read(self, folder: Path, info: ImageInfo) -> None:
        made = ImageLoader(info, MediaRules(folder=str(folder)), 1)
        for url in (f"file://{folder}/deep/a b.png", f"file://localhost{folder}/deep/a%20b.png"):
            assert load(made, url)[0].num_tokens == 6
        made.close()

    @pytest.mark.parametrize(
        "path",
        [
            "/../secret", "/deep/../../secret", "/deep/%2e%2e/%2e%2e/secret", "/link", "/linked/secret", "/none",
            "/deep", "", "/deep/pipe", "/deep/a%00b",
        ],
    )  # fmt: skip
    def test_nothing_else_is_read(self, folder: Path, path: str) -> None:
        (folder / "link").symlink_to(folder.parent / "secret")
        (folder / "linked").symlink_to(folder.parent)
        os.mkfifo(folder / "deep/pipe")
        with pytest.raises(InvalidImage, match="images are read from files below"):
            read_allowed(f"file://{folder}{path}", str(folder), 1000)

    @pytest.mark.parametrize("url", ["file:///etc/passwd", "file:secret", "file://other/secret", "file:///"])
    def test_other_paths_are_refused(self, folder: Path, url: str) -> None:
        with pytest.raises(InvalidImage, match="images are read from files below"):
            read_allowed(url, str(folder), 1000)

    def test_a_folder_beside_it_with_the_same_beginning_is_outside(self, folder: Path) -> None:
        (folder.parent / "media2").mkdir()
        (folder.parent / "media2/x").write_bytes(b"x")
        with pytest.raises(InvalidImage, match="images are read from files below"):
            read_allowed(f"file://{folder}2/x", str(folder), 1000)

    def test_a_large_file_is_refused_by_its_size(self, folder: Path) -> None:
        with pytest.raises(InvalidImage, match=f"has {len(FILE)} bytes, and at most 10 are accepted"):
            read_allowed(f"file://{folder}/deep/a b.png", str(folder), 10)


def test_a_decoder_that_crashes_is_an_error_of_one_image(images: ImageLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child ends by a signal, and the next call starts another."""
    started: list[LimitedChild] = []
    start = LimitedChild._start

    def crashing(self: LimitedChild) -> Any:
        started.append(self)
        child = start(self)
        if len(started) == 1:
            child.kill()
        return child

    monkeypatch.setattr(LimitedChild, "_start", crashing)
    fresh = ImageLoader(images.info, MediaRules(), 1)
    with pytest.raises(InvalidImage, match="cannot be decoded within 20 s and .* GiB, or breaks its decoder"):
        load(fresh, FILE)
    assert load(fresh, FILE)[0].num_tokens == 6
    fresh.close()
    assert len(started) == 2


def test_a_decoder_that_needs_much_memory_is_refused(info: ImageInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_MAX_MEMORY", 2**26)
    fresh = ImageLoader(info, MediaRules(), 1)
    with pytest.raises(InvalidImage, match="too much memory|cannot be decoded"):
        load(fresh, png(Image.new("RGB", (4000, 4000))))
    assert load(fresh, FILE)[0].num_tokens == 6
    fresh.close()


@pytest.mark.slow
def test_the_largest_picture_is_read_within_the_memory_of_a_child(info: ImageInfo) -> None:
    fresh = ImageLoader(info, MediaRules(), 1)
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGBA", (8000, 8000), (1, 2, 3, 4)).save(file, "PNG", compress_level=1, exif=exif)
    (found,) = load(fresh, file.getvalue())
    assert (found.height, found.width) == (8000, 8000)
    fresh.close()


def test_an_image_that_nothing_waits_for_is_not_decoded(info: ImageInfo) -> None:
    """A queued one leaves the queue, one that runs is stopped; the loader goes on."""
    fresh = ImageLoader(info, MediaRules(), 1)
    entered, release = threading.Event(), threading.Event()
    fresh._threads.submit("", lambda: (entered.set(), release.wait(PATIENCE)))

    async def run() -> None:
        assert await asyncio.to_thread(entered.wait, PATIENCE)
        waiting = asyncio.ensure_future(fresh.load([FILE], "a", "image"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert fresh._threads._turns.num_queued("a") == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert fresh._threads._turns.num_queued("a") == 0
        release.set()
        assert (await fresh.load([FILE], "a", "image"))[0].num_tokens == 6

    asyncio.run(run())
    fresh.close()


def test_a_running_call_is_stopped_with_its_request(info: ImageInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = ImageLoader(info, MediaRules(), 1)
    assert load(fresh, FILE)
    (child,) = fresh._workers
    process = child._child
    assert process is not None
    process.send_signal(19)  # SIGSTOP: its call does not end by itself
    calls = threading.Event()
    inner = LimitedChild.call

    def call(self: LimitedChild, *args: Any) -> bytes:
        calls.set()
        return inner(self, *args)

    monkeypatch.setattr(LimitedChild, "call", call)

    async def run() -> None:
        waiting = asyncio.ensure_future(fresh.load([FILE], "a", "image"))
        assert await asyncio.to_thread(calls.wait, PATIENCE)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await fresh.load([FILE], "b", "image"))[0].num_tokens == 6  # by another child

    asyncio.run(run())
    assert process.wait(PATIENCE) == -9
    fresh.close()


def test_if_one_fails_the_others_of_its_prompt_end(info: ImageInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def fetched(self: Any, url: str, caller: str, max_bytes: int) -> bytes:
        if url.endswith("bad"):
            raise InvalidImage("it is bad")
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            ended.append(url)
            raise
        return FILE

    monkeypatch.setattr(fetch.Fetcher, "fetch", fetched)
    fresh = ImageLoader(info, MediaRules(), 1)
    with pytest.raises(InvalidImage, match="image 2 of 3: it is bad"):
        load(fresh, "http://a.test/1", "http://a.test/bad", "http://a.test/3")
    assert sorted(ended) == ["http://a.test/1", "http://a.test/3"]
    fresh.close()


def test_a_fetched_image_is_prepared_like_others(info: ImageInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetched(self: Any, url: str, caller: str, max_bytes: int) -> bytes:
        assert (url, caller, max_bytes) == ("http://a.test/1", "client", 2**25)
        return FILE

    monkeypatch.setattr(fetch.Fetcher, "fetch", fetched)
    fresh = ImageLoader(info, MediaRules(fetch=FetchRules(domains=("a.test",))), 1)
    assert load(fresh, "http://a.test/1", caller="client")[0].num_tokens == 6
    fresh.close()


def test_images_of_one_client_that_wait_are_limited(info: ImageInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_MAX_QUEUED", 2)
    fresh = ImageLoader(info, MediaRules(), 1)
    entered, release = threading.Event(), threading.Event()
    fresh._threads.submit("", lambda: (entered.set(), release.wait(PATIENCE)))
    assert entered.wait(PATIENCE)

    async def run() -> None:
        with pytest.raises(QueueFull, match="2 images of this client wait"):
            await fresh.load([FILE] * 3, "client", "image")
        release.set()
        assert len(await fresh.load([FILE] * 2, "client", "image")) == 2

    asyncio.run(run())
    fresh.close()


class _Counted:
    """A loader, and how many of its images a child has prepared."""

    def __init__(self, info: ImageInfo, monkeypatch: pytest.MonkeyPatch, rules: MediaRules) -> None:
        self.images = ImageLoader(info, rules, 1)
        self.count = 0
        inner = worker.call_worker

        def counted(*args: Any) -> PreparedImage:
            self.count += 1
            return inner(*args)

        monkeypatch.setattr(loader, "call_worker", counted)

    def load(self, *sources: Any, caller: str = "a") -> list[PreparedImage]:
        return load(self.images, *sources, caller=caller)


def test_a_file_that_comes_again_is_prepared_once_for_its_caller(
    info: ImageInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = _Counted(info, monkeypatch, MediaRules())
    (first,) = counted.load(FILE)
    (again,) = counted.load(FILE)
    assert again is first and counted.count == 1
    (other,) = counted.load(FILE, caller="b")
    assert other is not first and other.key == first.key and counted.count == 2
    counted.load(URL)
    counted.load(URL, URL, FILE)
    assert counted.count == 3
    for _ in range(2):  # errors are not kept
        with pytest.raises(InvalidImage):
            counted.load(b"GIF89a")
    assert counted.count == 5
    counted.images.close()


def test_prepared_images_that_are_kept_have_a_limit(info: ImageInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [png(picture(70, 110, seed=number)) for number in range(3)]
    size = 4 * 6 * 3 * 16 * 16
    counted = _Counted(info, monkeypatch, MediaRules(cache_bytes=2 * size))
    counted.load(files[0])
    counted.load(files[1])
    counted.load(files[0])  # used last
    counted.load(files[2])
    assert counted.count == 3
    counted.load(files[0])
    assert counted.count == 3
    counted.load(files[1])
    assert counted.count == 4
    counted.images.close()
    tiny = _Counted(info, monkeypatch, MediaRules(cache_bytes=size - 1))
    tiny.load(files[0])
    tiny.load(files[0])
    assert tiny.count == 2
    tiny.images.close()
