"""Greedy sampling with the C kernel; with the reference for inputs that the kernel does not take."""

from __future__ import annotations

import torch

from slipstream.ops.platform import native
from slipstream.ops.sampling import reference
from slipstream.ops.sampling.reference import Choice, Penalty, TokenMask


def argmax_rows(logits: torch.Tensor, penalty: Penalty | None = None, mask: TokenMask | None = None) -> Choice:
    if mask is not None:
        logits = reference.masked(logits, mask)
    if penalty is not None or not native.serves(logits) or not logits.is_contiguous():
        return reference.argmax_rows(logits, penalty)
    library = native.library()
    assert library is not None
    num_rows, size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    failed = torch.empty(num_rows, dtype=torch.bool)
    library.slip_argmax(logits.data_ptr(), tokens.data_ptr(), failed.data_ptr(), num_rows, size)
    return Choice(tokens, failed)
