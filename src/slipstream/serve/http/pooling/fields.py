"""The request fields that pooling routes share, and their conversion to PoolingParams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.params.pooling import TASKS, PoolingParams, Task
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.openai.fields import Label, Refused, refuse
from slipstream.serve.http.request import Request


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class PoolFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that are null or absent have the defaults of the model's files."""

    model: Annotated[str | None, _doc("a name from /v1/models; default: the best model for the task")] = None
    truncate_prompt_tokens: Annotated[
        int | None, _doc("keep this many tokens, special ones included; -1: the model's limit")
    ] = None
    truncation_side: Annotated[Literal["left", "right"] | None, _doc("the end at which a long text is truncated")] = (
        None
    )
    priority: Annotated[int | None, _doc("lower values are scheduled first")] = None
    cache_salt: Annotated[str | None, _doc("prompts share cached prefixes only with the same salt")] = None

    user: Label = None
    metadata: Label = None
    request_id: Refused = None
    add_special_tokens: Refused = None
    mm_processor_kwargs: Refused = None


class VectorFields(PoolFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of routes that return vectors or scores."""

    encoding_format: Annotated[
        Literal["float", "base64"] | None, _doc("base64: of little-endian float32; default float")
    ] = None
    dimensions: Annotated[int | None, _doc("truncate vectors to this size (Matryoshka)")] = None
    normalize: Annotated[bool | None, _doc("scale vectors to length 1")] = None
    prompt_name: Annotated[str | None, _doc("name of a prompt of the model, put before each text")] = None
    embed_dtype: Refused = None
    endianness: Refused = None


Input = Annotated[str | list[str | int | list[int]], _doc("a text, a list of token ids, or a list of either")]


class PoolUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_special_tokens": ((True,), "pooling models need special tokens; give token ids to omit them"),
    "mm_processor_kwargs": (({},), "models read text only"),
    "request_id": ((), "send the header X-Request-Id instead"),
    "embed_dtype": (("float32",), "values are float32"),
    "endianness": (("little", "native"), "values are little-endian"),
}
_REFUSED_NAMES = tuple(_REFUSED)


def pooling_params(
    request: Request,
    body: PoolFields,
    pooling: PoolingInfo,
    task: Task | None = None,
    *,
    truncates: bool = False,
    **own: Any,
) -> PoolingParams:
    """Builds PoolingParams. `own`: values of the route beside the shared fields.

    A text that is longer than the model reads is refused, unless the request has a truncation field, the route
    truncates (`truncates`), or the model is a late-interaction model, which truncates by design.
    """
    for name in _REFUSED_NAMES:
        if getattr(body, name, None) is not None:
            refuse({name: getattr(body, name)}, _REFUSED)
    if body.truncate_prompt_tokens is not None:
        keep = body.truncate_prompt_tokens
        own["truncate_prompt_tokens"] = pooling.max_seq_length or -1 if keep == -1 else keep
    if body.priority is not None:
        own["priority"] = body.priority
    if body.cache_salt is not None:
        limit = request.state.settings.max_salt_chars
        if len(body.cache_salt) > limit:
            fact = f"cache_salt has {len(body.cache_salt)} characters, the limit is {limit}"
            raise bad_request(f"{fact}; shorten it or raise --max-salt-chars", "cache_salt")
        own["cache_salt"] = body.cache_salt
    if body.truncation_side is not None:
        if "truncation_side" in own:
            raise bad_request(
                "truncation_side is given with truncation_direction or truncate; remove one of them",
                "truncation_side",
            )
        own["truncation_side"] = body.truncation_side
    elif body.truncate_prompt_tokens is None and not truncates and not pooling.late:
        if not own:
            return _NEVER_TRUNCATED[task]
        own.setdefault("truncation_side", "never")
    return PoolingParams(task=task, **own) if own else _DEFAULT[task]


_NEVER_TRUNCATED: dict[Task | None, PoolingParams] = {
    task: PoolingParams(task=task, truncation_side="never") for task in (None, *TASKS)
}
_DEFAULT: dict[Task | None, PoolingParams] = {task: PoolingParams(task=task) for task in (None, *TASKS)}


def prompts_of(request: Request, given: str | list[Any], name: str = "input") -> tuple[list[Any], int]:
    """Returns a list of prompts and their characters, where one prompt or a list is given. A list of integers is one
    prompt."""
    if isinstance(given, str):
        return [given], len(given)
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given], 0
    if kinds not in ({str}, {list}):
        raise bad_request(
            f"{name} mixes texts and token ids; give a list of one kind" if given else f"{name} is empty; give a text",
            name,
        )
    request.check_count(len(given), name)
    return given, sum(map(len, given))


def size_of(texts: Sequence[str]) -> int:
    return sum(map(len, texts))
