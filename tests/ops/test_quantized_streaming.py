"""The kernel that streams 4-bit and FP8 weights, against float64; and the words that it reads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.elementwise import silu_and_mul
from slipstream.ops.gemm.description import AddTo, Gemm
from slipstream.ops.gemm.quantized import QuantizedMatrix, dequantize, pack_4_bit, words_of
from slipstream.ops.gemm.quantized.dispatch import (
    _medium_tile,
    accepts_streaming,
    accepts_streaming_fp8,
    chains_of,
    takes_gate,
)
from slipstream.ops.gemm.table import add_product, multiply

KINDS = ["fp8", "int4", "int4 symmetric"]


def make(kind: str, rows: int, columns: int, device: str = "cpu") -> QuantizedMatrix:
    torch.manual_seed(rows + columns)
    group = columns if kind == "fp8" else 128
    scale = torch.rand(rows, columns // group).mul(0.02).add(0.005).bfloat16().float()
    if kind == "fp8":
        values = (torch.randn(rows, columns) * 20).to(torch.float8_e4m3fn).to(device)
        return QuantizedMatrix(values, scale.to(device), None)
    zeros = None if kind == "int4 symmetric" else torch.randint(0, 17, scale.shape).float()
    words = words_of(scale, 8 if zeros is None else zeros).to(device)
    values = pack_4_bit(torch.randint(0, 16, (rows, columns), dtype=torch.uint8)).to(device)
    zero = 8 if zeros is None else 0
    return QuantizedMatrix(values, scale.to(device), None if zeros is None else zeros.to(device), zero, words=words)


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_words_hold_scales_and_zeros() -> None:
    weight = make("int4", 3, 256)
    assert weight.words is not None and weight.zeros is not None
    assert weight.words.shape == (2, 3)
    assert torch.equal((weight.words & -256).view(torch.float32), weight.scale.t())
    assert torch.equal((weight.words & 255).float(), weight.zeros.t())
    scale = torch.rand(5, 4) + 0.1
    rounded = (words_of(scale, 8) & -256).view(torch.float32)
    assert ((rounded - scale.t()).abs() <= scale.t() * 2**-16).all()
    part = weight.rows(1, 2)
    assert part.words is not None and torch.equal(part.words, weight.words[:, 1:3])


def test_slices_lie_within_groups() -> None:
    assert all(make(kind, 16, 512).has_slices for kind in KINDS)
    weight = make("int4", 16, 512)
    assert not weight._replace(words=None).has_slices
    assert not weight._replace(scale=torch.ones(16, 8)).has_slices  # groups of 64
    weight = make("fp8", 16, 512)
    assert not weight._replace(scale=torch.ones(16, 4)).has_slices  # blocks
    assert not make("fp8", 16, 480).has_slices


def test_a_gated_row_has_one_wave_of_programs() -> None:
    """Of Qwen3-8B's width: each multiprocessor quantises the row once, and its pipeline is as deep as memory allows."""
    pytest.importorskip("triton", reason="triton is not installed")
    from slipstream.ops.gemm.linear.streaming_hopper import MEMORY, ROW_TILE, row_stages
    from slipstream.ops.gemm.linear.tiles import keeps_wide_programs_busy

    assert keeps_wide_programs_busy(24576) and not keeps_wide_programs_busy(28672)  # 128 and 150 programs
    assert row_stages(ROW_TILE, 32) == 6
    assert MEMORY >= 6 * 192 * 128 + 32 * 8 * 128
    assert row_stages(ROW_TILE, 4) == 4


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_streamed_weights(kind: str, rows: int) -> None:
    """Odd numbers of outputs and of slices, whole and split sums, with bias, gate and alone."""
    from slipstream.ops.gemm.quantized.streaming import SliceTile, streaming_gemm_low_bit

    weight = make(kind, 208, 1408, "cuda")  # 11 or 22 slices
    x = torch.randn(rows, 1408, device="cuda").bfloat16()
    if not accepts_streaming(x, weight):
        pytest.skip("made for another GPU")
    bias = torch.randn(208, device="cuda").bfloat16()
    exact = F.linear(x.double(), dequantize(weight, torch.float64), bias.double())
    assert off(multiply(Gemm(x, weight, bias)), exact) < 4e-3
    gated = F.linear(x.double(), dequantize(weight, torch.float64))
    assert off(multiply(Gemm(x, weight, None, silu_and_mul)), silu_and_mul(gated)) < 8e-3
    for tile in (SliceTile(1), SliceTile(3), SliceTile(1, programs=1, groups=3), SliceTile(3, programs=1, groups=3)):
        for _ in range(2):  # the counters of the first run are back at zero
            assert off(streaming_gemm_low_bit(x, weight, bias, "", tile), exact) < 4e-3
        assert off(streaming_gemm_low_bit(x, weight, None, "silu", tile), silu_and_mul(gated)) < 8e-3
    if rows <= 8:  # the same tile: a row alone has the same bits
        assert torch.equal(multiply(Gemm(x, weight, bias))[:1], multiply(Gemm(x[:1], weight, bias)))


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 16, 40, 64])
def test_streamed_fp8_weights_and_inputs(rows: int) -> None:
    from slipstream.ops.gemm.linear.streaming_hopper import Scales, StreamingTile, streaming_gemm
    from slipstream.ops.gemm.quantized import matrix

    weight = make("fp8", 208, 1424, "cuda")._replace(quantizes_inputs=True)  # a part of a step at the end
    x = torch.randn(rows, 1424, device="cuda").bfloat16()
    if not accepts_streaming(x[:1], weight._replace(values=weight.values[:, :1408].contiguous())):
        pytest.skip("made for another GPU")
    bias = torch.randn(208, device="cuda").bfloat16()
    exact = matrix.scaled_linear(x.double(), weight, bias.double())
    assert off(multiply(Gemm(x, weight, bias)), exact) < 8e-3
    gated = silu_and_mul(matrix.scaled_linear(x.double(), weight))
    assert off(multiply(Gemm(x, weight, None, silu_and_mul)), gated) < 1.6e-2
    q, scales = matrix.quantize_rows(x)
    for _ in range(2):  # the counters of the first run are back at zero
        found = streaming_gemm(q, weight.values, bias, "", StreamingTile(3), Scales(weight.scale, scales))
        assert off(found, exact) < 8e-3


