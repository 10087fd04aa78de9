"""Sampler: the ordered stages, then one draw. The host never looks at a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.device.device import Device
from slipstream.ops.sample import TopLogprobs
from slipstream.runner.batch.staging import Upload
from slipstream.runner.sampling.draw import Draw
from slipstream.runner.sampling.logprobs import Logprobs
from slipstream.runner.sampling.min_tokens import MinTokens
from slipstream.runner.sampling.penalties import Penalties
from slipstream.runner.sampling.scale import Scale
from slipstream.runner.sampling.stage import SampleBatch, Stage
from slipstream.runner.sampling.truncate import Truncate
from slipstream.step import StepPlan

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What a step drew, on the device."""

    tokens: torch.Tensor  # [S] int64
    failed: torch.Tensor  # [S] bool: the row's logits held NaN; its token is 0
    logprobs: TopLogprobs | None  # of the raw logits


Sample = Callable[[torch.Tensor, SampleBatch], SampleOutput]
"""Device: logits [S, vocabulary] to tokens. The logits may be changed."""


class Sampler:
    """A RowState made of RowStates. A stage that no sampling row of a step uses does nothing in it."""

    def __init__(self, num_rows: int, vocab_size: int, device: Device, logits_dtype: torch.dtype) -> None:
        """`num_rows` counts the null row at the end, which pads and is never admitted."""
        assert logits_dtype in _NUMPY, f"logits are sampled in float32 or float64, not {logits_dtype}"
        dtype = _NUMPY[logits_dtype]
        self.stages: list[Stage] = [
            MinTokens(num_rows, vocab_size, device),
            Penalties(num_rows, vocab_size, device, dtype),
            Scale(num_rows, device, dtype),
            Truncate(num_rows, vocab_size, device, dtype),
        ]
        self.draw = Draw(num_rows, device)

    def apply(self, plan: StepPlan) -> None:
        for stage in self.stages:
            stage.apply(plan)
        self.draw.apply(plan)

    def flush(self, upload: Upload) -> None:
        for stage in self.stages:
            stage.flush(upload)
        self.draw.flush(upload)

    def prepare(self, plan: StepPlan, upload: Upload) -> Sample:
        """Host, after `apply` and `flush`: this step's device work, for logits of the plan's sampling rows."""
        rows = plan.rows[plan.samples]
        works = [work for stage in self.stages if (work := stage.prepare(rows, upload)) is not None]
        draw = self.draw.prepare(rows, upload)
        logprobs = None if plan.num_logprobs is None else Logprobs(plan.num_logprobs, edited=bool(works))

        def sample(logits: torch.Tensor, batch: SampleBatch) -> SampleOutput:
            failed = logits.amax(-1).isnan()
            raw = logits if logprobs is None else logprobs.keep(logits)
            for work in works:
                work.edit(logits, batch)
            tokens = draw(logits, batch).masked_fill_(failed, 0)
            for work in works:
                if work.drawn is not None:
                    work.drawn(tokens, batch)
            return SampleOutput(tokens, failed, None if logprobs is None else logprobs.report(raw, tokens))

        return sample
