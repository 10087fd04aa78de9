"""BadWords: token sequences that may not be drawn.

Whether the next token would complete a sequence depends on the row's last tokens, which only the device knows. So the
device keeps the last tokens of each row that uses this stage: uploaded at admission, shifted by each accepted token.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.contracts.step import Admission, Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sampling import forbid_, forbid_matched_, match_words
from slipstream.runner.sampling.stage import (
    ByRow,
    DrawBatch,
    EntryAllocator,
    ListTable,
    Stage,
    StagedEntries,
    StageWork,
)
from slipstream.runner.staging import StagedTensor, Upload

_NO_TOKEN = -1  # in a word: matches every token; in a tail: matches no token


class BadWords(Stage):
    """Words and tails are stored in reverse, so that a longer word of a later row only adds columns."""

    def __init__(self, num_rows: int, device: Device, max_ids: int) -> None:
        self.entries = EntryAllocator(num_rows)
        # [entries, 1 + words, length]: a row's last tokens, then its words
        self.words = ListTable(self.entries, 2, torch.int32, device, max_ids, fill=_NO_TOKEN)
        self._new: list[Admission] = []

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            self.words.free(row)
        for admission in plan.admitted:
            if words := admission.bad_words:
                self.words.assign(admission.row, 1 + len(words), max(map(len, words)))
                self._new.append(admission)

    def flush(self, upload: Upload) -> None:
        if self._new:
            self.words.make_room(upload)
        for admission in self._new:
            self._write(int(self.entries.of_row[admission.row]), admission, upload)
        self._new = []

    def _write(self, entry: int, admission: Admission, upload: Upload) -> None:
        history, bad_words = admission.history, admission.bad_words
        assert history is not None, f"row {admission.row} has bad words and came without its history"
        words = self.words
        longest = words.shape[2]
        tail: Ints = history[::-1][: longest - 1]
        lengths = np.array([len(tail), *map(len, bad_words)], np.int32)
        starts = np.cumsum(lengths, dtype=np.int32) - lengths
        # the column of each token, counted from the end of its word; the tail is reversed already
        within = np.arange(int(lengths.sum()), dtype=np.int32) - np.repeat(starts, lengths)
        from_end = np.repeat(lengths, lengths) - 1 - within
        from_end[: len(tail)] = within[: len(tail)]
        word = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        index_span = upload.put((word * longest + from_end).astype(np.int32))
        id_span = upload.put(np.array([*tail, *(token for word in bad_words for token in word)], np.int32))

        def write() -> None:
            words.tensor[entry].fill_(_NO_TOKEN).view(-1).index_copy_(
                0, upload.tensor(index_span).long(), upload.tensor(id_span)
            )

        upload.then(write)

    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        users = self.entries.users(rows, upload)
        if users is None:
            return None
        words, padding = self.words, len(self.entries.of_row) - 1

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            own, index = words.tensor.index_select(0, upload.tensor(users.entries)), upload.tensor(users.index)
            tails, own = own[:, 0], own[:, 1:]
            if batch.earlier is not None and batch.offsets is not None:
                tails = _shifted(tails, batch.earlier.index_select(0, index), batch.offsets.index_select(0, index))
            forbid_matched_(logits, index, own[..., 0].long(), match_words(own, tails))

        def drawn(tokens: torch.Tensor, batch: DrawBatch, kept: torch.Tensor | None) -> None:
            entries, index, tails = upload.tensor(users.entries), upload.tensor(users.index), words.tensor[:, 0]
            rows = batch.rows.index_select(0, index)
            has_drawn = rows != padding  # a row that sits out the step keeps its tail
            if kept is None:
                newest = tokens.index_select(0, index)[:, None]
                tails.index_copy_(0, entries, _shifted(tails.index_select(0, entries), newest, has_drawn.long()))
                return
            # Each row's accepted tokens, from its first draw on. Every draw of a row writes the same tail.
            assert batch.offsets is not None and batch.earlier is not None
            first = index - batch.offsets.index_select(0, index)
            indices = first[:, None] + torch.arange(1 + batch.earlier.shape[1], device=first.device)
            indices.clamp_(max=len(tokens) - 1)
            is_own = kept[indices] & (batch.rows[indices] == rows[:, None]) & has_drawn[:, None]
            tails.index_copy_(0, entries, _shifted(tails.index_select(0, entries), tokens[indices], is_own.sum(1)))

        return StageWork(edit, drawn)

    def is_used_by(self, rows: Ints) -> bool:
        return self.entries.is_used_by(rows)


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
        self.max_ids = max_ids
        self.entries = StagedEntries(num_rows, device)
        self.missing = np.zeros(num_rows, np.int64)  # draws for which the row still uses the stage
        self.limit = np.zeros(num_rows, np.int64)  # first position at which the request may end
        self.staged_limit = StagedTensor((num_rows,), np.int64, device)  # 0 for rows without min_tokens
        self.ids = ListTable(self.entries, 1, torch.int64, device, max_ids, fill=None)  # stop ids
        self._new: list[tuple[int, list[int]]] = []

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            self.ids.free(row)
            self.missing[row] = 0
            if self.limit[row]:
                self.limit[row] = 0
                self.staged_limit.write(row, 0)
        for admission in plan.admitted:
            limit = admission.num_prompt_tokens + admission.params.min_tokens
            ids = sorted({i for i in admission.stop_ids if 0 <= i < self.vocab_size})
            # if every id of the vocabulary is a stop id, there is nothing else to draw: let the request end
            if limit <= admission.num_known or not ids or len(ids) == self.vocab_size:
                continue
            self.missing[admission.row] = limit - admission.num_known
            self.limit[admission.row] = limit
            self.staged_limit.write(admission.row, limit)
            self.ids.assign(admission.row, len(ids))
            self._new.append((admission.row, ids))

    def flush(self, upload: Upload) -> None:
        if self._new:
            self.ids.make_room(upload)
        self.entries.flush(upload)
        self.staged_limit.flush(upload)
        for row, ids in self._new:
            self._write(int(self.entries.of_row[row]), upload, np.array(ids, np.int32))
        self._new = []

    def _write(self, entry: int, upload: Upload, ids: Ints) -> None:
        table, span, num = self.ids, upload.put(ids), len(ids)

        def write() -> None:
            own, ids = upload.tensor(span), table.tensor[entry]
            ids[:num].copy_(own)
            ids[num:].copy_(own[:1].expand(ids.shape[0] - num))

        upload.then(write)

    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        if not len(self.entries):
            return None
        index = np.flatnonzero(self.missing[rows] > 0)
        if not len(index):
            return None
        users = rows[index]
        self.missing[users] -= 1
        table = self.ids
        index_span, entry_span = upload.put(index), upload.put(self.entries.of_row[users])
        limit_span = upload.put(self.limit[users])

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            index = upload.tensor(index_span)
            too_early = batch.positions.index_select(0, index) < upload.tensor(limit_span)
            forbid_(logits, index, table.tensor.index_select(0, upload.tensor(entry_span)), too_early)

        return StageWork(edit)

    def is_used_by(self, rows: Ints) -> bool:
        return len(self.entries) > 0 and bool((self.missing[rows] > 0).any())

    def can_capture(self, rows: Ints) -> bool:
        """Only if the ids that `by_row` gathers, an entry of the table for each row, stay within the bound."""
        return self.ids.is_roomy and len(rows) * self.ids.shape[1] <= self.max_ids

    def by_row(self, rows: Ints) -> ByRow:
        self.missing[rows] -= self.missing[rows] > 0
        table, entries, limit = self.ids, self.entries.staged.device, self.staged_limit.device

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            too_early = batch.positions < limit.index_select(0, batch.rows)
            listed = entries.index_select(0, batch.rows).clamp_(min=0)
            forbid_(logits, None, table.tensor.index_select(0, listed), too_early)

        return ByRow(("min_tokens", table.number), StageWork(edit))
