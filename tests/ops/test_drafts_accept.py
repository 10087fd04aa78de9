"""Acceptance of drafts: the reference against a plain loop, and the kernel against the reference."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.ops.drafts import DrawnTokens, earlier_drafts, reference

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


def accept_kernel(*args):
    if DEVICE == "cpu" and not pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    from slipstream.ops.drafts.triton import accept_

    return accept_(*args)


@pytest.mark.parametrize("accept", [reference.accept_, accept_kernel], ids=["reference", "kernel"])
def test_tokens_are_accepted_while_they_equal_the_drafts(accept) -> None:
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
        got = accept(next_tokens, computed, drawn)
        real = drawn.rows != ROWS - 1
        for mine, expected in zip(got, (kept, failed), strict=True):
            assert mine[real].tolist() == torch.tensor(expected)[real.cpu()].tolist(), seed
        assert next_tokens[:-1].equal(wanted_next[:-1]) and computed.equal(wanted_computed), seed


def test_a_place_has_read_the_drafts_before_it() -> None:
    next_tokens = torch.tensor([[9, 1, 2, 3], [9, 4, -1, 6]])
    rows, offsets = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 2, 0, 1, 3])
    got = earlier_drafts(next_tokens, rows, offsets)
    assert got.tolist() == [[-1, -1, -1], [1, 2, -1], [-1, -1, -1], [4, -1, -1], [4, -1, 6]]
