"""Sampling on CUDA. The chunks of a row depend on the vocabulary size only, so its sums are the same in every batch.

Logits may also be bfloat16 or float16; kernels convert them to float32 when they load them.
"""

from slipstream.ops.sample.triton.choose import argmax_rows, draw, draw_by_row
from slipstream.ops.sample.triton.edit import (
    add_entries_,
    count_,
    drop_below_,
    forbid_,
    forbid_matched_,
    penalize_,
)
from slipstream.ops.sample.triton.floor import find_floor
from slipstream.ops.sample.triton.logprobs import logprobs_of, top_logprobs
from slipstream.ops.sample.triton.mask import fetch_masks_, mask_bits_
from slipstream.ops.sample.triton.noise import noise_bits, step_keys

__all__ = [
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
    "noise_bits",
    "penalize_",
    "step_keys",
    "top_logprobs",
]
