"""StateStore: the recurrent states of all rows and checkpoints, and what recurrent layers need to know of a step.

Slots 0 to num_rows - 1 are the states of rows (the last one of the padding row), the slots after them are checkpoints.
Slots are never cleared and may hold NaN of earlier requests: a row whose first position is 0 starts from zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from slipstream.cache_spec import StateSpec
from slipstream.config.config import StateConfig
from slipstream.config.memory import max_saves
from slipstream.device.device import Device
from slipstream.errors import NotEnoughMemory
from slipstream.ops.recurrent_steps import RecurrentSteps, list_chunks, max_chunks
from slipstream.runner.batch.input_batch import Gathered, Size
from slipstream.runner.batch.staging import Upload
from slipstream.step import Ints, StepPlan


class StateStore:
    """`sites[site]` maps the name of a field to [num_slots, *shape], a view of a tensor that all sites of equal spec
    share: [num_slots, num_sites, *shape]. So one copy moves the state of a row over all those sites."""

    def __init__(self, config: StateConfig, num_rows: int, device: Device) -> None:
        """`num_rows` includes the padding row."""
        self.num_rows = num_rows
        self.num_slots = num_rows + config.num_checkpoints
        self.tensors = _allocate(config.specs, self.num_slots, device)
        self.sites = _views(config.specs, self.tensors)
        # first token of each row in steps of one token per row
        self._single_starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device.torch_device)
        self._restores: list[list[int]] = []  # (row, checkpoint) of this step

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def apply(self, plan: StepPlan) -> None:
        self._restores = [] if plan.states is None else plan.states.restores.tolist()

    def flush(self, upload: Upload) -> None:
        """Queue the copies from checkpoints to rows. Each is one copy per field, without a temporary: a state is large,
        and few requests begin in a step."""
        for row, checkpoint in self._restores:
            upload.then(functools.partial(self._restore, row, self.num_rows + checkpoint))

    def _restore(self, row: int, slot: int) -> None:
        for tensor in self.tensors.values():
            tensor[row].copy_(tensor[slot])

    def prepare(self, plan: StepPlan, upload: Upload, size: Size | None) -> Callable[[Gathered], RecurrentSteps]:
        """Host: upload which states to save. The returned work, on the device, makes what recurrent layers need of the
        step from its gathered inputs.

        Like `BatchInputs.prepare`: in a padded step, the arrays' sizes depend on `size` only, and this must be the
        second to write to the upload.
        """
        is_single = plan.total_tokens == len(plan.rows) if size is None else size.is_single
        saves = self._save_slots(plan, size) if is_single else self._saves(plan, size)
        span = None if saves is None else upload.put(saves)

        def make(batch: Gathered) -> RecurrentSteps:
            view = batch.view
            slots, num_rows = batch.rows.to(torch.int32), len(view.lengths)
            uploaded = None if span is None else upload.tensor(span)
            if is_single:
                starts, first = self._single_starts[: num_rows + 1], view.positions.to(torch.int32)
                return RecurrentSteps(slots, starts, first, view.num_tokens, True, save_slots=uploaded)
            assert view.query_starts is not None
            starts = view.query_starts
            first = view.lengths.to(torch.int32) - starts.diff()
            chunks, chunk_starts = list_chunks(starts, first, uploaded, max_chunks(len(view.positions), num_rows))
            return RecurrentSteps(slots, starts, first, view.num_tokens, False, chunks, chunk_starts)

        return make

    def _save_slots(self, plan: StepPlan, size: Size | None) -> Ints | None:
        """[B] the slot that the state of each row is saved to, or -1; None: no state is saved."""
        saves = None if plan.states is None else plan.states.saves
        if size is None and (saves is None or not len(saves)):
            return None
        slots = np.full(len(plan.rows) if size is None else size.rows, -1, np.int32)
        if saves is not None:
            slots[saves[:, 0]] = saves[:, 2] + self.num_rows
        return slots

    def _saves(self, plan: StepPlan, size: Size | None) -> Ints:
        """[S, 3] index of the row, position and slot of each save; -1 in unused lines. There is always a line, so that
        only one variant of the kernel is compiled."""
        saves = None if plan.states is None else plan.states.saves
        num_saves = 0 if saves is None else len(saves)
        array = np.full((max(num_saves, 1) if size is None else max_saves(size.tokens, size.rows), 3), -1, np.int32)
        if saves is not None:
            array[:num_saves] = saves
            array[:num_saves, 2] += self.num_rows
        return array


def _allocate(specs: Sequence[StateSpec], num_slots: int, device: Device) -> dict[tuple[StateSpec, str], torch.Tensor]:
    """By spec and name of the field: [num_slots, number of sites of this spec, *shape]."""
    tensors = {}
    try:
        for spec in dict.fromkeys(specs):
            for field in spec.fields:
                shape = (num_slots, list(specs).count(spec), *field.shape)
                tensors[spec, field.name] = device.zeros(shape, getattr(torch, field.dtype))
    except (RuntimeError, MemoryError):
        need = num_slots * sum(spec.num_bytes for spec in specs)
        raise NotEnoughMemory(
            f"the recurrent states of {num_slots} rows and checkpoints take {need / 2**20:.0f} MiB, more than the "
            "machine gives; lower max_num_seqs or num_checkpoints"
        ) from None
    return tensors


def _views(
    specs: Sequence[StateSpec], tensors: dict[tuple[StateSpec, str], torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """By state site: field name to [num_slots, *shape]."""
    sites = []
    seen: dict[StateSpec, int] = {}
    for spec in specs:
        index = seen.get(spec, 0)
        sites.append({field.name: tensors[spec, field.name][:, index] for field in spec.fields})
        seen[spec] = index + 1
    return sites
