"""Sums of each row's tokens: the reference against slow, obvious code, and the kernel against the reference."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from slipstream.ops.elementwise import reference

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

# the interpreter's own use of numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def kernel_sum(*args: Any) -> torch.Tensor:
    pytest.importorskip("triton", reason="triton is not installed")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    from slipstream.ops.elementwise.triton import segment_sum

    return segment_sum(*args)


SUMS = pytest.mark.parametrize("segment_sum", [reference.segment_sum, kernel_sum], ids=["reference", "kernel"])
COUNTS = [1, 31, 0, 32, 33, 100, 0, 2]


def starts_of(counts: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=dtype, device=DEVICE)


@SUMS
@pytest.mark.parametrize("columns", [1, 63, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_those_of_each_row(segment_sum, columns, dtype):
    torch.manual_seed(0)
    x = torch.randn(sum(COUNTS) + 9, columns, device=DEVICE).to(dtype)  # 9 that pad
    got = segment_sum(x, starts_of(COUNTS))
    wanted = torch.stack([part.double().sum(0) for part in x[: sum(COUNTS)].split(COUNTS)])
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@SUMS
@pytest.mark.parametrize("weighted", [False, True])
def test_tokens_may_be_left_out_and_count_by_their_positions(segment_sum, weighted):
    """Rows of which some, none or all of the first tokens are left out, and that begin at any position."""
    torch.manual_seed(0)
    x = torch.randn(sum(COUNTS) + 9, 70, device=DEVICE)
    starts = starts_of(COUNTS)
    skipped = torch.tensor([0, 30, 0, 32, 40, 33, 0, 1], dtype=torch.int32, device=DEVICE)
    origins = torch.tensor([0, 5, 9, 100_000, 3, 0, 7, 1], device=DEVICE) if weighted else None
    begins = torch.minimum(starts[:-1] + skipped, starts[1:])
    got = segment_sum(x, starts, begins, origins)
    wanted = []
    for row, part in enumerate(x[: sum(COUNTS)].split(COUNTS)):
        positions = torch.arange(len(part), device=DEVICE) + (int(origins[row]) if weighted else 0)
        scaled = part.double() * (positions + 1).unsqueeze(1) if weighted else part.double()
        wanted.append(scaled[min(int(skipped[row]), len(part)) :].sum(0))
    torch.testing.assert_close(got.double(), torch.stack(wanted), rtol=1e-5, atol=1e-4)
    assert (got[3] == 0).all() and (got[2] == 0).all()  # nothing of them counts
    if weighted:  # without the one the other still holds
        plain = segment_sum(x, starts, None, origins)
        torch.testing.assert_close(plain[0], got[0])
        assert not torch.allclose(plain[1], got[1])


@SUMS
def test_a_row_alone_has_the_same_bits_as_among_others(segment_sum):
    # the reference is for the CPU: on a GPU torch adds in any order
    device = "cpu" if segment_sum is reference.segment_sum else DEVICE
    x = torch.randn(sum(COUNTS), 130, device=device)
    together = segment_sum(x, starts_of(COUNTS).to(device))
    for row, part in enumerate(x.split(COUNTS)):
        if len(part):
            alone = segment_sum(part.contiguous(), starts_of([len(part)], torch.int64).to(device))
            assert torch.equal(alone[0], together[row])


@SUMS
def test_what_is_not_a_number_stays_in_its_row(segment_sum):
    x = torch.ones(sum(COUNTS) + 3, 5, device=DEVICE)
    x[1 + 31] = torch.nan  # of the fourth row
    x[-1] = torch.nan  # padding
    sums = segment_sum(x, starts_of(COUNTS))
    assert sums.isnan().any(1).tolist() == [False, False, False, True, False, False, False, False]


def test_float64_is_summed_in_float64():
    x = torch.tensor([[1.0], [1e-12]], dtype=torch.float64)
    assert reference.segment_sum(x, torch.tensor([0, 2])).item() == 1.0 + 1e-12
