"""StateStore: the recurrent states of all rows and checkpoints, and what recurrent layers need to know of a step.

Slots 0 to num_rows - 1 are the states of rows (the last one of the padding row), the slots after them are checkpoints.
Slots are never cleared and may hold NaN of earlier requests: a row whose state has seen no token starts from zeros.

The store also has the positions that each row's state has seen, on the device (`RecurrentSteps` describes the scheme):
a row that has sat out a step computes a position again, and the host does not know it yet when it plans the next step.
With drafts a state may be older than its row; the host knows an upper bound of the tokens that a row has to replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from slipstream.base.errors import NotEnoughMemory
from slipstream.config.buffer_size import max_saves
from slipstream.config.config import StateConfig
from slipstream.contracts.cache_spec import CacheGroup, StateSpec
from slipstream.contracts.step import Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.attention import new_fp8_cache, raw_pages
from slipstream.ops.recurrent import (
    DraftSteps,
    RecurrentSteps,
    RowPositions,
    advance_bases_,
    advance_seen_,
    list_chunks,
    max_chunks,
)
from slipstream.runner.drafted_plan import DraftedPlan
from slipstream.runner.features import ForwardPart, Gathered, Size, StepFeature
from slipstream.runner.rows import TokenHistory
from slipstream.runner.staging import StagedTensor, Upload, UploadSpan


class StateStore(StepFeature):
    """`sites[site]` maps the name of a field to [num_slots, *shape], a view of a tensor that all sites of equal spec
    share: [num_slots, num_sites, *shape]. So one copy moves the state of a row over all those sites."""

    def __init__(self, config: StateConfig, num_rows: int, device: Device, max_drafts: int = 0) -> None:
        """`num_rows` includes the padding row; `max_drafts`: of a row in one step."""
        self.num_rows = num_rows
        self.num_slots = num_rows + config.num_checkpoints
        self.max_drafts = max_drafts
        self.tensors = _allocate(config.specs, num_rows, config.num_checkpoints, device)
        self.sites = _views(config.specs, self.tensors)
        # [num_rows] positions that the stored state of each row has seen
        self._seen = StagedTensor((num_rows,), np.int32, device)
        self._period = _store_period(config.specs)
        self._replays = np.zeros(num_rows, np.int32)  # host: upper bound of the tokens that each row has to replay
        # first token of each row in steps of one token per row and draw
        max_draws = num_rows * (1 + max_drafts)
        self._single_starts = torch.arange(max_draws + 1, dtype=torch.int32, device=device.torch_device)
        self._restores: list[list[int]] = []  # (row, checkpoint) of this step

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def checkpoints(self) -> list[torch.Tensor]:
        """Views of all parts of checkpoints, each [checkpoints, bytes]."""
        saved = [tensor for tensor in self.tensors.values() if len(tensor) == self.num_slots]
        return [tensor[self.num_rows :].flatten(1).view(torch.uint8) for tensor in saved]

    def apply(self, plan: StepPlan) -> None:
        self._restores = [] if plan.states is None else plan.states.restores.tolist()
        for admission in plan.all_admitted:
            self._seen.write(admission.row, admission.num_cached)

    def flush(self, upload: Upload) -> None:
        """Queue the copies from checkpoints to rows. Each is one copy per field, without a temporary: a state is large,
        and few requests begin in a step."""
        self._seen.flush(upload)
        for row, checkpoint in self._restores:
            upload.then(functools.partial(self._restore, row, self.num_rows + checkpoint))

    def _restore(self, row: int, slot: int) -> None:
        for tensor in self.tensors.values():
            if len(tensor) == self.num_slots:
                tensor[row].copy_(tensor[slot])

    def join_forward(self, plan: StepPlan, upload: Upload, size: Size | None) -> ForwardPart:
        """Host: upload which states to save."""
        make = self._prepare(plan, upload, size)
        return ForwardPart(add=lambda batch, context: replace(context, recurrent=make(batch), states=self.sites))

    def _prepare(self, plan: StepPlan, upload: Upload, size: Size | None) -> Callable[[Gathered], RecurrentSteps]:
        """Host: upload which states to save. The returned work, on the device, makes what recurrent layers need of the
        step from its gathered inputs."""
        is_single = plan.total_tokens == len(plan.rows) if size is None else size.is_single
        drafts = self._prepare_drafts(plan, upload, size, is_single) if self.max_drafts else None
        span = None
        if not is_single:
            span = upload.put(self._saves(plan, size))
        elif drafts is None and (saves := self._save_slots(plan, size)) is not None:
            span = upload.put(saves)

        def advance(
            batch: Gathered, starts: torch.Tensor, positions: torch.Tensor
        ) -> tuple[DraftSteps | None, RowPositions]:
            if drafts is not None:
                return drafts(batch, starts, positions)
            return None, advance_seen_(self._seen.device, batch.rows, starts, positions, self._period, is_single)

        def make(batch: Gathered) -> RecurrentSteps:
            view = batch.view
            num_rows = len(view.lengths)
            uploaded = None if span is None else upload.tensor(span)
            if is_single:
                starts = self._single_starts[: num_rows + 1]
                of_drafts, rows = advance(batch, starts, view.positions)
                uploaded = uploaded if of_drafts is None else of_drafts.save_slots
                return RecurrentSteps(
                    rows.slots,
                    starts,
                    rows.first_positions,
                    rows.seen_positions,
                    view.num_tokens,
                    True,
                    save_slots=uploaded,
                    drafts=of_drafts,
                )
            assert view.query_starts is not None
            starts = view.query_starts
            of_drafts, rows = advance(batch, starts, view.lengths - starts.diff())
            most = max_chunks(len(view.positions), num_rows)
            chunks, chunk_starts = list_chunks(starts, rows.first_positions, uploaded, most)
            return RecurrentSteps(
                rows.slots,
                starts,
                rows.first_positions,
                rows.seen_positions,
                view.num_tokens,
                False,
                chunks,
                chunk_starts,
                drafts=of_drafts,
            )

        return make

    def _prepare_drafts(
        self, plan: StepPlan, upload: Upload, size: Size | None, is_single: bool
    ) -> Callable[[Gathered, torch.Tensor, torch.Tensor], tuple[DraftSteps, RowPositions]]:
        """Host: upload the saves of rows. The returned work makes the rows' `DraftSteps` and positions, and moves
        their bases."""
        offsets = plan.offsets if isinstance(plan, DraftedPlan) else np.zeros(len(plan.rows), np.int32)
        assert is_single or not offsets.any(), "drafts of recurrent models need steps of one token per row"
        max_replays = self.max_drafts + 1 if size is not None else int(self._replays[plan.rows].max())
        # a row with drafts replays at most as many tokens as it has draws
        self._replays[plan.rows] = 0
        np.maximum.at(self._replays, plan.rows[offsets > 0], offsets[offsets > 0] + 1)
        span = upload.put(self._row_saves(plan, len(plan.rows) if size is None else size.rows))

        def make(batch: Gathered, starts: torch.Tensor, positions: torch.Tensor) -> tuple[DraftSteps, RowPositions]:
            table, saves = self._seen.device, upload.tensor(span)
            made, rows = advance_bases_(table, batch.rows, starts, positions, batch.offsets, saves, is_single)
            return DraftSteps(*made, max_replays, None if size is not None else offsets), rows

        return make

    def _row_saves(self, plan: StepPlan, num_rows: int) -> Ints:
        """[num_rows, 2] the slot that the state of each row is saved to, or -1, and the position: the first of its
        saves, which alone may lie in front of the row's tokens."""
        array = np.full((num_rows, 2), -1, np.int32)
        if plan.states is not None and len(plan.states.saves):
            saves = plan.states.saves[np.argsort(-plan.states.saves[:, 1], kind="stable")]
            array[saves[:, 0], 0] = saves[:, 2] + self.num_rows
            array[saves[:, 0], 1] = saves[:, 1]
        return array

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
        """[S, 3] index of the row, position and slot of each save; -1 if unused. S is at least 1, so that only one
        variant of the kernel is compiled."""
        saves = None if plan.states is None else plan.states.saves
        num_saves = 0 if saves is None else len(saves)
        array = np.full((max(num_saves, 1) if size is None else max_saves(size.tokens, size.rows), 3), -1, np.int32)
        if saves is not None:
            array[:num_saves] = saves
            array[:num_saves, 2] += self.num_rows
        return array


