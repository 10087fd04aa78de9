"""BadWords: token sequences that may not be drawn.

Whether the next token would complete a sequence depends on the row's last tokens, which only the device knows. So the
device keeps the last tokens of each row that uses this stage: uploaded at admission, shifted by each accepted token.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.contracts.step import Admission, Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sample import forbid_matched_, match_words
from slipstream.runner.batch.staging import Upload
from slipstream.runner.sampling.entry_allocator import EntryAllocator
from slipstream.runner.sampling.entry_tables import ListTable
from slipstream.runner.sampling.stage import DrawBatch, Stage, StageWork

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
