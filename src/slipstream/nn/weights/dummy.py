"""Seeded random weights for benchmarks and tests: any model from its config alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from slipstream.nn.weight_format import WeightTarget
from slipstream.nn.weights.source import SourceTensor, in_parts

SPREAD = 0.02  # standard deviation of a usual initialization


class DummySource:
    """A tensor for each target of a model. Its values depend on seed, name, shape and device type."""

    def __init__(self, targets: Mapping[str, WeightTarget], seed: int, device: torch.device) -> None:
        self.targets = targets
        self.seed = seed
        self.device = device

    def __iter__(self) -> Iterator[SourceTensor]:
        for name, target in self.targets.items():
            make = partial(self._make, name)
            yield SourceTensor(name, target.shape, "F32", partial(self._read, make, target.shape), make=make)

    def _read(self, make: Callable[[torch.Tensor], None], shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.empty(shape, device=self.device, dtype=torch.float32)
        make(made)
        return made

    def _make(self, name: str, target: torch.Tensor) -> None:
        if "norm" in name or name.endswith("_scale"):
            target.fill_(1)
            return
        seed = zlib.crc32(f"{self.seed} {name} {tuple(target.shape)}".encode())
        generator = torch.Generator(self.device).manual_seed(seed)
        bound = SPREAD * math.sqrt(3)  # a uniform distribution is several times faster to generate than a normal one
        for part in in_parts(target):
            part.copy_(
                torch.empty(part.shape, device=self.device, dtype=torch.float32).uniform_(
                    -bound, bound, generator=generator
                )
            )
