"""NgramDrafter: proposes what followed the last tokens of a row when they occurred before in the same row.

The methods `ngram` and `suffix` differ in their `MatchRule`: an n-gram match has a few tokens and gives as many drafts
as are asked for; a suffix match is as long as possible, and a longer match gives more drafts.
"""

from __future__ import annotations

import math

from slipstream.config.config import DraftConfig
from slipstream.ops.drafts import MatchRule, RowHistory, propose_from_history_
from slipstream.runner.batch.rows import RowTable
from slipstream.runner.batch.token_history import TokenHistory
from slipstream.runner.drafts.drafter import DraftBatch


class NgramDrafter:
    always_runs = False
    reads_hidden = False
    fills_returned = True

    def __init__(self, config: DraftConfig, rows: RowTable, history: TokenHistory) -> None:
        self.rule = MatchRule(config.min_match, config.max_match, config.drafts_per_match or math.inf)
        self._rows = rows
        self._history = history

    def propose(self, batch: DraftBatch, num_drafts: int) -> None:
        text = RowHistory(self._rows.next_tokens, self._rows.computed, self._history.table, self._history.tokens)
        propose_from_history_(batch.rows, batch.offsets, text, num_drafts, self.rule, batch.max_length, batch.returned)
