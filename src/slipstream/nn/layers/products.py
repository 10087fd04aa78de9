"""Products: the two products of a sublayer and what is computed between them, as its module declares them to chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import PerHeadNorm
from slipstream.nn.shapes import FeedShape, MixerShape
from slipstream.ops.linear import Activation


class SplitProjection(NamedTuple):
    """The first product of a mixer that returns last tokens only: what its state needs of all tokens, and the rest."""

    kept: torch.Tensor  # [T, outputs that change the state]
    last: torch.Tensor  # [B, other outputs], of the last tokens


Mix = Callable[[Any, ForwardContext, LastTokens | None], torch.Tensor]
"""Its first argument is the first product, [T, outputs]; or a `SplitProjection`, if `Products.split` made it."""
Split = Callable[[torch.Tensor, ForwardContext, LastTokens], SplitProjection | None]


@dataclass(frozen=True, slots=True)
class Products:
    """The module of a sublayer computes last(mix(activation(first(x)))), where mix and activation are optional."""

    shape: MixerShape | FeedShape
    first: Linear
    last: Linear
    activation: Activation | None = None
    mix: Mix | None = None  # of a mixer
    head_norm: PerHeadNorm | None = None  # inside the mix, of queries and keys
    site: int | None = None  # of the cache that the mix writes and reads
    split: Split | None = None  # the first product of normed tokens, if only last tokens are returned; it may make None
