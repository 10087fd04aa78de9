"""A CPU device with graphs: what was captured is replayed by running the very closures of the step it was captured in.

They read what they read then, at the same addresses, so work that depends on anything else of its own step, a number
on the host or a place in the arena that moves, gives wrong tokens here as it would on a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from slipstream.device.device import Device


class ReplayDevice(Device):
    can_graph = True

    def __init__(self, depth: int) -> None:
        super().__init__(depth, 1)
        self.num_replays = 0

    def capture(self, work):
        result = work()  # and the first replay does nothing: a captured graph has not run yet
        first = True

        def replay() -> None:
            nonlocal first
            self.num_replays += 1
            if first:
                first = False
                return
            for target, source in zip(tensors_in(result), tensors_in(work()), strict=True):
                target.copy_(source)

        return replay, result


def tensors_in(thing: Any) -> list[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        return [thing]
    if dataclasses.is_dataclass(thing):
        thing = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    return [tensor for item in thing for tensor in tensors_in(item)] if isinstance(thing, list | tuple) else []
