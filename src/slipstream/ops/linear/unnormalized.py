"""Products one after another with a residual and a norm between them.

The product before adds the residual itself, and the sum waits for its norm as an `Unnormalized`. An RMS norm divides a
row by one number, and what is made of the row can be divided afterwards as well: so where `triton/streaming_hopper.py`
serves, the product before also multiplies by the norm's weights and leaves sums of squares, one for each block of its
outputs; the product after adds these up and divides, and the norm has no kernel of its own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Chain = Literal["streamed", "library", ""]
"""Who makes the products: our kernel for Hopper; the library, with norms apart; or they are better made one by one."""


class Unnormalized(NamedTuple):
    """Rows whose norm is still to be finished, or to be begun."""

    total: torch.Tensor  # [rows, size] the sum of x and residual, which is the next residual
    norm: torch.Tensor  # [size] weights
    eps: float
    weighted: torch.Tensor | None = None  # [rows, size] times the norm's weights
    squares: torch.Tensor | None = None  # [rows, blocks] float32, summed over blocks of `total`
