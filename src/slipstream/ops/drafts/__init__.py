"""Drafts on the device: acceptance of drafted tokens, and proposals from a row's own history."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.drafts import reference
from slipstream.ops.drafts.reference import Accepted, DrawnTokens, MatchRule, RowHistory, earlier_drafts, last_kept

_KERNELS = "slipstream.ops.drafts.triton"

accept_ = by_device(reference.accept_, _KERNELS)
propose_from_history_ = by_device(reference.propose_from_history_, _KERNELS)
store_drawn_ = by_device(reference.store_drawn_, _KERNELS)

__all__ = [
    "Accepted",
    "DrawnTokens",
    "MatchRule",
    "RowHistory",
    "accept_",
    "earlier_drafts",
    "last_kept",
    "propose_from_history_",
    "store_drawn_",
]
