"""A step's inputs: the reference against slow, obvious code, and the kernel against the reference."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from slipstream.ops.elementwise import KeptTokens, StepInputs, StepRows, native, reference
from slipstream.ops.platform import native as c_kernels

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
PAGE = 4
WIDTH = 300
DRAFTS = 2

# the interpreter's own use of numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def kernel_gather(*args: Any, **kwargs: Any) -> StepInputs:
    pytest.importorskip("triton", reason="triton is not installed")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    from slipstream.ops.elementwise.step_inputs_triton import gather_inputs

    return gather_inputs(*args, **kwargs)


def native_gather(*args: Any, **kwargs: Any) -> StepInputs:
    if CUDA or not c_kernels.build():
        pytest.skip("the C kernel needs tensors on the CPU, and a C compiler")
    return native.gather_inputs(*args, **kwargs)


GATHERS = pytest.mark.parametrize(
    "gather", [reference.gather_inputs, native_gather, kernel_gather], ids=["reference", "native", "kernel"]
)


def tables(groups: int = 2, num_rows: int = 9) -> tuple[torch.Tensor, ...]:
    """Row tables whose last row is padding: nothing computed, and page 0 everywhere."""
    computed = torch.randint(0, 900, (num_rows,))
    next_tokens = torch.randint(0, 50_000, (num_rows, 1 + DRAFTS))
    next_tokens[num_rows // 2 :, DRAFTS] = -1  # no draft
    pages = torch.randint(1, 10_000, (groups, num_rows, WIDTH))
    computed[-1] = 0
    next_tokens[-1] = 0
    pages[:, -1] = 0
    return tuple(x.to(DEVICE) for x in (computed, next_tokens, pages))


def staged(rows: list[int], counts: list[int]) -> dict[str, torch.Tensor]:
    arrays = {
        "rows": rows,
        "counts": counts,
        "token_rows": [row for row, count in zip(rows, counts, strict=True) for _ in range(count)],
        "offsets": [offset for count in counts for offset in range(count)],
    }
    return {name: torch.tensor(array, dtype=torch.int64, device=DEVICE) for name, array in arrays.items()}


def check(out: StepInputs, state: tuple[torch.Tensor, ...], rows: list[int], counts: list[int], host_ids: Any) -> None:
    computed, next_tokens, pages = (x.cpu() for x in state)
    token = 0
    for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
        assert out.lengths[place] == computed[row] + count
        for offset in range(count):
            position = int(computed[row]) + offset
            assert out.positions[token] == position
            known = -1 if host_ids is None else int(host_ids[token])
            expected = known if known >= 0 else max(int(next_tokens[row, -1 - known]), 0)
            assert out.ids[token] == expected
            for group in range(len(pages)):
                slot = pages[group, row, position // PAGE] * PAGE + position % PAGE
                assert out.slots[group, token] == slot
            token += 1
        assert out.pages[:, place].cpu().equal(pages[:, row, : out.pages.shape[2]])
    assert len(out.ids) == token


@pytest.mark.parametrize("width", [16, 17])
def test_several_programs_copy_the_pages_of_a_row(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_gather(*tables(1), PAGE, 1, StepRows(torch.tensor([5], device=DEVICE)))  # skips where there is no kernel
    monkeypatch.setattr("slipstream.ops.elementwise.step_inputs_triton._PAGES", 8)
    state, rows = tables(2), [5, 0, 3]
    out = kernel_gather(*state, PAGE, width, StepRows(torch.tensor(rows, device=DEVICE)))
    check(out, state, rows, [1] * 3, None)


@GATHERS
@pytest.mark.parametrize("groups", [1, 2])
def test_rows_of_one_token(gather: Any, groups: int) -> None:
    state, rows = tables(groups), [5, 0, 3]
    out = gather(*state, PAGE, 17, StepRows(torch.tensor(rows, device=DEVICE)))
    check(out, state, rows, [1] * 3, None)
    host_ids = torch.tensor([-1, 77, -1], device=DEVICE)
    check(
        gather(*state, PAGE, 17, StepRows(torch.tensor(rows, device=DEVICE), host_ids=host_ids)),
        state,
        rows,
        [1] * 3,
        host_ids,
    )


@GATHERS
@pytest.mark.parametrize("width", [1, 256, WIDTH])
def test_rows_of_several_tokens(gather: Any, width: int) -> None:
    state, rows, counts = tables(), [2, 7, 0, 4], [1, 1, 140, 9]
    host_ids = torch.full((151,), -1, device=DEVICE)
    host_ids[2:142] = torch.arange(140)
    arrays = staged(rows, counts)
    out = gather(*state, PAGE, width, StepRows(**arrays, host_ids=host_ids))
    check(out, state, rows, counts, host_ids)
    assert all(x.dtype is torch.int64 for x in out)


@GATHERS
def test_drafts_follow_the_token_drawn_last(gather: Any) -> None:
    """Positions of a drafted row as rows of one token each."""
    state = tables()
    rows = [2, 2, 2, 5, 6, 6, 6]
    offsets = torch.tensor([0, 1, 2, 0, 0, 1, 2], device=DEVICE)
    own = torch.tensor(rows, device=DEVICE)
    out = gather(*state, PAGE, 5, StepRows(own, offsets + 1, None, offsets, -1 - offsets))
    computed, next_tokens, _ = state
    assert out.lengths.equal(computed[own] + offsets + 1) and out.positions.equal(computed[own] + offsets)
    assert out.ids.tolist() == [max(int(next_tokens[row, at]), 0) for row, at in zip(rows, offsets, strict=True)]
    assert out.ids[-1] == 0, "a missing draft reads some token"


@GATHERS
def test_padding_rows_have_no_length_and_lie_in_page_zero(gather: Any) -> None:
    state = tables()
    rows = torch.tensor([3, 8, 8], device=DEVICE)
    counts = torch.tensor([1, 0, 0], device=DEVICE)
    out = gather(*state, PAGE, 5, StepRows(rows, counts, rows))
    assert out.lengths.tolist() == [int(state[0][3]) + 1, 0, 0]
    assert (out.slots[:, 1:] < PAGE).all() and not out.pages[:, 1:].any()


@GATHERS
@pytest.mark.parametrize("num_rows", [3, 300])
def test_rows_are_advanced_to_their_new_lengths(gather: Any, num_rows: int) -> None:
    state = tables(num_rows=num_rows + 2)
    rows = torch.randperm(num_rows + 1, device=DEVICE)[:num_rows]
    padded = torch.cat([rows, torch.full((2,), num_rows + 1, device=DEVICE)])
    counts = (padded <= num_rows).long()
    for step in (StepRows(rows), StepRows(padded, counts, None, counts * 0, counts * 0 - 1)):
        before = state[0].clone()
        expected = reference.gather_inputs(*state, PAGE, 5, step)
        out = gather(*state, PAGE, 5, step, advance=True)
        for mine, other in zip(out, expected, strict=True):
            assert mine.equal(other)
        before[rows] += 1
        assert state[0].equal(before), "the padding row stays at 0"


@GATHERS
def test_a_drafted_row_advances_to_one_of_its_positions(gather: Any) -> None:
    state = tables()
    own = torch.tensor([2, 2, 2, 5, 6, 6, 8], device=DEVICE)  # the last one is padding
    offsets = torch.tensor([0, 1, 2, 0, 0, 1, 0], device=DEVICE)
    counts = torch.tensor([1, 2, 3, 1, 1, 2, 0], device=DEVICE)
    step = StepRows(own, counts, None, offsets, -1 - offsets)
    before, expected = state[0].clone(), reference.gather_inputs(*state, PAGE, 5, step)
    out = gather(*state, PAGE, 5, step, advance=True)
    for mine, other in zip(out, expected, strict=True):
        assert mine.equal(other)
    moved = (state[0] - before).tolist()
    assert moved[2] in (1, 2, 3) and moved[6] in (1, 2) and moved[5] == 1
    assert not any(moved[row] for row in (0, 1, 3, 4, 7, 8))


@GATHERS
def test_results_go_where_they_are_asked_to(gather: Any) -> None:
    state, rows = tables(), torch.tensor([1, 6], device=DEVICE)
    sizes = ((2,), (2,), (2,), (2, 2), (2, 2, 40))
    out = StepInputs(*(torch.full(size, -7, device=DEVICE) for size in sizes))
    expected = reference.gather_inputs(*state, PAGE, 11, StepRows(rows))
    assert gather(*state, PAGE, 11, StepRows(rows), out=out) is out
    for mine, other in zip(out[:4], expected[:4], strict=True):
        assert mine.equal(other)
    assert out.pages[:, :, :11].equal(expected.pages) and (out.pages[:, :, 11:] == -7).all()


@GATHERS
@pytest.mark.parametrize("group", [0, 1, -1])
def test_ids_are_kept_for_drafters(gather: Any, group: int) -> None:
    """At the slots of a group; without groups each row has its own pages, after one for padding."""
    state, row_size = tables(max(0, group + 1)), 1200
    own = torch.tensor([2, 2, 5, 8], device=DEVICE)  # the last one is padding
    offsets = torch.tensor([0, 1, 0, 0], device=DEVICE)
    host_ids = torch.tensor([-1, -2, 77, -1], device=DEVICE)
    num_pages = 10_000 if group >= 0 else 1 + 9 * row_size // PAGE
    kept = torch.full((num_pages, PAGE), -5, dtype=torch.int32, device=DEVICE)
    step = StepRows(own, offsets + 1, None, offsets, host_ids)
    out = gather(*state, PAGE, 5, step, kept=KeptTokens(kept, group, 0 if group >= 0 else row_size))
    at = out.slots[group] if group >= 0 else PAGE + own * row_size + out.positions
    expected = torch.full_like(kept, -5)
    expected.view(-1)[at] = out.ids.int()
    assert kept.equal(expected) and (kept >= 0).sum() == 4


@pytest.mark.cuda
def test_a_step_of_many_rows_without_a_wait() -> None:
    num_rows = 1025
    computed = torch.randint(0, 30_000, (num_rows,), device="cuda")
    next_tokens = torch.randint(0, 150_000, (num_rows, 5), device="cuda")
    pages = torch.randint(1, 1 << 20, (2, num_rows, 2560), device="cuda")
    rows = torch.randperm(num_rows, device="cuda")[:1024]
    args = (computed, next_tokens, pages, 16, 2560, StepRows(rows))
    kernel_gather(*args)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = kernel_gather(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, other in zip(out, reference.gather_inputs(*args), strict=True):
        assert mine.equal(other)
