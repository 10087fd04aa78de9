"""Paged attention and cache writes in Triton against plain float64, interpreted without a GPU, compiled with one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_case import ODD, Case, check_drafted, row_alone, singles

from hand_cache import one_group
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.nn.paged_attention import TritonAttention
from slipstream.ops.attention.tile_list import FEW_ROWS, max_splits_of_row

# the interpreter's own use of numpy
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore:overflow")]


@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 80), ((3, 1), 64), ((3, 3), 16)])
def test_rows_of_one_token(heads, dim):
    singles(ODD, heads=heads[0], kv_heads=heads[1], dim=dim, slack=3).check()


@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 80), ((3, 1), 64), ((3, 3), 16)])
def test_chunks_with_and_without_context(heads, dim):
    Case([17, 100, 257, 64], [17, 63, 2, 33], heads=heads[0], kv_heads=heads[1], dim=dim).check()


@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(4, 32, 24), (32, 80, 64), (16, 576, 512)])
def test_values_that_are_a_part_of_the_keys(heads, dim, value_dim):
    """Latent attention. Groups of 16 heads are programs of their own."""
    facts = dict(heads=heads, kv_heads=1, dim=dim, value_dim=value_dim)
    Case([100, 0, 37, 40, 70], [1, 1, 1, 40, 21], loose=3, **facts).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_of_512(dtype):
    Case([100, 37, 40, 70], [1, 1, 40, 21], heads=4, kv_heads=1, dim=512, dtype=dtype).check()


def test_mixed_rows_with_padding():
    Case([100, 0, 257, 0, 30, 300, 0], [1, 1, 1, 1, 30, 130, 0], loose=5, dtype=torch.float16).check()


@pytest.mark.parametrize("loose", [0, 5])
def test_where_no_row_has_one_token_none_is_looked_for(loose, monkeypatch):
    from slipstream.nn import paged_attention

    case = Case([90, 3, 150, 0, 0], [90, 3, 70, 0, 0], loose=loose)
    both = case.run()
    case.batch = dataclasses.replace(case.batch, all_long=True)
    monkeypatch.setattr(paged_attention, "attend_splits", None)
    case.check()
    assert torch.equal(case.run(), both)


def test_padding_alone_is_zero():
    case = singles([0, 0, 0])
    assert (case.run() == 0).all()


def test_row_that_lies_in_page_zero_is_padding():
    case = singles([20, 20])
    case.batch.page_tables[0][1] = 0
    case.cache[0][0], case.cache[1][0] = 1.0, 1.0
    case.batch.slots[0][1] = 3
    out = case.run()
    assert (out[1] == 0).all() and (out[0] != 0).any()


@pytest.mark.parametrize("window", [1, 16, 100])
def test_window(window):
    Case([5, 700, 90, 400], [1, 1, 90, 50], window=window).check()


def test_window_may_have_lost_its_first_pages():
    case = singles([300], window=20)
    case.batch.page_tables[0][0, :17] = 0
    case.check()


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(soft_cap):
    case = Case([100, 257, 90], [1, 1, 50], soft_cap=soft_cap)
    case.query *= 30  # scores far beyond the cap
    case.check()


@pytest.mark.parametrize("window", [0, 20])
def test_sinks(window):
    """In rows of one token cut into several splits, in chunks, in padding and in tokens of no row."""
    case = Case([700, 100, 257, 0, 90], [1, 1, 1, 1, 50], has_sinks=True, window=window, loose=3)
    without = dataclasses.replace(case, has_sinks=False)
    assert (case.expected() - without.expected()).norm() > 0.1 * case.expected().norm()  # they are felt
    case.sinks[0] = -60  # smaller than all scores
    case.check()


def test_large_pages_and_half_precision():
    Case([100, 300, 200], [1, 1, 100], page_size=64, dtype=torch.float16, dim=64).check()


def test_long_rows_are_cut_into_few_splits():
    singles([9000, 256, 513], heads=1, kv_heads=1).check()
    assert max_splits_of_row(1_000_000) == 32


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [1, 1, 40, 9]])
def test_a_row_is_bit_equal_alone_and_among_others(counts):
    case = Case([600, 33, 290, 77], counts)
    together = case.run().split(counts)
    for row, expected in enumerate(together):
        assert torch.equal(row_alone(case, row), expected)


def test_a_row_is_bit_equal_among_many_and_among_padding():
    counts = [1] * FEW_ROWS + [40]
    case = Case([1300, 33, 290, 77, 5, 600, 1, 520, 400], counts)
    together = case.run().split(counts)
    for row in (0, 7, 8):
        assert torch.equal(row_alone(case, row), together[row])


def test_forward_twice_on_the_same_metadata():
    case = singles([600, 33])
    backend = TritonAttention(one_group(2, 16), torch.float32)
    context = ForwardContext(case.batch, backend, backend.make_metadata(case.batch), [case.cache], (0,))
    args = (case.query, case.key, case.value, 0, case.scale, context)
    assert torch.equal(backend.forward(*args), backend.forward(*args))


@pytest.mark.parametrize(
    "facts", [{}, {"heads": 6, "kv_heads": 1, "dim": 40}, {"soft_cap": 3.0}], ids=["same heads", "other heads", "cap"]
)
def test_groups_have_their_own_tables_windows_heads_and_caps(facts):
    full, narrow = Case([300, 40], [1, 30]), Case([300, 40], [1, 30], window=30, seed=1, **facts)
    batch = BatchView(
        **{
            **{name: getattr(full.batch, name) for name in BatchView.__slots__},
            "slots": full.batch.slots + narrow.batch.slots,
            "page_tables": full.batch.page_tables + narrow.batch.page_tables,
        }
    )
    of_narrow = one_group(
        narrow.kv_heads, narrow.dim, num_heads=narrow.heads, window=narrow.window, soft_cap=narrow.soft_cap
    )
    backend = TritonAttention((*one_group(2, 16), *of_narrow), torch.float32)
    context = ForwardContext(batch, backend, backend.make_metadata(batch), [narrow.cache, full.cache], (1, 0))
    for site, case in enumerate((narrow, full)):
        out = backend.forward(case.query, case.key, case.value, site, case.scale, context)
        assert (out.double() - case.expected()).norm() <= 2e-6 * out.norm()
        assert out.equal(
            backend.forward(case.query, None, None, site, case.scale, context)
        )  # as another layer reads it


@pytest.mark.parametrize("one_kernel", [False, True])
@pytest.mark.parametrize("window", [0, 40])
def test_last_tokens_look_alone_and_in_the_memory_of_the_others(window, one_kernel):
    case = Case([700, 33, 290, 77, 0, 0], [1, 1, 40, 9, 0, 0], window=window, loose=3, slack=100)
    backend = TritonAttention(one_group(2, 16, window=window), torch.float32, one_kernel=one_kernel)
    context = ForwardContext(case.batch, backend, backend.make_metadata(case.batch), [case.cache], (0,), only_last=True)
    together = backend.forward(case.query, case.key, case.value, 0, case.scale, context)
    last = context.last_tokens()
    assert not len(last.context.batch.ids) + len(last.context.batch.positions)  # nothing is looked up
    assert last.indices.tolist() == [0, 1, 41, 50, 50, 50]
    assert last.context.metadata.groups[0].partials is context.metadata.groups[0].partials
    alone = backend.forward(last.of(case.query), case.key, case.value, 0, case.scale, last.context)
    wanted = case.expected()[last.indices[:4].long()]
    assert (alone[:4].double() - wanted).norm() <= 2e-6 * wanted.norm()
    assert not alone[4:].any()
    if one_kernel:
        assert torch.equal(alone[:4], together[last.indices[:4].long()])


@pytest.mark.parametrize(
    "facts",
    [
        {"window": 100, "has_sinks": True, "kv_heads": 1},
        {"heads": 16, "kv_heads": 1, "soft_cap": 30.0},  # two queries at a time
    ],
    ids=str,
)
def test_positions_of_a_drafted_row_are_computed_together(facts):
    """Beside rows without drafts, padding and host tokens, and across the end of a split."""
    check_drafted(Case([258, 0, 5, 40], [4, 1, 3, 1], slack=9, **facts), num_host=1)
