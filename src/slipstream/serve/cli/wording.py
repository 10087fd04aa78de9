"""What the command line says of a mistake: in its own words, and with the flag that was probably meant."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from slipstream.config.options import Options
from slipstream.errors import InvalidOption
from slipstream.log import FORMAT
from slipstream.serve.cli.flags import SAMPLING_HELP
from slipstream.serve.http.settings import Settings


class Parser(argparse.ArgumentParser):
    """Names the nearest flag for one it does not know, and knows which command it was given to."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        self._given = list(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return found, unknown

    def error(self, message: str) -> NoReturn:
        if self.prog.endswith(" serve") and asks_for_json(self._given, os.environ):
            raise InvalidOption(message)  # without the usage, which is several lines
        super().error(message)

    def refuse(self, unknown: list[str]) -> NoReturn:
        first = unknown[0].split("=")[0]
        if not first.startswith("-"):
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        near = difflib.get_close_matches(first, self._option_string_actions, n=1)
        hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists the flags"
        self.error(f"there is no flag {first}; {hint}")


def asks_for_json(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether `serve` was told, by a flag or else by the environment, that its log is JSON."""
    style = environ.get(FORMAT)
    for flag, value in zip(argv, [*argv[1:], ""], strict=True):
        if flag == "--log-format":
            style = value
        elif flag.startswith("--log-format="):
            style = flag.partition("=")[2]
    return style == "json"


def in_flags(text: str) -> str:
    """Names of options as the flags that they are here: max_model_len is --max-model-len, dtype="x" is --dtype x."""
    text = _ASSIGNED.sub(lambda match: _flag(match[1], match[3]), text)
    return _ALONE.sub(lambda match: _flag(match[1]), text)


def _flag(name: str, value: str | None = None) -> str:
    flag = name.replace("_", "-")
    if value == "False":
        return f"--no-{flag}"
    return f"--{flag}" if value in (None, "True") else f"--{flag} {value}"


_NAMES = (*Options.__struct_fields__, *Settings.__struct_fields__, *SAMPLING_HELP)
_ASSIGNED = re.compile(rf"(?<![\w./-])({'|'.join(_NAMES)})=([\"']?)([\w.]+)\2")
# a name of one word may be just that word
_ALONE = re.compile(rf"(?<![\w./-])({'|'.join(name for name in _NAMES if '_' in name)})(?![\w./])(?!-)")
