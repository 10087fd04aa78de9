"""Stage: a RowState that edits logits before a token is drawn.

A new stage is a file with a subclass, and an entry in `Sampler.stages`: docs/add-a-sampling-stage.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch

from slipstream.contracts.step import Ints
from slipstream.ops.sample import Penalty, TokenMask, mask_bits_
from slipstream.runner.batch.row_state import RowState
from slipstream.runner.batch.staging import Upload


@dataclass(frozen=True, slots=True)
class DrawBatch:
    """The sampling rows of a step on the device, in the plan's order, then padding rows, if any. A row that sits out
    the step (its mask was late) is the padding row here: stages must not take its token as drawn."""

    rows: torch.Tensor  # [S] int64
    positions: torch.Tensor  # [S] int64, of the token to draw; the first token after a prompt of n tokens has n
    # In a step with drafts a row occurs once for each token that it draws.
    offsets: torch.Tensor | None = None  # [S] int64, index among the row's; None: no row has drafts
    # [S, K] int64, drafts that come before the token to draw, in order, then -1; None: no row has drafts
    earlier: torch.Tensor | None = None


Edit = Callable[[torch.Tensor, DrawBatch], None]
"""Device: edits the logits [S, vocabulary] in place."""

Drawn = Callable[[torch.Tensor, DrawBatch, torch.Tensor | None], None]
"""Device: receives the drawn tokens [S] int64, and which of them are accepted [S] bool; None: all."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """The device work of a stage in one step.

    It runs later, on the stream, when the host may be steps ahead: it must not read fields that `apply` changes.
    """

    edit: Edit | None
    drawn: Drawn | None = None  # for stages that depend on the output


PenaltyOf = Callable[[DrawBatch], Penalty]
"""Device: the penalties of the sampling rows."""

MaskOf = Callable[[DrawBatch], TokenMask]
"""Device: the tokens that the draws may choose."""


@dataclass(frozen=True, slots=True)
class ByRow:
    """Work that is the same from step to step: it reads each row's parameters from tables on the device, and does not
    change rows that do not use the stage. So it can be captured, and replayed for any rows under the same key.

    Masks, penalties, temperature and limits are not edits of the logits here: the captured draw applies them in this
    order as it reads the logits, so no edited copy is written. `work.edit` therefore sees logits before all four.
    """

    key: Hashable | None  # differs for other work, for example on a table of another size; None: adds no work
    work: StageWork = StageWork(None)
    needs_sampling_dtype: bool = False  # `work.edit` computes with logits; otherwise they may have the model's dtype
    mask: MaskOf | None = None  # of one stage: `GrammarMask`
    penalty: PenaltyOf | None = None
    limits: torch.Tensor | None = None  # [rows, 3] as `find_floor` takes them; of one stage: `Truncate`

    def with_masked_logits(self) -> ByRow:
        """The same with a mask that edits the logits."""
        mask_of = self.mask
        if mask_of is None:
            return self

        def edit(logits: torch.Tensor, batch: DrawBatch) -> None:
            own = mask_of(batch)
            mask_bits_(logits, own.bits, own.entries.index_select(0, own.index))

        return replace(self, work=replace(self.work, edit=edit), mask=None)


class Stage(RowState):
    @abstractmethod
    def prepare(self, rows: Ints, upload: Upload) -> StageWork | None:
        """Host: the work for these sampling rows; None if none of them uses the stage.

        Called once per step with all sampling rows, after `apply` and `flush`, unless `by_row` is called instead.
        """

    @abstractmethod
    def is_used_by(self, rows: Ints) -> bool:
        """Host: whether any of these sampling rows uses the stage. Changes nothing."""

    def can_capture(self, rows: Ints) -> bool:
        """Host: whether `by_row` can do the work for these sampling rows, some of which use the stage. If not, the step
        runs its head eagerly. Changes nothing."""
        return False

    def by_row(self, rows: Ints) -> ByRow:
        """Host: the work for these sampling rows, as work that can be captured. Called in place of `prepare`, if
        `can_capture` of all stages that these rows use is true."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")
