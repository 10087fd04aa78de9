"""PoolMode: how a request with given parameters is pooled by this model. Rows of one mode are processed together."""

from __future__ import annotations

from typing import Literal, NamedTuple

from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.params.pooling import TOKEN_TASKS, PoolingParams, Task

Kind = Literal["vectors", "tokens"]  # one vector per prompt, or per token
Late = Literal["", "query", "document"]


class PoolMode(NamedTuple):
    task: Task
    kind: Kind
    width: int  # elements per vector
    finish: str  # normalize, softmax, sigmoid, identity, or a class of torch.nn
    cut: int | None = None  # keep this many leading elements of a vector
    columns: tuple[int, ...] = ()  # keep these elements of a vector
    step_tag: int | None = None  # only tokens with this id are results
    skips: tuple[int, ...] = ()  # tokens with these ids are no results
    late: Late = ""
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
                late: Late = "query" if params.is_query else "document"
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


def _skips(info: PoolingInfo, late: Late) -> tuple[int, ...]:
    return info.skip_token_ids if late == "document" else ()
