"""The work of paged attention: which program computes which rows, queries and keys."""

from __future__ import annotations

import importlib
import inspect
import itertools

import numpy as np
import pytest
import torch
from attention_case import DEVICE

from slipstream.ops.attention import single_list
from slipstream.ops.attention.single_list import SPLIT_COST
from slipstream.ops.attention.tile_list import (
    FEW_ROWS,
    SOME_ROWS,
    TileList,
    TileListHeads,
    TileListRows,
    TileListSplits,
    build_tile_list,
    split_keys,
)
from slipstream.ops.attention.varlen import DecodeRows

# the interpreter's own use of numpy
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore:overflow")]


def queries_of(lengths: list[int], host_ids: list[int], max_queries: int, window: int = 0) -> list[list[int]]:
    """First row, first partial result, length, number of queries and settled keys of each single."""
    table = torch.ones(len(lengths), 1250, dtype=torch.int64, device=DEVICE)
    given = torch.tensor(lengths, device=DEVICE)
    ids = torch.tensor(host_ids, device=DEVICE)
    tile_list = build_tile_list(
        TileListRows(given, None, table, len(lengths), 20_000, ids, max_queries),
        TileListHeads(4, 2, 16, 64, window),
        TileListSplits(7),
    )
    records = tile_list.singles[: int(tile_list.totals[0])].tolist()
    assert [single for share in shares_of(tile_list) for single in share] == [
        (single, split) for single, record in enumerate(records) for split in range(record[4])
    ]
    splits = tile_list.num_splits // len(lengths)
    assert all(record[5] == record[0] * splits and record[0] == record[1] for record in records)
    return [[record[0], record[6], record[8], record[7]] for record in records]


def test_queries_of_one_row_are_consecutive_and_cut_in_the_same_way():
    ids = [-1, -2, -3, -1, -1, -2]
    assert queries_of([10, 11, 12, 7, 90, 91], ids, 4) == [[0, 12, 3, 9], [3, 7, 1, 6], [4, 91, 2, 89]]
    assert queries_of([10, 11, 12, 7, 90, 91], ids, 2)[:2] == [[0, 11, 2, 9], [2, 12, 1, 9]]
    # longer splits from 8,193 keys on, and another first key of the window
    assert queries_of([8191, 8192, 8193], [-1, -2, -3], 4) == [[0, 8192, 2, 8190], [2, 8193, 1, 8190]]
    assert [each[2] for each in queries_of([383, 384, 385, 386], [-1, -2, -3, -4], 8, window=257)] == [2, 2]
    # a host token may complete a page that others read
    assert [each[3] for each in queries_of([10, 11, 7], [-1, -2, 5], 4)] == [0, 0]


@pytest.mark.parametrize("num_split_programs", [1, 7, 500])
def test_work_covers_every_key_and_query_once(num_split_programs):
    lengths, counts = [1, 256, 257, 20_000, 700], [1, 1, 1, 1, 300]
    starts = torch.tensor([0, 1, 2, 3, 4, 304], dtype=torch.int32, device=DEVICE)
    table = torch.ones(5, 1250, dtype=torch.int64, device=DEVICE)
    given = torch.tensor(lengths, device=DEVICE)
    tile_list = build_tile_list(
        TileListRows(given, starts, table, 310, 20_000), TileListHeads(6, 2, 16, 64), TileListSplits(num_split_programs)
    )
    num_singles, num_tiles = tile_list.totals.tolist()
    sizes, num_splits, before = [256, 256, 256, 640], [1, 1, 2, 32], [0, 1, 2, 4]
    assert [record[:7] for record in tile_list.singles[:num_singles].tolist()] == [
        [row, row, 0, sizes[row], num_splits[row], before[row], lengths[row]] for row in range(4)
    ]
    splits = [(row, split) for row in range(4) for split in range(num_splits[row])]
    assert len(splits) <= tile_list.num_splits
    assert [split for share in shares_of(tile_list) for split in share] == splits
    assert num_tiles <= len(tile_list.tiles)
    tiles = [record[:5] for record in tile_list.tiles[:num_tiles].tolist()]
    chunk = [[4, 4, 300, first, 700] for first in range(0, counts[4] * 3, 64)]
    loose = [[5, 304, 6, 0, 0]]
    assert tiles == loose + chunk[::-1]
    assert (tile_list.arrived == 0).all()


