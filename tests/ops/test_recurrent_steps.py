"""The chunks of a step: the reference against slow, obvious code, and the kernel against the same."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.contracts.cache_spec import STATE_CHUNK
from slipstream.ops.recurrent import max_chunks, steps

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

# the interpreter's own use of numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def kernel_list(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pytest.importorskip("triton", reason="triton is not installed")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    from slipstream.ops.recurrent.steps_triton import list_chunks

    return list_chunks(*args)


LISTS = pytest.mark.parametrize("list_chunks", [steps.list_chunks, kernel_list], ids=["reference", "kernel"])
Lister = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def expected(
    first: list[int], num: list[int], saves: list[tuple[int, int, int]]
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Position by position."""
    chunks: list[tuple[int, int, int, int]] = []
    starts = [0]
    slot_of = {(row, position): slot for row, position, slot in saves}
    token = 0
    for row, (begin, count) in enumerate(zip(first, num, strict=True)):
        length, at = 0, token
        for position in range(begin, begin + count):
            length += 1
            token += 1
            if (position + 1) % STATE_CHUNK == 0 or position + 1 == begin + count:
                chunks.append((row, at, length, slot_of.get((row, position + 1), -1)))
                length, at = 0, token
        starts.append(len(chunks))
    return chunks, starts


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def check(
    list_chunks: Lister, first: list[int], num: list[int], saves: list[tuple[int, int, int]], padding: int = 0
) -> None:
    want, want_starts = expected(first, num, saves)
    starts = [sum(num[:row]) for row in range(len(num) + 1)]
    entries = max_chunks(sum(num) + padding, len(num))
    assert len(want) <= entries
    given = None if not saves and not padding else ints([*saves, *[(-1, -1, -1)] * (1 + padding)])
    chunks, chunk_starts = list_chunks(ints(starts), ints(first), given, entries)
    assert chunk_starts.tolist() == want_starts
    assert [tuple(line) for line in chunks[: len(want)].tolist()] == want
    unused = chunks[len(want) :].cpu()
    assert (unused[:, [0, 3]] == -1).all() and (unused[:, 1:3] == 0).all()


@LISTS
@pytest.mark.parametrize(
    ("first", "num"),
    [([0], [1]), ([63], [2]), ([64], [64]), ([5], [130]), ([0, 127, 640], [64, 1, 3]), ([3, 9], [1, 200])],
)
def test_chunks_end_at_multiples_of_absolute_positions(list_chunks: Lister, first: list[int], num: list[int]) -> None:
    check(list_chunks, first, num, [])


@LISTS
def test_padding_rows_have_no_chunks(list_chunks: Lister) -> None:
    check(list_chunks, [100, 0, 0], [100, 0, 0], [(0, 128, 7)], padding=50)
    check(list_chunks, [0, 70, 0], [0, 5, 0], [], padding=3)


@LISTS
def test_random_steps_with_saves(list_chunks: Lister) -> None:
    rng = random.Random(3)
    for _ in range(12):
        num_rows = rng.randint(1, 9)
        first = [rng.choice([0, rng.randrange(300)]) for _ in range(num_rows)]
        num = [rng.choice([0, 1, 1, rng.randint(1, 300)]) for _ in range(num_rows)]
        borders = [
            (row, position)
            for row in range(num_rows)
            for position in range(STATE_CHUNK, 700, STATE_CHUNK)
            if first[row] < position <= first[row] + num[row]
        ]
        saves = [(row, position, 10 + n) for n, (row, position) in enumerate(borders) if rng.random() < 0.5]
        check(list_chunks, first, num, saves, padding=rng.choice([0, 0, 100]))


@pytest.mark.parametrize("is_single", [False, True])
def test_what_states_have_seen(is_single: bool) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    from slipstream.ops.recurrent.steps_triton import advance_seen_

    rng = random.Random(4)
    table = ints([rng.randrange(50) for _ in range(199)] + [0])
    rows = torch.tensor([*rng.sample(range(199), 150), 199, 199], device=DEVICE)  # two are padding
    # some rows are at the last position that their state has seen, some states have not seen the last tokens
    first = table[rows] + ints([rng.choice([-1, 0, 0, 3]) for _ in rows]) * (table[rows] > 0)
    num = [1 if is_single else rng.choice([1, 1, 2, 9]) for _ in rows[:-2]] + [int(is_single)] * 2
    starts = ints([sum(num[:row]) for row in range(len(num) + 1)])
    seen, expected = table[rows], table.clone()
    for advance, own in ((steps.advance_seen_, expected), (advance_seen_, table)):
        made = advance(own, rows, starts, first.long(), 4, is_single)
        assert all(field.dtype == torch.int32 for field in made)
        assert made.slots.equal(rows.int()) and made.first_positions.equal(first) and made.seen_positions.equal(seen)
    assert table.equal(expected) and not table[-1] and (table[rows] > seen).any()


def test_the_bound_on_chunks_is_reached() -> None:
    assert max_chunks(2, 1) == 2 and max_chunks(66, 1) == 3 and max_chunks(5, 5) == 5
    assert len(expected([63, 63], [66, 66], [])[0]) == 6 == max_chunks(132, 2)
