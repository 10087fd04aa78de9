"""A slow device: its streams are threads that sleep at random, and buffers are poisoned when they are released.

Races that exist on a GPU but not on an inline CPU stream appear here as wrong tokens.
"""

from __future__ import annotations

import random
import time
from functools import partial

from slipstream.device.device import Bytes, Device, enter_for_good
from slipstream.device.streams import ThreadedStream

POISON = 0xA5


class LateStream(ThreadedStream):
    def __init__(self, name: str, seed: int, longest: float, prepare=None) -> None:
        self.random = random.Random(seed)
        self.longest = longest
        super().__init__(name, prepare)

    def before(self) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * self.longest)


class DelayedDevice(Device):
    """Copies run on a separate stream, so that they may be late too."""

    def __init__(self, depth: int, seed: int = 0, longest: float = 0.002) -> None:
        super().__init__(0, 1)
        self.depth = depth
        self.compute = LateStream("late-compute", seed, longest, partial(enter_for_good, 1))
        self.copy = LateStream("late-copy", seed + 1, longest)
        self._seed, self._longest = seed, longest
        self._opened: list[LateStream] = []

    def open_stream(self) -> LateStream:
        self._opened.append(LateStream("late-opened", self._seed + 2, self._longest))
        return self._opened[-1]

    def close(self) -> None:
        super().close()
        for stream in self._opened:
            stream.close()

    def before_reuse(self, buffer: Bytes) -> None:
        buffer[:] = POISON
