"""Products of many rows by the quickest of the library's ways."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.linear import ways


def test_the_quickest_way_is_taken_if_it_is_worth_it():
    assert ways.quickest([[2.0, 9.0, 2.0], [1.9, 1.9, 8.0], [3.0, 1.0, 3.0]]) == 1
    assert ways.quickest([[2.0, 2.0, 2.0], [1.99, 1.99, 1.99]]) == 0, "as good as the same"
    assert ways.quickest([[2.0], [math.inf]]) == 0
    assert ways.quickest([]) == 0, "the library has none"


def test_nothing_is_chosen_without_cuda():
    x, weight = torch.ones(ways.LEAST_ROWS, 64), torch.ones(8, 64)
    with ways.choosing():
        assert ways.multiply(x, weight) is None


def make(rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator("cuda").manual_seed(rows)
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, generator=random, device="cuda").to(dtype) for shape in ((rows, num_in), (num_out, num_in))
    )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(1024, 1000, 512), (1025, 4096, 1024), (8192, 6144, 1024)])
def test_every_way_gives_torchs_product(sizes, dtype):
    x, weight = make(*sizes, dtype)
    expected = F.linear(x, weight)
    product = ways.Product(ways.loaded(), x, weight)
    assert product.num_ways > 1
    for way in range(product.num_ways):
        out = torch.full_like(expected, torch.nan)
        product.run(way, x, weight, out)
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-1)


@pytest.mark.cuda
def test_a_chosen_way_can_be_captured_and_serves_no_other_shape():
    x, weight = make(2048, 768, 512, torch.bfloat16)
    with ways.choosing():
        ways.multiply(x, weight)
    key = (x.device, x.dtype, 2048, 768, 512)
    assert key in ways._chosen, "tried, whatever came of it"
    product = ways._chosen[key] = ways.Product(ways.loaded(), x, weight)
    product.best = product.num_ways - 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ways.multiply(x, weight)
    assert out is not None
    x.copy_(make(2049, 768, 512, torch.bfloat16)[0][:2048])
    graph.replay()
    torch.testing.assert_close(out, F.linear(x, weight), rtol=1e-2, atol=1e-1)
    assert ways.multiply(x[:1500], weight) is None
    del ways._chosen[key]
