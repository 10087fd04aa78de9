"""A pooling method or reduction that some function does not handle is an error, never the vector of another method."""

import numpy as np
import pytest
import torch

from slipstream.checkpoint.pooling_info import METHODS, reductions_of
from slipstream.nn.context import BatchView
from slipstream.runner.pool_methods import combine, finish_vectors, pool_all, reduce_rows, starts_of

HIDDEN = torch.arange(12, dtype=torch.float32).reshape(4, 3)
REDUCTIONS = ("first", "sum", "weighted", "max")
ONE_LINE = [method for method in METHODS if method not in ("all", "step")]


def view() -> BatchView:
    """Two prompts, of one token and of three."""
    counts = np.array([1, 3], np.int32)
    return BatchView(
        ids=torch.zeros(4, dtype=torch.int64),
        positions=torch.tensor([0, 0, 1, 2]),
        lengths=torch.tensor([1, 3]),
        slots=(),
        page_tables=(),
        num_tokens=counts,
        max_lengths=counts,
        num_single=1,
        query_starts=torch.tensor([0, 1, 4], dtype=torch.int32),
    )


def test_every_method_names_its_reduction_or_none():
    assert set(reductions_of(METHODS)) == set(REDUCTIONS)
    with pytest.raises(KeyError, match="median"):
        reductions_of(("median",))


@pytest.mark.parametrize("method", ONE_LINE)
def test_every_method_of_one_line_pools(method):
    assert pool_all((method,), view(), HIDDEN).shape == (2, 3)


@pytest.mark.parametrize("method", ["all", "step", "median"])
def test_a_method_without_one_line_per_prompt_is_refused(method):
    lengths = torch.tensor([1, 3])
    with pytest.raises(ValueError, match=method):
        finish_vectors((method,), {"sum": HIDDEN[:2]}, None, lengths, None)


@pytest.mark.parametrize("kind", ["first", "median"])
def test_an_unknown_reduction_of_rows_is_refused(kind):
    with pytest.raises(ValueError, match=kind):
        reduce_rows(kind, view(), HIDDEN, starts_of(view(), HIDDEN), None)


def test_an_unknown_reduction_of_two_chunks_is_refused():
    one, two = HIDDEN[:1], HIDDEN[1:2]
    assert torch.equal(combine("sum", one, two), one + two)
    assert torch.equal(combine("weighted", one, two), one + two)
    assert torch.equal(combine("max", one, two), two)
    with pytest.raises(ValueError, match="median"):
        combine("median", one, two)
