"""PlanChecker: runs plans without a model and finds faults of the scheduler.

It keeps what a device keeps: rows, page tables, and which token each slot of the KV cache holds (CheckedPages).
It draws nothing: a step's drawn tokens are those of the recording. A row is *complete* if everything that
it reads was written by complete rows of the recording; of the others, admitted before the first recorded step, only
positions are checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.config.config import EngineConfig
from slipstream.contracts.step import (
    NO_INTS,
    NULL_PAGE,
    AdapterLoad,
    Admission,
    Bools,
    PoolAdmission,
    Processed,
    StepPlan,
)
from slipstream.record.record_file import StepRecord


class PlanFault(Exception):
    """A plan that contradicts the plans before it."""


class _CheckedRow:
    __slots__ = (
        "num_known", "length", "tables", "tokens", "is_complete", "pools", "next_tokens", "has_sat_out", "is_older",
    )  # fmt: skip

    def __init__(self, admission: Admission | PoolAdmission, num_groups: int, *, is_complete: bool) -> None:
        self.pools = isinstance(admission, PoolAdmission)
        self.num_known = admission.num_known if isinstance(admission, Admission) else admission.num_prompt_tokens
        self.length: int | None = admission.num_cached if is_complete else None  # None: not known yet
        self.tables: list[dict[int, int]] = [{} for _ in range(num_groups)]
        self.tokens = [UNKNOWN] * admission.num_cached  # by position, of a complete row
        self.is_complete = is_complete
        self.next_tokens: list[int] | None = None  # drawn by the last step that drew for this row
        self.is_older = not is_complete  # than the recording: it may have sat out steps that are not in it
        self.has_sat_out = self.is_older  # or may have: lengths of plans are upper bounds, as with drafts


class PlanChecker:
    def __init__(
        self,
        config: EngineConfig,
        before: Iterable[Admission | PoolAdmission] = (),
        adapters: Iterable[AdapterLoad] = (),
    ) -> None:
        """`before`: admissions of the rows in use before the first plan; `adapters`: in slots of the device by then."""
        cache = config.cache
        self._page_size = cache.page_size
        self._max_rows = config.scheduler.max_num_seqs
        self._max_length = config.scheduler.max_model_len
        self._is_encoder = config.scheduler.is_encoder
        self._has_drafts = config.scheduler.drafts is not None
        self._windows = [group.window for group in cache.groups]
        self._pages = CheckedPages(cache.group_pages, cache.page_size)
        self._stored_states: set[int] = set()  # slots of the second tier with a known state
        self._checkpoints: set[int] = set()  # saved by complete rows
        self._queries: set[int] = set()  # stored by steps of the recording
        self._num_slots = 0 if config.adapters is None else config.adapters.max_loras
        self._slots = {each.slot for each in adapters}  # with a LoRA adapter
        self._image_rows: set[int] = set()  # of the arena of images, encoded by steps of the recording
        self.rows: dict[int, _CheckedRow] = {
            each.row: _CheckedRow(each, len(self._windows), is_complete=False) for each in before
        }
        self._step: int | None = None
        self._is_from_start = False  # whether the recording has every step of the engine

    def run(self, record: StepRecord) -> set[int]:
        """Checks one step. Returns its complete rows. Raises PlanFault."""
        plan = record.plan
        self._need(self._step is None or plan.step == self._step + 1, f"step {plan.step} follows step {self._step}")
        if self._step is None:
            self._is_from_start = plan.step == 0
        self._step = plan.step
        self._check_adapters(plan)
        if self._is_encoder:
            return self._run_encoder(plan)
        self._release_and_admit(plan)
        self._check_images(plan)
        self._update_pages(plan)
        self._restore(plan)
        starts = self._write(plan)
        self._adopt_prefixes(plan)
        self._read(plan)
        self._save(plan, starts)
        self._draw(record)
        self._sit_out(record)
        complete = {row for row in plan.rows.tolist() if self.rows[row].is_complete}
        return complete - self._without_query(plan)

    def _need(self, holds: bool, fact: str) -> None:
        if not holds:
            raise PlanFault(f"step {self._step}: {fact}")

    def _check_adapters(self, plan: StepPlan) -> None:
        """Every slot that a row reads has an adapter."""
        if plan.adapters is None:
            return
        for load in plan.adapters.loads:
            known = 0 <= load.slot < self._num_slots
            self._need(known, f"adapter {load.name} is loaded to slot {load.slot} of {self._num_slots}")
            self._slots.add(load.slot)
        slots = NO_INTS if plan.adapters.slots is None else plan.adapters.slots
        for row, slot in zip(plan.rows.tolist(), slots.tolist(), strict=False):
            self._need(slot < 0 or slot in self._slots, f"row {row} reads slot {slot}, which has no adapter")

    def _check_images(self, plan: StepPlan) -> None:
        """A row that reads an image of an earlier step than the first is not complete."""
        if plan.images is None:
            return
        for encoding in plan.images.encodings:
            self._image_rows.update(encoding.rows.tolist())
        owners = np.repeat(plan.rows, plan.num_tokens)[plan.images.indices]
        for row, image_row in zip(owners.tolist(), plan.images.rows.tolist(), strict=True):
            if image_row not in self._image_rows:
                self._need(not self._is_from_start, f"row {row} reads an image that no step has encoded")
                self.rows[row].is_complete = False

    def _run_encoder(self, plan: StepPlan) -> set[int]:
        self._need(bool((plan.num_host_tokens == plan.num_tokens).all()), "an encoder's prompt is not whole")
        self._need(len(plan.tokens) == int(plan.num_tokens.sum()), "the number of tokens is wrong")
        return set(plan.rows.tolist()) - self._without_query(plan)

    def _without_query(self, plan: StepPlan) -> set[int]:
        """Rows that are scored against a query from before the recording."""
        pooling = plan.pooling
        if pooling is None or pooling.queries is None or pooling.ends is None:
            return set()
        found = zip(plan.rows[pooling.ends].tolist(), pooling.queries.tolist(), pooling.params, strict=True)
        missing = set()
        stored = set()
        for row, number, params in found:
            if params.is_query:
                stored.add(number)
            elif number >= 0 and number not in self._queries:
                missing.add(row)
        self._queries |= stored
        return missing

    def _release_and_admit(self, plan: StepPlan) -> None:
        for row in plan.released.tolist():
            self._need(row in self.rows, f"row {row} is released and has no owner")
            del self.rows[row]
        for each in plan.all_admitted:
            self._need(0 <= each.row < self._max_rows, f"row {each.row} is admitted, there are {self._max_rows}")
            self._need(each.row not in self.rows, f"row {each.row} is admitted and has an owner")
            known = 0 <= each.num_cached <= self._max_length
            self._need(known, f"row {each.row} has {each.num_cached} cached tokens, the limit is {self._max_length}")
            state = _CheckedRow(each, len(self._windows), is_complete=True)
            self._need(each.num_cached < state.num_known, f"row {each.row} has no token to compute")
            edits = Processed.LOGITS | Processed.SCALED
            if isinstance(each, Admission) and each.processed & edits:
                state.is_complete = False  # code that is not in the recording edits its logits
            self.rows[each.row] = state

    def _update_pages(self, plan: StepPlan) -> None:
        self._need(len(plan.new_pages) == len(self._windows), "a cache group has no page updates")
        for group, updates in enumerate(plan.new_pages):
            num_pages = self._pages.num_pages[group]
            for row, entry, page in zip(
                updates.rows.tolist(), updates.entries.tolist(), updates.pages.tolist(), strict=True
            ):
                self._need(row in self.rows, f"row {row} gets a page and has no owner")
                self._need(0 <= page < num_pages, f"row {row} gets page {page} of {num_pages}")
                self._need(page != NULL_PAGE or bool(self._windows[group]), f"row {row} loses page {entry}")
                self.rows[row].tables[group][entry] = page
        self._copy_tier(plan)
        for group, source, target in plan.copies.tolist():
            self._pages.copy(group, source, target)

    def _copy_tier(self, plan: StepPlan) -> None:
        """Copies between pages and slots of the second tier."""
        if plan.tier is None:
            return
        num_groups = len(self._windows)
        for group, page, slot in plan.tier.stores.tolist():
            if group == num_groups:  # a checkpoint of states
                (self._stored_states.add if page in self._checkpoints else self._stored_states.discard)(slot)
                continue
            self._pages.store(group, page, slot)
        for group, slot, page in plan.tier.loads.tolist():
            if group == num_groups:
                (self._checkpoints.add if slot in self._stored_states else self._checkpoints.discard)(page)
                continue
            if not self._pages.load(group, slot, page):
                self._is_from_start = False

    def _restore(self, plan: StepPlan) -> None:
        for row, checkpoint in [] if plan.states is None else plan.states.restores.tolist():
            self._need(row in self.rows, f"a state is restored to row {row}, which has no owner")
            if checkpoint not in self._checkpoints:
                self.rows[row].is_complete = False

    def _adopt_prefixes(self, plan: StepPlan) -> None:
        """After the writes of the step: a prefix may be computed by another row of the same step."""
        for each in plan.all_admitted:
            if each.num_cached:
                self._adopt(self.rows[each.row], each.num_cached)

    def _adopt(self, state: _CheckedRow, num_cached: int) -> None:
        """Reads the tokens of a cached prefix from the pages. Without a page of every position they stay unknown."""
        found: Longs = np.full(num_cached, UNKNOWN, np.int64)
        for group, window in enumerate(self._windows):
            tokens, positions, has_page = self._pages.read(state.tables[group], group, 0, num_cached)
            if window and not has_page.all():
                continue
            is_written = positions != UNKNOWN
            right = (positions == np.arange(num_cached)) | ~is_written
            self._need(bool(right.all()), f"a cached page holds other positions (group {group})")
            self._need(not self._is_from_start or bool(is_written.all()), "a cached page was never written")
            if bool((tokens == UNKNOWN).any()):
                state.is_complete = False
                continue
            found = tokens
        if num_cached and bool((found == UNKNOWN).any()):
            state.is_complete = False
        state.tokens[:num_cached] = found.tolist()

    def _write(self, plan: StepPlan) -> dict[int, int]:
        """Writes the tokens of the step to their slots. Returns the first position of each row."""
        rows = plan.rows.tolist()
        self._need(len(set(rows)) == len(rows), "a row is planned twice")
        self._need(len(plan.tokens) == int(plan.num_host_tokens.sum()), "the number of host tokens is wrong")
        is_chunk = (plan.num_tokens > 1) & (plan.num_host_tokens > 0)
        self._need(not bool((is_chunk[:-1] > is_chunk[1:]).any()), "a longer chunk is planned before other rows")
        written: list[set[int]] = [set() for _ in self._windows]
        starts: dict[int, int] = {}
        host = plan.tokens.tolist()
        used = 0
        for row, num, length, num_host in zip(
            rows, plan.num_tokens.tolist(), plan.lengths.tolist(), plan.num_host_tokens.tolist(), strict=True
        ):
            self._need(row in self.rows, f"row {row} is planned and has no owner")
            state = self.rows[row]
            if state.length is None or (state.is_older and length - num < state.length):
                state.length = length - num  # the least that plans allow
            start, end = state.length, state.length + num
            self._need(num >= 1, f"row {row} computes nothing")
            bound = length >= end if self._has_drafts or state.has_sat_out else length == end
            self._need(bound, f"row {row} is at {start}, planned to {length}")
            given = host[used : used + num_host]
            used += num_host
            own = [*given, *(state.next_tokens or [])][:num]
            own += [UNKNOWN] * (num - len(own))
            starts[row] = start
            if state.is_complete:
                state.tokens[start:] = own
            for group in range(len(self._windows)):
                self._write_row(state, group, start, own, written[group], row)
            state.length = end
        return starts

    def _write_row(
        self, state: _CheckedRow, group: int, start: int, own: list[int], written: set[int], row: int
    ) -> None:
        size, table = self._page_size, state.tables[group]
        for position, token in enumerate(own, start):
            page = table.get(position // size)
            if page is None and not state.is_complete:
                continue  # given to the row before the recording
            self._need(page is not None and page != NULL_PAGE, f"row {row} writes position {position} without a page")
            assert page is not None
            cell = page * size + position % size
            self._need(cell not in written, f"two rows write slot {position % size} of page {page} (group {group})")
            written.add(cell)
            self._pages.write(group, page, position, token)

    def _read(self, plan: StepPlan) -> None:
        """Every position that a complete row attends to has this row's token, written for this position."""
        for row, num in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            state = self.rows[row]
            if not state.is_complete or state.length is None:
                continue
            for group, window in enumerate(self._windows):
                start = max(0, state.length - num - window + 1) if window else 0
                tokens, positions, has_page = self._pages.read(state.tables[group], group, start, state.length)
                self._need(bool(has_page.all()), f"row {row} attends to a position without a page (group {group})")
                right = positions == np.arange(start, state.length)
                self._need(bool(right.all()), f"row {row} reads a page that another row has written (group {group})")
                own = np.array(state.tokens[start : state.length], np.int64)
                same = (tokens == own) | (tokens == UNKNOWN) | (own == UNKNOWN)
                self._need(bool(same.all()), f"row {row} reads tokens of another request (group {group})")

    def _save(self, plan: StepPlan, starts: dict[int, int]) -> None:
        """With drafts, plans have a save from the one that may compute the position until the checkpoint is published;
        the device performs it in the step that passes the position."""
        for index, position, checkpoint in [] if plan.states is None else plan.states.saves.tolist():
            row = int(plan.rows[index])
            state = self.rows[row]
            inside = position <= (state.length or 0) and (self._has_drafts or starts[row] < position)
            # the row is behind its plan, which counts a draw or drafts: no such state
            if not inside and (self._has_drafts or state.has_sat_out):
                self._checkpoints.discard(checkpoint)
                continue
            self._need(inside, f"row {row} saves the state of position {position}, which this step does not compute")
            if state.is_complete:
                self._checkpoints.add(checkpoint)
            else:
                self._checkpoints.discard(checkpoint)

    def _draw(self, record: StepRecord) -> None:
        """The drawn tokens become the rows' next tokens."""
        plan = record.plan
        drawing = [(row, num) for row, num in zip(plan.rows.tolist(), plan.num_drawn.tolist(), strict=True) if num]
        if record.tokens is None:
            for row, _ in drawing:
                self.rows[row].next_tokens = None
            return
        self._need(len(record.tokens) == sum(num for _, num in drawing), "the result has another number of tokens")
        for (row, num), tokens in zip(drawing, accepted_tokens(record), strict=True):
            state = self.rows[row]
            first = (state.length or 0) - num + 1  # position of the first draft
            # positions of rejected drafts are computed again
            state.length = first + max(len(tokens) - 1, 0)
            del state.tokens[state.length :]
            self._write_accepted(state, first, tokens[:-1])
            state.next_tokens = tokens[-1:]

    def _write_accepted(self, state: _CheckedRow, first: int, drafts: list[int]) -> None:
        """Accepted drafts, which no plan has, become known tokens of their positions."""
        if state.is_complete:
            state.tokens[first:] = drafts
        for group, table in enumerate(state.tables):
            for position, token in enumerate(drafts, first):
                page = table.get(position // self._page_size, NULL_PAGE)
                if page != NULL_PAGE:
                    self._pages.set_token(group, page, position, token)

    def _sit_out(self, record: StepRecord) -> None:
        """Rows that sat out the step compute their last position again."""
        sit_out = None if record.late is None else record.late.sit_out
        if sit_out is None:
            return
        for row, computed, token in zip(
            sit_out.rows.tolist(), sit_out.computed.tolist(), sit_out.tokens.tolist(), strict=True
        ):
            self._need(row in self.rows, f"row {row} sits out and has no owner")
            state = self.rows[row]
            self._need(0 <= computed < (state.length or 0), f"row {row} is at {state.length}, sits out at {computed}")
            state.length, state.next_tokens, state.has_sat_out = computed, [token], True
            del state.tokens[computed:]


def accepted_tokens(record: StepRecord) -> list[list[int]]:
    """The accepted tokens of each sampling row, in the plan's order."""
    tokens = (NO_INTS if record.tokens is None else record.tokens).tolist()
    drawn = [num for num in record.plan.num_drawn.tolist() if num]
    counts = [1] * len(drawn) if record.counts is None else record.counts.tolist()
    ends = np.cumsum([0, *drawn]).tolist()
    return [tokens[start : start + count] for start, count in zip(ends[:-1], counts, strict=True)]


# CheckedPages: the content of the KV cache as a checker of plans knows it, without values.
#
# For each slot of a page: the token and the position that were written last, UNKNOWN if that was before the recording.

Longs = NDArray[np.int64]

UNKNOWN = -1


class CheckedPages:
    def __init__(self, num_pages: Sequence[int], page_size: int) -> None:
        """`num_pages`: of each cache group."""
        self.num_pages = num_pages
        self.page_size = page_size
        self._tokens = [np.full((num, page_size), UNKNOWN, np.int64) for num in num_pages]
        self._positions = [np.full((num, page_size), UNKNOWN, np.int64) for num in num_pages]
        # by group and slot of the second tier: tokens and positions of a page
        self._stored: dict[tuple[int, int], tuple[Longs, Longs]] = {}

    def write(self, group: int, page: int, position: int, token: int) -> None:
        self._positions[group][page, position % self.page_size] = position
        self.set_token(group, page, position, token)

    def set_token(self, group: int, page: int, position: int, token: int) -> None:
        """A position that was written before turns out to have this token."""
        self._tokens[group][page, position % self.page_size] = token

    def read(self, table: Mapping[int, int], group: int, start: int, stop: int) -> tuple[Longs, Longs, Bools]:
        """Tokens and positions in the slots of these positions, and which of the slots have a page. `table`: pages of
        the row by entry."""
        size = self.page_size
        pages = np.array([table.get(entry, NULL_PAGE) for entry in range(start // size, -(-stop // size))], np.int64)
        first = start % size
        taken = slice(first, first + stop - start)
        has_page = np.repeat(pages != NULL_PAGE, size)[taken]
        return self._tokens[group][pages].ravel()[taken], self._positions[group][pages].ravel()[taken], has_page

    def copy(self, group: int, source: int, target: int) -> None:
        self._tokens[group][target] = self._tokens[group][source]
        self._positions[group][target] = self._positions[group][source]

    def store(self, group: int, page: int, slot: int) -> None:
        """Copies a page to a slot of the second tier."""
        self._stored[group, slot] = self._tokens[group][page].copy(), self._positions[group][page].copy()

    def load(self, group: int, slot: int, page: int) -> bool:
        """Copies a slot of the second tier to a page. Returns whether its content is known: it is not if the slot was
        stored before the recording, by an idle engine or by another engine."""
        stored = self._stored.get((group, slot))
        self._tokens[group][page], self._positions[group][page] = stored or (UNKNOWN, UNKNOWN)
        return stored is not None
