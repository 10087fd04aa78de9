"""Lists of token ids of several lengths: padding, and tensors of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream.errors import InvalidParams

NO_LENGTH = 10**20
"""Transformers stores a larger number, 1e30, for a tokenizer without a maximum length."""


def pad_lists(
    columns: dict[str, list[list[Any]]],
    fillers: Mapping[str, Any],
    padding: bool | str | None,
    limit: int,
    multiple: int | None,
    side: str,
) -> None:
    """Makes the lists of every column as long as the longest of the first column, or, with max_length, as `limit`.
    `multiple`: of which the length is."""
    if padding in (False, "do_not_pad", None):
        return
    if padding not in (True, "longest", "max_length"):
        raise InvalidParams(f"padding is {padding!r:.50}; give True, False, longest or max_length", param="padding")
    first = next(iter(columns))
    if fillers[first] is None:
        raise InvalidParams("the tokenizer has no pad_token; set tokenizer.pad_token, to eos_token for example")
    length = max((len(ids) for ids in columns[first]), default=0)
    if padding == "max_length" and limit <= NO_LENGTH:
        length = max(length, limit)
    if multiple:
        length = -(-length // multiple) * multiple
    for name, lists in columns.items():
        filled = ([fillers[name]] * (length - len(values)) for values in lists)
        pairs = zip(lists, filled, strict=True)
        columns[name] = [fill + values if side == "left" else values + fill for values, fill in pairs]


def make_tensor(value: list[Any], kind: str) -> Any:
    """A tensor of int64: of torch for pt, of numpy for np."""
    torch = sys.modules.get("torch")
    if kind not in ("pt", "np") or (kind == "pt" and torch is None):
        raise InvalidParams(f"return_tensors is {kind!r:.50}; give pt, where torch is loaded, or np")
    try:
        array = np.array(value, np.int64)
    except ValueError:
        raise InvalidParams("texts of several lengths make no tensor; set padding=True") from None
    return array if torch is None or kind == "np" else torch.from_numpy(array)
