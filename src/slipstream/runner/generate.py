"""GenerateHead: hidden states to logits, through the sampler, to tokens; then the rows learn what they drew."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from slipstream.nn.models.base import CausalLM
from slipstream.runner.batch.input_batch import Gathered
from slipstream.runner.batch.rows import RowTable
from slipstream.runner.batch.staging import Upload
from slipstream.runner.output import ResultRing, ResultShape, StepHandle
from slipstream.runner.sampling.sampler import Sampler
from slipstream.runner.sampling.stage import SampleBatch
from slipstream.step import StepPlan

Finish = Callable[[Gathered, torch.Tensor], None]


class GenerateHead:
    def __init__(
        self, model: CausalLM, rows: RowTable, sampler: Sampler, results: ResultRing, logit_dtype: torch.dtype
    ) -> None:
        self.model = model
        self.rows = rows
        self.sampler = sampler
        self.results = results
        self.logit_dtype = logit_dtype
        self._numpy_dtype = np.float64 if logit_dtype is torch.float64 else np.float32

    def prepare(self, plan: StepPlan, upload: Upload) -> Head | None:
        """Host: stage what the draw needs; None when no row draws in this step."""
        num_samples = int(np.count_nonzero(plan.samples))
        if not num_samples:
            return None
        picked = None
        if num_samples < plan.total_tokens:
            which = np.flatnonzero(plan.samples)
            last = np.cumsum(plan.num_tokens) - 1
            picked = upload.put(np.stack([last[which], which, plan.rows[which]]).astype(np.int64))
        sample = self.sampler.prepare(plan, upload)
        shape = ResultShape(num_samples, plan.num_logprobs, self._numpy_dtype)
        slot = self.results.open(shape)

        def run(batch: Gathered, hidden: torch.Tensor) -> None:
            rows, positions = batch.rows, batch.view.lengths
            if picked is not None:
                last_tokens, places, rows = upload.tensor(picked).unbind(0)
                hidden = hidden.index_select(0, last_tokens)
                positions = positions.index_select(0, places)
            logits = self.model.logits(hidden).to(self.logit_dtype)
            drawn = sample(logits, SampleBatch(rows, positions))
            self.rows.draw(rows, drawn.tokens)
            results = {"tokens": drawn.tokens, "failed": drawn.failed}
            if drawn.logprobs is not None:
                top = drawn.logprobs
                results |= {"chosen": top.chosen, "rank": top.rank, "top_ids": top.top_ids, "top": top.top}
            slot.write(results)

        return Head(run, slot.leave)


class Head:
    """One step's head: its closure for the device, and how its results leave."""

    def __init__(self, run: Finish, leave: Callable[[], StepHandle]) -> None:
        self.run = run
        self.leave = leave
