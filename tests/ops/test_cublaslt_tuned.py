"""Autotuned cuBLASLt GEMMs."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.gemm.linear import cublaslt


def test_the_fastest_algorithm_is_taken_if_it_gains_enough():
    assert cublaslt.fastest([2.0, 1.9, 3.0]) == 1
    assert cublaslt.fastest([2.0, 1.99]) == 0, "as good as the same"
    assert cublaslt.fastest([2.0, math.inf]) == 0
    assert cublaslt.fastest([]) == 0, "the library has none"


def test_the_best_few_are_timed_again_and_the_first_always():
    assert cublaslt.finalists([1.0, 1.01, 1.2, 0.99]) == [3, 0, 1]
    assert cublaslt.finalists([1.2, 1.01, 1.0, 1.02, 1.03]) == [2, 1, 0]
    assert cublaslt.finalists([1.0, 1.5, math.inf]) == [0]
    assert cublaslt.finalists([math.inf, 1.0]) == [1, 0]
    assert cublaslt.finalists([math.inf, math.inf]) == cublaslt.finalists([]) == []


def test_a_clock_that_falls_favours_no_algorithm(monkeypatch):
    """Under load the clock falls from run to run."""

    class Listed:
        num_algorithms, best = 3, 0

    alone, calls = [1.0, 0.985, 1.5], []

    def time(product, algorithm, x, weight, out, count):
        calls.append(count)
        return alone[algorithm] * 1.01 ** len(calls)

    monkeypatch.setattr(cublaslt, "_list_algorithms", lambda x, weight: Listed())
    monkeypatch.setattr(cublaslt, "_time", time)
    monkeypatch.setattr(cublaslt, "_warmed_up", set())
    chosen = cublaslt.choose(torch.zeros(1024, 8), torch.zeros(8, 8))
    assert chosen is not None and chosen.best == 1
    assert min(calls) > 2, "the device is busy when the start event is recorded"


def test_nothing_is_noted_without_cuda():
    x, weight = torch.ones(cublaslt.MIN_ROWS, 64), torch.ones(8, 64)
    with cublaslt.recording_gemms() as recorded:
        assert cublaslt.multiply(x, weight) is None
        assert not cublaslt.add_to(torch.ones(cublaslt.MIN_ROWS, 8), x, weight)
    assert not recorded


def test_an_engine_that_starts_notes_what_its_own_thread_computes(monkeypatch):
    monkeypatch.setattr(cublaslt, "_is_eligible", lambda x, weight: True)
    monkeypatch.setattr(cublaslt, "_tuned", {})
    weight = torch.ones(8, 64)
    with cublaslt.recording_gemms() as recorded:
        other = threading.Thread(target=cublaslt.multiply, args=(torch.ones(2048, 64), weight))
        other.start()
        other.join()
        for _ in range(2):
            assert cublaslt.multiply(torch.ones(1024, 64), weight) is None
    cublaslt.multiply(torch.ones(1500, 64), weight)
    assert [rows for _, _, rows, _, _ in recorded] == [1024]


def test_each_shape_that_was_noted_is_tried_once_on_numbers_of_its_own(monkeypatch):
    monkeypatch.setattr(cublaslt, "_is_eligible", lambda x, weight: True)
    monkeypatch.setattr(cublaslt, "_tuned", {})
    tried = []
    monkeypatch.setattr(
        cublaslt, "choose", lambda x, weight: tried.append((x.shape, x.unique().numel() > 1000, weight))
    )
    x, weight = torch.zeros(1024, 64), torch.ones(8, 64)
    with cublaslt.recording_gemms() as recorded:
        cublaslt.multiply(x, weight)
        cublaslt.autotune_recorded(recorded)
        cublaslt.multiply(x, weight)
        cublaslt.autotune_recorded(recorded)
    assert len(tried) == 1 and tried[0][:2] == (x.shape, True) and tried[0][2] is weight
    assert not x.any(), "overwritten"


def a_library_of(product, monkeypatch):
    """On a device like the one that algorithms of few rows are for."""
    monkeypatch.setattr(cublaslt, "_is_eligible", lambda x, weight: True)
    monkeypatch.setattr(cublaslt, "_is_hopper", lambda device: True)
    monkeypatch.setattr(cublaslt, "_unsplit", {})
    monkeypatch.setattr(cublaslt, "_ALIGNMENT", 4)
    monkeypatch.setattr(cublaslt, "load_library", lambda: "library")
    monkeypatch.setattr(cublaslt, "LtGemm", product)


def test_few_rows_are_added_by_the_first_way_that_splits_no_sum(monkeypatch):
    made, added = [], []

    class Listed:
        best, num_algorithms = 0, 8

        def __init__(self, library, x, weight):
            made.append((*x.shape, len(weight)))

        def run(self, algorithm, x, weight, out, *, add):
            added.append((algorithm, *out.shape, add))

    a_library_of(Listed, monkeypatch)

    def add(rows: int, num_out: int, num_in: int = 64) -> bool:
        return cublaslt.add_to(torch.empty(rows, num_out), torch.empty(rows, num_in), torch.empty(num_out, num_in))

    assert add(65, 4096) and add(65, 4096) and add(256, 4096)
    assert made == [(65, 64, 4096), (256, 64, 4096)]
    assert added == [(0, 65, 4096, True)] * 2 + [(0, 256, 4096, True)]
    assert not add(64, 4096) and not add(257, 4096), "not few, or ours"
    assert not add(65, 4088), "sums are few"
    assert add(112, 4096, 4104) and add(128, 4096, 4096) and add(192, 4096, 4104)
    assert not add(128, 4096, 4104), "sums are long"
    monkeypatch.setattr(cublaslt, "load_library", lambda: None)
    assert not add(66, 4096)


def test_a_way_of_few_rows_that_cannot_be_had_is_not_asked_for_again(monkeypatch):
    asked = []

    class Refused:
        best, num_algorithms = 0, 1

        def __init__(self, library, x, weight): ...

        def run(self, algorithm, x, weight, out, *, add):
            asked.append(len(x))
            raise cublaslt.CublasLtError("no")

    a_library_of(Refused, monkeypatch)
    for _ in range(2):
        assert not cublaslt.add_to(torch.empty(80, 4096), torch.empty(80, 64), torch.empty(4096, 64))
    assert asked == [80]


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

    product = object.__new__(cublaslt.LtGemm)
    product._library, product._handle, product._operation, product._layouts = Library, None, None, [None] * 3
    assert product._list_algorithms() == []
    assert given == {1: (256, 8), 3: (0, 4)}, "most bytes of memory, and no kind of split"


def test_a_matrix_that_begins_at_an_odd_place_is_torchs():
    """The library lists algorithms for matrices that begin at multiples of 256 bytes."""

    class OnDevice(torch.Tensor):
        is_cuda = True

    numbers = torch.zeros(64 * 64 + 256, dtype=torch.bfloat16)
    first = -numbers.data_ptr() % 256 // 2

    def at(place: int) -> torch.Tensor:
        return numbers[first + place :][: 64 * 64].view(64, 64).as_subclass(OnDevice)

    assert cublaslt._is_eligible(at(0), at(128))
    assert not cublaslt._is_eligible(at(8), at(0))
    assert not cublaslt._is_eligible(at(0), at(8))


def make(rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator("cuda").manual_seed(rows)
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, generator=random, device="cuda").to(dtype) for shape in ((rows, num_in), (num_out, num_in))
    )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(80, 4096, 2056), (1024, 1000, 512), (1025, 4096, 1024), (8192, 6144, 1024)])
def test_every_way_gives_torchs_product(sizes, dtype):
    x, weight = make(*sizes, dtype)
    expected = F.linear(x, weight)
    product = cublaslt.LtGemm(cublaslt.load_library(), x, weight)
    assert product.num_algorithms > 1
    for algorithm in range(product.num_algorithms):
        out = torch.full_like(expected, torch.nan)
        product.run(algorithm, x, weight, out)
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-1)
        product.run(algorithm, x, weight, out, add=True)
        torch.testing.assert_close(out, 2 * expected, rtol=2e-2, atol=2e-1)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [65, 80, 100, 192, 256])
def test_few_rows_are_added_as_torch_adds_them(rows):
    x, weight = make(rows, 4096, 2056, torch.bfloat16)
    residual = torch.randn(rows, 4096, device="cuda").bfloat16()
    expected = torch.addmm(residual.double(), x.double(), weight.t().double())
    theirs = residual.clone().addmm_(x, weight.t())
    if not cublaslt.add_to(residual, x, weight):
        pytest.skip("made for Hopper")
    assert (residual.double() - expected).abs().mean() <= 1.02 * (theirs.double() - expected).abs().mean()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cublaslt.add_to(residual, x, weight)
    residual.zero_()
    graph.replay()
    torch.testing.assert_close(residual, F.linear(x, weight), rtol=1e-2, atol=1e-1)


@pytest.mark.cuda
def test_a_chosen_way_can_be_captured_and_serves_no_other_shape():
    x, weight = make(2048, 768, 512, torch.bfloat16)
    with cublaslt.recording_gemms() as recorded:
        cublaslt.multiply(x, weight)
    cublaslt.autotune_recorded(recorded)
    key = (x.device, x.dtype, 2048, 768, 512)
    assert key in cublaslt._tuned, "tried, whatever came of it"
    product = cublaslt._tuned[key] = cublaslt.LtGemm(cublaslt.load_library(), x, weight)
    product.best = product.num_algorithms - 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cublaslt.multiply(x, weight)
    assert out is not None
    x.copy_(make(2049, 768, 512, torch.bfloat16)[0][:2048])
    graph.replay()
    torch.testing.assert_close(out, F.linear(x, weight), rtol=1e-2, atol=1e-1)
    assert cublaslt.multiply(x[:1500], weight) is None
    del cublaslt._tuned[key]
