"""Attention of whole rows in Triton against plain float64, interpreted without a GPU, compiled with one."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

CUDA = torch.cuda.is_available()
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and triton was imported before its interpreter could be chosen", allow_module_level=True)

from slipstream.ops.attention import bidirectional  # noqa: E402
from slipstream.ops.attention.bidirectional_triton import Cut, attend_bidirectional, choose_cut, list_tiles  # noqa: E402

# the interpreter's own use of numpy
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore:overflow")]

DEVICE = torch.device("cuda" if CUDA else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SMALL = Cut(16, 16, 4, 2)  # several tiles and blocks in rows that the interpreter can afford


def run(
    counts: list[int],
    heads: int = 2,
    kv_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    reach: int = 0,
    biased: bool = False,
    padding: tuple[int, int] = (0, 0),  # rows and tokens of padding
    cut: Cut = SMALL,
    seen: list[int] | None = None,
    relative: int = 0,  # 1: of queries, 2: of keys too
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel gives, and what it should, in float64; without the tokens of padding, which must be zero."""
    generator = torch.Generator().manual_seed(sum(counts) + dim)
    total = sum(counts)
    # as they come out of one product: side by side
    merged = torch.randn(total + padding[1], heads + 2 * kv_heads, dim, generator=generator).to(DEVICE, dtype)
    merged[total:] = torch.nan
    query, key, value = merged.split([heads, kv_heads, kv_heads], 1)
    bias = None
    if biased:
        bias = torch.randn(heads, 2 * max(counts) + 5, generator=generator).to(DEVICE, dtype)
    lines = [None, None]
    for i in range(relative):
        lines[i] = torch.randn(total + padding[1], heads, 2 * max(counts) + 5, generator=generator).to(DEVICE, dtype)
        lines[i][total:] = torch.nan
    ends = np.cumsum([0, *counts])
    starts = torch.from_numpy(np.concatenate([ends, [total] * padding[0]]).astype(np.int32)).to(DEVICE)
    of_rows = None if seen is None else torch.tensor([*seen, *[0] * padding[0]], dtype=torch.int32, device=DEVICE)
    tiles = list_tiles(starts, total + padding[1], cut, of_rows)
    out = attend_bidirectional(query, key, value, dim**-0.5, tiles, cut, reach, bias, *lines)
    assert not out[total:].count_nonzero()
    metadata = bidirectional.bidirectional_metadata(
        np.array(counts, np.int32), None if seen is None else np.array(seen, np.int32)
    )
    wide = None if bias is None else bias.double()
    inputs = (x[:total].double() for x in (query, key, value))
    by_distance = [None if x is None else x[:total].double() for x in lines]
    return out[:total].double(), bidirectional.attend_bidirectional(
        *inputs, dim**-0.5, metadata, reach, wide, *by_distance
    )


def check(counts: list[int], dtype: torch.dtype = torch.float32, **facts: object) -> None:
    mine, expected = run(counts, dtype=dtype, **facts)  # type: ignore[arg-type]
    torch.testing.assert_close(mine, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("counts", [[1], [16], [17], [63, 1, 16, 15, 33], [100, 2], [1] * 20])
def test_rows_of_odd_lengths(counts: list[int]) -> None:
    check(counts)


@pytest.mark.parametrize("facts", [{}, {"reach": 40}, {"biased": True}, {"padding": (2, 20)}])
def test_tokens_that_see_and_are_not_seen(facts: dict[str, object]) -> None:
    check([32, 32, 40, 7, 1], seen=[5, 32, 17, 6, 1], **facts)


@pytest.mark.parametrize("dim", [8, 24, 32, 64, 96])
def test_head_sizes(dim: int) -> None:
    check([5, 40], dim=dim)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.cuda)])
def test_halves(dtype: torch.dtype) -> None:
    check([37, 20, 3], dtype, dim=32)


def test_heads_may_share_keys() -> None:
    check([33, 7], heads=6, kv_heads=2)


@pytest.mark.parametrize("reach", [1, 7, 16, 40, 200])
def test_tokens_see_no_further_than_they_reach(reach: int) -> None:
    check([70, 9, 33], reach=reach)


@pytest.mark.parametrize("reach", [0, 9])
def test_a_bias_for_each_distance(reach: int) -> None:
    check([50, 3, 18], biased=True, reach=reach)


@pytest.mark.parametrize("relative", [1, 2])
@pytest.mark.parametrize(
    "facts",
    [{}, {"padding": (2, 20)}, {"seen": [20, 3, 18]}, {"dtype": torch.float16, "dim": 32}, {"biased": True}],
    ids=str,
)
def test_positions_by_distance(relative: int, facts: dict[str, object]) -> None:
    check([50, 3, 18], relative=relative, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("padding", [(3, 0), (0, 20), (5, 77)])
def test_padding_has_no_part_in_it(padding: tuple[int, int]) -> None:
    check([21, 40], padding=padding)


def test_more_rows_than_one_block_of_the_list() -> None:
    counts = [(i * 7) % 5 + 1 for i in range(300)]
    check(counts, heads=1, kv_heads=1, padding=(4, 10))


def test_a_row_is_the_same_to_the_last_bit_alone_and_among_others() -> None:
    alone, _ = run([40])
    for counts, first in (([40, 13], 0), ([13, 40, 7], 13)):
        generator = torch.Generator().manual_seed(56)
        merged = torch.randn(40, 6, 16, generator=generator)
        others = torch.randn(sum(counts), 6, 16, generator=generator)
        others[first : first + 40] = merged
        starts = torch.tensor(np.cumsum([0, *counts]).astype(np.int32))
        query, key, value = others.to(DEVICE).split([2, 2, 2], 1)
        together = attend_bidirectional(
            query, key, value, 0.25, list_tiles(starts.to(DEVICE), len(others), SMALL), SMALL
        )
        assert together[first : first + 40].double().equal(alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_every_shape_has_a_cut_that_divides_a_row(dim: int, dtype: torch.dtype) -> None:
    cut = choose_cut(dim, dtype)
    assert cut.queries % 16 == 0 and cut.keys % 16 == 0 and 256 % cut.keys == 0


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("reach", [0, 64])
def test_real_sizes_in_bfloat16(dim: int, reach: int) -> None:
    cut = choose_cut(dim, torch.bfloat16)
    mine, expected = run([512, 500, 33, 1, 2000, 128], 12, 12, dim, torch.bfloat16, reach, False, (10, 300), cut)
    assert (mine - expected).norm() / expected.norm() < 4e-3
