"""EngineArgs, as scripts for vLLM use it. Imported only where it is used: a dataclass of 239 fields takes 20 ms."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Self

from slipstream.config.options import Options
from slipstream.config.vllm_args import NO_EFFECT, REFUSED, TRANSLATED
from slipstream.frontend.engine_flags import add_engine_flags
from slipstream.frontend.front_end_args import FrontEndArgs

_FRONT_END = (*FrontEndArgs.__struct_fields__, "use_tqdm_on_load", "spec_method", "spec_tokens")
_NAMES = dict.fromkeys(("model", *Options.__struct_fields__, *_FRONT_END, *TRANSLATED, *REFUSED, *NO_EFFECT))

_Args: Any = dataclasses.make_dataclass("_Args", [(name, Any, None) for name in _NAMES])


class EngineArgs(_Args):  # type: ignore[misc]
    """The arguments of `LLM`, for `from_engine_args`. A dataclass; None is the default of each field."""

    def given(self) -> dict[str, Any]:
        """The arguments that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds a flag for each argument to a parser of argparse, and returns the parser."""
        add_engine_flags(parser, _NAMES)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The arguments among those that a parser has read."""
        return cls(**{name: getattr(args, name) for name in _NAMES if hasattr(args, name)})


class AsyncEngineArgs(EngineArgs):
    """The arguments of `AsyncLLM`."""
