"""check_shape: rejects a model whose layers have impossible sizes, before a kernel or an allocation gets them.

`check_info` looks at the sizes that all models have; these are the ones that a family reads itself from config.json.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from slipstream.base.errors import BadCheckpoint

# maxima far beyond any model, as in check_info
_MOST = 2**24
_MAX = {
    "vocab_size": 2**27,
    "size": 2**27,
    "max_positions": 2**31 - 1,
    "window": 2**31 - 1,
    "length": 2**31 - 1,
    "num_experts": 2**16,
    "num_layers": 2**12,
    "num_streams": 2**8,
    "conv_width": 2**8,
}
# may be 0 although 0 is not the default: no such part, or an index
_FROM_0 = {"q_rank", "active", "rank", "num_buckets", "num_layers"}


def check_shape(architecture: str, shape: Any) -> None:
    """Raises BadCheckpoint for a size or factor anywhere in `shape` that no model has."""
    for field in fields(shape):
        value = getattr(shape, field.name)
        parts: list[Any] = []
        for each in value if isinstance(value, tuple) else (value,):
            if is_dataclass(each):
                if each not in parts:  # most layers are equal
                    parts.append(each)
                    check_shape(architecture, each)
            elif isinstance(each, float) and not math.isfinite(each) and each != field.default:
                raise BadCheckpoint(_wrong(architecture, field.name, each, "must be finite"))
            elif isinstance(each, int) and "int" in str(field.type):  # annotations are texts
                least = 0 if field.default in (0, None, ()) or field.name in _FROM_0 else 1
                most = _MAX.get(field.name, _MOST)
                if isinstance(each, bool) or not least <= each <= most:
                    raise BadCheckpoint(_wrong(architecture, field.name, each, f"must be {least} to {most:,}"))


def _wrong(architecture: str, name: str, value: object, need: str) -> str:
    return f"config.json of {architecture} has a wrong value: {name} is {value}, and {need}; download it again"
