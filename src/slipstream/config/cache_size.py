"""Computes how many pages each cache group gets.

A group that keeps every position can use any number of pages. In a group with a window, running requests never hold
more than their windows and the positions of a step; some more windows make cached prefixes of earlier requests usable.
The rest goes to the groups that keep every position.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slipstream.base.errors import InvalidOption, NotEnoughMemory
from slipstream.config.config import EngineConfig, StateConfig
from slipstream.config.memory import Machine, id_bytes
from slipstream.config.options import Options, parse_bytes, positive
from slipstream.contracts.cache_spec import STATE_CHUNK, CacheGroup, StateSpec, WindowSpec

MIN_PREFIXES = 16


class CacheSize:
    """A cache for `max_num_seqs` requests of up to `length` positions. Page counts include the null page."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        length: int,
        max_num_seqs: int,
        step_tokens: int,
        prefix_caching: bool = True,
    ) -> None:
        self.groups = groups
        self.length = length
        self.step_tokens = step_tokens
        # per group: the pages that it needs if all requests have their full length
        num_prefixes = max(max_num_seqs, MIN_PREFIXES) if prefix_caching else 0
        self._enough = [self._enough_for(group, max_num_seqs, num_prefixes) for group in groups]
        self._keeps = [not isinstance(group.spec, WindowSpec) for group in groups]

    def _enough_for(self, group: CacheGroup, max_num_seqs: int, num_prefixes: int) -> int:
        spec = group.spec
        if not isinstance(spec, WindowSpec):
            return spec.usual_pages(self.length) * max_num_seqs + 1
        step = -(-self.step_tokens // spec.page_size) + 1
        return spec.usual_pages(self.length) * (max_num_seqs + num_prefixes) + step + 1

    @property
    def enough(self) -> int:
        """Number of pages with which no request ever waits for pages."""
        kept = [enough for enough, keeps in zip(self._enough, self._keeps, strict=True) if keeps]
        return max(kept or self._enough, default=2)

    @property
    def least(self) -> int:
        """Number of pages with which one request of the full length fits."""
        return 1 + max((g.spec.max_pages(self.length, self.step_tokens) for g in self.groups), default=1)

    def group_pages(self, num_pages: int) -> tuple[int, ...]:
        """Pages of each group, if a group that keeps every position has `num_pages`."""
        if not any(self._keeps):
            return (num_pages,) * len(self.groups)
        return tuple(
            num_pages if keeps else min(num_pages, enough)
            for enough, keeps in zip(self._enough, self._keeps, strict=True)
        )

    def num_bytes(self, num_pages: int) -> int:
        pages = self.group_pages(num_pages)
        return sum(group.bytes_per_page * num for group, num in zip(self.groups, pages, strict=True))

    def pages_in(self, num_bytes: int) -> int:
        """The largest number of pages that fits into this memory."""
        if not self.groups:
            return 2
        fits, too_many = 0, num_bytes // min(group.bytes_per_page for group in self.groups) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.num_bytes(middle) <= num_bytes:
                fits = middle
            else:
                too_many = middle
        return fits

    def longest(self, num_pages: int) -> int:
        """Positions of the longest request that fits alone, at most `length`."""
        longest = self.length
        for group, num in zip(self.groups, self.group_pages(num_pages), strict=True):
            if group.spec.max_pages(self.length, self.step_tokens) > num - 1:
                longest = min(longest, (num - 1) * group.spec.page_size)
        return longest


# Computes how many recurrent states there are: how many rows may run, and how many checkpoints are kept.
#
# The state of a request is large and does not grow with its length: tens of MiB for a hybrid model, as much as a
# thousand or more positions of its KV cache. Rows and checkpoints compete with pages for memory.

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


# Computes how much memory the cache gets: what options say, or what the machine has left.
#
# `resolve` sizes the cache by estimates. On a GPU `fit_cache` sizes it again by the memory that is free once weights
# are loaded and the largest step has run.

DEFAULT_SHARE = 0.9  # of a GPU's memory
CPU_SHARE = 0.2  # of the free memory of a machine without a GPU, which runs other programs too
LIBRARIES = 2**30  # bytes of GPU memory for workspaces and code of libraries


def cache_room(options: Options, other_bytes: int, machine: Machine) -> int:
    """Bytes for the cache, if everything else takes `other_bytes`."""
    share = options.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise InvalidOption(f"gpu_memory_utilization is {share}; give a share above 0 and up to 1")
    if machine.kind == "cuda":
        taken = machine.total_memory - machine.free_memory
        return int(machine.total_memory * (share or DEFAULT_SHARE)) - taken - other_bytes - LIBRARIES
    return int((machine.free_memory - other_bytes) * (share or CPU_SHARE) / options.tensor_parallel_size)


def choose_num_checkpoints(
    options: Options, states: StateSize, size: CacheSize, other_bytes: int, max_num_seqs: int, machine: Machine
) -> int:
    """Checkpoints of recurrent states. `other_bytes`: all memory except pages and checkpoints."""
    if options.num_pages is not None and size.groups:  # a model without attention has no pages to size them by
        pages = size.num_bytes(positive("num_pages", options.num_pages) + 1)
        return states.num_checkpoints(max_num_seqs, beside=pages)
    if options.kv_cache_memory is not None:
        return states.num_checkpoints(max_num_seqs, within=parse_bytes(options.kv_cache_memory))
    return states.num_checkpoints(max_num_seqs, within=cache_room(options, other_bytes, machine))


def choose_num_pages(
    options: Options, size: CacheSize, states: StateSize, num_checkpoints: int, other_bytes: int, machine: Machine
) -> int:
    """`other_bytes`: all memory except pages."""
    if options.num_pages is not None:
        if options.kv_cache_memory is not None:
            raise InvalidOption("num_pages and kv_cache_memory are both given; give one size of the KV cache")
        return positive("num_pages", options.num_pages) + 1  # plus the null page
    if options.kv_cache_memory is not None:
        given = parse_bytes(options.kv_cache_memory) - num_checkpoints * states.checkpoint_bytes
        return max(size.pages_in(max(given, 0)), 1)
    pages = min(size.enough, size.pages_in(max(cache_room(options, other_bytes, machine), 0)))
    affordable = size.num_bytes(size.least) <= machine.free_memory - other_bytes
    if pages < size.least and options.max_model_len is None and affordable:
        pages = size.least  # the model's own length, which no option set: use the minimum that fits
    return max(pages, 1)


def keep_free(options: Options, machine: Machine) -> int | None:
    if machine.kind == "cpu" or options.num_pages is not None or options.kv_cache_memory is not None:
        return None
    return machine.total_memory - int(machine.total_memory * (options.gpu_memory_utilization or DEFAULT_SHARE))


def too_large(config: EngineConfig, weight_bytes: int, machine: Machine) -> str:
    """A notice for the user if the host has no memory for all of the cache; else an empty text. A GPU has all of it
    from the start, a host gives it page by page."""
    size, states = config.cache.num_bytes, config.cache.states
    size += 0 if states is None else states.num_checkpoints * states.checkpoint_bytes
    size *= config.model.num_ranks
    room = machine.free_memory - weight_bytes * config.model.num_ranks
    if machine.kind != "cpu" or size <= room:
        return ""
    return (
        f"the KV cache takes {size / 2**30:.1f} GiB when it is full, and beside the weights {max(room, 0) / 2**30:.1f} "
        "GiB are free: the system may end the process; lower kv_cache_memory or num_pages, or omit them"
    )


def fit_cache(config: EngineConfig, room: int) -> EngineConfig:
    """The configuration with a cache, and token ids for drafts, of at most `room` bytes, which were measured to be
    free."""
    cache, scheduler = config.cache, config.scheduler
    size = CacheSize(
        cache.groups,
        scheduler.max_model_len,
        scheduler.max_num_seqs,
        cache.step_tokens,
        cache.prefix_caching,
    )
    num_pages = min(size.enough, size.pages_in(max(room, 0)))
    if scheduler.drafts is not None:  # fewer pages have fewer ids
        room -= id_bytes(size.group_pages(num_pages), cache.page_size)
        num_pages = min(num_pages, size.pages_in(max(room, 0)))
    if size.longest(num_pages) < scheduler.max_model_len:
        need = size.num_bytes(size.least)
        raise NotEnoughMemory(
            f"weights and the largest step leave {max(room, 0) / 2**20:.0f} MiB for the cache, and one request of "
            f"max_model_len {scheduler.max_model_len} takes {need / 2**20:.0f}; lower max_model_len, "
            "max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization"
        )
    fitted = msgspec.structs.replace(cache, num_pages=num_pages, group_pages=size.group_pages(num_pages))
    return msgspec.structs.replace(config, cache=fitted)
