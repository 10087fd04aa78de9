"""Norms and gated activations in Triton against the reference in float64."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

CUDA = torch.cuda.is_available()
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and triton was imported before its interpreter could be chosen", allow_module_level=True)

from slipstream.ops.elementwise import norm_triton as layer_norm_kernels  # noqa: E402
from slipstream.ops.elementwise import norm_triton as norm_kernels  # noqa: E402
from slipstream.ops.elementwise import reference as activation  # noqa: E402
from slipstream.ops.elementwise import reference as layer_norm  # noqa: E402
from slipstream.ops.elementwise import reference as norm  # noqa: E402
from slipstream.ops.elementwise import reference as segment_max  # noqa: E402
from slipstream.ops.elementwise import triton as activation_kernels  # noqa: E402
from slipstream.ops.elementwise import triton as segment_max_kernels  # noqa: E402

# the interpreter's own use of numpy
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore:overflow")]

DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [(1, 1), (3, 63), (33, 100), (2, 1025)]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape) * 2).to(DEVICE, dtype)


def check(mine: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[mine.dtype]
    torch.testing.assert_close(mine.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_rms_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, size, dtype=dtype), randn(size, dtype=dtype)
    out = norm_kernels.rms_norm(x, weight, 1e-5)
    assert out.dtype is dtype
    check(out, norm.rms_norm(x.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_add_rms_norm_norms_the_sum_it_stores(rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual, weight = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype), randn(size, dtype=dtype)
    before = x.clone(), residual.clone()
    out, total = norm_kernels.add_rms_norm(x, residual, weight, 1e-6)
    if CUDA or dtype is not torch.bfloat16:
        assert total.equal(x + residual)
    else:  # the interpreter cuts bits off where a GPU rounds
        check(total, (x + residual).double())
    check(out, norm.rms_norm(total.double(), weight.double(), 1e-6))
    assert x.equal(before[0]) and residual.equal(before[1])


@pytest.mark.parametrize(("num_parts", "rows", "size"), [(2, 3, 100), (4, 1, 129), (1, 2, 64)])
def test_sum_rms_norm_adds_the_parts_first(num_parts: int, rows: int, size: int) -> None:
    parts, residual, weight = randn(num_parts, rows, size), randn(rows, size), randn(size)
    out, total = norm_kernels.sum_rms_norm(parts, residual, weight, 1e-6)
    expected = norm.sum_rms_norm(parts.double(), residual.double(), weight.double(), 1e-6)
    check(out, expected[0])
    check(total, expected[1])


def rows_where_eps_counts(eps: float, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows whose root mean square is about sqrt(eps), far below it and far above it, and a row of zeros."""
    row = torch.randn(size)
    row -= row.mean()
    row /= row.square().mean().sqrt()
    factors = torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0, 10.0, 1000.0])
    return (row * eps**0.5 * factors[:, None]).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.3])
def test_eps_is_added_to_the_mean_square_under_the_root(eps: float, dtype: torch.dtype) -> None:
    x, weight = rows_where_eps_counts(eps, 100, dtype), randn(100, dtype=dtype)
    expected = norm.rms_norm(x.double(), weight.double(), eps)
    assert expected[0].eq(0).all()
    check(norm_kernels.rms_norm(x, weight, eps), expected)
    check(norm_kernels.rms_norm(x.unflatten(1, (5, 20)), weight.view(5, 20), eps).flatten(1), by_heads(x, weight, eps))
    out, total = norm_kernels.add_rms_norm(x * 0.25, x * 0.75, weight, eps)
    check(out, norm.rms_norm(total.double(), weight.double(), eps))


