"""Padded counts of a step are kept while plans share their rows and numbers of tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slipstream.contracts.step import NO_INTS, StepPlan
from slipstream.device.device import Device
from slipstream.runner.drafted_plan import expand_drafts
from slipstream.runner.features import Size
from slipstream.runner.input_batch import InputBatch
from slipstream.runner.rows import PageTables, RowTable
from slipstream.runner.staging import HostRing


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_steps_of_the_same_rows_upload_the_same_and_others_their_own() -> None:
    device = Device(0, 1)
    tables = PageTables(1, 6, 64, 4, device)
    batch, ring = InputBatch(RowTable(6, device, max_drafts=3), tables), HostRing(1, 4096, device)
    plan = StepPlan(
        step=0, released=NO_INTS, admitted=(), rows=ints(4, 2), num_tokens=ints(1, 3), lengths=ints(9, 12),
        num_drawn=ints(1, 3), num_host_tokens=ints(0, 0), tokens=NO_INTS, new_pages=(), has_drafts=True,
    )  # fmt: skip
    decodes = replace(plan, num_tokens=ints(1, 1), num_drawn=ints(1, 1), has_drafts=False)
    known = replace(decodes, num_host_tokens=ints(0, 1), tokens=ints(7))
    small, large = Size(4, 4, has_drafts=True), Size(8, 8, has_drafts=True)
    longer, moved = replace(plan, step=1, lengths=ints(10, 15)), replace(plan, rows=ints(4, 3))
    steps = [(plan, small), (longer, small), (moved, small)]
    steps += [(plan, small), (plan, large), (decodes, Size(2, 2)), (decodes, Size(2, 2)), (known, Size(2, 2))]
    steps += [(plan, small), (decodes, Size(2, 2)), (plan, large), (moved, small), (longer, small)]  # in turns
    for number, (each, size) in enumerate(steps):
        own = expand_drafts(each) if each.has_drafts else each
        gathered = []
        for fresh in (False, True):
            upload = ring.open()
            kept = InputBatch(batch.rows, tables) if fresh else batch
            work = kept.prepare(own, upload, size)
            upload.send(device.compute)
            device.compute.flush()
            batch.rows.computed.zero_()  # which the step advances
            made = work()
            parts = made.rows, made.offsets, made.view.ids, made.view.positions, made.view.lengths
            gathered.append([part.clone() for part in parts])  # the arena is written again
        assert all(mine.equal(other) for mine, other in zip(*gathered, strict=True)), number
        assert len(made.rows) == size.rows and made.rows.tolist()[:2] == own.rows.tolist()[:2]
        assert (7 in made.view.ids.tolist()) == (each is known)
