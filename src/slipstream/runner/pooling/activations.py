"""Final operations on pooled results: truncation, normalisation, softmax, sigmoid."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from slipstream.nn.layers.activations import torch_activation
from slipstream.runner.pooling.pool_mode import PoolMode


def finish(x: torch.Tensor, mode: PoolMode) -> torch.Tensor:
    """Device: vectors [N, size] to vectors [N, width]. Truncation and column selection come before normalisation; with
    `cut_last` truncation comes last."""
    if mode.cut_last:
        return finish(x, mode._replace(cut=None, cut_last=False))[:, : mode.cut]
    if mode.cut is not None:
        x = x[:, : mode.cut]
    if mode.columns:
        x = torch.stack([x[:, column] for column in mode.columns], 1)
    if mode.finish == "normalize":
        return F.normalize(x, dim=-1)
    if mode.finish == "softmax":
        return x.softmax(-1)
    if mode.finish in ("sigmoid", "identity"):
        return x.sigmoid() if mode.finish == "sigmoid" else x
    made: torch.Tensor = _activation(mode.finish)(x)
    return made


_activation = functools.cache(torch_activation)
