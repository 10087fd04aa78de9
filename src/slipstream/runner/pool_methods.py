"""Pooling methods: from the hidden states of a step to one vector per prompt, or to the vectors of its tokens.

Every method with one vector per prompt, except LAST, is computed from a `Reduction` of the prompt's hidden states.
Reductions of two chunks can be combined, so a prompt can be split anywhere. The host decides which are used. Work
over all rows of a step reads the row starts from the device, so that it can be captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from slipstream.checkpoint.pooling_info import Method, PoolingInfo, Reduction, reductions_of
from slipstream.nn.context import BatchView
from slipstream.nn.layers.activations import torch_activation
from slipstream.ops.elementwise import segment_max_into, segment_sum
from slipstream.params.pooling import TOKEN_TASKS, PoolingParams, Task
from slipstream.runner.input_batch import Longs
from slipstream.runner.staging import Upload

TakeHidden = Callable[[torch.Tensor], torch.Tensor]
"""Device: selects some of the hidden states [T, hidden]."""


def pool_all(
    methods: tuple[Method, ...], view: BatchView, hidden: torch.Tensor, skipped: torch.Tensor | None = None
) -> torch.Tensor:
    """Device: one vector for each row of a step that contains all its prompts as a whole. Padding rows have undefined
    vectors.

    `skipped` [at most B]: number of leading tokens of each row that are not pooled.
    """
    if view.query_starts is None and skipped is None:  # one token per row: every method returns it
        return hidden if len(methods) == 1 else torch.cat([hidden] * len(methods), 1)
    starts = starts_of(view, hidden)
    begins = None if skipped is None else begins_of(starts, skipped)
    reduced: dict[Reduction, torch.Tensor] = {}
    if "first" in methods:
        first = starts[:-1]
        if begins is not None:  # a row with skipped tokens only uses its first token
            first = torch.where(begins < starts[1:], begins, first)
        reduced["first"] = hidden.index_select(0, first.clamp(max=len(hidden) - 1))
    for kind in reductions_of(methods):
        if kind != "first":
            reduced[kind] = reduce_rows(kind, view, hidden, starts, begins)
    last = hidden.index_select(0, (starts[1:] - 1).clamp_(min=0)) if "last" in methods else None
    counted = None
    if skipped is not None:
        counted = torch.zeros(len(starts) - 1, dtype=skipped.dtype, device=skipped.device)
        counted[: len(skipped)] = skipped
    return finish_vectors(methods, reduced, last, view.lengths, counted)


def reduce_rows(
    kind: Reduction, view: BatchView, hidden: torch.Tensor, starts: torch.Tensor, begins: torch.Tensor | None
) -> torch.Tensor:
    """Device: the reduction of each row's tokens in this step [B, hidden], at least float32. Not for kind first."""
    if kind == "max":
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        maxima = torch.full((len(starts), hidden.shape[1]), -torch.inf, dtype=dtype, device=hidden.device)
        segment_max_into(maxima, hidden, starts, 0, begins)
        return maxima[:-1]
    if kind == "sum":
        return segment_sum(hidden, starts, begins, None)
    if kind == "weighted":
        origins = view.lengths - (starts[1:] - starts[:-1])  # the position of each row's first token in the step
        return segment_sum(hidden, starts, begins, origins)
    raise ValueError(f"reduce_rows has no case for reduction {kind!r}")


def combine(kind: Reduction, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Device: the reduction of two chunks from the reductions of each. Not for kind first."""
    if kind == "max":
        return torch.maximum(before, now)
    if kind in ("sum", "weighted"):
        return before + now
    raise ValueError(f"combine has no case for reduction {kind!r}")


def finish_vectors(
    methods: tuple[Method, ...],
    reduced: Mapping[Reduction, torch.Tensor],
    last: torch.Tensor | None,
    lengths: torch.Tensor,
    skipped: torch.Tensor | None,
) -> torch.Tensor:
    """Device: from the reductions of whole prompts [N, hidden] to the methods' results, concatenated.

    `lengths` [N]: the prompts' lengths, of which the first `skipped` [N] tokens are not pooled.
    """
    made = [_finish(method, reduced, last, lengths, skipped) for method in methods]
    return made[0] if len(made) == 1 else torch.cat(_alike(made), 1)


def _finish(
    method: Method,
    reduced: Mapping[Reduction, torch.Tensor],
    last: torch.Tensor | None,
    lengths: torch.Tensor,
    skipped: torch.Tensor | None,
) -> torch.Tensor:
    if method == "last":
        assert last is not None
        # zero if all tokens are skipped
        return last if skipped is None else torch.where((skipped < lengths).unsqueeze(1), last, 0)
    if method in ("first", "max"):
        return reduced[method]  # type: ignore[index]
    if method not in ("mean", "mean_sqrt_len", "weightedmean"):
        raise ValueError(f"pooling method {method!r} does not give one vector per prompt")
    sums = reduced["weighted" if method == "weightedmean" else "sum"]
    count = lengths.to(sums.dtype)
    left_out = torch.zeros_like(count) if skipped is None else torch.minimum(skipped.to(sums.dtype), count)
    if method == "weightedmean":
        divisor = (count * (count + 1) - left_out * (left_out + 1)) / 2
    else:
        divisor = count - left_out
    divisor = divisor.clamp(min=1).unsqueeze(1)
    return sums / (divisor.sqrt() if method == "mean_sqrt_len" else divisor)


def _alike(vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Convert all vectors to the widest of their dtypes."""
    dtype = vectors[0].dtype
    for vector in vectors[1:]:
        dtype = torch.promote_types(dtype, vector.dtype)
    return [vector.to(dtype) for vector in vectors]


def starts_of(view: BatchView, hidden: torch.Tensor) -> torch.Tensor:
    """Device: [B + 1] index in the step of each row's first token."""
    if view.query_starts is not None:
        return view.query_starts
    return torch.arange(len(hidden) + 1, dtype=torch.int32, device=hidden.device)


def begins_of(starts: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
    """Device: [B] index of each row's first pooled token, the row's end if there is none. Rows beyond `skipped` skip no
    token."""
    begins = starts[:-1].clone()
    begins[: len(skipped)] += skipped.to(begins.dtype)
    return torch.minimum(begins, starts[1:])


def take_ranges(starts: Sequence[int], counts: Sequence[int], upload: Upload) -> TakeHidden:
    """Host: the tokens of some rows, row after row. Consecutive rows of the step need no copy."""
    first, total = starts[0], sum(counts)
    if starts[-1] + counts[-1] - first == total:
        return lambda hidden: hidden.narrow(0, first, total)
    return take_hidden(np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]), upload)