def by_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return norm.rms_norm(x.double().unflatten(1, (5, 20)), weight.double().view(5, 20), eps).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.3])
def test_eps_is_added_to_the_variance_under_the_root(eps: float, dtype: torch.dtype) -> None:
    if dtype is torch.float16 and eps < 1e-8:
        pytest.skip("sqrt(eps) is below the smallest float16")
    x, weight, bias = rows_where_eps_counts(eps, 100, dtype), randn(100, dtype=dtype), randn(100, dtype=dtype)
    x = torch.cat((x, torch.full_like(x[:1], 3.0)))  # a row without deviation
    wide = weight.double(), bias.double(), eps
    expected = layer_norm.layer_norm(x.double(), *wide)
    assert expected[[0, -1]].equal(bias.double().expand(2, -1))
    check(layer_norm_kernels.layer_norm(x, weight, bias, eps), expected)
    parts = x * 0.25, x * 0.75
    out, total = layer_norm_kernels.add_layer_norm(*parts, weight, bias, eps)
    check(out, layer_norm.layer_norm(total.double(), *wide))
    alone = layer_norm_kernels.layer_norm_of_sum(*parts, weight, bias, eps)
    check(alone, layer_norm.layer_norm(parts[0].double() + parts[1].double(), *wide))


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("per_head", [True, False])
def test_heads_of_a_merged_projection(tokens: int, per_head: bool) -> None:
    merged = randn(tokens, 5, 24)
    x, weight = merged[:, 1:4, :20], randn(3, 20) if per_head else randn(20)
    out = norm_kernels.rms_norm(x, weight, 1e-5)
    assert out.is_contiguous() and out.shape == x.shape
    check(out, norm.rms_norm(x.double(), weight.double(), 1e-5))


