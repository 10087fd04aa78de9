"""A table of masks like that of a device: it keeps masks of earlier steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slipstream.contracts.step import DrawEdits, StepMasks

FIRST_KEPT = 1 << 20
POISON = 0x5A5A5A5A  # what is not written


class OpenMasks:
    """Gives memory for the masks of a step."""

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words

    def __call__(self, num_masks: int) -> StepMasks:
        bits = np.full((num_masks, self.num_words), POISON, np.int32)
        numbers = np.arange(num_masks, dtype=np.int32)
        return StepMasks(bits, numbers.copy(), numbers.copy(), FIRST_KEPT)


class MaskTable:
    def __init__(self) -> None:
        self.kept: dict[int, np.ndarray] = {}
        self.num_sent = self.num_masks = 0

    def bits_of(self, masks: StepMasks | DrawEdits) -> np.ndarray:
        """The masks [masks, words] of one step, whose targets are stored first."""
        if masks.entries is None or masks.targets is None:
            return masks.bits.copy()
        table: dict[int, np.ndarray] = {}
        for target, own in zip(masks.targets.tolist(), masks.bits, strict=True):
            if target >= 0:
                (self.kept if target >= FIRST_KEPT else table)[target] = own.copy()
                self.num_sent += 1
        return np.stack([self._mask(entry, table, masks.bits.shape[1]) for entry in masks.entries.tolist()])

    def _mask(self, entry: int, table: dict[int, np.ndarray], num_words: int) -> np.ndarray:
        self.num_masks += 1
        if entry >= 0:
            return self.kept[entry] if entry >= FIRST_KEPT else table[entry]
        if entry == -1:
            return np.full(num_words, -1, np.int32)
        only = np.zeros(num_words, np.uint32)
        only[(-2 - entry) >> 5] = np.uint32(1 << ((-2 - entry) & 31))
        return only.view(np.int32)

    def resolved(self, late: DrawEdits) -> DrawEdits:
        """The same with all masks in `bits`, copied."""
        if not len(late.bits):
            return replace(late, entries=None, targets=None)
        return replace(late, bits=self.bits_of(late), entries=None, targets=None)
