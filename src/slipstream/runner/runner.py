"""ModelRunner: runs plans, in the order uploads, forward, heads, result copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch

from slipstream.contracts.step import DrawEdits, StepPlan, StepSizes
from slipstream.device.device import Device
from slipstream.device.streams import Event
from slipstream.device.sync_check import HotPath
from slipstream.nn.context import AttentionBackend, ForwardContext
from slipstream.nn.decoder import CausalLM
from slipstream.ops.recurrent import RecurrentSteps
from slipstream.runner.drafted_plan import expand_drafts
from slipstream.runner.drafter import Follow, ForwardDrafter
from slipstream.runner.graphs import WHOLE_STEP_ROWS, GraphPool
from slipstream.runner.input_batch import BatchInputs, Gathered, Size
from slipstream.runner.lora_store import AdapterStore
from slipstream.runner.page_tier import PageTier
from slipstream.runner.pool_head import PoolHead
from slipstream.runner.pool_results import MixedHandle
from slipstream.runner.results import NO_RESULTS, CapturedDraw, Head, HeadMaker, ResultRing, StepHandle
from slipstream.runner.rows import RowState, SittingRows
from slipstream.runner.sampling.sampler import Sampler
from slipstream.runner.staging import HostRing
from slipstream.runner.stores import KVStore, StateStore


class ModelRunner:
    """`launch` queues uploads and the forward, `finish` the heads and the copy. Neither waits for the device."""

    def __init__(
        self,
        model: CausalLM,
        device: Device,
        attention: AttentionBackend,
        store: KVStore,
        input_batch: BatchInputs,
        heads: Sequence[HeadMaker],
        row_states: Sequence[RowState],
        ring: HostRing,
        results: ResultRing,
        graphs: GraphPool,
        states: StateStore | None = None,
        sampler: Sampler | None = None,
        drafter: ForwardDrafter | None = None,
        adapters: AdapterStore | None = None,
        tier: PageTier | None = None,
        sitting: SittingRows | None = None,
    ) -> None:
        """`states`: only for a model with recurrent states; `sampler`: of a model that generates; `drafter`: one that
        takes part in the forward; `adapters`: if requests may have LoRA adapters; `tier`: one of the row states, if
        pages have a second tier; `sitting`: for rows that sit out a step."""
        self.model = model
        self.device = device
        self.attention = attention
        self.store = store
        self.input_batch = input_batch
        self.heads = heads
        self.row_states = row_states
        self.ring = ring
        self.results = results
        self.graphs = graphs
        self.states = states
        self.sampler = sampler
        self.drafter = drafter
        self.adapters = adapters
        self.tier = tier
        self.sitting = sitting
        self.whole_steps = True  # whether the forward and the draws of few rows are one graph
        self.hot_path = HotPath(cpu=device.kind == "cpu")
        self._launched: tuple[_Step, list[Head]] | None = None

    def launch(self, plan: StepPlan) -> None:
        with self.hot_path():
            self._launch(plan)

    def finish(self, late: DrawEdits | None = None) -> StepHandle:
        with self.hot_path():
            return self._finish(late)

    def sizes_of(self, plan: StepPlan) -> StepSizes:
        """Host: the sizes that other engines with the same experts have to know before they launch this step. Drafts
        count whether or not they will be accepted."""
        if plan.has_drafts:
            plan = expand_drafts(plan)
        total, only_last = max(1, plan.total_tokens), self._reads_only_last(plan)
        return StepSizes(
            tokens=total,
            last_tokens=len(plan.rows) if only_last else total,
            is_single=plan.total_tokens == len(plan.rows),
            only_last=only_last,
            can_replay=self.graphs.can_replay_jointly(plan),
        )

    def free_queries(self, queries: tuple[int, ...]) -> None:
        """Free stored queries without a step, after all launched steps."""
        for head in self.heads:
            if isinstance(head, PoolHead):
                self.device.compute.run(head.free_queries(queries))
        self.device.compute.flush()

    def _launch(self, plan: StepPlan) -> None:
        assert self._launched is None, "a step was launched before the one before it was finished"
        if plan.has_drafts:
            plan = expand_drafts(plan)
        upload = self.ring.open()
        size = self.graphs.size_for(plan)
        gather = self.input_batch.prepare(plan, upload, size)
        make_steps = None if self.states is None else self.states.prepare(plan, upload, size)
        follow = None if self.drafter is None else self.drafter.prepare(plan, upload, size)
        catch_up = None if self.drafter is None else self.drafter.prepare_catch_up(plan, upload)
        adapt = None if self.adapters is None else self.adapters.prepare(plan, upload, size)
        for state in self.row_states:
            state.apply(plan)
        for state in self.row_states:
            state.flush(upload)
        only_last = self._reads_only_last(plan)
        exchanged = _exchanged_tokens(plan.joint_sizes, size)
        is_replayed = size is not None and (plan.joint_sizes is None or plan.joint_sizes.can_replay)
        prepared = [maker.prepare(plan, upload, size, only_last=only_last) for maker in self.heads]
        heads = [head for head in prepared if head is not None]
        upload.send(self.device.compute)
        step = _Step(upload.sent)

        def forward() -> tuple[Gathered, torch.Tensor]:
            batch = gather() if adapt is None else adapt(gather())
            steps = None if make_steps is None else make_steps(batch)
            hidden = self._forward(batch, only_last, steps, follow, exchanged)
            # steps of one token per row have few hidden states, which a graph may keep in its own memory
            return batch.for_heads(), hidden if size is None or size.is_single else self.graphs.hidden.put(hidden)

        key: tuple[Hashable, ...] = ("forward", size, only_last, exchanged)
        if follow is not None:
            key += ("drafter",)
        if adapt is not None:
            key += ("adapted",)

        def run_forward() -> None:
            step.batch, step.hidden = self.graphs.run(key, forward) if is_replayed else forward()

        needs_late = self.sampler is not None and self.sampler.needs_late(plan)
        is_alone = is_replayed and catch_up is None and not needs_late and plan.joint_sizes is None
        captured = self._whole_step(heads, size) if is_alone else None
        if captured is not None:
            step.is_drawn = True
            self.device.compute.run(functools.partial(self._run_whole, key, forward, captured))
        else:
            self.device.compute.run(run_forward)
        if catch_up is not None:
            self.device.compute.run(catch_up)
        if needs_late:
            step.computed = self.device.compute.record(timed=True)
        self.device.compute.flush()
        self._launched = (step, heads)

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
            assert self.sampler is not None and self.sitting is not None, "a model that only pools draws nothing"
            self.sampler.send(late, self.graphs)
            if late.sit_out is not None:
                take_back = self.sitting.send(late.sit_out, compute)
                self.ring.forget()  # the rows of the step are changed on the device
                compute.run(functools.partial(_sit_out, step, take_back))
        arrived = None if step.computed is None else compute.record(timed=True)
        assert late is None or not step.is_drawn, "late data came for a step whose draws were launched without"
        for head in () if step.is_drawn else heads:
            compute.run(functools.partial(_run_head, head, step))
        sent = self.results.send()
        handles = [head.handle(sent) for head in heads if head.handle is not None]
        if not handles:
            handle = StepHandle(sent.copied, NO_RESULTS, None)
        else:
            handle = handles[0] if len(handles) == 1 else MixedHandle(*handles)
        handle.started, handle.ended = step.started, sent.ended
        if step.computed is not None and arrived is not None:
            handle.late = step.computed, arrived
        compute.flush()
        self.device.copy.flush()
        return handle

    def _reads_only_last(self, plan: StepPlan) -> bool:
        """Host: whether only the hidden state of each row's last token is read, in a step with rows of several tokens.
        Models that keep nothing between steps always compute all of them."""
        if not len(plan.tokens) or plan.total_tokens == len(plan.rows):
            return False
        if not self.store.caches and self.states is None:
            return False
        return not any(head.wants_all(plan) for head in self.heads)

    def _forward(
        self,
        batch: Gathered,
        only_last: bool,
        steps: RecurrentSteps | None,
        follow: Follow | None,
        exchanged: tuple[int, int],
    ) -> torch.Tensor:
        """Device: one forward over all tokens of the step, of the model and then of the drafter."""
        view, store = batch.view, self.store
        metadata = self.attention.make_metadata(view)
        context = ForwardContext(
            view,
            self.attention,
            metadata,
            store.caches,
            store.group_of_site,
            only_last,
            recurrent=steps,
            states=() if self.states is None else self.states.sites,
            exchanged_tokens=exchanged[0],
            exchanged_last_tokens=exchanged[1],
        )
        hidden = self.model(context)
        if follow is not None:
            follow(context, hidden)
        self.input_batch.advance(batch)
        return hidden

    def close(self) -> None:
        self.device.close()
        self.graphs.clear()
        if self.tier is not None:
            self.tier.close()


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


def _sit_out(step: _Step, take_back: Callable[[], torch.Tensor]) -> None:
    step.batch = replace(step.batch, sitting=take_back())


def _run_head(head: Head, step: _Step) -> None:
    head.run(step.batch, step.hidden)
