"""BadWords: token sequences that may not be drawn.

Whether the next token would complete a sequence depends on the row's last tokens, which only the device knows. So the
device keeps the last tokens of each row: uploaded at admission, shifted by each accepted token.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.contracts.step import Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sampling import forbid_, forbid_matched_, last_kept, match_words
from slipstream.params.sampling import MAX_BAD_WORD
from slipstream.runner.sampling.stage import DrawBatch, ListTable, Stage, StageWork
from slipstream.runner.staging import StagedTensor, Upload

_NO_TOKEN = -1  # in a word: matches every token; in a tail: matches no token


class BadWords(Stage):
    """Words and tails are stored in reverse, so that a longer word of a later row only adds columns."""

    def __init__(self, num_rows: int, device: Device, max_ids: int) -> None:
        self.words = ListTable(num_rows, 2, torch.int32, device, max_ids, fill=_NO_TOKEN)  # [entries, words, length]
        # [rows, length] the last tokens; those of a row without words are kept too, by steps with rows that have some
        self.tails = StagedTensor((num_rows, MAX_BAD_WORD - 1), np.int32, device, fill=_NO_TOKEN)

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            self.words.free(row)
        for admission in plan.admitted:
            if words := admission.bad_words:
                history = admission.history
                assert history is not None, f"row {admission.row} has bad words and came without its history"
                tail = np.full(MAX_BAD_WORD - 1, _NO_TOKEN, np.int32)
                newest = history[::-1][: len(tail)]
                tail[: len(newest)] = newest
                self.tails.write(admission.row, tail)
                lengths = [len(word) for word in words]
                ids = np.array([token for word in words for token in reversed(word)], np.int32)
                columns = np.concatenate([np.arange(length) for length in lengths])
                self.words.assign(admission.row, ids, np.repeat(np.arange(len(words)), lengths), columns)

    def flush(self, upload: Upload) -> None:
        self.words.flush(upload)
        self.tails.flush(upload)

    def is_used_by(self, rows: Ints) -> bool:
        return self.words.entries.is_used_by(rows)

    def work(self, rows: Ints) -> StageWork:
        words, tails = self.words, self.tails.device

        def before(batch: DrawBatch) -> torch.Tensor:
            """The last tokens before each draw."""
            own = tails.index_select(0, batch.rows)
            if batch.earlier is None or batch.offsets is None:
                return own
            return _shifted(own, batch.earlier, batch.offsets)

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            own, is_user = words.of(batch), words.entries.of(batch) >= 0
            matched = match_words(own, before(batch)) & is_user[:, None]
            forbid_matched_(logits, batch.draws, own[..., 0].long(), matched)

        def drawn(tokens: torch.Tensor, batch: DrawBatch, kept: torch.Tensor | None) -> None:
            target = batch.rows
            if kept is not None and batch.offsets is not None:
                # other draws than the last accepted one of each row write to the padding row
                target = torch.where(last_kept(kept, batch.offsets), target, len(tails) - 1)
            tails.index_copy_(0, target, torch.cat([tokens[:, None].to(tails.dtype), before(batch)[:, :-1]], 1))

        key = ("bad_words", words.number) if words.is_capturable(len(rows)) else None
        return StageWork(key, edit, drawn, users=words.entries.users(rows))


def _shifted(tails: torch.Tensor, new: torch.Tensor, num: torch.Tensor) -> torch.Tensor:
    """Device: tails [R, L], the newest token first, after the first num[r] tokens of new [R, K], the oldest first."""
    # column i is the (num - i)-th new token, or the old column i - num
    both = torch.cat([new.to(tails.dtype), tails], 1)
    columns = torch.arange(tails.shape[1], device=tails.device)
    back = num[:, None] - 1 - columns
    return both.gather(1, torch.where(back >= 0, back, new.shape[1] - 1 - back))


# MinTokens: forbids tokens that would end the request before it has `min_tokens` output tokens.


class MinTokens(Stage):
    """Sets stop ids to -inf while the drawn position is below the row's limit.

    The device compares the position, since only the device knows it once drafts are accepted. The host counts draws and
    stops using the stage for a row after as many draws as tokens were missing: each draw gives at least one token.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: Device, max_ids: int) -> None:
        self.vocab_size = vocab_size
        self.missing = np.zeros(num_rows, np.int64)  # draws for which the row still uses the stage
        self.limit = StagedTensor((num_rows,), np.int64, device)  # first position at which the request may end, or 0
        self.ids = ListTable(num_rows, 1, torch.int64, device, max_ids, fill=None)  # stop ids

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            if self.ids.entries.of_row[row] >= 0:
                self.ids.free(row)
                self.missing[row] = 0
                self.limit.write(row, 0)
        for admission in plan.admitted:
            row, limit = admission.row, admission.num_prompt_tokens + admission.params.min_tokens
            ids = sorted({i for i in admission.stop_ids if 0 <= i < self.vocab_size})
            # if every id of the vocabulary is a stop id, there is nothing else to draw: let the request end
            if limit <= admission.num_known or not ids or len(ids) == self.vocab_size:
                continue
            self.missing[row] = limit - admission.num_known
            self.limit.write(row, limit)
            self.ids.assign(row, np.array(ids, np.int32))

    def flush(self, upload: Upload) -> None:
        self.ids.flush(upload)
        self.limit.flush(upload)

    def is_used_by(self, rows: Ints) -> bool:
        return len(self.ids.entries) > 0 and bool((self.missing[rows] > 0).any())

    def work(self, rows: Ints) -> StageWork:
        users = self.missing[rows] > 0
        self.missing[rows] -= users
        table, limit = self.ids, self.limit.device

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            too_early = batch.positions < limit.index_select(0, batch.rows)
            forbid_(logits, batch.draws, table.of(batch), too_early)

        return StageWork(("min_tokens", table.number) if table.is_capturable(len(rows)) else None, edit, users=users)
