"""Positions of draws, for drafters that run a model."""

from types import SimpleNamespace

import torch

from slipstream.runner.drafter import DraftBatch
from slipstream.runner.model_drafter import drawn_rows


def test_a_dry_run_has_positions_of_zero_and_reads_inside_the_tables() -> None:
    """A dry run (ops/platform/compile_ahead.py) replaces the kernel that gathers lengths, and its output is zero."""
    rows, zeros = torch.tensor([0, 1, 3]), torch.zeros(3, dtype=torch.int64)
    table = SimpleNamespace(computed=torch.zeros(4, dtype=torch.int64))
    cache = SimpleNamespace(computed_rows=lambda rows, positions, max_length: positions)
    batch = DraftBatch(rows, None, zeros, zeros, torch.zeros(3, 8), 16, 3)
    assert drawn_rows(batch, table, cache, 16).tolist() == [0, 0, 0]  # type: ignore[arg-type,comparison-overlap]
    batch = DraftBatch(rows, None, torch.tensor([5, 1, 99]), zeros, torch.zeros(3, 8), 16, 3)
    assert drawn_rows(batch, table, cache, 16).tolist() == [4, 0, 0]  # type: ignore[arg-type,comparison-overlap]
