"""A CPU device with graphs: a replay calls the closures of the captured step again.

The closures read the same addresses as at capture. So work that depends on other data of its step, such as a host value
or a changing address in the arena, gives wrong tokens here, as on a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from slipstream.device.device import Device
from slipstream.nn.sdpa import SdpaAttention


class ReplayDevice(Device):
    can_graph = True

    def __init__(self, depth: int) -> None:
        super().__init__(depth, 1)
        self.num_replays = 0
        # Steps have no measured time, so the core launches each as soon as it may: which steps there are, and what
        # is captured, depends on the depth and not on how busy the machine is.
        record = self.compute.record
        self.compute.record = lambda *, timed=False: record()  # type: ignore[method-assign]

    def capture(self, work):
        result = work()  # the first replay does nothing: on a GPU a capture does not run the work
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


def captured_forwards(graphs: Any) -> list[Any]:
    """Keys of captured forwards, also of those that are captured together with their draws."""
    keys = [key[1:] if key[0] == "step" else key for key, entry in graphs._captured.items() if entry is not None]
    return [key for key in keys if key[0] == "forward"]


def tensors_in(thing: Any) -> list[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        return [thing]
    if dataclasses.is_dataclass(thing):
        thing = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    return [tensor for item in thing for tensor in tensors_in(item)] if isinstance(thing, list | tuple) else []


class PaddedAttention(SdpaAttention):
    """Handles chunks that are padded to a size by reading the device's counts, which a test may do."""

    def make_metadata(self, batch, after=None):
        if batch.query_starts is None:
            return super().make_metadata(batch, after)
        counts = batch.query_starts.diff().numpy()
        num_rows = int((counts > 0).sum())
        counts = counts[:num_rows]
        real = dataclasses.replace(
            batch,
            lengths=batch.lengths[:num_rows],
            page_tables=tuple(table[:num_rows] for table in batch.page_tables),
            num_tokens=counts,
            max_lengths=batch.lengths[:num_rows].numpy().astype(np.int32),
            num_single=int((counts == 1).cumprod().sum()),
        )
        return super().make_metadata(real)

    def forward(self, query, key, value, site, scale, context, sinks=None):
        out = super().forward(query, key, value, site, scale, context, sinks)
        return torch.cat([out, out.new_zeros(len(query) - len(out), *out.shape[1:])])