def _store_period(specs: Sequence[StateSpec]) -> int:
    """Steps of one token per row store states at multiples of so many positions."""
    kept = {next((field.shape[-2] for field in spec.fields if field.name == "deferred"), 0) for spec in specs}
    assert len(kept) == 1, f"states that keep {sorted(kept)} updates need tables of their own"
    return kept.pop() + 1


def _allocate(
    specs: Sequence[StateSpec], num_rows: int, num_checkpoints: int, device: Device
) -> dict[tuple[StateSpec, str], torch.Tensor]:
    """The tensors by spec and name of the field: [slots, number of sites of this spec, *shape]."""
    tensors = {}
    try:
        for spec in dict.fromkeys(specs):
            for field in spec.fields:
                num_slots = num_rows + (num_checkpoints if field.is_saved else 0)
                shape = (num_slots, list(specs).count(spec), *field.shape)
                tensors[spec, field.name] = device.cache_zeros(shape, getattr(torch, field.dtype))
    except (RuntimeError, MemoryError):
        need = sum(num_rows * spec.num_bytes + num_checkpoints * spec.checkpoint_bytes for spec in specs)
        raise NotEnoughMemory(
            f"the recurrent states of {num_rows} rows and {num_checkpoints} checkpoints take {need / 2**20:.0f} MiB, "
            "more than the machine gives; lower max_num_seqs or num_checkpoints"
        ) from None
    return tensors


