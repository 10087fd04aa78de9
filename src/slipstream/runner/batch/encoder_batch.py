"""EncoderBatch: the inputs of a step of whole prompts. The host knows all token ids, so the device gathers nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from slipstream.contracts.step import NO_POOLING, StepPlan
from slipstream.device.device import Device
from slipstream.nn.context import BatchView
from slipstream.runner.batch.input_batch import Gathered, Size
from slipstream.runner.batch.staging import Upload


class EncoderBatch:
    def __init__(
        self,
        device: Device,
        *,
        with_types: bool,
        with_unseen: bool = False,
        short_rope: tuple[int, int] | None = None,
    ) -> None:
        """`with_types`: the model has token types. `with_unseen`: its queries have tokens that no token attends to.
        Then types and counts are uploaded in every step, so that one captured graph fits every step of a size.
        `short_rope`: the longest prompt that uses LongRoPE's short factors, and their first row in the rope table."""
        self.with_types = with_types
        self.short_rope = short_rope
        self.with_unseen = with_unseen
        self._no_rows = torch.zeros(0, dtype=torch.int64, device=device.torch_device)

    def prepare(self, plan: StepPlan, upload: Upload, size: Size | None = None) -> Callable[[], Gathered]:
        counts, pool_plan = plan.num_tokens, plan.pooling or NO_POOLING
        num_rows, total = len(counts), len(plan.tokens)
        tokens, rows = (total, num_rows) if size is None else (size.tokens, size.rows)
        # padding tokens have id 0 at position 0, and padding rows have no tokens
        # ids, positions, types, rows of the rope table
        num_fields = 2 + self.with_types + (self.short_rope is not None)
        token_span, by_token = upload.room(np.int64, (num_fields, tokens))
        by_token[:, total:] = 0
        ends = np.cumsum(counts, dtype=np.int32)
        starts = np.full(rows + 1, total, np.int32)
        starts[0] = 0
        starts[1 : num_rows + 1] = ends
        begins = plan.lengths - counts  # the position of each row's first token: 0
        positions = by_token[1, :total]
        np.subtract(np.arange(total), np.repeat(ends - counts - begins, counts), out=positions)
        by_token[0, :total] = plan.tokens
        if self.with_types and pool_plan.type_starts is None:
            by_token[2, :total] = 0
        elif pool_plan.type_starts is not None:
            assert self.with_types, "the plan has token types, the model has none"
            np.greater_equal(positions, np.repeat(pool_plan.type_starts, counts), out=by_token[2, :total])
        if self.short_rope is not None:
            longest, first_row = self.short_rope
            by_token[-1, :total] = positions + np.repeat(np.where(plan.lengths > longest, 0, first_row), counts)
        lengths = np.zeros(rows, np.int64)
        lengths[:num_rows] = plan.lengths
        spans = token_span, upload.put(lengths), upload.put(starts)
        assert pool_plan.num_seen is None or self.with_unseen, "the plan hides tokens, the model attends to all"
        seen_span = None
        if self.with_unseen:
            seen = np.zeros(rows, np.int32)
            seen[:num_rows] = plan.lengths if pool_plan.num_seen is None else pool_plan.num_seen
            seen_span = upload.put(seen)
        assert size is None or spans[0].start == 0, "a padded batch comes first"

        def view() -> Gathered:
            tokens, lengths, starts = (upload.tensor(span) for span in spans)
            return Gathered(
                BatchView(
                    ids=tokens[0],
                    positions=tokens[1],
                    lengths=lengths,
                    slots=(),
                    page_tables=(),
                    num_tokens=counts,
                    max_lengths=plan.lengths,
                    num_single=0,
                    query_starts=starts,
                    token_types=tokens[2] if self.with_types else None,
                    rope_rows=None if self.short_rope is None else tokens[-1],
                    num_seen=None if seen_span is None else upload.tensor(seen_span),
                    host_seen=pool_plan.num_seen,
                ),
                self._no_rows,
            )

        return view

    def advance(self, batch: Gathered) -> None:
        """No state lasts longer than the step."""
