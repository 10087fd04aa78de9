"""The kernel of a single row with 4-bit weights: its integer arithmetic against float64, and the kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.elementwise import silu_and_mul
from slipstream.ops.gemm.description import Gemm
from slipstream.ops.gemm.quantized import QuantizedMatrix, dequantize, pack_4_bit, words_of
from slipstream.ops.gemm.quantized.dispatch import accepts_streaming
from slipstream.ops.gemm.quantized.matrix import MAX_INTEGER, integer_linear, quantize_segments
from slipstream.ops.gemm.table import multiply


def make(rows: int, columns: int, is_symmetric: bool = False, device: str = "cpu") -> QuantizedMatrix:
    torch.manual_seed(rows + columns)
    scale = torch.rand(rows, columns // 128).mul(0.02).add(0.005).bfloat16().float()
    zeros = None if is_symmetric else torch.randint(0, 17, scale.shape).float()
    words = words_of(scale, 8 if zeros is None else zeros).to(device)
    values = pack_4_bit(torch.randint(0, 16, (rows, columns), dtype=torch.uint8)).to(device)
    zero = 8 if zeros is None else 0
    return QuantizedMatrix(values, scale.to(device), None if zeros is None else zeros.to(device), zero, words=words)


def inputs(columns: int, device: str = "cpu") -> torch.Tensor:
    """With a group of zeros, one of tiny numbers, and numbers far from their neighbours."""
    x = torch.randn(1, columns, device=device)
    x[:, 128:256] = 0
    x[:, 256:384] *= 1e-32
    x[:, 5], x[:, -1] = 3000, -1e6
    return x.bfloat16()


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_inputs_become_bytes() -> None:
    x = inputs(1408)[0]
    high, low, scales = quantize_segments(x)
    value = scales.double().unsqueeze(1) * (256 * high.double() + low.double())
    assert ((value - x.double().view(-1, 64)).abs() <= scales.double().unsqueeze(1) * 0.501).all()
    numbers = torch.tensor([MAX_INTEGER, -MAX_INTEGER, 127, 128, -128, -129] + [0] * 58)
    high, low, scales = quantize_segments(numbers)
    assert scales.tolist() == [1.0]
    assert high[0, :6].tolist() == [127, -127, 0, 1, 0, -1] and low[0, :6].tolist() == [0, 0, 127, -128, -128, 127]


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_integer_sums_are_as_close_as_bfloat16(is_symmetric: bool) -> None:
    weight, x = make(96, 1408, is_symmetric), inputs(1408)
    exact = F.linear(x.double(), dequantize(weight, torch.float64))
    assert off(integer_linear(x, weight), exact) < 1e-4
    x[:, -1] = 0
    exact = F.linear(x.double(), dequantize(weight, torch.float64))
    assert off(integer_linear(x, weight), exact) < 1e-4
    assert integer_linear(torch.zeros_like(x), weight).tolist() == [[0.0] * 96]


def test_the_largest_sums_fit_32_bits() -> None:
    x = torch.full((1, 256), -1.0, dtype=torch.bfloat16)
    for q, zero in ((15, 0), (0, 16)):
        scale = torch.ones(32, 2)
        values = torch.full((32, 128), q * 17, dtype=torch.uint8)
        weight = QuantizedMatrix(values, scale, scale * zero, words=words_of(scale, scale * zero))
        assert off(integer_linear(x, weight), torch.full((1, 32), 256.0 * (zero - q)).double()) < 1e-5


def test_which_weights_the_kernel_takes() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from slipstream.ops.gemm.quantized.row import takes_row

    weight = make(96, 256)
    assert takes_row(weight, 1, False) and not takes_row(weight, 2, False)
    assert not takes_row(weight, 1, True)  # 48 gates: a block and a half
    assert takes_row(weight.rows(0, 64), 1, True)
    assert not takes_row(weight.rows(0, 48), 1, False)
    assert not takes_row(make(64, 384), 1, False)  # three slices
    assert not takes_row(weight._replace(words=None), 1, False)
    assert weight.words is not None
    transposed = weight.words.t().contiguous().t()
    assert not takes_row(weight._replace(words=transposed), 1, False)  # TMA copies adjacent outputs


@pytest.mark.parametrize(
    ("shape", "is_gated", "expected"),
    [
        ((6144, 4096), False, ((1, 32, 8, 2), 4, 80)),  # qkv, o, gate and up, and down of Qwen3-8B, as measured
        ((4096, 4096), False, ((1, 32, 8, 1), 4, 96)),
        ((24576, 4096), True, ((1, 64, 4, 3), 3, 80)),
        ((4096, 12288), False, ((6, 64, 4, 3), 3, 80)),
        ((6144, 1024), True, ((1, 64, 8, 1), 1, 96)),  # of Qwen3-0.6B
        ((16384, 53248), False, ((7, 64, 4, 3), 2, 80)),
    ],
)
def test_tiles(shape: tuple[int, int], is_gated: bool, expected: tuple[tuple[int, int, int, int], int, int]) -> None:
    """Programs fit the shared memory and the registers of a multiprocessor."""
    pytest.importorskip("triton", reason="triton is not installed")
    from slipstream.ops.gemm.quantized.row import INPUT_BYTES, RowTile, row_registers, row_stages, row_tile

    rows, columns = shape
    values = torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")
    weight = QuantizedMatrix(values, torch.empty(rows, columns // 128, device="meta"), None, 8)
    tile = row_tile(weight, is_gated)
    steps = -(-columns // (128 * tile.slices * tile.splits))
    assert (tile, row_stages(tile, steps), row_registers(tile)) == (RowTile(*expected[0]), *expected[1:])
    inputs = INPUT_BYTES * tile.slices * (1 << (steps - 1).bit_length())
    memory = expected[1] * tile.slices * tile.outputs * 68 + inputs + 2048
    assert tile.programs * (memory + 1024) <= 228 << 10
    assert tile.programs * (tile.slices + 4) * 32 * expected[2] <= 65536


@pytest.mark.cuda
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("columns", [256, 1280, 4864])
def test_row_kernel(columns: int, is_symmetric: bool) -> None:
    """Parts of a block and of a step at the end, a split without inputs, whole and split sums, stages used again; with
    bias, gate and alone."""
    from slipstream.ops.gemm.quantized.row import RowTile
    from slipstream.ops.gemm.quantized.streaming import streaming_gemm_low_bit

    weight, x = make(224, columns, is_symmetric, "cuda"), torch.randn(1, columns, device="cuda").bfloat16()
    if not accepts_streaming(x, weight):
        pytest.skip("made for another GPU")
    bias = torch.randn(224, device="cuda").bfloat16()
    exact = integer_linear(x, weight)
    assert off(multiply(Gemm(x, weight, bias)), exact + bias.double()) < 4e-3
    gated, activated = weight.rows(0, 192), silu_and_mul(exact[:, :192])
    assert off(multiply(Gemm(x, gated, None, silu_and_mul)), activated) < 8e-3
    for tile in (RowTile(1), RowTile(3), RowTile(4, programs=1), RowTile(1, 32, 8), RowTile(2, 32, 8, 1)):
        for _ in range(2):  # the counters of the first run are back at zero
            assert off(streaming_gemm_low_bit(x, weight, None, "", tile), exact) < 2e-3
        if tile.outputs == 64:
            assert off(streaming_gemm_low_bit(x, gated, None, "silu", tile), activated) < 8e-3
    wide = streaming_gemm_low_bit(x, gated, None, "silu", RowTile(1, 64, 8, 1))
    assert off(wide, activated) < 8e-3
    assert torch.equal(wide, streaming_gemm_low_bit(x, gated, None, "silu", RowTile(1, 64, 8, 1)))


@pytest.mark.cuda
@pytest.mark.parametrize("tile", [(1, 32, 8), (3, 64, 4)])
def test_row_kernel_with_residual_and_norm(tile: tuple[int, int, int]) -> None:
    from slipstream.ops.gemm.quantized.row import RowTile
    from slipstream.ops.gemm.quantized.streaming import streaming_gemm_low_bit_add

    first, second = make(256, 1280, device="cuda"), make(192, 256, device="cuda")
    x, residual = torch.randn(1, 1280, device="cuda").bfloat16(), torch.randn(1, 256, device="cuda").bfloat16()
    if not accepts_streaming(x, first):
        pytest.skip("made for another GPU")
    norm = torch.rand(256, device="cuda").bfloat16()
    total = F.linear(x.double(), dequantize(first, torch.float64)) + residual.double()
    found = streaming_gemm_low_bit_add(x, first, residual, norm, 1e-6, RowTile(*tile))
    assert off(found.total, total) < 4e-3
    exact = F.linear(F.rms_norm(total, (256,), norm.double(), 1e-6), dequantize(second, torch.float64))
    assert off(multiply(Gemm(found, second)), exact) < 8e-3
    assert off(multiply(Gemm(found, second, None, silu_and_mul)), silu_and_mul(exact)) < 1.6e-2


@pytest.mark.cuda
def test_inputs_of_the_row_kernel() -> None:
    """Groups of zeros and of tiny numbers, numbers far from their neighbours, and what is not a number."""
    weight, x = make(96, 1280, device="cuda"), inputs(1280, "cuda")
    if not accepts_streaming(x, weight):
        pytest.skip("made for another GPU")
    assert off(multiply(Gemm(x, weight)), F.linear(x.double(), dequantize(weight, torch.float64))) < 4e-3
    assert not multiply(Gemm(torch.zeros_like(x), weight)).any()
    for value in (torch.nan, torch.inf):
        x[0, 7] = value
        assert not multiply(Gemm(x, weight)).isfinite().any()
