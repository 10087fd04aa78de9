"""Counts the bytes of live tensors after each operation. Memory used inside a kernel is not counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """`peak`: maximum of live bytes of tensors that were made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}  # some have died since
        self._total = 0  # bytes of `_made`, so at least those of live tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((*args, *kwargs.values()))}
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._add(storage._cdata, StorageWeakRef(storage), storage.nbytes())
        if self._total > self.peak:  # else the live ones are no more either, and most operations need not look
            self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
            self._total = sum(num_bytes for _, num_bytes in self._made.values())
            self.peak = max(self.peak, self._total)
        return result

    def _add(self, key: int, storage: StorageWeakRef, num_bytes: int) -> None:
        _, before = self._made.pop(key, (None, 0))  # at the same address
        self._made[key] = storage, num_bytes
        self._total += num_bytes - before


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
