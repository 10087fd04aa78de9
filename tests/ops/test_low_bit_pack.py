"""Rows of a GGUF file to the order that the C kernels read."""

from __future__ import annotations

import pytest
import torch

from slipstream.ops.gemm.dequant import BLOCK_KINDS, K_KINDS, KINDS, split
from slipstream.ops.gemm.low_bit.interleaved import Interleaved
from slipstream.ops.platform import native


@pytest.mark.parametrize("num_rows", [1, 4, 7, 100])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_four_rows_are_interleaved(kind: str, num_rows: int) -> None:
    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    groups = 3
    generator = torch.Generator().manual_seed(num_rows)
    raw = torch.randint(0, 120, (num_rows, groups * BLOCK_KINDS[kind][1]), dtype=torch.uint8, generator=generator)
    packed, blocks = Interleaved().pack(kind, raw), split(raw, kind)
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
    assert Interleaved().pack("Q4_0", raw[:, :36]).data.equal(Interleaved().pack("Q4_0", raw[:, :36].clone()).data)


@pytest.mark.parametrize("sizes", [(4, 8, 5), (3, 5), (8,), (4, 2, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_packed_as_one_weight(kind: str, sizes: tuple[int, ...]) -> None:
    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    num_bytes = 3 * BLOCK_KINDS[kind][1] if kind in BLOCK_KINDS else 2 * K_KINDS[kind]
    raw = torch.randint(0, 120, (sum(sizes), num_bytes), dtype=torch.uint8)
    whole, parts = Interleaved().pack(kind, raw), Interleaved().pack(kind, *raw.split(list(sizes)))
    assert parts.num_rows == whole.num_rows == len(raw)
    assert parts.data.equal(whole.data) and parts.scale.view(torch.uint8).equal(whole.scale.view(torch.uint8))
    if whole.offset is not None:
        assert parts.offset is not None and parts.offset.view(torch.uint8).equal(whole.offset.view(torch.uint8))
