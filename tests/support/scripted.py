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

import numpy as np

from mask_table import MaskTable
from scripted_pages import ScriptedPages
from scripted_results import draw_logprobs, pick_token, proposed_drafts, score_prompts
from scripted_row import ScriptedRow
from scripted_states import ScriptedStates
from scripted_tokens import IMAGE, VOCAB, as_token, draw, horizon, pooled, shown
from slipstream.contracts.request import NEVER
from slipstream.contracts.step import NO_POOLING, Admission, DrawEdits, StepPlan, StepResult


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
        self.pages = ScriptedPages(page_size, windows)
        self.states = None if num_checkpoints is None else ScriptedStates(num_checkpoints, border)
        self.drafter = drafter
        self.windows = windows
        self.max_num_seqs = max_num_seqs
        self.short_rope = NEVER if short_rope is None else short_rope
        self.rows: dict[int, ScriptedRow] = {}
        self.queries: set[int] = set()  # kept for late interaction
        self.masks = MaskTable()
        self.fail: Callable[[Admission, int], bool] = lambda admission, length: False
        self.num_accepted = self.num_rejected = 0  # drafts
        self.num_sat_out = 0  # rows, over all steps
        self.num_switched = 0  # requests that came back with the long rope factors
        self.num_admissions = 0
        self.num_computed = 0
        self.arena: dict[int, int] = {}  # rows that the tower has made of images
        self.num_encoded = 0  # images
        self._queue: deque[StepPlan] = deque()
        self._late: dict[int, DrawEdits] = {}  # by step
        self._last_step = -1

    def launch(self, plan: StepPlan) -> None:
        self._queue.append(plan)

    def finish(self, late: DrawEdits | None) -> None:
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
        assert self.states is not None or plan.states is None
        if self.states is not None:
            self.states.restore(plan, self.rows)
        self._write(plan)
        if self.states is not None:
            self.states.save(plan, self.rows, has_drafter=self.drafter is not None)
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
            state = ScriptedRow(admission, len(self.windows))
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
        self.pages.update(plan, self.rows)

    def _show_images(self, plan: StepPlan) -> dict[int, int]:
        """Encode images. Returns what tokens of the step show, by their index."""
        if plan.images is None:
            return {}
        for encoding in plan.images.encodings:
            self.num_encoded += 1
            assert len(set(encoding.rows.tolist())) == len(encoding.rows), "two tokens of an image share a row"
            for number, row in enumerate(encoding.rows.tolist()):
                self.arena[row] = shown(encoding.patches, number)
        pairs = zip(plan.images.indices.tolist(), plan.images.rows.tolist(), strict=True)
        return {index: self.arena[row] for index, row in pairs}

    def _write(self, plan: StepPlan) -> None:
        """Write every row's tokens to its slots before any row reads, as each layer of a model does."""
        host_tokens, images = iter(plan.tokens.tolist()), self._show_images(plan)
        place = 0  # of a token among all tokens of the step
        self.pages.begin_writes()
        singles = plan.num_tokens == 1
        assert singles.tolist() == sorted(singles.tolist(), reverse=True), "rows of one token come first"
        short = singles | (plan.num_host_tokens == 0)  # drafted rows become rows of one token
        assert short.tolist() == sorted(short.tolist(), reverse=True), "longer chunks come last"
        assert len(set(plan.rows.tolist())) == len(plan.rows) > 0, "a row is planned twice"
        if self.states is not None and (plan.num_drawn > 1).any():
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
                if place in images:
                    assert token == IMAGE and position < state.admission.num_prompt_tokens
                    token = images[place]
                assert token != IMAGE, f"row {row}: an image has no content at {position}"
                place += 1
                self.pages.write(state, position, token, is_drawn=not known)
                if self.states is not None:
                    assert state.state is not None and len(state.state) == position, f"row {row} has no such state"
                    state.state = (*state.state, token)
            # with drafts the state stays where it is; it may have seen the first token in a step that the row sat out
            state.base_before, state.base = state.base, max(state.base, state.length if num_drawn > 1 else end)
            state.start, state.length, state.planned = state.length, end, int(length)
            self.num_computed += int(num)
        assert next(host_tokens, None) is None, "more host tokens than planned positions"

    def _draw(self, state: ScriptedRow, num_drawn: int) -> tuple[list[int], int, bool]:
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
            token = pick_token(token, state.admission, self._late.get(self._last_step), place)
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

    def _sit_out(self, row: int, state: ScriptedRow) -> None:
        """Take back what a row that sits out this step has computed and drawn."""
        late = self._late.get(self._last_step)
        if late is not None and late.sit_out is not None and row in late.sit_out.rows:
            index = late.sit_out.rows.tolist().index(row)
            assert state.start <= int(late.sit_out.computed[index]), f"row {row} goes back before this step"
            state.length = state.sat_at = int(late.sit_out.computed[index])
            state.next_tokens = [int(late.sit_out.tokens[index]), *[-1] * (8 if self.drafter else 0)]
            self.num_sat_out += 1

    def _guess(self, state: ScriptedRow, last: int) -> list[int]:
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
                assert state.admission.history.tolist()[-len(seen) :] == list(map(as_token, seen))
            drawn, count, fails = self._draw(state, num_drawn)
            self._sit_out(row, state)
            tokens += drawn
            counts.append(count)
            failed.append(fails)
        logprobs = None
        if plan.num_logprobs is not None:
            logprobs = draw_logprobs(tokens, [self.rows[row].admission for row in owners], plan.num_logprobs)
        return StepResult(
            np.array(tokens, np.int32),
            np.array(failed, np.bool_),
            logprobs,
            score_prompts(plan, self.rows, self.pages.read),
            tuple(results),
            frozenset(bad),
            None if plan.num_drawn.max(initial=0) < 2 else np.array(counts, np.int32),
            proposed_drafts(plan, self.rows),
        )

    def _see(self, state: ScriptedRow) -> list[int]:
        """The tokens that the row's last token is drawn from: all, or those of the widest window."""
        seen = self.pages.read(state)
        if self.states is not None:
            assert state.state is not None and len(state.state) >= state.length
            assert all(state.state[position] == token for position, token in seen.items()), "pages of other tokens"
            return list(state.state[: state.length])
        return [seen[position] for position in range(state.length) if position in seen][-horizon(self.windows) :]
