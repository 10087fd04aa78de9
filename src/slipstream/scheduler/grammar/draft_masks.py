"""Masks along drafts: what a grammar allows at each draw of a row with drafts.

The mask of a draw is that of the state after the drafts before it. A draft that its own mask forbids cannot be drawn,
so it is not accepted, and the masks after it do not matter.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slipstream.scheduler.grammar.session import Session, Words

_ALL = 0xFFFFFFFF


def fill_along(session: Session, masks: Words, end: int, is_late: Callable[[], bool] | None = None) -> None:
    """Fill the masks [draws, words] of a session's next draws. `end`: bit for the end of the grammar. `is_late`: then
    only the first mask is needed."""
    matcher = session.matcher.deep_copy()
    forced = session.forced
    for index, mask in enumerate(masks):
        if forced:
            session.write_forced(mask, forced[0])
        elif index == 0 and session.ready is not None:
            mask[:] = session.ready
        else:
            session.fill(mask, matcher)
        draft = session.drafts[index] if index < len(session.drafts) else -1
        is_allowed = 0 <= draft < end and bool(mask[draft >> 5] >> np.uint32(draft & 31) & np.uint32(1))
        if is_late is not None and is_late():
            return
        if index + 1 == len(masks) or not is_allowed or not matcher.consume_token(draft) or matcher.is_stopped():
            masks[index + 1 :].fill(_ALL)
            return
        forced = forced[1:] or matcher.compute_ff_tokens()
