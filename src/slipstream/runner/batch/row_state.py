"""RowState: the interface of every feature that keeps state per row on the device."""

from __future__ import annotations

from typing import Protocol

from slipstream.contracts.step import StepPlan
from slipstream.runner.batch.staging import Upload


class RowState(Protocol):
    """State of a row on the device, from admission to release.

    Both methods run on the host and may access host memory only. Changes on the device go through `upload`, and happen
    in the order of the steps.
    """

    def apply(self, plan: StepPlan) -> None:
        """Drop the state of released rows and add that of admitted rows."""

    def flush(self, upload: Upload) -> None:
        """Queue the changes of this step."""
