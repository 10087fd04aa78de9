"""Sampling in Triton against the reference, interpreted without a GPU, compiled with one."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

CUDA = torch.cuda.is_available()
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and triton was imported before its interpreter could be chosen", allow_module_level=True)

from sampling_values import TRUNCATIONS  # noqa: E402
from slipstream.ops.sampling import reference  # noqa: E402
from slipstream.ops.sampling import triton as kernels  # noqa: E402
from slipstream.params.sampling import SamplingParams  # noqa: E402
from slipstream.runner.sampling import draw as draw_stage  # noqa: E402

# the interpreter's own use of numpy
IGNORED = ("ignore::DeprecationWarning", "ignore:overflow", "ignore:invalid value")
pytestmark = [pytest.mark.filterwarnings(ignored) for ignored in IGNORED]

DEVICE = torch.device("cuda" if CUDA else "cpu")
SHAPES = [(1, 7), (3, 100), (2, 1000), (3, 1025), (33, 7), (2, 4097)]


def randn(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


class Keys(NamedTuple):
    """Of rows, and a position for each."""

    rows: torch.Tensor
    positions: torch.Tensor

    def at(self, place: int) -> Keys:
        return Keys(self.rows[place : place + 1], self.positions[place : place + 1])


def keys_of(num: int, seed: int = 0) -> Keys:
    row_keys = torch.tensor([reference.row_key(seed + i, i) for i in range(num)], device=DEVICE)
    return Keys(row_keys, torch.arange(num, device=DEVICE) * 37)


def draw(
    ops: Any,
    logits: torch.Tensor,
    keys: Keys,
    random: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    limits: torch.Tensor | None = None,
    penalty: reference.Penalty | None = None,
    mask: reference.TokenMask | None = None,
) -> reference.Choice:
    """A token for each row of the logits, which is the row of the tables with this number."""
    rows = torch.arange(len(logits), device=DEVICE)
    random = torch.ones_like(rows, dtype=torch.bool) if random is None else random
    tables = reference.DrawTables(keys.rows, random, temperature, limits)
    return ops.draw_by_row(logits, rows, keys.positions, tables, penalty, mask)


def order_of(limits: torch.Tensor, size: int) -> list[tuple[torch.Tensor, int]]:
    """All rows by one sort; the reference keeps all of a row whose limits say so."""
    return [(torch.arange(len(limits), device=limits.device), size)]


LIMITS: list[Any] = [
    (0.0, 0, 2.0),  # neutral
    (0.0, 1, 2.0),
    (0.0, 5, 2.0),
    (0.0, 50, 2.0),
    (0.0, 0, 0.9),
    (0.0, 0, 0.01),
    (0.0, 0, 0.999),
    (0.2, 0, 2.0),
    (1.0, 0, 2.0),
    (0.0, 3, 0.5),
    (0.0, 70, 0.95),
    (0.05, 0, 0.8),
    (0.3, 40, 2.0),
    (0.001, 20, 0.9),
    *({name: value} for name, value in TRUNCATIONS.items()),
    TRUNCATIONS,
]


def limits_of(asks: Sequence[tuple[float, int, float] | dict[str, Any]], size: int) -> torch.Tensor:
    """`asks`: min_p, top_k and top_p of each row, or its parameters by name."""
    named = [ask if isinstance(ask, dict) else dict(min_p=ask[0], top_k=ask[1], top_p=min(ask[2], 1.0)) for ask in asks]
    rows = [draw_stage.limits_of(SamplingParams(**ask), size) for ask in named]
    return torch.tensor(rows, dtype=torch.float32, device=DEVICE)


# noise


@pytest.mark.parametrize(("rows", "size"), [(1, 7), (3, 1025)])
def test_noise_is_the_references_bit_for_bit(rows: int, size: int) -> None:
    keys = reference.step_keys(*keys_of(rows), reference.DRAW)
    assert kernels.noise_bits(keys, size).equal(reference.noise_bits(keys, size))


@pytest.mark.parametrize("purpose", [reference.DRAW, reference.DRAFT])
def test_step_keys_are_the_references(purpose: int) -> None:
    row_keys = torch.tensor([reference.row_key(i, i + 1) for i in range(33)], device=DEVICE)
    positions = torch.arange(33, device=DEVICE) * 131_071
    assert kernels.step_keys(row_keys, positions, purpose).equal(reference.step_keys(row_keys, positions, purpose))


# one token for each row


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_draw_takes_the_references_token(rows: int, size: int) -> None:
    logits, keys = randn(rows, size), keys_of(rows)
    assert draw(kernels, logits, keys).tokens.equal(draw(reference, logits, keys).tokens)


@pytest.mark.parametrize("is_limited", [False, True])
def test_draw_by_row_reads_the_tables_at_its_rows(is_limited: bool) -> None:
    """Draws of one row have its key, and their positions their noise: equal logits give other tokens."""
    num, size = 9, 1100
    tables = reference.DrawTables(
        torch.tensor([reference.row_key(3, i) for i in range(num)], device=DEVICE),
        torch.arange(num, device=DEVICE) != 4,
        torch.linspace(0.5, 2.0, num, device=DEVICE),
        limits_of(LIMITS[:num], size) if is_limited else None,
    )
    rows, positions = torch.tensor([7, 7, 7, 4, 0, 8], device=DEVICE), torch.tensor([5, 6, 7, 6, 6, 0], device=DEVICE)
    logits = randn(1, size).expand(6, size).contiguous()
    found, expected = (ops.draw_by_row(logits, rows, positions, tables) for ops in (kernels, reference))
    assert found.tokens.equal(expected.tokens) and found.failed.equal(expected.failed)
    assert len(set(found.tokens[:3].tolist())) == 3 and int(found.tokens[3]) == int(logits[0].argmax())


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, 1e5])
def test_draw_takes_the_references_token_at_any_scale(scale: float) -> None:
    """One token, several or all may win a chunk before their noise is known; rounding makes equals of large scores."""
    logits, keys = randn(4, 4200) * scale, keys_of(4)
    logits[1] = logits[1].round()
    logits[2, 1:] = -math.inf
    assert draw(kernels, logits, keys).tokens.equal(draw(reference, logits, keys).tokens)


@pytest.mark.parametrize("low", [0.0, -300.0, 200.0])
def test_draw_finds_the_token_wherever_the_scores_are(low: float) -> None:
    """The first block of a part, which estimates are relative to, may have no token, or far lower scores."""
    logits = randn(6, 4097, seed=3)
    logits[:, :1024] = torch.tensor([float("-inf"), -250.0, 0.0] * 2, device=DEVICE)[:, None]
    logits[:, 1024:] += low
    logits[3:, 1500:] = float("-inf")
    keys = keys_of(6)
    assert draw(kernels, logits, keys).tokens.equal(draw(reference, logits, keys).tokens)


@pytest.mark.parametrize("size", [100, 4200])  # of one chunk and of several, the last one short
def test_draw_scales_and_cuts_as_it_goes(size: int) -> None:
    """Large and small logits in all parts of a row; rows that are greedy, not cut, without a token, not numbers."""
    rows = len(LIMITS)
    logits, keys = randn(rows, size), keys_of(rows)
    logits[3] = -math.inf
    logits[9, size - 1] = math.nan
    logits[12, [7, size - 2]] = math.inf
    temperature = torch.linspace(0.3, 2.0, rows, device=DEVICE)
    random = torch.arange(rows, device=DEVICE) % 3 > 0
    args = (logits, keys, random, temperature, limits_of(LIMITS, size))
    before = logits.clone()
    mine, expected = draw(kernels, *args), draw(reference, *args)
    assert mine.tokens.equal(expected.tokens) and mine.failed.equal(expected.failed)
    assert logits.nan_to_num().equal(before.nan_to_num())
    assert mine.failed.nonzero().flatten().tolist() == [3, 9] and int(mine.tokens[12]) == 7
    greedy = ~random & ~mine.failed
    assert mine.tokens[greedy].equal(logits.argmax(-1)[greedy])
    few = [(args[0][row : row + 1], keys.at(row), *(arg[row : row + 1] for arg in args[2:])) for row in range(rows)]
    alone = torch.cat([draw(kernels, *each).tokens for each in few])
    assert mine.tokens.equal(alone)


@pytest.mark.parametrize(("rows", "size"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likeliest_is_the_first_of_equals(rows: int, size: int, dtype: torch.dtype) -> None:
    logits = randn(rows, size).round().to(dtype)  # many equals
    mine = kernels.argmax_rows(logits)
    assert mine.tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert not mine.failed.any()


@pytest.mark.parametrize("size", [7, 4100])
def test_rows_without_a_token_fail_alone(size: int) -> None:
    logits = randn(5, size)
    logits[1] = -math.inf
    logits[2, size - 1] = math.nan
    logits[3, :] = math.nan
    logits[4, 5] = math.inf
    for choice in (kernels.argmax_rows(logits), draw(kernels, logits, keys_of(5))):
        assert choice.failed.tolist() == [False, True, True, True, False]
        assert choice.tokens[1:].tolist() == [0, 0, 0, 5]


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    logits, keys = randn(5, 1025), keys_of(5)
    together = draw(kernels, logits, keys).tokens
    alone = torch.cat([draw(kernels, logits[i : i + 1], keys.at(i)).tokens for i in range(5)])
    assert together.equal(alone)


def test_a_row_of_a_wider_tensor_is_read_in_place() -> None:
    wide, keys = randn(3, 150), keys_of(3)
    narrow = wide[:, 20:120]
    assert draw(kernels, narrow, keys).tokens.equal(draw(kernels, narrow.contiguous(), keys).tokens)


# the floor


def check_floor(logits: torch.Tensor, limits: torch.Tensor, temperature: torch.Tensor | None = None) -> None:
    """The same tokens stay."""
    size = logits.shape[1]
    scaled = logits if temperature is None else logits / temperature[:, None]
    floor = kernels.find_floor(logits, limits, (), temperature)
    expected = reference.find_floor(logits, limits, order_of(limits, size), temperature)
    there = scaled > -math.inf
    kept, should = there & (scaled >= floor[:, None]), there & (scaled >= expected[:, None])
    for row in range(len(logits)):
        assert kept[row].equal(should[row]), (
            f"limits {limits[row].tolist()}: {int(kept[row].sum())} stay and not {int(should[row].sum())}"
        )


@pytest.mark.parametrize(("size", "scale"), [(7, 3.0), (100, 0.3), (1000, 3.0), (1025, 0.3), (9000, 3.0)])
def test_the_floor_keeps_what_a_sort_keeps(size: int, scale: float) -> None:
    limits = limits_of(LIMITS, size)
    check_floor(randn(len(LIMITS), size, seed=size, scale=scale), limits)


def test_the_floor_of_a_neutral_row_is_none() -> None:
    logits = randn(1, 100)
    assert kernels.find_floor(logits, limits_of([(0.0, 0, 2.0)], 100)).tolist() == [-math.inf]
    assert kernels.find_floor(logits, limits_of([(0.0, 100, 2.0)], 100)).tolist() == [-math.inf]


def test_ties_at_the_edge_stay() -> None:
    asks = [(ask[0], ask[1], 2.0) for ask in LIMITS if isinstance(ask, tuple)]
    logits = randn(len(asks), 300, scale=2.0).round()
    logits[:, 7] = 11.0  # above the ties, so that no sum decides by rounding
    check_floor(logits, limits_of(asks, 300))
    # top-p over equal weights, exactly representable: half of 256 equals, and one more where it is not whole
    flat = torch.zeros(2, 256, device=DEVICE)
    floor = kernels.find_floor(flat, limits_of([(0.0, 0, 0.5), (0.0, 10, 0.3)], 256))
    assert (flat >= floor[:, None]).all()


@pytest.mark.parametrize("top_k", [1, 5, 64])
@pytest.mark.parametrize("num_ties", [1, 3])
def test_top_k_keeps_k_and_what_ties_with_the_last_of_them(top_k: int, num_ties: int) -> None:
    """Rows in which k - 1, k, k + 1 and k + 2 logits lie over the rest: what reaches the k-th largest stays."""
    size = 300
    counts = [count for count in (top_k - 1, top_k, top_k + 1, top_k + 2) if count]
    logits = torch.full((len(counts), size), -7.0, device=DEVICE)
    for row, count in enumerate(counts):
        places = torch.randperm(size, generator=torch.Generator().manual_seed(row))[:count]
        values = torch.linspace(9.0, 3.0, count)
        values[max(0, min(top_k, count) - num_ties) : top_k + num_ties - 1] = 1.0  # around the k-th
        logits[row, places.to(DEVICE)] = values.to(DEVICE)
    limits = limits_of([(0.0, top_k, 2.0)] * len(counts), size)
    kth = logits.sort(-1, descending=True).values[:, top_k - 1]
    expected = (logits >= kth[:, None]).sum(-1)
    found = (logits >= kernels.find_floor(logits, limits)[:, None]).sum(-1)
    assert found.tolist() == expected.tolist()
    check_floor(logits, limits)


@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
@pytest.mark.parametrize("ties", [False, True])
def test_top_k_of_rows_with_about_as_many_tokens_left(top_k: int, ties: bool) -> None:
    """k - 1, k, k + 1 and k + 2 of them: the allowed ones, in one span or one in each, or what min-p leaves. So the
    search begins with a count that differs from k by one or two."""
    size = 1000
    rows, asks, wanted = [], [], []
    for count in range(max(1, top_k - 1), top_k + 3):
        values = torch.linspace(9.0, 5.0, count)
        if ties:
            values[top_k - 1 :] = 4.0
        stays = count if ties else min(count, top_k)
        for step, floor, min_p in ((1, -math.inf, 0.0), (128, -math.inf, 0.0), (7, -50.0, 1e-9)):
            row = torch.full((size,), floor)
            row[torch.arange(count) * step] = values
            rows.append(row)
            asks.append((min_p, top_k, 2.0))
            wanted.append(stays)
    logits, limits = torch.stack(rows).to(DEVICE), limits_of(asks, size)
    kept = (logits > -math.inf) & (logits >= kernels.find_floor(logits, limits)[:, None])
    assert kept.sum(-1).tolist() == wanted


def test_of_equals_with_the_last_of_k_only_k_count_for_a_share() -> None:
    logits = torch.full((2, 200), -9.0, device=DEVICE)
    logits[:, :4] = torch.tensor([3.0, 1.0, 1.0, 1.0]).log()
    limits = limits_of([(0.0, 2, 0.7), (0.0, 2, 0.8)], 200)  # of 3 + 1, not of 3 + 3
    check_floor(logits, limits)
    assert (logits >= kernels.find_floor(logits, limits)[:, None]).sum(-1).tolist() == [1, 4]


def test_of_equals_at_the_top_the_smallest_share_keeps_all() -> None:
    logits = randn(2, 7)
    logits[:, [2, 5]] = 9.0
    check_floor(logits, limits_of([(0.0, 0, 1e-50), (0.0, 0, 1e-30)], 7))


@pytest.mark.parametrize("finite", [1, 3, 60])
def test_the_floor_of_a_row_with_few_tokens_left(finite: int) -> None:
    logits = torch.full((len(LIMITS), 1000), -math.inf, device=DEVICE)
    places = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:finite].to(DEVICE)
    logits[:, places] = randn(len(LIMITS), finite)
    check_floor(logits, limits_of(LIMITS, 1000))


def test_the_floor_when_all_large_logits_lie_together() -> None:
    asks = [(0.0, 50, 0.9), (0.0, 0, 0.9), (0.01, 300, 2.0)]
    logits = randn(3, 4000)
    logits[:, 128:400] += 40
    check_floor(logits, limits_of(asks, 4000))
    check_floor(logits.sort(-1).values, limits_of(asks, 4000))


def test_the_floor_with_far_outliers_and_temperature() -> None:
    logits = randn(len(LIMITS), 1000)
    logits[:, 3] = -1e9
    logits[:, 4] = 30.0
    logits[:, 5] = -3e38  # which most temperatures here send to -inf
    temperature = torch.linspace(0.05, 3.0, len(LIMITS), device=DEVICE)
    check_floor(logits, limits_of(LIMITS, 1000), temperature)


def test_a_floor_is_found_whatever_the_row_holds() -> None:
    asks = [(0.0, 5, 0.9)] * 4
    logits = randn(4, 300)
    logits[0] = -math.inf
    logits[1, 17] = math.nan
    logits[2, [3, 200]] = math.inf
    logits[3] = math.nan
    floor = kernels.find_floor(logits, limits_of(asks, 300))
    assert floor[0] == -math.inf and floor[2] == math.inf
    kernels.drop_below_(logits, floor)
    choice = draw(kernels, logits, keys_of(4))
    assert choice.failed.tolist() == [True, True, False, True]
    assert choice.tokens[2] in (3, 200)


def test_the_floor_of_a_row_does_not_depend_on_the_batch() -> None:
    logits, limits = randn(3, 1025), limits_of([(0.0, 0, 0.9), (0.0, 70, 0.95), (0.05, 0, 0.8)], 1025)
    together = kernels.find_floor(logits, limits)
    for row in range(3):
        assert kernels.find_floor(logits[row : row + 1], limits[row : row + 1]).equal(together[row : row + 1])


def test_drop_below_is_the_references() -> None:
    mine = randn(33, 100)
    expected = mine.clone()
    floor = torch.linspace(-9.0, 9.0, 33, device=DEVICE)
    floor[3], floor[4] = -math.inf, math.nan
    kernels.drop_below_(mine, floor)
    reference.drop_below_(expected, floor)
    assert mine.equal(expected)


# edits


def flags_of(counts: torch.Tensor, share: float = 0.5) -> torch.Tensor:
    """As a row keeps them beside its counts; so many tokens are in the prompt too."""
    in_prompt = torch.rand(counts.shape, generator=torch.Generator().manual_seed(9)) < share
    flags = in_prompt.to(counts.device) * reference.IN_PROMPT + (counts > 0) * reference.IN_OUTPUT
    return flags.to(torch.uint8)


@pytest.mark.parametrize("size", [7, 1025, 2049])
def test_penalties_are_the_references(size: int) -> None:
    mine = randn(5, size)
    mine[2, 3] = -math.inf
    expected, before = mine.clone(), mine.clone()
    counts = torch.randint(0, 3, (4, size), dtype=torch.int32).to(DEVICE)
    seen = flags_of(counts)
    entries = torch.tensor([3, -1, 0, -1, 1], device=DEVICE)
    values = torch.tensor([[1.3, 0.5, 0.25], [1.0, 0.0, 0.0], [0.8, -0.5, 1.5]], device=DEVICE)[[1, 0, 2, 0, 0]]
    kernels.penalize_(mine, counts, seen, entries, values)
    reference.penalize_(expected, counts, seen, entries, values)
    torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
    assert mine[[1, 3]].equal(before[[1, 3]])


def test_a_penalty_entry_without_a_slot_changes_nothing() -> None:
    logits = randn(2, 100)
    before = logits.clone()
    ones = torch.ones(1, 100, device=DEVICE)
    values = torch.full((2, 3), 2.0, device=DEVICE)
    seen = flags_of(ones.int())
    kernels.penalize_(logits, ones.int(), seen, torch.tensor([-1, 0], device=DEVICE), values)
    assert logits[0].equal(before[0]) and not logits[1].isclose(before[1]).any()


@pytest.mark.parametrize("size", [7, 2049])
def test_work_on_all_rows_leaves_those_without_a_slot(size: int) -> None:
    """As captured work does it: every row, in order, and a negative entry for rows that use nothing."""
    torch.manual_seed(0)  # the masks of 7 tokens may allow all of them
    entries = torch.tensor([2, -1, 0, -1, 1], device=DEVICE)
    table = randn(4, size)
    table[0, 3] = -math.inf
    counts = torch.randint(0, 3, (4, size), dtype=torch.int32).to(DEVICE)
    values = torch.rand(5, 3).to(DEVICE) + 0.5
    seen = flags_of(counts)
    tokens = torch.tensor([size - 1, 5, 0, 2, 3], device=DEVICE)
    words = torch.randint(-(2**31), 2**31, (3, size // 32 + 2), device=DEVICE, dtype=torch.int32)
    words[0, :], words[1, : size // 64] = 0, -1  # blocks without an allowed token, and without a forbidden one
    for name, args in {
        "penalize_": (counts, seen, entries, values),
        "add_entries_": (None, table, entries),
        "mask_bits_": (words, entries),
        "forbid_": (None, tokens[:, None], entries >= 0),
    }.items():
        mine = randn(5, size)
        expected, before = mine.clone(), mine.clone()
        getattr(kernels, name)(mine, *args)
        getattr(reference, name)(expected, *args)
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6, msg=name)
        assert mine[[1, 3]].equal(before[[1, 3]]) and not mine[0].equal(before[0]), name
    mine, expected, flags, wanted = counts.clone(), counts.clone(), seen.clone(), seen.clone()
    kernels.count_(mine, flags, entries, tokens)
    reference.count_(expected, wanted, entries, tokens)
    assert mine.equal(expected) and int((mine - counts).sum()) == 3
    assert flags.equal(wanted) and flags.equal(seen | ((mine > 0) * reference.IN_OUTPUT).to(torch.uint8))
    assert [int((mine - counts)[row, token]) for row, token in ((2, size - 1), (0, 0), (1, 3))] == [1, 1, 1]


@pytest.mark.every_second("size", "dtype", "with_drafts")
@pytest.mark.parametrize(
    ("size", "dtype", "with_drafts"),
    [
        *product([7, 300], [torch.float32, torch.bfloat16], [False, True]),
        (4100, torch.float32, True),  # of several chunks
        (4100, torch.bfloat16, False),
    ],
)
def test_penalties_as_logits_are_read_are_those_of_an_edit(size: int, dtype: torch.dtype, with_drafts: bool) -> None:
    """Choosing, drawing and cutting, with rows that have no entry and with tokens that were seen once, often, never."""
    rows = 6
    logits, keys = randn(rows, size).to(dtype), keys_of(rows)
    entries = torch.tensor([2, -1, 0, 3, -1, 1], device=DEVICE)
    counts = torch.randint(0, 3, (4, size), dtype=torch.int32, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    seen = flags_of(counts, 0.1)
    values = torch.tensor([[3.0, 2.5, 1.25], [2.0, 0.0, 0.0], [0.8, -0.5, 5.5]], device=DEVICE).repeat(2, 1)
    earlier = None
    if with_drafts:  # the likeliest tokens, one of them twice, and rows without drafts
        earlier = logits.float().topk(3, 1).indices.repeat(1, 2)
        earlier[2:4], earlier[:, 4:] = -1, -1
    penalty = reference.Penalty(counts, seen, entries, values, earlier)
    temperature = torch.linspace(0.5, 1.5, rows, device=DEVICE)
    limits = limits_of([(0.0, 5, 0.9), (0.0, 3, 2.0), (0.05, 0, 2.0)] * 2, size)
    before = logits.clone()
    edited = logits.to(torch.float32, copy=True)
    kernels.penalize_(edited, *penalty)
    assert kernels.argmax_rows(logits, penalty).tokens.equal(kernels.argmax_rows(edited).tokens)
    assert not kernels.argmax_rows(edited).tokens.equal(kernels.argmax_rows(logits).tokens)
    floor = kernels.find_floor(logits, limits, None, temperature, penalty)
    torch.testing.assert_close(floor, kernels.find_floor(edited, limits, None, temperature))
    drawn = draw(kernels, logits, keys, None, temperature, limits, penalty)
    assert drawn.tokens.equal(draw(kernels, edited, keys, None, temperature, limits).tokens)
    assert logits.equal(before)
    for mine, expected in (
        (kernels.argmax_rows(logits, penalty), reference.argmax_rows(logits, penalty)),
        (drawn, draw(reference, logits, keys, None, temperature, limits, penalty)),
    ):
        assert mine.tokens.equal(expected.tokens) and mine.failed.equal(expected.failed)


def test_forbidden_tokens_are_the_references() -> None:
    index = torch.tensor([2, 0], device=DEVICE)
    ids = torch.tensor([[3, 3, 99], [0, 50, 3]], device=DEVICE)
    for name, where in {
        "forbid_": torch.tensor([True, False]),
        "forbid_matched_": torch.tensor([[True, False, False], [True, False, True]]),
    }.items():
        mine = randn(3, 100)
        expected = mine.clone()
        getattr(kernels, name)(mine, index, ids, where.to(DEVICE))
        getattr(reference, name)(expected, index, ids, where.to(DEVICE))
        assert mine.equal(expected) and mine.isinf().any(), name


def test_entries_are_added_to_some_rows() -> None:
    mine, table = randn(4, 2049), randn(3, 2049, seed=1)
    expected = mine.clone()
    args = torch.tensor([3, 1], device=DEVICE), table, torch.tensor([2, 0], device=DEVICE)
    kernels.add_entries_(mine, *args)
    reference.add_entries_(expected, *args)
    assert mine.equal(expected) and (mine[[0, 2]] == randn(4, 2049)[[0, 2]]).all()


def test_negative_ids_are_padding() -> None:
    logits = randn(2, 10)
    ids = torch.tensor([[-1, 4]], device=DEVICE)
    kernels.forbid_matched_(logits, torch.tensor([1], device=DEVICE), ids, torch.tensor([[True, True]], device=DEVICE))
    assert logits.isinf().nonzero().tolist() == [[1, 4]]


# logprobs


@pytest.mark.parametrize(("rows", "size"), SHAPES)
@pytest.mark.parametrize("k", [0, 1, 5, 20, 40])
def test_top_logprobs_are_the_references(rows: int, size: int, k: int) -> None:
    k = min(k, size)
    logits = randn(rows, size)
    tokens = torch.randint(0, size, (rows,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    mine, expected = kernels.top_logprobs(logits, tokens, k), reference.top_logprobs(logits, tokens, k)
    assert mine.rank.equal(expected.rank)
    assert mine.top_ids.equal(expected.top_ids)
    torch.testing.assert_close(mine.chosen, expected.chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.top, expected.top, rtol=1e-5, atol=1e-5)


def test_equals_come_in_order_and_count_as_likelier() -> None:
    logits = torch.zeros(1, 100, device=DEVICE)
    logits[0, 50] = logits[0, 20] = 1.0
    out = kernels.top_logprobs(logits, torch.tensor([50], device=DEVICE), 4)
    assert out.top_ids.tolist() == [[20, 50, 0, 1]]
    assert out.rank.tolist() == [2]


def test_logprobs_of_rows_that_hold_minus_infinity() -> None:
    logits = randn(2, 4500)
    logits[:, :4400] = -math.inf
    logits[1, 4401:] = -math.inf
    tokens = torch.tensor([4450, 4400], device=DEVICE)
    mine, expected = kernels.top_logprobs(logits, tokens, 5), reference.top_logprobs(logits, tokens, 5)
    torch.testing.assert_close(mine.chosen, expected.chosen)
    torch.testing.assert_close(mine.top, expected.top)
    assert mine.top_ids[0].equal(expected.top_ids[0]) and mine.top_ids[1, 0] == 4400
    assert len(set(mine.top_ids[1].tolist())) == 5


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_logprobs_of_given_ids(rows: int, size: int) -> None:
    logits = randn(rows, size)
    ids = torch.randint(0, size, (rows, 3), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    torch.testing.assert_close(
        kernels.logprobs_of(logits, ids), reference.logprobs_of(logits, ids), rtol=1e-5, atol=1e-5
    )


# what only a GPU can say

ROWS, VOCABULARY = 256, 151_936


@pytest.fixture(scope="module")
def large() -> torch.Tensor:
    return torch.randn(ROWS, VOCABULARY, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) * 2


@pytest.mark.cuda
def test_large_draws_are_nearly_all_the_references(large: torch.Tensor) -> None:
    keys = keys_of(ROWS)
    step_keys = reference.step_keys(*keys_of(4), reference.DRAW)
    assert kernels.noise_bits(step_keys, VOCABULARY).equal(reference.noise_bits(step_keys, VOCABULARY))
    # the last bits of a logarithm may decide between two of a hundred thousand
    assert (draw(kernels, large, keys).tokens != draw(reference, large, keys).tokens).sum() <= 1
    assert kernels.argmax_rows(large).tokens.equal(large.argmax(-1))


@pytest.mark.cuda
def test_large_floors_keep_what_a_sort_keeps(large: torch.Tensor) -> None:
    asks = [(0.0, 50, 2.0), (0.0, 50, 0.95), (0.0, 0, 0.95), (0.1, 0, 2.0), (0.0, 2000, 0.9), (0.01, 0, 0.9)]
    limits = limits_of([asks[row % len(asks)] for row in range(ROWS)], VOCABULARY)
    for scale in (1.0, 4.0):
        logits = large * scale
        floor = kernels.find_floor(logits, limits)
        expected = reference.find_floor(logits, limits, order_of(limits, VOCABULARY))
        kept, should = (logits >= floor[:, None]).sum(-1), (logits >= expected[:, None]).sum(-1)
        exact = limits[:, 2] > 1
        assert kept[exact].equal(should[exact])
        # sums of 150,000 weights in another order: the edge moves by a few tokens of tiny weight
        assert ((kept - should).abs() <= 2 + should // 2000).all()


@pytest.mark.cuda
def test_a_large_draw_follows_its_distribution() -> None:
    logits = torch.full((1, VOCABULARY), -math.inf, device="cuda")
    places = torch.randperm(VOCABULARY, device="cuda")[:40]
    logits[0, places] = torch.randn(40, device="cuda")
    expected = logits[0, places].softmax(-1)
    num = 1 << 14
    row_key = torch.full((num,), reference.row_key(5, 0), device="cuda")
    drawn = []
    for start in range(0, num, 256):
        keys = Keys(row_key[:256], start + torch.arange(256, device="cuda"))
        drawn.append(draw(kernels, logits.expand(256, -1), keys).tokens)
    counts = torch.cat(drawn).bincount(minlength=VOCABULARY)
    assert counts.sum() == counts[places].sum() == num
    chi_square = ((counts[places] - expected * num).square() / (expected * num)).sum()
    assert chi_square < 90  # 39 degrees of freedom: passed once in 200,000


@pytest.mark.cuda
def test_a_large_row_is_the_same_alone_and_among_others(large: torch.Tensor) -> None:
    keys = keys_of(ROWS)
    limits = limits_of([(0.0, 0, 0.9)] * ROWS, VOCABULARY)
    tokens, floor = draw(kernels, large, keys).tokens, kernels.find_floor(large, limits)
    top = kernels.top_logprobs(large, tokens, 5)
    for row in (0, 17, 255):
        own = slice(row, row + 1)
        assert draw(kernels, large[own], keys.at(row)).tokens.equal(tokens[own])
        assert kernels.find_floor(large[own], limits[own]).equal(floor[own])
        mine = kernels.top_logprobs(large[own], tokens[own], 5)
        assert all(a.equal(b[own]) for a, b in zip(mine, top, strict=True))


@pytest.mark.cuda
def test_nothing_waits_for_the_device(large: torch.Tensor) -> None:
    logits, keys = large[:8].clone(), keys_of(8)
    limits = limits_of([(0.01, 50, 0.9)] * 8, VOCABULARY)
    index = torch.arange(8, device="cuda")
    counts = torch.zeros(8, VOCABULARY, dtype=torch.int32, device="cuda")
    values = torch.ones(8, 3, device="cuda")

    def everything() -> None:
        kernels.penalize_(logits, counts, counts.byte(), index, values)
        kernels.forbid_(logits, index, index[:, None], index > 3)
        floor = kernels.find_floor(logits, limits)
        kernels.drop_below_(logits, floor)
        tokens = draw(kernels, logits, keys, index > 4, limits[:, 2].contiguous()).tokens
        kernels.top_logprobs(large[:8], tokens, 5)
        kernels.logprobs_of(large[:8], tokens[:, None])

    everything()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("size", [5, 2050])
def test_accepted_drafts_count_as_output(size: int) -> None:
    """A row's drafts penalise as if they had been counted, also where a token comes twice; entries share a slot."""
    counts = torch.zeros(2, size, dtype=torch.int32, device=DEVICE)
    seen = torch.zeros(2, size, dtype=torch.uint8, device=DEVICE)
    values = torch.tensor([[1.5, 0.25, 0.5]] * 3, device=DEVICE)
    entries, earlier = torch.tensor([1, 1, 1], device=DEVICE), torch.tensor([[-1, -1], [3, -1], [3, 3]], device=DEVICE)
    for ops in (kernels, reference):
        logits = randn(1, size).expand(3, size).contiguous()
        step_by_step = [logits[:1].clone() for _ in range(3)]
        mine, flags = counts.clone(), seen.clone()
        for place, own in enumerate(step_by_step):
            ops.penalize_(own, mine, flags, entries[:1], values[:1])
            ops.count_(mine, flags, entries[:1], torch.tensor([3], device=DEVICE))
            assert mine[1, 3] == place + 1 and mine.sum() == place + 1
        ops.penalize_(logits, counts, seen, entries, values, earlier)
        torch.testing.assert_close(logits, torch.cat(step_by_step))
        together, flags = counts.clone(), seen.clone()
        ops.count_(together, flags, entries, torch.tensor([3, 3, 3], device=DEVICE))
        assert together.equal(mine)
