"""Products of few rows, and what is done inside them, against plain torch."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.elementwise import gelu_and_mul, silu_and_mul
from slipstream.ops.gemm.description import AddTo, Gemm, NormBefore
from slipstream.ops.gemm.linear.tiles import supports_tma
from slipstream.ops.gemm.table import add_product, choose_chain, multiply, multiply_normed

kernels = pytest.importorskip("slipstream.ops.gemm.linear.triton", reason="triton is not installed")
persistent = importlib.import_module("slipstream.ops.gemm.linear.gemv")
norm_kernels = pytest.importorskip("slipstream.ops.elementwise.norm_triton", reason="triton is not installed")

# the interpreter's own use of numpy
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore:overflow")]

SHAPES = [(16, 6), (63, 100), (1025, 34)]
FEW = kernels.GemvTile(outputs=16, inputs=256, warps=4)


def make(rows, num_in, num_out, biased, device):
    torch.manual_seed(num_in)
    x = torch.randn(rows, num_in + 3, device=device)[:, :num_in]
    weight = torch.randn(num_out, num_in, device=device)
    return x, weight, torch.randn(num_out, device=device) if biased else None


def make_norm(rows, num_in, has_residual, device):
    factor = torch.rand(num_in, device=device) + 0.5
    if not has_residual:
        return kernels.Norm(factor, 1e-5, None, None)
    residual = torch.randn(rows, num_in + 1, device=device)[:, :num_in]
    return kernels.Norm(factor, 1e-5, residual, torch.full((rows, num_in), torch.nan, device=device))


def expect(x, weight, bias, gate="", norm=None):
    x = x.double()
    if norm is not None:
        x = x if norm.residual is None else x + norm.residual.double()
        x = F.rms_norm(x, x.shape[1:], norm.weight.double(), norm.eps)
    out = F.linear(x, weight.double(), None if bias is None else bias.double())
    if not gate:
        return out
    first, up = out.chunk(2, 1)
    return (F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")) * up


def check(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


def check_norm(norm, x):
    if norm.residual is not None:
        check(norm.total, x.double() + norm.residual.double())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
@pytest.mark.parametrize("gate", ["", "silu", "gelu_tanh"])
def test_few_rows_equal_the_product(rows, num_in, num_out, gate, kernel_device):
    x, weight, bias = make(rows, num_in, num_out, rows > 1, kernel_device)
    check(kernels.gemv(x, weight, bias, gate=gate, tile=FEW), expect(x, weight, bias, gate))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
@pytest.mark.parametrize("has_residual", [True, False])
def test_a_norm_before_few_rows(rows, num_in, num_out, has_residual, kernel_device):
    x, weight, bias = make(rows, num_in, num_out, True, kernel_device)
    norm = make_norm(rows, num_in, has_residual, kernel_device)
    check(kernels.gemv(x, weight, bias, norm, "silu", FEW), expect(x, weight, bias, "silu", norm))
    check_norm(norm, x)


@pytest.mark.parametrize("num_out", [3, 34, 100])  # less than a block for each program, some, and several
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_sum", [False, True], ids=["norm", "norm of a sum"])
def test_a_program_with_several_blocks_of_one_row(num_out, gate, has_bias, is_sum, kernel_device, monkeypatch):
    monkeypatch.setattr(persistent, "multiprocessors", lambda device: 2)
    x, weight, bias = make(1, 63, 2 * num_out if gate else num_out, has_bias, kernel_device)
    before = make_norm(1, 63, is_sum, kernel_device)
    tile = persistent.PersistentTile(outputs=4, warps=4, programs=3)
    out = persistent.persistent_gemv(x, weight, bias, before, gate, tile)
    check(out, expect(x, weight, bias, gate, before))
    check_norm(before, x)


@pytest.mark.parametrize(
    ("num_rows", "num_in", "gate", "expected"),
    [
        (12352, 2048, "", (2, 4, 6)),  # the input projections of Qwen3-Next
        (9216, 2048, "", (4, 4, 4)),  # its qkv and gate
        (5120, 2048, "", (2, 4, 5)),  # qkv of Qwen3-30B-A3B
        (128, 2048, "", None),  # a block is less than each program could have
        (151936, 2048, "", None),  # too many blocks of a program
        (12288, 2048, "silu", (4, 4, 4)),
        (5120, 2048, "silu", None),
        (6144, 1024, "silu", (4, 4, 6)),  # gate and up of Qwen3-0.6B
        (4096, 1024, "", None),
        (5120, 4096, "", None),
    ],
)
def test_weights_whose_programs_have_several_blocks(num_rows, num_in, gate, expected, monkeypatch):
    monkeypatch.setattr(persistent, "multiprocessors", lambda device: 132)
    assert persistent.persistent_tile(num_rows, num_in, gate, torch.device("cpu")) == expected


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("has_residual", [True, False])
def test_the_norm_before_few_rows_is_stored(rows, has_residual, kernel_device):
    """More than two rows have programs of their own."""
    x, weight, bias = make(rows, 200, 34, True, kernel_device)
    norm = make_norm(rows, 200, has_residual, kernel_device)
    norm = norm._replace(normed=torch.full((rows, 200), torch.nan, device=kernel_device))
    check(kernels.gemv(x, weight, bias, norm, "", FEW), expect(x, weight, bias, "", norm))
    check_norm(norm, x)
    total = x.double() if norm.residual is None else x.double() + norm.residual.double()
    check(norm.normed, F.rms_norm(total, (200,), norm.weight.double(), norm.eps))


@pytest.mark.parametrize("rows", [1, 5, 16, 17])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_product_with_the_norm_that_it_is_of(rows, has_residual, device):
    x = torch.randn(rows, 2048, device=device).bfloat16()
    weight = (torch.randn(64, 2048, device=device) / 45).bfloat16()
    residual = torch.randn_like(x) if has_residual else None
    factor = (torch.rand(2048, device=device) + 0.5).bfloat16()
    norm = NormBefore(factor, 1e-6, residual, is_kept=True)
    out, total, normed = multiply_normed(Gemm(x, weight, norm=norm))
    assert total.equal(x if residual is None else x + residual)
    expected = F.rms_norm(total.double(), (2048,), factor.double(), 1e-6)
    torch.testing.assert_close(normed.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out.double(), expected @ weight.double().t(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("has_residual", [True, False])
def test_eps_of_a_norm_before_few_rows_is_under_the_root(factor, has_residual, kernel_device):
    """Rows with a root mean square around sqrt(eps), and rows of zeros."""
    x, weight, bias = make(2, 63, 40, True, kernel_device)
    norm = make_norm(2, 63, has_residual, kernel_device)
    x = x / x.square().mean(1, keepdim=True).sqrt() * norm.eps**0.5 * factor
    if has_residual:
        norm.residual.copy_(x * 0.5)
        x = x * 0.5
    check(kernels.gemv(x, weight, bias, norm, "silu", FEW), expect(x, weight, bias, "silu", norm))


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize(("num_in", "num_out"), [*SHAPES, (256, 40)])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("splits", [1, 3])
def test_some_rows_equal_the_product(rows, num_in, num_out, gate, splits, kernel_device):
    x, weight, bias = make(rows, num_in, num_out, rows > 5, kernel_device)
    tile = kernels.SkinnyTile(outputs=16, inputs=64, splits=splits, warps=4, stages=2)
    for _ in range(2):  # the counters of splits are as they were
        check(kernels.skinny_mma(x, weight, bias, gate, tile), expect(x, weight, bias, gate))


@pytest.mark.parametrize("rows", [3, 16, 32, 33, 64, 65, 96, 128, 129, 256])
@pytest.mark.parametrize(
    ("num_out", "num_in"),
    [(4096, 1024), (1024, 3072), (24576, 4096), (4096, 12288), (576, 1536), (16, 2048), (12352, 2048), (6144, 4096)]
    + [(151936, 4096), (151936, 1024)],
)
@pytest.mark.parametrize("gate", ["", "silu"])
def test_tiles_for_hopper_fit(rows, num_out, num_in, gate):
    hopper = pytest.importorskip("slipstream.ops.gemm.linear.streaming_hopper", reason="a triton without Gluon")
    for tile in {find(rows, num_out, num_in, gate) for find in (hopper.streaming_tile, hopper.plain_tile)}:
        check_tile(hopper, tile, rows, num_out, num_in)
    tile = hopper.plain_tile(rows, num_out, num_in, gate)
    is_wide = num_out in (24576, 151936) and num_in == 4096 and 32 < rows <= (128 if gate else 96)
    is_wide |= not gate and (num_out, num_in) == (151936, 4096) and rows <= 16
    assert tile.groups == (3 if is_wide else 1)
    assert tile.programs == (2 if not gate and num_out == 12352 and rows <= 32 else 1)
    assert tile.outputs == 48 if not gate and num_out == 6144 and 33 <= rows <= 65 else tile.outputs in (64, 128)


def check_tile(hopper, tile, rows, num_out, num_in):
    first, more = hopper.row_parts(tile, rows)
    of_program, outputs = first + more, tile.outputs * tile.groups
    stages = hopper.stages_for(tile, of_program)
    assert stages >= 2 and stages * (outputs + of_program) * tile.copies * 128 * tile.programs <= 227 << 10
    # sums lie where x was, or where the weights of the block were
    assert stages * tile.copies * 128 >= (tile.outputs if tile.groups == 1 else first) * 4
    blocks, row_blocks = -(-num_out // outputs) * tile.groups, -(-rows // of_program)
    assert tile.splits * tile.copies * 64 <= num_in  # none has nothing to do
    assert tile.splits == 1 or blocks * row_blocks <= len(hopper.counters(torch.empty(num_out, 1)))
    assert tile.splits == 1 or blocks * row_blocks * tile.splits <= 2 * hopper.MULTIPROCESSORS


def test_counters_are_a_weights_own_and_there_before_a_graph_is_captured(monkeypatch):
    around = importlib.import_module("slipstream.ops.gemm.linear.epilogue")
    monkeypatch.setattr(around, "_zeros", {})
    monkeypatch.setattr(around, "_CHUNK", 256)
    weights = [torch.empty(num_out, 1) for num_out in (100, 1000, 16)]
    first = around.counters(weights[0])
    monkeypatch.setattr(around, "_is_capturing", lambda device: True)
    second = around.counters(weights[1])  # met by a graph first: from the same memory, which a replay need not clear
    assert second.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert around.counters(weights[0]) is first and around.counters(weights[1]) is second
    assert (len(first), len(second)) == (8, 64)
    assert second.data_ptr() - first.data_ptr() == 4 * around._PER_CACHE_LINE  # each has a line of its own
    assert not first.any() and not second.any()
    huge = torch.empty(16 * 256, 1)
    own = around.counters(huge)  # no room: the graph's own, and the next one asks again
    assert around.counters(huge) is not own and len(own) == 257 and not own.any()
    monkeypatch.setattr(around, "_is_capturing", lambda device: False)
    kept = around.counters(huge)
    assert around.counters(huge) is kept and not kept.any()
    assert around.counters(weights[2]) is not first


CUDA_SHAPES = [(1024, 4096), (2048, 1024), (3072, 1024), (4096, 6144), (12288, 4096), (1024, 151_936)]


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 64, 65])
@pytest.mark.parametrize(("num_in", "num_out"), CUDA_SHAPES)
def test_real_sizes_in_bfloat16(rows, num_in, num_out):
    half = {"device": "cuda", "dtype": torch.bfloat16}
    x, residual = torch.randn(rows, num_in, **half), torch.randn(rows, num_in, **half)
    weight, factor = torch.randn(num_out, num_in, **half) * 0.02, torch.rand(num_in, **half) + 0.5
    for activation, gate in ((None, ""), (silu_and_mul, "silu")):
        norm = NormBefore(factor, 1e-6, residual)
        found, total, _ = multiply_normed(Gemm(x, weight, None, activation, norm=norm))
        assert total.equal(x + residual)
        expected = expect(total, weight, None, gate, kernels.Norm(factor, 1e-6, None, None))
        assert (found.double() - expected).norm() / expected.norm() < 5e-3
        found = multiply(Gemm(x, weight, None, activation))
        expected = expect(x, weight, None, gate)
        assert (found.double() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [3, 33, 70, 95])
@pytest.mark.parametrize("gate", ["", "silu", "gelu_tanh"])
def test_odd_sizes_and_splits_on_hopper(rows, gate):
    half = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight = torch.randn(rows, 520, **half), torch.randn(200, 520, **half) * 0.1
    bias = torch.randn(200, **half)
    if not supports_tma(x, weight):
        pytest.skip("made for another GPU")
    hopper = importlib.import_module("slipstream.ops.gemm.linear.streaming_hopper")
    expected = expect(x, weight, bias, gate)
    tiles = [(1,), (2,), (5,), (1, 128), (2, 128, 16, 1), (3, 64, 32, 1), (1, 64, 0, 1, 3), (2, 64, 0, 2, 3)]
    for tile in tiles if gate else [*tiles, (1, 48), (1, 96)]:
        for _ in range(2):  # the counters of splits are as they were
            found = hopper.streaming_gemm(x, weight, bias, gate, hopper.StreamingTile(*tile))
            assert found.shape == expected.shape and (found.double() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.cuda
def test_float16_stays_float16_on_hopper():
    half = {"device": "cuda", "dtype": torch.float16}
    x, weight = torch.randn(16, 520, **half), torch.randn(200, 520, **half) * 0.1
    if not supports_tma(x, weight):
        pytest.skip("made for another GPU")
    hopper = importlib.import_module("slipstream.ops.gemm.linear.streaming_hopper")
    found, expected = hopper.streaming_gemm(x, weight, None, ""), expect(x, weight, None, "")
    assert found.dtype is torch.float16 and (found.double() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [2, 3, 8, 16, 33, 44, 64, 80, 100, 256])
@pytest.mark.parametrize(
    "sizes", [(2048, 1024, 3072), (520, 200, 136), (1024, 1024, 12288), (1536, 576, 1536), (1024, 2048, 12288)]
)
def test_a_norm_between_two_products(rows, sizes):
    half = {"device": "cuda", "dtype": torch.bfloat16}
    num_in, size, num_out = sizes
    x, residual = torch.randn(rows, num_in, **half), torch.randn(rows, size, **half) * 4
    first, second = torch.randn(size, num_in, **half) * 0.05, torch.randn(2 * num_out, size, **half) * 0.02
    factor = torch.rand(size, **half) + 0.5
    if not supports_tma(x, first):
        pytest.skip("made for another GPU")
    norm = kernels.Norm(factor, 1e-6, None, None)
    for bias in (None, torch.randn(2 * num_out, **half)):
        sums = add_product(Gemm(x, first, add=AddTo(residual, factor, 1e-6, "streaming")))
        total = expect(x, first, None) + residual.double()
        assert (sums.total.double() - total).norm() / total.norm() < 3e-3
        for activation, gate in ((silu_and_mul, "silu"), (None, ""), (gelu_and_mul, None)):
            found = multiply(Gemm(sums, second, bias, activation))
            expected = expect(sums.total, second, bias, gate or "", norm)
            expected = expected if gate is not None else gelu_and_mul(expected)
            assert found.shape == expected.shape and (found.double() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [32, 33, 40, 60, 72, 80, 81])
def test_products_of_a_verify_step(rows):
    """One that adds to a residual, whose partial sums the norm adds from 33 to 80 rows; one after the norm; and one of
    many outputs, as an LM head has."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    x, residual = torch.randn(rows, 12288, **half), torch.randn(rows, 4096, **half) * 4
    first, second = torch.randn(4096, 12288, **half) * 0.02, torch.randn(6144, 4096, **half) * 0.02
    factor = torch.rand(4096, **half) + 0.5
    if not supports_tma(x, first):
        pytest.skip("made for another GPU")
    total = expect(x, first, None) + residual.double()
    sums = add_product(Gemm(x, first, add=AddTo(residual, factor, 1e-6, "library")))
    assert (sums.normed is not None) == (33 <= rows <= 80)
    assert (sums.total.double() - total).norm() / total.norm() < 3e-3
    found = multiply(Gemm(sums, second))
    expected = expect(sums.total, second, None, "", kernels.Norm(factor, 1e-6, None, None))
    assert (found.double() - expected).norm() / expected.norm() < 5e-3
    head = torch.randn(25200, 4096, **half) * 0.02  # the last of 132 programs has fewer outputs
    found, expected = multiply(Gemm(sums.total, head)), expect(sums.total, head, None)
    assert found.shape == expected.shape and (found.double() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.cuda
@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 3.0])
def test_eps_of_a_norm_between_two_products_is_under_the_root(factor):
    """Sums with a root mean square around sqrt(eps), and sums of zeros."""
    half, eps = {"device": "cuda", "dtype": torch.bfloat16}, 1e-2
    x, residual = torch.zeros(16, 2048, **half), torch.randn(16, 1024, **half) * eps**0.5 * factor
    first, second = torch.randn(1024, 2048, **half), torch.randn(3072, 1024, **half) * 0.02
    norm = torch.rand(1024, **half) + 0.5
    if not supports_tma(x, first):
        pytest.skip("made for another GPU")
    sums = add_product(Gemm(x, first, add=AddTo(residual, norm, eps, "streaming")))
    expected = expect(sums.total, second, None, "", kernels.Norm(norm, eps, None, None))
    found = multiply(Gemm(sums, second))
    assert (found.double() - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 16, 256])
