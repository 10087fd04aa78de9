"""Products of few rows, and what is done inside them, against plain torch."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops import linear as ops
from slipstream.ops.activation import silu_and_mul

kernels = pytest.importorskip("slipstream.ops.linear.triton", reason="triton is not installed")
norm_kernels = pytest.importorskip("slipstream.ops.norm.triton", reason="triton is not installed")

# the interpreter's own use of numpy
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore:overflow")]

SHAPES = [(16, 6), (63, 100), (1025, 34)]
FEW = kernels.FewTile(outputs=16, inputs=256, warps=4)


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
    check(kernels.few_rows(x, weight, bias, gate=gate, tile=FEW), expect(x, weight, bias, gate))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
@pytest.mark.parametrize("has_residual", [True, False])
def test_a_norm_before_few_rows(rows, num_in, num_out, has_residual, kernel_device):
    x, weight, bias = make(rows, num_in, num_out, True, kernel_device)
    norm = make_norm(rows, num_in, has_residual, kernel_device)
    check(kernels.few_rows(x, weight, bias, norm, "silu", FEW), expect(x, weight, bias, "silu", norm))
    check_norm(norm, x)


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize(("num_in", "num_out"), [*SHAPES, (256, 40)])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("splits", [1, 3])
def test_some_rows_equal_the_product(rows, num_in, num_out, gate, splits, kernel_device):
    x, weight, bias = make(rows, num_in, num_out, rows > 5, kernel_device)
    tile = kernels.SomeTile(outputs=16, inputs=64, splits=splits, warps=4, stages=2)
    for _ in range(2):  # the counters of splits are as they were
        check(kernels.some_rows(x, weight, bias, gate, tile), expect(x, weight, bias, gate))


CUDA_SHAPES = [(1024, 4096), (2048, 1024), (3072, 1024), (4096, 6144), (12288, 4096), (1024, 151_936)]


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 64, 65])
@pytest.mark.parametrize(("num_in", "num_out"), CUDA_SHAPES)
def test_real_sizes_in_bfloat16(rows, num_in, num_out):
    half = {"device": "cuda", "dtype": torch.bfloat16}
    x, residual = torch.randn(rows, num_in, **half), torch.randn(rows, num_in, **half)
    weight, factor = torch.randn(num_out, num_in, **half) * 0.02, torch.rand(num_in, **half) + 0.5
    for activation, gate in ((None, ""), (silu_and_mul, "silu")):
        found, total = ops.norm_linear(x, residual, factor, 1e-6, weight, None, activation)
        assert total.equal(x + residual)
        expected = expect(total, weight, None, gate, kernels.Norm(factor, 1e-6, None, None))
        assert (found.double() - expected).norm() / expected.norm() < 5e-3
        found = ops.gated_linear(x, weight, None, activation)
        expected = expect(x, weight, None, gate)
        assert (found.double() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [3, 33])
@pytest.mark.parametrize("gate", ["", "silu", "gelu_tanh"])
def test_odd_sizes_and_splits_on_hopper(rows, gate):
    half = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight = torch.randn(rows, 520, **half), torch.randn(200, 520, **half) * 0.1
    bias = torch.randn(200, **half)
    if not kernels.can_stream(x, weight):
        pytest.skip("made for another GPU")
    hopper = importlib.import_module("slipstream.ops.linear.triton.hopper")
    for splits in (1, 2, 5):
        for _ in range(2):  # the counters of splits are as they were
            found = hopper.stream_rows(x, weight, bias, gate, hopper.StreamTile(splits, 3))
            expected = expect(x, weight, bias, gate)
            assert found.shape == expected.shape and (found.double() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 16])
def test_kernels_that_start_early_read_nothing_too_early(rows, monkeypatch):
    """A long chain in a graph, each product of the one before it, gives what it gives one by one, bit for bit."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(1024, 1024, **half) * 0.05 for _ in range(64)]
    factor, x = torch.ones(1024, **half), torch.randn(rows, 1024, **half)

    def chain():
        out, total = x, x
        for weight in weights:
            out, total = ops.norm_linear(out, total, factor, 1e-6, weight)
        return out, total

    found = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(3):
        graph.replay()
    modules = [kernels.few, kernels.some, norm_kernels]
    if kernels.can_stream(x, weights[0]):
        modules.append(importlib.import_module("slipstream.ops.linear.triton.hopper"))
    for module in modules:
        monkeypatch.setattr(module, "dependent", lambda *_: {"DEPENDENT": False, "launch_pdl": False})
    expected = chain()
    for mine, replayed, plain in zip(found, captured, expected, strict=True):
        assert mine.equal(plain) and replayed.equal(plain)
