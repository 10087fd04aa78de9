"""A decoder in plain torch, written from the formulas: whole texts, no pages, no batches, no engine code.

It reads a `DecoderShape` and the parameters by name, and is slow. Weights must be `Unquantized`.
"""

from __future__ import annotations

import torch

from slipstream.nn.decoder import Decoder, DecoderShape
from slipstream.nn.shapes import AttentionShape, LayerShape, MlpShape


def randomize(model: Decoder, seed: int = 0) -> Decoder:
    """Random parameters with a spread at which every part changes the output."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(noise * 0.15 + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def plain_logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] of one text."""
    return Plain(model.shape, dict(model.named_parameters())).logits(ids)


class Plain:
    def __init__(self, shape: DecoderShape, weights: dict[str, torch.Tensor]) -> None:
        self.shape = shape
        self.weights = weights
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keys and values by layer

    def logits(self, ids: list[int]) -> torch.Tensor:
        embedding = self.weights["embedding.weight.data"]
        x = embedding[torch.tensor(ids)] * self.shape.embedding_scale
        for number, layer in enumerate(self.shape.layers):
            x = self.layer(x, number, layer)
        hidden = self.norm(x, "norm.weight", self.shape.norm.eps)
        head = embedding if self.shape.tied else self.weights["head.weight.data"]
        return hidden @ head.T

    def layer(self, x: torch.Tensor, number: int, layer: LayerShape) -> torch.Tensor:
        name = f"layers.{number}"
        bodies = []
        if layer.mixers:
            bodies.append(
                (layer.mixers[0].name, lambda x: sum(self.attention(x, number, name, m) for m in layer.mixers))
            )
        if layer.feed is not None:
            feed = layer.feed
            bodies.append((feed.name, lambda x: self.mlp(x, f"{name}.{feed.name}", feed)))
        for body_name, body in bodies:
            out = self.norm(x, f"{name}.{body_name}_norm.weight", layer.norm.eps) if layer.norm_before else x
            out = body(out)
            if layer.norm_after:
                out = self.norm(out, f"{name}.{body_name}_out_norm.weight", layer.norm.eps)
            x = x + out
        return x

    def attention(self, x: torch.Tensor, number: int, name: str, shape: AttentionShape) -> torch.Tensor:
        name = f"{name}.{shape.name}"
        qkv = x @ self.weights[f"{name}.qkv.weight.data"].T
        heads = qkv.unflatten(-1, (-1, shape.head_dim)).transpose(0, 1)
        query = self.rope(heads[: shape.num_heads], shape)
        if shape.kv_source is None:
            key, value = heads[shape.num_heads :].split(shape.num_kv_heads)
            key = self.rope(key, shape)
            self.kept.setdefault(number, (key, value))  # of the first mixer
        else:
            assert len(heads) == shape.num_heads
            key, value = self.kept[shape.kv_source]
        each = shape.num_heads // shape.num_kv_heads
        key, value = key.repeat_interleave(each, 0), value.repeat_interleave(each, 0)
        scores = query @ key.transpose(1, 2) * shape.scale
        if shape.soft_cap:
            scores = torch.tanh(scores / shape.soft_cap) * shape.soft_cap
        ahead = torch.arange(len(x)) - torch.arange(len(x)).unsqueeze(1)  # key position - query position
        hidden = ahead > 0
        if shape.window:
            hidden |= ahead <= -shape.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if shape.sinks:
            sinks = self.weights[f"{name}.sinks"].view(-1, 1, 1).expand(-1, len(x), 1)
            scores = torch.cat([sinks, scores], -1)
        weights = scores.softmax(-1)[..., int(shape.sinks) :]
        mixed = weights @ value
        return mixed.transpose(0, 1).flatten(1) @ self.weights[f"{name}.output.weight.data"].T

    def rope(self, x: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
        """RoPE of x [heads, T, dim] without scaling factors."""
        info = self.shape.ropes[shape.rope].info
        half = shape.head_dim // 2
        # frequencies are float32, as in the engine
        turns = 1.0 / info.theta ** (torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
        angles = torch.arange(x.shape[1], dtype=torch.float32).unsqueeze(1) * turns
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def mlp(self, x: torch.Tensor, name: str, shape: MlpShape) -> torch.Tensor:
        assert shape.activation == "silu"
        if shape.gated:
            gate, up = (x @ self.weights[f"{name}.gate_up.weight.data"].T).chunk(2, -1)
            hidden = gate * torch.sigmoid(gate) * up
        else:
            hidden = x @ self.weights[f"{name}.up.weight.data"].T
            hidden = hidden * torch.sigmoid(hidden)
        return hidden @ self.weights[f"{name}.down.weight.data"].T

    def norm(self, x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.weights[name]
