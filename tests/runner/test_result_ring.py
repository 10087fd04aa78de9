"""The ring that results leave by."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.device.device import Device
from slipstream.runner.output import ResultRing, lay_out


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_slot_grows_without_writing_to_the_device():
    """The host grows it, outside the stream that steps run on: what it wrote might come after the step's results."""
    ring = ResultRing(2, 16, Device(0, 1))
    with Ops() as ops:
        slot = ring.open(lay_out([("lines", (8, 64), np.float32)]))
    assert set(ops.names) <= {"empty", "lift_fresh", "alias"}, f"{ops.names}"
    slot.write({"lines": torch.arange(512.0).view(8, 64)})
    sent = ring.send()
    assert np.array_equal(slot.find(sent).view(np.float32), np.arange(512, dtype=np.float32))
