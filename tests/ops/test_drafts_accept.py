"""Acceptance of drafts: the reference against a plain loop, and the kernel against the reference."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.ops.sampling import Accepted, DrawnTokens, drafts, earlier_drafts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAFTS, ROWS = 4, 9


def make(seed: int) -> tuple[torch.Tensor, torch.Tensor, DrawnTokens]:
    """Random rows of 1 to 5 places, some of whose drafts equal the drawn tokens, and padding at the end, whose
    positions may be those of any row."""
    rng = random.Random(seed)
    next_tokens = torch.tensor([[rng.randrange(3) for _ in range(1 + DRAFTS)] for _ in range(ROWS)])
    computed = torch.tensor([rng.randrange(100) for _ in range(ROWS - 1)] + [0])
    rows, offsets, failed = [], [], []
    for row in rng.sample(range(ROWS - 1), rng.randrange(1, ROWS)):
        for offset in range(rng.choice([1, 1, 2, 1 + DRAFTS])):
            rows.append(row)
            offsets.append(offset)
            failed.append(rng.random() < 0.1)
    padding = rng.randrange(3)
    rows, offsets, failed = rows + [ROWS - 1] * padding, offsets + [0] * padding, failed + [False] * padding
    own, places = torch.tensor(rows), torch.tensor(offsets)
    positions = computed[own] + places + 1 + (own == ROWS - 1) * rng.randrange(100)
    tokens = torch.tensor([rng.randrange(3) for _ in rows])
    parts = (next_tokens, computed, own, places, positions, tokens, torch.tensor(failed))
    next_tokens, computed, *drawn = (part.to(DEVICE) for part in parts)
    return next_tokens, computed, DrawnTokens(*drawn)


def op(name: str, kind: str):
    if kind == "reference":
        return getattr(drafts, name)
    if DEVICE == "cpu" and not pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    from slipstream.ops.sampling import drafts_triton

    return getattr(drafts_triton, name)


def results(num: int) -> Accepted:
    """Places in a buffer of bytes, with one byte more than the draws need."""
    buffer = torch.full((10 * num + 32,), 7, dtype=torch.uint8, device=DEVICE)
    tokens, kept, failed = buffer[16 : 16 + 8 * num], buffer[16 + 8 * num : -num - 1], buffer[-num - 1 :]
    return Accepted(tokens.view(torch.int64), kept[:num].view(torch.bool), failed[:num].view(torch.bool))


KINDS = pytest.mark.parametrize("kind", ["reference", "kernel"])


@KINDS
@pytest.mark.parametrize("in_place", [False, True])
def test_tokens_are_accepted_while_they_equal_the_drafts(kind: str, in_place: bool) -> None:
    accept = op("accept_", kind)
    for seed in range(60):
        next_tokens, computed, drawn = make(seed)
        wanted_next, wanted_computed = next_tokens.clone(), computed.clone()
        kept, failed = ([False] * len(drawn.rows) for _ in range(2))
        rows, offsets, _, tokens, bad = (x.tolist() for x in drawn)
        for first in (place for place, offset in enumerate(offsets) if offset == 0):
            row, place, count = rows[first], first, 0
            while place < len(rows) and (place == first or offsets[place] > 0):
                if place > first and tokens[place - 1] != int(next_tokens[row, offsets[place]]):
                    break
                if bad[place]:
                    failed[place] = True
                    break
                kept[place], count, place = True, count + 1, place + 1
            if count and row != ROWS - 1:
                wanted_next[row, 0] = tokens[first + count - 1]
                wanted_computed[row] = drawn.positions[first + count - 1]
        out = results(len(rows)) if in_place else None
        got = accept(next_tokens, computed, drawn, out)
        assert out is None or got is out
        assert got.tokens.tolist() == tokens, "tokens are reported as drawn"
        real = drawn.rows != ROWS - 1
        for mine, expected in zip(got[1:], (kept, failed), strict=True):
            assert mine[real].tolist() == torch.tensor(expected)[real.cpu()].tolist(), seed
        assert next_tokens[:-1].equal(wanted_next[:-1]) and computed.equal(wanted_computed), seed


@KINDS
def test_rows_without_drafts_keep_the_token_that_they_drew(kind: str) -> None:
    """One row, a whole block of them, and one more; padding rows too."""
    store = op("store_drawn_", kind)
    for num in (1, 128, 129):
        next_tokens = torch.randint(0, 99, (num + 3, 1 + DRAFTS), device=DEVICE)
        rows = torch.cat([torch.randperm(num + 2)[: num - 1], torch.tensor([num + 2])]).to(DEVICE)
        tokens, failed = torch.randint(100, 200, (num,), device=DEVICE), torch.rand(num, device=DEVICE) < 0.3
        expected = next_tokens.clone()
        expected[rows, 0] = tokens
        for out in (None, results(num)):
            places = None if out is None else (out.tokens, out.failed)
            got = store(next_tokens, rows, tokens, failed, places)
            assert got[0].equal(tokens) and got[1].equal(failed) and (places is None or got is places)
            assert next_tokens.equal(expected), num


def test_a_place_has_read_the_drafts_before_it() -> None:
    next_tokens = torch.tensor([[9, 1, 2, 3], [9, 4, -1, 6]])
    rows, offsets = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 2, 0, 1, 3])
    got = earlier_drafts(next_tokens, rows, offsets)
    assert got.tolist() == [[-1, -1, -1], [1, 2, -1], [-1, -1, -1], [4, -1, -1], [4, -1, 6]]
