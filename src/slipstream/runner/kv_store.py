"""KVStore: the cache tensors themselves, one pair a layer."""

from __future__ import annotations

import functools

import numpy as np
import torch

from slipstream.cache_spec import CacheGroup
from slipstream.device.device import Device
from slipstream.errors import NotEnoughMemory
from slipstream.runner.batch.staging import Span, Upload
from slipstream.step import StepPlan


class KVStore:
    """`caches[layer]` is (keys, values), each [pages, page_size, kv heads, head dim].

    Pages keep what others left in them, be it NaN, and padding is written into page 0. Nothing is cleared: attention
    reads the slots that its rows have filled and no others.
    """

    def __init__(
        self, groups: tuple[CacheGroup, ...], group_pages: tuple[int, ...], dtype: torch.dtype, device: Device
    ) -> None:
        num_layers = sum(len(group.layers) for group in groups)
        self.groups = groups
        self.dtype = dtype
        self.device = device
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = [None] * num_layers  # type: ignore[list-item]
        group_of_layer = [0] * num_layers
        for number, group in enumerate(groups):
            for layer in group.layers:
                group_of_layer[layer] = number
        self.group_of_layer = tuple(group_of_layer)
        self._copies = np.zeros((0, 3), np.int32)
        self.take_memory(group_pages)

    def take_memory(self, group_pages: tuple[int, ...]) -> None:
        """So many pages of each group instead of those there were. Nothing that was captured may have seen those."""
        for number, group in enumerate(self.groups):
            spec = group.spec
            shape = (group_pages[number], spec.page_size, spec.num_kv_heads, spec.head_dim)
            for layer in group.layers:
                self.caches[layer] = None  # type: ignore[call-overload]
                try:
                    keys, values = (self.device.zeros(shape, self.dtype) for _ in range(2))
                    self.caches[layer] = keys, values
                except (RuntimeError, MemoryError):
                    need = sum(g.bytes_per_page * n for g, n in zip(self.groups, group_pages, strict=True))
                    raise NotEnoughMemory(
                        f"the cache takes {need / 2**20:.0f} MiB, more than the machine gives; "
                        "lower max_model_len, max_num_seqs or kv_cache_memory"
                    ) from None

    def apply(self, plan: StepPlan) -> None:
        self._copies = plan.copies

    def flush(self, upload: Upload) -> None:
        copies = self._copies
        for number, group in enumerate(self.groups):
            of_group = copies[copies[:, 0] == number] if len(copies) else copies
            if len(of_group):
                source = upload.put(of_group[:, 1].astype(np.int64))
                target = upload.put(of_group[:, 2].astype(np.int64))
                upload.then(functools.partial(self._copy, group, upload, source, target))

    def _copy(self, group: CacheGroup, upload: Upload, source: Span, target: Span) -> None:
        """Device: duplicate pages, for samples that part ways inside one."""
        from_pages, to_pages = upload.tensor(source), upload.tensor(target)
        for layer in group.layers:
            for cache in self.caches[layer]:
                cache.index_copy_(0, to_pages, cache.index_select(0, from_pages))
