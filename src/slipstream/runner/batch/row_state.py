"""RowState: the only way a feature joins the runner."""

from __future__ import annotations

from typing import Protocol

from slipstream.runner.batch.staging import Upload
from slipstream.step import StepPlan


class RowState(Protocol):
    """State kept per row on the device, for as long as a request holds the row.

    Both methods run on the host and may touch only host memory: what they change on the device goes through
    `upload`, and happens in the order of the steps.
    """

    def apply(self, plan: StepPlan) -> None:
        """Forget released rows, learn admitted ones."""

    def flush(self, upload: Upload) -> None:
        """Queue this step's changes."""
