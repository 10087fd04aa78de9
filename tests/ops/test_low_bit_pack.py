"""Rows of a GGUF file to the order that the C kernels read."""

from __future__ import annotations

import pytest
import torch

from slipstream.ops import native
from slipstream.ops.dequant import BLOCK_KINDS, split
from slipstream.ops.low_bit.interleaved import Interleaved


@pytest.mark.parametrize("num_rows", [1, 4, 7, 100])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_four_rows_are_interleaved(kind: str, num_rows: int) -> None:
    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    groups = 3
    generator = torch.Generator().manual_seed(num_rows)
    raw = torch.randint(0, 120, (num_rows, groups * BLOCK_KINDS[kind][1]), dtype=torch.uint8, generator=generator)
    packed, blocks = Interleaved().pack(raw, kind), split(raw, kind)
    weights = blocks.bytes.view(torch.int32)
    for row in range(num_rows):
        assert packed.data[row // 4, :, :, row % 4].equal(weights[row])
        assert packed.scale[row // 4, :, 0, row % 4].float().equal(blocks.scale[row, :, 0])
        if blocks.minimum is not None:
            assert packed.offset is not None
            assert packed.offset[row // 4, :, 0, row % 4].float().equal(blocks.minimum[row, :, 0])
    assert (packed.offset is None) == (blocks.minimum is None)
    for row in range(num_rows, 4 * len(packed.data)):
        assert not packed.data[row // 4, :, :, row % 4].any() and not packed.scale[row // 4, :, 0, row % 4].any()


def test_strided_rows_are_packed_as_their_copy() -> None:
    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    raw = torch.randint(0, 120, (8, 72), dtype=torch.uint8)
    assert Interleaved().pack(raw[:, :36], "Q4_0").data.equal(Interleaved().pack(raw[:, :36].clone(), "Q4_0").data)
