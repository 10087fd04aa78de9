"""Rewrites error texts of the engine for HTTP clients: field names of the request, flags of the server, JSON values."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slipstream.config.options import Options
from slipstream.serve.wording import Flags

_in_flags = Flags(name for name in Options.__struct_fields__ if "_" in name)
_VALUES = {"True": "true", "False": "false", "None": "null"}
_ASSIGNED = re.compile(r"\b(\w+)=(True|False|None)\b")
_ALONE = re.compile(r"(?<!['\"\w])(True|False|None)(?!['\"\w])")


def in_http(text: str, names: Mapping[str, str]) -> str:
    """`names`: engine parameters that have another name in the request."""
    if names:
        pattern = re.compile(rf"(?<![\w'\"])({'|'.join(map(re.escape, names))})(?![\w'\"])")
        text = pattern.sub(lambda match: names[match[1]], text)
    text = _in_flags(text)
    text = _ASSIGNED.sub(lambda match: f'"{match[1]}": {_VALUES[match[2]]}', text)
    return _ALONE.sub(lambda match: _VALUES[match[1]], text)
