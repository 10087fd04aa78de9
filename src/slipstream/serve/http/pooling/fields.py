"""Fields that pooling routes share, and what they mean to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from slipstream.config.pooling_info import PoolingInfo
from slipstream.pooling_params import TASKS, PoolingParams, Task
from slipstream.serve.http.call import Call
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.openai.fields import Label, Refused, refuse


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class PoolFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is null or left out follows the model's own files."""

    model: Annotated[str | None, _doc("a name from /v1/models; the first that can do it if left out")] = None
    truncate_prompt_tokens: Annotated[
        int | None, _doc("keep so many tokens, special ones included; -1 is what the model takes")
    ] = None
    truncation_side: Annotated[Literal["left", "right"] | None, _doc("which end of a text that is too long is cut")] = (
        None
    )
    priority: Annotated[int | None, _doc("lower goes first")] = None
    cache_salt: Annotated[str | None, _doc("prompts share cached pages only within one salt")] = None

    user: Label = None
    metadata: Label = None
    request_id: Refused = None
    add_special_tokens: Refused = None
    mm_processor_kwargs: Refused = None


class VectorFields(PoolFields, kw_only=True, forbid_unknown_fields=True):
    """Of routes that hand out numbers."""

    encoding_format: Annotated[
        Literal["float", "base64"] | None, _doc("base64 is of little-endian 32-bit numbers; default float")
    ] = None
    dimensions: Annotated[int | None, _doc("cut vectors to so many numbers")] = None
    normalize: Annotated[bool | None, _doc("vectors of length 1 or not")] = None
    prompt_name: Annotated[str | None, _doc("one of the model's prompts, to put before each text")] = None
    embed_dtype: Refused = None
    endianness: Refused = None


Input = Annotated[str | list[str | int | list[int]], _doc("a text, a list of token ids, or a list of either")]


class PoolUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_special_tokens": ((True,), "a pooling model needs its special tokens; give token ids to leave them out"),
    "mm_processor_kwargs": (({},), "models read text alone"),
    "request_id": ((), "send the header X-Request-Id instead"),
    "embed_dtype": (("float32",), "numbers have 32 bits"),
    "endianness": (("little", "native"), "numbers are little-endian"),
}
_REFUSED_NAMES = tuple(_REFUSED)


def pooling_params(
    call: Call, body: PoolFields, pooling: PoolingInfo, task: Task | None = None, *, cuts: bool = False, **own: Any
) -> PoolingParams:
    """`own`: what a route says beside the shared fields.

    A text that is longer than the model reads is refused, unless the request says how it is to be cut, or the route has
    texts cut (`cuts`), or late interaction reads so much of a text by design.
    """
    for name in _REFUSED_NAMES:
        if getattr(body, name, None) is not None:
            refuse({name: getattr(body, name)}, _REFUSED)
    if body.truncate_prompt_tokens is not None:
        most = body.truncate_prompt_tokens
        own["truncate_prompt_tokens"] = pooling.max_seq_length or -1 if most == -1 else most
    if body.priority is not None:
        own["priority"] = body.priority
    if body.cache_salt is not None:
        limit = call.state.settings.max_salt_chars
        if len(body.cache_salt) > limit:
            raise bad_request(f"cache_salt has {len(body.cache_salt)} characters, {limit} are the most", "cache_salt")
        own["cache_salt"] = body.cache_salt
    if body.truncation_side is not None:
        if "truncation_side" in own:
            raise bad_request(
                "truncation_side and truncation_direction, or truncate, are both given; leave one out",
                "truncation_side",
            )
        own["truncation_side"] = body.truncation_side
    elif body.truncate_prompt_tokens is None and not cuts and not pooling.late:
        if not own:
            return _WHOLE[task]
        own.setdefault("truncation_side", "never")
    return PoolingParams(task=task, **own) if own else _PLAIN[task]


_WHOLE: dict[Task | None, PoolingParams] = {
    task: PoolingParams(task=task, truncation_side="never") for task in (None, *TASKS)
}
_PLAIN: dict[Task | None, PoolingParams] = {task: PoolingParams(task=task) for task in (None, *TASKS)}


def prompts_of(call: Call, given: str | list[Any], name: str = "input") -> tuple[list[Any], int]:
    """One prompt or several, and how many characters they have: a list of whole numbers is one of token ids."""
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
    call.check_count(len(given), name)
    return given, sum(map(len, given))


def size_of(texts: Sequence[str]) -> int:
    return sum(map(len, texts))
