"""FP8 GEMMs of many rows that add to a residual."""

from __future__ import annotations

import pytest
import torch

from slipstream.ops.gemm.linear.cublaslt import add_fp8_to, adds_fp8
from slipstream.ops.gemm.quantized import QuantizedMatrix, matrix


def make(rows: int, num_out: int, num_in: int, device: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows)
    x = torch.randn(rows, num_in, device=device).bfloat16()
    weight = (torch.randn(num_out, num_in, device=device) * 20).to(torch.float8_e4m3fn)
    scale = torch.rand(num_out, 1, device=device) * 0.02 + 0.005
    return torch.randn(rows, num_out, device=device).bfloat16(), x, weight, scale


def test_nothing_is_added_without_cuda() -> None:
    residual, x, weight, scale = make(300, 32, 64, "cpu")
    before = residual.clone()
    assert not adds_fp8(x, 32, 64)
    assert torch.equal(residual, before)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [257, 1000, 4096])
def test_the_gemm_is_added_to_the_residual_in_place(rows: int) -> None:
    residual, x, weight, scale = make(rows, 512, 1424, "cuda")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for another GPU")
    assert adds_fp8(x, 512, 1424) and not adds_fp8(x[:256], 512, 1424)
    exact = residual.double() + matrix.scaled_linear(x.double(), QuantizedMatrix(weight, scale, None))
    q, scales = matrix.quantize_rows(x)
    before = residual.clone()
    assert not add_fp8_to(residual[:200], q[:200], scales[:200], weight, scale)
    odd = torch.empty(rows * 512 + 8, device="cuda", dtype=torch.bfloat16)[8:].view(rows, 512)
    assert not add_fp8_to(odd, q, scales, weight, scale), "cuBLASLt assumes aligned matrices"
    assert torch.equal(residual, before)
    assert add_fp8_to(residual, q, scales, weight, scale)
    assert (residual.double() - exact).norm() < 4e-3 * exact.norm()


@pytest.mark.cuda
def test_the_scales_are_those_of_the_call() -> None:
    """Calls of one shape share an operation, of which addresses of scales are attributes; also in a captured graph."""
    residual, x, weight, scale = make(300, 512, 1024, "cuda")
    if not adds_fp8(x, 512, 1024):
        pytest.skip("made for another GPU")
    q, scales = matrix.quantize_rows(x)
    one, other = torch.zeros_like(residual), torch.zeros_like(residual)
    add_fp8_to(one, q, scales, weight, scale)  # before the capture: cuBLASLt loads its kernel
    one.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert add_fp8_to(one, q, scales, weight, scale)
        assert add_fp8_to(other, q, 2 * scales, weight, scale)
    graph.replay()
    torch.testing.assert_close(other, 2 * one)
