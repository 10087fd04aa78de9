"""Computes the memory of a model's tensors from its layout: no weight is read, nothing is allocated."""

from __future__ import annotations

from itertools import chain

import torch

from slipstream.config.config import ModelConfig
from slipstream.nn.models.load import find_tensors, lay_out, num_streamed_layers
from slipstream.nn.streamed_layers import parameter_bytes, saved_bytes
from slipstream.nn.weights.load import find_targets


def weight_bytes(config: ModelConfig, device_kind: str) -> int:
    """Bytes of parameters and buffers on the device, once loaded; low-bit weights by their size in the file."""
    device = torch.device(device_kind)
    model = lay_out(config, device)
    plain = sum(tensor.numel() * tensor.element_size() for tensor in chain(model.parameters(), model.buffers()))
    if config.offload_bytes:
        plain -= saved_bytes(parameter_bytes(model.layers), num_streamed_layers(config, model))
    if config.load_format != "gguf":
        return plain
    targets = find_targets(model)
    tensors, _ = find_tensors(config, model, targets, device)
    return plain + sum(targets[name].num_bytes(tensor) for name, tensor in tensors.items())
