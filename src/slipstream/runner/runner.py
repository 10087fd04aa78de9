"""ModelRunner: runs plans, in the order uploads, forward, heads, result copy.

It names no feature: those of an engine are a list, in the order in which they take part in a step (`features.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch

from slipstream.contracts.step import DrawEdits, StepPlan, StepSizes
from slipstream.device.streams import Event
from slipstream.device.sync_check import HotPath
from slipstream.nn.context import AttentionBackend, ForwardContext
from slipstream.nn.decoder import CausalLM
from slipstream.runner.features import ForwardPart, Gathered, Size, StepFeature
from slipstream.runner.graphs import WHOLE_STEP_ROWS, GraphPool
from slipstream.runner.input_batch import BatchInputs
from slipstream.runner.results import CapturedDraw, Head, HeadMaker, ResultRing, StepHandle, step_handle
from slipstream.runner.staging import HostRing
from slipstream.runner.stores import KVStore

Kind = TypeVar("Kind")


class ModelRunner:
    """`launch` queues uploads and the forward, `finish` the heads and the copy. Neither waits for the device."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        store: KVStore,
        input_batch: BatchInputs,
        features: Sequence[StepFeature],
        heads: Sequence[HeadMaker],
        ring: HostRing,
        results: ResultRing,
        graphs: GraphPool,
    ) -> None:
        """`features`: in the order in which they take part in a step, `store` included."""
        self.model = model
        self.device = graphs.device
        self.attention = attention
        self.store = store
        self.input_batch = input_batch
        self.features = features
        self.heads = heads
        self.ring = ring
        self.results = results
        self.graphs = graphs
        self.whole_steps = True  # whether the forward and the draws of few rows are one graph
        self.hot_path = HotPath(cpu=self.device.kind == "cpu")
        self._launched: tuple[_Step, list[Head]] | None = None

    def find(self, kind: type[Kind]) -> Kind | None:
        """The feature of this kind; None: the engine has none."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    def launch(self, plan: StepPlan) -> None:
        with self.hot_path():
            self._launch(plan)

    def finish(self, late: DrawEdits | None = None) -> StepHandle:
        with self.hot_path():
            return self._finish(late)

    def sizes_of(self, plan: StepPlan) -> StepSizes:
        """Host: the sizes that other engines with the same experts have to know before they launch this step. Drafts
        count whether or not they will be accepted."""
        plan = self.input_batch.expand(plan)
        total, only_last = max(1, plan.total_tokens), self._reads_only_last(plan)
        return StepSizes(
            tokens=total,
            last_tokens=len(plan.rows) if only_last else total,
            is_single=plan.total_tokens == len(plan.rows),
            only_last=only_last,
            can_replay=self._captures(plan) and self.graphs.can_replay_jointly(plan),
        )

    def free_queries(self, queries: tuple[int, ...]) -> None:
        """Free stored queries without a step, after all launched steps."""
        for feature in self.features:
            work = feature.free_queries(queries)
            if work is not None:
                self.device.compute.run(work)
        self.device.compute.flush()

    def _launch(self, plan: StepPlan) -> None:
        assert self._launched is None, "a step was launched before the one before it was finished"
        plan = self.input_batch.expand(plan)
        joint = plan.joint_sizes
        upload = self.ring.open()
        size = self.graphs.size_for(plan) if joint is not None or self._captures(plan) else None
        gather = self.input_batch.prepare(plan, upload, size)
        joined = [feature.join_forward(plan, upload, size) for feature in self.features]
        parts = [part for part in joined if part is not None]
        for feature in self.features:
            feature.apply(plan)
        for feature in self.features:
            feature.flush(upload)
        only_last = self._reads_only_last(plan)
        exchanged = _exchanged_tokens(joint, size)
        is_replayed = size is not None and (joint is None or joint.can_replay)
        prepared = [maker.prepare(plan, upload, size, only_last=only_last) for maker in self.heads]
        heads = [head for head in prepared if head is not None]
        upload.send(self.device.compute)
        step = _Step(upload.sent)

        key = ("forward", size, only_last, exchanged, *(part.key for part in parts if part.key is not None))

        def forward() -> tuple[Gathered, torch.Tensor]:
            batch = gather()
            hidden = self._forward(batch, only_last, parts, exchanged)
            # steps of one token per row have few hidden states, which a graph may keep in its own memory
            return batch.for_heads(key), hidden if size is None or size.is_single else self.graphs.hidden.put(hidden)

        def run_forward() -> None:
            step.batch, step.hidden = self.graphs.run(key, forward) if is_replayed else forward()

        after = [part.after for part in parts if part.after is not None]
        needs_late = any(feature.needs_late(plan) for feature in self.features)
        is_alone = is_replayed and not after and not needs_late and joint is None
        captured = self._whole_step(heads, size) if is_alone else None
        if captured is not None:
            step.is_drawn = True
            self.device.compute.run(functools.partial(self._run_whole, key, forward, captured))
        else:
            self.device.compute.run(run_forward)
        for work in after:
            self.device.compute.run(work)
        if needs_late:
            step.computed = self.device.compute.record(timed=True)
        self.device.compute.flush()
        self._launched = (step, heads)

    def _captures(self, plan: StepPlan) -> bool:
        """Host: whether this step may be padded and captured."""
        return all(feature.captures(plan) for feature in self.features)

    def _whole_step(self, heads: Sequence[Head], size: Size | None) -> CapturedDraw | None:
        """Host: the draw that is captured together with the forward of this step; None: the head runs by itself."""
        if not self.whole_steps or len(heads) != 1 or size is None:
            return None
        return heads[0].captured if size.is_single and size.rows <= WHOLE_STEP_ROWS else None

    def _run_whole(
        self,
        key: tuple[Hashable, ...],
        forward: Callable[[], tuple[Gathered, torch.Tensor]],
        captured: CapturedDraw,
    ) -> None:
        """Device: the forward and the draws of a step as one graph."""
        captured.put(self.graphs.run(("step", *key, captured.key), lambda: captured.draw(*forward())))

    def _finish(self, late: DrawEdits | None) -> StepHandle:
        assert self._launched is not None, "finish comes after launch"
        (step, heads), self._launched = self._launched, None
        compute = self.device.compute
        if late is not None:
            for feature in self.features:
                change = feature.send(late)
                if change is not None:
                    compute.run(functools.partial(_change_batch, step, change))
        arrived = None if step.computed is None else compute.record(timed=True)
        assert late is None or not step.is_drawn, "late data came for a step whose draws were launched without"
        for head in () if step.is_drawn else heads:
            compute.run(functools.partial(_run_head, head, step))
        sent = self.results.send()
        handle = step_handle(heads, sent)
        handle.started = step.started
        if step.computed is not None and arrived is not None:
            handle.late = step.computed, arrived
        compute.flush()
        self.device.copy.flush()
        return handle

    def _reads_only_last(self, plan: StepPlan) -> bool:
        """Host: whether only the hidden state of each row's last token is read, in a step with rows of several tokens.
        Models whose rows last for one step always compute all of them."""
        if not len(plan.tokens) or plan.total_tokens == len(plan.rows):
            return False
        return self.input_batch.keeps_rows and not any(head.wants_all(plan) for head in self.heads)

    def _forward(
        self, batch: Gathered, only_last: bool, parts: Sequence[ForwardPart], exchanged: tuple[int, int]
    ) -> torch.Tensor:
        """Device: one forward over all tokens of the step, with what features add to it."""
        view, store = batch.view, self.store
        context = ForwardContext(
            view,
            self.attention,
            self.attention.make_metadata(view),
            store.caches,
            store.group_of_site,
            only_last,
            exchanged_tokens=exchanged[0],
            exchanged_last_tokens=exchanged[1],
        )
        for part in parts:
            if part.add is not None:
                context = part.add(batch, context)
        hidden = self.model(context)
        for part in parts:
            if part.follow is not None:
                part.follow(context, hidden)
        self.input_batch.advance(batch)
        return hidden

    def close(self) -> None:
        self.device.close()
        self.graphs.clear()
        for feature in self.features:
            feature.close()


class _Step:
    """The results of the forward for the heads. Only device work accesses it, except for the events."""

    def __init__(self, started: Event) -> None:
        self.started = started
        self.computed: Event | None = None  # the end of the forward, if the heads need late data
        self.is_drawn = False  # whether the heads were launched with the forward

    batch: Gathered
    hidden: torch.Tensor


def _exchanged_tokens(joint: StepSizes | None, size: Size | None) -> tuple[int, int]:
    """Tokens of each engine that layers with shared experts exchange, and those of layers that compute only the last
    token of each row. All engines must agree, so only if all read only last tokens there are fewer of these."""
    if joint is None:
        return 0, 0
    if size is not None and joint.can_replay:
        return size.tokens, size.rows if joint.only_last else size.tokens
    return joint.tokens, joint.last_tokens if joint.only_last else joint.tokens


def _change_batch(step: _Step, change: Callable[[Gathered], Gathered]) -> None:
    step.batch = change(step.batch)


def _run_head(head: Head, step: _Step) -> None:
    head.run(step.batch, step.hidden)
