"""ScriptedRow: what the scripted device keeps of a row."""

from __future__ import annotations

from slipstream.contracts.step import Admission, PoolAdmission


class ScriptedRow:
    def __init__(self, admission: Admission | PoolAdmission, num_groups: int) -> None:
        self.admission = admission
        self.pools = isinstance(admission, PoolAdmission)
        self.has_grammar = not self.pools and admission.params.structured_outputs is not None
        self.num_known = admission.num_prompt_tokens if self.pools else admission.num_known
        self.tables: list[dict[int, int]] = [{} for _ in range(num_groups)]  # by group: pages by entry
        self.length = self.start = admission.num_cached  # after and before the present step
        self.next_tokens: list[int] = []  # the token drawn last, then guesses of those behind it
        self.state: tuple[int, ...] | None = None if admission.num_cached else ()  # None: to be restored
        # tokens that the stored state has seen, after and before the present step: with drafts it may be older than
        # the row, whose accepted tokens the next step replays
        self.base = self.base_before = admission.num_cached
        self.sat_at = -1  # the last position that the row computed in a step that it sat out
        self.planned = 0  # the length after the present step, by the plan: an upper bound while drafts are in flight
