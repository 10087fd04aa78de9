"""GenerateHead: computes logits from hidden states, draws tokens, and stores them in the row table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slipstream.nn.models.base import CausalLM
from slipstream.ops.sample import TopLogprobs
from slipstream.runner.batch.input_batch import Gathered, Size
from slipstream.runner.batch.rows import RowTable
from slipstream.runner.batch.staging import Upload
from slipstream.runner.graphs import GraphPool
from slipstream.runner.head import Head
from slipstream.runner.results import PROMPT, WIDE, ResultRing, ResultShape, pack, result_shape
from slipstream.runner.sampling.logprobs import prepare_scores
from slipstream.runner.sampling.sampler import Replayed, Sampler
from slipstream.runner.sampling.stage import SampleBatch
from slipstream.step import StepPlan


class GenerateHead:
    def __init__(
        self,
        model: CausalLM,
        rows: RowTable,
        sampler: Sampler,
        results: ResultRing,
        logit_dtype: torch.dtype,
        graphs: GraphPool,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """`batch_invariant`: a row's results have the same bits whatever the rest of the batch is."""
        self.model = model
        self.rows = rows
        self.sampler = sampler
        self.results = results
        self.graphs = graphs
        self.logit_dtype = logit_dtype
        self._batch_invariant = batch_invariant
        self._picked = _Picked(graphs.max_rows)
        self._numpy_dtype = np.float64 if logit_dtype is torch.float64 else np.float32

    def wants_all(self, plan: StepPlan) -> bool:
        return plan.scores is not None

    def prepare(
        self, plan: StepPlan, upload: Upload, size: Size | None = None, *, only_last: bool = False
    ) -> Head | None:
        """Host: upload what sampling needs; None if no row draws in this step and no prompt is scored.

        `size`: what the forward is padded to; None: it is not padded.
        """
        num_samples, scores = len(plan.rows), plan.scores
        picked = pick = None
        if plan.tokens.size:  # otherwise all rows decode and draw
            which = np.flatnonzero(plan.num_drawn)
            num_samples = len(which)
            if not num_samples and scores is None:
                return None
            if num_samples < plan.total_tokens:
                indices = which if only_last else np.cumsum(plan.num_tokens)[which] - 1
                pick = np.stack([indices, which, plan.rows[which]]).astype(np.int64)
        if scores is None and (pick is not None or (size is not None and size.is_single)):
            replayed = self._prepare_replayed(plan, num_samples, pick, upload)
            if replayed is not None:
                return replayed
        if pick is not None:
            picked = upload.put(pick)
        sample = self.sampler.prepare(plan, upload) if num_samples else None
        score = None if scores is None else prepare_scores(scores, self._logits, upload)
        shape = result_shape(
            num_samples,
            plan.num_logprobs if num_samples else None,
            self._numpy_dtype,
            None if sample is None or sample.requested is None else sample.requested.shape,
            None if scores is None else (len(scores.indices), scores.num_logprobs),
            None if sample is None or sample.wide is None else sample.wide.shape,
        )
        out = self.results.open(shape)
        num_rows = len(plan.rows)
        is_padded = size is not None and size.is_single and picked is None  # every row draws

        def run(batch: Gathered, hidden: torch.Tensor) -> None:
            results = _named(PROMPT, score(hidden)) if score is not None else {}
            if sample is not None:
                rows, positions = batch.rows, batch.view.lengths
                if is_padded:
                    hidden, rows, positions = hidden[:num_rows], rows[:num_rows], positions[:num_rows]
                if picked is not None:
                    own, indices, rows = upload.tensor(picked).unbind(0)
                    hidden = hidden.index_select(0, own)
                    positions = positions.index_select(0, indices)
                drawn = sample(self._logits(hidden), SampleBatch(rows, positions))
                self.rows.draw(rows, drawn.tokens)
                results["tokens"], results["failed"] = drawn.tokens, drawn.failed
                if drawn.logprobs is not None:
                    results |= _named("", drawn.logprobs)
                if drawn.requested is not None:
                    results["requested"] = drawn.requested
                if drawn.wide is not None:
                    results |= _named(WIDE, drawn.wide)
            out.write(results)

        return Head(run, out.handle)

    def _prepare_replayed(
        self, plan: StepPlan, num_samples: int, pick: np.ndarray[Any, Any] | None, upload: Upload
    ) -> Head | None:
        """Host: the head as a captured graph; None if a feature of this step cannot be captured.

        `pick`: the indices of the hidden states to sample from, the indices of their rows in the step, and the rows.
        They are first copied to fixed addresses. None: all hidden states are sampled from, where the forward's graph
        left them.
        """
        num_rows = self.graphs.rows_for(num_samples)
        if num_rows is None or (replayed := self.sampler.prepare_by_row(plan)) is None:
            return None
        shape = result_shape(num_rows, replayed.num_logprobs, self._numpy_dtype)
        out = self.results.open(shape, num_samples)
        span = None
        if pick is not None:
            padded = np.zeros((3, num_rows), np.int64)
            padded[2, num_samples:] = len(self.rows.computed) - 1  # the padding row
            padded[:, :num_samples] = pick
            span = upload.put(padded)
        key = ("head", num_rows, span is not None, replayed.key)

        def run(batch: Gathered, hidden: torch.Tensor) -> None:
            rows = SampleBatch(batch.rows, batch.view.lengths)
            if span is not None:
                hidden, rows = self._picked.bring(hidden, rows, upload.tensor(span))
            out.write_packed(self.graphs.run(key, lambda: self._draw(hidden, rows, replayed, shape)))

        return Head(run, out.handle)

    def _draw(self, hidden: torch.Tensor, rows: SampleBatch, replayed: Replayed, shape: ResultShape) -> torch.Tensor:
        """Device: draw a token for every row, padding included, and pack the results."""
        # Kernels convert what they read, so only logits that a stage computes with must have the sampling dtype.
        # Batch-invariant logits always have it: the order of sums depends on the dtype, and must not depend on the
        # parameters of other rows.
        wide = replayed.needs_sampling_dtype or self._batch_invariant
        logits = self._logits(hidden) if wide else self.model.logits(hidden)
        drawn = replayed.sample(logits, rows)
        self.rows.draw(rows.rows, drawn.tokens)
        results = {"tokens": drawn.tokens, "failed": drawn.failed}
        if drawn.logprobs is not None:
            results |= _named("", drawn.logprobs)
        return pack(results, shape, self.graphs.results.room(shape.num_bytes))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Device: logits in the dtype that sampling uses."""
        return self.model.logits(hidden).to(self.logit_dtype)


class _Picked:
    """Fixed addresses for the hidden states to sample from, their rows and positions."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def bring(self, hidden: torch.Tensor, rows: SampleBatch, pick: torch.Tensor) -> tuple[torch.Tensor, SampleBatch]:
        """Device: `pick` [3, n]: indices of hidden states, indices of their rows in the step, the rows."""
        if self._buffers is None:
            ids = torch.zeros(2, self._num_rows, dtype=torch.int64, device=hidden.device)
            self._buffers = hidden.new_zeros(self._num_rows, hidden.shape[1]), ids[0], ids[1]
        tokens, indices, own_rows = pick.unbind(0)
        own_hidden, own, positions = (buffer[: len(tokens)] for buffer in self._buffers)
        torch.index_select(hidden, 0, tokens, out=own_hidden)
        torch.index_select(rows.positions, 0, indices, out=positions)
        own.copy_(own_rows)
        return own_hidden, SampleBatch(own, positions)


def _named(prefix: str, of: TopLogprobs) -> dict[str, torch.Tensor]:
    """By their names in the result buffer."""
    return {f"{prefix}{name}": value for name, value in of._asdict().items()}
