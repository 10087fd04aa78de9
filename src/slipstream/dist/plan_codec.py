"""Plans as bytes: integers of all arrays in one block, then msgpack of the rare fields. Pickle is never used.

A decode step has no admissions, scores, pooling or copies of states, so its plan is one concatenation.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from slipstream.contracts.step import (
    AdapterPlan,
    Admission,
    EmbedPlan,
    Ints,
    Late,
    LateBias,
    LogitsEdit,
    PageUpdates,
    PoolPlan,
    PromptScores,
    SitOut,
    StatePlan,
    StepPlan,
    StepSizes,
    TierPlan,
)

_ARRAYS = ("released", "rows", "num_tokens", "lengths", "num_drawn", "num_host_tokens", "tokens", "following")
_HEADER = 7  # integers before the lengths of the arrays
_NONE = -1
_Rest = tuple[
    tuple[Admission, ...],
    PromptScores | None,
    PoolPlan | None,
    StatePlan | None,
    AdapterPlan | None,
    StepSizes | None,
    EmbedPlan | None,
    TierPlan | None,
    Ints | None,
]
_EditedRows = tuple[tuple[int, ...], bool, bool]  # rows, is_scaled and is_batched of a LogitsEdit
_LateFields = tuple[Ints, Ints, LateBias | None, Ints | None, SitOut | None, tuple[_EditedRows, ...]]


def _as_bytes(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent to other ranks")


def _from_bytes(kind: Any, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_encode = msgspec.msgpack.Encoder(enc_hook=_as_bytes).encode
_decode_rest = msgspec.msgpack.Decoder(_Rest, dec_hook=_from_bytes).decode
_decode_late = msgspec.msgpack.Decoder(_LateFields, dec_hook=_from_bytes).decode


def encode_plan(plan: StepPlan) -> bytes:
    arrays = [getattr(plan, name) for name in _ARRAYS]
    for pages in plan.new_pages:
        arrays += (pages.rows, pages.entries, pages.pages)
    arrays.append(plan.copies.reshape(-1))
    shared = plan.adapters, plan.joint_sizes, plan.embeds, plan.tier, plan.catch_up
    parts = (plan.scores, plan.pooling, plan.states, *shared)
    has_rest = bool(plan.admitted) or any(part is not None for part in parts)
    rest = _encode((plan.admitted, *parts)) if has_rest else b""
    header = [
        plan.step & 0x7FFFFFFF,
        plan.step >> 31,
        len(plan.new_pages),
        _NONE if plan.num_logprobs is None else plan.num_logprobs,
        plan.has_drafts | plan.returns_drafts << 1,
        plan.num_proposed,
        len(rest),
        *map(len, arrays),
    ]
    return np.concatenate([np.array(header, np.int32), *arrays], dtype=np.int32).tobytes() + rest


def decode_plan(data: bytes) -> StepPlan:
    """The arrays are views of `data`."""
    header = np.frombuffer(data, np.int32, _HEADER).tolist()
    num_arrays = len(_ARRAYS) + 3 * header[2] + 1
    sizes = np.frombuffer(data, np.int32, num_arrays, 4 * _HEADER).tolist()
    start = 4 * (_HEADER + num_arrays)
    arrays = []
    for size in sizes:
        arrays.append(np.frombuffer(data, np.int32, size, start))
        start += 4 * size
    fixed: dict[str, Any] = dict(zip(_ARRAYS, arrays, strict=False))
    groups = arrays[len(_ARRAYS) : -1]
    rest: Any = ((), *[None] * 8) if not header[6] else _decode_rest(memoryview(data)[start:])
    return StepPlan(
        step=header[0] | header[1] << 31,
        **fixed,
        new_pages=tuple(PageUpdates(*groups[index : index + 3]) for index in range(0, len(groups), 3)),
        copies=arrays[-1].reshape(-1, 3),
        num_logprobs=None if header[3] == _NONE else header[3],
        has_drafts=bool(header[4] & 1),
        returns_drafts=bool(header[4] & 2),
        num_proposed=header[5],
        admitted=rest[0],
        scores=rest[1],
        pooling=rest[2],
        states=rest[3],
        adapters=rest[4],
        joint_sizes=rest[5],
        embeds=rest[6],
        tier=rest[7],
        catch_up=rest[8],
    )


def encode_tier(plan: TierPlan) -> bytes:
    return _encode(plan)


decode_tier = msgspec.msgpack.Decoder(TierPlan, dec_hook=_from_bytes).decode


def encode_late(late: Late) -> bytes:
    edits = [(edit.rows, edit.is_scaled, edit.is_batched) for edit in late.edits]  # the code stays here
    return _encode((late.rows, late.bits, late.bias, late.offsets, late.sit_out, edits))


def decode_late(data: bytes) -> Late:
    rows, bits, bias, offsets, sit_out, edited = _decode_late(data)
    edits = tuple(
        LogitsEdit(rows_of, _not_here, _not_here, is_scaled, is_batched) for rows_of, is_scaled, is_batched in edited
    )
    return Late(rows, bits, bias, edits, offsets, sit_out=sit_out)


def _not_here(value: object) -> Any:
    raise AssertionError("code that edits logits runs on rank 0 only")
