"""ScriptedStates: checkpoints of a scripted recurrent model. The state of a row is all tokens that it has computed."""

from __future__ import annotations

from collections.abc import Mapping

from scripted_row import ScriptedRow
from slipstream.contracts.step import StepPlan


class ScriptedStates:
    def __init__(self, num_checkpoints: int, border: int) -> None:
        """Checkpoints are taken at multiples of `border`."""
        self.border = border
        self.checkpoints: list[tuple[int, ...] | None] = [None] * num_checkpoints
        self.num_restored = self.num_saved = 0

    def restore(self, plan: StepPlan, rows: Mapping[int, ScriptedRow]) -> None:
        """Before the forward: rows that start from a checkpoint get its state."""
        for row, checkpoint in [] if plan.states is None else plan.states.restores.tolist():
            state, content = rows[row], self.checkpoints[checkpoint]
            assert state.state is None and state.length == state.admission.num_cached, f"row {row} has a state"
            assert content is not None, f"checkpoint {checkpoint} was never saved"
            assert len(content) == state.length, f"row {row} starts at {state.length}, with a state of {len(content)}"
            state.state = content
            self.num_restored += 1

    def save(self, plan: StepPlan, rows: Mapping[int, ScriptedRow], *, has_drafter: bool) -> None:
        """With the forward: states of rows after positions that this step computes."""
        saves = [] if plan.states is None else plan.states.saves.tolist()
        assert len({checkpoint for _, _, checkpoint in saves}) == len(saves), "a checkpoint is saved to twice"
        for index, position, checkpoint in saves:
            state = rows[int(plan.rows[index])]
            assert position % self.border == 0, f"{position} is no border"
            is_passed = state.base_before < position <= state.base
            is_behind = not is_passed and state.sat_at >= 0  # its plan counts a draw of a step that it sat out
            assert is_passed or is_behind or has_drafter, f"{position} is not computed in this step"
            assert state.state is not None
            if is_passed:
                self.checkpoints[checkpoint] = state.state[:position]
                self.num_saved += 1
            elif is_behind and not has_drafter:
                self.checkpoints[checkpoint] = None
