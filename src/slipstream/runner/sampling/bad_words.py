"""Bad words: sequences of tokens that may not come.

Whether one is about to be completed depends on the row's last tokens, which only the device knows. So a row that uses
this has its tail there: filled from its history when it is admitted, shifted by each token it draws.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.device.device import Device
from slipstream.ops.sample import forbid_matched_, match_words
from slipstream.runner.batch.staging import Upload
from slipstream.runner.sampling.slots import Slots, SlotTable
from slipstream.runner.sampling.stage import SampleBatch, StageWork
from slipstream.step import Admission, Ints, StepPlan

_NO_TOKEN = -1  # of a word: meets every tail
_NO_HISTORY = -2  # of a tail: meets no token


class BadWords:
    """Words and tails are written backwards, so that a longer word of a later row only adds columns."""

    def __init__(self, num_rows: int, device: Device) -> None:
        self.slots = Slots(num_rows)
        self.words = SlotTable(num_rows, (0, 0), torch.int32, device, fill=_NO_TOKEN)  # [slots, words, length]
        self.tails = SlotTable(num_rows, 0, torch.int32, device, fill=_NO_HISTORY)  # [slots, length - 1 or more]
        self._new: list[tuple[int, Admission]] = []

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            self.slots.release(row)
        for admission in plan.admitted:
            if admission.bad_words:
                self._new.append((self.slots.take(admission.row), admission))

    def flush(self, upload: Upload) -> None:
        for slot, admission in self._new:
            words = admission.bad_words
            self.words.reserve(slot + 1, (len(words), max(map(len, words))), upload)
            self.tails.reserve(slot + 1, self.words.shape[2] - 1, upload)
            self._write(slot, admission, upload)
        self._new = []

    def _write(self, slot: int, admission: Admission, upload: Upload) -> None:
        history, bad_words = admission.history, admission.bad_words
        assert history is not None, f"row {admission.row} has bad words and came without its history"
        words, tails = self.words, self.tails
        longest = words.shape[2]
        lengths = np.array([len(word) for word in bad_words], np.int32)
        starts = np.cumsum(lengths, dtype=np.int32) - lengths
        # where a token goes: its word's line, counted from the word's end
        within = np.arange(int(lengths.sum()), dtype=np.int32) - np.repeat(starts, lengths)
        from_end = np.repeat(lengths, lengths) - 1 - within
        lines = np.repeat(np.arange(len(bad_words), dtype=np.int32), lengths)
        place_span = upload.put((lines * longest + from_end).astype(np.int32))
        id_span = upload.put(np.array([token for word in bad_words for token in word], np.int32))
        tail: Ints = history[::-1][: longest - 1]
        tail_span = upload.put(np.ascontiguousarray(tail))

        def write() -> None:
            words.tensor[slot].fill_(_NO_TOKEN).view(-1).index_copy_(
                0, upload.tensor(place_span).long(), upload.tensor(id_span)
            )
            newest = upload.tensor(tail_span)
            tails.tensor[slot].fill_(_NO_HISTORY)[: newest.shape[0]].copy_(newest)

        upload.then(write)

    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        users = self.slots.users(rows, upload)
        if users is None:
            return None
        words, tails = self.words, self.tails

        def edit(logits: torch.Tensor, batch: SampleBatch) -> None:
            slots = upload.tensor(users.slots)
            own = words.tensor.index_select(0, slots)
            matched = match_words(own, tails.tensor.index_select(0, slots))
            forbid_matched_(logits, upload.tensor(users.index), own[..., 0].long(), matched)

        def drawn(tokens: torch.Tensor, batch: SampleBatch) -> None:
            if not tails.tensor.shape[1]:
                return
            slots = upload.tensor(users.slots)
            newest = tokens.index_select(0, upload.tensor(users.index)).to(torch.int32)[:, None]
            tail = torch.cat([newest, tails.tensor.index_select(0, slots)[:, :-1]], 1)
            tails.tensor.index_copy_(0, slots, tail)

        return StageWork(edit, drawn)

    def asks(self, rows: Ints) -> bool:
        return self.slots.asks(rows)
