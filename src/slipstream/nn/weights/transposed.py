"""Reads weights that a checkpoint stores as [inputs, outputs] (GPT-2) as [outputs, inputs]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from slipstream.nn.weights.source import SourceTensor, WeightSource


class TransposedSource:
    def __init__(self, source: WeightSource, endings: tuple[str, ...]) -> None:
        """`endings`: how the names of such weights end."""
        self.source, self.endings = source, endings

    def __iter__(self) -> Iterator[SourceTensor]:
        for tensor in self.source:
            is_weight = tensor.name.endswith(self.endings) and len(tensor.shape) == 2
            yield _transposed(tensor) if is_weight else tensor


def _transposed(tensor: SourceTensor) -> SourceTensor:
    num_inputs, num_outputs = tensor.shape
    return replace(tensor, shape=(num_outputs, num_inputs), read=partial(_read, tensor.read))


def _read(read: Callable[[], torch.Tensor]) -> torch.Tensor:
    return read().t()
