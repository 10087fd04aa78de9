"""The statistics of a core, for metrics."""

from __future__ import annotations

from slipstream.engine.core import EngineCore
from slipstream.metrics.stats import LaneStats
from slipstream.scheduler.scheduler import Scheduler


def lane_stats(name: str, core: EngineCore) -> LaneStats:
    scheduler, time = core.scheduler, core.timer.total
    cache = getattr(scheduler, "cache", None)  # encoders have none
    tier = None if cache is None else cache.tier
    drafts = scheduler.drafts.counts if isinstance(scheduler, Scheduler) else None
    pool = cache.groups[0].pool if cache is not None and cache.groups else None
    adapters = scheduler.adapters
    running, waiting = ((), ()) if adapters is None else adapters.names()
    return LaneStats(
        name,
        num_steps=core.num_steps,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_preemptions=getattr(scheduler, "num_preemptions", 0),
        num_free_pages=0 if pool is None else pool.num_free,
        num_pages=0 if pool is None else pool.num_usable,
        page_size=0 if cache is None else cache.page_size,
        prefix_queries=0 if cache is None else cache.num_queries,
        prefix_hits=0 if cache is None else cache.num_hits,
        tier_hits=0 if tier is None else tier.num_hits,
        tier_bytes_stored=0 if tier is None else tier.bytes_stored,
        tier_bytes_loaded=0 if tier is None else tier.bytes_loaded,
        busy=time.busy,
        turnaround=time.turnaround,
        host_late=time.host_late,
        output=time.output,
        grammar=time.grammar,
        no_requests=time.no_requests,
        host=time.host,
        num_drafted_rows=0 if drafts is None else drafts.num_rows,
        num_drafts=0 if drafts is None else drafts.num_drafts,
        num_accepted_drafts=0 if drafts is None else drafts.num_accepted,
        accepted_at=() if drafts is None else tuple(drafts.accepted_at),
        max_loras=0 if adapters is None else adapters.config.max_loras,
        running_adapters=running,
        waiting_adapters=waiting,
    )
