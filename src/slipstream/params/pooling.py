"""PoolingParams: the parameters of one pooling request: task, size and form of its result.

Frozen, and checked in the constructor, as `SamplingParams` is. Checks that need the model (its tasks, the sizes to
which a vector may be truncated) are in `front/pooling_inputs.py`, which also sets `task`: after it no task is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from slipstream.base.errors import InvalidParams
from slipstream.params.values import MAX_COUNT, CheckedNames, check_ids, check_integer, check_turn

Task = Literal["embed", "classify", "token_embed", "token_classify", "sparse"]

TASKS: tuple[Task, ...] = get_args(Task)
TOKEN_TASKS: frozenset[str] = frozenset(("token_embed", "token_classify"))
"""Tasks whose results are matrices, one line per token."""

MAX_QUERY_USES = 2**20
TEXT_LIMITS = ("max_tokens_per_query", "max_tokens_per_doc")


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, metaclass=CheckedNames):
    """Parameters by which the hidden states of one prompt are pooled to a result."""

    task: Task | None = None
    """embed, classify, token_embed, token_classify or sparse; None is the model's first task."""
    dimensions: int | None = None
    """Cut vectors to this size before they are normalised; the model must be trained for it."""
    normalize: bool | None = None
    """Scale vectors to length 1; None is the model's default."""
    activation: bool | None = None
    """Turn class scores into probabilities; None is yes. For vectors it sets `normalize` if that is None."""
    use_activation: bool | None = None
    """Another name for `activation`."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens of the prompt; -1 keeps as many as fit the model length."""
    truncation_side: Literal["right", "left", "never"] = "right"
    """Which end of a prompt that is too long is cut; `never` refuses such a prompt, whatever the model's default."""
    step_tag_id: int | None = None
    """Return only the token scores of this token: one per reasoning step."""
    returned_token_ids: Sequence[int] | None = None
    """Return only these columns of token scores."""
    extra_kwargs: Mapping[str, int] | None = None
    """For score and rerank: `max_tokens_per_query` and `max_tokens_per_doc`, how many tokens of each text are read."""
    skip_tokens: int = 0
    """For vectors and classes: compute the first tokens of the prompt, this many, but do not pool them. Set for texts
    of a folder with `include_prompt: false`."""
    query_key: str = ""
    """Late interaction: the name under which a query's token vectors are stored on the device. The result of a document
    with this name is its score against that query."""
    query_uses: int = 0
    """Late interaction: this request is the query, and this many documents will be scored against it."""
    priority: int = 0
    """Requests with a lower number run first."""
    cache_salt: str = ""
    """Prompts share cached pages only if they have the same salt."""

    def __post_init__(self) -> None:
        if self.task is not None and not (isinstance(self.task, str) and self.task in TASKS):
            raise InvalidParams(f"task is {self.task!r}; give one of {', '.join(TASKS)}, or None", param="task")
        if self.dimensions is not None:
            check_integer("dimensions", self.dimensions, 1, MAX_COUNT)
        for name in ("normalize", "activation", "use_activation"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidParams(f"{name} is {getattr(self, name)!r}; give True, False or None", param=name)
        if None not in (self.activation, self.use_activation) and self.activation is not self.use_activation:
            raise InvalidParams(
                f"activation is {self.activation} and use_activation {self.use_activation}, which mean the same; "
                "leave one out",
                param="activation",
            )
        either = self.activation if self.use_activation is None else self.use_activation
        self._freeze("activation", either)
        self._freeze("use_activation", either)
        if self.truncate_prompt_tokens is not None:
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_COUNT)
            if self.truncate_prompt_tokens == 0:
                raise InvalidParams(
                    "truncate_prompt_tokens is 0, which leaves no prompt; give 1 or more, or -1",
                    param="truncate_prompt_tokens",
                )
        if not isinstance(self.truncation_side, str) or self.truncation_side not in ("right", "left", "never"):
            raise InvalidParams(
                f"truncation_side is {self.truncation_side!r}; give right, left or never", param="truncation_side"
            )
        if self.step_tag_id is not None:
            check_integer("step_tag_id", self.step_tag_id, 0, MAX_COUNT)
        self._freeze("returned_token_ids", check_ids("returned_token_ids", self.returned_token_ids))
        self._check_text_limits()
        check_integer("skip_tokens", self.skip_tokens, 0, MAX_COUNT)
        if self.skip_tokens and self.task not in (None, "embed", "classify"):
            raise InvalidParams(
                f"skip_tokens is {self.skip_tokens} and the task {self.task}, which pools no tokens; leave it out"
            )
        if not isinstance(self.query_key, str):
            raise InvalidParams(f"query_key is {self.query_key!r}; give a string")
        check_integer("query_uses", self.query_uses, 0, MAX_QUERY_USES)
        if self.query_uses and not self.query_key:
            raise InvalidParams(f"query_uses is {self.query_uses} and there is no query_key; name the query")
        if self.query_key and self.task not in (None, "token_embed"):
            raise InvalidParams(
                f"query_key is {self.query_key!r} and the task {self.task}; late interaction compares token vectors, "
                "so use token_embed"
            )
        check_turn(self.priority, self.cache_salt)

    def _check_text_limits(self) -> None:
        if not isinstance(self.extra_kwargs, Mapping | None):
            raise InvalidParams(f"extra_kwargs is {self.extra_kwargs!r:.100}; give an object", param="extra_kwargs")
        for name, limit in (self.extra_kwargs or {}).items():
            if name not in TEXT_LIMITS:
                raise InvalidParams(
                    f"extra_kwargs has {name!r:.100}; it takes {' and '.join(TEXT_LIMITS)}", param="extra_kwargs"
                )
            check_integer(name, limit, 1, MAX_COUNT)
        self._freeze("extra_kwargs", dict(self.extra_kwargs) if self.extra_kwargs else None)

    def _freeze(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)

    @property
    def is_query(self) -> bool:
        return self.query_uses > 0

    @property
    def is_document(self) -> bool:
        """Whether its result is a score against a query that the device keeps."""
        return bool(self.query_key) and not self.query_uses

    @property
    def columns(self) -> tuple[int, ...]:
        return self.returned_token_ids  # type: ignore[return-value]  # made a tuple when built

    def with_changes(self, **changes: Any) -> PoolingParams:
        """A copy that differs in these fields, checked again."""
        if "activation" in changes:
            changes.setdefault("use_activation", changes["activation"])
        if "use_activation" in changes:
            changes.setdefault("activation", changes["use_activation"])
        return msgspec.structs.replace(self, **changes)
