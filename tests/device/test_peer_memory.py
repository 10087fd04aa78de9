"""Device memory of other processes: how copies of it are divided."""

from __future__ import annotations

import pytest

from slipstream.device.device import Device
from slipstream.device.peer_memory import ByteCopy, joined


def test_neighbours_on_both_sides_are_copied_at_once():
    pieces = [
        ByteCopy(32, 132, 16),
        ByteCopy(0, 100, 16),
        ByteCopy(16, 116, 16),
        ByteCopy(48, 300, 16),
        ByteCopy(80, 316, 16),
    ]
    assert joined(pieces) == [ByteCopy(0, 100, 48), ByteCopy(48, 300, 16), ByteCopy(80, 316, 16)]
    assert joined([]) == []


def test_a_cpu_exports_no_memory():
    device = Device(0, 1)
    with pytest.raises(NotImplementedError, match="cannot open memory of the device cpu"):
        device.export_memory(16)
    with pytest.raises(NotImplementedError, match="cpu opens no memory"):
        device.open_memory(b"")
