"""ThinkingBudget: ends the reasoning of a row after `thinking_token_budget` tokens.

The device follows the markers in the tokens that it draws (`params/thinking.py`) and counts reasoning tokens, so the
limit is exact however far the host is ahead. When the budget is used, only the next token of the end text is allowed;
where a grammar forbids that token, within a character of several tokens, as soon as it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slipstream.config.buffer_size import mask_words
from slipstream.contracts.step import Admission, Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sampling import last_kept, mask_bits_
from slipstream.params.thinking import ThinkingAutomaton
from slipstream.runner.sampling.stage import DrawBatch, Stage, StageRows, StageWork
from slipstream.runner.staging import StagedTensor, Upload

_NO_BUDGET = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Tables:
    """The tables of the automaton on the device."""

    tokens: torch.Tensor  # [marker tokens]
    next: torch.Tensor  # [states, marker tokens + 1]
    delta: torch.Tensor
    is_inside: torch.Tensor  # [states]
    is_forcing: torch.Tensor
    forced: torch.Tensor
    next_forced: torch.Tensor
    entries: torch.Tensor  # [states] entry of `bits`; -1: forces nothing
    bits: torch.Tensor  # [entries, words] a mask of one token each

    def is_forced(self, states: torch.Tensor, counts: torch.Tensor, budgets: torch.Tensor) -> torch.Tensor:
        is_used = self.is_inside.index_select(0, states) & (counts >= budgets)
        return is_used | self.is_forcing.index_select(0, states)

    def advance(
        self, states: torch.Tensor, counts: torch.Tensor, budgets: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States and counts after these tokens."""
        is_other = torch.ones_like(tokens[:, None], dtype=torch.bool)
        columns = torch.cat([tokens[:, None] == self.tokens, is_other], 1).to(torch.uint8).argmax(1, keepdim=True)
        is_forced = self.is_forced(states, counts, budgets) & (self.forced.index_select(0, states) == tokens)
        after = self.next.index_select(0, states).gather(1, columns)[:, 0]
        delta = self.delta.index_select(0, states).gather(1, columns)[:, 0]
        return (
            torch.where(is_forced, self.next_forced.index_select(0, states), after),
            counts + torch.where(is_forced, 0, delta),
        )


class ThinkingBudget(Stage):
    def __init__(self, num_rows: int, vocab_size: int, device: Device) -> None:
        self.vocab_size = vocab_size
        self.states = StagedTensor((num_rows,), np.int64, device)
        self.counts = StagedTensor((num_rows,), np.int64, device)  # reasoning tokens
        self.budgets = StagedTensor((num_rows,), np.int64, device, fill=_NO_BUDGET)
        self._device = device
        self.rows = StageRows(num_rows, lambda admission: admission.thinking is not None)
        self._markers: tuple[object, ...] | None = None
        self._automaton: ThinkingAutomaton | None = None
        self._tables: _Tables | None = None  # from the first request with a budget on
        self._is_new = False

    def apply(self, plan: StepPlan) -> None:
        released, admitted = self.rows.apply(plan)
        for row in released:
            self.budgets.write(row, _NO_BUDGET)
            self.states.write(row, 0)  # the request may have ended within the forced text
        for admission in admitted:
            self._admit(admission)

    def _admit(self, admission: Admission) -> None:
        thinking, budget, history = admission.thinking, admission.params.thinking_token_budget, admission.history
        assert thinking is not None and budget is not None and history is not None
        if self._automaton is None:
            self._automaton, self._markers, self._is_new = ThinkingAutomaton(thinking), thinking.markers, True
        assert thinking.markers == self._markers, "requests of one model have other markers of reasoning"
        state = self._automaton.first_inside if thinking.is_open else 0
        state, count = self._automaton.follow(state, 0, budget, history[admission.num_history_prompt :])
        row = admission.row
        self.states.write(row, state)
        self.counts.write(row, count)
        self.budgets.write(row, budget)

    def flush(self, upload: Upload) -> None:
        if self._is_new:
            self._is_new = False
            self._write_tables(upload)
        for staged in (self.states, self.counts, self.budgets):
            staged.flush(upload)

    def _write_tables(self, upload: Upload) -> None:
        automaton = self._automaton
        assert automaton is not None
        forcing = np.flatnonzero(automaton.forced >= 0)
        entries = np.full(len(automaton.forced), -1, np.int32)
        entries[forcing] = np.arange(len(forcing), dtype=np.int32)
        targets = automaton.forced[forcing]
        arrays = (
            automaton.tokens, automaton.next, automaton.delta, automaton.is_inside, automaton.is_forcing,
            automaton.forced, automaton.next_forced, entries,
        )  # fmt: skip
        spans = [upload.put(array.astype(np.int32) if array.dtype == np.int64 else array) for array in arrays]
        # one word of each mask is not 0
        words, values = upload.put(targets >> 5), upload.put((1 << (targets & 31)).astype(np.uint32).view(np.int32))
        shape = (len(forcing), mask_words(self.vocab_size))

        def write() -> None:
            bits = torch.zeros(shape, dtype=torch.int32, device=self._device.torch_device)
            bits.scatter_(1, upload.tensor(words)[:, None], upload.tensor(values)[:, None])
            copies = [upload.tensor(span).clone() for span in spans]
            tables = [each if each.dtype == torch.bool else each.long() for each in copies]
            self._tables = _Tables(*(*tables, bits))

        upload.then(write)

    def is_used_by(self, rows: Ints) -> bool:
        return self.rows.is_used_by(rows)

    def work(self, rows: Ints) -> StageWork:
        """Rows without a budget are followed too, and never forced."""
        staged = self.states.device, self.counts.device, self.budgets.device
        # states, counts and budgets of the draws of this step
        before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            tables = self._tables
            assert tables is not None
            states, counts, budgets = (each.index_select(0, batch.rows) for each in staged)
            for tokens in () if batch.earlier is None else batch.earlier.unbind(1):
                after = tables.advance(states, counts, budgets, tokens)
                states, counts = (torch.where(tokens >= 0, *pair) for pair in zip(after, (states, counts), strict=True))
            before[:] = [(states, counts, budgets)]
            wanted = tables.forced.index_select(0, states).clamp(min=0)
            is_allowed = logits.gather(1, wanted[:, None])[:, 0] > -torch.inf
            is_forced = tables.is_forced(states, counts, budgets) & is_allowed
            mask_bits_(logits, tables.bits, torch.where(is_forced, tables.entries.index_select(0, states), -1))

        def drawn(tokens: torch.Tensor, batch: DrawBatch, kept: torch.Tensor | None) -> None:
            tables, target = self._tables, batch.rows
            assert tables is not None
            after = tables.advance(*before.pop(), tokens)
            if kept is not None and batch.offsets is not None:
                # other draws than the last accepted one of each row write to the padding row
                target = torch.where(last_kept(kept, batch.offsets), target, len(staged[0]) - 1)
            for own, value in zip(staged, after, strict=False):
                own.index_copy_(0, target, value)

        return StageWork("thinking", edit, drawn, reads=True)
