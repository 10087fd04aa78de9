"""Sampling on the device: noise, truncation, penalties, logprobs. No function here reads a value on the host."""

from slipstream.ops.platform.dispatch import by_device
from slipstream.ops.sampling import cpu, drafts, reference
from slipstream.ops.sampling.drafts import (
    Accepted,
    DrawnTokens,
    MatchRule,
    RowHistory,
    earlier_drafts,
    last_kept,
)
from slipstream.ops.sampling.reference import (
    ACCEPT,
    DRAFT,
    DRAW,
    IN_OUTPUT,
    IN_PROMPT,
    RESAMPLE,
    Choice,
    DrawTables,
    Penalty,
    RowHints,
    TokenMask,
    TopLogprobs,
    match_words,
    row_key,
    uniform,
)

_KERNELS = "slipstream.ops.sampling.triton"

add_entries_ = by_device(reference.add_entries_, _KERNELS)
count_ = by_device(reference.count_, _KERNELS)
draw_by_row = by_device(cpu.draw_by_row, _KERNELS)
drop_below_ = by_device(reference.drop_below_, _KERNELS)
fetch_masks_ = by_device(reference.fetch_masks_, _KERNELS)
find_floor = by_device(reference.find_floor, _KERNELS)
forbid_ = by_device(reference.forbid_, _KERNELS)
forbid_matched_ = by_device(reference.forbid_matched_, _KERNELS)
argmax_rows = by_device(cpu.argmax_rows, _KERNELS)
mask_bits_ = by_device(reference.mask_bits_, _KERNELS)
logprobs_of = by_device(reference.logprobs_of, _KERNELS)
noise_bits = by_device(reference.noise_bits, _KERNELS)
penalize_ = by_device(reference.penalize_, _KERNELS)
step_keys = by_device(reference.step_keys, _KERNELS)
top_logprobs = by_device(reference.top_logprobs, _KERNELS)


# Drafts on the device: acceptance of drafted tokens, and proposals from a row's own history.

_DRAFTS_KERNELS = "slipstream.ops.sampling.drafts_triton"

accept_ = by_device(drafts.accept_, _DRAFTS_KERNELS)
propose_from_history_ = by_device(drafts.propose_from_history_, _DRAFTS_KERNELS)
store_drawn_ = by_device(drafts.store_drawn_, _DRAFTS_KERNELS)


__all__ = [
    "ACCEPT",
    "Accepted",
    "Choice",
    "DRAFT",
    "DRAW",
    "DrawTables",
    "DrawnTokens",
    "IN_OUTPUT",
    "IN_PROMPT",
    "MatchRule",
    "Penalty",
    "RESAMPLE",
    "RowHints",
    "RowHistory",
    "TokenMask",
    "TopLogprobs",
    "accept_",
    "add_entries_",
    "argmax_rows",
    "count_",
    "draw_by_row",
    "drop_below_",
    "earlier_drafts",
    "fetch_masks_",
    "find_floor",
    "forbid_",
    "forbid_matched_",
    "last_kept",
    "logprobs_of",
    "mask_bits_",
    "match_words",
    "noise_bits",
    "penalize_",
    "propose_from_history_",
    "row_key",
    "step_keys",
    "store_drawn_",
    "top_logprobs",
    "uniform",
]