def shares_of(tile_list: TileList) -> list[list[tuple[int, int]]]:
    """Single and split of each piece, share by share."""
    num_splits = tile_list.singles[:, 4].tolist()
    shares = []
    for (first, split), (last, stop) in itertools.pairwise(tile_list.shares.tolist()):
        singles = range(first, last + (stop > 0))
        begins = [split if single == first else 0 for single in singles]
        ends = [stop if single == last else num_splits[single] for single in singles]
        shares.append(
            [(single, number) for single, *of in zip(singles, begins, ends, strict=True) for number in range(*of)]
        )
    return shares


@pytest.mark.parametrize("lengths", [[700] * 10, [*range(100, 2000, 200)], [0, 0, 5000, 0], [0, 0]])
def test_shares_are_about_equal(lengths):
    table = torch.ones(len(lengths), 400, dtype=torch.int64, device=DEVICE)
    given = torch.tensor(lengths, device=DEVICE)
    tile_list = build_tile_list(
        TileListRows(given, None, table, len(lengths), 6000), TileListHeads(2, 2, 16, 64), TileListSplits(6)
    )
    sizes, num_splits = tile_list.singles[: len(lengths), 3:5].T.tolist()
    costs = {
        (row, split): min(length - split * sizes[row], sizes[row]) + SPLIT_COST.value
        for row, length in enumerate(lengths)
        for split in range(num_splits[row])
    }
    shares = shares_of(tile_list)
    assert len(shares) == 6 and [split for share in shares for split in share] == list(costs)
    # no further from an equal part than the largest piece
    limit = sum(costs.values()) / 6 + max(costs.values())
    assert max(sum(costs[split] for split in share) for share in shares) <= limit


def test_the_splits_of_a_row_are_about_equal_and_shared_out_one_by_one():
    """A short last split would leave its program idle while others have two splits."""
    lengths = torch.full((16,), 640, device=DEVICE)
    table = torch.ones(16, 400, dtype=torch.int64, device=DEVICE)
    rows, heads = TileListRows(lengths, None, table, 16, 6000), TileListHeads(2, 2, 16, 64)
    tile_list = build_tile_list(rows, heads, TileListSplits(33))
    assert tile_list.singles[:16, 3:5].tolist() == [[320, 2]] * 16
    assert max(map(len, shares_of(tile_list))) == 1


@pytest.mark.every_second("max_queries", "num_rows")
@pytest.mark.parametrize("max_queries", [1, 4])
@pytest.mark.parametrize("num_rows", [31, 64, 70])
def test_a_list_does_not_depend_on_how_many_rows_are_counted_at_once(monkeypatch, num_rows, max_queries):
    lengths = [(37 * row * row) % 900 if row % 6 > 3 else 250 + row for row in range(num_rows)]
    ids = [-1 - row % 6 if row % 6 <= 3 else -1 for row in range(num_rows)]
    table = torch.ones(num_rows, 70, dtype=torch.int64, device=DEVICE)
    rows = TileListRows(
        torch.tensor(lengths, device=DEVICE), None, table, num_rows, 1000, torch.tensor(ids, device=DEVICE), max_queries
    )
    found = []
    for at_once in (256, 32):
        monkeypatch.setattr(single_list, "MAX_BLOCK", at_once)
        tile_list = build_tile_list(rows, TileListHeads(4, 2, 16, 64), TileListSplits(37))
        num_singles = int(tile_list.totals[0])
        assert not tile_list.arrived.any() and (num_singles == num_rows) == (max_queries == 1)
        found.append((tile_list.totals, tile_list.singles[:num_singles], tile_list.shares))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_rows_with_a_program_for_each_head_are_split_from_1025_keys():
    lengths = torch.tensor([640, 1024, 1025, 3000], device=DEVICE).repeat(4)
    table = torch.ones(16, 400, dtype=torch.int64, device=DEVICE)
    rows, heads = TileListRows(lengths, None, table, 16, 6000), TileListHeads(2, 2, 16, 64)
    tile_list = build_tile_list(rows, heads, TileListSplits(16, row_programs=True))
    assert tile_list.singles[:4, 4].tolist() == [1, 1, 2, 3] and tile_list.singles[2:4, 3].tolist() == [640, 1024]
    assert tile_list.has_large_blocks


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [0] * 5),
        ([-1] * 5, [4, 99, 0, 0, 699]),
        ([-1, -1, 0, -1, -1], [0] * 5),  # it may complete a page that others read in this step
    ],
)
def test_only_a_step_without_given_tokens_has_keys_that_are_there_already(given, expected):
    lengths, table = torch.tensor([5, 100, 1, 0, 700]), torch.arange(1, 251).view(5, 50)
    table[3] = 0
    given = None if given is None else torch.tensor(given, device=DEVICE)
    for starts in (None, torch.arange(6, dtype=torch.int32, device=DEVICE)):
        tile_list = build_tile_list(
            TileListRows(lengths.to(DEVICE), starts, table.to(DEVICE), 5, 800, given),
            TileListHeads(4, 2, 16, 16),
            TileListSplits(),
        )
        assert tile_list.singles[:5, 7].tolist() == (expected if starts is None else [0] * 5)


