"""The last touch on results: cut to size, then normalised, or turned into probabilities."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from slipstream.nn.layers.activations import torch_activation
from slipstream.runner.pooling.pool_mode import PoolMode


def finish(x: torch.Tensor, setting: PoolMode) -> torch.Tensor:
    """Device: lines [N, size] to lines [N, width]. Cutting and picking come first: what is left has length or sum 1.
    Where the model's folder says to which size vectors are cut, it comes last."""
    if setting.cut_last:
        return finish(x, setting._replace(cut=None, cut_last=False))[:, : setting.cut]
    if setting.cut is not None:
        x = x[:, : setting.cut]
    if setting.columns:
        x = torch.stack([x[:, column] for column in setting.columns], 1)
    if setting.finish == "normalize":
        return F.normalize(x, dim=-1)
    if setting.finish == "softmax":
        return x.softmax(-1)
    if setting.finish in ("sigmoid", "identity"):
        return x.sigmoid() if setting.finish == "sigmoid" else x
    made: torch.Tensor = _activation(setting.finish)(x)
    return made


_activation = functools.cache(torch_activation)
