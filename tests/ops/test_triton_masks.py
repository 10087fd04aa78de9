"""Masks of tokens in Triton against the reference, interpreted without a GPU, compiled with one."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from test_triton_sample import CUDA, DEVICE, IGNORED, draw, flags_of, keys_of, limits_of, randn

from slipstream.ops.sampling import reference
from slipstream.ops.sampling import triton as kernels

pytestmark = [pytest.mark.filterwarnings(ignored) for ignored in IGNORED]


def mask_of(size: int, rows: int) -> reference.TokenMask:
    """All kinds of entries: few tokens, all, none, half, one token; each row has another."""
    generator = torch.Generator().manual_seed(size)
    bits = torch.randint(-(2**31), 2**31, (6, size // 32 + 2), dtype=torch.int32, generator=generator)
    bits[0], bits[1], bits[2] = 0, -1, 0
    bits[0, size // 64] = 0b1010
    bits[3, : size // 64] = 0
    entries = torch.tensor([4, 0, -1, 3, -2 - (size - 1), 1, 2, 5, -2], dtype=torch.int32)
    index = torch.randperm(len(entries), generator=generator)[:rows]
    return reference.TokenMask(bits.to(DEVICE), entries.to(DEVICE), index.to(DEVICE))


@pytest.mark.parametrize("size", [7, 300, 2049, 4100])
@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if CUDA else [])])  # not for the interpreter
def test_masks_as_logits_are_read_are_those_of_an_edit(size: int, dtype: torch.dtype) -> None:
    rows = 9
    logits, keys, mask = randn(rows, size).to(dtype), keys_of(rows), mask_of(size, rows)
    logits[:, 5] = math.nan  # only rows that may draw the token fail
    logits[2:, 5] = 0.0
    before, edited = logits.clone(), logits.clone()
    entries = mask.entries.index_select(0, mask.index)
    expected = logits.clone()
    reference.mask_bits_(expected, mask.bits, entries)
    kernels.mask_bits_(edited, mask.bits, entries)
    assert edited.nan_to_num(9.0).equal(expected.nan_to_num(9.0))
    random = torch.arange(rows, device=DEVICE) % 3 > 0
    temperature = torch.linspace(0.5, 1.5, rows, device=DEVICE)
    limits = limits_of([(0.0, 5, 0.9), (0.0, 3, 2.0), (0.05, 0, 2.0)] * 3, size)
    counts = torch.randint(0, 3, (1, size), dtype=torch.int32, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    values = torch.tensor([[1.3, 0.5, 0.25]], device=DEVICE).repeat(rows, 1)
    penalty = reference.Penalty(counts, flags_of(counts), torch.zeros(rows, dtype=torch.int64, device=DEVICE), values)
    for mine, plain, wanted in (
        (kernels.argmax_rows(logits, None, mask), kernels.argmax_rows(edited), reference.argmax_rows(expected)),
        (
            kernels.argmax_rows(logits, penalty, mask),
            kernels.argmax_rows(edited, penalty),
            reference.argmax_rows(logits, penalty, mask),
        ),
        (
            draw(kernels, logits, keys, random, temperature, None, None, mask),
            draw(kernels, edited, keys, random, temperature),
            draw(reference, logits, keys, random, temperature, None, None, mask),
        ),
        (
            draw(kernels, logits, keys, random, temperature, limits, penalty, mask),
            draw(kernels, edited, keys, random, temperature, limits, penalty),
            draw(reference, logits, keys, random, temperature, limits, penalty, mask),
        ),
    ):
        assert mine.tokens.equal(plain.tokens) and mine.failed.equal(plain.failed)
        assert mine.tokens.equal(wanted.tokens) and mine.failed.equal(wanted.failed)
        assert mine.failed.any() and not mine.failed.all()
    assert logits.nan_to_num(9.0).equal(before.nan_to_num(9.0))


@pytest.mark.parametrize("num_words", [3, 1024, 2100])
def test_only_masks_with_a_target_are_fetched(num_words: int) -> None:
    table = torch.full((9, num_words), 7, dtype=torch.int32, device=DEVICE)
    bits = torch.randint(-(2**31), 2**31, (4, num_words), dtype=torch.int32)
    bits[2] = bits[1]
    targets = torch.tensor([0, 6, 6, -1], dtype=torch.int32)
    entries = torch.zeros(5000, dtype=torch.int32, device=DEVICE)
    own = torch.arange(5000, dtype=torch.int32)
    if CUDA:
        bits, targets, own = bits.pin_memory(), targets.pin_memory(), own.pin_memory()
    expected = table.clone()
    kernels.fetch_masks_(table, bits, targets, entries, own)
    expected[0], expected[6] = bits[0].to(DEVICE), bits[1].to(DEVICE)
    assert table.equal(expected) and entries.equal(own.to(DEVICE))
    reference.fetch_masks_(table, bits, targets, entries, own)
    expected[3] = bits[3].to(DEVICE)  # without a target: its own number
    assert table.equal(expected)
