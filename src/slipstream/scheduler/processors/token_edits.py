"""RowEdit: what the processors that see tokens return for one row, as a mask and a sparse bias for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.config.buffer_size import MAX_BIASED_IDS, mask_words

Words = NDArray[np.uint32]
MAX_BIAS = 1e30  # sums with logits stay within float32


class RowEdit:
    __slots__ = ("mask", "bias")

    def __init__(self) -> None:
        self.mask: Words | None = None  # [words] bit t % 32 of word t // 32 is set if token t is allowed; None: all are
        self.bias: dict[int, float] = {}  # added to the logits of these tokens

    def add(self, edit: object, vocab_size: int) -> None:
        """Add the result of one processor. Several masks allow what each of them allows; biases are summed."""
        if edit is None:
            return
        if isinstance(edit, Mapping):
            self._add_bias(edit, vocab_size)
        elif isinstance(edit, Iterable) and not isinstance(edit, str | bytes):
            mask = allow(edit, vocab_size)
            self.mask = mask if self.mask is None else self.mask & mask
        else:
            raise TypeError(
                f"it returned {type(edit).__name__}; a processor that sees tokens returns allowed token ids, a mapping "
                "of token ids to numbers, or None"
            )

    def forbid_all(self, vocab_size: int) -> None:
        self.mask = np.zeros(mask_words(vocab_size), np.uint32)
        self.bias = {}

    def _add_bias(self, edit: Mapping[Any, Any], vocab_size: int) -> None:
        for token, value in edit.items():
            token, value = token.__index__(), float(value)
            if not 0 <= token < vocab_size:
                raise ValueError(f"it returned token id {token}; there are 0 to {vocab_size - 1}")
            if not (value == -math.inf or abs(value) <= MAX_BIAS):
                raise ValueError(f"it returned {value} for token {token}; give at most {MAX_BIAS:g}, or -inf")
            self.bias[token] = self.bias.get(token, 0.0) + value
        if len(self.bias) > MAX_BIASED_IDS:
            raise ValueError(
                f"it returned a bias of {len(self.bias)} tokens, the limit is {MAX_BIASED_IDS}; return allowed ids, or "
                'set needs = "logits"'
            )


def allow(ids: Iterable[Any], vocab_size: int) -> Words:
    """The mask of these tokens."""
    if isinstance(ids, range):
        ids = np.arange(ids.start, ids.stop, ids.step)
    found = np.asarray(ids if isinstance(ids, np.ndarray | list | tuple) else list(ids))
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"it returned allowed ids of type {found.dtype}; give whole numbers")
    if found.size and (found.min() < 0 or found.max() >= vocab_size):
        bad = int(found.min() if found.min() < 0 else found.max())
        raise ValueError(f"it returned token id {bad}; there are 0 to {vocab_size - 1}")
    allowed = np.zeros(mask_words(vocab_size) * 32, np.bool_)
    allowed[found.astype(np.int64, copy=False)] = True
    return np.packbits(allowed, bitorder="little").view(np.uint32)
