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

from slipstream.checkpoint.model_info import ModelInfo
from slipstream.contracts.cache_spec import StateField, replay_columns, ring_columns
from slipstream.nn import block, registry
from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.families.llama import llama_rules, llama_shape
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import NoNorm, RMSNorm
from slipstream.nn.registry import Family
from slipstream.nn.shapes import MixerShape, NormShape
from slipstream.ops.recurrent import DraftSteps, RecurrentSteps, seen_tokens
from slipstream.ops.recurrent.replay import Recurrence, remember_, replay_, verify_
from tiny import write_tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class DecayShape(MixerShape):
    name: str = "decay"
    size: int = 24

    def state_fields(self, dtype: str, num_drafts: int = 0) -> tuple[StateField, ...]:
        exact = "float64" if dtype == "float64" else "float32"
        last = StateField("last", (self.size, ring_columns(2, num_drafts)), dtype)
        fields = StateField("sum", (self.size,), exact), last
        replay = StateField("replay", (replay_columns(num_drafts), 2 * self.size), exact, is_saved=False)
        return (*fields, replay) if num_drafts else fields

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
    slots, columns, drafts = steps.slots.long(), lasts.shape[2], steps.drafts
    value, decay = value.to(sums.dtype), decay.to(sums.dtype)
    positions, begins = steps.first_positions.long(), (steps.seen_positions == 0)[:, None]
    is_seen = seen_tokens(steps, len(value))[:, None]
    added, decay = torch.where(is_seen, 0.0, value), torch.where(is_seen, 1.0, decay)
    recurrence = None
    if drafts is not None:
        recurrence = drafted_sums(value, decay, state["replay"])
    if drafts is not None and not steps.is_single:
        replay_(sums, steps, recurrence)
        copy_last(lasts, steps, drafts)
    # the value before: of the place before in the same row, or of an earlier step
    before = torch.where(
        (positions == 0)[:, None], torch.zeros((), dtype=lasts.dtype), last_of(lasts, slots, positions)
    )
    if steps.is_single:
        if drafts is not None:
            earlier = torch.cat([value[:1], value[:-1]]).to(lasts.dtype)
            before = torch.where((drafts.offsets > 0)[:, None], earlier, before)
        totals = torch.zeros_like(value)
        if steps.is_verified:
            remember_(state["replay"], steps, torch.cat((value, decay), 1))
            verify_(totals, sums, steps, recurrence)
        else:
            totals = torch.where(begins, 0.0, sums[slots]) * decay + added
            sums[slots] = totals
        lasts[slots, :, positions % columns] = value.to(lasts.dtype)
        if drafts is not None:
            copy_last(lasts, steps, drafts)
        if steps.save_slots is not None and not steps.is_verified:
            rows = torch.nonzero(steps.save_slots >= 0)[:, 0]
            targets = steps.save_slots[rows].long()
            sums[targets] = totals[rows]
            lasts[targets, :, positions[rows] % columns] = value[rows].to(lasts.dtype)
        return (totals + before).to(lasts.dtype)
    assert steps.chunks is not None and steps.chunk_starts is not None
    carried = torch.where(begins, torch.zeros((), dtype=sums.dtype), sums[slots])
    out = torch.zeros_like(value)
    chunks, chunk_starts = steps.chunks.tolist(), steps.chunk_starts.tolist()
    for row in range(len(slots)):
        total, previous, position = carried[row], before[row], int(positions[row])
        earlier = previous
        for of_row, first, num, save in chunks[chunk_starts[row] : chunk_starts[row + 1]]:
            assert of_row == row and num >= 1
            part = slice(first, first + num)
            decayed = decay[part].cumprod(0)
            totals = decayed * (total + (added[part] / decayed).cumsum(0))
            values = torch.cat([previous[None], value[part].to(lasts.dtype)])
            out[part] = totals + values[:-1]
            total, (earlier, previous), position = totals[-1], values[-2:], position + num
            if save >= 0:
                sums[save], lasts[save, :, (position - 1) % columns] = total, previous
        if chunk_starts[row + 1] > chunk_starts[row]:
            # the last position may be computed again, so the value before it is kept too
            sums[slots[row]], lasts[slots[row], :, (position - 1) % columns] = total, previous
            lasts[slots[row], :, (position - 2) % columns] = earlier
    return out.to(lasts.dtype)


def drafted_sums(value: torch.Tensor, decay: torch.Tensor, replay: torch.Tensor) -> Recurrence:
    return Recurrence(
        take=lambda tokens: (value[tokens], decay[tokens]),
        recall=lambda slot, position: replay[slot, position % replay.shape[1]].chunk(2, 1),
        change=lambda inputs, held: held * inputs[1] + inputs[0],
        read=lambda tokens, held: held,
    )


def last_of(lasts: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The inputs before these positions."""
    return lasts[slots, :, (positions - 1) % lasts.shape[2]]


def copy_last(lasts: torch.Tensor, steps: RecurrentSteps, drafts: DraftSteps) -> None:
    """The input before each save goes to the save slot."""
    slots, positions = steps.slots.long(), drafts.save_positions.long()
    targets = torch.where(drafts.save_slots < 0, slots, drafts.save_slots.long())
    lasts[targets, :, (positions - 1) % lasts.shape[2]] = last_of(lasts, slots, positions)


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
