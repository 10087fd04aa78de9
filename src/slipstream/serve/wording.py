"""Rewrites errors of the engine for the command line: options are named as flags."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable


class Flags:
    """Rewrites names of options in a text: max_model_len is --max-model-len, dtype="x" is --dtype x."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    # compiled for the first error: together they take 8 ms

    @functools.cached_property
    def _assigned(self) -> re.Pattern[str]:
        return re.compile(rf"(?<![\w./-])({'|'.join(self._names)})=([\"']?)([\w.]+)\2")

    @functools.cached_property
    def _alone(self) -> re.Pattern[str]:
        # a name of one word may be just that word
        several = "|".join(name for name in self._names if "_" in name)
        return re.compile(rf"(?<![\w./-])({several})(?![\w./])(?!-)")

    def __call__(self, text: str) -> str:
        text = self._assigned.sub(lambda match: _flag(match[1], match[3]), text)
        return self._alone.sub(lambda match: _flag(match[1]), text)


def _flag(name: str, value: str | None = None) -> str:
    flag = name.replace("_", "-")
    if value == "False":
        return f"--no-{flag}"
    return f"--{flag}" if value in (None, "True") else f"--{flag} {value}"
