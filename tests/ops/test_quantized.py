"""GEMMs with quantised weights against float64, at odd sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.elementwise import add_rms_norm, gelu_tanh_and_mul, silu_and_mul
from slipstream.ops.gemm.description import FUSED_ACTIVATIONS, Gemm, GemmKernel, NormBefore
from slipstream.ops.gemm.quantized import QuantizedMatrix, dequantize, dispatch, matrix, pack_4_bit, unpack_4_bit
from slipstream.ops.gemm.table import multiply, multiply_normed, takes_gate

pytest.importorskip("triton", reason="triton is not installed")

# the interpreter's own use of numpy
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore:overflow")]

MATRICES = {
    "fp8 per row": ("fp8", 0, False),
    "fp8 blocks": ("fp8", 64, False),
    "int8 per row": ("int8", 0, False),
    "int8 per row with zeros": ("int8", 0, True),
    "int8 groups of 16": ("int8", 16, False),
    "int4 groups of 128": ("int4", 128, True),
    "int4 groups of 32": ("int4", 32, True),
    "int4 symmetric": ("int4", 64, False),
    "int4 per row": ("int4", 0, False),
    "int4 with minima": ("int4 minima", 32, False),
    "int8 with minima": ("int8 minima", 32, False),
    "codebook": ("codebook", 32, False),
    "codebook, a scale per segment": ("codebook", 64, False),
}


def make(kind: str, group: int, has_zeros: bool, rows: int, columns: int, device: torch.device) -> QuantizedMatrix:
    torch.manual_seed(rows + columns)
    groups = columns // group if group else 1
    scale = torch.rand(rows, groups) * 0.02 + 0.01
    kind, _, extra = kind.partition(" ")
    zero = 8 if kind == "int4" and not has_zeros and not extra else 0
    if kind == "fp8":
        values = (torch.randn(rows, columns) * 20).to(torch.float8_e4m3fn)
    elif kind == "int8":
        values = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    else:
        values = pack_4_bit(torch.randint(0, 16, (rows, columns), dtype=torch.uint8))
    zeros = torch.randint(0, 16, scale.shape).float() if has_zeros else None
    minima = torch.randn(scale.shape).half() if extra else None
    codebook = torch.randn(16) * 4 if kind == "codebook" else None
    tables = (None if t is None else t.to(device) for t in (values, scale.half() if extra else scale, zeros))
    others = (None if t is None else t.to(device) for t in (minima, codebook))
    return QuantizedMatrix(*tables, zero, *others)


def expect(x: torch.Tensor, weight: QuantizedMatrix, bias: torch.Tensor | None, gate: bool = False) -> torch.Tensor:
    out = F.linear(x.double(), dequantize(weight, torch.float64), None if bias is None else bias.double())
    if not gate:
        return out
    first, up = out.chunk(2, 1)
    return F.silu(first) * up


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


def test_packed_numbers_come_back() -> None:
    q = torch.randint(0, 16, (3, 192), dtype=torch.uint8)
    for columns in (192, 128, 32):
        assert torch.equal(unpack_4_bit(pack_4_bit(q[:, :columns])), q[:, :columns])


def test_dequantize_is_scale_times_number_less_zero() -> None:
    q = torch.arange(64, dtype=torch.uint8).remainder(16).view(1, 64)
    scale, zeros = torch.tensor([[0.5, 2.0]]), torch.tensor([[3.0, 1.0]])
    expected = torch.cat([0.5 * (q[:, :32].double() - 3), 2.0 * (q[:, 32:].double() - 1)], 1)
    found = dequantize(QuantizedMatrix(pack_4_bit(q), scale, zeros), torch.float64)
    assert torch.equal(found, expected)
    symmetric = dequantize(QuantizedMatrix(pack_4_bit(q), scale, None, 8), torch.float64)
    assert torch.equal(symmetric[:, :32], 0.5 * (q[:, :32].double() - 8))
    minima, codebook = torch.tensor([[-1.0, 0.25]]), torch.arange(16.0) ** 2
    shifted = dequantize(QuantizedMatrix(pack_4_bit(q), scale, None, minima=minima), torch.float64)
    assert torch.equal(shifted[:, 32:], 2.0 * q[:, 32:].double() + 0.25)
    looked_up = dequantize(QuantizedMatrix(pack_4_bit(q), scale, None, codebook=codebook), torch.float64)
    assert torch.equal(looked_up[:, :32], 0.5 * q[:, :32].double() ** 2)


@pytest.mark.parametrize("name", MATRICES)
def test_whole_weight_dequantised_by_the_kernel(name: str, kernel_device: torch.device) -> None:
    from slipstream.ops.gemm.quantized.expand import dequantize as dequantize_by_kernel

    weight = make(*MATRICES[name], 35, 320 if "128" not in name else 384, kernel_device)
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantize_by_kernel(weight, dtype)
        # the compiler may fuse the product and the addition of minima
        tolerance = dict(rtol=8e-3, atol=2e-3) if dtype is torch.bfloat16 else dict(rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found, dequantize(weight, dtype), **tolerance)


@pytest.mark.parametrize("name", MATRICES)
def test_gemm_with_split_inputs(name: str, kernel_device: torch.device) -> None:
    from slipstream.ops.gemm.quantized.gemm import GemmTile, quantized_gemm

    weight = make(*MATRICES[name], 70, 384, kernel_device)
    x = torch.randn(5, 387, device=kernel_device)[:, :384]
    bias = torch.randn(70, device=kernel_device)
    tile = GemmTile(64, 16, 128, 2, 4, 2)
    for _ in range(2):  # the counters of the first run are back at zero
        check(quantized_gemm(x, weight, bias, tile=tile), expect(x, weight, bias))
    check(quantized_gemm(x, weight, None, "silu", tile), expect(x, weight, None, gate=True))


@pytest.mark.parametrize("name", ["fp8 per row", "fp8 blocks", "int4 groups of 32"])
def test_gemm_of_many_rows(name: str, kernel_device: torch.device) -> None:
    from slipstream.ops.gemm.quantized.gemm import quantized_gemm

    weight = make(*MATRICES[name], 130, 192, kernel_device)
    x = torch.randn(131, 192, device=kernel_device)
    check(quantized_gemm(x, weight), expect(x, weight, None))


@pytest.mark.parametrize(
    "kind", [("int8", 16, False), ("int8", 32, True), ("fp8", 32, False), ("int4 minima", 32, False)]
)
def test_scales_past_the_table_are_not_read(kind: tuple[str, int, bool], kernel_device: torch.device) -> None:
    """The step of the kernel is longer than a row: nothing after the last scale may enter the sums."""
    from slipstream.ops.gemm.quantized.gemm import GemmTile, quantized_gemm

    weight = make(*kind, 17, 64, kernel_device)
    tables = []
    for table in (weight.scale, weight.zeros, weight.minima):
        if table is not None:
            behind = torch.full((2 * table.numel(),), torch.nan, device=kernel_device, dtype=table.dtype)
            behind[: table.numel()] = table.flatten()
            table = behind[: table.numel()].view(table.shape)
        tables.append(table)
    weight = weight._replace(scale=tables[0], zeros=tables[1], minima=tables[2])
    x = torch.randn(3, 64, device=kernel_device)
    check(quantized_gemm(x, weight, tile=GemmTile(64, 16, 128, 1, 4, 2)), expect(x, weight, None))


@pytest.mark.parametrize("name", ["fp8 per row", "fp8 blocks"])
def test_gemm_of_fp8_inputs(name: str, kernel_device: torch.device) -> None:
    """Also with a tile that is longer than a block: scales multiply sums, never FP8 numbers."""
    from slipstream.ops.gemm.quantized.gemm import GemmTile, quantized_gemm

    weight = make(*MATRICES[name], 70, 384, kernel_device)
    q, scales = matrix.quantize_rows(torch.randn(5, 384, device=kernel_device))
    found = quantized_gemm(q, weight, None, "", GemmTile(64, 16, 128, 2, 4, 2), scales, torch.float32)
    check(found, expect(q.double() * scales, weight, None))


@pytest.mark.cuda
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("rows", [1, 5, 40, 131, 520])
def test_kernels_in_bfloat16(name: str, rows: int, kernel_device: torch.device) -> None:
    """4-bit numbers become bfloat16 by their bits, which the interpreter cannot subtract."""
    weight = make(*MATRICES[name], 272, 1024, kernel_device)
    x = torch.randn(rows, 1024, device=kernel_device).bfloat16()
    expected = expect(x, weight, None)
    assert (multiply(Gemm(x, weight)).double() - expected).norm() < 5e-3 * expected.norm()
    gated = multiply(Gemm(x, weight, None, silu_and_mul))
    expected = expect(x, weight, None, gate=True)
    assert (gated.double() - expected).norm() < 1e-2 * expected.norm()


def test_rows_are_quantised_by_their_largest_number(kernel_device: torch.device) -> None:
    from slipstream.ops.gemm.quantized.gemm import quantize_rows

    x = torch.randn(3, 100, device=kernel_device) * torch.tensor([[1.0], [100.0], [0.0]], device=kernel_device)
    given = torch.tensor([0.001], device=kernel_device)
    for scale in (None, given):
        q, scales = quantize_rows(x, scale)
        expected, expected_scales = matrix.quantize_rows(x, scale)
        torch.testing.assert_close(scales, expected_scales)
        # the interpreter loses the carry where a mantissa is rounded up to the next power of two
        is_power = torch.frexp(expected.float())[0].abs() == 0.5
        assert torch.equal(q.float()[~is_power], expected.float()[~is_power])
        assert q.float()[:2].abs().amax(1).tolist() == [448.0, 448.0] and not q.float()[2].any()


@pytest.mark.parametrize("has_residual", [False, True])
def test_norm_and_quantisation_in_one_pass(has_residual: bool, kernel_device: torch.device) -> None:
    from slipstream.ops.gemm.quantized.gemm import quantize_normed_rows

    x, residual = torch.randn(2, 3, 100, device=kernel_device)
    norm = torch.rand(100, device=kernel_device) + 0.5
    expected_total = x + residual if has_residual else x
    normed = F.rms_norm(expected_total, (100,), norm, 1e-6)
    q, scales, total = quantize_normed_rows(x, residual if has_residual else None, norm, 1e-6)
    expected, expected_scales = matrix.quantize_rows(normed)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(scales, expected_scales)
    # up to rounding to the next number, and the interpreter's lost carries
    is_power = torch.frexp(expected.float())[0].abs() == 0.5
    torch.testing.assert_close(q.float()[~is_power], expected.float()[~is_power], rtol=0.13, atol=0.01)


def test_the_pass_of_the_norm_adds_partial_sums(kernel_device: torch.device) -> None:
    from slipstream.ops.gemm.quantized.gemm import quantize_normed_rows

    parts, residual = torch.randn(3, 5, 100, device=kernel_device), torch.randn(5, 100, device=kernel_device)
    norm = torch.rand(100, device=kernel_device) + 0.5
    q, scales, total = quantize_normed_rows(parts, residual, norm, 1e-6)
    wanted_q, wanted_scales, wanted = quantize_normed_rows(parts[0] + parts[1] + parts[2], residual, norm, 1e-6)
    assert torch.equal(total, wanted) and torch.equal(scales, wanted_scales)
    assert torch.equal(q.float(), wanted_q.float())


def test_many_rows_are_quantised_from_the_last_to_the_first(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.ops.gemm.quantized import gemm

    x, norm = torch.randn(5, 100, device=kernel_device), torch.rand(100, device=kernel_device)
    runs = []
    for most in (5, 4):
        monkeypatch.setattr(gemm, "MAX_FORWARD_ROWS", most)
        q, scales, total = gemm.quantize_normed_rows(x, x, norm, 1e-6)
        runs.append((q.float(), scales, total))
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("activation", [silu_and_mul, gelu_tanh_and_mul])
def test_gated_activation_and_quantisation_in_one_pass(
    activation: Callable[[torch.Tensor], torch.Tensor], kernel_device: torch.device
) -> None:
    from slipstream.ops.gemm.quantized.gemm import quantize_gated_rows

    gate_up = torch.randn(3, 200, device=kernel_device)
    q, scales = quantize_gated_rows(gate_up, FUSED_ACTIVATIONS[activation])
    expected, expected_scales = matrix.quantize_rows(activation(gate_up))
    torch.testing.assert_close(scales, expected_scales)
    is_power = torch.frexp(expected.float())[0].abs() == 0.5
    torch.testing.assert_close(q.float()[~is_power], expected.float()[~is_power], rtol=0.13, atol=0.01)


@pytest.mark.cuda
def test_gated_fp8_gemm_is_that_of_two_passes(kernel_device: torch.device) -> None:
    weight = make("fp8", 0, False, 272, 1024, kernel_device)._replace(quantizes_inputs=True)
    gate_up = torch.randn(200, 2048, device=kernel_device).bfloat16()
    assert takes_gate(gate_up, silu_and_mul, weight) and not takes_gate(gate_up[:64], silu_and_mul, weight)
    found = multiply(Gemm(gate_up, weight, gate=silu_and_mul))
    expected = multiply(Gemm(silu_and_mul(gate_up), weight))
    assert (found - expected).float().norm() < 5e-3 * expected.float().norm()


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_normed_fp8_gemm_is_that_of_two_passes(rows: int, kernel_device: torch.device) -> None:
    weight = make("fp8", 0, False, 272, 1024, kernel_device)._replace(quantizes_inputs=True)
    x, residual = torch.randn(2, rows, 1024, device=kernel_device).bfloat16()
    norm = torch.rand(1024, device=kernel_device).bfloat16()
    before = NormBefore(norm, 1e-6, residual)
    found, total, _ = multiply_normed(Gemm(x, weight, None, silu_and_mul, norm=before))
    normed, expected_total = add_rms_norm(x, residual, norm, 1e-6)
    expected = multiply(Gemm(normed, weight, None, silu_and_mul))
    assert torch.equal(total, expected_total)
    assert (found - expected).float().norm() < 5e-3 * expected.float().norm()


@pytest.mark.cuda
def test_large_weights_are_dequantised_in_parts(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make("int4", 128, False, 272, 1024, kernel_device)
    x = torch.randn(600, 1024, device=kernel_device).bfloat16()
    bias = torch.randn(272, device=kernel_device).bfloat16()
    gemms = [Gemm(x, weight, bias), Gemm(x, weight, bias, silu_and_mul)]
    whole = list(map(multiply, gemms))
    monkeypatch.setattr(dispatch, "MAX_DEQUANTIZED", 100 * 1024)  # 100, 100 and 72 rows
    parts = list(map(multiply, gemms))
    for found, expected in zip(parts, whole, strict=True):
        assert (found - expected).float().norm() < 1e-2 * expected.float().norm()


def test_no_pdl_gemm_reads_a_weight_that_was_just_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would load the weight while the kernel before still writes it."""
    pytest.importorskip("triton", reason="triton is not installed")
    from slipstream.ops.platform.pdl import MAX_TOKENS

    calls: list[int] = []

    spy = GemmKernel("spy", lambda gemm: True, lambda gemm: calls.append(len(gemm.x)))
    monkeypatch.setattr(dispatch, "CUDA_KERNELS", (spy,))
    x, dense = torch.randn(MAX_TOKENS + 1, 8), torch.randn(6, 8)
    found = dispatch._multiply_dense(Gemm(x[1:], dense, torch.ones(6), silu_and_mul))
    assert torch.equal(found, silu_and_mul(F.linear(x[1:], dense, torch.ones(6)))) and not calls
    dispatch._multiply_dense(Gemm(x, dense, None, silu_and_mul))
    assert calls == [MAX_TOKENS + 1]


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [64, 65, 256])
def test_weights_are_dequantised_from_65_rows_on(
    rows: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = make("int4", 128, False, 272, 1024, kernel_device)
    x = torch.randn(rows, 1024, device=kernel_device).bfloat16()
    bias = torch.randn(272, device=kernel_device).bfloat16()
    calls: list[int] = []
    multiply_dense = dispatch._multiply_dense

    def spy(gemm: Gemm) -> torch.Tensor:
        calls.append(len(gemm.x))
        return multiply_dense(gemm)

    monkeypatch.setattr(dispatch, "_multiply_dense", spy)
    expected = expect(x, weight, bias)
    assert (multiply(Gemm(x, weight, bias)).double() - expected).norm() < 5e-3 * expected.norm()
    expected = expect(x, weight, None, gate=True)
    assert (multiply(Gemm(x, weight, None, silu_and_mul)).double() - expected).norm() < 1e-2 * expected.norm()
    assert calls == ([] if rows == 64 else [rows] * 2)
