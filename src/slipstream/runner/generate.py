"""GenerateHead: hidden states to logits, through the sampler, to tokens; then the rows learn what they drew."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from slipstream.nn.models.base import CausalLM
from slipstream.ops.sample import TopLogprobs, likeliest
from slipstream.runner.batch.input_batch import Gathered, Size
from slipstream.runner.batch.rows import RowTable
from slipstream.runner.batch.staging import Upload
from slipstream.runner.graphs import GraphPool
from slipstream.runner.output import PROMPT, ResultRing, StepHandle, result_shape
from slipstream.runner.sampling.logprobs import prepare_scores
from slipstream.runner.sampling.sampler import Sampler
from slipstream.runner.sampling.stage import SampleBatch
from slipstream.step import StepPlan

Finish = Callable[[Gathered, torch.Tensor], None]


class GenerateHead:
    def __init__(
        self,
        model: CausalLM,
        rows: RowTable,
        sampler: Sampler,
        results: ResultRing,
        logit_dtype: torch.dtype,
        graphs: GraphPool,
    ) -> None:
        self.model = model
        self.rows = rows
        self.sampler = sampler
        self.results = results
        self.graphs = graphs
        self.logit_dtype = logit_dtype
        self._numpy_dtype = np.float64 if logit_dtype is torch.float64 else np.float32

    def prepare(self, plan: StepPlan, upload: Upload, size: Size | None = None) -> Head | None:
        """Host: stage what the draw needs; None when no row draws in this step and no prompt is scored.

        `size` says what the body is padded to, if it is.
        """
        num_samples, scores = len(plan.rows), plan.scores
        picked = None
        if plan.tokens.size:  # else all rows decode, and all sample
            which = np.flatnonzero(plan.samples)
            num_samples = len(which)
            if not num_samples and scores is None:
                return None
            if num_samples < plan.total_tokens:
                last = np.cumsum(plan.num_tokens) - 1
                picked = upload.put(np.stack([last[which], which, plan.rows[which]]).astype(np.int64))
        sample = self.sampler.prepare(plan, upload) if num_samples else None
        score = None if scores is None else prepare_scores(scores, self._logits, upload)
        shape = result_shape(
            num_samples,
            plan.num_logprobs if num_samples else None,
            self._numpy_dtype,
            None if sample is None or sample.given is None else sample.given.shape,
            None if scores is None else (len(scores.places), scores.num_logprobs),
        )
        slot = self.results.open(shape)
        num_rows = len(plan.rows)
        is_padded = size is not None and size.is_single and picked is None  # all rows sample
        can_replay = is_padded and score is None and sample is not None and sample.is_plain

        def run(batch: Gathered, hidden: torch.Tensor) -> None:
            if can_replay:
                tokens, failed = self.graphs.run(("greedy", size), lambda: self._draw_greedy(batch, hidden))
                slot.write({"tokens": tokens[:num_rows], "failed": failed[:num_rows]})
                return
            results = _named(PROMPT, score(hidden)) if score is not None else {}
            if sample is not None:
                rows, positions = batch.rows, batch.view.lengths
                if is_padded:
                    hidden, rows, positions = hidden[:num_rows], rows[:num_rows], positions[:num_rows]
                if picked is not None:
                    last_tokens, places, rows = upload.tensor(picked).unbind(0)
                    hidden = hidden.index_select(0, last_tokens)
                    positions = positions.index_select(0, places)
                drawn = sample(self._logits(hidden), SampleBatch(rows, positions))
                self.rows.draw(rows, drawn.tokens)
                results["tokens"], results["failed"] = drawn.tokens, drawn.failed
                if drawn.logprobs is not None:
                    results |= _named("", drawn.logprobs)
                if drawn.given is not None:
                    results["given"] = drawn.given
            slot.write(results)

        return Head(run, slot.leave)

    def _draw_greedy(self, batch: Gathered, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Device: the likeliest token of every row, padding and all. The same from step to step, so it is captured."""
        choice = likeliest(self.model.logits(hidden))
        self.rows.draw(batch.rows, choice.tokens)
        return choice.tokens, choice.failed

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Device: in the dtype that is sampled from."""
        return self.model.logits(hidden).to(self.logit_dtype)


def _named(prefix: str, of: TopLogprobs) -> dict[str, torch.Tensor]:
    """As the result slot names them."""
    return {f"{prefix}{name}": value for name, value in of._asdict().items()}


class Head:
    """One step's head: its closure for the device, and how its results leave."""

    def __init__(self, run: Finish, leave: Callable[[], StepHandle]) -> None:
        self.run = run
        self.leave = leave