def test_kernels_that_start_early_read_nothing_too_early(rows, monkeypatch):
    """A long chain in a graph, each product of the one before it, gives what it gives one by one, bit for bit."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(1024, 1024, **half) * 0.05 for _ in range(64)]
    factor, x = torch.ones(1024, **half), torch.randn(rows, 1024, **half)

    def chain():
        out, total = x, x
        for weight in weights:
            out, total, _ = multiply_normed(Gemm(out, weight, norm=NormBefore(factor, 1e-6, total)))
        if choose_chain(x, weights) == "streaming":
            for weight in weights:
                sums = add_product(Gemm(out, weight, add=AddTo(total, factor, 1e-6, "streaming")))
                out, total = multiply(Gemm(sums, weight)), sums.total
        return out, total

    found = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(3):
        graph.replay()
    modules = [persistent, kernels, norm_kernels]  # `persistent` has all gemv kernels
    if supports_tma(x, weights[0]):
        modules.append(importlib.import_module("slipstream.ops.gemm.linear.streaming_hopper"))
    for module in modules:
        monkeypatch.setattr(module, "dependent", lambda *_: {"DEPENDENT": False, "launch_pdl": False})
    expected = chain()
    for mine, replayed, plain in zip(found, captured, expected, strict=True):
        assert mine.equal(plain) and replayed.equal(plain)