def take_hidden(indices: Longs, upload: Upload) -> TakeHidden:
    """Host: returns the work that selects the hidden states at these indices."""
    span = upload.put(indices.astype(np.int64))
    return lambda hidden: hidden.index_select(0, upload.tensor(span))


# PoolMode: how a request with given parameters is pooled by this model. Rows of one mode are processed together.

Kind = Literal["vectors", "tokens"]  # one vector per prompt, or per token
Side = Literal["", "query", "document"]


class PoolMode(NamedTuple):
    task: Task
    kind: Kind
    width: int  # elements per vector
    finish: str  # normalize, softmax, sigmoid, identity, or a class of torch.nn
    cut: int | None = None  # keep this many leading elements of a vector
    columns: tuple[int, ...] = ()  # keep these elements of a vector
    step_tag: int | None = None  # only tokens with this id are results
    skips: tuple[int, ...] = ()  # tokens with these ids are no results
    late: Side = ""
    cut_last: bool = False  # truncate after `finish`, not before
    skip: int = 0  # number of leading tokens that are not pooled

    @property
    def picks(self) -> bool:
        """Whether some tokens are left out."""
        return self.step_tag is not None or bool(self.skips)


class PoolModes:
    """The modes of one model. Most requests have parameters that were seen before."""

    def __init__(self, info: PoolingInfo, sparse_by: Literal["token", "vocabulary"] | None, vocab_size: int) -> None:
        self.info = info
        self._sparse_by = sparse_by
        self._vocab_size = vocab_size
        self._known: dict[PoolingParams, PoolMode] = {}

    def of(self, params: PoolingParams) -> PoolMode:
        mode = self._known.get(params)
        if mode is None:
            if len(self._known) > 4096:  # each query has its own key, hence its own parameters
                self._known.clear()
            mode = self._known[params] = self._make(params)
        return mode

    def _make(self, params: PoolingParams) -> PoolMode:
        info, task = self.info, params.task
        assert task in info.tasks, f"task {task} of {info.tasks}: inputs refuse what the model cannot do"
        if task == "sparse":
            by_token = self._sparse_by == "token"
            return PoolMode(task, "tokens" if by_token else "vectors", 1 if by_token else self._vocab_size, "identity")
        kind: Kind = "tokens" if task in TOKEN_TASKS else "vectors"
        if task in ("embed", "token_embed"):
            normalize = params.activation if params.normalize is None else params.normalize
            finish = "normalize" if (info.normalize if normalize is None else normalize) else "identity"
            skip = params.skip_tokens
            if task == "embed" and params.dimensions is None and info.truncate_dim is not None:
                cut = min(info.truncate_dim, info.embed_size)
                cut_last = normalize is None and info.cuts_normalized
                return PoolMode(task, kind, cut, finish, cut, cut_last=cut_last, skip=skip)
            width = params.dimensions or (info.embed_size if task == "embed" else info.token_size)
            if params.query_key:
                late: Side = "query" if params.is_query else "document"
                return PoolMode(task, kind, width, finish, params.dimensions, (), None, _skips(info, late), late)
            return PoolMode(task, kind, width, finish, params.dimensions, skip=skip)
        finish = info.classify_activation if params.activation in (None, True) else "identity"
        step_tag = params.step_tag_id
        by_step = info.methods == ("step",)
        if step_tag is None and by_step:
            step_tag = info.step_tag_id
        columns = params.columns or (info.returned_token_ids if by_step else ())
        if kind == "vectors":
            step_tag, columns = None, ()
        width = len(columns) or info.num_labels
        return PoolMode(task, kind, width, finish, None, columns, step_tag, skip=params.skip_tokens)


def _skips(info: PoolingInfo, late: Side) -> tuple[int, ...]:
    return info.skip_token_ids if late == "document" else ()


# Final operations on pooled results: truncation, normalisation, softmax, sigmoid.


def finish(x: torch.Tensor, mode: PoolMode) -> torch.Tensor:
    """Device: vectors [N, size] to vectors [N, width]. Truncation and column selection come before normalisation; with
    `cut_last` truncation comes last."""
    if mode.cut_last:
        return finish(x, mode._replace(cut=None, cut_last=False))[:, : mode.cut]
    if mode.cut is not None:
        x = x[:, : mode.cut]
    if mode.columns:
        x = torch.stack([x[:, column] for column in mode.columns], 1)
    if mode.finish == "normalize":
        return F.normalize(x, dim=-1)
    if mode.finish == "softmax":
        return x.softmax(-1)
    if mode.finish in ("sigmoid", "identity"):
        return x.sigmoid() if mode.finish == "sigmoid" else x
    made: torch.Tensor = _activation(mode.finish)(x)
    return made


_activation = functools.cache(torch_activation)