def test_step_without_rows_of_one_token_has_empty_shares():
    starts = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    table = torch.ones(1, 1, dtype=torch.int64, device=DEVICE)
    tile_list = build_tile_list(
        TileListRows(torch.tensor([3], device=DEVICE), starts, table, 3, 2000),
        TileListHeads(2, 2, 16, 64),
        TileListSplits(5),
    )
    assert tile_list.totals[0] == 0 and not any(shares_of(tile_list))


def test_rows_of_few_keys_are_not_cut():
    """And positions of a drafted row at both sides of the border are computed apart."""
    lengths, table = torch.tensor([300, 511, 512, 513, 514, 700]), torch.ones(6, 50, dtype=torch.int64)
    ids = torch.tensor([-1, -1, -2, -3, -4, -1])
    tile_list = build_tile_list(
        TileListRows(lengths.to(DEVICE), None, table.to(DEVICE), 6, 800, ids.to(DEVICE), 4),
        TileListHeads(4, 2, 16, 16),
        TileListSplits(one_split=512),
    )
    records = tile_list.singles[: int(tile_list.totals[0])].tolist()
    assert [[record[0], record[6], record[8], record[3], record[4]] for record in records] == [
        [0, 300, 1, 512, 1], [1, 512, 2, 512, 1], [3, 514, 2, 256, 3], [5, 700, 1, 256, 3],
    ]  # fmt: skip
    facts = ((1, 64), (FEW_ROWS, 64), (FEW_ROWS + 1, 64), (1, 128))
    decodes = [DecodeRows(DEVICE, torch.bfloat16, 9, 3, dim, 16, rows) for rows, dim in facts]
    assert [rows.one_split for rows in decodes] == [512, 512, 0, 0]


def test_more_rows_are_cut_into_longer_pieces():
    assert [split_keys(rows) for rows in (1, FEW_ROWS, FEW_ROWS + 1, SOME_ROWS, SOME_ROWS + 1)] == [
        256, 256, 512, 512, 1024,
    ]  # fmt: skip


@pytest.mark.parametrize("together", [1, 900, 2000, 100_000])
@pytest.mark.parametrize("group", [1, 3])
def test_tiles_with_most_keys_come_first_among_neighbours(together, group):
    lengths, counts = [9, 300, 0, 900, 4, 700, 0, 800, 200, 520], [1, 100, 70, 33, 4, 700, 0, 600, 200, 520]
    starts = np.concatenate([[0], np.cumsum(counts)])
    total = int(starts[-1])
    table = torch.ones(len(lengths), 60, dtype=torch.int64, device=DEVICE)
    query_starts = torch.from_numpy(starts.astype(np.int32)).to(DEVICE)
    tile_list = build_tile_list(
        TileListRows(torch.tensor(lengths, device=DEVICE), query_starts, table, total + 130, 900),
        TileListHeads(2 * group, 2, 16, 64),
        TileListSplits(keys_together=together),
    )
    expected = []
    before = 0
    for row, (length, count) in enumerate(zip([*lengths, 0], [*counts, 130], strict=True)):
        if count == 1:
            continue
        many = count * group > 7 * 64
        held = length if 2 * length <= together else -(-length // together) * together
        for first in reversed(range(0, count * group, 64)):
            keys = min(length, length - count + (first + 63) // group + 1) if length else 0
            company = 1 + max(before + held - 1, before) // together if many else 0
            expected.append(((company, -keys, row, -first), [row, int(starts[row]), count, first, length]))
        before += held if many else 0
    num_tiles = int(tile_list.totals[1])
    assert tile_list.tiles[:num_tiles, :5].tolist() == [tile for _, tile in sorted(expected)]


def test_kernels_whose_results_are_read_early_release_nothing():
    """Attention reads page tables and tile lists before its own wait. A kernel that released it before its last store,
    even after its wait, would let it read what is not there: seen as an illegal address on an H200."""
    for name in ("elementwise.step_inputs_triton", "attention.tile_list", "attention.single_list"):
        module = importlib.import_module(f"slipstream.ops.{name}")
        assert "release_next" not in vars(module) and "gdc_launch_dependents" not in inspect.getsource(module), name
