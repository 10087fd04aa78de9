"""The checksum of pages: every change of the bytes or of the hash changes it."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.handoff.wire import checksum


@pytest.mark.parametrize("size", [0, 5, 2048, 5000])
def test_every_byte_and_the_hash_count(size):
    content = np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)
    right = checksum(b"a" * 16, content.data)
    assert checksum(b"a" * 16, content.tobytes()) == right != checksum(b"b" * 16, content.data)
    for index in range(0, size, 7):
        wrong = content.copy()
        wrong[index] ^= 1 << index % 8
        assert checksum(b"a" * 16, wrong.data) != right
    assert not size or checksum(b"a" * 16, content[:-1].data) != right
