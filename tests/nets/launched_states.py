"""Launches of kernels with recurrent states: delta nets, state spaces, and steps with drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hand_steps import StepRow, hand_steps
from nets.launch_inputs import get, half, ints
from slipstream.contracts.cache_spec import STATE_CHUNK, replay_columns, ring_columns
from slipstream.ops.recurrent import DeltaWeights, DraftSteps, SelectiveWeights, SsdWeights


def delta_rule() -> dict[str, Callable[[], Any]]:
    chunked = hand_steps([StepRow(1, 0, 1), StepRow(2, 3, 70)])
    single = hand_steps([StepRow(1, 0, 1), StepRow(2, 3, 1)])
    conv, state, gates = half(4, 48, 4), torch.randn(4, 2, 16, 8), torch.randn(71, 2)
    x, weight, qk, v = half(71, 48), half(48, 4), half(71, 1, 16), half(71, 2, 8)
    weights = DeltaWeights(weight, torch.randn(2), torch.randn(2), half(8), 1e-6)
    deferred, seen = torch.randn(4, 2, 3, 28), torch.tensor([0, 1]).int()
    chunked_later, single_later = (replace(steps, seen_positions=seen) for steps in (chunked, single))
    wide_conv, wide_state = half(4, 160, 4), torch.randn(4, 2, 16, 64)
    wide = DeltaWeights(half(160, 4), torch.randn(2), torch.randn(2), half(64), 1e-6)
    at = "recurrent."
    return {
        "conv of chunks": lambda: get("recurrent.conv1d_triton.causal_conv1d")(x, weight, None, conv, chunked, "silu"),
        "conv with padding": lambda: get("recurrent.conv1d_triton.causal_conv1d")(
            half(80, 48), weight, None, conv, chunked, "silu"
        ),
        "conv of tokens": lambda: get("recurrent.conv1d_triton.causal_conv1d")(
            x[:2], weight, None, conv, single, "silu"
        ),
        "gates": lambda: get(at + "delta_parts.delta_gates")(half(71, 2), half(71, 2), weights.a_log, weights.dt_bias),
        "gated norm of heads": lambda: get("elementwise.norm_triton.gated_rms_norm")(v, v, weights.norm, 1e-6),
        "gated norm of groups": lambda: get("elementwise.norm_triton.gated_group_norm")(x, x, None, 1e-6),
        "delta rule of chunks": lambda: get(at + "delta_triton.gated_delta_rule")(
            qk, qk, v, gates, gates, state, chunked, 0.25
        ),
        "delta decode": lambda: get(at + "delta_decode_kernel.delta_decode")(
            x[:2], half(2, 16), half(2, 2), half(2, 2), weights, conv, state, single
        ),
        "delta decode of parts of heads": lambda: get(at + "delta_decode_kernel.delta_decode")(
            half(2, 160), half(2, 128), half(2, 2), half(2, 2), wide, wide_conv, wide_state, single
        ),
        "delta rule after deferred stores": lambda: get(at + "delta_triton.gated_delta_rule")(
            qk, qk, v, gates, gates, state, chunked_later, 0.25, deferred=deferred
        ),
        "delta decode with deferred stores": lambda: get(at + "delta_decode_kernel.delta_decode")(
            x[:2], half(2, 16), half(2, 2), half(2, 2), weights, conv, state, single_later, None, deferred
        ),
    }


def state_space() -> dict[str, Callable[[], Any]]:
    steps = {
        "chunks": hand_steps([StepRow(1, 0, 1), StepRow(2, 3, 70)]),
        "tokens": hand_steps([StepRow(1, 0, 1), StepRow(2, 3, 1)]),
    }
    ssd = SsdWeights(torch.randn(2), torch.randn(2), torch.randn(2))
    selective = SelectiveWeights(torch.randn(16, 4), torch.randn(16), torch.randn(16))

    def scan_heads(kind: str, n: int) -> Any:
        states, inputs = torch.randn(4, 2, 8, 4), (half(n, 2, 8), half(n, 2), half(n, 1, 4), half(n, 1, 4))
        return get("recurrent.ssm_triton.ssd_scan")(*inputs, ssd, states, steps[kind])

    def scan_channels(kind: str, n: int) -> Any:
        states, inputs = torch.randn(4, 16, 4), (half(n, 16), half(n, 16), half(n, 4), half(n, 4), half(n, 16))
        return get("recurrent.ssm_triton.selective_scan")(*inputs, selective, states, steps[kind])

    def pass_by_wgmma() -> Any:
        x, b, out = half(71, 2, 64), half(71, 1, 128), half(71, 2, 64)
        logs = torch.randn(len(steps["chunks"].chunks), 2, 2, STATE_CHUNK)
        scores, states = half(71, 1, STATE_CHUNK), torch.randn(4, 2, 64, 128)
        return get("recurrent.ssm_hopper.pass_chunks")(
            x, b, b, scores, logs, torch.randn(2), states, steps["chunks"], out
        )

    return {
        "ssd_scan of chunks": lambda: scan_heads("chunks", 71),
        "ssd_scan of chunks by wgmma": pass_by_wgmma,
        "ssd_scan of tokens": lambda: scan_heads("tokens", 2),
        "selective_scan of chunks": lambda: scan_channels("chunks", 71),
        "selective_scan of tokens": lambda: scan_channels("tokens", 2),
    }


def drafted_states() -> dict[str, Callable[[], Any]]:
    """Steps of recurrent mixers: what states have seen, and with drafts."""
    plain = hand_steps([StepRow(1, 0, 1), StepRow(2, 3, 1)])
    table, offsets, saves = (
        torch.zeros(4, dtype=torch.int32),
        ints(2, most=1),
        torch.full((2, 2), -1, dtype=torch.int32),
    )
    numbers = [torch.zeros(2, dtype=torch.int32) for _ in range(5)]
    steps = replace(plain, save_slots=numbers[0], drafts=DraftSteps(*numbers, 3, np.zeros(2, np.int32)))
    columns, kept = ring_columns(4, 2), replay_columns(2)
    delta = DeltaWeights(half(48, 4), torch.randn(2), torch.randn(2), half(8), 1e-6)
    ssd = SsdWeights(torch.randn(2), torch.randn(2), torch.randn(2))
    selective = SelectiveWeights(torch.randn(16, 4), torch.randn(16), torch.randn(16))
    heads = (half(2, 2, 8), half(2, 2), half(2, 1, 4), half(2, 1, 4))
    channels = (half(2, 16), half(2, 16), half(2, 4), half(2, 4), half(2, 16))
    return {
        "positions that states have seen": lambda: get("recurrent.steps_triton.advance_seen_")(
            table, plain.slots.long(), plain.starts, plain.first_positions.long(), 4, True
        ),
        "bases of drafts": lambda: get("recurrent.steps_triton.advance_bases_")(
            table, plain.slots.long(), plain.starts, plain.first_positions.long(), offsets, saves, True
        ),
        "delta verify": lambda: get("recurrent.delta_verify.delta_verify")(
            half(2, 48), half(2, 16), half(2, 2), half(2, 2), delta, half(4, 48, columns), torch.randn(4, 2, 16, 8),
            steps, torch.randn(4, kept, 4),
        ),
        "ssd verify": lambda: get("recurrent.ssm_verify.ssd_verify")(
            *heads, ssd, torch.randn(4, 2, 8, 4), steps, torch.randn(4, kept, 22), half(2, 2, 8)
        ),
        "selective verify": lambda: get("recurrent.ssm_verify.selective_verify")(
            *channels, selective, torch.randn(4, 16, 4), steps, torch.randn(4, kept, 36), half(2, 16)
        ),
    }  # fmt: skip
