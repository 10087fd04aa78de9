"""KVStore: the cache tensors, a pair per site."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.base.errors import NotEnoughMemory
from slipstream.contracts.cache_spec import CacheGroup
from slipstream.contracts.step import StepPlan
from slipstream.device.device import Device
from slipstream.ops.cache_write import new_fp8_cache, raw_pages
from slipstream.runner.batch.staging import Upload, UploadSpan
from slipstream.runner.batch.token_history import TokenHistory


@dataclass(frozen=True, slots=True)
class ScratchPages:
    """Pages of a drafter's sites beyond those that the scheduler allocates, for positions that have no page yet."""

    first_site: int  # of the drafter; its sites are the last ones
    num_rows: int  # with the padding row
    pages_per_row: int

    @property
    def num_pages(self) -> int:
        return self.num_rows * self.pages_per_row


class KVStore:
    """`caches[site]` is (keys, values), each [pages, page_size, kv heads, head dim], in the dtype of the site's spec.
    Values of a spec with a `value_dim` are a view of the keys. An FP8 cache has its scales in the same pages, see
    `ops/cache_write/fp8.py`.

    Pages are never cleared and may hold NaN of earlier requests; padding is written to page 0. Attention reads only the
    slots that its rows have filled.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        group_pages: tuple[int, ...],
        device: Device,
        history: TokenHistory | None = None,
        scratch: ScratchPages | None = None,
    ) -> None:
        """`history`: token ids in the same pages, only for drafts; `scratch`: only for a drafter that runs a model."""
        num_sites = sum(len(group.sites) for group in groups)
        self.groups = groups
        self.device = device
        self.history = history
        self.scratch = scratch
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = [None] * num_sites  # type: ignore[list-item]
        group_of_site = [0] * num_sites
        for number, group in enumerate(groups):
            for site in group.sites:
                group_of_site[site] = number
        self.group_of_site = tuple(group_of_site)
        self._copies = np.zeros((0, 3), np.int32)
        self.take_memory(group_pages)

    def take_memory(self, group_pages: tuple[int, ...]) -> None:
        """Allocate this many pages per group in place of the current ones, which no captured graph may use."""
        if self.history is not None:
            self.history.take_memory(group_pages)
        for number, group in enumerate(self.groups):
            spec = group.spec
            for site in group.sites:
                self.caches[site] = None  # type: ignore[call-overload]
                num_pages = group_pages[number]
                if self.scratch is not None and site >= self.scratch.first_site:
                    num_pages += self.scratch.num_pages
                shape = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
                try:
                    keys = self._new_cache(shape, spec.dtype)
                    values = keys[..., : spec.value_dim] if spec.value_dim else self._new_cache(shape, spec.dtype)
                    self.caches[site] = keys, values
                except (RuntimeError, MemoryError):
                    need = sum(g.bytes_per_page * n for g, n in zip(self.groups, group_pages, strict=True))
                    raise NotEnoughMemory(
                        f"the cache takes {need / 2**20:.0f} MiB, more than the machine gives; "
                        "lower max_model_len, max_num_seqs or kv_cache_memory"
                    ) from None

    def _new_cache(self, shape: tuple[int, int, int, int], dtype: str) -> torch.Tensor:
        if dtype == "fp8":
            return new_fp8_cache(*shape, self.device.cache_zeros)
        return self.device.cache_zeros(shape, getattr(torch, dtype))

    def apply(self, plan: StepPlan) -> None:
        self._copies = plan.copies

    def flush(self, upload: Upload) -> None:
        copies = self._copies
        for number in range(len(self.groups)):
            of_group = copies[copies[:, 0] == number] if len(copies) else copies
            if len(of_group):
                source = upload.put(of_group[:, 1].astype(np.int64))
                target = upload.put(of_group[:, 2].astype(np.int64))
                upload.then(functools.partial(self._copy, number, upload, source, target))

    def _copy(self, number: int, upload: Upload, source: UploadSpan, target: UploadSpan) -> None:
        """Device: copy pages of a group, for samples of one prompt that diverge inside a page."""
        from_pages, to_pages, group = upload.tensor(source), upload.tensor(target), self.groups[number]
        if self.history is not None:
            self.history.copy_pages(number, from_pages, to_pages)
        for site in group.sites:
            for cache in self.caches[site][: 1 if group.spec.value_dim else 2]:
                pages = raw_pages(cache)
                pages.index_copy_(0, to_pages, pages.index_select(0, from_pages))
