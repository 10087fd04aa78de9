"""Masks of grammars in recordings: kept as references to their sources, and computed when a recording is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from slipstream.contracts.step import Ints, MaskSource
from slipstream.engine.record_file import StepRecord


class MaskSources:
    """Inputs from which the masks of one step can be computed again; see `Late.sources`."""

    __slots__ = ("sources", "lengths", "num_words")

    def __init__(self, sources: Sequence[MaskSource | None], lengths: Sequence[int], num_words: int) -> None:
        self.sources = sources
        self.lengths = lengths
        self.num_words = num_words  # of a mask

    @property
    def num_bytes(self) -> int:
        """Bytes of the masks."""
        return 4 * self.num_words * len(self.sources)

    def __iter__(self) -> Iterator[tuple[MaskSource | None, int]]:
        return zip(self.sources, self.lengths, strict=True)


def with_masks(steps: Sequence[StepRecord], sources: Mapping[int, MaskSources]) -> list[StepRecord]:
    """The steps with their masks. `sources`: by the number of the step; other steps have their masks already.

    A source computes all its masks in one pass, since it has to repeat the tokens of its request.
    """
    wanted: dict[int, tuple[MaskSource, list[int]]] = {}  # by identity of the source: numbers of tokens, ascending
    for step in steps:
        own = sources.get(step.plan.step)
        for source, length in () if own is None else own:
            if source is None:
                continue
            _, lengths = wanted.setdefault(id(source), (source, []))
            if not lengths or lengths[-1] != length:
                lengths.append(length)
    num_words = next((own.num_words for own in sources.values()), 0)
    masks: dict[tuple[int, int], Ints] = {}
    for source, lengths in wanted.values():
        for length, mask in zip(lengths, source.masks_at(lengths, num_words), strict=True):
            masks[id(source), length] = mask
    everything = np.full(num_words, -1, np.int32)

    def mask_of(source: MaskSource | None, length: int) -> Ints:
        return everything if source is None else masks[id(source), length]

    filled = []
    for step in steps:
        own, late = sources.get(step.plan.step), step.late
        if own is not None and late is not None:
            bits = np.array([mask_of(*each) for each in own], np.int32).reshape(-1, num_words)
            step = msgspec.structs.replace(step, late=msgspec.structs.replace(late, bits=bits))
        filled.append(step)
    return filled