@pytest.mark.cuda
@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_is_quantised_inside_its_gemm(splits: int) -> None:
    """As a row that a pass quantises: the scale is that of the whole row, whichever part a program has."""
    from slipstream.ops.gemm.linear.streaming_hopper import (
        ROW_TILE,
        Scales,
        StreamingTile,
        streaming_gemm,
        streaming_gemm_add,
    )
    from slipstream.ops.gemm.quantized import matrix

    # parts of a step at the end
    first, second = (make("fp8", *size, "cuda")._replace(quantizes_inputs=True) for size in ((320, 5952), (208, 320)))
    x, residual = torch.randn(1, 5952, device="cuda").bfloat16(), torch.randn(1, 320, device="cuda").bfloat16()
    x[:, -1] = 30.0  # the largest, in the last split
    if chains_of(x, first) != ("streaming",):
        pytest.skip("made for another GPU")
    norm = torch.rand(320, device="cuda").bfloat16()
    total = matrix.scaled_linear(x.double(), first) + residual.double()
    for _ in range(2):  # the counters of the first run are back at zero
        assert off(add_product(Gemm(x, first, add=AddTo(residual, norm, 1e-6, "streaming"))).total, total) < 4e-3
        found = streaming_gemm_add(x, first.values, residual, norm, 1e-6, StreamingTile(splits), Scales(first.scale))
        assert off(found.total, total) < 4e-3
    exact = matrix.scaled_linear(F.rms_norm(found.total.double(), (320,), norm.double(), 1e-6), second)
    bias = torch.randn(208, device="cuda").bfloat16()
    # the row is rounded before the norm divides it, so some numbers are rounded to another FP8 number
    assert off(multiply(Gemm(found, second, bias)), exact + bias.double()) < 3e-2
    gated = multiply(Gemm(found, second, None, silu_and_mul))
    assert off(gated, silu_and_mul(exact)) < 6e-2
    wide = streaming_gemm(found, second.values, None, "silu", ROW_TILE, Scales(second.scale))
    assert off(wide, gated.double()) < 4e-3


