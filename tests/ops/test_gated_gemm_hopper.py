"""Products of very many rows with the activation after them, against exact ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.elementwise import relu2, silu_and_mul
from slipstream.ops.gemm.description import Gemm
from slipstream.ops.gemm.table import multiply


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
    gated_gemm = hopper(x, weight)
    exact = act(gate, F.linear(x.double(), weight.double()))
    allowed = (act(gate, F.linear(x, weight).float()).bfloat16().double() - exact).abs()
    found = (gated_gemm(x, weight, gate).double() - exact).abs()
    assert not found.isnan().any()
    assert found.mean() <= allowed.mean() and found.max() <= 1.5 * allowed.max()


def hopper(x: torch.Tensor, weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]:
    from slipstream.ops.gemm.linear.tiles import supports_tma

    if not supports_tma(x, weight):
        pytest.skip("made for Hopper")
    from slipstream.ops.gemm.linear.gated_gemm_hopper import gated_gemm

    return gated_gemm


def act(gate: str, x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, 1)
    return (F.silu(a) if gate == "silu" else F.gelu(a, approximate="tanh")) * b


@pytest.mark.cuda
def test_it_can_be_captured() -> None:
    x, weight = (torch.randn(1024, 512, device="cuda").bfloat16() for _ in range(2))
    gated_gemm = hopper(x, weight)
    gated_gemm(x, weight, "silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_gemm(x, weight, "silu")
    x.copy_(torch.randn(1024, 512, device="cuda"))
    graph.replay()
    torch.testing.assert_close(out, act("silu", F.linear(x, weight).float()).bfloat16(), rtol=2e-2, atol=2.0)


@pytest.mark.cuda
def test_very_many_rows_go_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = (torch.randn(size, 512, device="cuda").bfloat16() for size in (1500, 1552))
    hopper(x, weight)
    from slipstream.ops.gemm.linear import gated_gemm_hopper

    rows: list[int] = []
    make = gated_gemm_hopper.gated_gemm
    monkeypatch.setattr(gated_gemm_hopper, "gated_gemm", lambda x, *args: (rows.append(len(x)), make(x, *args))[1])
    for count in (1023, 1024, 1500):
        found = multiply(Gemm(x[:count], weight, None, silu_and_mul))
        torch.testing.assert_close(found, silu_and_mul(F.linear(x[:count], weight)), rtol=5e-2, atol=8.0)
    multiply(Gemm(x, weight[:1500], None, silu_and_mul))  # results of 1,500 bytes a row
    multiply(Gemm(x, weight, weight.new_zeros(1552), silu_and_mul))
    assert rows == [1024, 1500]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "rows, num_out, num_in", [(1025, 768, 520), (8191, 4096, 1024), (1, 256, 64), (1030, 1536, 384)]
)
def test_gelu_is_as_close_as_the_library_with_gelu_after_it(
    rows: int, num_out: int, num_in: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, num_in, device="cuda"), torch.randn(num_out, num_in, device="cuda") / num_in**0.5
    x, weight, bias = x.to(dtype), weight.to(dtype), (2 * torch.randn(num_out, device="cuda")).to(dtype)
    hopper(x, weight)
    from slipstream.ops.gemm.linear.gated_gemm_hopper import gelu_gemm

    exact = F.gelu(F.linear(x.double(), weight.double(), bias.double()))
    allowed = (F.gelu(F.linear(x, weight, bias)).double() - exact).abs()
    found = (gelu_gemm(x, weight, bias).double() - exact).abs()
    assert not found.isnan().any()
    assert found.mean() <= allowed.mean() and found.max() <= 1.5 * allowed.max()


@pytest.mark.cuda
def test_gelu_of_very_many_rows_goes_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = (torch.randn(*size, device="cuda").half() for size in ((1500, 512), (768, 512), (768,)))
    hopper(x, weight)
    from slipstream.ops.gemm.linear import gated_gemm_hopper

    rows: list[int] = []
    make = gated_gemm_hopper.gelu_gemm
    monkeypatch.setattr(gated_gemm_hopper, "gelu_gemm", lambda x, *args: (rows.append(len(x)), make(x, *args))[1])
    for count in (1023, 1024, 1500):
        found = multiply(Gemm(x[:count], weight, bias, F.gelu))
        torch.testing.assert_close(found, F.gelu(F.linear(x[:count], weight, bias)), rtol=5e-3, atol=0.1)
    multiply(Gemm(x, weight[:640], bias[:640], F.gelu))  # two halves and a half of tiles
    multiply(Gemm(x, weight, None, F.gelu))
    multiply(Gemm(x, weight, bias, torch.relu))
    assert rows == [1024, 1500]


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "num_out", "num_in"), [(1025, 768, 520), (8191, 21504, 4096), (1, 256, 64)])
def test_relu2_is_as_close_as_the_library_with_relu2_after_it(rows: int, num_out: int, num_in: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, num_in, device="cuda"), torch.randn(num_out, num_in, device="cuda") / num_in**0.5
    x, weight = x.bfloat16(), weight.bfloat16()
    hopper(x, weight)
    from slipstream.ops.gemm.linear.gated_gemm_hopper import relu2_gemm

    exact = F.linear(x.double(), weight.double()).clamp_(min=0).square_()
    allowed = (relu2(F.linear(x, weight)).double() - exact).abs()
    found = (relu2_gemm(x, weight).double() - exact).abs()
    assert not found.isnan().any()
    assert found.mean() <= allowed.mean() and found.max() <= 1.5 * allowed.max()


@pytest.mark.cuda
def test_relu2_of_very_many_rows_goes_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = (torch.randn(*size, device="cuda").bfloat16() for size in ((1500, 512), (768, 512)))
    hopper(x, weight)
    from slipstream.ops.gemm.linear import gated_gemm_hopper

    rows: list[int] = []
    make = gated_gemm_hopper.relu2_gemm
    monkeypatch.setattr(gated_gemm_hopper, "relu2_gemm", lambda x, *args: (rows.append(len(x)), make(x, *args))[1])
    for count in (1023, 1024, 1500):
        found = multiply(Gemm(x[:count], weight, None, relu2))
        torch.testing.assert_close(found, relu2(F.linear(x[:count], weight)), rtol=5e-2, atol=8.0)
    multiply(Gemm(x, weight[:640], None, relu2))
    multiply(Gemm(x, weight, weight.new_zeros(768), relu2))
    assert rows == [1024, 1500]


def test_gelu_by_the_kernels_formula_is_gelu() -> None:
    """The arithmetic of `_gelu`, in float32."""
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.tensor([0.0, -0.0, 1e-20, -1e-20, 300.0, -300.0])])
    size = x.abs()
    t = 1 / (1 + 0.3275911 * 0.7071067811865476 * size)
    tail = 0.5 * 1.421413741 + t * (0.5 * -1.453152027 + t * (0.5 * 1.061405429))
    tail = t * (0.5 * 0.254829592 + t * (0.5 * -0.284496736 + t * tail))
    found = x.clamp(min=0) - size * tail * torch.exp2(x * x * (-0.5 * 1.4426950408889634))
    assert (found.double() - F.gelu(x.double())).abs().max() < 1e-6


def test_without_a_kernel_the_activation_follows_the_product() -> None:
    x, weight, bias = torch.randn(1100, 16), torch.randn(256, 16), torch.randn(256)
    for own in (bias, None):
        torch.testing.assert_close(multiply(Gemm(x, weight, own, F.gelu)), F.gelu(F.linear(x, weight, own)))
