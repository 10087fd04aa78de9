"""The reference ops against slow, obvious code."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.ops.attention import apply_rope, attend_chunk, attend_pages, attend_single, rope_table, write_cache
from slipstream.ops.elementwise import add_rms_norm, gelu_tanh_and_mul, rms_norm, silu_and_mul, sum_rms_norm

SIZES = [1, 63, 100, 129]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rms_norm_is_x_over_its_root_mean_square(size: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, size, dtype=dtype) * 3, torch.randn(size, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype is dtype
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_rms_norm_in_bfloat16_sums_in_float32() -> None:
    # 4096 equal squares: a bfloat16 sum would stop growing at 256
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    assert rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 0.0).eq(1).all()


def test_rms_norm_takes_a_weight_for_each_head() -> None:
    x, weight = torch.randn(5, 3, 8), torch.randn(3, 8)
    out = rms_norm(x, weight, 1e-5)
    for head in range(3):
        torch.testing.assert_close(out[:, head], rms_norm(x[:, head], weight[head], 1e-5))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).eq(0).all()


def test_add_rms_norm_returns_the_sum_and_leaves_its_inputs() -> None:
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert total.equal(before[0] + before[1])
    assert normed.equal(rms_norm(total, weight, 1e-6))
    assert x.equal(before[0]) and residual.equal(before[1])


@pytest.mark.parametrize("rotary", [8, 6, 2])
def test_rope_turns_pairs_half_a_head_apart(rotary: int) -> None:
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    frequencies = torch.rand(rotary // 2)
    positions = torch.tensor([0, 1, 7, 3, 3])
    table = rope_table(frequencies, 9, 1.5, torch.float64)
    out = apply_rope(x, table.index_select(0, positions))
    half = rotary // 2
    for t in range(5):
        for i in range(half):
            angle = float(positions[t].float() * frequencies[i])
            pair = torch.complex(x[t, :, i], x[t, :, i + half]) * complex(math.cos(angle), math.sin(angle)) * 1.5
            torch.testing.assert_close(out[t, :, i], pair.real, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(out[t, :, i + half], pair.imag, rtol=1e-6, atol=1e-6)
    assert out[..., rotary:].equal(x[..., rotary:])


def test_rope_takes_a_slice_of_a_merged_projection() -> None:
    merged = torch.randn(4, 5, 8)
    rows = rope_table(torch.rand(4), 4, 1.0, torch.float32)
    assert apply_rope(merged[:, :3], rows).equal(apply_rope(merged[:, :3].contiguous(), rows))


@pytest.mark.parametrize("size", SIZES)
def test_gated_activations(size: int) -> None:
    gate, up = torch.randn(3, size), torch.randn(3, size)
    merged = torch.cat((gate, up), -1)
    torch.testing.assert_close(silu_and_mul(merged), gate * torch.sigmoid(gate) * up)
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    torch.testing.assert_close(gelu_tanh_and_mul(merged), 0.5 * gate * (1 + tanh) * up)
    assert merged.equal(torch.cat((gate, up), -1))


def test_cache_write_touches_its_slots_alone() -> None:
    keys, values = torch.zeros(5, 4, 2, 3), torch.zeros(5, 4, 2, 3)
    merged = torch.randn(3, 4, 3)  # keys and values as slices of one product
    slots = torch.tensor([17, 4, 11])
    write_cache(merged[:, :2], merged[:, 2:], keys, values, slots)
    for t, slot in enumerate([17, 4, 11]):
        assert keys[slot // 4, slot % 4].equal(merged[t, :2])
        assert values[slot // 4, slot % 4].equal(merged[t, 2:])
    assert keys.ne(0).any(-1).any(-1).sum() == 3


def attention_by_hand(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One query [heads, dim] over [keys, kv heads, dim]."""
    share = query.shape[0] // keys.shape[1]
    out = []
    for head in range(query.shape[0]):
        weights = torch.softmax(keys[:, head // share] @ query[head] * scale, 0)
        out.append(weights @ values[:, head // share])
    return torch.stack(out)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_reads_no_slots_but_those_it_is_given(heads: tuple[int, int], dtype: torch.dtype) -> None:
    num_heads, num_kv_heads = heads
    keys, values = torch.full((2, 9, 4, num_kv_heads, 8), torch.nan, dtype=dtype)
    pages = torch.tensor([[3, 8, 1], [5, 2, 0]])
    lengths = [10, 5]
    for row, length in enumerate(lengths):
        for position in range(length):
            page = pages[row, position // 4]
            keys[page, position % 4] = torch.randn(num_kv_heads, 8, dtype=dtype)
            values[page, position % 4] = torch.randn(num_kv_heads, 8, dtype=dtype)
    query = torch.randn(2, num_heads, 8, dtype=dtype)
    mask = torch.zeros(2, 1, 1, 12, dtype=dtype)
    for row, length in enumerate(lengths):
        mask[row, ..., length:] = -torch.inf
    slots = (pages.unsqueeze(2) * 4 + torch.arange(4)).flatten(1)
    for row, length in enumerate(lengths):
        slots[row, length:] = slots[row, 0]
    out = attend_single(query, keys, values, slots.flatten(), mask, 0.3)
    for row, length in enumerate(lengths):
        mine = keys[pages[row]].flatten(0, 1)[:length], values[pages[row]].flatten(0, 1)[:length]
        torch.testing.assert_close(out[row], attention_by_hand(query[row], *mine, 0.3))

    # the same row as a chunk: its last two tokens
    chunk_mask = torch.zeros(2, 12, dtype=dtype)
    chunk_mask[0, 9:] = chunk_mask[1, 10:] = -torch.inf
    chunk = attend_pages(query, keys, values, slots[0], chunk_mask, 0.3)
    for token, length in enumerate([9, 10]):
        mine = keys[pages[0]].flatten(0, 1)[:length], values[pages[0]].flatten(0, 1)[:length]
        torch.testing.assert_close(chunk[token], attention_by_hand(query[token], *mine, 0.3))


def test_chunk_from_the_start_is_causal() -> None:
    query, key, value = torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    out = attend_chunk(query, key, value, 0.3)
    for t in range(7):
        expected = attention_by_hand(query[t], key[: t + 1], value[: t + 1], 0.3)
        torch.testing.assert_close(out[t], expected, rtol=1e-4, atol=1e-5)


def test_sum_rms_norm_is_the_norm_of_all_parts_and_the_residual():
    parts, residual, weight = torch.randn(3, 4, 100), torch.randn(4, 100), torch.randn(100)
    out, total = sum_rms_norm(parts, residual, weight, 1e-5)
    expected, sums = add_rms_norm(parts[0] + parts[1] + parts[2], residual, weight, 1e-5)
    torch.testing.assert_close(total, sums)
    torch.testing.assert_close(out, expected)
    assert sum_rms_norm(parts, residual.bfloat16(), weight.bfloat16(), 1e-5)[1].dtype is torch.bfloat16
