"""Products: the two products of a sublayer and what is computed between them, as its module declares them to chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import PerHeadNorm
from slipstream.nn.shapes import FeedShape, MixerShape
from slipstream.ops.linear import Activation

Mix = Callable[[torch.Tensor, ForwardContext, LastTokens | None], torch.Tensor]


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
