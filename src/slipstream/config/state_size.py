"""Computes how many recurrent states there are: how many rows may run, and how many checkpoints are kept.

The state of a request is large and does not grow with its length: tens of MiB for a hybrid model, as much as a thousand
or more positions of its KV cache. Rows and checkpoints compete with pages for memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.cache_spec import STATE_CHUNK, CacheGroup, StateSpec
from slipstream.config.cache_size import MIN_PREFIXES
from slipstream.config.config import StateConfig
from slipstream.errors import InvalidOption

CHECKPOINT_SHARE = 4  # checkpoints get one part in so many of the cache's memory
PER_PREFIX = 8  # checkpoints that a prompt takes
MIN_SPACING, MAX_SPACING = 1024, 4096  # positions


class StateSize:
    def __init__(
        self,
        specs: tuple[StateSpec, ...],
        groups: Sequence[CacheGroup],
        page_size: int,
        wanted: int | None,
        prefix_caching: bool,
    ) -> None:
        """`wanted`: the number of checkpoints that an option sets."""
        self.specs = specs
        self.num_bytes = sum(spec.num_bytes for spec in specs)  # of the state of one row
        self.checkpoint_bytes = sum(spec.checkpoint_bytes for spec in specs)
        self.has_pages = bool(groups)
        self.wanted = wanted
        self.prefix_caching = prefix_caching
        self.border = max(page_size, STATE_CHUNK)
        if wanted is not None and not specs:
            raise InvalidOption("num_checkpoints is for models with recurrent states, and this one has none; omit it")
        if wanted is not None and wanted < 0:
            raise InvalidOption(f"num_checkpoints is {wanted}; give a whole number from 0 up")
        if specs and (self.border % page_size or self.border % STATE_CHUNK):
            raise InvalidOption(
                f"page_size is {page_size}; for a model with recurrent states it must divide {STATE_CHUNK} or be a "
                f"multiple of it"
            )
        # a checkpoint takes as much memory as the pages of so many positions
        per_position = sum(group.bytes_per_page for group in groups) / page_size
        even = int(self.checkpoint_bytes / per_position) if per_position else MAX_SPACING
        self.spacing = -(-min(max(even, MIN_SPACING), MAX_SPACING) // self.border) * self.border

    def config(self, num_checkpoints: int) -> StateConfig | None:
        """None for a model without states."""
        return StateConfig(self.specs, num_checkpoints, self.border, self.spacing) if self.specs else None

    def affordable_rows(self, max_num_seqs: int, room: int) -> int:
        """At most `max_num_seqs` rows, fewer if their states and that of the padding row would take more than half of
        the room for states and cache."""
        return max(1, min(max_num_seqs, max(room, 0) // 2 // self.num_bytes - 1))

    def num_checkpoints(self, max_num_seqs: int, *, within: int = 0, beside: int = 0) -> int:
        """Checkpoints in a cache of `within` bytes, or in addition to pages of `beside` bytes."""
        if not self.prefix_caching:
            return 0
        if self.wanted is not None:
            return self.wanted
        share = beside // (CHECKPOINT_SHARE - 1) + (within // CHECKPOINT_SHARE if self.has_pages else within)
        enough = PER_PREFIX * max(max_num_seqs, MIN_PREFIXES)
        return min(enough, max(share, 0) // self.checkpoint_bytes)
