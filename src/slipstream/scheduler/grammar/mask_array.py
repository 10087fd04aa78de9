"""Memory for the masks of a step, of an engine whose runner has none (`Constraints`)."""

from __future__ import annotations

import numpy as np

from slipstream.contracts.step import Ints, StepMasks


class MaskArray:
    """Memory for masks that the next call reuses."""

    def __init__(self, max_rows: int, num_words: int) -> None:
        self._max_rows = max_rows
        self._masks: Ints = np.zeros((0, num_words), np.int32)

    def __call__(self, num_masks: int) -> StepMasks:
        if num_masks > len(self._masks):
            most = max(num_masks, min(self._max_rows, 2 * num_masks))
            self._masks = np.zeros((most, self._masks.shape[1]), np.int32)
        return StepMasks(self._masks[:num_masks])
