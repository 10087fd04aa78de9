"""A drafter that knows what will be drawn: it proposes the right tokens, wrong ones, or both at random."""

from __future__ import annotations

import random

from slipstream.device.sync_check import sync_allowed
from slipstream.runner.drafter import DraftBatch


class ReplayDrafter:
    """Finds the texts that begin with a row's tokens, as the device has them in its pages, and drafts their next
    tokens."""

    always_runs = reads_hidden = fills_returned = False

    def __init__(self, head, history, texts: list[list[int]], kind: str) -> None:
        self.rows, self.history = head.rows, history
        self.kind, self.rng = kind, random.Random(0)
        self.after: dict[tuple[int, ...], list[int]] = {}
        for text in texts:
            for length in range(1, len(text)):
                self.after.setdefault(tuple(text[:length]), text[length:])

    @classmethod
    def replace(cls, llm, texts: list[list[int]], kind: str) -> None:
        """Replace the drafter of an engine."""
        runner = llm.core.executor
        head = runner.heads[0]
        head.drafter = cls(head, runner.store.history, texts, kind)

    def propose(self, batch: DraftBatch, num_drafts: int) -> None:
        with sync_allowed("a drafter of the tests"):
            for row in set(batch.rows.tolist()) - {len(self.rows.computed) - 1}:
                drafts = (self.after.get(self.text(row), []) + [-1] * num_drafts)[:num_drafts]
                for place, token in enumerate(drafts):
                    self.rows.next_tokens[row, 1 + place] = self.change(token)

    def text(self, row: int) -> tuple[int, ...]:
        tokens = self.history.tokens[self.history.table[row]].view(-1)[: int(self.rows.computed[row])].tolist()
        return (*tokens, int(self.rows.next_tokens[row, 0]))

    def change(self, token: int) -> int:
        if token < 0 or self.kind == "right":
            return token
        wrong = (token + 1) % 256
        return wrong if self.kind == "wrong" else self.rng.choice([token, token, token, wrong, -1])
