"""ModelRunner: the order of a step, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.device.device import Device
from slipstream.nn.attention.backend import AttentionBackend
from slipstream.nn.context import ForwardContext
from slipstream.nn.models.base import CausalLM
from slipstream.runner.batch.input_batch import Gathered, InputBatch
from slipstream.runner.batch.row_state import RowState
from slipstream.runner.batch.rows import RowTable
from slipstream.runner.batch.staging import HostRing
from slipstream.runner.generate import GenerateHead, Head
from slipstream.runner.graphs import GraphPool
from slipstream.runner.kv_store import KVStore
from slipstream.runner.output import NO_RESULTS, StepHandle
from slipstream.step import StepPlan


class ModelRunner:
    """Runs plans. `launch` queues uploads and body, `finish` the head; neither waits for the device."""

    def __init__(
        self,
        model: CausalLM,
        device: Device,
        attention: AttentionBackend,
        store: KVStore,
        rows: RowTable,
        input_batch: InputBatch,
        head: GenerateHead,
        row_states: Sequence[RowState],
        ring: HostRing,
        graphs: GraphPool,
    ) -> None:
        self.model = model
        self.device = device
        self.attention = attention
        self.store = store
        self.rows = rows
        self.input_batch = input_batch
        self.head = head
        self.row_states = row_states
        self.ring = ring
        self.graphs = graphs
        self._launched: tuple[_Step, Head | None] | None = None

    def launch(self, plan: StepPlan) -> None:
        assert self._launched is None, "a step was launched before the one before it was finished"
        upload = self.ring.open()
        size = self.graphs.size_for(plan)
        if size is None:
            gather = self.input_batch.prepare(plan, upload)
        else:
            gather = self.input_batch.prepare_padded(plan, upload, size)
        for state in self.row_states:
            state.apply(plan)
        for state in self.row_states:
            state.flush(upload)
        head = self.head.prepare(plan, upload, size)
        upload.send(self.device.compute)
        step = _Step()

        def forward() -> tuple[Gathered, torch.Tensor]:
            batch = gather()
            return batch, self._forward(batch)

        def body() -> None:
            step.batch, step.hidden = forward() if size is None else self.graphs.run(("body", size), forward)

        self.device.compute.run(body)
        self.device.compute.flush()
        self._launched = (step, head)

    def finish(self) -> StepHandle:
        assert self._launched is not None, "finish comes after launch"
        (step, head), self._launched = self._launched, None
        compute = self.device.compute
        if head is None:
            return StepHandle(compute.record(), NO_RESULTS, None)
        run = head.run
        compute.run(lambda: run(step.batch, step.hidden))
        handle = head.leave()
        compute.flush()
        self.device.copy.flush()
        return handle

    def _forward(self, batch: Gathered) -> torch.Tensor:
        """Device: the network, once, over all tokens of the step."""
        view = batch.view
        context = ForwardContext(
            view, self.attention, self.attention.plan(view), self.store.caches, self.store.group_of_layer
        )
        hidden = self.model(context)
        self.rows.advance(batch.rows, view.lengths)
        return hidden

    def close(self) -> None:
        self.device.close()


class _Step:
    """What the body leaves for the head. Lives on the stream's side."""

    batch: Gathered
    hidden: torch.Tensor
