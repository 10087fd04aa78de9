"""Sampling on the device: noise, truncation, penalties, logprobs. No function here reads a value on the host."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.sample import native, reference
from slipstream.ops.sample.reference import (
    ACCEPT,
    DRAFT,
    DRAW,
    IN_OUTPUT,
    IN_PROMPT,
    RESAMPLE,
    Choice,
    DrawTables,
    Penalty,
    TokenMask,
    TopLogprobs,
    match_words,
    row_key,
    uniform,
)

_KERNELS = "slipstream.ops.sample.triton"

add_entries_ = by_device(reference.add_entries_, _KERNELS)
count_ = by_device(reference.count_, _KERNELS)
draw = by_device(reference.draw, _KERNELS)
draw_by_row = by_device(reference.draw_by_row, _KERNELS)
drop_below_ = by_device(reference.drop_below_, _KERNELS)
fetch_masks_ = by_device(reference.fetch_masks_, _KERNELS)
find_floor = by_device(reference.find_floor, _KERNELS)
forbid_ = by_device(reference.forbid_, _KERNELS)
forbid_matched_ = by_device(reference.forbid_matched_, _KERNELS)
argmax_rows = by_device(native.argmax_rows, _KERNELS)
mask_bits_ = by_device(reference.mask_bits_, _KERNELS)
logprobs_of = by_device(reference.logprobs_of, _KERNELS)
noise_bits = by_device(reference.noise_bits, _KERNELS)
penalize_ = by_device(reference.penalize_, _KERNELS)
step_keys = by_device(reference.step_keys, _KERNELS)
top_logprobs = by_device(reference.top_logprobs, _KERNELS)

__all__ = [
    "ACCEPT",
    "DRAFT",
    "DRAW",
    "IN_OUTPUT",
    "IN_PROMPT",
    "RESAMPLE",
    "Choice",
    "DrawTables",
    "Penalty",
    "TokenMask",
    "TopLogprobs",
    "add_entries_",
    "count_",
    "draw",
    "draw_by_row",
    "drop_below_",
    "fetch_masks_",
    "find_floor",
    "forbid_",
    "forbid_matched_",
    "argmax_rows",
    "logprobs_of",
    "mask_bits_",
    "match_words",
    "noise_bits",
    "penalize_",
    "row_key",
    "step_keys",
    "top_logprobs",
    "uniform",
]