def test_x_whose_last_dimension_is_not_in_one_piece() -> None:
    x, weight = randn(24, 3).t(), randn(24)
    check(norm_kernels.rms_norm(x, weight, 1e-5), norm.rms_norm(x.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_layer_norm(rows: int, size: int, dtype: torch.dtype, biased: bool) -> None:
    x, weight = randn(rows, size, dtype=dtype) + 3, randn(size, dtype=dtype)
    bias = randn(size, dtype=dtype) if biased else None
    wide = None if bias is None else bias.double()
    out = layer_norm_kernels.layer_norm(x, weight, bias, 1e-5)
    assert out.dtype is dtype
    check(out, layer_norm.layer_norm(x.double(), weight.double(), wide, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_layer_norm_of_a_sum_that_is_kept_or_not(rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual, weight, bias = (randn(*shape, dtype=dtype) for shape in ((rows, size), (rows, size), (size,), (size,)))
    before = x.clone(), residual.clone()
    out, total = layer_norm_kernels.add_layer_norm(x, residual, weight, bias, 1e-6)
    if CUDA or dtype is not torch.bfloat16:
        assert total.equal(x + residual)
    else:  # the interpreter cuts bits off where a GPU rounds
        check(total, (x + residual).double())
    check(out, layer_norm.layer_norm(total.double(), weight.double(), bias.double(), 1e-6))
    alone = layer_norm_kernels.layer_norm_of_sum(x, residual, weight, bias, 1e-6)
    inputs = (x.double(), residual.double(), weight.double(), bias.double())
    check(alone, layer_norm.layer_norm_of_sum(*inputs, 1e-6))
    assert x.equal(before[0]) and residual.equal(before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("padding", [0, 5])
def test_the_largest_of_each_column_over_rows_that_lie_in_several_parts(dtype: torch.dtype, padding: int) -> None:
    counts = [3, 1, 0, 20, 7]
    x = randn(sum(counts) + padding, 1000, dtype=dtype)
    starts = torch.tensor([0, 3, 4, 4, 24, 31], dtype=torch.int32, device=DEVICE)
    mine, expected = (torch.full((6, 1000), -torch.inf, device=DEVICE) for _ in range(2))
    for first in range(0, len(x), 9):
        segment_max_kernels.segment_max_into(mine, x[first : first + 9], starts, first)
        segment_max.segment_max_into(expected, x[first : first + 9], starts, first)
    assert mine[:5].equal(expected[:5])
    by_hand = [part.float().amax(0) for part in x[: sum(counts)].split(counts) if len(part)]
    assert expected[[0, 1, 3, 4]].equal(torch.stack(by_hand)) and (expected[2] == -torch.inf).all()
    # some tokens at the beginning of rows do not count, all of the second's
    begins = torch.tensor([1, 4, 4, 15, 24], dtype=torch.int32, device=DEVICE)
    for out, into in ((mine, segment_max_kernels.segment_max_into), (expected, segment_max.segment_max_into)):
        out.fill_(-torch.inf)
        for first in range(0, len(x), 9):
            into(out, x[first : first + 9], starts, first, begins)
    assert mine[:5].equal(expected[:5]) and (mine[1:3] == -torch.inf).all()
    assert mine[[0, 3, 4]].equal(torch.stack([part.float().amax(0) for part in (x[1:3], x[15:24], x[24:31])]))
    # sums: a row in parts has the bits of a row alone
    sums = [torch.zeros(6, 1000, device=DEVICE) for _ in range(3)]
    for first in range(0, len(x), 9):
        segment_max_kernels.segment_add_into(sums[0], x[first : first + 9], starts, first)
        segment_max.segment_add_into(sums[1], x[first : first + 9], starts, first)
    segment_max_kernels.segment_add_into(sums[2], x, starts, 0)
    assert sums[0][:5].equal(sums[2][:5]) and not sums[0][2].any()
    check(sums[0][:5], torch.stack([part.double().sum(0) for part in x[: sum(counts)].split(counts)]))
    check(sums[1][:5], sums[0][:5].double())


GATES = ["silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul", "quick_gelu_and_mul", "relu_and_mul"]


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_gated_activations(name: str, rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = randn(rows, 2 * size, dtype=dtype)
    kernel: Callable[[torch.Tensor], torch.Tensor] = getattr(activation_kernels, name)
    check(kernel(gate_up), getattr(activation, name)(gate_up.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 24, 200])
def test_sparse_gates(size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 2 * size, device=DEVICE) + 0.5).to(dtype)
    x[3] = 0
    made = activation_kernels.sparse_gelu_tanh_and_mul(x, 0.3)
    check(made, activation.sparse_gelu_tanh_and_mul(x.double(), 0.3))
    if size == 200:
        assert 0.2 < (made[:3] == 0).float().mean() < 0.8, "about 62% are removed"
    wide = torch.randn(3, 4, 2 * size, device=DEVICE).to(dtype)[:, ::2]
    check(
        activation_kernels.sparse_gelu_tanh_and_mul(wide, -1.0),
        activation.sparse_gelu_tanh_and_mul(wide.double(), -1.0),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu2(dtype: torch.dtype) -> None:
    x = randn(3, 1025, dtype=dtype)
    check(activation_kernels.relu2(x), activation.relu2(x.double()))
    few = torch.tensor([-torch.inf, -1.0, torch.nan, torch.inf], device=DEVICE, dtype=dtype)
    torch.testing.assert_close(activation_kernels.relu2(few), activation.relu2(few), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sigmoid_gate(dtype: torch.dtype) -> None:
    x, wide = torch.randn(5, 300, device=DEVICE).to(dtype), torch.randn(5, 700, device=DEVICE).to(dtype)
    expected = activation.sigmoid_gate_(x.double(), wide[:, 400:].double())
    check(activation_kernels.sigmoid_gate_(x, wide[:, 400:]), expected)


@pytest.mark.parametrize("name", GATES)
def test_gates_far_from_zero_stay_numbers(name: str) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -90.0, 90.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    out = getattr(activation_kernels, name)(gate_up)
    assert out.tolist() == [[pytest.approx(value, abs=1e-6) for value in (0.0, 2e4, 0.0, 180.0)]]


@pytest.mark.cuda
def test_real_sizes_in_bfloat16() -> None:
    x, residual, weight = (randn(*shape, dtype=torch.bfloat16) for shape in ((8192, 4096), (8192, 4096), (4096,)))
    out, total = norm_kernels.add_rms_norm(x, residual, weight, 1e-6)
    check(out, norm.rms_norm(total.double(), weight.double(), 1e-6))
    gate_up = randn(8192, 2 * 12_288, dtype=torch.bfloat16)
    mine, expected = activation_kernels.silu_and_mul(gate_up).double(), activation.silu_and_mul(gate_up.double())
    assert (mine - expected).norm() / expected.norm() < 3e-3
