"""Rules: map the tensor names of a checkpoint to the target names of our model.

A rule is a pair of names in which `{n}` matches one part between dots and `*` matches anything; None as the second name
means that the tensor is not needed. The first matching rule counts. Merged projections need no rule of their own: each
part has its own target (`attention.qkv.q.weight`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping


class Rules:
    def __init__(self, names: Mapping[str, str | None]) -> None:
        self._rules = [(_pattern(stored), target) for stored, target in names.items()]

    def __or__(self, others: Rules) -> Rules:
        """Rules that apply these rules first, then the others."""
        both = Rules({})
        both._rules = self._rules + others._rules
        return both

    def rename(self, name: str) -> str | None:
        """The target of a tensor, or None if it is not needed. Raises KeyError if no rule matches."""
        for pattern, target in self._rules:
            if match := pattern.fullmatch(name):
                return None if target is None else target.format(**match.groupdict())
        raise KeyError(name)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^.]+)", re.escape(name)).replace(r"\*", ".*"))
