"""Images of a prompt: their patches, which are sent to the core, and where the tokens of each are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec
import numpy as np

Grid = tuple[int, int, int]  # frames, rows, columns: of patches, or of tokens


class ImageInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image as the tower takes it."""

    key: bytes  # equal keys: equal patches and grids
    num_tokens: int  # rows of the tower's output
    grids: tuple[Grid, ...]  # of patches, one for each view of the image
    num_values: int  # of a patch
    data: memoryview  # uint8 [patches, num_values]

    @classmethod
    def of(cls, key: bytes, num_tokens: int, grids: tuple[Grid, ...], patches: np.ndarray[Any, Any]) -> Self:
        whole = np.ascontiguousarray(patches)
        return cls(key, num_tokens, grids, whole.shape[1], whole.data)

    @property
    def patches(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(self.data, np.uint8).reshape(-1, self.num_values)

    @property
    def num_patches(self) -> int:
        return self.data.nbytes // self.num_values


class ImageSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Successive tokens of one image in a prompt. The tower's rows of an image fill its spans in their order."""

    image: int  # its place in the prompt
    start: int  # index of the first token
    grid: Grid  # of tokens
    position: int  # of the first token, for position embeddings: its index, unless positions have three parts
    step: float = 1.0  # between the temporal positions of two frames
    first_row: int = 0  # of the tower's rows of the image

    @property
    def count(self) -> int:
        frames, rows, cols = self.grid
        return frames * rows * cols

    @property
    def stop(self) -> int:
        return self.start + self.count

    def frame_positions(self) -> list[int]:
        return [self.position + int(frame * self.step) for frame in range(self.grid[0])]

    def next_position(self) -> int:
        """Of the first token behind it: greater than all of its own, as the models were trained."""
        return max(self.frame_positions()[-1] + 1, self.position + max(self.grid[1:]))


def positions_of(spans: Sequence[ImageSpan], start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32 [3, tokens]: frame, row and column of the tokens from `start` to `stop`, in a model whose positions have
    three parts. `spans`: of the prompt, in its order."""
    found = np.empty((3, stop - start), np.int32)
    done, shift = start, 0  # shift: position of a text token, less its index
    for span in spans:
        first, last = max(done, span.start), min(stop, span.stop)
        if first < stop:
            found[:, done - start : first - start] = np.arange(done, first) + (span.position - span.start)
        else:
            found[:, done - start :] = np.arange(done, stop) + (span.position - span.start)
            return found
        if first < last:
            _, rows, cols = span.grid
            index = np.arange(first - span.start, last - span.start)
            part = found[:, first - start : last - start]
            part[0] = np.array(span.frame_positions())[index // (rows * cols)]
            part[1] = span.position + index // cols % rows
            part[2] = span.position + index % cols
        done, shift = max(done, min(span.stop, stop)), span.next_position() - span.stop
    found[:, done - start :] = np.arange(done, stop) + shift
    return found


class PromptImages(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The images of a prompt and where its tokens are."""

    images: list[ImageInput]
    spans: list[ImageSpan]  # in the order of the prompt
    shift: int = 0  # position of a token behind all images, less its index

    @property
    def stop(self) -> int:
        """Index of the first token behind all images."""
        return self.spans[-1].stop

    def spans_between(self, start: int, stop: int) -> list[ImageSpan]:
        """The spans with tokens from `start` to `stop`."""
        return [span for span in self.spans if span.start < stop and span.stop > start]

    def page_marks(self, first: int, num_pages: int, page_size: int, following: int) -> dict[int, bytes]:
        """By page from `first` to `num_pages`: the images that it shows, and which part of each, for the hash of the
        page. Their tokens are all the same. `following`: tokens after a page that its hash covers."""
        marks: dict[int, bytes] = {}
        for span in self.spans_between(first * page_size, num_pages * page_size + following):
            begin = max(first, (span.start - following) // page_size)
            for page in range(begin, min(num_pages, -(-span.stop // page_size))):
                row = span.first_row + page * page_size - span.start
                shown = self.images[span.image].key + row.to_bytes(8, "little", signed=True)
                marks[page] = marks.get(page, b"") + shown
        return marks
