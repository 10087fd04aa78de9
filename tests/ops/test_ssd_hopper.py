"""The pass of Mamba-2 over chunks on Hopper, against the reference."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from hand_steps import StepRow, hand_steps
from slipstream.contracts.cache_spec import STATE_CHUNK
from slipstream.ops.platform.dispatch import has_hopper_kernels
from slipstream.ops.recurrent import RecurrentSteps, SsdWeights, ssd_scan, ssm

SLOTS = 12
ROWS = {
    "whole chunks": [StepRow(3, 0, 256)],
    "saves": [StepRow(1, 0, 320, {64: 6, 192: 7, 320: 8}), StepRow(2, 64, 128, {128: 9})],
    "inside chunks": [StepRow(2, 7, 1), StepRow(1, 50, 40, {64: 5}), StepRow(3, 0, 66), StepRow(4, 63, 2)],
    "seen": [StepRow(5, 99, 1), StepRow(1, 130, 70, {}, 131), StepRow(2, 63, 1, {}, 64), StepRow(3, 0, 1)],
    "many": [StepRow(slot, 5 * slot, 90 + slot) for slot in range(SLOTS - 1)],
}


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (32, 2)])
def test_a_pass_equals_the_reference(kind: str, heads: int, groups: int) -> None:
    """Views of one wide tensor, with NaN in tokens of no row and in unused slots."""
    device = torch.device("cuda")
    if not has_hopper_kernels(device):
        pytest.skip("no Hopper GPU, or another version of triton")
    torch.manual_seed(0)
    rows, dim, size = ROWS[kind], 64, 128
    total = sum(row.count for row in rows)
    num_tokens = total + 37
    steps = hand_steps(rows, device="cuda", num_tokens=num_tokens, padding=3)
    mixed = torch.randn(num_tokens, heads * dim + 2 * groups * size + 64, device=device).bfloat16()
    mixed[total:] = torch.nan
    parts = mixed.split([heads * dim, groups * size, groups * size, heads, 64 - heads], 1)[:4]
    x, b, c = (p.unflatten(1, (n, -1)) for p, n in zip(parts[:3], (heads, groups, groups), strict=True))
    weights = SsdWeights(*torch.randn(3, heads, device=device).unbind(0))
    state = torch.randn(SLOTS, heads, dim, size, device=device)
    for row in rows:
        if not row.first:
            state[row.slot] = torch.nan
    expected_state = state.clone()
    out = ssd_scan(x, parts[3], b, c, weights, state, steps)
    expected = ssm.ssd_scan(*(p.double() for p in (x, parts[3], b, c)), weights, expected_state, steps)
    assert not out[total:].any()
    distance = (out[:total] - expected[:total]).norm() / expected[:total].norm()
    assert distance < 6e-3
    assert state.isnan().equal(expected_state.isnan())
    assert (state - expected_state).nan_to_num().norm() < 6e-3 * expected_state.nan_to_num().norm()


def pass_chunks(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    scores: torch.Tensor,
    logs: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    steps: RecurrentSteps,
    out: torch.Tensor,
) -> None:
    """In the order of the kernel: rows of two and more tokens from whole chunks of scores and logs."""
    assert steps.chunks is not None and steps.chunk_starts is not None
    for row, slot in enumerate(steps.slots.tolist()):
        start, end = steps.starts[row : row + 2].tolist()
        if end - start < 2:
            continue
        held = state[slot] if steps.seen_positions[row] > 0 else torch.zeros_like(state[slot])
        for entry in range(*steps.chunk_starts[row : row + 2].tolist()):
            _, first, count, saved = steps.chunks[entry].tolist()
            index = int(steps.first_positions[row]) + first - start & STATE_CHUNK - 1
            total, offset = logs[entry].unbind(1)  # [heads, CHUNK]
            assert offset[:, :index].isposinf().all() and offset[:, index + count :].isposinf().all()
            tokens, inside = slice(first, first + count), slice(index, index + count)
            own, written, read = (part[tokens].float() for part in (x, b, c))
            written, read = (part.repeat_interleave(len(d) // part.shape[1], 1) for part in (written, read))
            seen = scores[tokens, :, inside].float().repeat_interleave(len(d) // b.shape[1], 1)  # [t, heads, s]
            decay = (total[:, inside, None] - offset[:, None, inside]).clamp_max(64.0).exp2()
            made = torch.einsum("ths,hts,shd->thd", seen, decay, own) + d[:, None] * own
            made += torch.einsum("thn,hdn,ht->thd", read, held, total[:, inside].exp2())
            out[tokens] = made.to(out.dtype)
            left = (total[:, -1:] - offset[:, inside]).exp2()
            held = held * total[:, -1].exp2()[:, None, None] + torch.einsum("hs,shd,shn->hdn", left, own, written)
            if saved >= 0:
                state[saved] = held
        state[slot] = held


def test_scores_and_logs_of_all_chunks_are_what_the_pass_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch, and rows of one token, which the portable pass computes beside the kernel."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    from slipstream.ops.recurrent import ssm_chunked

    name = "slipstream.ops.recurrent.ssm_hopper"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(pass_chunks=pass_chunks))  # type: ignore[arg-type]
    monkeypatch.setattr(ssm_chunked, "_fits_hopper", lambda x, b, c: True)
    torch.manual_seed(0)
    heads, groups, dim, size, num_tokens = 4, 2, 6, 5, 190
    rows = [StepRow(2, 7, 1), StepRow(1, 50, 90, {64: 5, 128: 6}), StepRow(3, 0, 66), StepRow(4, 63, 2, {}, 64)]
    steps = hand_steps([*rows, StepRow(7, 9, 1, {}, 10)], num_tokens=num_tokens, padding=2)
    x, b, c = (torch.randn(num_tokens, *shape) for shape in ((heads, dim), (groups, size), (groups, size)))
    dt, weights = torch.randn(num_tokens, heads), SsdWeights(*torch.randn(3, heads).unbind(0), 0.2, 1.5)
    state = torch.randn(SLOTS, heads, dim, size)
    expected_state = state.clone()
    out = torch.zeros(num_tokens, heads, dim)
    ssm_chunked.scan_chunks(x, dt, b, c, weights, state, steps, out)
    expected = ssm.ssd_scan(x, dt, b, c, weights, expected_state, steps)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-4)
