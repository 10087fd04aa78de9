"""A tiny model with recurrent mixers, for tests of the state cache: sums that decay, and the input of the token before.

Its states are small, of two specs and two fields each, and depend on every token of the text, so a wrong restore, save
or slot changes tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from slipstream.cache_spec import StateField
from slipstream.config.model_info import ModelInfo
from slipstream.nn.blocks import block
from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import NoNorm, RMSNorm
from slipstream.nn.models import registry
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.llama import llama_rules, llama_shape
from slipstream.nn.models.registry import Family
from slipstream.nn.shapes import MixerShape, NormShape
from slipstream.ops.recurrent_steps import RecurrentSteps
from tiny import write_tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class DecayShape(MixerShape):
    name: str = "decay"
    size: int = 24

    def state_fields(self, dtype: str) -> tuple[StateField, ...]:
        exact = "float64" if dtype == "float64" else "float32"
        return StateField("sum", (self.size,), exact), StateField("last", (self.size, 1), dtype)

    def elements_per_token(self, on_cpu: bool) -> int:
        return 8 * self.size


class Decay(Layer):
    def __init__(self, name: str, shape: DecayShape, norm: NormShape, site: int | None, layout: Layout) -> None:
        super().__init__()
        assert site is not None
        self.shape, self.site = shape, site
        parts = {"value": shape.size, "decay": shape.size}
        self.inner = Linear(layout.hidden_size, parts, False, layout.format_of(f"{name}.inner"), layout.dtype)
        self.output = Linear(
            shape.size, {"": layout.hidden_size}, False, layout.format_of(f"{name}.output"), layout.dtype
        )

    def forward(self, x: torch.Tensor, context: ForwardContext, last: LastTokens | None = None) -> torch.Tensor:
        value, decay = self.inner(x, context).split(self.shape.size, 1)
        assert context.recurrent is not None
        # values that differ from token to token, and decays near 1: what a row saw long ago still counts
        out = scan(20 * value, 1 - 0.01 * torch.sigmoid(decay), context.states[self.site], context.recurrent)
        mixed: torch.Tensor = self.output(torch.tanh(out) if last is None else last.of(torch.tanh(out)), context)
        return mixed

    def after_norm(
        self,
        norm: RMSNorm | NoNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = norm(x, residual)
        return self(normed, context, last), total if last is None else last.of(total)

    def products(self) -> None:
        return None


def scan(
    value: torch.Tensor, decay: torch.Tensor, state: Mapping[str, torch.Tensor], steps: RecurrentSteps
) -> torch.Tensor:
    """sum = sum * decay + value, for each row; gives the sum and the value before, [T, size]."""
    sums, lasts = state["sum"], state["last"]
    fresh = steps.first_positions == 0
    slots = steps.slots.long()
    carried = torch.where(fresh[:, None], torch.zeros((), dtype=sums.dtype), sums[slots])
    before = torch.where(fresh[:, None], torch.zeros((), dtype=lasts.dtype), lasts[slots, :, 0])
    value, decay = value.to(sums.dtype), decay.to(sums.dtype)
    if steps.is_single:
        carried = carried * decay + value
        out = carried + before
        sums[slots], lasts[slots, :, 0] = carried, value.to(lasts.dtype)
        if steps.save_slots is not None:
            rows = torch.nonzero(steps.save_slots >= 0)[:, 0]
            targets = steps.save_slots[rows].long()
            sums[targets], lasts[targets, :, 0] = carried[rows], value[rows].to(lasts.dtype)
        return out.to(lasts.dtype)
    assert steps.chunks is not None and steps.chunk_starts is not None
    out = torch.zeros_like(value)
    chunks, chunk_starts = steps.chunks.tolist(), steps.chunk_starts.tolist()
    for row in range(len(slots)):
        total, previous = carried[row], before[row]
        for of_row, first, num, save in chunks[chunk_starts[row] : chunk_starts[row + 1]]:
            assert of_row == row and num >= 1
            part = slice(first, first + num)
            decayed = decay[part].cumprod(0)
            totals = decayed * (total + (value[part] / decayed).cumsum(0))
            out[part] = totals + torch.cat([previous[None], value[part][:-1].to(lasts.dtype)])
            total, previous = totals[-1], value[part][-1].to(lasts.dtype)
            if save >= 0:
                sums[save], lasts[save, :, 0] = total, previous
        if chunk_starts[row + 1] > chunk_starts[row]:
            sums[slots[row]], lasts[slots[row], :, 0] = total, previous
    return out.to(lasts.dtype)


def hybrid(info: ModelInfo) -> DecoderShape:
    """Attention, a recurrent layer, both side by side, and a recurrent layer of another size at the end."""
    shape = llama_shape(info)
    plain, recurrent, both, last = shape.layers
    layers = (
        plain,
        replace(recurrent, mixers=(DecayShape(),)),
        replace(both, mixers=(*both.mixers, DecayShape())),
        replace(last, mixers=(DecayShape(size=16),)),
    )
    return replace(shape, layers=layers)


def recurrent_only(info: ModelInfo) -> DecoderShape:
    shape = llama_shape(info)
    return replace(shape, layers=tuple(replace(layer, mixers=(DecayShape(),)) for layer in shape.layers))


MODELS = {"hybrid": hybrid, "recurrent": recurrent_only}


def write_recurrent(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint without weights, for load_format="dummy", of a family that is known while the test runs."""
    monkeypatch.setitem(registry.DECODERS, "Recurrent", Family(MODELS[name], llama_rules))
    monkeypatch.setitem(block.MIXERS, DecayShape, Decay)
    write_tiny(folder, "llama", num_hidden_layers=4)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["RecurrentForCausalLM"]}))
    return folder
