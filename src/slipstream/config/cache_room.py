"""Computes how much memory the cache gets: what options say, or what the machine has left.

`resolve` sizes the cache by estimates. On a GPU `fit_cache` sizes it again by the memory that is free once weights are
loaded and the largest step has run.
"""

from __future__ import annotations

import msgspec

from slipstream.config.cache_size import CacheSize
from slipstream.config.config import EngineConfig
from slipstream.config.machine import Machine
from slipstream.config.memory import id_bytes
from slipstream.config.option_values import parse_bytes, positive
from slipstream.config.options import Options
from slipstream.config.state_size import StateSize
from slipstream.errors import InvalidOption, NotEnoughMemory

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
