"""Statistics of a core: LaneStats of each model, ReplicaStats where several cores run the same models."""

from __future__ import annotations

import msgspec


class LaneStats(msgspec.Struct, frozen=True, array_like=True):
    model: str
    num_steps: int = 0
    num_running: int = 0  # samples that have a row
    num_waiting: int = 0  # samples that wait for a row or for pages
    num_preemptions: int = 0
    num_free_pages: int = 0  # of the group that keeps every position; cached pages without a holder are free
    num_pages: int = 0
    page_size: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the cache
    prefix_hits: int = 0  # prompt tokens found in the cache
    tier_hits: int = 0  # of those, tokens whose pages came from the second tier
    tier_bytes_stored: int = 0  # copied to the second tier
    tier_bytes_loaded: int = 0  # copied from it
    # device seconds, by what the device did
    busy: float = 0.0
    turnaround: float = 0.0
    host_late: float = 0.0
    output: float = 0.0
    grammar: float = 0.0  # waiting for masks and logits processors
    no_requests: float = 0.0
    host: float = 0.0  # seconds of the core itself, on the host's clock
    # speculative decoding
    num_drafted_rows: int = 0  # rows with drafts, over all steps
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    accepted_at: tuple[int, ...] = ()  # accepted drafts by their position in the row
    replica: int = 0  # index of the core, where several cores run the same models
    # LoRA adapters
    max_loras: int = 0  # in one step; 0: the engine takes none
    running_adapters: tuple[str, ...] = ()  # names of adapters that running requests have
    waiting_adapters: tuple[str, ...] = ()  # names of adapters that only or also waiting requests have


class ReplicaStats(msgspec.Struct, frozen=True, array_like=True):
    """State of one replica, as its front end knows it."""

    replica: int
    is_ready: bool
    num_restarts: int
    num_open: int  # requests sent to it that have not finished
    num_rerouted: int  # requests that were run again on another replica, because this one died
    pid: int | None = None
