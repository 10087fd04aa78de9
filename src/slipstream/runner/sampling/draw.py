"""Draw: samples one token per row. The noise depends only on (seed, sample index, position), never on the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from slipstream.contracts.step import Ints, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sampling import (
    Choice,
    DrawTables,
    argmax_rows,
    draw_by_row,
    drop_below_,
    find_floor,
    mask_bits_,
    penalize_,
    row_key,
)
from slipstream.params.sampling import SamplingParams
from slipstream.runner.sampling.stage import DrawBatch, Stage, StageWork
from slipstream.runner.staging import StagedTensor, Upload

DrawWork = Callable[[torch.Tensor, DrawBatch], Choice]
"""Device: logits [S, V] to tokens [S]."""


class Draw(Stage):
    """Temperature and noise. Greedy rows take the likeliest token, the first of equal ones; the others divide by the
    temperature and add Gumbel noise made from their key.

    A row in which no token is left (-inf everywhere) draws token 0 and is marked as failed.
    """

    def __init__(self, num_rows: int, device: Device, dtype: np.dtype[Any]) -> None:
        self.random = np.zeros(num_rows, np.bool_)
        self.temperature = np.ones(num_rows)  # 1 for greedy rows
        self._users: set[int] = set()  # rows that sample
        self.keys = StagedTensor((num_rows,), np.int64, device)
        # the device's copies of `random` and `temperature`
        self.is_random = StagedTensor((num_rows,), np.bool_, device)
        self.temperatures = StagedTensor((num_rows,), dtype, device, fill=1)

    def apply(self, plan: StepPlan) -> None:
        self._users.difference_update(plan.released.tolist())
        for admission in plan.admitted:
            row, params = admission.row, admission.params
            random = not params.is_greedy
            temperature = params.temperature if random else 1.0
            if random != self.random[row]:
                self.random[row] = random
                self.is_random.write(row, random)
            if temperature != self.temperature[row]:
                self.temperature[row] = temperature
                self.temperatures.write(row, temperature)
            if random:
                self._users.add(row)
                self.keys.write(row, row_key(admission.seed, admission.sample))

    def flush(self, upload: Upload) -> None:
        self.keys.flush(upload)
        self.is_random.flush(upload)
        self.temperatures.flush(upload)

    def is_used_by(self, rows: Ints) -> bool:
        return bool(self._users) and bool(self.random[rows].any())

    def is_scaled(self, rows: Ints) -> bool:
        """Host: whether a temperature of these rows is not 1."""
        return bool(self._users) and bool((self.temperature[rows] != 1.0).any())

    def work(self, rows: Ints) -> StageWork:
        return StageWork("random", users=self.random[rows], temperatures=self.temperatures.device)

    def choose(self, parts: Sequence[StageWork], *, is_random: bool) -> DrawWork:
        """Host: the work that draws tokens. It applies what is left of the parts as it reads the logits. `is_random`:
        whether a row is not greedy."""
        mask_of = next((part.mask for part in parts if part.mask is not None), None)
        penalty_of = next((part.penalty for part in parts if part.penalty is not None), None)
        if not is_random and penalty_of is None and mask_of is None:
            return _likeliest
        temperatures = next((part.temperatures for part in parts if part.temperatures is not None), None)
        limits = next((part.limits for part in parts if part.limits is not None), None)
        tables = DrawTables(self.keys.device, self.is_random.device, temperatures, limits)

        def drawn(logits: torch.Tensor, batch: DrawBatch) -> Choice:
            penalty = None if penalty_of is None else penalty_of(batch)
            mask = None if mask_of is None else mask_of(batch)
            if not is_random:
                return argmax_rows(logits, penalty, mask, batch.hints)
            return draw_by_row(logits, batch.rows, batch.positions, tables, penalty, mask, batch.hints)

        return drawn


def _likeliest(logits: torch.Tensor, batch: DrawBatch) -> Choice:
    return argmax_rows(logits)


def apply_to_logits(part: StageWork) -> StageWork:
    """The same, but what the draw would apply as it reads the logits is an edit."""
    if part.mask is None and part.penalty is None and part.temperatures is None and part.limits is None:
        return part

    def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
        if part.mask is not None:
            own = part.mask(batch)
            mask_bits_(logits, own.bits, own.entries.index_select(0, own.index))
        if part.penalty is not None:
            penalize_(logits, *part.penalty(batch))
        if part.temperatures is not None:
            logits.div_(part.temperatures.index_select(0, batch.rows)[:, None])
        if part.limits is not None:
            order = None if batch.hints is None else batch.hints.order
            drop_below_(logits, find_floor(logits, part.limits.index_select(0, batch.rows), order))

    return StageWork(part.key, edit, part.drawn, needs_sampling_dtype=part.mask is None)


# Truncate: min-p and top-a, then top-k, then top-p, as one floor for each row's logits.

_NO_TOP_P = 2.0  # a sum of probabilities that rounding never reaches


def limits_of(params: SamplingParams, vocab_size: int) -> tuple[float, ...]:
    """The limits of a row that samples, as `find_floor` takes them: log of min_p, top_k, top_p, log of top_a."""
    return (
        math.log(params.min_p) if params.min_p > 0 else -math.inf,
        params.top_k if 0 < params.top_k < vocab_size else vocab_size,
        params.top_p if params.top_p < 1 else _NO_TOP_P,
        math.log(params.top_a) if params.top_a > 0 else -math.inf,
    )


# what finding a row's floor needs
_NONE, _BEST, _TOP_K, _ALL = range(4)


class Truncate(Stage):
    """All keep the likeliest tokens, so together they keep all tokens from some logit up, ties included.

    Rows are grouped by what finding the floor needs: the largest logit (min-p only), the k largest (top-k, and top-p
    among them), or all logits sorted (top-a; top-p without top-k). Greedy rows and rows without truncation are in no
    group. A row's floor does not depend on the other rows of its group.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: Device, dtype: np.dtype[Any]) -> None:
        self.vocab_size = vocab_size
        self.group = np.full(num_rows, _NONE, np.int8)
        self._users: set[int] = set()  # rows that are in a group
        self.top_k = np.zeros(num_rows, np.int64)  # the vocabulary size without top-k
        self._keep_all = limits_of(SamplingParams(), vocab_size)
        self.limits = StagedTensor((num_rows, len(self._keep_all)), dtype, device)
        for column, value in zip(self.limits.device.unbind(1), self._keep_all, strict=True):
            column.fill_(value)

    def apply(self, plan: StepPlan) -> None:
        self._users.difference_update(plan.released.tolist())
        for admission in plan.admitted:
            row, params = admission.row, admission.params
            limits = self._keep_all if params.is_greedy else limits_of(params, self.vocab_size)
            before, group = self.group[row], self._group_of(limits)
            self.group[row] = group
            if group != _NONE:
                self._users.add(row)
                self.top_k[row] = limits[1] if group == _TOP_K else self.vocab_size
            if group != _NONE or before != _NONE:
                self.limits.write(row, limits)

    def _group_of(self, limits: tuple[float, ...]) -> int:
        if limits == self._keep_all:
            return _NONE
        if limits[1] < self.vocab_size and limits[3] == self._keep_all[3]:
            return _TOP_K
        return _BEST if limits[1:] == self._keep_all[1:] else _ALL

    def flush(self, upload: Upload) -> None:
        self.limits.flush(upload)

    def is_used_by(self, rows: Ints) -> bool:
        return bool(self._users) and bool(self.group[rows].any())

    def work(self, rows: Ints) -> StageWork:
        """Logits are not edited: the draw applies the limits as it reads them."""
        return StageWork("truncate", limits=self.limits.device)

    def order(self, rows: Ints) -> list[tuple[np.ndarray[Any, np.dtype[np.int64]], int]]:
        """Host: how much of which rows an implementation with a sort has to sort."""
        group, found = self.group[rows], []
        for which in (_BEST, _TOP_K, _ALL):
            index = np.flatnonzero(group == which)
            if len(index):
                found.append((index, 0 if which == _BEST else int(self.top_k[rows[index]].max())))
        return found
