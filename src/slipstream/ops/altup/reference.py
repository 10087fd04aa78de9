"""AltUp in plain torch."""

from __future__ import annotations

import torch


def predict_streams(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """streams [T, S, hidden] plus, for each, their sum with its weights: [T, S * S], S for each stream."""
    num = streams.shape[1]
    return torch.baddbmm(streams, weights.view(-1, num, num), streams)


def correct_streams(predicted: torch.Tensor, made: torch.Tensor, weights: torch.Tensor, active: int) -> torch.Tensor:
    """predicted [T, S, hidden] plus (1 + weights [T, S]) times the error of the active stream, which is `made`
    [T, hidden]."""
    error = made - predicted[:, active]
    return predicted + error.unsqueeze(1) * (weights + 1.0).unsqueeze(2)