def _views(
    specs: Sequence[StateSpec], tensors: dict[tuple[StateSpec, str], torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """For each state site: field name to [num_slots, *shape]."""
    sites = []
    seen: dict[StateSpec, int] = {}
    for spec in specs:
        index = seen.get(spec, 0)
        sites.append({field.name: tensors[spec, field.name][:, index] for field in spec.fields})
        seen[spec] = index + 1
    return sites


# KVStore: the cache tensors, a pair per site.


@dataclass(frozen=True, slots=True)
class ScratchPages:
    """Pages of a drafter's sites beyond those that the scheduler allocates, for positions that have no page yet."""

    first_site: int  # of the drafter; its sites are the last ones
    num_rows: int  # with the padding row
    pages_per_row: int

    @property
    def num_pages(self) -> int:
        return self.num_rows * self.pages_per_row


class KVStore(StepFeature):
    """`caches[site]` is (keys, values), each [pages, page_size, kv heads, head dim], in the dtype of the site's spec.
    Values of a spec with a `value_dim` are a view of the keys. An FP8 cache has its scales in the same pages, see
    `ops/attention/cache.py`.

    Pages are never cleared and may hold NaN of earlier requests; padding is written to page 0. Attention reads only the
    slots that its rows have filled.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        group_pages: tuple[int, ...],
        device: Device,
        history: TokenHistory | None = None,
        scratch: ScratchPages | None = None,
    ) -> None:
        """`history`: token ids in the same pages, only for drafts; `scratch`: only for a drafter that runs a model."""
        num_sites = sum(len(group.sites) for group in groups)
        self.groups = groups
        self.device = device
        self.history = history
        self.scratch = scratch
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = [None] * num_sites  # type: ignore[list-item]
        group_of_site = [0] * num_sites
        for number, group in enumerate(groups):
            for site in group.sites:
                group_of_site[site] = number
        self.group_of_site = tuple(group_of_site)
        self._copies = np.zeros((0, 3), np.int32)
        self.take_memory(group_pages)

    def take_memory(self, group_pages: tuple[int, ...]) -> None:
        """Allocate this many pages per group in place of the current ones, which no captured graph may use."""
        if self.history is not None:
            self.history.take_memory(group_pages)
        for number, group in enumerate(self.groups):
            spec = group.spec
            for site in group.sites:
                self.caches[site] = None  # type: ignore[call-overload]
                num_pages = group_pages[number]
                if self.scratch is not None and site >= self.scratch.first_site:
                    num_pages += self.scratch.num_pages
                shape = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
                try:
                    keys = self._new_cache(shape, spec.dtype)
                    values = keys[..., : spec.value_dim] if spec.value_dim else self._new_cache(shape, spec.dtype)
                    self.caches[site] = keys, values
                except (RuntimeError, MemoryError):
                    need = sum(g.bytes_per_page * n for g, n in zip(self.groups, group_pages, strict=True))
                    raise NotEnoughMemory(
                        f"the cache takes {need / 2**20:.0f} MiB, more than the machine gives; "
                        "lower max_model_len, max_num_seqs or kv_cache_memory"
                    ) from None

    def _new_cache(self, shape: tuple[int, int, int, int], dtype: str) -> torch.Tensor:
        if dtype == "fp8":
            return new_fp8_cache(*shape, self.device.cache_zeros)
        return self.device.cache_zeros(shape, getattr(torch, dtype))

    def apply(self, plan: StepPlan) -> None:
        self._copies = plan.copies

    def flush(self, upload: Upload) -> None:
        copies = self._copies
        for number in range(len(self.groups)):
            of_group = copies[copies[:, 0] == number] if len(copies) else copies
            if len(of_group):
                source = upload.put(of_group[:, 1].astype(np.int64))
                target = upload.put(of_group[:, 2].astype(np.int64))
                upload.then(functools.partial(self._copy, number, upload, source, target))

    def _copy(self, number: int, upload: Upload, source: UploadSpan, target: UploadSpan) -> None:
        """Device: copy pages of a group, for samples of one prompt that diverge inside a page."""
        from_pages, to_pages, group = upload.tensor(source), upload.tensor(target), self.groups[number]
        if self.history is not None:
            self.history.copy_pages(number, from_pages, to_pages)
        for site in group.sites:
            for cache in self.caches[site][: 1 if group.spec.value_dim else 2]:
                pages = raw_pages(cache)
                pages.index_copy_(0, to_pages, pages.index_select(0, from_pages))
