"""The data of a step as layers see it, passed down as an argument: tokens and positions, no requests.

`BatchView` holds the inputs that `runner/input_batch.py` gathered; `ForwardContext` adds the caches, the
attention backend and its metadata, and recurrent states. If only the last hidden state of each row is read, most of the
last layer runs for `LastTokens`, and so do all trailing layers that store nothing between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.ops.gemm.lora import LoraTiles
from slipstream.ops.recurrent import RecurrentSteps


@dataclass(frozen=True, slots=True)
class GivenEmbeddings:
    """Embeddings of some tokens of a step, as requests bring them or as a tower made them of pictures."""

    indices: torch.Tensor  # [E] int64, among the tokens of the step; each once
    values: torch.Tensor  # [E, hidden], of the embedding layer with its scale
    added: torch.Tensor | None = None  # [E, levels, hidden]: level k is added behind layer k (deepstack)

    def write_to(self, x: torch.Tensor) -> None:
        """x: embeddings of all tokens of the step, [T, hidden]."""
        x.index_copy_(0, self.indices, self.values.to(x.dtype))

    def add_to(self, residual: torch.Tensor, layer: int) -> torch.Tensor:
        """`residual` [T, hidden] behind a layer, with what is added there."""
        if self.added is None or layer >= self.added.shape[1]:
            return residual
        return residual.index_add(0, self.indices, self.added[:, layer].to(residual.dtype))


@dataclass(frozen=True, slots=True)
class BatchView:
    """The tokens of one step, packed one row after another, single-token rows first.

    T tokens, B rows. Host values are exact counts or upper bounds; device values are exact.
    """

    # [T] int64 each; empty: embeddings and rope rows were looked up already
    ids: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor  # [B] int64, positions each row has after this step
    # per group: [T] int64, where a token's keys are written: page * page_size + offset; empty: they are written already
    slots: tuple[torch.Tensor, ...]
    page_tables: tuple[torch.Tensor, ...]  # per group: [B, width] int64 pages, width = pages of the longest row

    num_tokens: NDArray[np.int32]  # host [B]
    max_lengths: NDArray[np.int32]  # host [B], at least `lengths`
    num_single: int  # host: leading rows that have one token
    all_long: bool = False  # host: no row has one token

    # [T] int64: token ids from the host, -1: the token that the device drew last, below: a draft; None: not known. Only
    # rows with host token ids complete pages that other rows read in the same step. The positions of a drafted row are
    # rows of one token each here, and each reads the keys of those before it
    host_ids: torch.Tensor | None = None
    max_queries: int = 1  # host: consecutive rows that may be positions of one drafted row, by their host_ids
    # int64, each token's row in the rope table: [T], or [3, T] of its frame, row and column in a model that sees
    # pictures; None: its position
    rope_rows: torch.Tensor | None = None
    query_starts: torch.Tensor | None = None  # [B + 1] int32, first token of each row; None: one token a row
    token_types: torch.Tensor | None = None  # [T] int64, of encoders that distinguish two texts; None: all are 0
    # Number of leading tokens of each row that are seen: the rest attend to the seen tokens, and no token attends to
    # the rest. None: all are seen.
    num_seen: torch.Tensor | None = None  # [B] int32
    host_seen: NDArray[np.int32] | None = None  # host [B], the same
    lora: LoraTiles | None = None  # tokens with an adapter; None: no token of the step has one
    embeds: GivenEmbeddings | None = None  # None: all embeddings are looked up by token id
    last_lora: LoraTiles | None = None  # the same among the last tokens of all rows, if only those are returned


@dataclass(frozen=True, slots=True)
class RelativeScores:
    """Terms added to attention scores before scaling, by the distance from a query to a key.

    Each [T, heads, 2 n - 1], n the longest row: the middle column is for the token itself, the next one for the next
    token.
    """

    of_queries: torch.Tensor  # column (key - query + n - 1) of the query's vector is added
    of_keys: torch.Tensor | None = None  # and the same column of the key's vector


class AttentionBackend(Protocol):
    def make_metadata(self, batch: BatchView, after: Any = None) -> Any:
        """Masks, indices and tile lists that all layers share; made once per step, before the first layer.

        `after`: the metadata of the whole step, if `batch` has only the last token of each row. Both may use the same
        memory, because the metadata of the whole step is not read after the new metadata.
        """

    def forward(
        self,
        query: torch.Tensor,  # [T, heads, head dim]
        key: torch.Tensor | None,  # [T, kv heads, head dim]
        value: torch.Tensor | None,  # [T, kv heads, head dim]
        site: int,
        scale: float,
        context: ForwardContext,
        sinks: torch.Tensor | None = None,  # [heads]
    ) -> torch.Tensor:
        """Attention over the pages of a cache site, which hold the keys and values of this step already. Those of the
        step are passed as well if the caller has them. `sinks` are one more score of each softmax, without a value; the
        site's spec says whether there are any. Returns [T, heads, head dim]."""

    def forward_single(
        self,
        query_key: torch.Tensor,  # [1, heads + kv heads, head dim], before norm and RoPE
        value: torch.Tensor,  # [1, kv heads, head dim]
        norm: torch.Tensor | None,  # [heads + kv heads, head dim], weights of an RMS norm per head
        eps: float,
        rotary: torch.Tensor,  # [1, 2, rotary dim]
        site: int,
        scale: float,
        context: ForwardContext,
    ) -> torch.Tensor | None:
        """Norm, RoPE, cache write and `forward` of a step of one token in one kernel; None if the backend has none for
        this step, as here."""
        return None

    def bidirectional(
        self,
        query: torch.Tensor,  # [T, heads, head dim]
        key: torch.Tensor,  # [T, kv heads, head dim]
        value: torch.Tensor,  # [T, kv heads, head dim]
        scale: float,
        context: ForwardContext,
        reach: int = 0,
        bias: torch.Tensor | None = None,
        relative: RelativeScores | None = None,
    ) -> torch.Tensor:
        """Attention of each token to the tokens of its own row before and after it: all of them, or `reach` to each
        side. No page is read or written. `bias` [heads, 2 n - 1] is added to scores by distance: the middle column is
        for the token itself, the next column for the next token; n is the longest row. `relative` is added before
        scores are scaled. Returns [T, heads, head dim]."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    batch: BatchView
    attention: AttentionBackend
    metadata: Any  # of attention: made by the backend, opaque to layers
    caches: list[Any]  # per site: (keys, values), each [pages, page_size, kv heads, head dim]; see `PagedSpec`
    group_of_site: tuple[int, ...]
    only_last: bool = False  # the model returns the hidden state of each row's last token, [B, hidden]
    rotary: tuple[torch.Tensor, ...] = ()  # per rope of the model: table rows of the step's tokens; set by the model
    layer_inputs: torch.Tensor | None = None  # [T, layers, size], of models with per-layer inputs; set by the model
    recurrent: RecurrentSteps | None = None  # rows, chunks and saves for recurrent mixers; None: the model has none
    states: Sequence[Mapping[str, torch.Tensor]] = ()  # per state site: field name to a view [num_slots, *shape]
    query_scale: torch.Tensor | None = None  # [T, 1, 1], a factor of each token's queries; set by the model
    # embeddings of distances [rows, hidden], and the row of each distance [2 n - 1] (DeBERTa); set by the model
    relative_positions: tuple[torch.Tensor, torch.Tensor] | None = None
    # tokens per engine that layers with shared experts exchange, padded to the most that an engine has, and the same
    # where only the last token of each row is computed; 0: this engine has all experts
    exchanged_tokens: int = 0
    exchanged_last_tokens: int = 0

    def with_rotary(self, rotary: tuple[torch.Tensor, ...]) -> ForwardContext:
        return ForwardContext(
            self.batch,
            self.attention,
            self.metadata,
            self.caches,
            self.group_of_site,
            self.only_last,
            rotary,
            self.layer_inputs,
            self.recurrent,
            self.states,
            self.query_scale,
            exchanged_tokens=self.exchanged_tokens,
            exchanged_last_tokens=self.exchanged_last_tokens,
        )

    def last_indices(self) -> torch.Tensor:
        """[B] int32: the index of each row's last token. Padding rows start at T, so they get the last token of all."""
        starts = self.batch.query_starts
        assert starts is not None, "with one token per row every token is the last"
        return starts[1:] - 1

    def last_tokens(self, with_rotary: bool = False) -> LastTokens:
        """`with_rotary`: whole layers run for the last tokens, so they need rows of the rope tables."""
        batch, indices = self.batch, self.last_indices()
        num_rows = len(batch.lengths)
        alone = BatchView(
            ids=batch.ids[:0],
            positions=batch.positions[:0],
            lengths=batch.lengths,
            slots=(),
            page_tables=batch.page_tables,
            num_tokens=np.ones(num_rows, np.int32),
            max_lengths=batch.max_lengths,
            num_single=num_rows,
            lora=batch.last_lora,
        )
        assert (batch.lora is None) == (batch.last_lora is None), "adapters of the last tokens were not uploaded"
        metadata = self.attention.make_metadata(alone, after=self.metadata)
        context = ForwardContext(
            alone,
            self.attention,
            metadata,
            self.caches,
            self.group_of_site,
            exchanged_tokens=self.exchanged_last_tokens,
        )
        if with_rotary:
            context = context.with_rotary(tuple(rows.index_select(0, indices) for rows in self.rotary))
        if self.layer_inputs is not None:
            context = replace(context, layer_inputs=self.layer_inputs.index_select(0, indices))
        return LastTokens(indices, context)


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The last token of each row, as a step of one token per row whose keys are in the pages already.

    A recurrent mixer must compute all tokens of the step, for its state: it runs with the context of the whole step and
    returns `of` its output. This context therefore has no recurrent states.
    """

    indices: torch.Tensor  # [B] int32, indices into the tokens of the whole step
    context: ForwardContext

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x [T, ...] that belong to the last tokens."""
        return x.index_select(0, self.indices)


def context_of(context: ForwardContext, last: LastTokens | None) -> ForwardContext:
    """The context of layers that run for the `last` tokens, if given, else for all tokens."""
    return context if last is None else last.context
