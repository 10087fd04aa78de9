"""StepFeature: the interface of everything that takes part in a step besides the model and its heads.

The runner has a list of features, in the order in which they take part. It names none of them: a feature is a file that
implements this interface, and an entry in the list of `build.py`. Examples: page tables, recurrent states, adapters,
given embeddings, the sampler's tables, a drafter with a model, the second cache tier.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from slipstream.contracts.step import DrawEdits, StepPlan
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.runner.staging import Upload


@dataclass(frozen=True, slots=True)
class Size:
    """The size that a step is padded to. With as many tokens as rows, each row has one token."""

    tokens: int
    rows: int
    all_long: bool = False  # no row has exactly one token, so attention skips the search for such rows
    # rows of one token, some of which are positions of one drafted row: attention computes them together
    has_drafts: bool = False
    is_short: bool = False  # one row of up to SHORT_LENGTH tokens

    @property
    def is_single(self) -> bool:
        return self.tokens == self.rows


@dataclass(frozen=True, slots=True)
class Gathered:
    view: BatchView
    rows: torch.Tensor  # [B] int64; empty if rows last for one step only
    # [B] int64, index of the row among those of its drafted row; None: no row has drafts, or some have several tokens
    offsets: torch.Tensor | None = None
    token_rows: torch.Tensor | None = None  # [T] int64, the row of each token; None: rows last for one step only
    sitting: torch.Tensor | None = None  # [sitting] int64, rows that draw nothing; None: all draw
    is_advanced: bool = False  # whether the row table has the lengths after the step already
    graph: Hashable | None = None  # key of the forward, whose graph left this at fixed addresses

    def for_heads(self, graph: Hashable) -> Gathered:
        """Without what only the layers read, so that its memory can be reused. `graph`: key of the forward."""
        old = self.view
        nothing = old.lengths[:0]
        # in every step: `replace` takes ten times as long
        view = BatchView(
            ids=nothing,
            positions=nothing,
            lengths=old.lengths,
            slots=(),
            page_tables=(),
            num_tokens=old.num_tokens,
            max_lengths=old.max_lengths,
            num_single=old.num_single,
            all_long=old.all_long,
            host_ids=old.host_ids,
            max_queries=old.max_queries,
            query_starts=old.query_starts,
            num_seen=old.num_seen,
            host_seen=old.host_seen,
        )
        return Gathered(view, self.rows, self.offsets, graph=graph)


@dataclass(frozen=True, slots=True)
class ForwardPart:
    """The part of a feature in the forward of one step."""

    # Of a captured forward: steps with and without this part, or with different keys, have graphs of their own. None:
    # all steps of a size have this part, or none of its work is captured
    key: Hashable | None = None
    # device, before the model: returns the context with what the feature adds to it
    add: Callable[[Gathered, ForwardContext], ForwardContext] | None = None
    # device, after the model: takes its context and its hidden states
    follow: Callable[[ForwardContext, torch.Tensor], None] | None = None
    # device, after the forward, never captured
    after: Callable[[], None] | None = None


class StepFeature:
    """All methods run on the host, access host memory only, and happen in the order of the steps. What they return is
    work for the device."""

    def captures(self, plan: StepPlan) -> bool:
        """Whether this feature's part of the step has shapes that depend on the size of the step only. If not, the step
        is not padded, and runs eagerly."""
        return True

    def join_forward(self, plan: StepPlan, upload: Upload, size: Size | None) -> ForwardPart | None:
        """Upload what the forward needs of this feature, padded to `size` if there is one; None: nothing.

        Called after the inputs were uploaded, and before any `flush`. A feature uploads arrays whose number and sizes
        depend on `size`, its key and the keys of the features before it only: then all steps of these read the same
        addresses, so that they can be captured. Only the last of the features that join may upload more for `after`.
        """
        return None

    def apply(self, plan: StepPlan) -> None:
        """Drop the state of released rows and add that of admitted rows."""

    def flush(self, upload: Upload) -> None:
        """Queue the changes of this step, after `apply` of all features."""

    def needs_late(self, plan: StepPlan) -> bool:
        """Whether the heads of this step need data of the host that come after the launch, by `send`."""
        return False

    def send(self, late: DrawEdits) -> Callable[[Gathered], Gathered] | None:
        """Queue the copies of data that came after the launch of the forward. The returned work changes the inputs of
        the heads; None: it does not."""
        return None

    def free_queries(self, queries: tuple[int, ...]) -> Callable[[], None] | None:
        """Free stored queries without a step; None: the feature has none."""
        return None

    def close(self) -> None:
        """Free what is not freed with the object. No step follows."""
