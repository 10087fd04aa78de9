"""Records what a drafter proposes, with the tokens that each row has at that time."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Protocol

import torch

from law7_engine import MAX_LEN
from slipstream.contracts.request import NEVER
from slipstream.device.sync_check import sync_allowed
from slipstream.runner.drafter import DraftBatch


class Reference(Protocol):
    def propose(self, tokens: list[int], num_drafts: int) -> list[int]:
        """The drafts after these tokens of a row."""


class DraftSpy:
    """Around the drafter of an engine; `proposals` are (tokens of the row, drafts after them)."""

    def __init__(self, llm) -> None:
        runner = llm.core.executor
        head = runner.heads[0]
        self.inner, self.rows = head.drafter, head.rows
        self.history = runner.store.history
        self.table = self.history.table
        self.always_runs, self.reads_hidden = self.inner.always_runs, self.inner.reads_hidden
        self.fills_returned = self.inner.fills_returned
        self.behind: deque[set[int]] = deque()  # by step in flight: rows that a draft model has not computed yet
        if (lag := llm.core.scheduler.drafts.lag) is not None:
            lag.plan = partial(self._plan, lag.plan)
        self.proposals: list[tuple[list[int], list[int]]] = []
        head.drafter = self

    def propose(self, batch: DraftBatch, num_drafts: int) -> None:
        self.inner.propose(batch, num_drafts)
        with sync_allowed("a spy of the tests"):
            # no plan uses the proposals for rows that the draft model has not computed yet
            unused = {len(self.rows.computed) - 1} | (self.behind.popleft() if self.behind else set())
            for row in sorted(set(batch.rows.tolist()) - unused) if num_drafts else ():
                tokens = self.history.tokens[self.table[row]].view(-1)[: int(self.rows.computed[row])].tolist()
                last, *drafts = self.rows.next_tokens[row, : 1 + num_drafts].tolist()
                self.proposals.append(([*tokens, last], drafts))

    def check(self, reference: Reference, at_least: int, stride: int) -> None:
        """Every `stride`th of the different proposals, more than `at_least`, is the reference's. Those beyond MAX_LEN
        exist in no row."""
        seen = {tuple(tokens): drafts for tokens, drafts in self.proposals if len(tokens) + len(drafts) <= MAX_LEN}
        assert len(seen) > at_least
        for tokens, drafts in [*seen.items()][::stride]:
            assert reference.propose(list(tokens), len(drafts)) == drafts, f"after {len(tokens)} tokens"

    def _plan(self, plan, builder, *, is_trial):
        planned = plan(builder, is_trial=is_trial)
        drawing = builder.decodes + [chunk.request for chunk in builder.chunks if chunk.num_drawn]
        if drawing:
            self.behind.append({request.row for request in drawing if request.drafted != NEVER})
        return planned


def argmax_after(logits: torch.Tensor, num_drafts: int) -> list[int]:
    """The likeliest tokens after the last `num_drafts` positions."""
    return logits[-num_drafts:].argmax(1).tolist()
