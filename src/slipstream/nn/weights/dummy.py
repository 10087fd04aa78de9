"""Seeded random weights, for measuring and for tests: any model from its config alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from slipstream.nn.weight_format import WeightSlot
from slipstream.nn.weights.source import SourceTensor, in_parts

SPREAD = 0.02  # standard deviation, as models are initialised


class DummySource:
    """A tensor for each place of a model. Its numbers depend on seed, name and shape, and on the kind of device."""

    def __init__(self, places: Mapping[str, WeightSlot], seed: int, device: torch.device) -> None:
        self.places = places
        self.seed = seed
        self.device = device

    def __iter__(self) -> Iterator[SourceTensor]:
        for name, place in self.places.items():
            make = partial(self._make, name)
            yield SourceTensor(name, place.shape, "F32", partial(self._read, make, place.shape), make=make)

    def _read(self, make: Callable[[torch.Tensor], None], shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.empty(shape, device=self.device)
        make(made)
        return made

    def _make(self, name: str, target: torch.Tensor) -> None:
        if "norm" in name or name.endswith("_scale"):
            target.fill_(1)
            return
        seed = zlib.crc32(f"{self.seed} {name} {tuple(target.shape)}".encode())
        generator = torch.Generator(self.device).manual_seed(seed)
        bound = SPREAD * math.sqrt(3)  # of an even spread, which is made several times faster than a normal one
        for part in in_parts(target):
            part.copy_(torch.empty(part.shape, device=self.device).uniform_(-bound, bound, generator=generator))
