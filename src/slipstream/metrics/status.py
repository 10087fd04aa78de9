"""The status line: regularly, what the server did since the last one. Nothing is logged if nothing was done."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import zip_longest

from slipstream.metrics.lane import LaneStats
from slipstream.metrics.stats import FrontStats

log = logging.getLogger("slipstream.status")
_DRAFTS = ("num_accepted_drafts", "num_drafts")


class StatusLine:
    def __init__(self) -> None:
        self._last: tuple[float, int, int, int] | None = None
        self._was_busy = False

    def look(self, now: float, front: FrontStats, lanes: Sequence[LaneStats]) -> str | None:
        """A line, or None if there is nothing to say. `now`: seconds of any clock."""
        prompt = sum(model.prompt_tokens for model in front.models.values())
        generated = sum(model.generated_tokens for model in front.models.values())
        requests = sum(front.requests.values())
        before, self._last = self._last, (now, prompt, generated, requests)
        if before is None:
            return None
        seconds = max(now - before[0], 1e-9)
        running, waiting = (sum(getattr(lane, name) for lane in lanes) for name in ("num_running", "num_waiting"))
        did = prompt - before[1] or generated - before[2] or running or waiting
        was_busy, self._was_busy = self._was_busy, bool(did)
        if not did and not was_busy:
            return None
        parts = [
            f"{(requests - before[3]) / seconds:.1f} requests/s",
            f"prompt {(prompt - before[1]) / seconds:.0f} tok/s",
            f"generated {(generated - before[2]) / seconds:.0f} tok/s",
            f"running {running}",
            f"waiting {waiting}",
        ]
        if num_pages := sum(lane.num_pages for lane in lanes):
            parts.append(f"cache {1 - sum(lane.num_free_pages for lane in lanes) / num_pages:.0%}")
        if queries := sum(lane.prefix_queries for lane in lanes):
            parts.append(f"prefix hits {sum(lane.prefix_hits for lane in lanes) / queries:.0%}")
        if rows := sum(lane.num_drafted_rows for lane in lanes):
            accepted, drafted = (sum(getattr(lane, name) for lane in lanes) for name in _DRAFTS)
            at = [sum(counts) for counts in zip_longest(*(lane.accepted_at for lane in lanes), fillvalue=0)]
            # the share of rows with drafts that accepted the first one, the second ...
            by_position = " ".join(f"{count / rows:.0%}" for count in at)
            parts.append(f"drafts {accepted / drafted:.0%} accepted ({by_position}), {1 + accepted / rows:.2f} tok/row")
        return ", ".join(parts)
