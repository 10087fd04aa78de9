"""Seeded random weights, for measuring and for tests: any model from its config alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from slipstream.nn.quant import Place
from slipstream.nn.weights.source import SourceTensor

SPREAD = 0.02  # standard deviation, as models are initialised


class DummySource:
    """A tensor for each place of a model. Its numbers depend on seed, name and shape, and on the kind of device."""

    def __init__(self, places: Mapping[str, Place], seed: int, device: torch.device) -> None:
        self.places = places
        self.seed = seed
        self.device = device

    def __iter__(self) -> Iterator[SourceTensor]:
        for name, place in self.places.items():
            yield SourceTensor(name, place.shape, "F32", partial(self._make, name, place.shape))

    def _make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name} {shape}".encode()))
        bound = SPREAD * math.sqrt(3)  # of an even spread, which is made several times faster than a normal one
        return torch.empty(shape, device=self.device).uniform_(-bound, bound, generator=generator)
