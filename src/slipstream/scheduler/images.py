"""ImageSlots: which images are encoded, in which slots of the device's arena, and which are encoded by the next step.

The tower encodes an image into rows of an arena, one for each of its tokens; a step reads them in place of embeddings.
A request is planned up to its first image without rows. When the tokens before it are planned, it is encoded: in the
same step, before the forward, as far as the step's patches allow, so requests without images wait for a bounded time.

A running request uses its image from then until all its tokens are launched. An image without users stays, and is
found again by its key and the cache salt, until its slots are needed; the least recently used goes first. The device
runs steps in order, so slots may be reused in the next step. Only running requests use images, and each uses those
next in its prompt: so one of them can always go on, and a single image must fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from slipstream.base.errors import RequestTooLarge, UserError
from slipstream.config.config import ImageConfig
from slipstream.contracts.images import ImageInput, ImageSpan, positions_of
from slipstream.contracts.request import Request
from slipstream.contracts.step import NO_INTS, ImageEncoding, ImagePlan, Ints
from slipstream.scheduler.plan_builder import Chunk

_Key = tuple[str, bytes]  # cache salt, key of the image


class _Encoded:
    __slots__ = ("key", "slots", "rows", "num_users")

    def __init__(self, key: _Key, slots: list[int], rows: Ints) -> None:
        self.key = key
        self.slots = slots
        self.rows = rows  # of the arena, one for each row of the tower's output
        self.num_users = 0  # running requests with tokens of it that are not launched


def check_images(request: Request, images: ImageSlots | None) -> None:
    """Raises an error if the images of a request could never be encoded."""
    if request.images is None:
        return
    if images is None:
        raise UserError("this engine takes no images, and the prompt has some; remove them")
    config = images.config
    for number, image in enumerate(request.images.images, 1):
        most = config.num_slots * config.slot_rows
        if image.num_tokens > most or image.num_patches > config.max_patches:
            raise RequestTooLarge(
                f"image {number} of the prompt becomes {image.num_tokens} tokens of {image.num_patches} patches; this "
                f"engine has room for {most} tokens and {config.max_patches} patches; make the image smaller"
            )


class ImageSlots:
    def __init__(self, config: ImageConfig) -> None:
        self.config = config
        self._free = list(range(config.num_slots - 1, -1, -1))
        self._encoded: dict[_Key, _Encoded] = {}
        self._idle: OrderedDict[_Key, _Encoded] = OrderedDict()  # without users, the least recently used first
        self._used: dict[Request, dict[int, _Encoded]] = {}  # by running request: by number in its prompt
        self._encodings: dict[_Key, ImageEncoding] = {}  # of the next plan
        self._patches_left = config.step_patches

    def limit_step(self, max_num_tokens: int | None) -> None:
        """The next plan encodes at most as many tokens of images as it may have tokens of prompts, and one image."""
        self._patches_left = self.config.step_patches
        if max_num_tokens is not None:
            self._patches_left = min(self._patches_left, max_num_tokens * self.config.patches_per_token)
        self._patches_left -= sum(len(each.patches) for each in self._encodings.values())

    def num_plannable(self, request: Request, start: int, num: int) -> int:
        """How many of `num` tokens from `start` on the plan under construction can compute: those before the first
        image that is neither encoded nor can be encoded in this step."""
        images = request.images
        assert images is not None, f"{request} has no images"
        for span in images.spans_between(start, start + num):
            if not self._use(request, span.image, images.images[span.image]):
                return max(0, span.start - start)
        return num

    def _use(self, request: Request, number: int, image: ImageInput) -> bool:
        used = self._used.setdefault(request, {})
        if number in used:
            return True
        key = request.cache_salt, image.key
        encoded = self._encoded.get(key)
        if encoded is None:
            encoded = self._encode(key, image)
            if encoded is None:
                return False
        else:
            self._idle.pop(key, None)
        encoded.num_users += 1
        used[number] = encoded
        return True

    def _encode(self, key: _Key, image: ImageInput) -> _Encoded | None:
        """None: the step has encoded enough, or images in use have too many slots."""
        if self._encodings and image.num_patches > self._patches_left:
            return None
        size = self.config.slot_rows
        count = -(-image.num_tokens // size)
        if len(self._free) + sum(len(each.slots) for each in self._idle.values()) < count:
            return None
        while len(self._free) < count:
            oldest, dropped = self._idle.popitem(last=False)
            del self._encoded[oldest]
            self._encodings.pop(oldest, None)  # if no plan has it: its request did not get its pages
            self._free += dropped.slots
        slots = [self._free.pop() for _ in range(count)]
        rows = (np.array(slots, np.int32)[:, None] * size + np.arange(size, dtype=np.int32)).ravel()[: image.num_tokens]
        encoded = self._encoded[key] = _Encoded(key, slots, rows)
        self._encodings[key] = ImageEncoding(image.patches, image.grids, rows)
        self._patches_left -= image.num_patches
        return encoded

    def release(self, request: Request) -> None:
        """The request leaves its row, or was not admitted. What it used stays until the slots are needed."""
        for encoded in self._used.pop(request, {}).values():
            self._drop(encoded)

    def _drop(self, encoded: _Encoded) -> None:
        encoded.num_users -= 1
        if not encoded.num_users:
            self._idle[encoded.key] = encoded

    def plan(self, chunks: Sequence[Chunk], first: int) -> ImagePlan | None:
        """The images of a plan with these chunks; None: it has none. `first`: index of the first chunk's first token
        among all tokens of the step."""
        if not self._encodings and all(chunk.request.images is None for chunk in chunks):
            return None
        encodings, self._encodings = tuple(self._encodings.values()), {}
        indices: list[Ints] = []
        rows: list[Ints] = []
        placed: list[Ints] = []
        positions = []
        for chunk in chunks:
            images, start, stop = chunk.request.images, chunk.start, chunk.start + chunk.num_tokens
            if images is not None and not chunk.is_drafted and start < images.stop:
                used = self._used.get(chunk.request, {})
                for span in images.spans_between(start, stop):
                    begin, end = max(start, span.start), min(stop, span.stop)
                    indices.append(np.arange(begin, end, dtype=np.int32) + (first - start))
                    row = span.first_row - span.start
                    rows.append(used[span.image].rows[row + begin : row + end])
                if self.config.has_parts:
                    placed.append(np.arange(start, min(stop, images.stop), dtype=np.int32) + (first - start))
                    positions.append(positions_of(images.spans, start, min(stop, images.stop)))
                self._drop_launched(chunk.request, used, images.spans, stop)
            first += chunk.num_tokens
        return ImagePlan(
            encodings,
            np.concatenate(indices) if indices else NO_INTS,
            np.concatenate(rows) if rows else NO_INTS,
            np.concatenate(placed) if placed else NO_INTS,
            np.concatenate(positions, axis=1) if positions else np.zeros((3, 0), np.int32),
        )

    def _drop_launched(
        self, request: Request, used: dict[int, _Encoded], spans: Sequence[ImageSpan], length: int
    ) -> None:
        """Drop the images of a request all of whose tokens are among the first `length`."""
        wanted = {span.image for span in spans if span.stop > length}
        for number in used.keys() - wanted:
            self._drop(used.pop(number))
        if not wanted:
            self._used.pop(request, None)

    def check(self, running: Sequence[Request]) -> None:
        """Assert the invariants. For tests."""
        assert self._used.keys() <= set(running), "a request without a row uses images"
        users = [each for used in self._used.values() for each in used.values()]
        for key, encoded in self._encoded.items():
            assert encoded.key == key and encoded.num_users == users.count(encoded), f"{key} counts wrong users"
            assert (key in self._idle) == (not encoded.num_users), f"{key} is idle, or lost"
        assert all(self._encoded[each.key] is each for each in users), "a request uses an image that is gone"
        taken = [slot for each in self._encoded.values() for slot in each.slots]
        assert sorted(taken + self._free) == list(range(self.config.num_slots)), "a slot is lost"
        assert self._encodings.keys() <= self._encoded.keys(), "an image is encoded that is gone"
