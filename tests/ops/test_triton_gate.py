"""Gates and ups of very many rows with their activation, against exact ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.activation import silu_and_mul
from slipstream.ops.linear import gated_linear


@pytest.mark.cuda
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    "rows, num_out, num_in", [(1025, 776, 520), (8191, 3072, 1024), (1, 96, 64), (1030, 136, 72), (2048, 12288, 4096)]
)
def test_it_is_as_close_as_the_library_with_an_activation_after_it(
    rows: int, num_out: int, num_in: int, gate: str
) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, num_in, device="cuda"), torch.randn(2 * num_out, num_in, device="cuda") / num_in**0.5
    x, weight = x.bfloat16(), weight.bfloat16()
    gate_many = hopper(x, weight)
    exact = act(gate, F.linear(x.double(), weight.double()))
    allowed = (act(gate, F.linear(x, weight).float()).bfloat16().double() - exact).abs()
    found = (gate_many(x, weight, gate).double() - exact).abs()
    assert not found.isnan().any()
    assert found.mean() <= allowed.mean() and found.max() <= 1.5 * allowed.max()


def hopper(x: torch.Tensor, weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]:
    from slipstream.ops.linear.triton import can_stream

    if not can_stream(x, weight):
        pytest.skip("made for Hopper")
    from slipstream.ops.linear.triton.gate import gate_many

    return gate_many


def act(gate: str, x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, 1)
    return (F.silu(a) if gate == "silu" else F.gelu(a, approximate="tanh")) * b


@pytest.mark.cuda
def test_it_can_be_captured() -> None:
    x, weight = (torch.randn(1024, 512, device="cuda").bfloat16() for _ in range(2))
    gate_many = hopper(x, weight)
    gate_many(x, weight, "silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gate_many(x, weight, "silu")
    x.copy_(torch.randn(1024, 512, device="cuda"))
    graph.replay()
    torch.testing.assert_close(out, act("silu", F.linear(x, weight).float()).bfloat16(), rtol=2e-2, atol=2.0)


@pytest.mark.cuda
def test_very_many_rows_go_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = (torch.randn(size, 512, device="cuda").bfloat16() for size in (1500, 1552))
    hopper(x, weight)
    from slipstream.ops.linear.triton import gate

    rows: list[int] = []
    make = gate.gate_many
    monkeypatch.setattr(gate, "gate_many", lambda x, *args: (rows.append(len(x)), make(x, *args))[1])
    for count in (1023, 1024, 1500):
        found = gated_linear(x[:count], weight, None, silu_and_mul)
        torch.testing.assert_close(found, silu_and_mul(F.linear(x[:count], weight)), rtol=5e-2, atol=8.0)
    gated_linear(x, weight[:1500], None, silu_and_mul)  # results of 1,500 bytes a row
    gated_linear(x, weight, weight.new_zeros(1552), silu_and_mul)
    assert rows == [1024, 1500]