def test_torch_multiplies_medium_rows_unless_tiles_are_one_wave() -> None:
    """By the shapes of Qwen3-8B, for which the choice was measured."""
    pytest.importorskip("triton")
    from slipstream.ops.gemm.linear.streaming_hopper import MEDIUM_TILE, NARROW_TILE, SPLIT_TILE, WIDE_TILE

    def chosen(num_out: int, num_in: int) -> list[object]:
        weight = QuantizedMatrix(torch.empty(num_out, num_in, device="meta"), torch.empty(0), None)
        return [_medium_tile(rows, weight) for rows in (64, 65, 128, 129, 256, 257)]

    assert chosen(4096, 12288) == [None, SPLIT_TILE, SPLIT_TILE, SPLIT_TILE, SPLIT_TILE, None]  # down
    assert chosen(6144, 4096) == [None, NARROW_TILE, NARROW_TILE, MEDIUM_TILE, MEDIUM_TILE, None]  # qkv
    assert chosen(24576, 4096) == [None, *[WIDE_TILE] * 4, None]  # gate and up
    assert chosen(4096, 4096) == [None] * 6  # o


@pytest.mark.parametrize("rows", [65, 96, 128, 129, 144, 150, 192, 193, 256])
def test_sums_of_wide_programs_fit_into_the_memory_of_their_weights(rows: int) -> None:
    """Three groups of warps, whose MMAs have 128 rows at most, and so their sums on the way to memory."""
    pytest.importorskip("triton")
    from slipstream.ops.gemm.linear.streaming_hopper import WIDE_TILE, row_parts, stages_for

    first, more = row_parts(WIDE_TILE, rows)
    assert first in (64, 128) and more <= 128 and rows <= first + more < rows + 64
    stages = stages_for(WIDE_TILE, first + more)
    assert stages * 128 >= 4 * first  # bytes of an output
    assert stages * (192 + first + more) * 128 <= 225 << 10  # of 227 KiB of a multiprocessor


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [65, 128, 160, 192, 256])
def test_wide_programs_of_medium_rows(rows: int) -> None:
    from slipstream.ops.gemm.linear.streaming_hopper import WIDE_TILE, Scales, streaming_gemm
    from slipstream.ops.gemm.quantized import matrix

    weight = make("fp8", 24400, 1424, "cuda")._replace(
        quantizes_inputs=True
    )  # parts of a step and of a program at the end
    x = torch.randn(rows, 1424, device="cuda").bfloat16()
    if not accepts_streaming_fp8(x, x.dtype, weight):
        pytest.skip("made for another GPU")
    assert _medium_tile(rows, weight) == WIDE_TILE
    down = make("fp8", 16, 12208, "cuda")._replace(quantizes_inputs=True)
    assert takes_gate(x, silu_and_mul, down) == (rows > 192)
    bias = torch.randn(24400, device="cuda").bfloat16()
    exact = matrix.scaled_linear(x.double(), weight, bias.double())
    whole = multiply(Gemm(x, weight, bias))
    assert off(whole, exact) < 8e-3
    gated = multiply(Gemm(x, weight, bias, silu_and_mul))
    assert off(gated, silu_and_mul(exact)) < 1.6e-2
    q, scales = matrix.quantize_rows(x[:65])
    few = streaming_gemm(q, weight.values, bias, "silu", WIDE_TILE, Scales(weight.scale, scales))
    assert torch.equal(few, gated[:65]), "other rows changed the result"


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [65, 200, 256])
def test_long_sums_of_fp8_inputs_are_split(rows: int) -> None:
    from slipstream.ops.gemm.quantized import matrix

    weight = make("fp8", 208, 8208, "cuda")._replace(quantizes_inputs=True)  # a part of a step at the end
    x = torch.randn(rows, 8208, device="cuda").bfloat16()
    if not accepts_streaming_fp8(x, x.dtype, weight):
        pytest.skip("made for another GPU")
    assert _medium_tile(rows, weight) and not _medium_tile(257, weight)
    bias = torch.randn(208, device="cuda").bfloat16()
    exact = matrix.scaled_linear(x.double(), weight, bias.double())
    for _ in range(2):  # the counters of the first run are back at zero
        assert off(multiply(Gemm(x, weight, bias)), exact) < 8e-3


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [2, 16, 65, 100, 129, 200, 256])
def test_the_pass_of_the_norm_adds_partial_sums(rows: int) -> None:
    from slipstream.ops.gemm.linear.streaming_hopper import parts_tile
    from slipstream.ops.gemm.quantized import matrix

    # parts of a step at the end
    first, second = (make("fp8", *size, "cuda")._replace(quantizes_inputs=True) for size in ((320, 5952), (208, 320)))
    gate_up, residual = (torch.randn(rows, size, device="cuda").bfloat16() for size in (2 * 5952, 320))
    norm = torch.rand(320, device="cuda").bfloat16()
    if chains_of(residual, first) != ("library",):
        pytest.skip("made for another GPU")
    assert parts_tile(rows, first.values) is not None
    for x, activation in ((gate_up, silu_and_mul), (gate_up[:, :5952], None)):
        plain = x if activation is None else silu_and_mul(x)
        add = AddTo(residual, norm, 1e-6, "library")
        found = add_product(Gemm(x, first, gate=activation, add=add))
        total = matrix.scaled_linear(plain.double(), first) + residual.double()
        assert off(found.total, total) < 4e-3
        assert found.quantized is not None
        normed = F.rms_norm(found.total.double(), (320,), norm.double(), 1e-6)
        exact = matrix.scaled_linear(normed, second)
        # the kernel's norm is of the sum before it is rounded to 16 bits, so some numbers round to another one in FP8
        assert off(multiply(Gemm(found, second)), exact) < 2e-2
        few = slice(0, 2 if rows <= 16 else 65)
        add = add._replace(residual=residual[few].contiguous())
        alone = add_product(Gemm(x[few], first, gate=activation, add=add))
        assert torch.equal(alone.total, found.total[few]), "other rows changed the result"


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 11])
def test_streamed_weights_with_residual_and_norm(rows: int) -> None:
    first, second = make("int4", 256, 1408, "cuda"), make("int4", 96, 256, "cuda")
    x, residual = torch.randn(rows, 1408, device="cuda").bfloat16(), torch.randn(rows, 256, device="cuda").bfloat16()
    if not accepts_streaming(x, first):
        pytest.skip("made for another GPU")
    norm = torch.rand(256, device="cuda").bfloat16()
    total = F.linear(x.double(), dequantize(first, torch.float64)) + residual.double()
    found = add_product(Gemm(x, first, add=AddTo(residual, norm, 1e-6, "streaming")))
    assert off(found.total, total) < 4e-3
    normed = F.rms_norm(total, (256,), norm.double(), 1e-6)
    exact = F.linear(normed, dequantize(second, torch.float64))
    assert off(multiply(Gemm(found, second)), exact) < 8e-3
    gated = multiply(Gemm(found, second, None, silu_and_mul))
    assert off(gated, silu_and_mul(exact)) < 1.6e-2


def test_sixteen_rows_of_a_gated_weight_have_one_wave_of_programs() -> None:
    """Of Qwen3-8B's width: 128 programs of three blocks, where 384 of one block are a wave and a half."""
    pytest.importorskip("triton", reason="triton is not installed")
    from slipstream.ops.gemm.quantized.streaming import SliceTile, slice_registers, slice_stages, slice_tile

    values = torch.empty(24576, 2048, dtype=torch.uint8, device="meta")
    weight = QuantizedMatrix(values, torch.empty(24576, 32, device="meta"), None, 8)
    tile = slice_tile(weight, 16, True)
    assert tile == SliceTile(1, programs=1, groups=3)
    assert slice_stages(tile, 16, True) == 3 and slice_registers(tile) == 128
    assert slice_tile(weight, 8, True) == SliceTile(1, programs=3)  # whose registers suffice
