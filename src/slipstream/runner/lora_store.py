"""AdapterStore: LoRA adapters in host buffers and in slots on the device, and the tokens of a step that have one.

A slot is one row of a device tensor, from which the layers of the model read. Loading copies one host buffer to one
slot on a stream of its own: after the last step that read the slot, and before the step that needs the adapter. So the
copy runs beside earlier steps that are still in flight. A host buffer is read into again only after the last copy from
it. All memory is allocated at start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from slipstream.base.errors import InvalidAdapter
from slipstream.config.adapter_config import AdapterConfig
from slipstream.contracts.step import Ints, StepPlan
from slipstream.device.device import Device
from slipstream.device.streams import PASSED, Event
from slipstream.nn.adapters import AdapterLayout, read_adapter
from slipstream.nn.context import ForwardContext
from slipstream.nn.weights.source import Rules
from slipstream.ops.gemm.lora import LoraTiles
from slipstream.ops.gemm.lora.reference import make_tiles, tile_size
from slipstream.runner.features import ForwardPart, Gathered, Size, StepFeature
from slipstream.runner.staging import Upload

_POLL = 0.001  # seconds
_DIGEST_BYTES = 16

Tiles = Callable[[], LoraTiles]
"""Device: tiles that were uploaded."""


class AdapterStore(StepFeature):
    def __init__(
        self, config: AdapterConfig, layout: AdapterLayout, rules: Rules, dtype: torch.dtype, device: Device
    ) -> None:
        """`rules`: from names of the base model's checkpoint to those of the model."""
        assert layout.num_elements == config.num_elements, "the memory estimate has another size of adapters"
        self._config = config
        self._layout = layout
        self._rules = rules
        self._device = device
        self._dtype = dtype
        self._slots = device.zeros((config.max_loras, config.num_elements), dtype)
        num_bytes = config.num_elements * dtype.itemsize
        self._buffers = [device.host_buffer(num_bytes) for _ in range(config.max_cpu_loras)]
        self._copied: list[Event] = [PASSED] * config.max_cpu_loras  # the last copy from each buffer
        self._stream = device.open_stream()
        self._read: list[Event] = [PASSED] * config.max_loras  # the end of the last step that reads each slot
        self._used: list[int] = []  # slots that the last plan with adapters reads: its end is not recorded yet
        self._changes_head = [False] * config.max_cpu_loras
        self._head_slots = np.zeros(config.max_loras, np.bool_)  # slots whose adapter changes the projection to tokens
        layout.attach(self._slots)

    def read(self, buffer: int, path: str) -> bytes:
        """Read the adapter of a folder into a host buffer. Returns the digest of its matrices. In a background thread;
        raises InvalidAdapter."""
        array, tensor = self._buffers[buffer]
        while not self._copied[buffer].done():
            time.sleep(_POLL)
        self._device.before_reuse(array)
        try:
            with torch.no_grad():
                self._changes_head[buffer] = read_adapter(
                    Path(path), self._layout, self._rules, tensor.view(self._dtype)
                )
        except InvalidAdapter as error:
            error.param = "lora_request"
            raise
        except OSError as error:
            raise InvalidAdapter(f"{path} cannot be read ({error}); check the path", param="lora_request") from None
        return blake2b(array.data, digest_size=_DIGEST_BYTES).digest()

    def join_forward(self, plan: StepPlan, upload: Upload, size: Size | None) -> ForwardPart | None:
        """Host: queue the loads of the plan, and upload which tokens have an adapter; None: no row has one."""
        if self._used:
            self._record_end()
        if plan.adapters is None:
            return None
        for load in plan.adapters.loads:
            self.load(load.slot, load.buffer)
        slots = plan.adapters.slots
        if slots is None:
            return None
        self._used = [int(slot) for slot in np.unique(slots[slots >= 0])]
        is_single = plan.total_tokens == len(plan.rows)
        num_tokens, num_rows = (plan.total_tokens, len(slots)) if size is None else (size.tokens, size.rows)
        tokens = self._put(slots, plan.num_tokens, num_tokens, upload)
        last = tokens if is_single else self._put(slots, np.ones_like(slots), num_rows, upload)

        def add(batch: Gathered, context: ForwardContext) -> ForwardContext:
            return replace(context, batch=replace(context.batch, lora=tokens(), last_lora=last()))

        return ForwardPart("adapted", add)

    def changes_head(self, plan: StepPlan) -> bool:
        """Host: whether a row's adapter changes the projection to tokens."""
        slots = plan.adapter_slots
        return slots is not None and bool(self._head_slots[slots[slots >= 0]].any())

    def tiles(self, slots: Ints, upload: Upload) -> Tiles:
        """Host: upload which of the hidden states that a head reads have an adapter, by the slot of each."""
        return self._put(slots, np.ones_like(slots), len(slots), upload)

    def load(self, slot: int, buffer: int) -> None:
        """Host: queue the copy of a host buffer to a slot."""
        target, source = self._slots[slot], self._buffers[buffer][1].view(self._dtype)
        self._head_slots[slot] = self._changes_head[buffer]

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        stream, compute = self._stream, self._device.compute
        if stream is not compute:
            stream.wait_for(self._read[slot])
        stream.run(copy)
        self._copied[buffer] = stream.record()
        if stream is not compute:
            stream.flush()
            compute.wait_for(self._copied[buffer])

    def _record_end(self) -> None:
        """Records the end of the last step with adapters, which is queued by now."""
        end = self._device.compute.record()
        for slot in self._used:
            self._read[slot] = end
        self._used = []

    def _put(self, slots: Ints, counts: Ints, num_tokens: int, upload: Upload) -> Tiles:
        order, tiles = make_tiles(slots, counts, num_tokens, self._config.max_loras)
        spans, size = (upload.put(order), upload.put(tiles)), tile_size(num_tokens)
        return lambda: LoraTiles(upload.tensor(spans[0]), upload.tensor(spans[1]), size)
