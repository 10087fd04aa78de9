"""Products of few rows against plain torch, on odd shapes."""

from __future__ import annotations

import pytest
import torch

triton_linear = pytest.importorskip("slipstream.ops.linear.triton", reason="triton is not installed")


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_in", "num_out"), [(16, 5), (63, 100), (1025, 33), (576, 1536)])
@pytest.mark.parametrize("biased", [True, False])
def test_few_rows_equal_the_product(rows, num_in, num_out, biased, kernel_device):
    torch.manual_seed(num_in)
    x = torch.randn(rows, num_in + 3, device=kernel_device)[:, :num_in]
    weight = torch.randn(num_out, num_in, device=kernel_device)
    bias = torch.randn(num_out, device=kernel_device) if biased else None
    found = triton_linear.few_rows(x, weight, bias)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32])
@pytest.mark.parametrize(("num_in", "num_out"), [(16, 5), (300, 100), (1025, 33)])
@pytest.mark.parametrize("biased", [True, False])
def test_some_rows_equal_the_product(rows, num_in, num_out, biased, kernel_device):
    torch.manual_seed(num_in)
    x = torch.randn(rows, num_in + 3, device=kernel_device)[:, :num_in]
    weight = torch.randn(num_out, num_in, device=kernel_device)
    bias = torch.randn(num_out, device=kernel_device) if biased else None
    found = triton_linear.some_rows(x, weight, bias, tile=(16, 64, 4, 2))
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)
