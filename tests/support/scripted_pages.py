"""ScriptedPages: the content of every page of the scripted device, on the device and in the second tier.

A slot holds the (token, position, kind of rope) written to it, so that a row that reads a wrong page is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scripted_row import ScriptedRow
from slipstream.contracts.step import NULL_PAGE, StepPlan, TierPlan

Content = tuple[int, int, bool]  # token, position, whether its key has the long rope factors
Slot = tuple[int, int]  # page, offset


class ScriptedPages:
    def __init__(self, page_size: int, windows: Sequence[int]) -> None:
        """`windows`: per group, the positions that a token attends to, itself included; 0: all."""
        self.page_size = page_size
        self.windows = windows
        self.slots: list[dict[Slot, Content]] = [{} for _ in windows]
        # by group and slot of the second tier: what the slots of a page held, by offset
        self.stored: dict[tuple[int, int], dict[int, Content]] = {}
        self.num_loaded = 0  # pages
        self.num_given_back = 0  # pages, by running requests
        self._written: set[tuple[int, Slot]] = set()  # by this step
        self._drawn: set[tuple[int, Slot]] = set()  # of tokens that the last step drew

    def update(self, plan: StepPlan, rows: Mapping[int, ScriptedRow]) -> None:
        """Page tables, copies to and from the second tier, and page copies, in this order."""
        assert len(plan.new_pages) == len(self.windows)
        for group, updates in enumerate(plan.new_pages):
            for row, place, page in zip(updates.rows, updates.entries, updates.pages, strict=True):
                state = rows[int(row)]
                table = state.tables[group]
                if page == NULL_PAGE:
                    window = self.windows[group]
                    assert window and (place + 1) * self.page_size <= state.length - window + 1, "a needed page is gone"
                    assert int(place) <= len(table)
                    self.num_given_back += int(place) < len(table)
                else:
                    assert int(place) == len(table), "a page was put where one is, or left a gap"
                table[int(place)] = int(page)
        if plan.tier is not None:
            self._copy_tier(plan.tier)
        for group, source, target in plan.copies.tolist():
            for offset in range(self.page_size):
                content = self.slots[group].get((source, offset))
                if content is not None:
                    self.slots[group][target, offset] = content

    def _copy_tier(self, tier: TierPlan) -> None:
        used = tier.stores[:, ::2].tolist() + tier.loads[:, :2].tolist()
        stored = {tuple(each) for each in tier.stores[:, ::2].tolist()}
        assert len(stored) == len(tier.stores), "two pages are stored to one slot"
        assert all(tuple(each) not in stored for each in used[len(tier.stores) :]), "a slot is loaded and stored"
        targets = {tuple(each) for each in tier.loads[:, ::2].tolist()}
        assert len(targets) == len(tier.loads), "a page is loaded twice"
        for group, page, slot in tier.stores.tolist():
            content = {offset: self.slots[group].get((page, offset)) for offset in range(self.page_size)}
            assert None not in content.values(), f"page {page} is stored and not full"
            self.stored[group, slot] = content
        for group, slot, page in tier.loads.tolist():
            assert (group, slot) in self.stored, f"slot {slot} is loaded and was never stored"
            self.num_loaded += 1
            for offset, one in self.stored[group, slot].items():
                self.slots[group][page, offset] = one

    def begin_writes(self) -> None:
        self._written = set()
        self._drawn = set()

    def write(self, state: ScriptedRow, position: int, token: int, *, is_drawn: bool) -> None:
        """Write a token of a row in every group. `is_drawn`: the device drew it, so the host does not know it."""
        place, offset = divmod(position, self.page_size)
        for group, table in enumerate(state.tables):
            slot = table[place], offset
            assert table[place] != NULL_PAGE
            assert (group, slot) not in self._written, f"two rows write slot {slot}"
            self._written.add((group, slot))
            content = token, position, state.admission.long_rope
            if is_drawn and (position != state.sat_at or self.slots[group][slot] != content):
                self._drawn.add((group, slot))
            self.slots[group][slot] = content

    def read(self, state: ScriptedRow) -> dict[int, int]:
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
