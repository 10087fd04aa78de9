"""Products of many rows by the quickest of the library's ways."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.linear import ways


def test_the_quickest_way_is_taken_if_it_is_worth_it():
    assert ways.quickest([2.0, 1.9, 3.0]) == 1
    assert ways.quickest([2.0, 1.99]) == 0, "as good as the same"
    assert ways.quickest([2.0, math.inf]) == 0
    assert ways.quickest([]) == 0, "the library has none"


def test_the_best_few_are_heard_again_and_the_first_always():
    assert ways.finalists([1.0, 1.01, 1.2, 0.99]) == [3, 0, 1]
    assert ways.finalists([1.2, 1.01, 1.0, 1.02, 1.03]) == [2, 1, 0]
    assert ways.finalists([1.0, 1.5, math.inf]) == [0]
    assert ways.finalists([math.inf, 1.0]) == [1, 0]
    assert ways.finalists([math.inf, math.inf]) == ways.finalists([]) == []


def test_nothing_is_chosen_without_cuda():
    x, weight = torch.ones(ways.LEAST_ROWS, 64), torch.ones(8, 64)
    with ways.choosing():
        assert ways.multiply(x, weight) is None
        assert not ways.add_to(torch.ones(ways.LEAST_ROWS, 8), x, weight)


def test_an_engine_that_starts_tries_nothing_on_what_another_thread_computes(monkeypatch):
    """The numbers that ways are tried on are overwritten."""
    tried = []
    monkeypatch.setattr(ways, "_is_plain", lambda x, weight: True)
    monkeypatch.setattr(ways, "choose", lambda x, weight: tried.append(len(x)))
    monkeypatch.setattr(ways, "_chosen", {})
    weight = torch.ones(8, 64)
    with ways.choosing():
        other = threading.Thread(target=ways.multiply, args=(torch.ones(2048, 64), weight))
        other.start()
        other.join()
        assert ways.multiply(torch.ones(1024, 64), weight) is None
    assert tried == [1024]


def test_ways_that_split_a_sum_are_not_asked_for():
    """Some add its parts in the output itself and need no more memory than a counter."""
    given = {}

    class Library:
        cublasLtMatmulPreferenceCreate = cublasLtMatmulPreferenceDestroy = staticmethod(lambda preference: 0)
        cublasLtMatmulAlgoGetHeuristic = staticmethod(lambda *args: 0)

        @staticmethod
        def cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, size):
            given[attribute] = (value._obj.value, size.value)
            return 0

    product = object.__new__(ways.Product)
    product._library, product._handle, product._operation, product._layouts = Library, None, None, [None] * 3
    assert product._list_ways() == []
    assert given == {1: (256, 8), 3: (0, 4)}, "most bytes of memory, and no kind of split"


def test_a_matrix_that_begins_at_an_odd_place_is_torchs():
    """The library lists ways for matrices that begin at multiples of 256 bytes."""

    class OnDevice(torch.Tensor):
        is_cuda = True

    numbers = torch.zeros(64 * 64 + 256, dtype=torch.bfloat16)
    first = -numbers.data_ptr() % 256 // 2

    def at(place: int) -> torch.Tensor:
        return numbers[first + place :][: 64 * 64].view(64, 64).as_subclass(OnDevice)

    assert ways._is_plain(at(0), at(128))
    assert not ways._is_plain(at(8), at(0))
    assert not ways._is_plain(at(0), at(8))


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
        product.run(way, x, weight, out, add=True)
        torch.testing.assert_close(out, 2 * expected, rtol=2e-2, atol=2e-1)


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
