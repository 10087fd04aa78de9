"""A device that invents tokens: the oracle for "scheduling never changes tokens".

It keeps what the real device keeps (a row table, page tables and the content of every page) and runs plans in order. A
slot holds the (token, position, kind of rope) written to it. A drawn token is a pure function of the tokens that the
row reads through its pages, so any mistake in rows, pages, positions or host tokens causes an assertion or a wrong
token. With a drafter the device drafts tokens after the one it drew last: right ones, wrong ones or none. It draws
after each draft, keeps what it would have drawn without drafts and discards the rest, as a real device does. Plans run
when their result is read, so a plan that is changed after it was returned shows too.

With checkpoints the scripted model is recurrent: the state of a row is all tokens that it has computed, restored and
saved as plans say, and tokens are drawn from the state. What the row reads through its pages must agree with it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mask_table import MaskTable
from scripted_tokens import VOCAB, draw, horizon, pooled
from slipstream.params import MAX_PACKED_LOGPROBS
from slipstream.request import NEVER
from slipstream.step import NO_POOLING, NULL_PAGE, Admission, Late, PoolAdmission, StepLogprobs, StepPlan, StepResult


def _report(tokens: Sequence[int], ranks: Sequence[int], k: int) -> StepLogprobs:
    ids = np.arange(len(tokens) * k, dtype=np.int32).reshape(len(tokens), k)
    return StepLogprobs(-np.array(tokens, np.float64) - 1, np.array(ranks, np.int32), ids, -ids - 0.5)


class _Row:
    def __init__(self, admission: Admission | PoolAdmission, num_groups: int) -> None:
        self.admission = admission
        self.pools = isinstance(admission, PoolAdmission)
        self.has_grammar = not self.pools and admission.params.structured_outputs is not None
        self.num_known = admission.num_prompt_tokens if self.pools else admission.num_known
        self.tables: list[dict[int, int]] = [{} for _ in range(num_groups)]
        self.length = self.start = admission.num_cached  # after and before the present step
        self.next_tokens: list[int] = []  # the token drawn last, then guesses of those behind it
        self.state: tuple[int, ...] | None = None if admission.num_cached else ()  # None: to be restored
        # tokens that the stored state has seen, after and before the present step: with drafts it may be older than
        # the row, whose accepted tokens the next step replays
        self.base = self.base_before = admission.num_cached
        self.sat_at = -1  # the last position that the row computed in a step that it sat out
        self.planned = 0  # the length after the present step, by the plan: an upper bound while drafts are in flight


class ScriptedExecutor:
    def __init__(
        self,
        page_size: int,
        windows: Sequence[int] = (0,),
        max_num_seqs: int = 1 << 30,
        short_rope: int | None = None,
        drafter: random.Random | None = None,
        num_checkpoints: int | None = None,
        border: int = 0,
    ) -> None:
        """`windows`: per group, the positions that a token attends to, itself included; 0: all. `short_rope`: the
        longest request with the short rope factors. `drafter` decides how good each draft is. `num_checkpoints`: of a
        model with recurrent states, at multiples of `border`; None: it has no states."""
        self.has_states = num_checkpoints is not None
        self.border = border
        self.checkpoints: list[tuple[int, ...] | None] = [None] * (num_checkpoints or 0)
        self.num_restored = self.num_saved = 0
        self.drafter = drafter
        self.num_accepted = self.num_rejected = 0  # drafts
        self.num_sat_out = 0  # rows, over all steps
        self.page_size = page_size
        self.windows = windows
        self.num_groups = num_groups = len(windows)
        self.max_num_seqs = max_num_seqs
        self.short_rope = NEVER if short_rope is None else short_rope
        self.num_switched = 0  # requests that came back with the long rope factors
        self.rows: dict[int, _Row] = {}
        self.slots: list[dict[tuple[int, int], tuple[int, int, bool]]] = [{} for _ in range(num_groups)]
        # by group and slot of the second tier: what the slots of a page held, by offset
        self.stored: dict[tuple[int, int], dict[int, tuple[int, int, bool]]] = {}
        self.num_loaded = 0  # pages
        self.num_admissions = 0
        self.num_computed = 0
        self.num_given_back = 0  # pages, by running requests
        self.queries: set[int] = set()  # kept for late interaction
        self.fail: Callable[[Admission, int], bool] = lambda admission, length: False
        self._queue: deque[StepPlan] = deque()
        self._late: dict[int, Late] = {}  # by step
        self.masks = MaskTable()
        self._last_step = -1
        self._drawn: set[tuple[int, tuple[int, int]]] = set()  # slots, by group, of tokens that the last step drew

    def launch(self, plan: StepPlan) -> None:
        self._queue.append(plan)

    def finish(self, late: Late | None) -> None:
        """The masks and edits of the plan launched last."""
        if late is not None:
            self._late[self._queue[-1].step] = self.masks.resolved(late)

    def wait(self) -> StepResult:
        """Run the oldest plan."""
        plan = self._queue.popleft()
        assert plan.step == self._last_step + 1
        self._last_step = plan.step
        self._release_and_admit(plan)
        self._update_pages(plan)
        self._restore(plan)
        self._write(plan)
        self._save(plan)
        self._keep_queries(plan)
        return self._sample(plan)

    def _release_and_admit(self, plan: StepPlan) -> None:
        for row in plan.released.tolist():
            del self.rows[row]
        if plan.pooling is not None:
            self.queries -= set(plan.pooling.freed_queries)  # some were given up before they were computed
        for admission in sorted(plan.all_admitted, key=lambda admission: admission.number):
            assert admission.row not in self.rows, f"row {admission.row} has an owner"
            assert 0 <= admission.row < self.max_num_seqs
            assert admission.number == self.num_admissions
            state = _Row(admission, self.num_groups)
            assert 0 <= admission.num_cached < state.num_known
            assert admission.long_rope == (state.num_known > self.short_rope)
            self.num_switched += admission.num_prompt_tokens <= self.short_rope < state.num_known
            self.num_admissions += 1
            self.rows[admission.row] = state

    def _keep_queries(self, plan: StepPlan) -> None:
        """A document needs its query from an earlier step; a query that ends with this step is stored from now on."""
        pooling = plan.pooling or NO_POOLING
        if pooling.queries is not None:
            pairs = list(zip(pooling.queries.tolist(), pooling.params, strict=True))
            assert all((number >= 0) == bool(params.query_key) for number, params in pairs)
            wanted = {number for number, params in pairs if params.is_document}
            assert wanted <= self.queries, f"queries {wanted} are asked for, {self.queries} are kept"
            self.queries |= {number for number, params in pairs if params.is_query}

    def _update_pages(self, plan: StepPlan) -> None:
        assert len(plan.new_pages) == self.num_groups
        for group, updates in enumerate(plan.new_pages):
            for row, place, page in zip(updates.rows, updates.entries, updates.pages, strict=True):
                state = self.rows[int(row)]
                table = state.tables[group]
                if page == NULL_PAGE:
                    window = self.windows[group]
                    assert window and (place + 1) * self.page_size <= state.length - window + 1, "a needed page is gone"
                    assert int(place) <= len(table)
                    self.num_given_back += int(place) < len(table)
                else:
                    assert int(place) == len(table), "a page was put where one is, or left a gap"
                table[int(place)] = int(page)
        self._copy_tier(plan)
        for group, source, target in plan.copies.tolist():
            for offset in range(self.page_size):
                content = self.slots[group].get((source, offset))
                if content is not None:
                    self.slots[group][target, offset] = content

    def _copy_tier(self, plan: StepPlan) -> None:
        if plan.tier is None:
            return
        used = plan.tier.stores[:, ::2].tolist() + plan.tier.loads[:, :2].tolist()
        stored = {tuple(each) for each in plan.tier.stores[:, ::2].tolist()}
        assert len(stored) == len(plan.tier.stores), "two pages are stored to one slot"
        assert all(tuple(each) not in stored for each in used[len(plan.tier.stores) :]), "a slot is loaded and stored"
        targets = {tuple(each) for each in plan.tier.loads[:, ::2].tolist()}
        assert len(targets) == len(plan.tier.loads), "a page is loaded twice"
        for group, page, slot in plan.tier.stores.tolist():
            content = {offset: self.slots[group].get((page, offset)) for offset in range(self.page_size)}
            assert None not in content.values(), f"page {page} is stored and not full"
            self.stored[group, slot] = content
        for group, slot, page in plan.tier.loads.tolist():
            assert (group, slot) in self.stored, f"slot {slot} is loaded and was never stored"
            self.num_loaded += 1
            for offset, one in self.stored[group, slot].items():
                self.slots[group][page, offset] = one

    def _restore(self, plan: StepPlan) -> None:
        """Before the forward: rows that start from a checkpoint get its state."""
        assert self.has_states or plan.states is None
        for row, checkpoint in [] if plan.states is None else plan.states.restores.tolist():
            state, content = self.rows[row], self.checkpoints[checkpoint]
            assert state.state is None and state.length == state.admission.num_cached, f"row {row} has a state"
            assert content is not None, f"checkpoint {checkpoint} was never saved"
            assert len(content) == state.length, f"row {row} starts at {state.length}, with a state of {len(content)}"
            state.state = content
            self.num_restored += 1

    def _save(self, plan: StepPlan) -> None:
        """With the forward: states of rows after positions that this step computes."""
        saves = [] if plan.states is None else plan.states.saves.tolist()
        assert len({checkpoint for _, _, checkpoint in saves}) == len(saves), "a checkpoint is saved to twice"
        for index, position, checkpoint in saves:
            state = self.rows[int(plan.rows[index])]
            assert position % self.border == 0, f"{position} is no border"
            is_passed = state.base_before < position <= state.base
            is_behind = not is_passed and state.sat_at >= 0  # its plan counts a draw of a step that it sat out
            assert is_passed or is_behind or self.drafter is not None, f"{position} is not computed in this step"
            assert state.state is not None
            if is_passed:
                self.checkpoints[checkpoint] = state.state[:position]
                self.num_saved += 1
            elif is_behind and self.drafter is None:
                self.checkpoints[checkpoint] = None

    def _write(self, plan: StepPlan) -> None:
        """Write every row's tokens to its slots before any row reads, as each layer of a model does."""
        host_tokens = iter(plan.tokens.tolist())
        written = set()
        self._drawn = set()
        singles = plan.num_tokens == 1
        assert singles.tolist() == sorted(singles.tolist(), reverse=True), "rows of one token come first"
        assert len(set(plan.rows.tolist())) == len(plan.rows) > 0, "a row is planned twice"
        if self.has_states and (plan.num_drawn > 1).any():
            assert (plan.num_tokens <= np.maximum(plan.num_drawn, 1)).all(), "drafts beside a longer chunk"
        for row, num, length, num_host_tokens, num_drawn in zip(
            plan.rows, plan.num_tokens, plan.lengths, plan.num_host_tokens, plan.num_drawn, strict=True
        ):
            state = self.rows[int(row)]
            if state.state is not None:
                state.state = state.state[: state.length]  # without rejected drafts
            end = state.length + int(num)
            is_bound = (self.drafter and not num_host_tokens) or state.sat_at >= 0
            bound = length >= end if is_bound else length == end
            assert num >= 1 and bound, f"row {row} is at {state.length}, planned to {length}"
            assert state.admission.long_rope or length <= self.short_rope, f"row {row} needs the long rope factors"
            # tokens that the grammar forced: in one chunk, or in several if a step has few tokens
            if state.has_grammar and num_host_tokens and end >= state.num_known and end > state.admission.num_known:
                state.num_known = end + (not num_drawn)
            for index, position in enumerate(range(state.length, end)):
                known = index < num_host_tokens
                assert position == state.sat_at or known == (position < state.num_known), (
                    f"row {row}: who gives token {position}?"
                )
                assert known or index - num_host_tokens < len(state.next_tokens), (
                    f"row {row} reads a token it has not drawn"
                )
                token = next(host_tokens) if known else state.next_tokens[index - num_host_tokens]
                place, offset = divmod(position, self.page_size)
                for group, table in enumerate(state.tables):
                    slot = table[place], offset
                    assert table[place] != NULL_PAGE
                    assert (group, slot) not in written, f"two rows write slot {slot}"
                    written.add((group, slot))
                    content = token, position, state.admission.long_rope
                    if not known and (position != state.sat_at or self.slots[group][slot] != content):
                        self._drawn.add((group, slot))
                    self.slots[group][slot] = content
                if self.has_states:
                    assert state.state is not None and len(state.state) == position, f"row {row} has no such state"
                    state.state = (*state.state, token)
            # with drafts the state stays where it is; it may have seen the first token in a step that the row sat out
            state.base_before, state.base = state.base, max(state.base, state.length if num_drawn > 1 else end)
            state.start, state.length, state.planned = state.length, end, int(length)
            self.num_computed += int(num)
        assert next(host_tokens, None) is None, "more host tokens than planned positions"

    def _draw(self, state: _Row, num_drawn: int) -> tuple[list[int], int, bool]:
        """The row's drawn tokens, how many are accepted, and whether the draw after those failed."""
        seed, sample = state.admission.seed, state.admission.sample
        length = state.length
        drawn: list[int] = []
        failed = False
        for place in range(num_drawn):
            state.length = length - num_drawn + place + 1
            seen = self._see(state)
            if self.fail(state.admission, state.length):
                failed = True
                break
            token = draw(seen, seed, sample)
            token = self._pick(token, state.admission, place)
            if token is None:
                failed = True
                break
            drawn.append(token)
            if place + 1 < num_drawn and drawn[-1] != state.next_tokens[place + 1]:
                break
        count = len(drawn)
        self.num_accepted += max(count - 1, 0)
        self.num_rejected += num_drawn - max(count, 1)
        state.length = length - num_drawn + max(count, 1)
        if drawn:
            state.next_tokens = [drawn[-1], *self._guess(state, drawn[-1])]
        elif failed:
            state.next_tokens = [0]  # as on a real device; the host drops what is drawn from it
        return drawn + [VOCAB] * (num_drawn - count), count, failed

    def _sit_out(self, row: int, state: _Row) -> None:
        """Take back what a row that sits out this step has computed and drawn."""
        late = self._late.get(self._last_step)
        if late is not None and late.sit_out is not None and row in late.sit_out.rows:
            index = late.sit_out.rows.tolist().index(row)
            assert state.start <= int(late.sit_out.computed[index]), f"row {row} goes back before this step"
            state.length = state.sat_at = int(late.sit_out.computed[index])
            state.next_tokens = [int(late.sit_out.tokens[index]), *[-1] * (8 if self.drafter else 0)]
            self.num_sat_out += 1

    def _pick(self, wanted: int, admission: Admission, offset: int = 0) -> int | None:
        """The first token from the wanted one on, unless the step's late data say otherwise; None: all are
        forbidden."""
        late = self._late.get(self._last_step)
        has_mask = late is not None and admission.row in late.rows
        is_processed = bool(getattr(admission, "processed", 0))
        assert has_mask or admission.params.structured_outputs is None, "a mask is missing"
        assert is_processed or has_mask == (admission.params.structured_outputs is not None), "a mask of another row"
        if late is None or not (has_mask or is_processed):
            return wanted
        scores = -((np.arange(VOCAB) - wanted) % VOCAB).astype(np.float64)
        if has_mask:
            masked = late.rows == admission.row
            if late.offsets is not None:
                masked &= late.offsets == offset
            (line,) = masked.nonzero()[0].tolist()
            bits = late.bits[line]
            scores[np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB] == 0] = -np.inf
        if late.bias is not None and admission.row in late.bias.rows:
            index = late.bias.rows.tolist().index(admission.row)
            np.add.at(scores, late.bias.ids[index], late.bias.values[index])
        for edit in late.edits:
            if edit.rows == (admission.row,):
                try:
                    scores = edit.run(scores.copy())
                except Exception as error:
                    edit.fail(error)
                    return None
        best = int(scores.argmax())
        return None if scores[best] == -np.inf else best

    def _guess(self, state: _Row, last: int) -> list[int]:
        if self.drafter is None:
            return []
        history, guesses = [*self._see(state), last][-horizon(self.windows) :], []
        for _ in range(8):
            token = draw(history, state.admission.seed, state.admission.sample)
            token = self.drafter.choice([token, token, token, (token + 1) % VOCAB, -1])
            guesses.append(token)
            history = [*history, token][-horizon(self.windows) :]
        return guesses

    def _sample(self, plan: StepPlan) -> StepResult:
        tokens, counts, failed, results, bad = [], [], [], [], []
        pooling = plan.pooling or NO_POOLING
        pools = [False] * len(plan.rows) if pooling.ends is None else pooling.ends.tolist()
        owners = []  # rows of the drawn tokens
        for row, num_drawn, ends in zip(plan.rows.tolist(), plan.num_drawn.tolist(), pools, strict=True):
            state = self.rows[row]
            seen = self._see(state)
            assert (ends if state.pools else bool(num_drawn)) == (state.length >= state.num_known)
            assert not (num_drawn if state.pools else ends)
            if ends:
                assert pooling.params[len(results)] is state.admission.params
                if self.fail(state.admission, state.length):
                    bad.append(len(results))
                results.append(np.array([pooled(seen)]))
            if not num_drawn:
                continue
            owners += [row] * num_drawn
            if state.admission.history is not None and state.length == state.admission.num_known:
                assert state.admission.history.tolist()[-len(seen) :] == seen
            drawn, count, fails = self._draw(state, num_drawn)
            self._sit_out(row, state)
            tokens += drawn
            counts.append(count)
            failed.append(fails)
        count = len(tokens)
        logprobs = None
        if (k := plan.num_logprobs) is not None:
            logprobs = _report(tokens, range(1, count + 1), k)
            num_ids = [len(self.rows[row].admission.params.requested_ids) for row in owners]
            if any(num_ids):
                asking = [token for token, num in zip(tokens, num_ids, strict=True) if num]
                logprobs = replace(logprobs, requested=-np.array([asking] * max(num_ids), np.float64).T)
            wanted = [self.rows[row].admission.params.num_logprobs or 0 for row in owners]
            if long := [place for place, num in enumerate(wanted) if num > MAX_PACKED_LOGPROBS]:
                own = _report([tokens[place] for place in long], [place + 1 for place in long], max(wanted))
                logprobs = replace(logprobs, wide=own)
        return StepResult(
            np.array(tokens, np.int32),
            np.array(failed, np.bool_),
            logprobs,
            self._score(plan),
            tuple(results),
            frozenset(bad),
            None if plan.num_drawn.max(initial=0) < 2 else np.array(counts, np.int32),
            self._proposed(plan),
        )

    def _proposed(self, plan: StepPlan) -> np.ndarray | None:
        if not plan.returns_drafts:
            return None
        drafts = np.full((np.count_nonzero(plan.num_drawn), plan.num_proposed), -1, np.int32)
        for line, row in zip(drafts, plan.rows[plan.num_drawn > 0].tolist(), strict=True):
            own = self.rows[row].next_tokens[1 : 1 + plan.num_proposed]
            line[: len(own)] = own
        return drafts

    def _score(self, plan: StepPlan) -> StepLogprobs | None:
        """The logprob of a prompt token is the token itself, below zero; its rank its position."""
        if plan.scores is None:
            return None
        num_tokens = plan.num_tokens.tolist()
        rows = [row for row, num in zip(plan.rows.tolist(), num_tokens, strict=True) for _ in range(num)]
        starts = plan.lengths - plan.num_tokens
        positions = [s + i for s, num in zip(starts.tolist(), num_tokens, strict=True) for i in range(num)]
        ranks = []
        for place, token in zip(plan.scores.indices.tolist(), plan.scores.tokens.tolist(), strict=True):
            state, position = self.rows[rows[place]], positions[place]
            assert state.admission.sample == 0 and position + 1 < state.admission.num_prompt_tokens
            if position + 1 < state.length:
                assert self._read(state)[position + 1] == token, "a prompt token is scored at the wrong place"
            ranks.append(position + 1)
        count, k = len(ranks), plan.scores.num_logprobs
        ids = np.arange(count * k, dtype=np.int32).reshape(count, k)
        return StepLogprobs(-plan.scores.tokens.astype(np.float64), np.array(ranks, np.int32), ids, -ids - 0.5)

    def _see(self, state: _Row) -> list[int]:
        """The tokens that the row's last token is drawn from: all, or those of the widest window."""
        seen = self._read(state)
        if self.has_states:
            assert state.state is not None and len(state.state) >= state.length
            assert all(state.state[position] == token for position, token in seen.items()), "pages of other tokens"
            return list(state.state[: state.length])
        return [seen[position] for position in range(state.length) if position in seen][-horizon(self.windows) :]

    def _read(self, state: _Row) -> dict[int, int]:
        """The row's tokens by position, read through its pages, as far as the step's tokens attend to them. Every group
        must hold the same tokens at the right positions."""
        seen: dict[int, int] = {}
        for group, (table, window, slots) in enumerate(zip(state.tables, self.windows, self.slots, strict=True)):
            for position in range(max(0, state.start - window + 1) if window else 0, state.length):
                place, offset = divmod(position, self.page_size)
                assert table[place] != NULL_PAGE, f"the page of position {position} was given back too early"
                slot = table[place], offset
                # kernels rely on it: such keys may be read before the step's own are written
                assert position >= state.start or (group, slot) not in self._drawn, "read in the step that draws it"
                token, written_for, long_rope = slots[slot]
                assert long_rope == state.admission.long_rope, f"position {position} reads a key of the other rope"
                assert written_for == position, f"position {position} reads what was written for {written_for}"
                assert seen.setdefault(position, token) == token
        return seen
