"""What one layer asks to have remembered between steps.

The host groups layers by spec and hands out pages; the device allocates tensors by it. Neither half knows the other.
"""

from __future__ import annotations

import msgspec


class PagedSpec(msgspec.Struct, frozen=True):
    """Keys and values of every position, in pages of `page_size` positions."""

    num_kv_heads: int
    head_dim: int
    itemsize: int  # bytes of one element
    page_size: int

    @property
    def bytes_per_page(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize * self.page_size


CacheSpec = PagedSpec
"""Any spec a layer may ask for; a new kind of memory joins here."""


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that share one spec, hence one page table."""

    spec: CacheSpec
    layers: tuple[int, ...]

    @property
    def bytes_per_page(self) -> int:
        """Of one page over all layers of the group."""
        return self.spec.bytes_per_page * len(self.layers)
