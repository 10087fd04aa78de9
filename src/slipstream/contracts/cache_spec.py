"""Data that a model stores between steps: keys and values at cache sites, recurrent states at state sites.

A cache site is one part of a model that writes to the paged cache, usually the attention of one layer; several mixers
may read one site. The scheduler groups sites by spec and allocates pages; the runner allocates tensors. A state site is
a mixer with a recurrent state, whose size does not depend on the length of the text. State sites are numbered apart
from cache sites.
"""

from __future__ import annotations

import math

import msgspec

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes of one element, by dtype."""

SCALE_BYTES = 4
"""Bytes of the scale that each slot and head of an FP8 cache has for its keys, and for its values."""

STATE_CHUNK = 64
"""Recurrent kernels cut the positions of a row at multiples of this. Checkpoints of states are taken only there."""

DEFER_PERIOD = 4
"""Kernels that defer stores write a state at every multiple of this position, which must divide STATE_CHUNK. Between
them they keep the updates of the row's last tokens."""


class PagedSpec(msgspec.Struct, frozen=True, kw_only=True, tag="paged"):
    """Keys and values of every position, in pages of `page_size` positions.

    Sites of one spec share a page table and attention metadata, so the spec has all that the metadata depends on.
    """

    num_heads: int  # of the queries that read the site
    num_kv_heads: int
    head_dim: int
    dtype: str  # of the stored keys and values: a key of ITEMSIZE
    page_size: int
    soft_cap: float = 0.0  # attention scores become soft_cap * tanh(score / soft_cap); 0: they stay as they are
    # MLA: values are the first `value_dim` elements of the keys and have no memory of their own; 0: they have
    value_dim: int = 0
    sinks: bool = False  # each head has one more score in its softmax, without a key and a value

    @property
    def bytes_per_page(self) -> int:
        of_head = self.head_dim * ITEMSIZE[self.dtype] + (SCALE_BYTES if self.dtype == "fp8" else 0)
        return self.num_kv_heads * of_head * (1 if self.value_dim else 2) * self.page_size

    def max_pages(self, length: int, step_tokens: int) -> int:
        """Maximum number of pages that a request of this length holds. A step adds up to `step_tokens` positions."""
        return -(-length // self.page_size)

    def usual_pages(self, length: int) -> int:
        """Pages that a request of this length holds while it decodes."""
        return -(-length // self.page_size)


class WindowSpec(PagedSpec, frozen=True, kw_only=True, tag="window"):
    """Pages of which a token sees only the last `window` positions, itself included; earlier pages are freed."""

    window: int

    def max_pages(self, length: int, step_tokens: int) -> int:
        """Before a step, the pages that its first token sees; after it, the step's own positions as well."""
        seen = self.window - 1 + step_tokens
        return min(-(-length // self.page_size), -(-seen // self.page_size) + 1)

    def usual_pages(self, length: int) -> int:
        """The window may begin and end inside a page, and one page may not be freed yet."""
        return min(-(-length // self.page_size), -(-(self.window - 1) // self.page_size) + 2)


CacheSpec = PagedSpec | WindowSpec
"""Any spec of a site. A new kind of cache adds its spec here and a `CacheKind` in `scheduler/cache/`."""


class CacheGroup(msgspec.Struct, frozen=True):
    """Sites of one spec, which share a page table."""

    spec: CacheSpec
    sites: tuple[int, ...]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all sites of the group."""
        return self.spec.bytes_per_page * len(self.sites)

    @property
    def window(self) -> int:
        """How many positions a token sees, itself included; 0 means all."""
        return self.spec.window if isinstance(self.spec, WindowSpec) else 0


class StateField(msgspec.Struct, frozen=True):
    """One tensor of a recurrent state, for one row and one site."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of ITEMSIZE
    is_saved: bool = True  # part of checkpoints; False: only rows have it

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class StateSpec(msgspec.Struct, frozen=True):
    """The recurrent state of one row at one state site. Sites of equal spec share tensors."""

    fields: tuple[StateField, ...]
    chunk_rounding: str = ""  # the layers, where their kernels for chunks round otherwise than those for one token

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return sum(field.num_bytes for field in self.fields)

    @property
    def checkpoint_bytes(self) -> int:
        return sum(field.num_bytes for field in self.fields if field.is_saved)


def ring_columns(width: int, num_drafts: int) -> int:
    """Columns of the ring of a convolution's inputs: `width`, so that no token reads the column that it writes. With up
    to `num_drafts` drafts per row and step, the inputs of the last two steps and those before them are kept."""
    return width + 2 * num_drafts + 1 if num_drafts else width


def replay_columns(num_drafts: int) -> int:
    """Tokens of a row whose inputs are kept for a replay: those of the last step, and of the step that replays them."""
    return 2 * num_drafts + 2
