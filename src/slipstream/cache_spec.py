"""What one layer asks to have remembered between steps.

The host groups layers by spec and hands out pages; the device allocates tensors by it. Neither half knows the other.
"""

from __future__ import annotations

import msgspec


class PagedSpec(msgspec.Struct, frozen=True, tag="paged"):
    """Keys and values of every position, in pages of `page_size` positions."""

    num_kv_heads: int
    head_dim: int
    itemsize: int  # bytes of one element
    page_size: int

    @property
    def bytes_per_page(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize * self.page_size

    def max_pages(self, length: int, step_tokens: int) -> int:
        """Pages that a request of this length holds at once, at most. A step adds up to `step_tokens` positions."""
        return -(-length // self.page_size)

    def usual_pages(self, length: int) -> int:
        """Pages that such a request holds while it decodes."""
        return -(-length // self.page_size)


class WindowSpec(PagedSpec, frozen=True, tag="window"):
    """Pages too, but a token sees only the last `window` positions, itself among them; earlier pages are given back."""

    window: int

    def max_pages(self, length: int, step_tokens: int) -> int:
        """Before a step, what its first token sees; after it, all the step's own positions on top."""
        seen = self.window - 1 + step_tokens
        return min(-(-length // self.page_size), -(-seen // self.page_size) + 1)

    def usual_pages(self, length: int) -> int:
        """The window, begun and ended within a page, and one that was not given back yet."""
        return min(-(-length // self.page_size), -(-(self.window - 1) // self.page_size) + 2)


CacheSpec = PagedSpec | WindowSpec
"""Any spec a layer may ask for; a new kind of memory joins here."""


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that share one spec, hence one page table."""

    spec: CacheSpec
    layers: tuple[int, ...]

    @property
    def bytes_per_page(self) -> int:
        """Of one page over all layers of the group."""
        return self.spec.bytes_per_page * len(self.layers)

    @property
    def window(self) -> int:
        """How many positions a token sees, itself among them; 0 means all."""
        return self.spec.window if isinstance(self.spec, WindowSpec) else 0
