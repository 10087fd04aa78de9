"""The fused norm and rotary turn against its parts in plain torch."""

from __future__ import annotations

import pytest
import torch

from slipstream.ops.norm import rms_norm
from slipstream.ops.rope import apply_rope, rope_table

triton_rope = pytest.importorskip("slipstream.ops.rope.triton", reason="triton is not installed")

CASES = [(1, 3, 16, 16), (5, 4, 64, 64), (3, 9, 80, 80), (2, 12, 64, 32), (7, 1, 128, 96)]


@pytest.mark.parametrize(("tokens", "heads", "dim", "rotary"), CASES)
@pytest.mark.parametrize("normed", [True, False])
def test_norm_and_turn_equal_their_parts(tokens, heads, dim, rotary, normed, kernel_device):
    torch.manual_seed(tokens)
    wide = torch.randn(tokens, heads + 2, dim, device=kernel_device)
    x = wide[:, :heads]  # a view, as queries and keys are of the projection's output
    weight = torch.rand(heads, dim, device=kernel_device) + 0.5 if normed else None
    table = rope_table(torch.rand(rotary // 2), 50, 1.0, torch.float32).to(kernel_device)
    rows = table[torch.randint(0, 50, (tokens,), device=kernel_device)]
    found = triton_rope.norm_rope(x, weight, 1e-6, rows)
    expected = apply_rope(x if weight is None else rms_norm(x, weight, 1e-6), rows)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
