"""The way of queries, keys and values from their projection to the pages, against its parts in plain torch."""

from __future__ import annotations

import pytest
import torch

from slipstream.ops.attention import apply_rope, rope_table
from slipstream.ops.elementwise import rms_norm

triton_rope = pytest.importorskip("slipstream.ops.attention.rope_triton", reason="triton is not installed")

CASES = [(1, 3, 16, 16), (5, 4, 64, 64), (3, 9, 80, 80), (2, 12, 64, 32), (66, 1, 128, 96), (67, 5, 80, 48)]


def turn(x, weight, rotary, eps=1e-6):
    return apply_rope(x if weight is None else rms_norm(x, weight, eps), rotary)


def make(tokens, heads, dim, rotary_dim, normed, device):
    torch.manual_seed(tokens)
    weight = torch.rand(heads, dim, device=device) + 0.5 if normed else None
    table = rope_table(torch.rand(rotary_dim // 2), 50, 1.0, torch.float32).to(device)
    return weight, table[torch.randint(0, 50, (tokens,), device=device)]


@pytest.mark.parametrize(("tokens", "heads", "dim", "rotary_dim"), CASES)
@pytest.mark.parametrize("normed", [True, False])
def test_norm_and_turn_equal_their_parts(tokens, heads, dim, rotary_dim, normed, kernel_device):
    weight, rotary = make(tokens, heads, dim, rotary_dim, normed, kernel_device)
    x = torch.randn(tokens, heads + 2, dim, device=kernel_device)[:, :heads]  # a view of the projection's output
    found = triton_rope.norm_rope(x, weight, 1e-6, rotary)
    torch.testing.assert_close(found, turn(x, weight, rotary), rtol=1e-5, atol=1e-5)


@pytest.mark.every_second("tokens", "normed")
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "dim", "rotary_dim"), [(1, 1, 16, 16), (5, 3, 80, 40), (66, 2, 128, 128), (131, 3, 96, 64)]
)
@pytest.mark.parametrize("normed", [True, False])
def test_keys_and_values_come_to_their_slots_and_no_others(tokens, kv_heads, dim, rotary_dim, normed, kernel_device):
    heads = 2 * kv_heads
    weight, rotary = make(tokens, heads + kv_heads, dim, rotary_dim, normed, kernel_device)
    merged = torch.randn(tokens, heads + 2 * kv_heads, dim, device=kernel_device)
    query_key, value = merged[:, : heads + kv_heads], merged[:, heads + kv_heads :]
    keys, values = (torch.randn(9, 16, kv_heads, dim, device=kernel_device) for _ in range(2))
    slots = torch.randperm(9 * 16, device=kernel_device)[:tokens]
    turned = turn(query_key, weight, rotary)
    expected = [
        pages.clone().flatten(0, 1).index_copy_(0, slots, new).view(pages.shape)
        for pages, new in ((keys, turned[:, heads:]), (values, value))
    ]
    found, kept = triton_rope.rope_and_write_cache(query_key, value, weight, 1e-6, rotary, keys, values, slots)
    assert kept is None
    torch.testing.assert_close(found, turned[:, :heads], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys, expected[0], rtol=1e-5, atol=1e-5)
    assert values.equal(expected[1])


def test_many_tokens_are_turned_from_the_last_to_the_first(kernel_device, monkeypatch):
    weight, rotary = make(83, 3, 16, 16, True, kernel_device)
    merged = torch.randn(83, 4, 16, device=kernel_device)
    slots = torch.randperm(96, device=kernel_device)[:83]
    runs = []
    for most in (83, 82):
        monkeypatch.setattr(triton_rope, "MAX_FORWARD_TOKENS", most)
        pages = [torch.zeros(6, 16, 1, 16, device=kernel_device) for _ in range(2)]
        found, _ = triton_rope.rope_and_write_cache(merged[:, :3], merged[:, 3:], weight, 1e-6, rotary, *pages, slots)
        runs.append((found, *pages))
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_eps_of_a_heads_norm_is_under_the_root(factor, eps, kernel_device):
    """Heads with a root mean square around sqrt(eps), and heads of zeros."""
    weight, rotary = make(5, 6, 16, 16, True, kernel_device)
    merged = torch.randn(5, 8, 16, device=kernel_device) * eps**0.5 * factor
    query_key, value = merged[:, :6], merged[:, 6:]
    expected = turn(query_key, weight, rotary, eps)
    torch.testing.assert_close(triton_rope.norm_rope(query_key, weight, eps, rotary), expected, rtol=1e-5, atol=1e-5)
    keys, values = (torch.zeros(1, 16, 2, 16, device=kernel_device) for _ in range(2))
    slots = torch.arange(5, device=kernel_device)
    found, _ = triton_rope.rope_and_write_cache(query_key, value, weight, eps, rotary, keys, values, slots)
    torch.testing.assert_close(found, expected[:, :4], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys[0, :5], expected[:, 4:], rtol=1e-5, atol=1e-5)
